"""Plans: values against numpy, rows independent of company, cuts and threads, and nothing out of bounds accepted."""

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from manyhands.engine import golden_cases, library
from manyhands.engine.cache import SessionCache
from manyhands.engine.golden_cases import Op, product, reals, stored
from manyhands.engine.golden_small import blocks
from manyhands.engine.golden_variants import several
from manyhands.engine.layout import Segment
from manyhands.engine.library import TYPES, Array, Plan, Team
from manyhands.engine.quants import pack_blocks
from manyhands.engine.states import DELTA_SCAN
from manyhands.engine.weights import Stored, as_fp32
from manyhands.errors import ContextOverflow, ModelError

HIDDEN = 40
WIDTHS = [HIDDEN, 4 * 24, 2 * 24, 2 * 16, 4 * 16, HIDDEN, 50, 50]


def layer(back_end: str, row_type: str = "bf16", positions: int = 600, window: int = 0) -> Plan:
    """A small layer with all that rows could leak through: norm, products, rotary, attention, gate, add."""
    plan = Plan(back_end, row_type, [HIDDEN, *WIDTHS], 0, row_type, positions)
    rates = np.array([0.8**i for i in range(12)], np.float32)
    plan.add(library.NORM, (0, 1, 1, 0), (1e-6, 0.0), (reals(1, HIDDEN), None))
    for i in (2, 3, 4):
        plan.add(*product(10 * i, 1, i, WIDTHS[i - 1], HIDDEN))
    plan.add(library.ROTARY, (2, 4, 24, 0, 12, 0), (1.0,), (rates,))
    plan.add(library.ROTARY, (3, 2, 24, 0, 12, 0), (1.0,), (rates,))
    plan.add(library.ATTENTION, (2, 3, 4, 5, 4, 2, 24, 16, window), (24**-0.5, 0.0), (None,))
    plan.add(*product(50, 5, 6, HIDDEN, 64))
    plan.add(library.ADD, (6, 1), (1.0,))
    plan.add(*product(60, 0, 7, 50, HIDDEN))
    plan.add(*product(62, 0, 8, 50, HIDDEN))
    plan.add(library.GATE, (7, 8, 7, 1), (1.0, 0.0, 0.0))
    plan.add(*product(64, 7, 6, HIDDEN, 50))
    plan.add(library.ADD, (6, 1), (0.01,))
    return plan


def flat(rows: Array) -> Array:
    return np.ascontiguousarray(rows).view(np.uint8).reshape(-1)


def steps(plan: Plan, team: Team, rows: Array, cuts: Sequence[int], threads: int = 2) -> Array:
    """One session's rows, so many at a step."""
    cache, out, at = SessionCache(plan), [], 0
    for count in cuts:
        out.append(plan.run(team, threads, [cache.segment(at, 0, count)], flat(rows[at : at + count]), count))
        at += count
    assert at == len(rows)
    return np.concatenate(out)


@pytest.mark.parametrize("row_type", ["bf16", "f32"])
@pytest.mark.parametrize("window", [0, 70, -50, -128])
def test_rows_do_not_depend_on_cuts_threads_or_back_end(team: Team, row_type: str, window: int) -> None:
    rows = stored(reals(3, 300, HIDDEN), row_type)
    whole = steps(layer("scalar", row_type, window=window), team, rows, [300], 1)
    assert np.isfinite(reals(3, 1)).all() and len(np.unique(whole, axis=0)) == 300
    for back_end in library.supported():
        for threads, cuts in ((1, [300]), (2, [1] * 70 + [230]), (4, [64, 63, 65, 1, 7, 100]), (4, [255, 45])):
            assert np.array_equal(steps(layer(back_end, row_type, window=window), team, rows, cuts, threads), whole)


