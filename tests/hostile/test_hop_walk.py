"""Random walks over what members, links and a device without room do to a hop, beside sessions that guess and roll back: their
rows are those of a hop that serves them alone, no one is blamed, and every cache that is alive belongs to what counts it."""

import asyncio
import gc
import random
import time
from functools import partial
from pathlib import Path
from typing import Any, cast
from weakref import WeakSet

import pytest
import torch
from torch import Tensor

from manyhands.config import WorkerConfig
from manyhands.engine.span import Cache
from manyhands.errors import ModelError
from manyhands.net.transport import Link
from manyhands.testing.clock import run_virtual
from manyhands.testing.tiny import make_tiny
from manyhands.wire.handle import adopted_name, proof_of
from manyhands.wire.message import Close, Credit, Extend, Probe, Retract, Step
from manyhands.worker.opening import Opening
from manyhands.worker.session import HopSession
from tests.hostile.test_parked_walk import HANDLE, MEMBER, Book, check
from tests.nightly import daily
from tests.worker.hop import AFTER, NODE, ORIGIN, Hop, hidden, hop, session_id, step
from tests.worker.tensors import decode_tensor

TURNS, WINDOW = 60, 16
HONEST = (1, 2)


@pytest.fixture(scope="module", params=daily(["llama", "qwen3_next"], ["deepseek_v4"]))
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    narrow: dict[str, Any] = {"hc_mult": 1, "mlp_layer_types": ["moe"] * 6} if request.param == "deepseek_v4" else {}
    return make_tiny(request.param, tmp_path_factory.mktemp("hop_walk") / request.param, seed=4, **narrow)


class Honest:
    """A session as its origin and its predecessor drive it. `salts`: of each position sent, which guess of its row."""

    def __init__(self, one: Hop, number: int, draw: random.Random) -> None:
        self.one, self.number, self.draw = one, number, draw
        self.id, self.salts, self.guess, self.num_sent = session_id(number), list[int](), 0, 0
        self.rows = dict[int, Tensor]()  # that came of the present guess
        self.num_read = self.num_paid = 0

    def row(self, position: int) -> Tensor:
        return hidden(1, 10_000 * self.number + 10 * position + self.salts[position])

    @property
    def has_credit(self) -> bool:
        given = sum(credit.steps for credit in self.one.before.of(Credit, self.id))
        return self.num_sent - given < WINDOW

    def read(self) -> None:
        """Take what came to the successor, which pays for some."""
        steps = self.one.after.of(Step, self.id)
        for sent in steps[self.num_read :]:
            if sent.guess == self.guess and sent.payload is not None:
                for index, row in enumerate(decode_tensor(sent.payload, sent.count)):
                    self.rows[sent.position + index] = row
        self.num_read = len(steps)
        if (due := self.num_read - self.num_paid) and self.draw.random() < 0.7:
            self.one.credit(self.number, due)
            self.num_paid = self.num_read

    @property
    def reached(self) -> int:
        """The first position whose row has not come."""
        return next((at for at in range(len(self.salts)) if at not in self.rows), len(self.salts))

    def act(self) -> None:
        self.read()
        if self.draw.random() < 0.3 and self.salts:
            self.roll_back()
        if self.has_credit and len(self.salts) < 200:
            self.send(len(self.salts), self.draw.choice([1, 1, 1, 3, 9, 40]))

    def roll_back(self) -> None:
        """A row that came says that what follows it is guessed wrong."""
        at = self.reached
        if at >= len(self.salts):
            return
        self.guess += 1
        self.salts[at:] = [salt + 1 for salt in self.salts[at:]]
        self.rows = {position: row for position, row in self.rows.items() if position < at}
        if self.draw.random() < 0.5:
            self.one.host.follow(Retract(self.id, 1, self.guess, at), ORIGIN)
        again, self.salts = self.salts[at:], self.salts[:at]
        if self.has_credit:
            self.send(at, len(again), again[0])

    def send(self, position: int, count: int, salt: int = 0) -> None:
        self.salts += [salt] * count
        rows = torch.cat([self.row(at) for at in range(position, position + count)])
        self.one.step(self.number, position, rows, guess=self.guess, committed=self.reached)
        self.num_sent += 1

    @property
    def is_done(self) -> bool:
        self.read()
        return self.reached == len(self.salts)


