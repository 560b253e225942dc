"""Copies of caches: a member that opens what it has parked again and again keeps no other from the device."""

import asyncio
import itertools
import threading
import weakref
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar, cast

import pytest

from manyhands.config import WorkerConfig
from manyhands.core import NodeId
from manyhands.errors import Busy, ShardUnavailable
from manyhands.net.transport import Link
from manyhands.testing.clock import run_virtual
from manyhands.testing.tiny import make_tiny
from manyhands.wire.handle import adopted_name, proof_of
from manyhands.wire.message import Close, Fault, Opened, Step
from manyhands.worker.copies import Copies
from manyhands.worker.execute import Device
from manyhands.worker.slot import CopySlot
from tests.hostile.test_parked import name, park
from tests.worker.hop import AFTER, BEFORE, NODE, ORIGIN, Hop, hidden, hop, opening, session_id, step

T = TypeVar("T")
MEMBER = BEFORE
CONFIG = WorkerConfig(max_sessions=100, cache_tokens=1 << 14)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("qwen3_next", tmp_path_factory.mktemp("copies") / "qwen3_next", seed=4)


class Noted:
    """A device that notes what it runs: "step", or whose copy."""

    def __init__(self, one: Hop) -> None:
        self.plain, self.ran = one.host.engine.device, list[str]()
        self.computes_here = False
        model = one.host.engine.model
        assert model is not None
        self._fork, self._step, runner = model.runner.fork, model.runner.step, cast(Any, model.runner)
        runner.fork = lambda source, *args: self._note(str(source.length), self._fork, source, *args)
        runner.step = lambda *args: self._note("step", self._step, *args)
        one.host.engine.device = cast(Device, self)

    def _note(self, what: str, run: Callable[..., T], *args: Any) -> T:
        self.ran.append(what)
        return run(*args)

    def __getattr__(self, attribute: str) -> Any:
        return getattr(self.plain, attribute)


def opens(one: Hop, number: int, parked: int, origin: NodeId) -> "asyncio.Task[None]":
    """An Open that goes on with what is parked, under way."""

    async def begin() -> None:
        one.origin.peer = origin
        await one.open(number, origin=origin, resume=name(parked), resume_until=64)
        one.origin.peer = ORIGIN

    return asyncio.ensure_future(begin())


async def stopped(one: Hop) -> threading.Event:
    """The device waits for it, and keeps nothing of what it did before."""
    begun, held = threading.Event(), threading.Event()

    def hold() -> None:
        begun.set()
        held.wait()

    one.host.engine.device.run(hold)
    await reached(begun)
    return held


async def reached(event: threading.Event) -> None:
    """Wait until a thread has set it, in turns of the event loop: the clock stands still while the device is busy."""
    while not event.is_set():  # noqa: ASYNC110
        await asyncio.sleep(0)


async def twelve_steps(one: Hop, held: threading.Event, opened: "list[asyncio.Task[None]]") -> None:
    """Session 2 decodes, while the device, which is `held`, has Opens to carry out."""
    for _ in range(3):
        await asyncio.sleep(0)
    for position in range(12):
        one.step(2, position, hidden(1, position))
    held.set()
    await asyncio.gather(*opened)


def play(folder: Path, scenario: Callable[[Hop], Awaitable[None]]) -> None:
    async def main() -> None:
        async with hop(folder, CONFIG) as one:
            await scenario(one)

    run_virtual(main())


def test_between_two_copies_a_step_runs_that_waits(folder: Path) -> None:
    """Thirty Opens of one member at once, beside a session that decodes. (All thirty were copied before its next step.)"""

    async def scenario(one: Hop) -> None:
        await park(one, 1, rows=40, origin=MEMBER)
        await one.open(2, capacity=256)
        noted, held = Noted(one), await stopped(one)
        opened = [opens(one, number, 1, MEMBER) for number in range(10, 40)]
        await twelve_steps(one, held, opened)
        assert noted.ran == ["40", "step"] * 12 + ["40"] * 18

    play(folder, scenario)


def test_origins_take_turns(folder: Path) -> None:
    """Another's one copy waits for one of the member's, not for thirty."""

    async def scenario(one: Hop) -> None:
        await park(one, 1, rows=40, origin=MEMBER)
        await park(one, 2, rows=8, origin=AFTER)
        noted, held = Noted(one), await stopped(one)
        opened = [opens(one, number, 1, MEMBER) for number in range(10, 40)]
        opened.append(opens(one, 50, 2, AFTER))
        for _ in range(3):
            await asyncio.sleep(0)
        held.set()
        await asyncio.gather(*opened)
        assert noted.ran.index("8") <= 2 and len(noted.ran) == 31

    play(folder, scenario)