def test_rows_that_exceed_a_cache_take_parts_of_k(team: Team) -> None:
    """288 rows of 2,400 numbers are more than L2 holds beside weights, and 17 panels more than take turns in tiles."""
    rows = stored(reals(4, 320, HIDDEN), "bf16")

    def wide(back_end: str) -> Plan:
        plan = Plan(back_end, "bf16", [HIDDEN, 2400, 17 * 16 - 3, HIDDEN], 0, "bf16", 400)
        plan.add(*product(70, 0, 1, 2400, HIDDEN))
        plan.add(*product(72, 1, 2, 17 * 16 - 3, 2400))
        plan.add(*product(74, 2, 3, HIDDEN, 17 * 16 - 3))
        plan.add(library.ADD, (3, 1), (1.0,))
        return plan

    whole = steps(wide("scalar"), team, rows, [320], 1)
    assert len(np.unique(whole, axis=0)) == 320
    for back_end in library.supported():
        for threads, cuts in ((1, [320]), (2, [288, 32]), (2, [1, 17, 33, 269])):
            assert np.array_equal(steps(wide(back_end), team, rows, cuts, threads), whole)


def test_rows_do_not_depend_on_company_or_rollback(team: Team) -> None:
    """Seven sessions at ragged positions in one call; then each steps again from earlier positions with other rows."""
    for back_end in library.supported():
        plan, sessions = layer(back_end), [stored(reals(30 + i, 90, HIDDEN), "bf16") for i in range(7)]
        alone = [steps(layer(back_end), team, rows, [90]) for rows in sessions]
        caches, at = [SessionCache(plan) for _ in sessions], [0] * 7
        for turn in range(6):
            counts = [(5 * i + 3 * turn) % 12 + 1 for i in range(7)]
            segments, row = [], 0
            for i, count in enumerate(counts):
                segments.append(caches[i].segment(at[i], row, count))
                row += count
            batch = np.concatenate([sessions[i][at[i] : at[i] + count] for i, count in enumerate(counts)])
            out = plan.run(team, 4, segments, flat(batch), row)
            for i, count in enumerate(counts):
                (segment,) = (s for s in [segments[i]])
                assert np.array_equal(out[segment.row : segment.row + count], alone[i][at[i] : at[i] + count])
                at[i] += count
            drafts = stored(reals(80 + turn, 9, HIDDEN, around=100), "bf16")  # rejected: large, some beyond numbers
            drafts[3, :] = 0x7FC0
            plan.run(team, 2, [caches[2].segment(at[2], 0, 9)], flat(drafts), 9)


def test_values_against_numpy(team: Team) -> None:
    """fp32: a norm, a product with bias and silu, and attention, within rounding."""
    n, k = 37, 70
    x, norm, weight, bias = reals(1, 5, k), reals(2, k), reals(3, n, k), reals(4, n)
    plan = Plan("scalar", "f32", [k, k, n], 2, "f32", 8)
    plan.add(library.NORM, (0, 1, 1, 0), (1e-5, 1.0), (norm, None))
    plan.add(library.PRODUCT, (1, 2, 2, 1), (), (library.pack(weight, "f32"), bias))
    out = plan.run(team, 1, alone(plan, 5), flat(x), 5).view(np.float32)
    v = x.astype(np.float64)
    v = v / np.sqrt((v * v).mean(1, keepdims=True) + 1e-5) * (1 + norm)
    z = v @ weight.T.astype(np.float64) + bias
    assert np.abs(out - z / (1 + np.exp(-z))).max() < 2e-5


def attended(x: NDArray[np.float32], weights: Sequence[Any], scale: float, window: int) -> NDArray[np.float64]:
    q, k, v = (x.astype(np.float64) @ w.T for w in weights)
    score = q @ k.T * scale
    i = np.arange(len(x))
    score[(i[None] > i[:, None]) | (i[None] <= i[:, None] - window)] = -np.inf
    weight = np.exp(score - score.max(1, keepdims=True))
    return np.asarray(weight / weight.sum(1, keepdims=True) @ v)


