"""Blocking calls beside the loop: their value, their error, and an end that does not wait for them."""

import asyncio
import contextlib
import threading
from collections.abc import Iterator

import pytest

from manyhands.aside import aside, entered_aside
from tests.waiting import GUARD_S


def test_it_returns_and_raises_what_the_call_does() -> None:
    assert asyncio.run(aside(divmod, 7, 2)) == (3, 1)
    with pytest.raises(ZeroDivisionError):
        asyncio.run(aside(divmod, 7, 0))


def test_neither_cancelling_nor_the_end_of_the_loop_waits_for_a_call_that_hangs() -> None:
    ended, may_end = threading.Event(), threading.Event()

    def hang() -> None:
        may_end.wait()
        ended.set()

    async def main() -> None:
        task = asyncio.ensure_future(aside(hang))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()

    asyncio.run(main())  # would not return with asyncio.to_thread
    assert not ended.is_set()
    may_end.set()
    assert ended.wait(GUARD_S)


def test_what_waits_for_the_disk_is_entered_and_left_beside_the_loop() -> None:
    """Left as well where the block fails."""
    threads: list[int] = []

    @contextlib.contextmanager
    def file() -> Iterator[str]:
        threads.append(threading.get_ident())
        try:
            yield "held"
        finally:
            threads.append(threading.get_ident())

    async def main() -> None:
        async with entered_aside(file()) as held:
            assert held == "held" and len(threads) == 1
            raise KeyError

    with pytest.raises(KeyError):
        asyncio.run(main())
    assert len(threads) == 2 and threading.get_ident() not in threads
