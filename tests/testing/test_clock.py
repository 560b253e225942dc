"""Virtual time: exact, free, and still while threads work."""

import asyncio
import threading
import time

import pytest

from manyhands.testing import clock
from manyhands.testing.clock import run_virtual


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

    with pytest.raises(RuntimeError, match="stuck: every task waits"):
        run_virtual(main())
