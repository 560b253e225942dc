"""An index that chooses positions: against numpy and transformers, and the same bits however rows come together."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from manyhands.core import Precision, Span
from manyhands.engine import library
from manyhands.engine.cache import SessionCache, bytes_per_position
from manyhands.engine.cpu import CpuSpan
from manyhands.engine.golden_cases import reals, stored
from manyhands.engine.golden_models import PRECISIONS
from manyhands.engine.library import Plan, Team
from manyhands.engine.span import Piece
from manyhands.engine.torch import TorchSpan
from manyhands.errors import ModelError
from manyhands.program.families import read_program
from manyhands.program.ops import LatentAttention, Layer, Op, Program, Rotary
from manyhands.testing.tiny import make_tiny
from tests.engine.oracle import NativePair, Pair
from tests.engine.test_cpu import reader
from tests.nightly import daily
from tests.worker.pipeline import Loader, in_company, pieces, random_ids

FAMILIES = (
    *("deepseek_v32", "glm_moe_dsa", "glm_moe_dsa_shared", "hy_v4", "hy_v4_shared", "axk2", "dots3_note_text"),
    "mistral_large4_text",
)
Floats = NDArray[np.float32]


def plan_of(back_end: str, heads: int, width: int, top_k: int, positions: int = 4096) -> Plan:
    """Rows (queries, key, weights) -> the positions that they see."""
    widths = [heads * width + width + heads, heads * width, width, heads, top_k]
    plan = Plan(back_end, "f32", widths, 4, "f32", positions)
    at = 0
    for target, count in enumerate(widths[1:4], 1):
        plan.add(library.COPY, (0, target, at, 0, count, 1, 0, 0))
        at += count
    plan.add(library.INDEX, (1, 2, 3, 4, heads, width))
    return plan


def chosen(plan: Plan, rows: Floats, sizes: Sequence[int], threads: int = 1) -> Floats:
    """What rows of one session see [rows, top_k], in steps of these sizes."""
    cache, team, out, at = SessionCache(plan), Team(4), [], 0
    for count in sizes:
        given = np.ascontiguousarray(rows[at : at + count]).view(np.uint8).reshape(-1)
        out.append(plan.run(team, threads, [cache.segment(at, 0, count)], given, count).view(np.float32))
        cache.done(at := at + count)
    return np.concatenate(out)


def by_numpy(rows: Floats, heads: int, width: int, top_k: int, first: int = 0) -> Floats:
    """The same from row `first` on, for numbers whose products and sums are exact."""
    query, key, weight = np.split(rows, [heads * width, heads * width + width], axis=1)
    products = np.einsum("thi,li->thl", query[first:].reshape(-1, heads, width), key)
    scores = np.einsum("th,thl->tl", weight[first:], np.maximum(products, 0))
    found = np.full((len(scores), top_k), -1, np.float32)
    for row, score in enumerate(scores):
        best = np.sort(np.argsort(-score[: first + row + 1], kind="stable")[:top_k])
        found[row, : len(best)] = best
    return found


def whole_numbers(seed: int, rows: int, heads: int, width: int) -> Floats:
    """Small whole numbers: many scores are equal, and none is rounded."""
    return np.random.default_rng(seed).integers(-2, 3, (rows, heads * width + width + heads)).astype(np.float32)


@pytest.mark.parametrize("back_end", library.supported())
@pytest.mark.parametrize(("heads", "width", "top_k"), [(1, 3, 1), (4, 20, 7), (33, 32, 64), (5, 70, 100)])
def test_the_highest_are_chosen_and_of_equals_the_first(back_end: str, heads: int, width: int, top_k: int) -> None:
    rows = whole_numbers(1, 330, heads, width)
    plan = plan_of(back_end, heads, width, top_k)
    wanted = by_numpy(rows, heads, width, top_k)
    assert np.array_equal(chosen(plan, rows, [330]), wanted)
    assert np.array_equal(chosen(plan, rows, [300, 1, 1, 28], 4), wanted)


def test_many_rows_of_a_long_session_are_scored_in_turns() -> None:
    """More scores than are held at once, on several threads."""
    rows = whole_numbers(2, 16_000, 2, 4)
    found = chosen(plan_of(library.supported()[0], 2, 4, 16, 16_000), rows, pieces(16_000, 288), 4)
    assert np.array_equal(found[-300:], by_numpy(rows, 2, 4, 16, first=15_700))


def test_scores_that_are_no_number_come_last_and_zeros_are_equal() -> None:
    """Of one head: the score is the weight times the key, if that is positive."""
    rows = np.zeros((6, 3), np.float32)
    rows[:, 0], rows[:, 1] = 1, [1, -1, 2, 0, 3, 2]
    rows[:, 2] = [1, 1, 1, np.nan, 1, -1]
    for back_end in library.supported():
        found = chosen(plan_of(back_end, 1, 1, 2), rows, [6])
        assert found[3].tolist() == [0, 1]  # none is a number
        assert found[4].tolist() == [2, 4]
        assert found[5].tolist() == [1, 3]  # zeros of either sign, before negative ones


def attended(back_end: str, row_type: str, widths: Sequence[int], x: Floats, chosen: Sequence[int]) -> Floats:
    """The last row of latent attention of 5 heads, by rows (queries, key, positions)."""
    plan, at = Plan(back_end, row_type, widths, 4, "f32", 4096), 0
    for target, count in enumerate(widths[1:4], 1):
        plan.add(library.COPY, (0, target, at, 0, count, 1, 0, 0))
        at += count
    plan.add(library.ATTENTION, (1, 2, 2, 4, 5, 1, widths[2], widths[4] // 5, 0, 1, 0, *chosen), (0.2, 0.0))
    given = np.ascontiguousarray(stored(x, row_type)).view(np.uint8).reshape(-1)
    cache = SessionCache(plan)
    out = plan.run(Team(2), 2, [cache.segment(0, 0, len(x))], given, len(x))
    return np.asarray(out.view(np.float32)[-1])


@pytest.mark.parametrize("row_type", ["bf16", "f32"])
@pytest.mark.parametrize("back_end", library.supported())
def test_attention_over_chosen_positions_is_that_of_a_session_of_these_alone(back_end: str, row_type: str) -> None:
    key, rank, most = 24, 17, 70
    picked = np.sort(np.random.default_rng(3).choice(199, most, replace=False))
    picked[-1] = 199
    rows, widths = reals(5, 200, 6 * key), [6 * key + most, 5 * key, key, most, 5 * rank]
    x = np.concatenate([rows, np.tile(picked.astype(np.float32), (200, 1))], axis=1)
    found = attended(back_end, row_type, widths, x, (3,))
    assert np.array_equal(found, attended(back_end, row_type, widths, x[picked], ()))
    assert not np.array_equal(found, attended(back_end, row_type, widths, x, ()))


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -1.0, 1e9, 200.0])
def test_a_position_that_is_none_reads_nothing_beyond_the_cache(wrong: float) -> None:
    """A register that an operation between has changed: the row's own position takes the place of what is out of bounds."""
    widths, rows = [6 * 8 + 4, 5 * 8, 8, 4, 5 * 8], reals(6, 100, 6 * 8)
    found, wanted = (
        attended("scalar", "f32", widths, np.concatenate([rows, np.full((100, 4), value, np.float32)], axis=1), (3,))
        for value in (wrong, 99.0)
    )
    assert np.array_equal(found, wanted)


