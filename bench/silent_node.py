"""`manyhands` without heartbeats, for bench.upkeep only."""

import manyhands.node
from manyhands.cli import main

if __name__ == "__main__":
    manyhands.node.HEARTBEAT_S = 1e9
    main()