def test_attention_against_numpy(team: Team) -> None:
    weights = [reals(5 + i, 20, 12) for i in range(3)]
    plan = Plan("scalar", "f32", [12, 20, 20, 20, 20], 4, "f32", 300)
    for i, weight in enumerate(weights):
        plan.add(library.PRODUCT, (0, i + 1, 2, 0), (), (library.pack(weight, "f32"), None))
    plan.add(library.ATTENTION, (1, 2, 3, 4, 1, 1, 20, 20, 100), (0.05, 0.0), (None,))
    x = reals(9, 200, 12)
    out = steps(plan, team, x, [200]).view(np.float32)
    assert np.abs(out - attended(x, weights, 0.05, 100)).max() < 1e-5


def alone(plan: Plan, count: int) -> list[Segment]:
    return [SessionCache(plan).segment(0, 0, count)]


def test_a_step_beyond_the_positions_is_refused(team: Team) -> None:
    plan = layer("scalar", positions=70)
    cache = SessionCache(plan)
    rows = stored(reals(3, 71, HIDDEN), "bf16")
    with pytest.raises(ContextOverflow):
        plan.run(team, 1, [cache.segment(0, 0, 71)], flat(rows), 71)
    with pytest.raises(ContextOverflow):
        plan.run(team, 1, [cache.segment(70, 0, 1)], flat(rows[:1]), 1)


@pytest.mark.parametrize(
    "change",
    [
        {"num_blocks": 0},
        {"num_blocks": -1},
        {"start": -1},
        {"start": 1 << 40},
        {"start": 599},
        {"count": 0},
        {"count": 3},
        {"count": -1},
        {"row": 1},
        {"blocks": None},
    ],
)
def test_segments_that_reach_beyond_are_refused(team: Team, change: dict[str, Any]) -> None:
    plan = layer("scalar")
    cache = SessionCache(plan)
    segment = cache.segment(0, 0, 2)
    for name, value in change.items():
        setattr(segment, name, value)
    rows = flat(stored(reals(3, 2, HIDDEN), "bf16"))
    with pytest.raises((ModelError, ContextOverflow)):
        plan.run(team, 1, [segment], rows, 2)
    with pytest.raises(ModelError):
        plan.run(team, 1, [cache.segment(0, 0, 1), cache.segment(0, 1, 1)], rows, 2)  # one cache twice
    for given in (rows[1:], rows.tobytes()[1:], b""):
        with pytest.raises(ModelError):
            plan.run(team, 1, [cache.segment(0, 0, 2)], given, 2)


def test_a_block_that_is_missing_is_refused(team: Team) -> None:
    plan, rows = layer("scalar"), flat(stored(reals(3, 130, HIDDEN), "bf16"))
    cache = SessionCache(plan)
    segment = cache.segment(0, 0, 130)
    for number in range(3):
        cache._table[number], kept = 0, cache._table[number]
        with pytest.raises(ModelError, match="cache"):
            plan.run(team, 1, [segment], rows, 130)
        cache._table[number] = kept
    plan.run(team, 1, [segment], rows, 130)


def test_rows_may_be_bytes(team: Team) -> None:
    """Also of a cache that grew, and so moved, between steps."""
    plan, rows = layer("scalar"), stored(reals(3, 300, HIDDEN), "bf16")
    cache = SessionCache(plan, 1)
    out = [plan.run(team, 2, [cache.segment(at, 0, 150)], flat(rows[at : at + 150]).tobytes(), 150) for at in (0, 150)]
    assert np.array_equal(np.concatenate(out), steps(plan, team, rows, [300]))


