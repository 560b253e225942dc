"""Streams, entries and attention over them (deepseek_v4): against transformers, and the same bits however rows come
together."""

import json
import math
import random
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from manyhands.core import Precision, Span
from manyhands.engine import library
from manyhands.engine.cache import SessionCache, bytes_per_position, state_bytes
from manyhands.engine.cpu import CpuEnds, CpuSpan
from manyhands.engine.cuda.operations import check
from manyhands.engine.golden_cases import reals
from manyhands.engine.golden_models import PRECISIONS
from manyhands.engine.library import Plan, Team
from manyhands.engine.mapped import MappedTensors
from manyhands.engine.span import Piece, Rows
from manyhands.errors import ModelError, StateGone
from manyhands.program.families import read_program
from manyhands.program.ops import ExpertRouting, Layer
from manyhands.testing.tiny import make_tiny
from tests.engine.oracle import NativePair, Pair
from tests.engine.test_cpu import reader
from tests.nightly import daily
from tests.worker.pipeline import Loader, in_company, pieces, random_ids

SLIDING, SPARSE, HEAVY = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"
PROMPT = [(37 * i * i + 11 * i) % 256 for i in range(200)]


def rates(sparse: int, heavy: int) -> dict[str, Any]:
    return {"compress_rates": {SPARSE: sparse, HEAVY: heavy}}


def kinds(*given: str) -> dict[str, Any]:
    return {"layer_types": list(given)}


# By name: what a config says otherwise.
VARIANTS: dict[str, dict[str, Any]] = {
    "as published, of entries": {**rates(4, 128), "index_topk": 16},
    "entries of one position": {**rates(1, 1), "index_topk": 30},
    "entries of a block, and of two": {**rates(64, 128), "index_topk": 1},
    "few of many entries": {**rates(2, 8), "index_topk": 3, "seed": 1},
    "nothing but windows": kinds(*[SLIDING] * 4),
    "no windows to speak of": {"sliding_window": 1, **kinds(*[HEAVY, SPARSE] * 2)},
    "windows beyond the text": {"sliding_window": 500},
    "one stream": {"hc_mult": 1},
    "a tied head": {"tie_word_embeddings": True},
    "three streams, balanced once": {"hc_mult": 3, "hc_sinkhorn_iters": 1, "hc_eps": 1e-3},
    "eight streams": {"hc_mult": 8, "hc_sinkhorn_iters": 7},
    "no ids": {"mlp_layer_types": ["moe"] * 4},
    "ids alone": {"mlp_layer_types": ["hash_moe"] * 4},
    "sigmoids": {"scoring_func": "sigmoid", "num_experts_per_tok": 5, "routed_scaling_factor": 0.7},
    "odd widths": {
        "head_dim": 36,
        "partial_rotary_factor": 0.28,
        "index_head_dim": 19,
        "q_lora_rank": 27,
        "o_groups": 4,
        "o_lora_rank": 5,
    },
    "gelu, wide clamps": {"hidden_act": "gelu", "swiglu_limit": 100.0, "moe_intermediate_size": 45},
    "tables of their own": {
        "rope_parameters": {
            "main": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5},
            "compress": {
                "rope_type": "yarn",
                "rope_theta": 900.0,
                "partial_rotary_factor": 0.5,
                "factor": 3.0,
                "original_max_position_embeddings": 50,
            },
        }
    },
}


@pytest.mark.parametrize("name", VARIANTS)
def test_logits_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    """200 positions, whose choice of entries no rounding decides, by the native engine and by torch, in steps."""
    pair = NativePair(tmp_path, "deepseek_v4", VARIANTS[name])
    assert pair.least_gap(PROMPT) > 5e-6, "take another seed"
    theirs = pair.theirs(PROMPT)
    for held in (NativePair, Pair):
        held._hold(pair, pair.span.span)
        cache, at, found = pair.span.new_cache(200), 0, []
        for count in (1, 2, 60, 1, 1, 70, 65):
            found.append(held.ours(pair, PROMPT[at : at + count], cache, at))
            at += count
        assert float((torch.cat(found) - theirs).abs().max() / theirs.abs().max()) < 2e-5


