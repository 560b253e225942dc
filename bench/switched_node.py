"""`manyhands` whose output logs and heartbeats are switched off and on while it runs, for bench.upkeep only.

What is off stands in the file that $MANYHANDS_BENCH_OFF names ("logs", "heartbeats"); it is read four times a second.
"""

import asyncio
import os
from pathlib import Path
from typing import Any, Final

from manyhands.cli import main
from manyhands.net.liveness import TICK_S
from manyhands.net.watch import Watch
from manyhands.wire.message import Step
from manyhands.worker.log import OutputLog

NAMED_BY: Final = "MANYHANDS_BENCH_OFF"
SWITCHED_S: Final = 2.5 * TICK_S  # until each process has read it


def install() -> None:
    """From now on, in this process. What is off costs no more than it takes to see that it is."""
    path, off = Path(os.environ[NAMED_BY]), set[str]()
    append, look, beat = OutputLog.append, Watch._look, Watch._beat

    def log(self: OutputLog, step: Step) -> None:
        if "logs" not in off:
            append(self, step)

    def look_at_links(self: Watch) -> None:
        off.clear()
        off.update(path.read_text().split())
        if "heartbeats" not in off:
            look(self)

    def ping(self: Watch, pings: asyncio.TaskGroup) -> None:
        if "heartbeats" not in off:
            beat(self, pings)

    patched: Any = OutputLog
    patched.append = log
    patched = Watch
    patched._look, patched._beat = look_at_links, ping


if __name__ == "__main__":
    install()
    main()
