"""Adoption of warm hops: the handle is a capability. Guessed, replayed, shown elsewhere, late, twice at once, or with a last
hop that sends what it likes: without it nothing is adopted, with it the text is the same."""

import asyncio
import contextlib
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from manyhands.api.event_id import BadEventId
from manyhands.api.run import Ask, Caller
from manyhands.api.streams import Streams
from manyhands.config import WorkerConfig
from manyhands.core import EndsAt, NodeId, SamplingParams, SessionId, Span
from manyhands.origin.adoption import Adoption
from manyhands.origin.route import Resume
from manyhands.testing.faults import Faults
from manyhands.testing.tiny import make_tiny
from manyhands.wire.handle import adopted_name, proof_of
from manyhands.wire.message import Close, Opened, Step
from manyhands.worker.bounds import RowBounds
from manyhands.worker.log import LogBudget, OutputLog
from manyhands.worker.parking import MAX_PARKED, MAX_PARKED_PER_OWNER, ORPHANED_S, PARKED_S, Parked, Parking
from manyhands.worker.session import HopSession
from tests.hostile.test_parked import name
from tests.hostile.test_parked import play as play_hop
from tests.origin.scenes import PROMPT, ids_of, play, swarm_of
from tests.origin.test_adoption import HANDLE, LONG, another, begin, go_on, marks_of, rows_run
from tests.worker.hop import AFTER, NODE, ORIGIN, Hop, hidden, session_id
from tests.worker.hop import step as step_of

PROOF = proof_of(HANDLE, NODE)
TOLD = adopted_name(PROOF)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("qwen3", tmp_path_factory.mktemp("adopted") / "qwen3", seed=3)


async def serve(one: Hop, number: int, rows: int = 8, **changes: Any) -> None:
    """A session of a stream that has computed some rows."""
    await one.open(number, adoption=TOLD, **changes)
    one.step(number, 0, hidden(rows, number), reply_from=rows, committed=rows)
    await one.until(lambda: bool(one.after.of(Step, session_id(number))))


async def adopt(one: Hop, number: int, shown: SessionId, until: int = 8, origin: NodeId = AFTER, **changes: Any) -> int:
    """What a session of another origin that shows this begins with."""
    one.origin.peer = origin
    await one.open(number, origin=origin, resume=shown, resume_until=until, **changes)
    one.origin.peer = ORIGIN
    return one.origin.of(Opened, session_id(number))[-1].cached


# -- the handle -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", ["parked", "orphaned", "live"])
def test_only_the_proof_of_this_hop_adopts(folder: Path, state: str) -> None:
    """Not the name that the hop was told, not the handle itself, not another hop's proof, no guess, not on other layers."""

    async def scenario(one: Hop) -> None:
        await serve(one, 1)
        if state == "parked":
            one.host.close(Close(session_id(1), name(1), 8), ORIGIN)
        elif state == "orphaned":
            one.host.drop_origin(one.origin, is_gone=True)  # type: ignore[arg-type]
            assert len(one.host.parking) == 1 and one.host.num_sessions == 0
        draw = random.Random(1)
        guesses = [SessionId(draw.randbytes(16)) for _ in range(20)]
        wrong = [TOLD, SessionId(HANDLE), proof_of(HANDLE, AFTER), session_id(1), adopted_name(TOLD), name(1), *guesses]
        for number, shown in enumerate(wrong, 10):
            assert await adopt(one, number, shown) == 0
        assert await adopt(one, 50, PROOF, span=Span(3, 4)) == 0
        assert await adopt(one, 51, PROOF, ends="edges") == 0
        assert await adopt(one, 52, PROOF, until=9) == 8  # more than was computed
        assert await adopt(one, 53, PROOF) == 8
        assert await adopt(one, 54, PROOF) == 8  # again: another copy
        one.host.close(Close(PROOF), AFTER)  # to have the proof is not to own it
        one.host.close(Close(TOLD), AFTER)
        assert await adopt(one, 55, PROOF) == 8

    play_hop(folder, scenario, max_sessions=100, cache_tokens=1 << 14)