@pytest.mark.parametrize("left_out", ["entries", "choice", "sinks", "ids", "clamps"])
def test_each_part_bears_on_the_logits(left_out: str, tmp_path: Path) -> None:
    """Without one of them they are others: no part is tested by equal numbers."""
    changed: dict[str, dict[str, Any]] = {
        "entries": kinds(*[SLIDING] * 4),
        "choice": {"index_topk": 512},
        "clamps": {"swiglu_limit": 100.0},
    }
    pair = Pair(tmp_path / "whole", "deepseek_v4", {})
    whole = pair.theirs(PROMPT)
    if left_out in changed:
        # A layer of another kind has fewer tensors, of the same bytes.
        other = Pair(tmp_path / "other", "deepseek_v4", changed[left_out]).theirs(PROMPT)
    else:
        with torch.inference_mode():
            for layer in pair.model.model.layers:
                if left_out == "sinks":
                    layer.self_attn.sinks.fill_(-1e9)
                elif layer.mlp.is_hash:
                    layer.mlp.gate.tid2eid.copy_(layer.mlp.gate.tid2eid.roll(1, 0))
        other = pair.theirs(PROMPT)
    assert float((other - whole).abs().max() / whole.abs().max()) > 1e-3


BY_DAY: tuple[Precision, ...] = ("bf16", "w4")


@pytest.mark.parametrize("precision", daily(BY_DAY, [one for one in PRECISIONS if one not in BY_DAY]))
def test_the_same_bits_whatever_the_cut_chunks_company_threads_and_back_end(
    precision: Precision, tmp_path: Path
) -> None:
    """430 positions, entries of 4 and 128: over blocks, in steps within entries, with wrong rows taken back."""
    ids, other = random_ids(430, seed=8), random_ids(150, seed=9)
    folder = make_tiny("deepseek_v4", tmp_path, layers=4, seed=5, index_topk=20, **rates(4, 128))
    want = Loader(folder, precision, "scalar").cut(0, 4).run(ids, [430])
    for back_end in library.supported():
        loader = Loader(folder, precision, back_end)
        for edges, threads, size in (
            ((0, 4), 1, 100),
            ((0, 1, 2, 3, 4), 4, 69),
            ((0, 3, 4), 2, 430),
            ((0, 2, 4), 4, 7),
        ):
            assert np.array_equal(loader.cut(*edges).on(threads).run(ids, pieces(430, size)), want)
        assert np.array_equal(in_company(loader.cut(0, 1, 4).on(3), ids, other), want), back_end


class Session:
    """Random rows of three layers with entries of these rates, in steps."""

    def __init__(self, folder: Path, sparse: int, heavy: int, precision: Precision = "bf16") -> None:
        made = make_tiny("deepseek_v4", folder, layers=3, seed=5, index_topk=6, **rates(sparse, heavy))
        program = read_program(made)
        self.span = CpuSpan(program, Span(0, 3), reader(made), precision, Team(2))
        x = reals(9, 1200, program.hidden, around=-3)
        bits = (x.view(np.uint32) >> 16).astype(np.uint16) if precision == "bf16" else x
        self.rows = bits.view(np.uint8).reshape(1200, -1)

    def step(self, cache: SessionCache, start: int, rows: Rows) -> Rows:
        return self.span.step(rows.tobytes(), [Piece(cache, start, len(rows))], 2)


RATES = ((4, 128), (4, 64), (1, 2), (16, 320), (128, 64))


