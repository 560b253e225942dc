"""Random books of what members do with parked sessions, beside a session that goes on undisturbed: nothing leaks."""

import asyncio
import random
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from manyhands.config import WorkerConfig
from manyhands.core import NodeId, SessionId
from manyhands.errors import ManyhandsError
from manyhands.net.transport import Link
from manyhands.testing.clock import run_virtual
from manyhands.testing.tiny import make_tiny
from manyhands.wire.handle import adopted_name, proof_of
from manyhands.wire.message import STANDBY, Close, Opened, Step
from manyhands.worker.opening import Opening
from manyhands.worker.parking import MAX_PARKED, OWNER_SHARE
from manyhands.worker.session import HopSession
from tests.nightly import daily
from tests.worker.hop import AFTER, NODE, ORIGIN, Hop, Notes, hidden, hop, opening, session_id

MEMBER, TOTAL = NodeId("0e" * 32), 4096
HANDLE = bytes(range(16))
VICTIM = 1
POSITIONS = [0, 1, 7, 8, 9, 31, 32, 33, 64, 1 << 31]


@pytest.fixture(scope="module", params=daily(["llama", "qwen3_next"], ["deepseek_v4"]))
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    narrow: dict[str, Any] = {"hc_mult": 1, "mlp_layer_types": ["moe"] * 6} if request.param == "deepseek_v4" else {}
    return make_tiny(request.param, tmp_path_factory.mktemp("walk") / request.param, seed=4, **narrow)


class Book:
    """A member, with a second link and a second key, and what it does next."""

    def __init__(self, one: Hop, seed: int) -> None:
        self.one, self.draw = one, random.Random(seed)
        self.links = [Notes(MEMBER), Notes(MEMBER), Notes(AFTER)]
        self.names = [SessionId(bytes([9]) * 15 + bytes([n])) for n in range(4)]
        self.names += [adopted_name(proof_of(HANDLE, NODE)), proof_of(HANDLE, NODE), session_id(VICTIM)]
        self.numbers = range(100, 108)
        self.openings: list[asyncio.Task[None]] = []

    @property
    def mine(self) -> list[HopSession]:
        """Places that are not the undisturbed session's."""
        return [place for (name, _), place in self.one.host._places.items() if name != session_id(VICTIM)]

    def act(self) -> None:
        often, seldom = (self.open, self.step, self.step, self.park), (self.close, self.cut, self.wait)
        self.draw.choice([*often, *often, *often, *seldom])()

    def open(self) -> None:
        """A new session, or a later epoch, that goes on with something, of some length; carried out beside what follows."""
        draw, link = self.draw, self.draw.choice(self.links)
        message = opening(
            draw.choice(self.numbers),
            draw.choice([1, 64, 64, 200]),
            origin=link.peer,
            epoch=draw.choice([1, 1, 1, 2, 3]),
            resume=draw.choice([None, *self.names]),
            resume_until=draw.choice([8, 41, 64, *POSITIONS]),
            replay_from=draw.choice([0, 0, 0, *POSITIONS[:5]]),
            replay_until=draw.choice([0, 0, 0, 0, 0, *POSITIONS]),
            emit_from=draw.choice([0, 0, 0, 8, STANDBY]),
            adoption=draw.choice([None, self.names[4]]),
        )
        try:
            reserved = self.one.host.reserve(message, cast(Link, link))
        except ManyhandsError:
            return
        reserved.task = asyncio.ensure_future(self.carry_out(reserved))
        self.openings.append(reserved.task)

    async def carry_out(self, reserved: Opening) -> None:
        try:
            await self.one.host.open(reserved, cast(Link, self.one.after))
        except ManyhandsError:
            self.one.host.abandon(reserved, keep=False)

    def step(self) -> None:
        """Rows where the session is, or anywhere."""
        if not (mine := self.mine):
            return
        place, rows = self.draw.choice(mine), self.draw.choice([1, 8, 33])
        position = place.received if self.draw.random() < 0.8 else self.draw.choice(POSITIONS[:-1])
        number, committed = int.from_bytes(place.opened.session, "big"), self.draw.choice([position + rows, *POSITIONS])
        self.one.step(number, position, hidden(rows, number), epoch=place.opened.epoch, committed=committed)

    def close(self) -> None:
        self._close(None, 0)

    def park(self) -> None:
        """Under a name of its own or another's, at what is computed, or anywhere; of one that is here, or of any."""
        if (mine := self.mine) and self.draw.random() < 0.8:
            place = self.draw.choice(mine)
            positions = self.draw.choice([place.cache.length, *POSITIONS])
            close = Close(place.opened.session, self.draw.choice(self.names), positions)
            self.one.host.close(close, place.origin.peer)
        else:
            self._close(self.draw.choice(self.names), self.draw.choice(POSITIONS))

    def _close(self, parked_as: SessionId | None, positions: int) -> None:
        """Of a session, or of what is parked under a name: from either key, over any link, also while it is being opened."""
        named = [session_id(VICTIM), *self.names, *map(session_id, self.numbers)]
        self.one.host.close(Close(self.draw.choice(named), parked_as, positions), self.draw.choice(self.links).peer)

    def cut(self) -> None:
        """A link ends, and with one of them the last."""
        link = self.draw.choice(self.links)
        self.one.host.drop_origin(cast(Link, link), is_gone=self.draw.random() < 0.5)

    def wait(self) -> None:
        """Time passes: what is parked may end by age."""
        self.one.host.parking.expire(asyncio.get_running_loop().time() + self.draw.choice([0.0, 100.0]))