def test_what_was_closed_is_gone(folder: Path) -> None:
    """An origin that closes its session without the wish to keep it leaves nothing to adopt, whatever is shown."""

    async def scenario(one: Hop) -> None:
        await serve(one, 1)
        one.host.close(Close(session_id(1)), ORIGIN)
        assert await adopt(one, 2, PROOF) == 0
        await serve(one, 3)
        one.host.close(Close(session_id(3), TOLD, 8), ORIGIN)
        one.host.close(Close(TOLD), ORIGIN)
        assert await adopt(one, 4, PROOF) == 0 and not one.logs._parked

    play_hop(folder, scenario)


def test_ids_of_events_give_each_choice_and_stream_a_handle_of_its_own() -> None:
    """A cut id, another swarm's and another key's give none; two streams of one name do not share one."""
    ask = Ask("m", "chat", [1, 2], SamplingParams())
    ann, secret = Caller("ann", tenant="a"), b"of the swarm" * 3

    def handle(streams: Streams, index: int, claim: Any = None) -> bytes:
        made = streams.open(claim, b"r" * 8, ann, 1, 3, "0" * 32).ask(index, ask).adoption
        assert made is not None
        return made.handle

    here, there = Streams(secret), Streams(secret)
    stream = here.open(None, b"r" * 8, ann, 1, 3, "0" * 32)
    event: Any = stream._with_id(b"")
    line = event.splitlines()[0].removeprefix(b"id: ").decode()
    handles = [stream.ask(index, ask).adoption.handle for index in range(3)]  # type: ignore[union-attr]
    assert [handle(there, index, there.claim(line, ann)) for index in range(3)] == handles
    others = [handle(here, 0), handle(here, 0), handle(Streams(b"another swarm" * 3), 0)]
    assert len({*handles, *others}) == 6
    for streams, text, caller in (
        (there, line[:-4], ann),
        (there, line, Caller("bob", tenant="b")),
        (Streams(), line, ann),
    ):
        with pytest.raises(BadEventId):
            streams.claim(text, caller)


# -- guesses -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_last", [False, True])
@pytest.mark.parametrize("state", ["orphaned", "live", "shed"])
def test_guesses_are_neither_parked_nor_lent(folder: Path, state: str, is_last: bool) -> None:
    """Windows of guesses that nothing has proven yet are in the cache, and in the last hop's log, when the origin is lost: an
    adopter that asks for as many positions gets those that the origin had committed, and no row of the others."""
    hop = 2 if is_last else 1

    async def scenario(one: Hop) -> None:
        await one.open(1, adoption=TOLD, hop=hop)
        for position, rows, committed in (
            (0, 8, 8),
            (8, 4, 9),
            (12, 2, 9),
        ):  # a prompt, a token and three guesses, two more
            one.step(1, position, hidden(rows, position), hop=hop, reply_from=min(position, 7), committed=committed)
        place = one.host.find(session_id(1), hop, 1)
        assert place is not None
        await one.until(lambda: place.cache.length == 14 and place.computed == 14)
        if state != "live":
            one.host.drop_origin(one.origin, is_gone=True)  # type: ignore[arg-type]
        if state == "shed":
            one.host.parking.shrink(0)
        asked: Any = {"hop": hop, "replay_from": 7, "replay_until": 12} if is_last else {}
        assert await adopt(one, 2, PROOF, until=12, **asked) == (0 if state == "shed" else 9)
        adopted = one.host.find(session_id(2), hop, 1)
        assert adopted is not None and adopted.cache.length == (0 if state == "shed" else 9)
        again = one.after.of(Step, session_id(2))
        assert [(step.position, step.count) for step in again] == ([(7, 2)] if is_last and state != "shed" else [])

    play_hop(folder, scenario)


