"""Lateness of a loop: what counts as a stall, what is forgotten, and the clock that stands still meanwhile."""

import asyncio
import time

import pytest

from manyhands.stalls import GRACE_S, WINDOW_S, Stalls, tick_forever
from manyhands.testing.clock import run_virtual


def ticked(*gaps: float) -> tuple[Stalls, float]:
    """Stalls with a period of 0.25 s after ticks so far apart, and the time of the last."""
    stalls, now = Stalls(100.0), 100.0
    for gap in gaps:
        now += gap
        stalls.tick(now)
    return stalls, now


def test_a_punctual_loop_has_no_stalls() -> None:
    stalls, now = ticked(*[0.25] * 40)
    assert (stalls.count, stalls.total_s, stalls.worst_s(now)) == (0, 0.0, 0.0)
    assert stalls.awake_s(now) == pytest.approx(10.0)


def test_lateness_within_the_grace_is_none() -> None:
    stalls, now = ticked(0.25 + GRACE_S / 2)
    assert stalls.count == 0 and stalls.worst_s(now) == 0.0


def test_the_worst_stall_is_remembered_for_the_window_and_no_longer() -> None:
    stalls, now = ticked(0.25, 2.25, 0.75, 1.25)
    assert stalls.count == 3 and stalls.total_s == pytest.approx(3.5)
    assert stalls.worst_s(now) == pytest.approx(2.0)
    for _ in range(240):  # 60 s: the first stall is out of the window, the last is not
        stalls.tick(now := now + 0.25)
    assert stalls.worst_s(now - 0.25) == pytest.approx(1.0)
    stalls.tick(now := now + 0.25)
    assert stalls.worst_s(now) == 0.0


def test_a_stall_that_goes_on_counts_already() -> None:
    stalls, now = ticked(0.25)
    assert stalls.worst_s(now + 5.25) == pytest.approx(5.0)


def test_the_awake_clock_stands_still_while_the_loop_does_not_run() -> None:
    stalls, now = ticked(0.25, 60.0, 0.25)
    assert stalls.awake_s(now) == pytest.approx(0.75 + GRACE_S)
    assert stalls.awake_s(now + 3600) == pytest.approx(1.0 + 2 * GRACE_S)


def test_memory_is_bounded_by_the_window() -> None:
    stalls, now = ticked()
    for index in range(10_000):  # every stall a little shorter than the one before: none hides another
        stalls.tick(now := now + 1.25 - index * 1e-5)
        stalls.worst_s(now)
    assert len(stalls._late) <= WINDOW_S / stalls.period_s


def test_a_clock_that_stands_or_goes_back_is_no_stall() -> None:
    stalls, now = ticked(0.25)
    assert stalls.tick(now) == 0.0 and stalls.tick(now - 5) == 0.0 and stalls.awake_s(now - 5) <= 0.5


def test_a_pause_on_purpose_is_neither_a_stall_nor_awake() -> None:
    stalls, now = ticked(0.25)
    stalls.resume(now + 100)
    assert stalls.worst_s(now + 100) == 0.0 and stalls.awake_s(now + 100) == pytest.approx(0.25)


def test_a_running_loop_is_measured() -> None:
    """A callback that holds a real loop for 0.2 s is seen with its length."""
    seen: list[float] = []

    async def main() -> None:
        stalls = Stalls(asyncio.get_running_loop().time(), period_s=0.02)
        task = asyncio.create_task(tick_forever(stalls, seen.append))
        await asyncio.sleep(0.05)
        time.sleep(0.2)  # noqa: ASYNC251 - the stall under test
        await asyncio.sleep(0.05)
        task.cancel()

    asyncio.run(main())
    assert max(seen) >= 0.15


def test_virtual_time_has_no_stalls() -> None:
    async def main() -> int:
        stalls = Stalls(asyncio.get_running_loop().time())
        task = asyncio.create_task(tick_forever(stalls))
        await asyncio.sleep(100)
        task.cancel()
        return stalls.count

    assert run_virtual(main()) == 0
