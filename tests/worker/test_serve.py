"""manyhands.worker.serve: leases before acceptance, one session's error is that session's, credits, eviction."""

import asyncio
import logging
import math
import threading
from collections.abc import Awaitable, Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from manyhands.config import WorkerConfig
from manyhands.core import ORIGIN_HOP, Span
from manyhands.errors import BadRequest, Busy, ContextOverflow, Draining, LinkClosed, WeightsMismatch
from manyhands.net.transport import Link
from manyhands.testing.clock import run_virtual
from manyhands.testing.tiny import make_tiny
from manyhands.wire.message import STANDBY, Close, Credit, Opened, Payload, Probe, Progress, Retract, Step
from manyhands.wire.timings import TIMING
from manyhands.worker.execute import Result, SpanModel, Work
from manyhands.worker.session import HopSession
from manyhands.worker.thread import computing
from tests.worker.hop import AFTER, BEFORE, ORIGIN, Hop, Notes, hidden, hop, opening, session_id
from tests.worker.tensors import decode_tensor

Scenario = Callable[[Hop], Awaitable[None]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("llama", tmp_path_factory.mktemp("hop") / "llama", seed=4)


def play(folder: Path, scenario: Scenario, **config: Any) -> None:
    """Run a scenario against a fresh hop under the virtual clock."""

    async def main() -> None:
        async with hop(folder, WorkerConfig(**config)) as one:
            await scenario(one)

    run_virtual(main())


async def computed(one: Hop, number: int, count: int) -> None:
    """Wait until the successor has `count` steps of a session."""
    await one.until(lambda: len(one.after.of(Step, session_id(number))) >= count)


# -- before acceptance ------------------------------------------------------------------------------------------------


def test_too_many_sessions_are_refused_before_they_are_accepted(folder: Path) -> None:
    """Busy comes from `reserve`, with the limit; nothing is leased by the refused one, and a close makes room."""

    async def scenario(one: Hop) -> None:
        await one.open(1)
        one.host.reserve(opening(2), cast(Link, one.origin))  # being opened counts
        with pytest.raises(Busy, match="2 sessions, the limit"):
            one.host.reserve(opening(3), cast(Link, one.origin))
        assert one.host.info.free_tokens == 1000 - 128
        one.host.close(Close(session_id(2)), ORIGIN)
        one.host.reserve(opening(3), cast(Link, one.origin))

    play(folder, scenario, max_sessions=2, cache_tokens=1000)


@pytest.mark.parametrize("full", [{"max_sessions": 1}, {"cache_tokens": 100}])
def test_a_session_is_not_refused_for_what_it_has_outlived_itself(folder: Path, full: dict[str, int]) -> None:
    """A repair that gives its node other layers than before: no route has both. (It was refused as long as the request had
    patience: the first place was to be freed once the route stood.)"""

    async def scenario(one: Hop) -> None:
        await one.open(1, span=Span(2, 4))
        with pytest.raises(Busy):
            one.host.reserve(opening(2, span=Span(2, 3)), cast(Link, one.origin))
        with pytest.raises(Busy):  # another hop's, in the same epoch or of other layers
            one.host.reserve(opening(1, span=Span(3, 4)), cast(Link, one.origin))
        await one.open(1, span=Span(2, 3), epoch=2, serial=2)
        with pytest.raises(Busy) if "max_sessions" in full else nullcontext():  # positions are leased on other layers
            one.host.reserve(opening(1, span=Span(3, 4), epoch=3), cast(Link, one.origin))
        assert one.host.num_sessions == 1 and one.host.has_place(opening(1, span=Span(2, 3)))

    play(folder, scenario, **full)


def test_what_a_session_has_outlived_stays_while_there_is_room(folder: Path) -> None:
    async def scenario(one: Hop) -> None:
        await one.open(1, span=Span(2, 4))
        await one.open(1, span=Span(2, 3), epoch=2, serial=2)
        assert one.host.num_sessions == 2

    play(folder, scenario, max_sessions=2, cache_tokens=200)


def test_a_lease_beyond_the_cache_is_refused_before_it_is_accepted(folder: Path) -> None:
    """Both numbers are named."""

    async def scenario(one: Hop) -> None:
        await one.open(1, capacity=70)
        with pytest.raises(Busy, match="30 more positions, 31 are asked for"):
            one.host.reserve(opening(2, capacity=31), cast(Link, one.origin))
        await one.open(2, capacity=30)
        assert one.host.info.free_tokens == 0

    play(folder, scenario, cache_tokens=100)


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"model": "cd" * 32}, WeightsMismatch),
        ({"precision": "fp32"}, WeightsMismatch),
        ({"span": Span(0, 4)}, BadRequest),
        ({"capacity": 1025}, ContextOverflow),
        ({"ends": "edges", "hop": 0}, BadRequest),
        ({"ends": "edges", "hop": 2}, BadRequest),
    ],
)
def test_a_session_that_does_not_fit_the_span_is_refused(
    folder: Path, changes: dict[str, Any], error: type[Exception]
) -> None:
    """Other weights, precision or layers, more positions than the model was built for, ends that are not here."""

    async def scenario(one: Hop) -> None:
        with pytest.raises(error):
            await one.open(1, **changes)
        assert one.host.info.free_tokens == WorkerConfig().cache_tokens

    play(folder, scenario)