def test_copies_that_are_not_wanted_any_more_are_not_made(folder: Path) -> None:
    """The member closes each session at once: what has not begun does not, and what waits behind goes on."""

    async def scenario(one: Hop) -> None:
        await park(one, 1, rows=40, origin=MEMBER)
        noted, held = Noted(one), await stopped(one)
        one.origin.peer = MEMBER
        opened = [opens(one, number, 1, MEMBER) for number in range(10, 40)]
        for task in opened:
            await asyncio.sleep(0)
            task.cancel()
        one.origin.peer = ORIGIN
        for number in range(10, 40):
            one.host.close(Close(session_id(number)), MEMBER)
        last = opens(one, 50, 1, MEMBER)
        await asyncio.sleep(0)
        held.set()
        await last
        assert noted.ran.count("40") <= 2 and one.host.num_sessions == 1
        one.step(50, 40, hidden(1, 3))
        await one.until(lambda: len(one.after.of(Step, session_id(50))) == 1)

    play(folder, scenario)


def test_who_waits_for_a_copy_hears_that_the_span_is_served_no_more(folder: Path) -> None:
    async def scenario(one: Hop) -> None:
        await park(one, 1, rows=40, origin=MEMBER)
        held = await stopped(one)
        opened = [opens(one, number, 1, MEMBER) for number in (10, 11, 12)]
        await asyncio.sleep(0)
        one.host.engine.stop()
        held.set()
        answers = await asyncio.gather(*opened, return_exceptions=True)
        assert any(isinstance(answer, ShardUnavailable) for answer in answers)
        with pytest.raises(ShardUnavailable):
            await opens(one, 13, 1, MEMBER)
        one.host.engine.start()

    play(folder, scenario)


@pytest.mark.parametrize("is_served", [False, True])
def test_who_waits_for_a_copy_keeps_no_memory_of_which_others_have_the_room(folder: Path, is_served: bool) -> None:
    """Opens of small leases that name what is parked, or served, and is dropped before their turns. (Their caches stayed until
    then, beside the leases that took their room and filled it: a step runs between two copies.)"""
    proof = proof_of(bytes(range(16)), NODE)

    async def scenario(one: Hop) -> None:
        await park(one, 1, rows=40, origin=MEMBER)
        if is_served:
            await one.open(2, 256, adoption=adopted_name(proof))
            one.step(2, 0, hidden(130), committed=130)
            await one.until(lambda: sum(sent.count for sent in one.after.of(Step, session_id(2))) == 130)
        else:
            await park(one, 2, capacity=256, rows=130, origin=MEMBER)
        found = one.host._places.values() if is_served else [parked for parked, _ in one.host.parking._parked.values()]
        (cache,) = [weakref.ref(each.cache) for each in found if each.cache is not None and each.cache.length == 130]
        del found
        held = await stopped(one)
        one.origin.peer = MEMBER
        changes: dict[str, Any] = {"origin": MEMBER, "resume": proof if is_served else name(2), "resume_until": 130}
        opened = [opens(one, 10, 1, MEMBER), asyncio.ensure_future(one.open(11, 64, **changes))]
        for _ in range(5):
            await asyncio.sleep(0)
        one.origin.peer, was_there = ORIGIN, cache() is not None
        one.host.close(Close(session_id(2)), ORIGIN)
        one.host.parking.clear()
        await asyncio.sleep(0)
        is_there = cache() is not None
        held.set()
        await asyncio.gather(*opened)
        assert was_there and not is_there
        assert one.origin.of(Opened, session_id(11))[-1].cached == 0

    play(folder, scenario)


def test_a_copy_that_is_given_up_while_it_runs_counts_until_it_ends(folder: Path) -> None:
    """A member closes at once what it opens, and opens the next. (That was copied too before the step that waited.)"""

    async def scenario(one: Hop) -> None:
        await park(one, 1, rows=40, origin=MEMBER)
        await one.open(2, capacity=256)
        noted, begun, held = Noted(one), threading.Event(), threading.Event()
        fork = noted._fork

        def slow(*args: Any) -> Any:
            begun.set()
            held.wait()
            return fork(*args)

        cast(Any, noted)._fork = slow
        first = opens(one, 10, 1, MEMBER)
        await reached(begun)
        first.cancel()
        await asyncio.sleep(0)
        one.host.close(Close(session_id(10)), MEMBER)
        second = opens(one, 11, 1, MEMBER)
        for _ in range(5):
            await asyncio.sleep(0)
        one.step(2, 0, hidden(1, 3))
        for _ in range(5):
            await asyncio.sleep(0)
        held.set()
        await second
        await one.until(lambda: len(noted.ran) == 3)
        assert noted.ran == ["40", "step", "40"] and one.host.num_sessions == 2

    play(folder, scenario)