def test_where_a_session_begins_whose_hops_have_kept_different_lengths() -> None:
    """At the least of them; a hop with less than half of the longest is rebuilt; one that claims more than was asked for has
    that."""

    def begin(*cached: int) -> tuple[int, list[bool]]:
        hops: Any = [SimpleNamespace(cached=one, is_whole=True) for one in cached]
        return Resume(name(1), 40, ()).begin(hops), [hop.is_whole for hop in hops]

    assert begin(40, 33, 40) == (33, [True, True, True])
    assert begin(40, 33, 0) == (33, [True, True, False])
    assert begin(40, 3, 1) == (40, [True, False, False])
    assert begin(1 << 31, 40, 1 << 31) == (40, [True, True, True])
    assert begin(9, 8, 9) == (8, [True, True, True])
    assert begin(0, 0) == (0, [True, True])


# -- two at once, the old one still there -----------------------------------------------------------------------------


def test_two_adopters_at_once_and_the_old_origin_alive(folder: Path) -> None:
    """Its client came back elsewhere, twice, before anyone noticed that it was gone: each has a copy of its own, and the old
    attempt tells the same text to its end."""

    async def main() -> None:
        async with swarm_of(folder, "0-2,3-5") as swarm, another(swarm) as second, another(swarm, "third") as third:
            wanted = await ids_of(swarm, PROMPT, LONG)
            answer = swarm.origin.answer(swarm.origin.request_ids(PROMPT, LONG))
            stream = swarm.origin.stream(answer, adoption=Adoption(HANDLE))
            for _ in range(9):
                await anext(stream)
            before = rows_run(swarm)
            copies = await asyncio.gather(go_on(second, LONG, answer, 9), go_on(third, LONG, answer, 9))
            assert [(copy.token_ids, copy.redrawn, copy.cached_tokens) for copy in copies] == [
                (wanted, 9, len(PROMPT))
            ] * 2
            done = [now - then for now, then in zip(rows_run(swarm), before, strict=True)]
            assert all(rows <= 3 * (len(wanted) - 8) for rows in done), done  # what each still lacked
            rest = [token.id async for token in stream]
            assert rest == wanted[9:]

    play(main)


def test_hops_that_have_not_noticed_a_death_lend_what_they_serve(folder: Path) -> None:
    """The old origin's machine lost its power: for some seconds its links look as if they stood."""

    async def main() -> None:
        faults = Faults()
        async with swarm_of(folder, "0-2,3-5", wrap=faults.wrap) as swarm:
            wanted = await ids_of(swarm, PROMPT, LONG)
            async with another(swarm, "first", faults.wrap) as first, another(swarm, "second", faults.wrap) as second:
                answer = first.answer(first.request_ids(PROMPT, LONG))
                stream = first.stream(answer, adoption=Adoption(HANDLE))
                for _ in range(7):
                    await anext(stream)
                faults.freeze(first.node)
                rest = await go_on(second, LONG, answer, 7)
                assert (rest.token_ids, rest.redrawn) == (wanted, 7)
                faults.die(first.node)
                with contextlib.suppress(Exception):
                    await stream.aclose()

    play(main)


# -- a last hop that sends what it likes ------------------------------------------------------------------------------


def _filled(step: Step, byte: bytes) -> Step:
    assert step.payload is not None
    return step._replace(payload=step.payload._replace(data=byte * len(bytes(step.payload.data))))


Forgery = Callable[[list[Step]], list[Step]]
FORGERIES: dict[str, tuple[EndsAt, Forgery]] = {
    "not numbers": ("origin", lambda steps: [_filled(step, b"\xff") for step in steps]),
    "nothing": ("origin", lambda steps: []),
    "too much": ("origin", lambda steps: [*steps, *steps]),
    "too little": ("origin", lambda steps: [step._replace(count=1, payload=_first(step)) for step in steps]),
    "elsewhere": ("origin", lambda steps: [step._replace(position=step.position + 1) for step in steps]),
    "beyond": ("origin", lambda steps: [step._replace(position=1 << 20) for step in steps]),
    "ids for rows": ("origin", lambda steps: [step._replace(content="ids") for step in steps]),
    "no ids": ("edges", lambda steps: [_filled(step, b"\x7f") for step in steps]),
    "an end in the middle": ("edges", lambda steps: [_filled(step, b"\x00") for step in steps]),
}