def test_a_session_is_opened_once(folder: Path) -> None:
    async def scenario(one: Hop) -> None:
        await one.open(1)
        with pytest.raises(BadRequest, match="in epoch 1 or later"):
            one.host.reserve(opening(1), cast(Link, one.origin))

    play(folder, scenario)


def test_a_close_frees_the_lease_at_once_also_while_opening(folder: Path) -> None:
    """A session that is closed before it is open never comes to life; a second close is harmless."""

    async def scenario(one: Hop) -> None:
        await one.open(1, capacity=300)
        one.host.close(Close(session_id(1)), AFTER)
        assert one.host.num_sessions == 1, "only its origin may close a session"
        one.host.close(Close(session_id(1)), ORIGIN)
        assert (one.host.num_sessions, one.host.info.free_tokens) == (0, 1000)
        message = opening(2, capacity=300)
        reserved = one.host.reserve(message, cast(Link, one.origin))
        assert one.host.info.free_tokens == 700
        one.host.close(Close(session_id(2)), ORIGIN)
        one.host.close(Close(session_id(2)), ORIGIN)
        assert one.host.info.free_tokens == 1000
        await one.host.open(reserved, cast(Link, one.after))
        assert one.host.num_sessions == 0 and not one.origin.of(Opened, session_id(2))

    play(folder, scenario, cache_tokens=1000)


def test_a_close_while_computing_sends_nothing_more(folder: Path) -> None:
    async def scenario(one: Hop) -> None:
        await one.open(1)
        one.step(1, 0, hidden(9))
        one.host.close(Close(session_id(1)), ORIGIN)
        await one.quiet()
        assert not one.after.sent and one.host.info.free_tokens == WorkerConfig().cache_tokens

    play(folder, scenario)


# -- steps ------------------------------------------------------------------------------------------------------------


def test_a_batch_and_a_cut_prefill_give_the_bits_of_one_session_alone(folder: Path) -> None:
    """Other sessions, and the pieces in which a prefill is computed, are invisible downstream."""
    alone: list[torch.Tensor] = []

    async def one_alone(one: Hop) -> None:
        await one.open(1)
        one.step(1, 0, hidden(30))
        one.step(1, 30, hidden(1, seed=2))
        await computed(one, 1, 2)
        assert [s.count for s in one.after.of(Step)] == [30, 1]
        alone.append(one.rows(1))

    async def in_company(one: Hop) -> None:
        for number in (1, 2, 3):
            await one.open(number)
        one.step(2, 0, hidden(33, seed=7))
        one.step(3, 0, hidden(1, seed=8))
        one.step(1, 0, hidden(30))
        one.step(1, 30, hidden(1, seed=2))
        await one.until(lambda: sum(s.count for s in one.after.of(Step)) == 33 + 1 + 31)
        assert len(one.after.of(Step, session_id(1))) > 3
        assert torch.equal(one.rows(1), alone[0])

    play(folder, one_alone)
    play(folder, in_company, prefill_rows=17, mixed_rows=5)


