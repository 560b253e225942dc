"""A listening socket goes on, whatever happens to single connections that wait before it."""

import asyncio
import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from manyhands.net.admission import PendingLimits, Tokens
from manyhands.net.listener import Listener
from tests.waiting import GUARD_S, until


@asynccontextmanager
async def listener(patience_s: float) -> AsyncIterator[tuple[Listener, Any]]:
    """One that listens, and what connects to it."""
    listening = socket.create_server(("127.0.0.1", 0))
    listening.setblocking(False)
    made = Listener(
        listening, Tokens(bytes(32), os.urandom), lambda connection: None, PendingLimits(100, 50, patience_s)
    )
    task = asyncio.create_task(made.serve())
    callers: list[socket.socket] = []

    def call() -> socket.socket:
        callers.append(socket.create_connection(listening.getsockname()))
        return callers[-1]

    try:
        yield made, call
        assert not task.done(), "it listens on"
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        for caller in callers:
            caller.close()


def ended(caller: socket.socket) -> bool:
    caller.setblocking(False)
    try:
        return caller.recv(10) == b""
    except BlockingIOError:
        return False


def test_a_sweep_that_fails_ends_neither_the_next_nor_the_listening(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def body() -> None:
        async with listener(0.1) as (made, call):
            swept = made.pending.overdue
            faults = iter([RuntimeError("dictionary changed size during iteration")])

            def overdue(now: float) -> list[socket.socket]:
                for fault in faults:
                    raise fault
                return swept(now)

            monkeypatch.setattr(made.pending, "overdue", overdue)
            callers = [call() for _ in range(3)]
            await until(lambda: all(map(ended, callers)))
            last = call()
            await until(lambda: ended(last))
            assert made.num_refused == 4

    asyncio.run(body())
    assert "pending connections could not be swept" in caplog.text


def test_a_descriptor_that_the_loop_will_not_let_go_costs_that_connection_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """uvloop raises RuntimeError where it takes a descriptor for a transport's: in a sweep, and when it is to be watched."""

    async def body() -> None:
        loop = asyncio.get_running_loop()
        stuck: set[int] = set()
        remove, add = loop.remove_reader, loop.add_reader

        def remove_reader(fd: Any) -> bool:
            result = remove(fd)
            if fd.fileno() in stuck:
                raise RuntimeError(f"File descriptor {fd.fileno()} is used by transport")
            return result

        async with listener(GUARD_S) as (made, call):
            patient, callers = made.pending.limits, [call() for _ in range(3)]
            await until(lambda: len(made.pending) == 3)
            monkeypatch.setattr(loop, "remove_reader", remove_reader)
            stuck.update(connection.fileno() for connection in list(made._num_peeked)[:2])
            made.pending.limits = replace(patient, patience_s=0.0)
            await until(lambda: all(map(ended, callers)))
            stuck.clear()
            made.pending.limits = patient

            def add_reader(fd: Any, *args: Any) -> Any:
                if args[0] == made._look:
                    raise RuntimeError("used by transport")
                return add(fd, *args)

            monkeypatch.setattr(loop, "add_reader", add_reader)
            unwatched = call()
            await until(lambda: ended(unwatched))
            assert len(made.pending) == 0
            monkeypatch.undo()
            again = call()
            await until(lambda: len(made.pending) == 1)
            assert not ended(again)

    asyncio.run(body())
