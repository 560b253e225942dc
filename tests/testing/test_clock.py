"""Virtual time: exact, free, and still while threads work."""

import asyncio
import threading
import time
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import pytest

from manyhands.testing import clock
from manyhands.testing.clock import NothingEnds, run_virtual


def test_sleeping_is_exact_and_free() -> None:
    async def main() -> list[float]:
        loop = asyncio.get_running_loop()
        await asyncio.sleep(3600.25)
        times = [loop.time()]
        await asyncio.sleep(0)
        await asyncio.gather(asyncio.sleep(1), asyncio.sleep(2))
        return [*times, loop.time()]

    begin = time.monotonic()
    assert run_virtual(main()) == [3600.25, 3602.25]
    assert time.monotonic() - begin < 60, "an hour passed in less than a minute"


def test_timers_fire_in_order_and_timeouts_work() -> None:
    async def main() -> list[str]:
        seen: list[str] = []
        loop = asyncio.get_running_loop()
        for delay, name in ((0.3, "c"), (0.1, "a"), (0.2, "b")):
            loop.call_later(delay, seen.append, name)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.25):
                await asyncio.Event().wait()
        return seen

    assert run_virtual(main()) == ["a", "b"]


def test_time_stands_still_while_a_thread_works() -> None:
    async def main() -> float:
        loop = asyncio.get_running_loop()
        release = threading.Event()
        working = loop.run_in_executor(None, release.wait, 5)
        timer = loop.call_later(1, release.set)
        threading.Timer(0.02, release.set).start()
        assert await working
        assert not timer.cancelled() and loop.time() == 0
        await asyncio.sleep(2)
        return loop.time()

    assert run_virtual(main()) == 2


def test_waiting_for_nothing_is_an_error_and_not_a_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clock, "STUCK_S", 0.01)

    async def main() -> None:
        await asyncio.Event().wait()

    with pytest.raises(NothingEnds, match="stuck: every task waits"):
        run_virtual(main())


async def _beat() -> None:
    while True:  # noqa: ASYNC110
        await asyncio.sleep(0.5)


async def _spin() -> None:
    while True:
        await asyncio.wait([asyncio.create_task(asyncio.sleep(0))])


async def _wait_beside(coroutine: Coroutine[Any, Any, None], name: str) -> None:
    async with asyncio.TaskGroup() as group:
        group.create_task(coroutine, name=name)
        await _wait_for_ever()


async def _wait_for_ever() -> None:
    await asyncio.Event().wait()


def test_waiting_beside_timers_that_go_on_ends_at_a_time() -> None:
    with pytest.raises(NothingEnds, match=r"stuck: too long, at 10 virtual s \(limits: 10 s") as raised:
        run_virtual(_wait_beside(_beat(), "heartbeat"), limit_s=10)
    said = str(raised.value)
    assert "2 tasks wait" in said
    assert "heartbeat in _beat (test_clock.py:" in said
    assert "_wait_beside (test_clock.py:" in said
    assert "> Event.wait (locks.py:" in said, "the innermost function that waits"
    assert len(said.splitlines()) == 1


def test_waiting_beside_turns_that_go_on_ends_at_a_number_of_them() -> None:
    with pytest.raises(NothingEnds, match="stuck: too many turns of the event loop, at 0 virtual s") as raised:
        run_virtual(_wait_beside(_spin(), "spinner"), max_turns=1000)
    assert "spinner in _spin (test_clock.py:" in str(raised.value)


def test_tasks_that_refuse_to_be_cancelled_have_a_limit_too() -> None:
    async def stay() -> None:
        while True:
            with suppress(asyncio.CancelledError):
                await asyncio.sleep(1)

    with pytest.raises(NothingEnds, match="stuck: too long, at 11 virtual s"):
        run_virtual(_wait_beside(stay(), "stayer"), limit_s=10)


def test_a_thread_that_does_not_end_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clock, "THREAD_S", 0.02)
    release = threading.Event()

    async def main() -> None:
        await asyncio.gather(_spin(), asyncio.get_running_loop().run_in_executor(own, release.wait))

    with ThreadPoolExecutor(1) as own:
        try:
            with pytest.raises(NothingEnds, match=r"no thread of 1 has ended for 0.02 real s.* tasks wait: "):
                run_virtual(main())
        finally:
            release.set()


def test_many_tasks_are_counted_and_the_first_named() -> None:
    async def main() -> None:
        async with asyncio.TaskGroup() as group:
            for number in range(50):
                group.create_task(_beat(), name=f"beat {number}")

    with pytest.raises(NothingEnds, match=r"51 tasks wait: .*; 31 more$") as raised:
        run_virtual(main(), limit_s=5)
    assert len(str(raised.value)) < 4000