def check(one: Hop) -> None:
    """What every table may hold."""
    host, parking = one.host, one.host.parking
    places = host._places.keys() | host._opening.keys()
    assert host.leases._leased.keys() == places
    assert sum(host.leases._leased.values()) + parking.num_positions <= TOTAL
    assert len(parking) <= MAX_PARKED and all(parking.held_by(peer) <= OWNER_SHARE * TOTAL for peer in (MEMBER, AFTER))
    assert len(one.logs._parked) == len(parking) and len(one.logs._logs) == len(host._places)
    assert one.logs.num_bytes == sum(log.num_bytes for log in [*one.logs._logs, *one.logs._parked])
    assert host.engine._sessions.keys() == {session.key for session in host._places.values()}
    assert sorted(host._owners._held) == sorted({place[0] for place in places})


@pytest.mark.parametrize("seed", daily(range(3), range(3, 20)))
def test_books_of_parked_sessions_leak_nothing_and_disturb_none(folder: Path, seed: int) -> None:
    """Parked and gone on with in loops, closed while they are parked or opened, twice at once, over other links, under names
    and at positions that are not theirs."""

    async def main() -> list[torch.Tensor]:
        config = WorkerConfig(cache_tokens=TOTAL, max_sessions=64, log_bytes=1 << 20)
        async with hop(folder, config) as one:
            book = Book(one, seed)
            await one.open(VICTIM, 256, adoption=book.names[4])  # others go on with copies of it
            for turn in range(120):
                await one.until(lambda: turn - one.host.engine.callers.uses[ORIGIN].rows < 8)  # noqa: B023
                one.step(VICTIM, turn, hidden(1, turn), committed=turn + 1)
                one.credit(VICTIM, 1)
                for _ in range(book.draw.randrange(12)):
                    book.act()
                    check(one)
                    if book.draw.random() < 0.3:
                        await asyncio.sleep(0.001)
            await asyncio.gather(*book.openings, return_exceptions=True)
            await one.until(lambda: sum(s.count for s in one.after.of(Step, session_id(VICTIM))) == 120)
            rows = one.rows(VICTIM)
            assert not [fault for fault in one.faults() if fault.session == session_id(VICTIM)]
            answers = [answer for link in book.links for answer in link.of(Opened)]
            assert len(answers) > 20 and any(answer.cached for answer in answers), "the book says little"
            for number in (VICTIM, *book.numbers):
                for peer in (ORIGIN, MEMBER, AFTER):
                    one.host.close(Close(session_id(number)), peer)
            check(one)
            assert not one.host._places and not one.host._opening and not one.logs._logs
            one.host.parking.expire(asyncio.get_running_loop().time() + 10_000)
            assert not len(one.host.parking) and not one.logs._parked and one.logs.num_bytes == 0
            return [rows]

    async def alone() -> torch.Tensor:
        async with hop(folder) as one:
            await one.open(VICTIM, 256)
            for turn in range(120):
                one.step(VICTIM, turn, hidden(1, turn))
                one.credit(VICTIM, 1)
                await asyncio.sleep(0.001)
            await one.until(lambda: sum(s.count for s in one.after.of(Step, session_id(VICTIM))) == 120)
            return one.rows(VICTIM)

    assert torch.equal(run_virtual(main())[0], run_virtual(alone()))