def _first(step: Step) -> Any:
    assert step.payload is not None
    data = bytes(step.payload.data)
    return step.payload._replace(data=data[: len(data) // step.count])


@pytest.mark.parametrize("forgery", FORGERIES)
def test_rows_that_cannot_be_cost_the_last_hop_its_place(
    folder: Path, forgery: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It says that it has the rows, and sends others: another hop takes its place, and the text is the same."""
    ends, forge = FORGERIES[forgery]
    params = replace(LONG, logprobs=None, stop_ids=(0,))
    plain = HopSession._replay

    def replay(session: HopSession, until: int) -> bool:
        said = plain(session, until)
        if session.is_last and session.opened.resume is not None and session.opened.replay_until:
            box = session.outbox
            box.send_again(forge([box.send_next() for _ in iter(lambda: bool(box), False)]))
            return True
        return said

    async def main() -> None:
        async with swarm_of(folder, "0-2,3-5", spares=["0-5"], ends=ends) as swarm, another(swarm) as other:
            wanted = await ids_of(swarm, PROMPT, params)
            assert 0 not in wanted
            cut = await begin(swarm.origin, params, 9)
            monkeypatch.setattr(HopSession, "_replay", replay)
            answer = await go_on(other, params, cut, 9)
            assert answer.token_ids == wanted and answer.repairs

    play(main)


# -- memory -----------------------------------------------------------------------------------------------------------


def test_a_live_request_takes_the_room_and_leaves_the_rows(folder: Path) -> None:
    """All caches have to go for one lease; the tokens are still drawn from the last hop's rows, and computed in one piece."""

    async def main() -> None:
        worker = WorkerConfig(cache_tokens=128)
        async with swarm_of(folder, "0-1,2-3,4-5", worker=worker) as swarm, another(swarm) as other:
            wanted = await ids_of(swarm, PROMPT, LONG)
            cut = await begin(swarm.origin, LONG, 20)
            await asyncio.sleep(0.1)
            large = replace(LONG, max_tokens=128 - len(PROMPT), seed=1)
            tokens = other.stream(other.answer(other.request_ids(PROMPT, large)))
            await anext(tokens)
            for node in swarm.hops:
                assert node.hosts[0].parking.num_positions == 0 and node.hosts[0].info.free_tokens == 0
            await tokens.aclose()
            steps = [node.hosts[0].engine.steps_run for node in swarm.hops]
            answer = await go_on(other, LONG, cut, 20)
            assert (answer.token_ids, answer.redrawn, answer.cached_tokens) == (wanted, 20, 0)
            run = [node.hosts[0].engine.steps_run - before for node, before in zip(swarm.hops, steps, strict=True)]
            assert all(num < 10 for num in run), run  # one of the prefill, four of the tokens that were not drawn yet

    play(main)


def parked(
    number: int, owner: NodeId, capacity: int = 8, *, adoption: SessionId | None = None, rows: bool = False
) -> Parked:
    log = OutputLog(begins_late=rows)
    log.append(step_of(number, 0, hidden(4)))
    return Parked(owner, Span(0, 1), "origin", capacity, capacity, None, log, capacity, RowBounds(), (), adoption)


def test_what_is_kept_for_adoption_alone_costs_no_conversation_its_room() -> None:
    """A flood of streams without a tenant, and of owners that come, park and vanish: parked conversations stay, and what the
    flood holds is bounded in number, positions, bytes and time."""
    logs = LogBudget(1 << 20)
    parking, room = Parking(logs), 64
    parking.park(name(0), parked(0, ORIGIN), room, 128, 0.0)
    for number in range(1, 600):
        told = adopted_name(name(number))
        owner = NodeId(f"{number:064x}") if number % 2 else ORIGIN
        parking.park(told, parked(number, owner, adoption=told, rows=number % 3 > 0), room, 128, 0.1 * number)
        parking.orphan(owner, 0.1 * number) if number % 2 else None
        assert parking.num_positions <= room and len(parking) <= MAX_PARKED and len(logs._parked) == len(parking)
        mine = [one for one, _ in parking._parked.values() if one.owner == ORIGIN]
        assert len(mine) <= MAX_PARKED_PER_OWNER
    now = 60.0
    assert parking.find(name(0), Span(0, 1), ORIGIN, "origin", now) is not None
    parking.expire(now + ORPHANED_S)
    assert len(parking) == 1 and len(logs._parked) == 1
    parking.expire(now + PARKED_S)
    assert len(parking) == 0 and not logs._parked


def test_the_longer_of_two_that_are_kept_for_one_stream_stays() -> None:
    """Two origins had it, one after the other: which of their hops' links ends last does not matter."""
    for lengths in ((4, 8), (8, 4)):
        logs = LogBudget(1 << 20)
        parking = Parking(logs)
        for number, capacity in enumerate(lengths):
            parking.park(TOLD, parked(number, NodeId(f"{number:064x}"), capacity, adoption=TOLD), 64, 64, 0.0)
        found = parking.find(PROOF, Span(0, 1), NODE, "origin", 1.0)
        assert found is not None and found.positions == 8 and len(parking) == len(logs._parked) == 1


def test_a_stream_of_a_proof_refreshes_nothing_for_ever() -> None:
    """Asked for again and again, what is kept for adoption stays for two minutes after the last time, behind the others."""
    parking = Parking(LogBudget(0))
    parking.park(TOLD, parked(1, ORIGIN, adoption=TOLD), 64, 64, 0.0)
    parking.park(name(2), parked(2, ORIGIN), 64, 64, 0.0)
    for now in (60.0, 120.0, 180.0):
        assert parking.find(PROOF, Span(0, 1), AFTER, "origin", now) is not None
        assert next(iter(parking._parked)) == (TOLD, Span(0, 1))
    assert parking.find(PROOF, Span(0, 1), AFTER, "origin", 181.0 + ORPHANED_S) is None


def test_a_wrong_handle_costs_what_no_handle_costs(folder: Path) -> None:
    """Row for row and step for step: to ask is to learn nothing, of a stream that is parked or of none."""

    async def main() -> None:
        async with swarm_of(folder, "0-2,3-5") as swarm, another(swarm) as other:
            cut = await begin(swarm.origin, LONG, 9)
            await asyncio.sleep(0.1)
            marks, counts = marks_of(cut), []
            await other.complete(other.request_ids(range(100, 200), LONG))  # how chunks are cut is learnt
            for adoption in (Adoption(b"x" * 16, marks, 9), Adoption(b"y" * 16), None):
                before = [(h.engine.steps_run, h.engine.rows_run) for n in swarm.hops for h in n.hosts]
                await other.complete(other.request_ids(PROMPT, LONG), adoption=adoption)
                await asyncio.sleep(0.1)
                after = [(h.engine.steps_run, h.engine.rows_run) for n in swarm.hops for h in n.hosts]
                counts.append([(y[0] - x[0], y[1] - x[1]) for x, y in zip(before, after, strict=True)])
            assert counts[0] == counts[1] == counts[2]

    play(main)


def test_streams_that_go_on_again_and_again_leave_nothing_behind(folder: Path) -> None:
    """Forty streams, each cut and adopted: no hop, no origin and no log budget holds more than what may be parked."""

    async def main() -> None:
        params = replace(LONG, logprobs=None, max_tokens=4)
        async with swarm_of(folder, "0-2,3-5") as swarm, another(swarm) as other:
            for number in range(40):
                handle = number.to_bytes(16, "big")
                answer = swarm.origin.answer(swarm.origin.request_ids(PROMPT, params))
                async with contextlib.aclosing(swarm.origin.stream(answer, adoption=Adoption(handle))) as stream:
                    await anext(stream)
                await go_on(other, params, answer, 1, handle=handle)
            await asyncio.sleep(0.1)
            for node in swarm.hops:
                host = node.hosts[0]
                assert not (host._places or host._places._by_hop or host._opening or host.engine._sessions)
                assert 0 < len(host.parking) <= 2 * MAX_PARKED_PER_OWNER and len(host._owners._held) == 0
                assert len(node.worker.logs._parked) == len(host.parking) and not node.worker.logs._logs
            assert not swarm.origin.node.requests.active and not other.node.requests.active

    play(main)
