"""An index that chooses blocks of positions for each key head (minimax_m3_vl_text): against numpy and transformers, and the
same bits however rows come together."""

from collections.abc import Sequence
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
from manyhands.engine.library import BLOCK, Plan, Team
from manyhands.engine.span import Piece
from manyhands.errors import ModelError
from manyhands.program.families import read_program
from manyhands.program.ops import Attention
from manyhands.testing.tiny import make_tiny
from tests.engine.oracle import NativePair, Pair
from tests.engine.test_cpu import reader
from tests.nightly import daily
from tests.worker.pipeline import Loader, in_company, pieces, random_ids

FAMILY = "minimax_m3_vl_text"
Floats = NDArray[np.float32]


def plan_of(back_end: str, heads: int, width: int, block: int, top_k: int, local: int) -> Plan:
    """Rows (queries, key) -> the blocks of the cache that each head sees."""
    widths = [heads * width + width, heads * width, width, heads * top_k * block // BLOCK]
    plan = Plan(back_end, "f32", widths, 3, "f32", 4096)
    plan.add(library.COPY, (0, 1, 0, 0, heads * width, 1, 0, 0))
    plan.add(library.COPY, (0, 2, heads * width, 0, width, 1, 0, 0))
    plan.add(library.INDEX, (1, 2, 1, 3, heads, width, 0, block, local))
    return plan


def chosen(plan: Plan, rows: Floats, sizes: Sequence[int], threads: int = 1) -> Floats:
    """What rows of one session see, in steps of these sizes."""
    cache, team, out, at = SessionCache(plan), Team(4), [], 0
    for count in sizes:
        given = np.ascontiguousarray(rows[at : at + count]).view(np.uint8).reshape(-1)
        out.append(plan.run(team, threads, [cache.segment(at, 0, count)], given, count).view(np.float32))
        cache.done(at := at + count)
    return np.concatenate(out)


def by_numpy(rows: Floats, heads: int, width: int, block: int, top_k: int, local: int) -> Floats:
    """The same, for numbers whose products and sums are exact."""
    query, key = np.split(rows, [heads * width], axis=1)
    scores, parts = np.einsum("thi,li->htl", query.reshape(len(rows), heads, width), key), block // BLOCK
    found = np.full((len(rows), heads, top_k * parts), -1, np.float32)
    for (head, row), score in zip(product(range(heads), range(len(rows))), scores.reshape(-1, len(rows)), strict=True):
        own = row // block
        best = np.array([score[at * block : min((at + 1) * block, row + 1)].max() for at in range(own + 1)])
        best[max(0, own - local + 1) :] = best[max(0, own - local + 1) :] if local == 0 else np.inf
        blocks = np.sort(np.argsort(-best, kind="stable")[:top_k])
        numbers = (blocks[:, None] * parts + np.arange(parts)).flatten()
        numbers = numbers[numbers <= row // BLOCK]
        found[row, head, : len(numbers)] = numbers
    return found.reshape(len(rows), -1)


@pytest.mark.parametrize("back_end", library.supported())
@pytest.mark.parametrize(
    ("heads", "width", "block", "top_k", "local"),
    [(1, 3, 64, 1, 0), (4, 20, 64, 3, 1), (2, 32, 128, 1, 1), (33, 40, 128, 2, 0), (5, 70, 192, 2, 2)],
)
def test_blocks_of_the_highest_are_chosen_and_of_equals_the_first(
    back_end: str, heads: int, width: int, block: int, top_k: int, local: int
) -> None:
    """Of small whole numbers: many scores are equal, and none is rounded."""
    rows = np.random.default_rng(1).integers(-2, 3, (700, heads * width + width)).astype(np.float32)
    plan = plan_of(back_end, heads, width, block, top_k, local)
    wanted = by_numpy(rows, heads, width, block, top_k, local)
    assert np.array_equal(chosen(plan, rows, [700]), wanted)
    assert np.array_equal(chosen(plan, rows, [600, 1, 1, 98], 4), wanted)


def test_scores_that_are_no_number_do_not_count() -> None:
    rows = np.ones((200, 2), np.float32)
    rows[:, 1] = np.repeat([2.0, 1.0, 3.0, 0.0], [64, 64, 64, 8])
    rows[5, 1] = rows[130, 1] = np.nan
    for back_end in library.supported():
        assert chosen(plan_of(back_end, 1, 1, 64, 1, 0), rows, [200])[[63, 127, 190, 199], 0].tolist() == [0, 0, 2, 2]


def attended(back_end: str, row_type: str, x: Floats, chosen: Sequence[int], each: int, codes: int = 0) -> Floats:
    """The last row of attention of 6 heads over 2 key heads, by rows (queries, keys, values, blocks)."""
    wide, narrow = 24, 17
    widths = [x.shape[1], 6 * wide, 2 * wide, 2 * narrow, 2 * each, 6 * narrow]
    plan, at = Plan(back_end, row_type, widths, 5, "f32", 4096), 0
    for target, count in enumerate(widths[1:5], 1):
        plan.add(library.COPY, (0, target, at, 0, count, 1, 0, 0))
        at += count
    plan.add(library.ATTENTION, (1, 2, 3, 5, 6, 2, wide, narrow, 0, 0, codes, *chosen), (0.2, 0.0), (reals(3, 6),))
    given = np.ascontiguousarray(stored(x, row_type)).view(np.uint8).reshape(-1)
    cache = SessionCache(plan)
    out = plan.run(Team(2), 2, [cache.segment(0, 0, len(x))], given, len(x))
    return np.asarray(out.view(np.float32)[-1]).reshape(2, -1)


@pytest.mark.parametrize(("row_type", "codes"), [("bf16", 0), ("f32", 0), ("bf16", 1)])
@pytest.mark.parametrize("back_end", library.supported())
def test_attention_over_chosen_blocks_is_that_of_a_session_of_these_alone(
    back_end: str, row_type: str, codes: int
) -> None:
    """Each key head with blocks of its own, with the row's own block and without."""
    rows, blocks = reals(5, 300, 8 * 24 + 2 * 17), ([0, 3, 4], [1, 2, -1])
    x = np.concatenate([rows, np.tile(np.array(blocks, np.float32).reshape(-1), (300, 1))], axis=1)
    found = attended(back_end, row_type, x, (4,), 3, codes)
    for head, kept in enumerate(blocks):
        positions = [p for block in kept if block >= 0 for p in range(64 * block, min(64 * block + 64, 300))]
        alone = x[positions].copy()
        alone[-1, : 6 * 24] = x[-1, : 6 * 24]  # the query is the last row's
        assert np.array_equal(found[head], attended(back_end, row_type, alone, (), 3, codes)[head])
    assert not np.array_equal(found, attended(back_end, row_type, x, (), 3, codes))


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -1.0, 1e9, 5.0])
def test_a_block_that_is_none_reads_nothing_beyond_the_cache(wrong: float) -> None:
    """A register that an operation between has changed: where no number is one, the row's own block is seen."""
    rows = reals(6, 300, 8 * 24 + 2 * 17)
    found, wanted = (
        attended("scalar", "f32", np.concatenate([rows, np.full((300, 6), value, np.float32)], axis=1), (4,), 3)
        for value in (wrong, -2.0)
    )
    assert np.array_equal(found, wanted)


