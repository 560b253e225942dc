"""`manyhands` whose output logs and heartbeats are switched while it runs, and whose logs are timed; for bench.upkeep only.

The processes share the numbers in $MANYHANDS_BENCH_SWITCHED/switch: whether logs are kept, and how many times as often as
usual links are looked at and pinged (0: never). Each writes to a file there, named by its process id, the nanoseconds that it
has spent in its logs, and in the collections of garbage that the steps they keep may cause, and how often it looked at links.
"""

import gc
import mmap
import os
import time
from pathlib import Path
from typing import Any, Final, NamedTuple

from manyhands.cli import main
from manyhands.net import pings, watch
from manyhands.net.liveness import HEARTBEAT_S, TICK_S
from manyhands.net.watch import Watch
from manyhands.wire.message import Step
from manyhands.worker.log import LogBudget, OutputLog

NAMED_BY: Final = "MANYHANDS_BENCH_SWITCHED"
SWITCHED_S: Final = 1.5 * TICK_S  # until each process looks again


class Switch(NamedTuple):
    logs: int
    times: int


class Spent(NamedTuple):
    """Nanoseconds, and a number."""

    logs: int
    collections: int
    looks: int


def numbers(path: Path) -> memoryview:
    """Three numbers (u64), shared by all that map this file."""
    with path.open("a+b") as file:
        file.truncate(24)
        return memoryview(mmap.mmap(file.fileno(), 24)).cast("Q")


def install() -> None:
    """From now on, in this process. What is off costs no more than it takes to see that it is."""
    folder = Path(os.environ[NAMED_BY])
    switch, spent = numbers(folder / "switch"), numbers(folder / str(os.getpid()))
    _time_logs(switch, spent)
    _set_heartbeats(switch, spent)
    began = 0

    def collected(phase: str, _: object) -> None:
        nonlocal began
        if phase == "stop":
            spent[1] += time.perf_counter_ns() - began
        began = time.perf_counter_ns()

    gc.callbacks.append(collected)


def _time_logs(switch: memoryview, spent: memoryview) -> None:
    """All that is done for logs at a step: it is taken note of, and what all logs hold is compared with the bound."""
    append, enforce, clock = OutputLog.append, LogBudget.enforce, time.perf_counter_ns

    def timed_append(self: OutputLog, step: Step) -> None:
        if switch[0]:
            clock()  # once, that it comes from a cache
            began = clock()
            append(self, step)
            took_ns = clock() - began
            spent[0] += took_ns

    def timed_enforce(self: LogBudget) -> None:
        if switch[0]:
            clock()  # once, that it comes from a cache
            began = clock()
            enforce(self)
            took_ns = clock() - began
            spent[0] += took_ns

    patched: Any = OutputLog
    patched.append = timed_append
    patched = LogBudget
    patched.enforce = timed_enforce


def _set_heartbeats(switch: memoryview, spent: memoryview) -> None:
    look = Watch._look

    def look_at_links(self: Watch) -> None:
        times = switch[1]
        patched.TICK_S = TICK_S / max(1, times)
        for each in self._watched:
            each.every_s = HEARTBEAT_S / max(1, times)
        if times:
            spent[2] += 1
            look(self)

    patched: Any = pings
    patched.BURST = 1 << 40  # no flood, however often
    patched = Watch
    patched._look = look_at_links
    patched = watch


if __name__ == "__main__":
    install()
    main()
