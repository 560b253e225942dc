"""Reads beside the loop: what they return, and how they end when they are cancelled."""

import asyncio
import threading

import pytest

from manyhands.checkpoint.manifest import HashProgress, Silent
from manyhands.weights.reading import read_aside
from tests.waiting import GUARD_S, until


class Counted(Silent):
    """Counts the bytes that are reported."""

    def __init__(self) -> None:
        self.done_bytes = 0

    def advance(self, amount: int) -> None:
        self.done_bytes += amount


def test_it_returns_raises_and_reports_as_the_read_does() -> None:
    counted = Counted()

    def read(told: HashProgress) -> str:
        told.start("reading", 7)
        told.advance(7)
        told.done()
        return "read"

    assert asyncio.run(read_aside(read, counted)) == "read"
    assert counted.done_bytes == 7
    with pytest.raises(ZeroDivisionError):
        asyncio.run(read_aside(lambda told: 1 // 0, counted))


def test_a_cancelled_read_ends_at_its_next_report(caplog: pytest.LogCaptureFixture) -> None:
    """What it holds is put back before who cancelled it goes on."""
    counted, ended = Counted(), threading.Event()

    def read(told: HashProgress) -> None:
        try:
            while True:
                told.advance(1)
        finally:
            ended.set()

    async def main() -> None:
        task = asyncio.ensure_future(read_aside(read, counted))
        await until(lambda: counted.done_bytes)
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled() and ended.is_set()

    asyncio.run(main())
    assert not caplog.records


def test_neither_cancelling_nor_the_end_of_the_loop_waits_for_a_read_that_hangs() -> None:
    begun, ended, may_end = threading.Event(), threading.Event(), threading.Event()
    counted = Counted()

    def read(told: HashProgress) -> None:
        begun.set()
        may_end.wait()
        try:
            told.advance(1)
        finally:
            ended.set()

    async def main() -> None:
        task = asyncio.ensure_future(read_aside(read, counted))
        await until(begun.is_set)
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()

    asyncio.run(main())
    assert not ended.is_set()
    may_end.set()
    assert ended.wait(GUARD_S) and not counted.done_bytes
