"""manyhands.worker.batch: who runs in the next device step."""

import math
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manyhands.worker.batch import (
    FEWEST_ROWS,
    FREE_X,
    HELD_S,
    LEAST_ROWS,
    LONE_S,
    SHORT_S,
    WINDOW_ROWS,
    Pick,
    PromptRows,
    Shortness,
    StepKind,
    Waiting,
    choose,
    hold_until,
)
from manyhands.worker.engine import Engine

ROWS = st.one_of(st.integers(1, WINDOW_ROWS), st.integers(1, 2000))
LIMITS = st.tuples(st.integers(1, 400), st.integers(1, 64), st.integers(WINDOW_ROWS + 1, 400))


@st.composite
def queues(draw: st.DrawFn) -> list[Waiting]:
    rows = draw(st.lists(ROWS, min_size=1, max_size=40))
    served = draw(st.lists(st.integers(0, 30), min_size=len(rows), max_size=len(rows)))
    return [Waiting(at, key, count) for key, (count, at) in enumerate(zip(rows, served, strict=True))]


def test_decode_comes_first_and_longest_waiting_first() -> None:
    """Short steps lead, in the order in which their sessions last ran; a prefill fills the rest of its share."""
    waiting = [Waiting(1, 1, 500), Waiting(9, 2, 1), Waiting(4, 3, 5), Waiting(2, 4, 400)]
    assert choose(waiting, 256, 32, 256) == [Pick(3, 5), Pick(2, 1), Pick(1, 32)]


def test_prefill_alone_fills_the_step() -> None:
    """Where no session decodes, a prefill gets all rows, and the next one what is left."""
    assert choose([Waiting(1, 1, 500)], 256, 32, 256) == [Pick(1, 250)]
    assert choose([Waiting(1, 1, 200), Waiting(2, 2, 300)], 256, 32, 256) == [Pick(1, 200), Pick(2, 56)]


def test_beside_decode_prefill_is_held_to_its_share() -> None:
    """Decoding must not become slow because a long prompt came."""
    picks = choose([Waiting(0, 1, 5000), Waiting(7, 2, 1)], 256, 32, 256)
    assert picks == [Pick(2, 1), Pick(1, 32)]


def test_without_a_waiting_session_none_runs() -> None:
    assert choose([], 256, 32, 256) == []


def test_a_window_counts_as_decode_and_one_row_more_as_prefill() -> None:
    """The border between the two kinds is WINDOW_ROWS."""
    decode, prefill = Waiting(5, 1, WINDOW_ROWS), Waiting(0, 2, WINDOW_ROWS + 1)
    assert choose([decode, prefill], 256, 4, 256) == [Pick(1, WINDOW_ROWS), Pick(2, 4)]


@given(queues(), LIMITS)
def test_a_step_is_within_its_limits(waiting: list[Waiting], limits: tuple[int, int, int]) -> None:
    """Never empty, never more rows than the limit or than a session has, no session twice."""
    picks = choose(waiting, *limits)
    rows = {w.key: w.num_rows for w in waiting}
    assert picks
    assert sum(pick.num_rows for pick in picks) <= max(limits[0], WINDOW_ROWS)
    assert len({pick.key for pick in picks}) == len(picks)
    assert all(1 <= pick.num_rows <= rows[pick.key] for pick in picks)


@given(queues(), LIMITS)
def test_short_steps_run_whole_and_prefill_keeps_its_share(
    waiting: list[Waiting], limits: tuple[int, int, int]
) -> None:
    """A verify window is never cut in two; beside it prefill takes at most `mixed_rows`."""
    picks = choose(waiting, *limits)
    rows = {w.key: w.num_rows for w in waiting}
    short = [p for p in picks if rows[p.key] <= WINDOW_ROWS]
    assert all(p.num_rows == rows[p.key] for p in short)
    if short:
        assert sum(p.num_rows for p in picks if rows[p.key] > WINDOW_ROWS) <= limits[1]


