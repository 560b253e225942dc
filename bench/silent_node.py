"""`manyhands` without heartbeats, for bench.upkeep only."""

import manyhands.net.watch
from manyhands.cli import main

if __name__ == "__main__":
    manyhands.net.watch.HEARTBEAT_S = 1e9
    main()
