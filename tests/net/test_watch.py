"""Links that a move to another network leaves behind, in virtual time."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, cast

import pytest

from manyhands.net.liveness import FOUND_S, PROBE_S, TICK_S, LinkEvidence
from manyhands.net.watch import Watch
from manyhands.testing.clock import run_virtual


class Line:
    """A link of one pair of nodes, from 10.0.0.1; while it is `cut` nothing is acknowledged, else pings are answered."""

    peer, lane = "a" * 64, "data"

    def __init__(self) -> None:
        self.is_cut = self.is_closed = False

    def line(self) -> LinkEvidence:
        return LinkEvidence(0, True, 0, self.is_cut, local_host="10.0.0.1")

    def ping(self) -> asyncio.Future[float]:
        answered: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        if not self.is_cut:
            answered.set_result(0.01)
        return answered

    def send(self, message: Any) -> None:
        pass

    def abort(self, reason: str) -> None:
        self.is_closed = True


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The addresses of this machine."""
    hosts = {"10.0.0.1"}
    monkeypatch.setattr("manyhands.net.watch.is_own", hosts.__contains__)
    return hosts


async def add(watch: Watch, *lines: Line) -> None:
    """None has ended after a while."""
    for line in lines:
        watch.add(cast(Any, line))
    await asyncio.sleep(2 * TICK_S)
    assert not any(line.is_closed for line in lines)


def play(scene: Callable[[Watch], Coroutine[Any, Any, None]]) -> None:
    """`scene` beside a watch that runs."""

    async def main() -> None:
        watch, first = Watch(lambda: ()), Line()
        first.peer = "b" * 64
        watch.add(cast(Any, first))
        running = asyncio.create_task(watch.run())
        await scene(watch)
        running.cancel()
        await asyncio.wait([running])

    run_virtual(main())


def test_links_end_with_the_address_that_they_go_from(own: set[str]) -> None:
    async def scene(watch: Watch) -> None:
        line = Line()
        await add(watch, line)
        own.clear()
        await asyncio.sleep(2 * TICK_S)
        assert line.is_closed

    play(scene)


def test_a_dead_link_ends_soon_when_its_peer_has_called_anew(own: set[str]) -> None:
    """One that is well stays beside the new one."""

    async def scene(watch: Watch) -> None:
        dead, well, new = Line(), Line(), Line()
        well.lane = "control"
        await add(watch, dead, well)
        dead.is_cut = True
        await add(watch, new)
        await asyncio.sleep(PROBE_S + 2 * TICK_S)
        assert dead.is_closed
        await asyncio.sleep(2 * FOUND_S)
        assert not well.is_closed and not new.is_closed

    play(scene)


def test_after_a_move_dead_links_end_soon_and_others_stay(own: set[str]) -> None:
    async def scene(watch: Watch) -> None:
        dead, well = Line(), Line()
        well.peer = "c" * 64
        await add(watch, dead, well)
        dead.is_cut = True
        watch.moved()
        await asyncio.sleep(PROBE_S + 3 * TICK_S)
        assert dead.is_closed
        await asyncio.sleep(2 * FOUND_S)
        assert not well.is_closed

    play(scene)