def test_rows_that_are_dropped_while_a_copy_is_waited_for_refuse_the_open(folder: Path) -> None:
    """(Its session was open without them, and the sender of the next rows was blamed for a gap.)"""

    async def scenario(one: Hop) -> None:
        await park(one, 1, rows=40)
        held = await stopped(one)
        message = opening(11, resume=name(1), resume_until=40)
        reserved = one.host.reserve(message, cast(Link, one.origin))
        opened = asyncio.ensure_future(one.host.open(reserved, cast(Link, one.after)))
        await asyncio.sleep(0)
        while not reserved.early.is_short:
            assert one.host.hold(step(11, 40, hidden(24)), cast(Link, one.before))
        held.set()
        with pytest.raises(Busy, match="not held any more"):
            await opened
        assert one.host.abandon(reserved, keep=False) and not one.origin.of(Fault, session_id(11))

    play(folder, scenario)


def test_a_copy_answers_as_before(folder: Path) -> None:
    async def scenario(one: Hop) -> None:
        await park(one, 1, rows=40)
        await opens(one, 10, 1, ORIGIN)
        assert one.origin.of(Opened, session_id(10))[-1].cached == 40

    play(folder, scenario)


def test_spans_of_one_device_copy_in_turn_and_a_step_waits_for_one_copy(folder: Path) -> None:
    """Three spans with ten Opens each, and a session that decodes on the first. (Each span had a copy on its way at a time: a
    step waited for as many as the device has spans.)"""

    async def scenario(one: Hop) -> None:
        device = one.host.engine.device
        async with hop(folder, CONFIG, device) as two, hop(folder, CONFIG, device) as three:
            spans, ran = (one, two, three), list[str]()
            for each in spans:
                await park(each, 1, rows=40, origin=MEMBER)
            await one.open(2, capacity=256)
            for name, each in zip("abc", spans, strict=True):
                noted = Noted(each)
                noted.ran = Named(name, ran)  # type: ignore[assignment]
                noted._fork = lasting(noted._fork)
            held = await stopped(one)
            opened = [opens(each, number, 1, MEMBER) for number in range(10, 20) for each in spans]
            await twelve_steps(one, held, opened)
            await one.until(lambda: len(ran) == 42)
            steps = [index for index, what in enumerate(ran) if what == "a step"]
            assert len(steps) == 12
            assert all(after - before <= 2 for before, after in itertools.pairwise(steps)), ran
            copies = [what[0] for what in ran if what != "a step"]
            for name in "abc":
                turns = [index for index, who in enumerate(copies) if who == name]
                assert all(after - before <= 4 for before, after in itertools.pairwise(turns)), copies

    play(folder, scenario)


def lasting(fork: Callable[..., T]) -> Callable[..., T]:
    """Copies that take some turns of the event loop, as large ones do: what a step brought is dealt with meanwhile."""
    loop = asyncio.get_running_loop()

    def slow(*args: Any) -> T:
        over = threading.Event()

        def turn(left: int) -> None:
            loop.call_soon(turn, left - 1) if left else over.set()

        loop.call_soon_threadsafe(turn, 20)
        over.wait()
        return fork(*args)

    return slow


class Named:
    """A list of what devices run, with the span."""

    def __init__(self, name: str, ran: list[str]) -> None:
        self._name, self._ran = name, ran

    def append(self, what: str) -> None:
        self._ran.append(f"{self._name} {what}")


def test_turns_that_were_given_up_are_passed_over() -> None:
    async def main() -> None:
        copies = Copies(CopySlot(), list[None]().clear)
        turns = [copies.add(ORIGIN), copies.add(ORIGIN), copies.add(AFTER)]
        turns[0].cancel()
        assert copies.next(steps_wait=True) is turns[2], "origins take turns"
        copies.is_over()
        assert copies.next(steps_wait=True) is None, "a step waits"
        copies.step_runs()
        assert copies.next(steps_wait=True) is turns[1]
        copies.is_over()
        assert copies.next(steps_wait=False) is None and not copies._turns

    run_virtual(main())


def test_nothing_is_kept_of_turns_that_were_given_up() -> None:
    """However many are asked for and given up while one step runs."""

    async def scenario() -> None:
        copies, wanted = Copies(CopySlot(), list[None]().clear), NodeId("wanted")
        turn = copies.add(wanted)
        for number in range(10_000):
            copies.add(NodeId(f"origin {number % 100}")).cancel()
            copies.add(wanted).cancel()
        await asyncio.sleep(0)
        assert {origin: len(turns) for origin, turns in copies._turns.items()} == {wanted: 1}
        assert copies.next(steps_wait=False) is turn
        assert copies.next(steps_wait=False) is None and repr(copies) == "<Copies of 0 origins>"

    asyncio.run(scenario())