OPS: list[tuple[int, Sequence[int], Sequence[float], Sequence[Array | None]]] = [
    (99, (), (), ()),
    (library.NORM, (0, 64, 1, 0), (1e-5, 0.0), ()),
    (library.NORM, (0, -1, 1, 0), (1e-5, 0.0), ()),
    (library.NORM, (0, 1, 7, 0), (1e-5, 0.0), ()),
    (library.NORM, (0, 0, 1, 0), (1e-5, 0.0), (np.zeros(39, np.float32),)),
    (library.PRODUCT, (0, 1, 0, 0), (), (np.zeros(40 * 96, np.uint16), None)),
    (library.PRODUCT, (0, 1, 3, 0), (), (np.zeros(96 * 64, np.uint16), None)),
    (library.ROTARY, (1, 4, 24, 2, 12, 0), (1.0,), (np.zeros(12, np.float32),)),
    (library.ROTARY, (1, 4, 24, 0, 12, 0), (1.0,), (np.zeros(11, np.float32),)),
    (library.ATTENTION, (1, 2, 3, 4, 4, 3, 24, 16, 0), (1.0, 0.0), ()),
    (library.ATTENTION, (1, 2, 3, 4, 4, 2, 24, 17, 0), (1.0, 0.0), ()),
    (library.ATTENTION, (1, 2, 3, 4, 4, 2, 24, 16, -(1 << 28) - 1), (1.0, 0.0), ()),
    (library.ATTENTION, (1, 2, 3, 4, 4, 2, 24, 16, (1 << 28) + 1), (1.0, 0.0), ()),
    (library.ATTENTION, (1, 2, 3, 4, 4, 2, 24, 16, 0), (1.0, 0.0), (np.zeros(3, np.float32),)),
    (library.GATE, (1, 2, 1, 0), (1.0, 0.0, 0.0), ()),
    (library.GATE, (1, 1, 1, 8), (1.0, 0.0, 0.0), ()),
    (library.ADD, (0, 1), (1.0,), ()),
    (library.ADD, (1, 1), (1.0,), ()),
    (library.MULTIPLY, (2, 3, 2), (), ()),
    (library.MULTIPLY, (3, 1, 3), (), ()),
    (library.MULTIPLY, (1, 1, 1), (), ()),
    (library.MULTIPLY, (1, 2, 3), (), ()),
    (library.MULTIPLY, (1, 64, 1), (), ()),
    (library.SOFTEN, (64,), (1.0, 0.0), ()),
    (library.SCALE, (64, 8), (0.1,), ()),
    (library.SCALE, (0, 0), (0.1,), ()),
    (library.SCALE, (0, 8), (-0.1,), ()),
    (library.SCALE, (0, 8), (1.1e15,), ()),
    (library.SCALE, (0, 8), (math.nan,), ()),
    (library.SCALE, (0, 8, -1), (0.1,), ()),
    (library.XIELU, (64,), (), (np.zeros(4, np.float32),)),
    (library.XIELU, (0,), (), ()),
    (library.XIELU, (0,), (), (np.zeros(3, np.float32),)),
    (library.SCALE, (0, 8, 2), (0.1,), ()),
    *((library.SCALE, (0, 1, 0, 0, heads), (0.0,), (np.zeros(heads, np.float32),) * 2) for heads in (3, 41, 80)),
    (library.SCALE, (0, 1, 0, 0, -1), (0.0,), (np.zeros(1, np.float32),) * 2),
    (library.SCALE, (0, 1, 0, 1, 4), (0.0,), (np.zeros(4, np.float32),) * 2),
    (library.SCALE, (0, 1, 0, 0, 4), (0.0,), (np.zeros(4, np.float32),)),
    (library.SCALE, (0, 1, 0, 0, 4), (0.0,), (np.zeros(4, np.float32), np.zeros(5, np.float32))),
    (library.SCALE, (0, 1, 0, 0, 4), (0.0,), (None, np.zeros(4, np.float32))),
    (library.SCALE, (0, 8, 1, 3), (0.1,), ()),
    (library.SCALE, (0, 8, 1, 2), (1.1e15,), ()),
    (library.SCALE, (0, 8, 1, 1), (4.1,), ()),
    (library.SCALE, (0, 8, 1, 1), (math.nan,), ()),
    (library.POSITION, (64, TYPES["bf16"], 0), (), (np.zeros((100, 40), np.uint16),)),
    (library.POSITION, (-1, TYPES["bf16"], 0), (), (np.zeros((100, 40), np.uint16),)),
    (library.POSITION, (0, TYPES["w8"], 0), (), (np.zeros((100, 40), np.float32),)),
    (library.POSITION, (0, -1, 0), (), (np.zeros((100, 40), np.float32),)),
    (library.POSITION, (0, TYPES["bf16"], -1), (), (np.zeros((100, 40), np.uint16),)),
    (library.POSITION, (0, TYPES["bf16"], 1 << 62), (), (np.zeros((100, 40), np.uint16),)),
    (library.POSITION, (0, TYPES["bf16"], 1), (), (np.zeros((64, 40), np.uint16),)),
    (library.POSITION, (0, TYPES["f32"], 0), (), (np.zeros((100, 40), np.uint16),)),
    (library.POSITION, (0, TYPES["bf16"], 0), (), ()),
    (library.MIX, (0, -1, 64, 20, 1, 1, 0, 0), (0.0,), ()),
    (library.MIX, (0, -2, 1, 20, 1, 1, 0, 0), (0.0,), ()),
    (library.MIX, (0, 64, 1, 20, 1, 1, 0, 0), (0.0,), ()),
    (library.MIX, (0, 2, 1, 20, 2, 2, 0, 0), (0.0,), ()),
    (library.MIX, (0, -1, 0, 20, 1, 1, 0, 0), (0.0,), ()),
    (library.MIX, (0, -1, 1, 20, 2, 1, 1, 0), (0.0,), ()),
    (library.MIX, (0, -1, 1, 20, 1, 5, 0, 0), (0.0,), ()),
    (library.MIX, (0, -1, 1, 20, 1, 1, -1, 0), (0.0,), ()),
    (library.MIX, (0, -1, 1, 20, 1, 1, 0, 1 << 62), (0.0,), ()),
    (library.MIX, (0, -1, 1, 0, 1, 1, 0, 0), (0.0,), ()),
    (library.MIX, (0, -1, 1, 1 << 40, 1 << 40, 1, 0, 0), (0.0,), ()),
    (library.RESCALE, (0, 64, 0), (0.0,), ()),
    (library.RESCALE, (0, 1, 1), (0.0,), ()),
    (library.RESCALE, (0, 0, 0), (0.0,), ()),
    (library.SPARSIFY, (64,), (0.0,), ()),
    (library.SPARSIFY, (-1,), (0.0,), ()),
    (library.COPY, (0, 1, 0, 0, 4, 1, 0, 0, 2), (), ()),
    (library.COPY, (0, 1, 0, 0, 4, 2, 4, 0), (), ()),
    (library.DELTA, (1, 1, 2, 2, 2, 3, 1, 1, 96, 48, 4), (), ()),
    (library.DELTA, (1, 1, 2, 2, 2, 3, 2, 1, 48, 24, DELTA_SCAN), (), (None, np.zeros(48 * 24, np.float32))),
    (library.MULTIPLY, (0, 0, 0), (), (np.zeros(39, np.float32),)),
    (library.ROUTE, (0, 5, 40, 20, 5, 0, 1, 1), (1.0, 0.0), ()),
    (library.ROUTE, (0, 5, 40, 20, 2, 1, 1, 1), (1.0, 0.0), ()),
]