@pytest.mark.parametrize(
    ("short_s", "free_x", "company", "is_here"),
    [(0.0, math.inf, 0, False), (math.inf, math.inf, 1, True), (0.0, 1e-9, 0, True), (0.0, 1e-9, 1, False)],
)
def test_short_steps_are_computed_on_the_loop_s_thread(
    folder: Path, monkeypatch: pytest.MonkeyPatch, short_s: float, free_x: float, company: int, is_here: bool
) -> None:
    """Once it is known how long their like take, and never a prefill; with the bits of the device's thread. Those of a session
    without company also if the loop is free for long after them."""
    places: list[tuple[int, bool]] = []
    plain, rows = SpanModel.run, [hidden(n, seed) for seed, n in enumerate([5, 1, 1, 20, 1, 1, 3, 3])]
    loop_thread = threading.get_ident()

    def noted(self: SpanModel, works: Sequence[Work]) -> list[Result | Exception]:
        places.append((works[0].count, threading.get_ident() == loop_thread))
        return plain(self, works)

    async def scenario(one: Hop) -> None:
        for number in range(1 + company):
            await one.open(1 + number)
        position = 0
        for i, part in enumerate(rows):
            one.step(1, position, part)
            await computed(one, 1, i + 1)
            position += len(part)
        got.append(one.rows(1))

    got: list[torch.Tensor] = []
    play(folder, scenario)
    monkeypatch.setattr(SpanModel, "run", noted)
    monkeypatch.setattr("manyhands.worker.batch.SHORT_S", short_s)
    monkeypatch.setattr("manyhands.worker.batch.FREE_X", free_x)
    monkeypatch.setattr("manyhands.worker.execute.fastest_threads", lambda *_: 1)
    with computing(1):
        play(folder, scenario)
    first = [(5, False), (1, False), (1, is_here), (20, False)]
    assert places == [
        *first,
        (1, False),
        (1, is_here),
        (3, False),
        (3, is_here),
    ]  # from 16 and 32 positions on: other kinds
    assert torch.equal(*got)


def test_a_step_that_fails_says_nothing_of_how_long_steps_take(folder: Path) -> None:
    """Else cheap nonsense would bring long steps onto the loop's thread."""

    async def scenario(one: Hop) -> None:
        await one.open(1)
        one.step(1, 0, hidden(1) * torch.nan)
        await one.until(lambda: one.host.engine.steps_run == 1)
        assert one.faults() and one.host.load.layer_s == 0
        await one.open(2)
        one.step(2, 0, hidden(1))
        await computed(one, 2, 1)
        assert one.host.load.layer_s > 0

    play(folder, scenario)


def test_a_step_from_another_node_than_the_predecessor_is_dropped(folder: Path) -> None:
    """Another origin's Open may have made that node send it: its link, which serves others, stays."""

    async def scenario(one: Hop) -> None:
        await one.open(1)
        one.step(1, 0, hidden(3), link=Notes(AFTER))
        await one.quiet()
        assert not one.after.sent
        one.step(1, 0, hidden(3))
        await computed(one, 1, 1)
        assert not one.faults()

    play(folder, scenario)


NAN, HUGE = hidden(3), hidden(3)
NAN[1, 5] = float("nan")
HUGE[2, 0] = float("-inf")


@pytest.mark.parametrize(
    ("position", "rows", "changes", "code", "blame"),
    [
        (62, hidden(3), {}, "bad_request", 0),
        (5, hidden(3), {}, "protocol_error", 0),
        (0, NAN, {}, "pipeline_aborted", 0),
        (0, HUGE, {}, "pipeline_aborted", 0),
        (0, hidden(3).float(), {}, "protocol_error", 0),
        (0, hidden(3)[:, :32], {}, "protocol_error", 0),
        (0, hidden(3), {"content": "logits"}, "protocol_error", 0),
        (0, None, {"count": 1, "ids": (3,)}, "protocol_error", 0),
        (0, None, {}, "bad_request", 0),
    ],
    ids=["beyond the lease", "skips ahead", "nan", "inf", "dtype", "width", "content", "ids", "empty"],
)
def test_a_bad_step_is_blamed_on_its_sender_and_hurts_no_other_session(
    folder: Path, position: int, rows: torch.Tensor | None, changes: dict[str, Any], code: str, blame: int
) -> None:
    """The origin is told, with the hop at fault, and may repair: the place stays. A session in the same batch goes on."""

    async def scenario(one: Hop) -> None:
        await one.open(1)
        await one.open(2)
        one.step(2, 0, hidden(3))
        one.step(1, position, rows, **changes)
        await one.until(lambda: len(one.faults()) == 1)
        await computed(one, 2, 1)
        one.step(2, 3, hidden(1))
        await computed(one, 2, 2)
        (fault,) = one.faults()
        assert (fault.session, fault.hop, fault.code, fault.blame) == (session_id(1), 1, code, blame)
        assert one.host.num_sessions == 2 and not one.after.of(Step, session_id(1))

    play(folder, scenario)