@given(queues(), LIMITS)
def test_no_session_starves(waiting: list[Waiting], limits: tuple[int, int, int]) -> None:
    """If every session always has another step, each runs within as many rounds as there are sessions.

    Found here: enough sessions decoding filled every step, and a prefill waited for ever.
    """
    clock = 1000
    ran: set[int] = set()
    for _ in range(len(waiting)):
        for pick in choose(waiting, *limits):
            clock += 1
            ran.add(pick.key)
            waiting = [w._replace(served=clock) if w.key == pick.key else w for w in waiting]
    assert ran == {w.key for w in waiting}


@given(queues(), LIMITS, st.randoms(use_true_random=False))
def test_the_order_of_the_queue_does_not_matter(
    waiting: list[Waiting], limits: tuple[int, int, int], random: Random
) -> None:
    """A pure function of who waits."""
    shuffled = list(waiting)
    random.shuffle(shuffled)
    assert choose(shuffled, *limits) == choose(waiting, *limits)


def test_a_kind_of_step_is_short_if_its_like_were() -> None:
    """One that was long counts for a while; kinds that were not seen are not short, and there is no end of kinds."""
    shortness, kind = Shortness(), StepKind(3, 1, 5)
    assert not shortness.is_short(kind)
    shortness.learn(kind, SHORT_S / 2, SHORT_S / 2)
    assert shortness.is_short(kind) and not shortness.is_short(StepKind(3, 2, 5))
    shortness.learn(kind, SHORT_S * 5, SHORT_S * 5)
    for _ in range(10):
        assert not shortness.is_short(kind)
        shortness.learn(kind, SHORT_S / 2, SHORT_S / 2)
    for _ in range(50):
        shortness.learn(kind, SHORT_S / 2, SHORT_S / 2)
    assert shortness.is_short(kind)
    for rows in range(100_000):
        shortness.learn(StepKind(rows, 1, 1), 0.0, 0.0)
    assert len(shortness._usual_s) <= 1024


def test_a_busy_machine_makes_no_step_long_and_a_slow_disk_does() -> None:
    """The event loop is to be free within HELD_S: what a step waited for a core within that is not its own."""
    shortness, kind = Shortness(), StepKind(3, 1, 5)
    shortness.learn(kind, HELD_S, SHORT_S / 2)
    assert shortness.is_short(kind)
    shortness.learn(kind, HELD_S * 1.01, SHORT_S / 2)
    assert not shortness.is_short(kind)
    shortness = Shortness()
    shortness.learn(kind, HELD_S, SHORT_S)
    assert not shortness.is_short(kind)


def test_a_step_is_short_too_if_the_loop_is_free_for_long_after_it() -> None:
    """For FREE_X times as long, and never one of LONE_S or more."""
    shortness, kind, longest = Shortness(), StepKind(3, 1, 5), StepKind(9, 1, 5)
    assert not shortness.is_short(kind, math.inf), "it was never seen"
    shortness.learn(kind, SHORT_S * 5, SHORT_S * 5)
    shortness.learn(longest, LONE_S, LONE_S)
    assert not shortness.is_short(kind) and not shortness.is_short(kind, SHORT_S * 5 * FREE_X)
    assert shortness.is_short(kind, SHORT_S * 5.1 * FREE_X)
    assert not shortness.is_short(longest, math.inf)


def test_a_decode_step_is_held_for_one_that_is_due_soon() -> None:
    """Held until the last one that comes within 0.7 of a step; not for what comes later, nor without any."""
    assert hold_until(10.0, 1.0, []) == 10.0
    assert hold_until(10.0, 1.0, [10.2, 10.6, 10.8]) == 10.6
    assert hold_until(10.0, 1.0, [10.8]) == 10.0
    assert hold_until(10.0, 0.1, [10.2]) == 10.0


def engine_of(*sessions: SimpleNamespace, usual_s: float = 1.0) -> Any:
    return SimpleNamespace(_sessions={s.key: s for s in sessions}, _held_since=None, usual_s=usual_s)


def session(key: int, rows: int = 1, due: float | None = None, *, is_standby: bool = False) -> SimpleNamespace:
    """With a step of so many rows waiting (0: none), the next one due then."""
    waiting = [SimpleNamespace(count=rows)] if rows else []
    pace = SimpleNamespace(expected_at=lambda: due)
    return SimpleNamespace(key=key, served=0, outbox=(), waiting=waiting, pace=pace, is_standby=is_standby)


