"""A child process: its pipes, its end, and a start that neither runs on the event loop's thread nor leaves anything behind."""

import asyncio
import os
import sys
import threading
from typing import Any

import pytest
import uvloop

from manyhands.api.preparation import child
from manyhands.api.preparation.child import Child

ECHO = (
    sys.executable,
    "-c",
    "import sys; sys.stdout.write(sys.stdin.readline()); sys.stdout.flush(); sys.stdin.read()",
)


def is_there(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_it_speaks_and_is_gone_when_it_was_ended() -> None:
    async def main() -> None:
        it = await Child.start(ECHO, os.environ)
        it.stdin.write(b"hello\n")
        await it.stdin.drain()
        assert await it.stdout.readline() == b"hello\n" and not it.has_ended
        await it.end()
        assert it.has_ended and not is_there(it.pid)
        await it.end()

    asyncio.run(main())


@pytest.mark.parametrize("is_cancelled", [False, True])
def test_it_starts_beside_the_loop_and_dies_with_who_wanted_it(
    monkeypatch: pytest.MonkeyPatch, is_cancelled: bool
) -> None:
    threads, started, plain, may_go = list[int](), list[Any](), child._start, threading.Event()

    def start(*args: Any) -> Any:
        threads.append(threading.get_ident())
        assert may_go.wait(30)
        started.append(plain(*args))
        return started[0]

    monkeypatch.setattr(child, "_start", start)

    async def main() -> None:
        starting = asyncio.create_task(Child.start(ECHO, os.environ))
        while not threads:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        if is_cancelled:
            starting.cancel()
            await asyncio.sleep(0.01)
        may_go.set()
        if is_cancelled:
            await asyncio.wait((starting,))
        else:
            await (await starting).end()
        assert starting.cancelled() == is_cancelled and not is_there(started[0][0].pid)

    asyncio.run(asyncio.wait_for(main(), 60))
    assert threads != [threading.get_ident()]


def test_no_descriptor_of_another_thread_is_closed() -> None:
    """uvloop closes the descriptors of pipes twice: a thread that opened one in between lost it."""
    troubles, ends = list[OSError](), threading.Event()

    def open_and_close() -> None:
        while not ends.is_set():
            try:
                ours, theirs = os.pipe()
                os.write(theirs, b"x")
                os.read(ours, 1)
                os.close(ours)
                os.close(theirs)
            except OSError as error:
                troubles.append(error)

    async def main() -> None:
        for _ in range(40):
            it = await Child.start((sys.executable, "-S", "-c", ""), os.environ)
            await it.end()

    beside = [threading.Thread(target=open_and_close) for _ in range(3)]
    for thread in beside:
        thread.start()
    try:
        uvloop.run(main())
    finally:
        ends.set()
        for thread in beside:
            thread.join()
    assert not troubles
