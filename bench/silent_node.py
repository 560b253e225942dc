"""`manyhands` without heartbeats, for bench.upkeep only."""

import manyhands.net.liveness
from manyhands.cli import main

if __name__ == "__main__":
    manyhands.net.liveness.HEARTBEAT_S = 1e9
    main()
