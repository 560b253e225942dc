"""The loop watchdog: how often it wakes, and what it counts."""

import asyncio
import contextlib

from manyhands.api.http.watchdog import IDLE_PERIOD_S, PERIOD_S, Watchdog
from manyhands.testing.clock import VirtualClockLoop, run_virtual


def looks(with_clients: bool, seconds: float) -> int:
    """How often a watchdog looks at an undisturbed loop."""
    seen: list[bool] = []

    def has_clients() -> bool:
        seen.append(with_clients)
        return with_clients

    async def scene() -> Watchdog:
        watchdog = Watchdog()
        task = asyncio.create_task(watchdog.run(has_clients))
        await asyncio.sleep(seconds)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        return watchdog

    assert run_virtual(scene()).buckets()[-1] == ("+Inf", 0.0)
    return len(seen)


def test_without_clients_it_wakes_seldom() -> None:
    assert abs(looks(with_clients=True, seconds=10) - 10 / PERIOD_S) <= 2
    assert abs(looks(with_clients=False, seconds=10) - 10 / IDLE_PERIOD_S) <= 2


def test_a_stall_counts_whether_there_are_clients_or_not() -> None:
    """The loop's time jumps by 3 s: the timer was late by that, less what was left of its period."""

    async def scene(with_clients: bool) -> Watchdog:
        watchdog = Watchdog()
        task = asyncio.create_task(watchdog.run(lambda: with_clients))
        await asyncio.sleep(1.001)
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualClockLoop)
        loop._jump(3.0)
        await asyncio.sleep(1.0)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        return watchdog

    for with_clients, period_s in ((True, PERIOD_S), (False, IDLE_PERIOD_S)):
        watchdog = run_virtual(scene(with_clients))
        assert watchdog.buckets()[-1][1] == 1.0
        assert 3.0 - period_s <= watchdog.worst_s <= 3.0 and watchdog.total_s == watchdog.worst_s