def test_sessions_out_of_phase_share_a_step() -> None:
    """The engine holds what waits for a session that is due, and does not where all wait or a prefill does."""
    engine = engine_of(session(1), session(2, 0, due=5.5))
    assert Engine._hold_until(engine, Engine.waiting(engine), 5.0) == 5.5
    for others in ([session(2)], [session(2, 0, due=9.0)], [session(2, 300), session(3, 0, due=5.5)]):
        engine = engine_of(session(1), *others)
        assert Engine._hold_until(engine, Engine.waiting(engine), 5.0) is None


def test_standbys_compute_when_no_session_waits() -> None:
    live, standby = session(1), session(2, 16, is_standby=True)
    assert [w.key for w in Engine.waiting(engine_of(standby, live))] == [1]
    assert [w.key for w in Engine.waiting(engine_of(standby, session(1, 0)))] == [2]


def test_a_step_of_prompts_lasts_no_longer_than_it_may() -> None:
    rows = PromptRows()
    assert rows.limit == FEWEST_ROWS
    rows.learn(64, 0.32)  # 5 ms a row
    assert rows.limit == 800
    rows.learn(256, 51.2)  # 0.2 s a row, at once
    assert rows.limit == LEAST_ROWS
    rows.learn(64, 19.2)  # 0.3 s a row: origins would see nothing for more than 15 s
    assert rows.limit == 50
    rows.learn(50, 50.0)
    assert rows.limit == FEWEST_ROWS
    seen = []
    for _ in range(50):
        rows.learn(LEAST_ROWS, LEAST_ROWS * 0.02)
        seen.append(rows.limit)
    assert seen == sorted(seen) and 195 <= seen[-1] <= 200


def test_the_rest_of_a_prompt_makes_no_machine_slow() -> None:
    """Weights that take 2 s are no row's."""
    rows = PromptRows()
    rows.learn(WINDOW_ROWS + 1, 2.1)
    assert rows.limit == 64
    rows.learn(200, 2.6)
    rows.learn(FEWEST_ROWS - 1, 2.1)
    assert rows.limit == 307


@pytest.mark.parametrize("num_rows", range(WINDOW_ROWS + 1, 400, 7))
@pytest.mark.parametrize("before", [None, 60.0])
def test_a_fast_machine_soon_computes_a_prompt_in_one_step(num_rows: int, before: float | None) -> None:
    """Weights take 70 ms and a row 1.3, at first or after a step of a minute; parts of a prompt may all be of few rows."""
    rows = PromptRows()
    if before is not None:
        rows.learn(FEWEST_ROWS, before)
    for _ in range(50):
        pick = choose([Waiting(0, 0, num_rows)], 1000, 32, rows.limit)[0].num_rows
        rows.learn(pick, 0.07 + 0.0013 * pick)
    assert choose([Waiting(0, 0, num_rows)], 1000, 32, rows.limit) == [Pick(0, num_rows)]


def test_no_part_of_a_prompt_counts_as_decoding() -> None:
    for limit in range(FEWEST_ROWS, 80):
        for left in range(WINDOW_ROWS + 1, 400):
            (pick,) = choose([Waiting(0, 1, left)], 256, 32, limit)
            assert WINDOW_ROWS < pick.num_rows <= limit and left - pick.num_rows not in range(1, WINDOW_ROWS + 1)


def test_a_slow_machine_computes_a_prompt_in_even_parts_and_decodes_as_ever() -> None:
    assert choose([Waiting(0, 1, 256)], 256, 32, 100) == [Pick(1, 86)]
    assert choose([Waiting(0, 1, 9)], 256, 32, 64) == [Pick(1, 9)]
    decoding = [Waiting(0, key, 9) for key in range(20)]
    assert len(choose(decoding, 256, 32, 64)) == 20
    assert choose([Waiting(0, 1, 200), Waiting(0, 2, 200)], 256, 32, 100) == [Pick(1, 100)]
