"""F17: a swarm whose records say "full" although its nodes have room. In one process, in virtual time."""

import asyncio
import contextlib
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest

from manyhands.checkpoint.manifest import Silent
from manyhands.config import WorkerConfig
from manyhands.core import SamplingParams, Span
from manyhands.engine.library import BLOCK
from manyhands.errors import Busy
from manyhands.member.weights import weights_of
from manyhands.origin import Origin
from manyhands.origin.queue import MAX_RETRY_S, RETRY_S, RoomQueue
from manyhands.testing.clock import run_virtual
from manyhands.testing.tiny import make_tiny
from tests.member.members import Play, Town, player

PROMPT = (3, 4, 5)
SESSIONS = 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("llama", tmp_path_factory.mktemp("full") / "tiny", layers=4, seed=3)


@pytest.fixture
def play(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Play:
    monkeypatch.setenv("MANYHANDS_HOME", str(tmp_path))
    return player(folder, tmp_path, 300)


async def two_halves(place: Town) -> tuple[Any, Any]:
    """Two members with half of the model and room for SESSIONS each."""
    weights = await weights_of(str(place.folder), "bf16", (), place.home, Silent())
    worker, shape, tokens = WorkerConfig(max_sessions=SESSIONS), weights.shape, SESSIONS * 2 * BLOCK
    memory = shape.process_bytes + shape.span_bytes(Span(0, 2), tokens)
    first, second = [(await place.host(i, worker=worker, memory_bytes=memory, tokens=tokens)).member for i in range(2)]
    await first.wait_until(lambda: len({r.node for r in first.records() if r.info and r.info.max_sessions}) == 2, 30)
    return first, second


async def hold(origin: Origin, until: asyncio.Event) -> None:
    """Open a session, take one token, and leave when told."""
    request = origin.request_ids(PROMPT, SamplingParams(max_tokens=64, ignore_eos=True))
    async with contextlib.aclosing(origin.stream(origin.answer(request))) as tokens:
        await anext(tokens)
        await until.wait()


async def ask(origin: Origin, max_tokens: int = 1) -> list[int]:
    request = origin.request_ids(PROMPT, SamplingParams(max_tokens=max_tokens, ignore_eos=True))
    return (await origin.complete(request)).token_ids


def test_after_all_clients_have_left_the_next_is_served_at_once(play: Play) -> None:
    async def scene(place: Town) -> float:
        member, _ = await two_halves(place)
        origin, leave = place.origin(member), asyncio.Event()
        holders = [asyncio.ensure_future(hold(origin, leave)) for _ in range(SESSIONS)]
        await asyncio.sleep(12)  # two beats: by the records every node is full
        busy = [r.load.sessions for r in member.records() if r.info is not None]
        assert busy == [SESSIONS] * 2
        leave.set()
        await asyncio.gather(*holders)
        began = asyncio.get_running_loop().time()
        await ask(origin)
        return asyncio.get_running_loop().time() - began

    assert play(scene) < 0.5


def test_a_request_waits_for_room_and_not_longer_than_its_patience(play: Play) -> None:
    """What another origin frees is found by asking again; where nothing is freed, Busy comes after patience_s."""

    async def scene(place: Town) -> None:
        member, other = await two_halves(place)
        mine, theirs, leave = place.origin(member), place.origin(other), asyncio.Event()
        holders = [asyncio.ensure_future(hold(theirs, leave)) for _ in range(SESSIONS)]
        await asyncio.sleep(12)
        loop = asyncio.get_running_loop()
        began = loop.time()
        with pytest.raises(Busy):
            await ask(mine)
        assert abs(loop.time() - began - mine.node.request.patience_s) < 1
        waits = asyncio.ensure_future(ask(mine))
        await asyncio.sleep(5)
        leave.set()
        began = loop.time()
        await waits
        assert loop.time() - began <= MAX_RETRY_S + 0.5
        await asyncio.gather(*holders)

    play(scene)


def test_of_200_clients_every_one_that_stays_is_answered(play: Play) -> None:
    """40 % leave at random moments, in the queue or in the middle of a stream."""

    async def scene(place: Town) -> None:
        member, _ = await two_halves(place)
        origin, random = place.origin(member), Random(17)
        right = await ask(origin)
        clients = []
        for number in range(200):
            clients.append((asyncio.ensure_future(ask(origin)), number % 5 < 2))
            if random.random() < 0.1:
                await asyncio.sleep(random.uniform(0, 0.5))
        for client, leaves in clients:
            if leaves:
                await asyncio.sleep(random.uniform(0, 0.05))
                client.cancel()
        answers = await asyncio.gather(*(client for client, leaves in clients if not leaves))
        assert answers == [right] * 120
        await asyncio.gather(*(client for client, _ in clients), return_exceptions=True)
        await asyncio.sleep(1)
        assert len(origin.waiting) == 0 and not member.node.sessions
        assert all(host.load.sessions == 0 for host in member.node.hosts)

    play(scene)


# -- the queue by itself ------------------------------------------------------------------------------------------------


class Rooms:
    """What requests compete for; counts how often they asked."""

    def __init__(self, free: int) -> None:
        self.free, self.asked = free, 0
        self.taken: list[int] = []

    async def take(self, client: int) -> int:
        self.asked += 1
        await asyncio.sleep(0.001)
        if not self.free:
            raise Busy("full")
        self.free -= 1
        self.taken.append(client)
        return client


def test_the_queue_is_served_in_order_and_asks_at_a_bounded_rate() -> None:
    async def main() -> None:
        queue, rooms = RoomQueue(), Rooms(0)
        clients = [asyncio.ensure_future(queue.run(partial(rooms.take, i), 100)) for i in range(50)]
        await asyncio.sleep(20)
        assert rooms.asked <= 50 + 20 / RETRY_S and len(queue) == 50
        before = rooms.asked
        for client in clients[:10]:
            client.cancel()
        rooms.free = 5
        queue.released()
        await asyncio.sleep(0.1)
        assert rooms.taken == [10, 11, 12, 13, 14], "one release finds all the room there is"
        assert rooms.asked - before <= 5 + 10 + 2, "who leaves passes its turn on; no other asks"
        rooms.free = 35
        queue.released()
        await asyncio.gather(*clients, return_exceptions=True)
        assert rooms.taken == list(range(10, 50)) and len(queue) == 0

    run_virtual(main())


def test_a_release_while_it_asks_is_not_lost() -> None:
    async def main() -> float:
        queue, rooms = RoomQueue(), Rooms(0)
        client = asyncio.ensure_future(queue.run(lambda: rooms.take(0), 10))
        await asyncio.sleep(0.0015)  # it has been told "full" ...
        rooms.free = 1
        queue.released()
        await client
        other = asyncio.ensure_future(queue.run(lambda: rooms.take(1), 10))
        await asyncio.sleep(0.0005)  # ... or is asking just now
        queue.released()
        await asyncio.sleep(0.0008)
        rooms.free = 1
        await other
        return asyncio.get_running_loop().time()

    assert run_virtual(main()) < RETRY_S


def test_another_error_is_not_waited_out() -> None:
    async def main() -> None:
        async def broken() -> None:
            raise ValueError("no")

        with pytest.raises(ValueError, match="no"):
            await RoomQueue().run(broken, 10)

    run_virtual(main())