@pytest.mark.parametrize("each", RATES)
def test_going_back_and_forks_change_no_bit(each: tuple[int, int], tmp_path: Path) -> None:
    """Random steps, some far longer than the rings, of a session and its forks, from where they say that they can go back to:
    any of the last positions, where the last step began, and wherever entries of all layers begin."""
    session, chance, apart = Session(tmp_path, *each), random.Random(3), math.lcm(64, *each)
    rows = session.rows
    sessions: list[tuple[SessionCache, Rows]] = [(session.span.new_cache(), rows[:0])]
    for turn in range(60):
        at = chance.randrange(len(sessions))
        cache, ids = sessions[at]
        back = chance.choice([0, 0, 0, 1, 5, 64, 95, 96, 97, 200, 400])
        start = cache.reachable(wanted := max(0, len(ids) - back))
        assert wanted // apart * apart <= start <= wanted
        if chance.random() < 0.25 and len(sessions) < 6:
            sessions.append((cache.fork(start, 0), ids[:start]))
            continue
        if chance.random() < 0.1:
            cache.segment(start, 0, chance.choice([1, 300, 700]))  # begins, and never ends
            assert cache.reachable(start) == start
        count = min(chance.choice([1, 1, 3, 20, 130, 300, 600]), 1000 - start)
        wrong, first = chance.random() < 0.3, chance.randrange(200)
        if wrong:
            session.step(cache, start, rows[first + 1 : first + 1 + count])
            assert cache.reachable(start) == start
        ids = np.concatenate([ids[:start], rows[first : first + count]])
        again = session.step(session.span.new_cache(), 0, ids)
        assert np.array_equal(session.step(cache, start, ids[start:]), again[start:]), (turn, start)
        assert cache.num_bytes <= session.span.session_bytes + cache.positions // 64 * session.span.block_bytes
        sessions[at] = cache, ids
        if len(ids) == 1000:
            sessions[at] = session.span.new_cache(), rows[:0]


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_a_session_goes_back_near_its_end_and_to_the_beginnings_of_entries(
    precision: Precision, tmp_path: Path
) -> None:
    """Else it is refused in a line, and nothing has changed."""
    session = Session(tmp_path, 4, 128, precision)
    cache, rows = session.span.new_cache(), session.rows
    whole = session.step(cache, 0, rows[:700])
    session.step(cache, 700, rows[700:720])
    assert [cache.reachable(at) for at in (0, 1, 127, 128, 500, 623, 624, 650, 720, 800)] == [
        *(0, 0, 0, 128, 384, 512, 624, 650, 720, 720)
    ]
    with pytest.raises(StateGone, match="position 500 was left long ago: the nearest to go on from is 384"):
        session.step(cache, 500, rows[500:501])
    assert cache.reachable(650) == 650 and cache.length == 720
    assert cache.fork(704, 0).reachable(704) == 704
    assert np.array_equal(session.step(cache, 650, rows[650:700]), whole[650:])
    assert cache.reachable(623) == 512 and cache.reachable(624) == 624  # later rows have been in their place
    fork = cache.fork(384, 0)
    assert np.array_equal(session.step(fork, 384, rows[384:700]), whole[384:])
    assert np.array_equal(session.step(cache, 384, rows[384:390]), whole[384:390])
    assert cache.reachable(389) == 389 and cache.reachable(383) == 256
    assert cache.num_bytes < 13 * session.span.block_bytes + session.span.session_bytes


def test_a_step_without_its_rings_is_refused(tmp_path: Path) -> None:
    """As one with rings that another session has."""
    session = Session(tmp_path, 4, 16)
    cache, other = session.span.new_cache(), session.span.new_cache()
    segments = [cache.segment(0, 0, 1), other.segment(0, 1, 1)]
    rows = session.rows[:2].reshape(-1)
    for now in (None, segments[0].now):
        segments[1].now = now
        with pytest.raises(ModelError, match="a session's rows or cache do not fit the step"):
            cache.plan.run(Team(1), 1, segments, rows, 2)


def test_entries_and_states_are_not_in_one_plan() -> None:
    """They go back otherwise."""
    compress = (library.COMPRESS, (1, 1, 2, 4, 0), (1e-6, 1e-6), (np.zeros((4, 8), np.float32),))
    convolve = (library.CONVOLVE, (0, 3, 2, 0), (), (np.zeros((2, 8), np.float32), None))
    for first, second in ((compress, convolve), (convolve, compress)):
        plan = Plan("scalar", "f32", [8] * 4, 2, "f32", 128)
        plan.add(*first)
        with pytest.raises(ModelError, match="the engine refused"):
            plan.add(*second)


def test_rows_carry_ids(tmp_path: Path) -> None:
    """Layers that choose by ids have them on any node; a row whose columns hold no id counts as that of id 0."""
    folder = make_tiny("deepseek_v4", tmp_path, layers=1, dtype="fp32")
    program = read_program(folder)
    with MappedTensors(folder, lambda entry, raw: None) as tensors:
        ends = CpuEnds(program, tensors.read, "fp32", Team(1))
        span = CpuSpan(program, Span(0, 1), tensors.read, "fp32", Team(1))
    rows = ends.embed([5, 6, 0, 5]).view(np.float32).copy()
    assert rows.shape == (4, 4 * 64 + 4) and rows[1, -4:].tolist() == [6 / 256, 0, 0, 0]
    rows[:, :-4] = rows[0, :-4]
    rows[3, -4:] = np.nan, np.inf, -1, 2.0

    def alone(row: int) -> bytes:
        return bytes(
            span.step(rows[row].tobytes(), [Piece(span.new_cache(), 0, 1)], 1)[0].view(np.float32)[:-4].tobytes()
        )

    assert alone(0) != alone(2) and alone(0) != alone(1) and alone(3) == alone(2)


def test_all_digits_of_ids_are_read(tmp_path: Path) -> None:
    """Of an id of two digits: the ends write what the layers read."""
    pair = NativePair(tmp_path, "deepseek_v4", {"vocab_size": 70_000, "layers": 1})
    ids = [69_999, 256, 255, 65_536, 65_535, 4_660]
    theirs, ours = pair.theirs(ids), pair.ours(ids, pair.span.new_cache(6))
    assert float((ours - theirs).abs().max() / theirs.abs().max()) < 2e-5


