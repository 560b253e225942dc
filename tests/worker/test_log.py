"""manyhands.worker.log: what a lost successor had, again and exactly."""

import tracemalloc
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manyhands.core import SessionId
from manyhands.wire.message import Payload, Step
from manyhands.worker.log import LOOSE_STEPS, REPLAY_ROWS, LogBudget, OutputLog, join, split_step

SESSION = SessionId(bytes(16))
WIDTH = 2
ROW_BYTES = 2 * WIDTH
Row = tuple[int, int]  # what a row is made of: its position and the attempt it belongs to


def step(position: int, count: int, attempt: int, *, has_ids: bool = False, has_rows: bool = True) -> Step:
    """Rows that tell their position and their attempt."""
    rows = [(position + i, attempt) for i in range(count)]
    payload = Payload("bf16", WIDTH, b"".join(map(encoded, rows))) if has_rows and count else None
    ids = tuple(p * 1000 + a for p, a in rows) if has_ids else None
    return Step(SESSION, 1, 1, position, count, 0, attempt, "hidden", ids, payload)


def encoded(row: Row) -> bytes:
    return row[0].to_bytes(2, "little") + row[1].to_bytes(2, "little")


def rows_of(steps: list[Step]) -> list[Row]:
    """The rows of steps that follow each other from position 0."""
    assert all(b.position == a.position + a.count for a, b in pairwise(steps))
    assert not steps or steps[0].position == 0
    out: list[Row] = []
    for s in steps:
        if s.ids is not None:
            out += [(i // 1000, i % 1000) for i in s.ids]
            assert s.payload is None or bytes(s.payload.data) == b"".join(map(encoded, out[-s.count :]))
        else:
            assert s.payload is not None
            data = bytes(s.payload.data)
            assert len(data) == s.count * ROW_BYTES
            out += [
                (int.from_bytes(data[i : i + 2], "little"), int.from_bytes(data[i + 2 : i + 4], "little"))
                for i in range(0, len(data), ROW_BYTES)
            ]
    return out


# (how far back from the end, rows): a plain step, a rollback, or (negative) a gap
STEPS = st.tuples(
    st.one_of(st.just(0), st.integers(0, 400), st.integers(-2, 0)), st.integers(0, 40) | st.integers(0, 300)
)


@given(st.lists(STEPS, max_size=25), st.integers(0, 900), st.sampled_from([(False, True), (True, True), (True, False)]))
def test_the_log_holds_what_the_successor_should_have(
    actions: list[tuple[int, int]], until: int, kind: tuple[bool, bool]
) -> None:
    """Against a list of rows: appending overwrites what a rollback took back, a gap drops all for good; bytes are exact."""
    log, want = OutputLog(), list[Row]()
    is_dropped, longest = False, 0
    for attempt, (back, count) in enumerate(actions):
        position = max(0, len(want) - back)
        log.append(step(position, count, attempt, has_ids=kind[0], has_rows=kind[1]))
        if count and not is_dropped:
            is_dropped = position > len(want)
            want = [] if is_dropped else want[:position] + [(position + i, attempt) for i in range(count)]
            longest = max(longest, count)
        assert log.end == len(want) and log.num_bytes == len(want) * 4
        assert log.covers(len(want)) and not log.covers(len(want) + 1)
    replayed = list(log.replay(until))
    assert rows_of(replayed) == want[:until]
    assert all(1 <= s.count <= max(REPLAY_ROWS, longest) for s in replayed)
    assert list(log.replay(until)) == replayed, "a replay takes nothing away"


def test_short_steps_are_replayed_together_and_long_ones_as_they_were() -> None:
    """Prefill-sized steps, so that the replacement computes at prefill speed; nothing is cut that came in one piece."""
    log = OutputLog()
    log.append(step(0, 300, 0))
    for position in range(300, 300 + REPLAY_ROWS + 5):
        log.append(step(position, 1, 1))
    assert [s.count for s in log.replay(10_000)] == [300, REPLAY_ROWS, 5]
    assert [s.count for s in log.replay(310)] == [300, 10]
    assert [s.count for s in log.replay(7)] == [7]
    assert list(log.replay(0)) == []


def test_a_long_text_of_single_rows_is_replayed_and_handed_on_in_few_steps() -> None:
    """An Open of a few bytes has a hop replay, copy or cut its log: of 16,384 decode steps that took 150 ms of the event loop,
    30 ms and 10 ms. Older steps stand together by then."""
    log, rows = OutputLog(), 20 * REPLAY_ROWS
    for position in range(rows):
        log.append(step(position, 1, 1))
    most = 20 + 2 * LOOSE_STEPS
    assert len(log._steps) <= most and log.num_bytes == rows * ROW_BYTES
    later = OutputLog()
    later.begin_with(log, rows - 5)
    later.append(step(rows - 9, 1, 2))
    assert len(later._steps) <= most and rows_of(list(later.replay(rows))) == [
        *((position, 1) for position in range(rows - 9)),
        (rows - 9, 2),
    ]
    assert rows_of(list(log.replay(rows))) == [(position, 1) for position in range(rows)]


def test_timings_count_until_steps_are_joined() -> None:
    log = OutputLog()
    for position in range(2 * LOOSE_STEPS):
        log.append(step(position, 1, 1)._replace(timings=bytes(24)))
    assert log.num_bytes == 2 * LOOSE_STEPS * ROW_BYTES + LOOSE_STEPS * 24
    log.cut(0)
    assert log.num_bytes == 0


@pytest.mark.parametrize("count", [1, REPLAY_ROWS, REPLAY_ROWS + 1])
def test_what_is_sent_again_tells_no_timings(count: int) -> None:
    """They were of another route, or of another turn; also of a step that is joined with none."""
    log = OutputLog()
    log.append(step(0, count, 1)._replace(timings=bytes(24)))
    assert [one.timings for one in log.replay(count)] == [b""]


def test_steps_are_joined_to_a_mebibyte_at_most() -> None:
    """Wide rows, which are copied on the event loop."""
    log, width = OutputLog(), 1 << 15
    for position in range(3 * LOOSE_STEPS):
        log.append(Step(SESSION, 1, 1, position, 1, 0, 0, "hidden", None, Payload("fp32", width, bytes(4 * width))))
    assert {s.count for s in log._steps} == {8, 1} and {s.count for s in log.replay(10_000)} == {8}


def test_steps_of_two_kinds_are_not_joined() -> None:
    log = OutputLog()
    for position in range(3 * LOOSE_STEPS):
        log.append(step(position, 1, 0, has_ids=position % 4 < 2, has_rows=position % 4 > 0))
    assert log.num_bytes == 3 * LOOSE_STEPS * ROW_BYTES
    assert all((s.ids is None or len(s.ids) == s.count) and s.count <= 2 for s in log.replay(10_000))
    assert rows_of(list(log.replay(10_000))) == [(position, 0) for position in range(3 * LOOSE_STEPS)]


def test_what_a_rollback_leaves_keeps_no_more_alive_than_it_counts() -> None:
    """An origin that goes back to the row after the last, each time after 256 rows, kept 256 times what was counted: 32 GB for
    a lease of 4,096 positions, where `log_bytes` allow 16 MB. So did logs that go on with a part of a parked one."""
    width, rows = 1024, 256
    tracemalloc.start()
    try:
        log, later = OutputLog(), OutputLog()
        for position in range(64):
            payload = Payload("bf16", width, bytes(2 * width * rows))
            log.append(Step(SESSION, 1, 1, position, rows, 0, 0, "hidden", None, payload))
        del payload
        log.cut(64)
        later.begin_with(log, 32)
        assert log.num_bytes == 64 * 2 * width and later.num_bytes == 32 * 2 * width
        assert tracemalloc.get_traced_memory()[0] < 3 * log.num_bytes
    finally:
        tracemalloc.stop()


def test_a_dropped_log_stays_dropped() -> None:
    """Half a log would be replayed as if it were whole."""
    log = OutputLog()
    log.append(step(0, 5, 0))
    log.drop()
    log.append(step(0, 5, 0))
    log.append(step(5, 5, 0))
    assert (log.end, log.num_bytes, list(log.replay(9)), log.covers(1), log.covers(0)) == (0, 0, [], False, True)


def session(number: int) -> SessionId:
    return SessionId(number.to_bytes(16, "big"))


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 2), st.integers(1, 30)), max_size=40), st.integers(0, 200))
def test_the_logs_of_a_node_stay_within_one_bound_and_the_greedy_pay(
    actions: list[tuple[int, int, int]], limit_rows: int
) -> None:
    """Sessions with several places each. Who loses a log held more than an equal share, and most of all; none loses one
    while there is room."""
    budget = LogBudget(limit_rows * ROW_BYTES)
    logs: dict[tuple[int, int], OutputLog] = {}
    for number, place, count in actions:
        if (number, place) not in logs:
            logs[number, place] = budget.open(session(number))
        log = logs[number, place]
        log.append(step(log.end, count, 0))
        before = {key: log.num_bytes for key, log in logs.items()}
        budget.enforce()
        assert budget.num_bytes == sum(log.num_bytes for log in logs.values()) <= limit_rows * ROW_BYTES
        lost = [key for key, log in logs.items() if log.num_bytes < before[key]]
        held = {n: sum(size for (m, _), size in before.items() if m == n) for n, _ in logs}
        assert bool(lost) == (sum(before.values()) > limit_rows * ROW_BYTES)
        assert all(logs[key].num_bytes == 0 for key in lost), "whole"
        if lost:
            assert max(held.values()) == max(held[n] for n, _ in lost)
            assert all(held[n] * len(held) > limit_rows * ROW_BYTES for n, _ in lost) or len(lost) > 1