@pytest.mark.parametrize(
    ("kind", "shape"),
    [
        (library.INDEX, (1, 2, 1, 4, 5, 6, 0, 63, 1)),
        (library.INDEX, (1, 2, 1, 4, 5, 6, 0, -64, 1)),
        (library.INDEX, (1, 2, 1, 4, 5, 6, 0, 192, 1)),
        (library.INDEX, (1, 2, 1, 4, 5, 6, 8, 64, 1)),
        (library.INDEX, (1, 2, 1, 4, 5, 6, 0, 64, -1)),
        (library.INDEX, (1, 2, 1, 4, 5, 6, 0, 1 << 40, 1)),
        (library.ATTENTION, (1, 5, 5, 6, 5, 5, 6, 6, 0, 0, 0, 2)),
        (library.ATTENTION, (1, 5, 5, 6, 5, 5, 6, 6, -8, 0, 0, 4)),
        (library.ATTENTION, (1, 5, 5, 6, 5, 5, 6, 6, 0, 0, 0, 6)),
    ],
)
def test_what_does_not_fit_is_refused(kind: int, shape: tuple[int, ...]) -> None:
    plan = Plan("scalar", "f32", [8, 30, 6, 5, 10, 30, 30], 6, "f32", 128)
    plan.add(library.INDEX, (1, 2, 1, 4, 5, 6, 0, 64, 1))
    plan.add(library.ATTENTION, (1, 5, 5, 6, 5, 5, 6, 6, 0, 0, 0, 4), (1.0,))
    with pytest.raises(ModelError, match="the engine refused"):
        plan.add(kind, shape, (1.0,))


PROMPT = [(37 * i * i + 11 * i) % 256 for i in range(300)]
SPARSE = "minimax_m3_sparse"
VARIANTS: dict[str, dict[str, Any]] = {
    "the last block always": {"index_topk_blocks": 2, "index_local_blocks": 1},
    "the best alone, half of a head turns": {
        "index_topk_blocks": 2,
        "rotary_dim": 16,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
    },
    "blocks of two, one key head": {
        "index_block_size": 128,
        "index_local_blocks": 1,
        "index_topk_blocks": 2,
        "num_key_value_heads": 1,
        "index_n_heads": 1,
        "index_head_dim": 32,
    },
    "other gates, experts everywhere, tied": {
        "swiglu_alpha": 1.1,
        "swiglu_limit": 0.3,
        "mlp_layer_types": ["sparse"] * 4,
        "layer_types": [SPARSE, "full_attention", SPARSE, SPARSE],
        "num_experts_per_tok": 3,
        "routed_scaling_factor": 0.7,
        "tie_word_embeddings": True,
        "index_topk_blocks": 3,
    },
    "nothing is left out": {"index_topk_blocks": 8},
}