@pytest.mark.parametrize("item", [2, 4])
def test_caches_hold_keys_and_entries_and_of_the_last_positions_what_they_are_made_of(
    item: int, tmp_path: Path
) -> None:
    """As DeepSeek-V4-Flash has them: bytes a layer and position, and a session, as leases and plans count."""
    sizes: dict[str, Any] = {"head_dim": 512, "index_head_dim": 128, "partial_rotary_factor": 0.125, **rates(4, 128)}
    folder = make_tiny("deepseek_v4", tmp_path, layers=3, **sizes)
    program = read_program(folder)
    each = [bytes_per_position(layer, item) for layer in program.layers]
    assert each == [item * numbers for numbers in (512 + 128 + 32 + 80, 512 + 8, 512)]
    rings = [state_bytes(layer, item) for layer in program.layers]
    assert rings == [2 * item * numbers for numbers in (104 * 2 * (1024 + 256), 224 * 2 * 512, 0)]
    precision: Precision = "bf16" if item == 2 else "fp32"
    spans = [CpuSpan(program, Span(i, i + 1), reader(folder), precision, Team(1)) for i in range(3)]
    assert [span.bytes_per_token for span in spans] == each and [span.session_bytes for span in spans] == rings


def test_ids_name_experts_that_there_are(tmp_path: Path) -> None:
    folder = make_tiny("deepseek_v4", tmp_path, layers=1)
    program = read_program(folder)

    def fewer(layer: Layer) -> Layer:
        ops = (replace(op, experts=7) if isinstance(op, ExpertRouting) else op for op in layer.ops)
        return Layer(tuple(ops))

    program = replace(program, layers=tuple(map(fewer, program.layers)))
    with pytest.raises(ModelError, match=r"layers.0.ffn.gate.tid2eid has numbers from 0 to 7: 0 to 6 are needed"):
        CpuSpan(program, Span(0, 1), reader(folder), "bf16", Team(1))


def test_whole_numbers_are_no_matrix(tmp_path: Path) -> None:
    folder = make_tiny("deepseek_v4", tmp_path, layers=1)
    program = read_program(folder)

    def swapped(name: str) -> Any:
        return reader(folder)("layers.0.ffn.gate.tid2eid" if name == "layers.0.ffn.gate.weight" else name)

    route = next(op for op in program.layers[0].ops if isinstance(op, ExpertRouting))
    assert route.table is not None
    program = read_program(make_tiny("deepseek_v4", tmp_path / "2", layers=1, n_routed_experts=264, hidden=64))
    with pytest.raises(ModelError, match="is stored as"):
        CpuSpan(program, Span(0, 1), swapped, "bf16", Team(1))


COLLAPSE = [0, 1, 2, 1, 3, 5]
SPREAD = [2, 1, 0, 1, 3]
COMPRESS = [3, 3, 4, 4, 1]
ATTEND = [6, 4, 4, 7, 3, 9, 4, 5]
INDEX = [6, 4, 8, 5, 3, 5, 4]


@pytest.mark.parametrize(
    ("kind", "place", "value"),
    [
        *(
            (library.COLLAPSE, place, value)
            for place, value in ((0, 2), (1, 0), (2, 1), (3, 2), (4, 4), (4, 9), (5, 0))
        ),
        *(
            (library.COLLAPSE, place, value)
            for place, value in ((0, 9), (1, -1), (3, 0), (3, 3), (5, 1001), (4, 1 << 40))
        ),
        *((library.SPREAD, place, value) for place, value in ((0, 0), (1, 2), (2, 2), (4, 4), (2, 9), (4, 0))),
        *(
            (library.COMPRESS, place, value)
            for place, value in ((0, 4), (1, 2), (2, 3), (3, 3), (3, 576), (4, 0), (3, 0))
        ),
        *((library.ATTEND_ENTRIES, place, value) for place, value in ((0, 4), (1, 5), (2, 5), (3, 6), (4, 2), (5, 0))),
        *((library.ATTEND_ENTRIES, place, value) for place, value in ((6, 0), (6, 5), (7, 9), (7, 7), (7, -1))),
        *((library.INDEX, place, value) for place, value in ((6, 3), (6, -4), (6, 1 << 40), (3, 8), (2, 5))),
    ],
)
def test_what_does_not_fit_is_refused(kind: int, place: int, value: int) -> None:
    shapes = {
        library.COLLAPSE: (COLLAPSE, (np.zeros(15, np.float32), np.zeros(3, np.float32))),
        library.SPREAD: (SPREAD, ()),
        library.COMPRESS: (COMPRESS, (np.zeros((4, 10), np.float32),)),
        library.ATTEND_ENTRIES: (ATTEND, (np.zeros(3, np.float32),)),
        library.INDEX: (INDEX, ()),
    }
    given, tensors = shapes[kind]
    plan = Plan("scalar", "f32", [28, 15, 8, 10, 5, 6, 15, 15, 3], 4, "f32", 128)
    plan.add(kind, given, (1e-6, 1e-6), tensors)
    shape = list(given)
    shape[place] = value
    with pytest.raises(ModelError, match="the engine refused"):
        plan.add(kind, shape, (1e-6, 1e-6), tensors)