def test_rows_are_scaled_by_their_positions_in_every_session() -> None:
    """1 + beta log(1 + floor((p + offset) / length)) in double, rounded once, whatever the rows in company."""
    x, beta = reals(1, 60, 40), 0.3
    for length, offset in itertools.product((1, 7, 32, 60), (0, 1)):
        factors = [np.float32(1 + beta * math.log(1 + (position + offset) // length)) for position in range(60)]
        op: Op = (library.SCALE, (0, length, offset), (beta,), ())
        for name in library.supported():
            found = golden_cases.BackEnd(name, Team(1)).run(x, "f32", [1], [op], 0).view(np.float32)
            assert np.array_equal(found, x * np.array(factors)[:, None])


@pytest.mark.parametrize("type_name", ["bf16", "f16", "f32"])
@pytest.mark.parametrize("offset", [0, 2])
def test_rows_of_a_table_come_by_position_as_they_are_stored(type_name: str, offset: int) -> None:
    """Whatever the rows in company; behind `offset` rows that no position reads."""
    table = stored(reals(1, 600 + offset, 40), type_name)
    numbers = as_fp32(Stored(type_name, table))
    op: Op = (library.POSITION, (1, TYPES[type_name], offset), (), (table,))
    for name in library.supported():
        plan = Plan(name, "f32", [40, 40], 1, "f32", 600)
        plan.add(*op)
        segments = [Segment(None, 0, start, row, count) for start, row, count in ((599, 0, 1), (0, 1, 3), (64, 4, 5))]
        found = plan.run(Team(1), 1, segments, flat(np.zeros((9, 40), np.float32)), 9).view(np.float32)
        places = [599, 0, 1, 2, 64, 65, 66, 67, 68]
        assert np.array_equal(found, numbers[[place + offset for place in places]])
        with pytest.raises(ContextOverflow):
            plan.run(Team(1), 1, [Segment(None, 0, 600, 0, 1)], flat(np.zeros((1, 40), np.float32)), 1)


@pytest.mark.parametrize("heads", [1, 5, 40])
def test_each_head_is_scaled_by_its_own_factor_of_the_position(heads: int) -> None:
    """scale log(1 + p) + bias in double, rounded once."""
    x, scales, biases = reals(1, 60, 40), reals(2, heads, around=0), reals(3, heads, around=1)
    logs = np.array([math.log(1 + position) for position in range(60)])
    factors = (logs[:, None] * scales.astype(np.float64) + biases.astype(np.float64)).astype(np.float32)
    op: Op = (library.SCALE, (0, 1, 0, 0, heads), (0.0,), (scales, biases))
    for name in library.supported():
        found = golden_cases.BackEnd(name, Team(1)).run(x, "f32", [1], [op], 0).view(np.float32)
        assert np.array_equal(found, x * factors.repeat(40 // heads, axis=1))


@pytest.mark.parametrize("parts", [1, 3, 5, 33, 165])
def test_each_part_of_a_row_is_multiplied_by_its_number(parts: int) -> None:
    """In place and not; parts of one number, of some, and wider than the lanes."""
    x, k = reals(1, 9, 165), 165
    by = product(3, 0, 1, parts, k)
    for name, target in itertools.product(library.supported(), (0, 2)):
        machine = golden_cases.BackEnd(name, Team(1))
        numbers = machine.run(x, "f32", [parts, k], [by], 1).view(np.float32)
        ops: list[Op] = [by, (library.MULTIPLY, (0, 1, target), (), ())]
        found = machine.run(x, "f32", [parts, k], ops, target).view(np.float32)
        assert np.array_equal(found, x * np.repeat(numbers, k // parts, axis=1))


@pytest.mark.parametrize("numbered", [True, False])
def test_parts_of_a_row_are_mixed_and_columns_replaced(numbered: bool) -> None:
    """Against numpy: three parts of a row into two of another, which then take the place of columns of the first."""
    x, width, k = reals(1, 9, 70), 19, 70
    ops = [product(3, 0, 1, 6, k), product(5, 0, 2, 45, k)]
    for name, row_type in itertools.product(library.supported(), ("f32", "bf16")):
        machine = golden_cases.BackEnd(name, Team(1))
        numbers, before = (machine.run(x, "f32", [6, 45], ops, i).view(np.float32) for i in (1, 2))
        by = (numbers + np.float32(0.5)).reshape(9, 2, 3) if numbered else np.ones((9, 2, 3), np.float32)
        parts = np.einsum("nba,naw->nbw", by, x[:, 11 : 11 + 3 * width].reshape(9, 3, width))
        want = before.copy()
        want[:, 5 : 5 + 2 * width] += parts.reshape(9, -1)
        mix: Op = (library.MIX, (0, 1 if numbered else -1, 2, width, 3, 2, 11, 5), (0.5,), ())
        found = machine.run(x, "f32", [6, 45], [*ops, mix], 2).view(np.float32)
        assert np.abs(found - want).max() < 1e-5 * np.abs(want).max()
        if row_type == "bf16":
            continue
        copy: Op = (library.COPY, (2, 0, 5, 30, 2 * width, 1, 0, 0, 1), (), ())
        back = machine.run(x, "f32", [6, 45], [*ops, mix, copy], 0).view(np.float32)
        assert np.array_equal(back[:, 30:68], found[:, 5:43])  # rows in fp32 are not rounded
        assert np.array_equal(np.delete(back, range(30, 68), 1), np.delete(x, range(30, 68), 1))


def test_columns_that_are_replaced_are_rounded_as_rows_are_stored() -> None:
    """Behind a norm, whose results bf16 does not hold; only where that is asked for."""
    norm: Op = (library.NORM, (0, 1, 1, 0), (1e-5, 0.0), ())
    for name, row_type in itertools.product(library.supported(), ("bf16", "f32")):
        machine, found = golden_cases.BackEnd(name, Team(1)), []
        for rounds in (0, 1):
            copy: Op = (library.COPY, (1, 0, 0, 7, 33, 1, 0, 0, rounds), (), ())
            found.append(machine.run(reals(1, 9, 40), row_type, [40], [norm, copy], 0).view(np.float32))
        want = found[0].copy()
        if row_type == "bf16":
            bits = want[:, 7:].copy().view(np.uint32)
            want[:, 7:] = ((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000).view(np.float32)
            assert not np.array_equal(want, found[0])
        assert np.array_equal(found[1], want)


def test_rows_get_the_size_of_others_and_lose_what_is_below_a_cut() -> None:
    x, vector = reals(1, 9, 70), reals(2, 70)
    made = product(3, 0, 1, 50, 70)
    for name in library.supported():
        machine = golden_cases.BackEnd(name, Team(1))
        before = machine.run(x, "f32", [50], [made], 1).view(np.float32).astype(np.float64)
        size, own = np.sqrt((x.astype(np.float64) ** 2).mean(1)), np.sqrt((before**2).mean(1))
        for least in (1e-5, 9.0):
            scaled: Op = (library.RESCALE, (1, 0, 1), (least,), ())
            found = machine.run(x, "f32", [50], [made, scaled], 1).view(np.float32)
            want = before * (size / np.maximum(own, np.sqrt(least)))[:, None]
            assert np.abs(found - want).max() < 1e-6 * np.abs(want).max()
        found = machine.run(x, "f32", [1], [(library.SPARSIFY, (0,), (0.75,), ())], 0).view(np.float32)
        cut = x.mean(1, keepdims=True) + 0.75 * x.std(1, keepdims=True)
        assert np.abs(found - np.maximum(x - cut, 0)).max() < 1e-6
        assert 0.05 < (found > 0).mean() < 0.45
        found = machine.run(x, "f32", [70], [(library.MULTIPLY, (0, 0, 1), (), (vector,))], 1).view(np.float32)
        assert np.array_equal(found, x * vector)


@pytest.mark.parametrize("op", OPS, ids=lambda op: f"{op[0]} {op[1]}")
def test_operations_that_do_not_fit_are_refused(op: Any) -> None:
    plan = Plan("scalar", "bf16", [HIDDEN, *WIDTHS[1:]], 0, "bf16", 600)
    with pytest.raises(ModelError):
        plan.add(*op)


def test_a_plan_that_has_run_takes_no_more_operations(team: Team) -> None:
    """Rows would not have the memory that these need."""
    plan = Plan("scalar", "f32", [40, 8, 40], 1, "f32", 8)
    plan.add(*product(3, 0, 1, 8, 40))
    rows = flat(reals(1, 3, 40))
    before = plan.run(team, 2, alone(plan, 3), rows, 3)
    with pytest.raises(ModelError, match="a plan that has run takes no more operations"):
        plan.add(*product(5, 0, 2, 40, 40))
    assert np.array_equal(plan.run(team, 2, alone(plan, 3), rows, 3), before)


def test_products_of_one_source_into_the_same_columns_follow_each_other() -> None:
    """Of the second are the results, though the first takes longer than it."""
    k, n, rows, back_end = 2048, 16, 288, library.supported()[0]
    slow, fast = (library.TYPES[name] for name in ("w5m", "w8"))
    first, second = (
        pack_blocks(blocks(1, n, k // 32, "Q5_1"), "Q5_1"),
        pack_blocks(blocks(2, n, k // 32, "Q8_0"), "Q8_0"),
    )
    x, pair = flat(reals(5, rows, k)), Team(2)
    plan = Plan(back_end, "f32", [k, n], 1, "f32", rows)
    plan.add(library.PRODUCT, (0, 1, slow, 2), (), (first, None))
    plan.add(library.PRODUCT, (0, 1, fast, 0), (), (second, None))
    want = plan.run(pair, 1, [Segment(None, 0, 0, 0, rows)], x, rows)
    for _ in range(200):
        assert np.array_equal(plan.run(pair, 2, [Segment(None, 0, 0, 0, rows)], x, rows), want)


def test_experts_scale_sources_that_are_as_wide_as_their_results() -> None:
    plan = Plan("scalar", "bf16", [HIDDEN, *WIDTHS[1:]], 0, "bf16", 600)
    packed = several(3, 20, 16, HIDDEN)

    def add(target: int, scales: int) -> None:
        matrices = packed, packed, several(4, 20, WIDTHS[target], 16)
        plan.add(library.EXPERTS, (0, 5, target, 20, 20, 16, 0, 1, 0, scales), (1.0, 0.0, 0.0), matrices)

    add(6, 0)
    for scales in (1, 2):
        with pytest.raises(ModelError):
            add(6, scales)


@pytest.mark.parametrize("width", [HIDDEN - 1, HIDDEN + 1, 0])
def test_results_of_experts_are_normed_by_as_many_numbers_as_they_have(width: int) -> None:
    plan, packed = Plan("scalar", "bf16", [HIDDEN, *WIDTHS[1:]], 0, "bf16", 600), several(3, 20, 16, HIDDEN)
    matrices = packed, packed, several(4, 20, WIDTHS[6], 16)

    def add(numbers: int) -> None:
        tensors = (*matrices, None, None, None, np.zeros(numbers, np.float32))
        plan.add(library.EXPERTS, (0, 5, 6, 20, 20, 16, 0, 1, 0), (1.0, 0.0, 0.0, 1e-8), tensors)

    add(WIDTHS[6])
    with pytest.raises(ModelError):
        add(WIDTHS[6] + width - HIDDEN)


def test_impossible_plans_and_matrices_are_refused() -> None:
    for widths in ([], [0], [1 << 25], [8] * 65):
        with pytest.raises(ModelError):
            Plan("scalar", "bf16", widths, 0, "bf16", 8)
    wrong = [(1, "bf16", "bf16", 8), (0, "f16", "bf16", 8), (0, "bf16", "f16", 8), (0, "bf16", "bf16", 0)]
    for out, out_type, row_type, positions in wrong:
        with pytest.raises(ModelError):
            Plan("scalar", row_type, [8], out, out_type, positions)
    with pytest.raises(ModelError):
        library.pack(np.zeros((0, 4), np.uint16), "bf16")


def test_columns_are_copied_in_any_order_and_held_to_the_register() -> None:
    x, order, copy = (
        reals(1, 5, 40),
        np.random.default_rng(1).permutation(40).astype(np.int32),
        (0, 1, 0, 0, 40, 1, 0, 0),
    )
    for name in library.supported():
        found = golden_cases.BackEnd(name, Team(1)).run(x, "f32", [40], [(library.COPY, copy, (), (order,))], 1)
        assert np.array_equal(found.view(np.float32), x[:, order])
        plan = Plan(name, "f32", [40, 40], 1, "f32", 8)
        for wrong in (order[:-1].copy(), order + np.int32(1), order - np.int32(1), order.astype(np.int64)):
            with pytest.raises(ModelError):
                plan.add(library.COPY, copy, (), (wrong,))


def test_flush_modes_are_restored() -> None:
    """Denormals count again after a call, in the thread that called."""
    tiny = np.float32(1e-40)
    library.apply("scalar", "exp", np.zeros(64, np.float32))
    golden_cases.functions(golden_cases.BackEnd("scalar", Team(1)))
    assert tiny * np.float32(0.5) > 0 and library.apply("scalar", "relu2", np.array([1e-30], np.float32))[0] == 0