INDEX_SHAPE = [1, 2, 3, 4, 5, 6]
ATTENTION_SHAPE = [1, 2, 2, 5, 5, 1, 6, 4, 0, 1, 0, 4]


@pytest.mark.parametrize(
    ("kind", "place", "value"),
    [
        *((library.INDEX, place, value) for place, value in ((0, 7), (1, -1), (2, 7), (3, 7), (3, 2), (4, 0), (4, 4))),
        *((library.INDEX, place, value) for place, value in ((4, 1 << 40), (5, 0), (5, 7), (0, 2), (1, 1), (2, 1))),
        *(
            (library.ATTENTION, place, value)
            for place, value in ((11, 7), (11, -1), (11, 5), (8, -3), (8, 513), (9, 0))
        ),
    ],
)
def test_what_does_not_fit_is_refused(kind: int, place: int, value: int) -> None:
    shape = list(INDEX_SHAPE if kind == library.INDEX else ATTENTION_SHAPE)
    plan = Plan("scalar", "f32", [8, 30, 6, 5, 4, 20], 4, "f32", 128)
    plan.add(kind, shape, (1.0,))
    shape[place] = value
    with pytest.raises(ModelError, match="the engine refused"):
        plan.add(kind, shape, (1.0,))


@pytest.mark.parametrize("kind", [library.INDEX, library.ATTENTION])
def test_more_positions_than_a_register_can_name_are_refused(kind: int) -> None:
    for positions, fits in ((1 << 24, True), ((1 << 24) + 1, False)):
        plan = Plan("scalar", "f32", [8, 30, 6, 5, 4, 20], 4, "f32", positions)
        shape = INDEX_SHAPE if kind == library.INDEX else ATTENTION_SHAPE
        if fits:
            plan.add(kind, shape, (1.0,))
            continue
        with pytest.raises(ModelError, match="the engine refused"):
            plan.add(kind, shape, (1.0,))