@pytest.mark.parametrize("bad", [NAN, hidden(3).float()], ids=["nan", "dtype"])
def test_what_follows_a_bad_step_is_dropped(folder: Path, bad: torch.Tensor) -> None:
    """One fault, and the place stays; the next step would seem to skip ahead, and the hop would blame itself. (It did.)"""

    async def scenario(one: Hop) -> None:
        await one.open(1)
        one.step(1, 0, hidden(2))
        one.step(1, 2, bad)
        one.step(1, 5, hidden(3))
        await one.quiet()
        one.step(1, 8, hidden(3))
        await one.quiet()
        assert [f.blame for f in one.faults()] == [0] and one.host.num_sessions == 1
        await one.open(1, epoch=2)
        one.step(1, 2, hidden(3), epoch=2)
        await computed(one, 1, 2)

    play(folder, scenario)


def test_the_first_hop_blames_the_origin(folder: Path) -> None:
    """There is no hop -1: such a Fault could not be decoded and would cost the link of all sessions. (It did.)"""

    async def scenario(one: Hop) -> None:
        await one.open(1, hop=0, predecessor=ORIGIN)
        one.step(1, 0, NAN, link=one.origin, hop=0)
        await one.until(lambda: len(one.faults()) == 1)
        await one.open(2, hop=0, predecessor=ORIGIN)
        one.step(2, 70, hidden(1), link=one.origin, hop=0)
        assert [fault.blame for fault in one.faults()] == [ORIGIN_HOP, ORIGIN_HOP]

    play(folder, scenario)


def test_a_place_is_found_in_its_epoch_alone(folder: Path) -> None:
    """A repair may leave a place behind here, and give the same hop to other layers that this node holds."""

    async def scenario(one: Hop) -> None:
        await one.open(1, epoch=2)
        assert one.host.find(session_id(1), 1, 2) is not None
        assert one.host.find(session_id(1), 1, 3) is None and one.host.find(session_id(1), 1, 1) is None

    play(folder, scenario)


def test_what_hops_say_of_a_step_counts_in_the_log_and_is_not_sent_again(folder: Path) -> None:
    """A log is bounded: what the hops before may add to each step lies there until it is joined, and must count."""

    async def scenario(one: Hop) -> None:
        await one.open(1)
        for position in range(3):
            one.step(1, position, hidden(1, seed=position), timings=bytes(TIMING.size * 62))
        await one.quiet()
        place = one.host.find(session_id(1), 1, 1)
        assert place is not None and place.log.end == 3
        assert [len(step.timings) for step in one.after.of(Step)] == [TIMING.size * 63] * 3
        assert [step.timings for step in place.log.replay(3)] == [b""]
        payloads = [step.payload for step in one.after.of(Step) if step.payload is not None]
        assert place.log.num_bytes == sum([len(payload.data) + TIMING.size * 63 for payload in payloads]) > 0

    play(folder, scenario)


def test_steps_of_an_older_epoch_are_dropped_uncomputed(folder: Path) -> None:
    async def scenario(one: Hop) -> None:
        await one.open(1, epoch=5)
        one.step(1, 0, hidden(3, seed=1), epoch=4)
        one.step(1, 0, hidden(2), epoch=5)
        await one.quiet()
        assert (one.host.engine.rows_run, [s.count for s in one.after.of(Step)]) == (2, [2])

    play(folder, scenario)