def test_tensors_of_another_size_are_refused() -> None:
    plan = Plan("scalar", "f32", [28, 15, 8, 10, 5, 6, 15, 15, 3], 4, "f32", 128)
    some = np.zeros(3, np.float32)
    for kind, shape, tensors in (
        (library.COLLAPSE, COLLAPSE, (some, some)),
        (library.COMPRESS, COMPRESS, (some,)),
        (library.COMPRESS, COMPRESS, (None,)),
        (library.ATTEND_ENTRIES, ATTEND, (np.zeros(4, np.float32),)),
        (library.ROUTE, [3, 0, 10, 14, 3, 1, 1, 1, 3], (None, None, np.full((9, 14), 10, np.int32))),
        (library.ROUTE, [3, 0, 10, 14, 3, 1, 1, 1, 3], (None, None, np.zeros(13, np.int32))),
        (library.ROUTE, [3, 0, 10, 14, 3, 1, 1, 1, 8], (None, None, np.zeros((9, 14), np.int32))),
        (library.ROUTE, [3, 0, 10, 0, 3, 1, 1, 1, 3], (None, None, np.zeros((9, 14), np.int32))),
        (library.ROUTE, [3, 0, 10, 1 << 62, 3, 1, 1, 1, 3], (None, None, np.zeros((9, 14), np.int32))),
    ):
        with pytest.raises(ModelError, match="the engine refused"):
            plan.add(kind, shape, (1e-6, 1e-6), tensors)


@pytest.mark.parametrize("kind", [library.COLLAPSE, library.SPREAD, library.COMPRESS, library.ATTEND_ENTRIES])
def test_a_gpu_refuses_them(kind: int) -> None:
    with pytest.raises(ModelError, match="a GPU computes neither residual streams nor compressed positions"):
        check(kind, [0] * 9)
    with pytest.raises(ModelError, match="a GPU chooses no experts by ids or by square roots"):
        check(library.ROUTE, [0, 1, 4, 2, 3, 1, 1, 1])
    with pytest.raises(ModelError, match="a GPU chooses no experts by ids or by square roots"):
        check(library.ROUTE, [0, 1, 4, 2, 1, 1, 1, 1, 0, 1])
    with pytest.raises(ModelError, match="a GPU turns no rows by the angles of positions before theirs"):
        check(library.ROTARY, [0, 1, 8, 0, 4, 1, 3])


def test_transformers_wrote_what_the_publisher_has(tmp_path: Path) -> None:
    """The names that the recipe reads are the published ones, of which transformers makes its own."""
    folder = make_tiny("deepseek_v4", tmp_path, layers=3)
    names = {entry.name for entry in MappedTensors(folder, lambda entry, raw: None).entries}
    assert {"embed.weight", "head.weight", "norm.weight", "hc_head_fn", "layers.0.attn.indexer.compressor.ape"} <= names
    assert not any(name.startswith("model.") for name in names)
    assert json.loads((folder / "config.json").read_text())["model_type"] == "deepseek_v4"


def test_caches_of_8_bit_are_refused(tmp_path: Path) -> None:
    folder = make_tiny("deepseek_v4", tmp_path, layers=1)
    with pytest.raises(ModelError, match=r"deepseek_v4 caches .* not held in 8 bits; leave --cache-dtype out"):
        Loader(folder, "bf16+c8", None)


@pytest.mark.parametrize(("kind", "steps"), list(product((SPARSE, HEAVY), ((5, 70, 1), (76,)))))
def test_entries_do_not_depend_on_the_steps(kind: str, steps: tuple[int, ...], tmp_path: Path) -> None:
    """In torch too, which caches them by position."""
    pair = Pair(tmp_path, "deepseek_v4", {"layers": 1, **kinds(kind), **rates(4, 16)})
    whole, cache, at = pair.ours(PROMPT[:76], pair.span.new_cache(76)), pair.span.new_cache(76), 0
    for count in steps:
        found = pair.ours(PROMPT[at : at + count], cache, at)
        assert float((found - whole[at : at + count]).abs().max()) < 1e-4
        at += count