@pytest.mark.parametrize("name", VARIANTS)
def test_logits_are_those_of_transformers_far_beyond_what_is_chosen(name: str, tmp_path: Path) -> None:
    """300 positions, whose choice no rounding decides, by the native engine and by torch; ids in chunks, then one by one."""
    pair = NativePair(tmp_path, FAMILY, VARIANTS[name])
    ids, _ = pair.greedy(PROMPT, 64, chunk=37)
    assert pair.least_gap(ids) > 3e-6, "take another seed"
    theirs, ours = pair.theirs(ids), pair.ours(ids, pair.span.new_cache(len(ids)))
    largest = theirs.abs().max()
    assert float((ours - theirs).abs().max() / largest) < 2e-5
    assert ids[len(PROMPT) :] == theirs.argmax(-1)[len(PROMPT) - 1 : -1].tolist()
    torch = Pair(tmp_path, None, {})
    assert float((torch.ours(ids, torch.span.new_cache(len(ids))) - theirs).abs().max() / largest) < 2e-5
    for layer in pair.model.model.layers:
        if layer.self_attn.indexer is not None:
            layer.self_attn.indexer.topk_blocks = 64
    differs = (pair.theirs(ids) - theirs).abs().amax(-1) / largest
    seen = min(len(ids), pair.model.config.index_topk_blocks * pair.model.config.index_block_size)
    assert float(differs[:seen].max()) < 1e-6 and (seen == len(ids) or float(differs[seen:].median()) > 1e-3)


BY_DAY: tuple[Precision, ...] = ("bf16", "w4+c8")


@pytest.mark.parametrize("precision", daily(BY_DAY, ("fp32", "w8", "w4", "bf16+c8", "w8+c8")))
def test_the_same_bits_whatever_the_cut_chunks_company_threads_and_back_end(
    precision: Precision, tmp_path: Path
) -> None:
    """430 positions, of which two blocks of 64 are seen: in steps across the first choice, with wrong rows taken back."""
    ids, other = random_ids(430, seed=8), random_ids(150, seed=9)
    folder = make_tiny(FAMILY, tmp_path, layers=3, seed=5, index_topk_blocks=2, index_local_blocks=1)
    want = Loader(folder, precision, "scalar").cut(0, 3).run(ids, [430])
    for back_end in library.supported():
        loader = Loader(folder, precision, back_end)
        for edges, threads, size in (((0, 3), 1, 100), ((0, 1, 3), 4, 69), ((0, 2, 3), 2, 430)):
            assert np.array_equal(loader.cut(*edges).on(threads).run(ids, pieces(430, size)), want)
        assert np.array_equal(in_company(loader.cut(0, 1, 3).on(3), ids, other), want), back_end


def test_a_fork_shares_index_keys(tmp_path: Path) -> None:
    """Two sessions that begin alike: blocks in common, and each as if it were alone."""
    folder = make_tiny(FAMILY, tmp_path, layers=2, seed=5)
    program = read_program(folder)
    span = CpuSpan(program, Span(0, 2), reader(folder), "bf16", Team(2))
    rows = (reals(9, 270, program.hidden).view(np.uint32) >> 16).astype(np.uint16).view(np.uint8).reshape(270, -1)
    whole = span.step(rows.tobytes(), [Piece(span.new_cache(), 0, 270)], 2)
    source = span.new_cache()
    span.step(rows.tobytes(), [Piece(source, 0, 270)], 2)
    fork = span.fork(source, 190, 300)
    span.step(rows[:50].tobytes(), [Piece(source, 190, 50)], 2)
    assert np.array_equal(span.step(rows[190:].tobytes(), [Piece(fork, 190, 80)], 2), whole[190:])


def test_caches_hold_index_keys(tmp_path: Path) -> None:
    """As MiniMax-M3 has them: 2,048 bytes of keys and values and 256 of index keys, a layer and position in bf16."""
    sizes: dict[str, Any] = {"num_key_value_heads": 4, "index_n_heads": 4, "head_dim": 128, "rotary_dim": 128}
    folder = make_tiny(FAMILY, tmp_path, layers=2, index_head_dim=128, **sizes)
    program = read_program(folder)
    span = CpuSpan(program, Span(0, 2), reader(folder), "bf16", Team(1))
    assert [bytes_per_position(layer, 2) for layer in program.layers] == [2048, 2304]
    assert span.bytes_per_token == 4352 == 2 * sum(sum(layer.cache_widths) for layer in program.layers)
    coded = CpuSpan(program, Span(0, 2), reader(folder), "bf16+c8", Team(1))
    assert coded.bytes_per_token == sum(bytes_per_position(layer, 2, has_codes=True) for layer in program.layers)
    assert isinstance(program.layers[1].attention, Attention) and program.has_index