def test_steps_under_an_older_guess_are_dropped_uncomputed(folder: Path) -> None:
    """Queued ones when a newer arrives, and late ones; their senders get the credits back."""

    async def scenario(one: Hop) -> None:
        await one.open(1, credits=4)
        for _ in range(3):
            one.step(1, 0, hidden(2, seed=1), guess=0)
        one.step(1, 0, hidden(5), guess=1)
        one.step(1, 0, hidden(2, seed=1), guess=0)
        await one.quiet()
        assert (one.host.engine.rows_run, [s.count for s in one.after.of(Step)]) == (5, [5])
        assert sum(c.steps for c in one.before.of(Credit)) >= 4

    play(folder, scenario)


def test_what_the_origin_retracts_is_dropped_uncomputed(folder: Path) -> None:
    """What waits, and what comes later under the old guesses; in that epoch, and by word of the origin alone."""

    async def scenario(one: Hop) -> None:
        await one.open(1, credits=4, epoch=2)
        one.step(1, 0, hidden(2), epoch=2)
        await computed(one, 1, 1)
        for message, node in (
            (Retract(session_id(1), 2, 9, 0), BEFORE),
            (Retract(session_id(1), 1, 9, 0), ORIGIN),
            (Retract(session_id(2), 2, 9, 0), ORIGIN),
        ):
            one.host.follow(message, node)
        one.step(1, 2, hidden(3), epoch=2)
        one.step(1, 5, hidden(3), epoch=2)
        one.host.follow(Retract(session_id(1), 2, 1, 1), ORIGIN)
        one.host.follow(Retract(session_id(1), 2, 0, 0), ORIGIN)
        one.step(1, 8, hidden(3), epoch=2)
        one.step(1, 1, hidden(4), epoch=2, guess=1)
        await one.quiet()
        assert [(s.position, s.count) for s in one.after.of(Step)] == [(0, 2), (1, 4)]
        assert one.host.engine.rows_run == 6 and sum(c.steps for c in one.before.of(Credit)) >= 4

    play(folder, scenario)


def test_a_standby_computes_on_when_the_origin_retracts(folder: Path) -> None:
    """A node may hold a hop and another's standby in one session. What logs feed is committed, whatever was guessed."""

    async def scenario(one: Hop) -> None:
        await one.open(1, emit_from=STANDBY)
        one.step(1, 0, hidden(5))
        one.host.follow(Retract(session_id(1), 1, 3, 5), ORIGIN)
        one.step(1, 5, hidden(2))
        await one.quiet()
        assert one.host.engine.rows_run == 7

    play(folder, scenario)


def test_a_hop_with_a_rollback_in_hand_does_not_claim_more(folder: Path) -> None:
    """What it computed before says nothing of the step that waits, or that its device is at: the origin looks for the hop
    that holds the route up."""

    async def scenario(one: Hop) -> None:
        await one.open(1)
        one.step(1, 0, hidden(9))
        await computed(one, 1, 1)
        place = one.host.find(session_id(1), 1, 1)
        assert place is not None
        one.host.follow(Retract(session_id(1), 1, 1, 4), ORIGIN)
        one.step(1, 4, hidden(2), guess=1)
        one.host.follow(Probe(session_id(1), 1), ORIGIN)
        place.take(2)
        one.host.follow(Probe(session_id(1), 1), ORIGIN)
        assert [p.computed for p in one.origin.of(Progress)] == [4, 4]

    play(folder, scenario)


def test_rows_that_came_again_are_told_of_once(folder: Path) -> None:
    """Two faults for one reason may be counted as two."""

    async def scenario(one: Hop) -> None:
        await one.open(1)
        one.step(1, 0, hidden(9))
        await computed(one, 1, 1)
        one.step(1, 0, hidden(9))
        for _ in range(2):
            one.host.follow(Probe(session_id(1), 1), ORIGIN)
        assert [(fault.code, fault.blame) for fault in one.faults()] == [("protocol_error", 0)]
        assert len(one.origin.of(Progress)) == 2

    play(folder, scenario)