class Disturbed(Book):
    """A member that does more, on a device that has no room at times."""

    def __init__(self, one: Hop, seed: int, caches: "WeakSet[Any]") -> None:
        super().__init__(one, seed)
        self.caches, self.failing = caches, 0.0
        self.draw_of_device = random.Random(seed)  # asked on its thread
        model = one.host.engine.model
        assert model is not None
        self.runner = cast(Any, model.runner)
        for what in ("fork", "new_cache"):
            setattr(self.runner, what, self.noted(getattr(self.runner, what)))

    def noted(self, make: Any) -> Any:
        def made(*args: Any) -> Any:
            if self.draw_of_device.random() < self.failing:
                raise self.draw_of_device.choice([ModelError("no room"), OSError("no memory")])
            cache = make(*args)
            self.caches.add(cache)
            return cache

        return made

    def act(self) -> None:
        often = (self.open, self.open, self.step, self.step, self.park, self.early, self.guess)
        seldom = (self.close, self.cut, self.wait, self.give_up, self.ask, self.no_room, self.crowd)
        self.draw.choice([*often, *often, *seldom])()

    def crowd(self) -> None:
        """Many Opens at once, on a device that is busy; what they name goes before their turns."""
        self.one.host.engine.device.run(partial(time.sleep, 0.002))
        for _ in range(6):
            self.open()
        if self.draw.random() < 0.5:
            asyncio.get_running_loop().call_soon(self.one.host.parking.clear)

    async def carry_out(self, reserved: Opening) -> None:
        try:
            await self.one.host.open(reserved, cast(Link, self.one.after))
        except Exception:
            self.one.host.abandon(reserved, keep=self.draw.random() < 0.3)
        finally:
            reserved.task = None

    def early(self) -> None:
        """Rows for what is being opened."""
        for opening in list(self.one.host._opening.values())[:2]:
            message = opening.message
            rows = hidden(self.draw.choice([1, 33]))
            given = step(int.from_bytes(message.session, "big"), self.draw.choice([0, 8]), rows, epoch=message.epoch)
            self.one.host.hold(given, cast(Link, self.one.before))

    def guess(self) -> None:
        """A step of another guess, a repetition, or one behind a gap."""
        if mine := self.mine:
            place, rows = self.draw.choice(mine), self.draw.choice([1, 8, 33])
            guess = place._order.guess + self.draw.choice([-1, 0, 1, 5])
            position = max(0, place.received + self.draw.choice([-40, -1, 0, 3]))
            number = int.from_bytes(place.opened.session, "big")
            changes: dict[str, Any] = {"guess": max(0, guess), "epoch": place.opened.epoch}
            self.one.step(number, position, hidden(rows, number), **changes)

    @property
    def mine(self) -> list[HopSession]:
        honest = set(map(session_id, HONEST))
        return [place for (name, _), place in self.one.host._places.items() if name not in honest]

    def give_up(self) -> None:
        """What is being opened ends at once: its task, or its session too."""
        if opening := list(self.one.host._opening.values()):
            one = self.draw.choice(opening)
            if self.draw.random() < 0.5:
                self.one.host.close(Close(one.message.session), one.origin.peer)
            elif one.task is not None:
                one.task.cancel()
                self.one.host.abandon(one, keep=False)

    def ask(self) -> None:
        """Probes, retracts and extends, of any session."""
        number, epoch = self.draw.choice([*HONEST, *self.numbers]), self.draw.choice([1, 1, 2, 3])
        asked: list[Probe | Retract] = [
            Probe(session_id(number), epoch),
            Retract(session_id(number), epoch, self.draw.choice([0, 1, 9]), self.draw.choice([0, 7, 1 << 31])),
        ]
        self.one.host.follow(self.draw.choice(asked), self.draw.choice([MEMBER, AFTER]))
        self.one.host.extend(Extend(session_id(number), epoch, self.draw.choice([64, 256])), MEMBER)

    def no_room(self) -> None:
        self.failing = self.draw.choice([0.0, 0.0, 0.5])