MANY_HEADS: dict[str, Any] = {"index_n_heads": 16, "seed": 1}  # few would have scores of zero, which are equal
SEEDS: dict[str, dict[str, Any]] = {
    "axk2": {"seed": 4},
    "dots3_note_text": {"seed": 5},
    "mistral_large4_text": {"seed": 3},
}
PROMPT = [(37 * i * i + 11 * i) % 256 for i in range(200)]


@pytest.mark.parametrize(("family", "top_k"), list(product(FAMILIES, (4, 16, 64))))
def test_logits_are_those_of_transformers_far_beyond_what_is_chosen(family: str, top_k: int, tmp_path: Path) -> None:
    """200 positions, whose choice no rounding decides; a model that sees all has other logits behind the first top_k."""
    pair = NativePair(tmp_path, family, {**MANY_HEADS, **SEEDS.get(family, {}), "index_topk": top_k})
    assert 5e-6 < pair.least_gap(PROMPT) < 1, "take another seed"
    theirs, ours = pair.theirs(PROMPT), pair.ours(PROMPT, pair.span.new_cache(200))
    assert float((ours - theirs).abs().max() / theirs.abs().max()) < 2e-5
    for layer in pair.model.model.layers:
        if layer.self_attn.indexer is not None:
            layer.self_attn.indexer.index_topk = 512
    assert pair.least_gap(PROMPT) == math.inf
    differs = (pair.theirs(PROMPT) - theirs).abs().amax(-1) / theirs.abs().max()
    assert float(differs[:top_k].max()) < 1e-6 and float(differs[top_k:].median()) > 1e-3


def test_indexers_turn_as_their_family_says(tmp_path: Path) -> None:
    """With the same weights pairs that turn choose otherwise than halves do: neither family is tested by the other."""
    pair = Pair(tmp_path, "deepseek_v32", {"index_topk": 16})

    def turned(op: Op) -> Op:
        return replace(op, pairs=True) if isinstance(op, Rotary) and op.target in ("iq", "ik") else op

    ours = pair.ours(PROMPT, pair.span.new_cache(200))
    pair.span = TorchSpan(with_ops(pair.program, turned), pair.span.span, pair.read)
    other = pair.ours(PROMPT, pair.span.new_cache(200))
    assert float((other - ours).abs().max() / ours.abs().max()) > 1e-3


def test_a_row_that_sees_all_has_the_bits_of_one_that_leaves_out_none(tmp_path: Path) -> None:
    """Up to top_k positions nothing is chosen; a row behind them leaves one out."""
    folder = make_tiny("deepseek_v32", tmp_path, layers=1, context=256, index_topk=100)
    program = read_program(folder)
    precisions: tuple[Precision, ...] = ("bf16", "fp32")
    for back_end, precision in product(library.supported(), precisions):
        out = []
        for top_k in (100, 256):
            held = with_top_k(program, top_k)
            span = CpuSpan(held, Span(0, 1), reader(folder), precision, Team(2), back_end)
            width = program.hidden * (2 if precision == "bf16" else 4)
            x = reals(9, 130, program.hidden)
            rows = (x.view(np.uint32) >> 16).astype(np.uint16) if precision == "bf16" else x
            out.append(
                span.step(rows.view(np.uint8).reshape(130, width).tobytes(), [Piece(span.new_cache(), 0, 130)], 2)
            )
        same = (out[0] == out[1]).all(1)
        assert same[:100].all() and not same[100:].any()