def test_a_hop_whose_steps_were_retracted_has_nothing_left_to_compute(folder: Path) -> None:
    """Else a probe would find it busy, and the origin blame it for a step that has not come to it."""

    async def scenario(one: Hop) -> None:
        await one.open(1)
        one.step(1, 0, hidden(9))
        await computed(one, 1, 1)
        one.step(1, 9, hidden(3))
        one.host.follow(Retract(session_id(1), 1, 1, 9), ORIGIN)
        one.host.follow(Probe(session_id(1), 1), ORIGIN)
        one.step(1, 9, hidden(3))  # of the guess before
        one.host.follow(Probe(session_id(1), 1), ORIGIN)
        one.step(1, 9, hidden(1), guess=1)
        one.host.follow(Probe(session_id(1), 1), ORIGIN)
        assert [(p.received, p.computed) for p in one.origin.of(Progress)] == [(9, 9), (9, 9), (10, 9)]

    play(folder, scenario)


def test_a_rollback_overwrites(folder: Path) -> None:
    """A step at an earlier position, of a newer guess, continues from there, as if the steps behind it had never been."""
    wanted: list[torch.Tensor] = []

    async def straight(one: Hop) -> None:
        await one.open(1)
        one.step(1, 0, hidden(5))
        one.step(1, 5, hidden(2, seed=3))
        await computed(one, 1, 2)
        wanted.append(one.rows(1)[5:])

    async def crooked(one: Hop) -> None:
        await one.open(1)
        one.step(1, 0, hidden(5))
        one.step(1, 5, hidden(9, seed=1))
        await computed(one, 1, 2)
        one.step(1, 5, hidden(2, seed=3), guess=1)
        await computed(one, 1, 3)
        last = one.after.of(Step)[-1]
        assert last.payload is not None
        assert torch.equal(decode_tensor(last.payload, 2), wanted[0])

    play(folder, straight)
    play(folder, crooked)


# -- epochs -----------------------------------------------------------------------------------------------------------


def link(notes: Notes) -> Link:
    return cast(Link, notes)


def test_a_newer_open_overtakes_one_that_is_being_carried_out(folder: Path) -> None:
    """Whichever is carried out first: the newer counts, with one lease, and the older can do no harm. (It could.)"""

    async def scenario(one: Hop) -> None:
        old = one.host.reserve(opening(1, capacity=300), link(one.origin))
        new = one.host.reserve(opening(1, capacity=300, epoch=2), link(one.origin))
        assert one.host.info.free_tokens == 700
        await one.host.open(old, link(one.after))
        assert not one.origin.of(Opened)
        assert not one.host.abandon(old, keep=False)
        await one.host.open(new, link(one.after))
        assert not one.host.abandon(old, keep=False)
        await one.host.open(old, link(one.after))
        assert [o.epoch for o in one.origin.of(Opened)] == [2]
        assert (one.host.num_sessions, one.host.info.free_tokens) == (1, 700)

    play(folder, scenario, cache_tokens=1000)


def test_a_place_is_changed_by_newer_epochs_of_its_own_origin_alone(folder: Path) -> None:
    async def scenario(one: Hop) -> None:
        await one.open(1, epoch=3)
        for origin, epoch, why in (
            (one.origin, 3, "in epoch 3 or later"),
            (one.origin, 2, "in epoch 3 or later"),
            (Notes(AFTER), 4, "another node"),
        ):
            with pytest.raises(BadRequest, match=why):
                one.host.reserve(opening(1, epoch=epoch), link(origin))
        await one.open(1, epoch=4)

    play(folder, scenario)


def test_a_new_place_that_cannot_be_had_leaves_the_old_one(folder: Path) -> None:
    """Its next successor cannot be reached: the origin hears of it and thinks again, the cache stays."""

    async def scenario(one: Hop) -> None:
        await one.open(1)
        one.step(1, 0, hidden(5))
        await computed(one, 1, 1)
        message = opening(1, epoch=2)
        reserved = one.host.reserve(message, link(one.origin))
        assert one.host.abandon(reserved, keep=True) and one.host.num_sessions == 1
        await one.open(1, epoch=3)
        one.step(1, 5, hidden(1), epoch=3)
        await computed(one, 1, 2)
        assert not one.faults()

    play(folder, scenario)


def test_an_origin_that_is_lost_while_a_session_opens_leaves_no_lease(folder: Path) -> None:
    """Neither reserved nor, when the opening comes through after all, held for ever. (It was.)"""

    async def scenario(one: Hop) -> None:
        message = opening(1)
        reserved = one.host.reserve(message, link(one.origin))
        one.host.drop_origin(link(one.origin))
        await one.host.open(reserved, link(one.after))
        assert one.host.num_sessions == 0 and one.host.info.free_tokens == WorkerConfig().cache_tokens

    play(folder, scenario)