def check_owned(one: Hop, caches: "WeakSet[Any]") -> None:
    """Every cache belongs to a place, to what is parked, to an Open whose lease covers it, or to what the device does now, or
    has just done."""
    host = one.host
    owned: list[Cache | None] = [place.cache for place in host._places.values()]
    owned += [parked.cache for parked, _ in host.parking._parked.values()]
    owned += [opening.parked.cache for opening in host._opening.values() if opening.parked is not None]
    owned += [taken.work.cache for taken in host.engine._on_device]
    known = {id(cache) for cache in owned}
    free = [cache for cache in caches if id(cache) not in known]
    assert len(free) <= 6, f"{len(free)} caches that nothing counts"


@pytest.mark.parametrize("seed", daily(range(3), range(3, 24)))
def test_a_hop_that_is_disturbed_computes_what_it_would_alone(folder: Path, seed: int) -> None:
    caches: WeakSet[Any] = WeakSet()

    async def disturbed() -> list[tuple[Honest, list[Tensor]]]:
        config = WorkerConfig(cache_tokens=4096, max_sessions=64, log_bytes=1 << 20)
        async with hop(folder, config) as one:
            draw = random.Random(seed)
            for number in HONEST:  # others may go on with copies of them
                await one.open(number, 256, adoption=adopted_name(proof_of(HANDLE, NODE)))
            book = Disturbed(one, seed, caches)
            caches.update(place.cache for place in one.host._places.values())
            honest = [Honest(one, number, draw) for number in HONEST]
            for _ in range(TURNS):
                for each in honest:
                    each.act()
                for _ in range(draw.randrange(8)):
                    book.act()
                    check(one)
                    check_owned(one, caches)
                    if draw.random() < 0.4:
                        await asyncio.sleep(draw.choice([0, 0, 0.001]))
            for each in honest:
                await one.until(lambda: each.is_done)  # noqa: B023
            blamed = [fault for fault in one.faults() if fault.session in map(session_id, HONEST)]
            assert not blamed, blamed
            await ended(one, book)
            return [(each, [each.rows[at] for at in range(len(each.salts))]) for each in honest]

    async def alone(each: Honest) -> Tensor:
        async with hop(folder) as one:
            await one.open(each.number, 256)
            for position in range(len(each.salts)):
                one.step(each.number, position, each.row(position))
                one.credit(each.number, 1)
                await asyncio.sleep(0.001)
            await one.until(lambda: sum(s.count for s in one.after.of(Step)) == len(each.salts))
            return one.rows(each.number)

    for each, rows in run_virtual(disturbed()):
        assert len(rows) > 20 and torch.equal(torch.stack(rows), run_virtual(alone(each)))
    gc.collect()  # what ends tasks at random leaves errors that lead to themselves
    assert not list(caches)


async def ended(one: Hop, book: Disturbed) -> None:
    """All sessions end: nothing is left of them."""
    book.failing = 0.0
    for number in (*HONEST, *book.numbers):
        for peer in (ORIGIN, MEMBER, AFTER):
            one.host.close(Close(session_id(number)), peer)
    await asyncio.gather(*book.openings, return_exceptions=True)
    book.openings.clear()
    await one.quiet()
    check(one)
    engine = one.host.engine
    assert not one.host._places and not one.host._opening and not one.logs._logs
    assert not engine._sessions and not engine._copies._turns and not engine._is_busy and not engine._on_device
    one.host.parking.expire(asyncio.get_running_loop().time() + 10_000)
    assert not len(one.host.parking) and one.logs.num_bytes == 0 and one.host.leases.leased_bytes == 0
    del book.runner.fork, book.runner.new_cache