def test_a_session_counts_with_all_its_places() -> None:
    """Two places of half the size are as greedy as one: of the two, the larger goes, and the smaller session keeps its log."""
    budget = LogBudget(20 * ROW_BYTES)
    first, second, other = budget.open(session(1)), budget.open(session(1)), budget.open(session(2))
    for log, count in ((first, 5), (second, 6), (other, 9)):
        log.append(step(0, count, 0))
    budget.enforce()
    assert [log.end for log in (first, second, other)] == [5, 6, 9]
    other.append(step(9, 1, 0))
    budget.enforce()
    assert [log.end for log in (first, second, other)] == [5, 0, 10]


def test_a_closed_log_gives_its_bytes_back() -> None:
    budget = LogBudget(10 * ROW_BYTES)
    first, second = budget.open(session(1)), budget.open(session(2))
    first.append(step(0, 8, 0))
    budget.close(first)
    budget.close(first)
    second.append(step(0, 10, 0))
    budget.enforce()
    assert (budget.num_bytes, second.end) == (10 * ROW_BYTES, 10)


def test_without_a_budget_nothing_is_kept() -> None:
    budget = LogBudget(0)
    log = budget.open(session(1))
    log.append(step(0, 1, 0))
    budget.enforce()
    assert budget.num_bytes == 0 and not log.covers(1)


def test_news_without_rows_are_not_logged() -> None:
    """The last hop's "computed up to here" has no rows, and is no gap either."""
    log = OutputLog()
    log.append(step(0, 3, 0))
    log.append(step(90, 0, 0))
    assert log.covers(3) and log.end == 3


@given(st.integers(1, 30), st.integers(1, 40), st.booleans(), st.booleans())
def test_a_split_step_joins_to_itself(count: int, at: int, has_ids: bool, has_rows: bool) -> None:
    """Nothing but the cut; no bytes are copied by splitting."""
    whole = step(7, count, 1, has_ids=has_ids or not has_rows, has_rows=has_rows)
    head, rest = split_step(whole, at)
    assert (rest is None) == (at >= count)
    joined = join([head] if rest is None else [head, rest])
    assert joined.ids == whole.ids and joined.count == count and joined.position == 7
    if whole.payload is not None:
        assert joined.payload is not None and bytes(joined.payload.data) == whole.payload.data
