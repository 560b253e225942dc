"""Blocking calls beside the loop: their value, their error, and an end that does not wait for them."""

import asyncio
import threading

import pytest

from manyhands.aside import aside
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