def with_top_k(program: Program, top_k: int) -> Program:
    """The program, choosing so many."""

    def changed(op: Op) -> Op:
        if not isinstance(op, LatentAttention) or op.index is None:
            return op
        return replace(op, index=replace(op.index, top_k=top_k))

    return with_ops(program, changed)


def with_ops(program: Program, changed: Callable[[Op], Op]) -> Program:
    """The program with other operations."""
    return replace(program, layers=tuple(Layer(tuple(map(changed, layer.ops))) for layer in program.layers))


BY_DAY: tuple[tuple[str, Precision], ...] = (
    ("deepseek_v32", "bf16"),
    ("glm_moe_dsa", "w4"),
    ("glm_moe_dsa_shared", "bf16"),
    ("hy_v4", "bf16"),
    ("hy_v4_shared", "w4"),
    ("axk2", "bf16"),
    ("mistral_large4_text", "w8"),
)


@pytest.mark.parametrize(
    ("family", "precision"), daily(BY_DAY, [pair for pair in product(FAMILIES, PRECISIONS) if pair not in BY_DAY])
)
def test_the_same_bits_whatever_the_cut_chunks_company_threads_and_back_end(
    family: str, precision: Precision, tmp_path: Path
) -> None:
    """430 positions, of which 70 are chosen: over blocks, in steps across the first choice, with wrong rows taken back."""
    ids, other = random_ids(430, seed=8), random_ids(150, seed=9)
    folder = make_tiny(family, tmp_path, layers=3, seed=5, index_topk=70)
    want = Loader(folder, precision, "scalar").cut(0, 3).run(ids, [430])
    for back_end in library.supported():
        loader = Loader(folder, precision, back_end)
        for edges, threads, size in (((0, 3), 1, 100), ((0, 1, 3), 4, 69), ((0, 2, 3), 2, 430)):
            assert np.array_equal(loader.cut(*edges).on(threads).run(ids, pieces(430, size)), want)
        assert np.array_equal(in_company(loader.cut(0, 1, 3).on(3), ids, other), want), back_end


def test_a_fork_shares_index_keys(tmp_path: Path) -> None:
    """Two sessions that begin alike: blocks in common, and each as if it were alone."""
    folder = make_tiny("glm_moe_dsa", tmp_path, layers=2, seed=5, index_topk=20)
    program = read_program(folder)
    span = CpuSpan(program, Span(0, 2), reader(folder), "bf16", Team(2))
    rows = (reals(9, 170, program.hidden).view(np.uint32) >> 16).astype(np.uint16).view(np.uint8).reshape(170, -1)
    whole = span.step(rows.tobytes(), [Piece(span.new_cache(), 0, 170)], 2)
    source = span.new_cache()
    span.step(rows.tobytes(), [Piece(source, 0, 170)], 2)
    fork = span.fork(source, 90, 200)
    span.step(rows[:50].tobytes(), [Piece(source, 90, 50)], 2)
    assert np.array_equal(span.step(rows[90:].tobytes(), [Piece(fork, 90, 80)], 2), whole[90:])


def test_caches_hold_index_keys(tmp_path: Path) -> None:
    """As DeepSeek-V3.2 has them: 1,408 bytes a layer and position in bf16, as leases and plans count."""
    sizes: dict[str, Any] = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "index_head_dim": 128}
    folder = make_tiny("deepseek_v32", tmp_path, layers=2, **sizes)
    program = read_program(folder)
    span = CpuSpan(program, Span(0, 2), reader(folder), "bf16", Team(1))
    assert span.bytes_per_token == 2 * 1408
    assert [bytes_per_position(layer, 2) for layer in program.layers] == [1408, 1408]
    assert sum(program.layers[0].cache_widths) == 704