def test_a_successor_that_is_lost_while_layers_load_is_noticed(folder: Path) -> None:
    """Nothing would have told the session: its steps would have been lost."""

    async def scenario(one: Hop) -> None:
        message = opening(1)
        reserved = one.host.reserve(message, link(one.origin))
        one.after.is_closed = True
        with pytest.raises(LinkClosed):
            await one.host.open(reserved, link(one.after))
        assert one.host.abandon(reserved, keep=False) and one.host.info.free_tokens == WorkerConfig().cache_tokens

    play(folder, scenario)


def test_who_drains_says_so_in_every_epoch(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A session that was being opened hears of it too; what was said in an older epoch may not have been heard."""
    caplog.set_level(logging.INFO)

    async def scenario(one: Hop) -> None:
        await one.host.engine.ensure_loaded()
        reserved = one.host.reserve(opening(1), link(one.origin))
        one.host.drain()
        with pytest.raises(Draining):
            one.host.reserve(opening(2), link(one.origin))
        emptied = asyncio.ensure_future(one.host.emptied())
        await one.host.open(reserved, link(one.after))
        await one.open(1, epoch=2)
        assert [(f.epoch, f.code) for f in one.faults()] == [(1, "draining"), (2, "draining")]
        told = [record.levelno for record in caplog.records if "drains" in record.message]
        assert told == [logging.INFO] * 2, "who leaves in order is shown no fault"
        assert not emptied.done()
        one.host.close(Close(session_id(1)), ORIGIN)
        await asyncio.wait_for(emptied, 1)

    play(folder, scenario)


def test_a_drain_without_a_deadline_gets_one_when_the_node_leaves(folder: Path) -> None:
    """Layers that are given back wait for their sessions as long as it takes; a node that leaves then waits for `drain_s`."""

    async def scenario(one: Hop) -> None:
        await one.open(1)
        one.host.drain(math.inf)
        await asyncio.sleep(1000.0)
        assert one.host.is_draining and one.host.num_sessions == 1
        began = asyncio.get_running_loop().time()
        one.host.drain()
        await one.host.emptied()
        assert asyncio.get_running_loop().time() - began == pytest.approx(10.0, abs=0.01)

    play(folder, scenario, drain_s=10.0)


def test_who_has_not_gone_by_the_deadline_is_turned_out(folder: Path) -> None:
    """Also a session that is half open; each origin hears that this hop is gone, which is more than that it drains."""

    async def scenario(one: Hop) -> None:
        await one.open(1)
        late = one.host.reserve(opening(2), link(one.origin))
        one.host.drain()
        await asyncio.sleep(6.0)
        one.host.drain()  # to say it again defers nothing
        began = asyncio.get_running_loop().time()
        await one.host.emptied()
        assert asyncio.get_running_loop().time() - began == pytest.approx(4.0, abs=0.01)
        told = [(f.session, f.code, f.blame) for f in one.faults() if f.code != "draining"]
        assert sorted(told) == [(session_id(n), "shard_unavailable", None) for n in (1, 2)]
        assert one.host.info.free_tokens == WorkerConfig().cache_tokens and one.logs.num_bytes == 0
        await one.host.open(late, link(one.after))
        assert one.host.num_sessions == 0

    play(folder, scenario, drain_s=10.0)


def test_a_step_on_the_device_while_the_place_changes_is_not_sent(folder: Path) -> None:
    """Its rows belong to the old route; the new one starts from what both sides know, with the same bits."""
    wanted: list[torch.Tensor] = []

    async def straight(one: Hop) -> None:
        await one.open(1)
        one.step(1, 0, hidden(5))
        one.step(1, 5, hidden(2, seed=3))
        await computed(one, 1, 2)
        wanted.append(one.rows(1))

    async def changing(one: Hop) -> None:
        await one.open(1)
        one.step(1, 0, hidden(5))
        await computed(one, 1, 1)
        one.step(1, 5, hidden(4, seed=9))
        await asyncio.sleep(0)  # it is on the device now
        place = one.host.find(session_id(1), 1, 1)
        assert place is not None and not place.waiting
        one.after.sent.clear()
        await one.open(1, epoch=2, replay_until=5)
        await one.quiet()
        assert [(s.epoch, s.position, s.count) for s in one.after.of(Step)] == [(2, 0, 5)]
        one.step(1, 5, hidden(2, seed=3), epoch=2)
        await computed(one, 1, 2)
        assert torch.equal(one.rows(1), wanted[0])

    play(folder, straight)
    play(folder, changing)


def test_a_rebuilt_hop_sends_on_only_what_its_successor_lacks(folder: Path) -> None:
    """It computes and logs all it gets; rows before `emit_from` go nowhere, also in the middle of a step."""

    async def scenario(one: Hop) -> None:
        await one.open(1, emit_from=7)
        one.step(1, 0, hidden(5))
        one.step(1, 5, hidden(4, seed=1))
        await computed(one, 1, 1)
        await one.quiet()
        assert [(s.position, s.count) for s in one.after.of(Step)] == [(7, 2)]
        one.after.sent.clear()
        await one.open(1, epoch=2, replay_until=9)
        assert [(s.position, s.count) for s in one.after.of(Step)] == [(0, 9)]
        assert one.origin.of(Opened)[-1].has_log
        await one.open(1, epoch=3, replay_until=10)
        assert not one.origin.of(Opened)[-1].has_log, "so many it has not"

    play(folder, scenario)


def test_what_is_sent_again_is_made_as_credits_come(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An Open of a few bytes asks for all that the log holds: made at once, 16,384 steps of coded rows held the event loop."""
    made, plain = [0], HopSession.addressed
    monkeypatch.setattr("manyhands.worker.log.REPLAY_ROWS", 1)  # no two are joined

    def counting(place: HopSession, *args: Any) -> Step:
        made[0] += 1
        return plain(place, *args)

    async def scenario(one: Hop) -> None:
        await one.open(1)
        for position in range(8):
            one.step(1, position, hidden(1, seed=position))
        await computed(one, 1, 8)
        rows, made[0] = one.rows(1), 0
        monkeypatch.setattr(HopSession, "addressed", counting)
        one.after.sent.clear()
        await one.open(1, epoch=2, replay_until=8, credits=2)
        assert len(one.after.of(Step)) == 2 and made == [3]
        for _ in range(6):
            one.credit(1, 1)
        sent = one.after.of(Step)
        assert [s.position for s in sent] == list(range(8)) and {s.committed for s in sent} == {8}
        assert torch.equal(one.rows(1), rows) and made == [8]

    play(folder, scenario)


@pytest.mark.parametrize("log_bytes", [0, 128 * 10])
def test_logs_are_bounded_together_and_the_largest_goes_first(folder: Path, log_bytes: int) -> None:
    """Without its log a hop still serves; it only says that it cannot replay."""

    async def scenario(one: Hop) -> None:
        await one.open(1)
        await one.open(2)
        one.step(1, 0, hidden(8))
        await computed(one, 1, 1)
        one.step(2, 0, hidden(4))
        await computed(one, 2, 1)
        for number, rows in ((1, 8), (2, 4)):
            await one.open(number, epoch=2, replay_until=rows)
        assert [o.has_log for o in one.origin.of(Opened)[-2:]] == [False, log_bytes > 0]
        one.host.close(Close(session_id(2)), ORIGIN)
        assert one.logs.num_bytes == 0, "a closed session gives its bytes back"

    play(folder, scenario, log_bytes=log_bytes)


def test_rows_that_cannot_be_decoded_keep_no_other_session_waiting(folder: Path) -> None:
    """They are all that the next device step was to run; the others' go on at once, although nothing else arrives."""

    async def scenario(one: Hop) -> None:
        await one.open(1)
        await one.open(2)
        rows = hidden(32)
        coded = Payload("bf16", 64, bytes(100), "planes")
        one.step(1, 0, rows, payload=coded)
        one.step(2, 0, rows)
        await one.until(lambda: one.faults() != [])
        assert [(f.session, f.blame) for f in one.faults()] == [(session_id(1), 0)]
        await computed(one, 2, 1)

    play(folder, scenario, prefill_rows=8, mixed_rows=8)
