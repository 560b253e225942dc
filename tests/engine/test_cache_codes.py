"""Caches of 8 bit: a key or a value of a head is codes, with a scale for 32, in half the memory; rows stay independent."""

import itertools
from collections.abc import Sequence
from pathlib import Path
from random import Random

import numpy as np
import pytest
from numpy.typing import NDArray

from manyhands.core import PRECISIONS, Precision, Span, caches_codes, weight_precision, with_codes
from manyhands.engine import golden, golden_cache, golden_models, library
from manyhands.engine.cache import SessionCache, bytes_per_position
from manyhands.engine.cpu import CpuSpan, Piece
from manyhands.engine.golden_cases import reals
from manyhands.engine.library import Plan, Team
from manyhands.engine.weights import as_bf16
from manyhands.errors import BadRequest, ModelError
from manyhands.program.families import build_program
from manyhands.worker.choice import program_of
from manyhands.worker.runner import program_class

CODED: Precision = "w4+c8"
ROWS = 140  # over three blocks of positions


def attended(back_end: str, x: NDArray[np.float32], *, scale: float = 0.1, first: int = 0) -> NDArray[np.float32]:
    """Rows attending to themselves, one head, with a cache of codes that held other rows before, from `first` on."""
    n, team = x.shape[1], Team(1)
    plan = Plan(back_end, "f32", [n, n], 1, "f32", 512)
    plan.add(library.ATTENTION, (0, 0, 0, 1, 1, 1, n, n, 0, 0, 1), (scale, 0.0))
    cache = SessionCache(plan)
    stale = np.full((len(x) - first, n), 7e4, np.float32)
    for start, rows in ((0, x[:first]), (first, stale), (first, x[first:])):
        if len(rows):
            data = np.ascontiguousarray(rows).view(np.uint8).reshape(-1)
            out = plan.run(team, 1, [cache.segment(start, 0, len(rows))], data, len(rows))
    return out.view(np.float32)


def spread(x: NDArray[np.float32], *, divides: bool) -> NDArray[np.float32]:
    """Rows times Hadamard matrices, in parts as wide as powers of two."""
    parts, at = [], 0
    while at < x.shape[1]:
        size = 1 << (x.shape[1] - at).bit_length() - 1
        part = x[:, at : at + size] * np.float32(1 / size if divides else 1)
        half = 1
        while half < size:
            pairs = part.reshape(len(x), -1, 2, half)
            part = np.stack([pairs[:, :, 0] + pairs[:, :, 1], pairs[:, :, 0] - pairs[:, :, 1]], 2).reshape(len(x), -1)
            half *= 2
        parts.append(part)
        at += size
    return np.concatenate(parts, axis=1)


def codes_of(x: NDArray[np.float32]) -> NDArray[np.float32]:
    """The numbers that a cache of codes holds of rows, spread, as docs/arithmetic.md states."""
    x = spread(x, divides=True)
    found = np.zeros_like(x)
    for group in (slice(at, min(at + 32, x.shape[1])) for at in range(0, x.shape[1], 32)):
        best = np.full(len(x), np.inf, np.float32)
        most = np.abs(x[:, group]).max(axis=1, keepdims=True)
        for part in (127, 126, 125, 124, 123):
            scale = (as_bf16(most / np.float32(part)).astype(np.uint32) << 16).view(np.float32)
            held = np.rint(x[:, group] * (np.float32(1) / scale)) * scale
            lanes = np.zeros((len(x), 32), np.float32)
            lanes[:, : held.shape[1]] = (x[:, group] - held) ** 2
            error = lanes[:, :16] + lanes[:, 16:]
            while error.shape[1] > 1:
                error = np.add(*np.split(error, 2, axis=1))
            is_better = error[:, 0] < best
            found[:, group][is_better], best = held[is_better], np.where(is_better, error[:, 0], best)
    return found


@pytest.mark.parametrize("back_end", library.supported())
def test_a_row_that_sees_itself_alone_is_its_codes_times_their_scale(back_end: str) -> None:
    for seed in range(5):
        x = reals(seed, 1, 48, spread=9)
        assert np.array_equal(attended(back_end, x), spread(codes_of(x), divides=False))


@pytest.mark.parametrize("back_end", library.supported())
@pytest.mark.parametrize("width", [48, 300])
def test_attention_is_that_of_the_held_numbers(back_end: str, width: int) -> None:
    """Keys and values are codes; queries are not rounded."""
    x = reals(3, 100, width)
    parts = [x[:, at : at + 256] for at in range(0, width, 256)]
    held = np.concatenate([spread(codes_of(part), divides=False) for part in parts], axis=1)
    scores = np.where(np.tri(100, dtype=bool), x.astype(np.float64) @ held.T.astype(np.float64) * 0.1, -np.inf)
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    right = weights @ held / weights.sum(axis=1, keepdims=True)
    assert np.abs(attended(back_end, x) - right).max() < 1e-5


def test_a_channel_far_larger_than_the_others_leaves_them_their_bits() -> None:
    """As keys of large models have them: without the spreading the others lose as much as the channel is larger."""
    x = reals(6, 80, 64)
    x[:, [5, 37]] *= 64
    off = spread(codes_of(x), divides=False) - x
    plain = x - np.rint(x * (127 / np.abs(x).max(axis=1, keepdims=True))) * np.abs(x).max(axis=1, keepdims=True) / 127
    assert (off.astype(np.float64) ** 2).sum() < 0.2 * (plain.astype(np.float64) ** 2).sum()


def test_what_was_cached_before_a_rollback_leaves_nothing() -> None:
    x = reals(4, 90, 40)
    assert np.array_equal(attended("scalar", x, first=50), attended("scalar", x)[50:])


def rows_of(
    precision: Precision, family: str, back_end: str, cuts: Sequence[int], steps: Sequence[int], beside: int
) -> bytes:
    """Rows that leave a model's layers, one session's among `beside` others' that are ahead of it."""
    program = build_program({**golden_models.configs()[family], "max_position_embeddings": 256})
    read, team = golden_models.tensors(program, "bf16").__getitem__, Team(3)
    spans = [CpuSpan(program, Span(a, b), read, precision, team, back_end) for a, b in itertools.pairwise(cuts)]
    caches = [[span.new_cache() for _ in range(beside + 1)] for span in spans]
    x = (reals(9, ROWS, program.hidden).view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
    found, at = [], 0
    for count in steps:
        hidden = np.concatenate([x[at : at + count]] * (beside + 1))
        for span, kept in zip(spans, caches, strict=True):
            hidden = span.step(hidden, [Piece(cache, at + 2 * i, count) for i, cache in enumerate(kept)], 1 + beside)
        found.append(hidden[:count])
        at += count
    return np.concatenate(found).tobytes()


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss"])  # windows, soft caps, sinks
def test_text_depends_on_no_cut_chunk_company_or_back_end(family: str) -> None:
    layers = len(build_program(golden_models.configs()[family]).layers)
    right = rows_of("bf16+c8", family, "scalar", (0, layers), (ROWS,), 0)
    for back_end in library.supported():
        assert rows_of("bf16+c8", family, back_end, (0, 1, layers), (3, 1, 64, ROWS - 68), 1) == right
    assert rows_of("bf16", family, library.supported()[0], (0, layers), (ROWS,), 0) != right


def test_going_back_and_forking_leave_no_trace() -> None:
    """Guesses that are rolled back, and copies of caches to any position, in any order: the rows are those of one step. A scale
    of another position, or one that stayed, would show."""
    program = build_program({**golden_models.configs()["llama"], "max_position_embeddings": 256})
    read, team = golden_models.tensors(program, "bf16").__getitem__, Team(1)
    span = CpuSpan(program, Span(0, len(program.layers)), read, "bf16+c8", team, library.supported()[0])
    x, guesses = [
        (reals(seed, ROWS, program.hidden, spread=wide).view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
        for seed, wide in ((9, 1), (10, 5))
    ]
    right = span.step(x, [Piece(span.new_cache(), 0, ROWS)], 1)
    random = Random(3)
    for _ in range(6):
        caches = [(span.new_cache(), 0)]
        for _ in range(16):
            index = random.randrange(len(caches))
            cache, at = caches[index]
            count = min(random.choice([1, 2, 31, 33, 63, 64, 65]), ROWS - at)
            if random.random() < 0.5 and count:
                span.step(guesses[at : at + count].copy(), [Piece(cache, at, count)], 1)
                rows = span.step(x[at : at + count].copy(), [Piece(cache, at, count)], 1)
                assert np.array_equal(rows, right[at : at + count])
                caches[index] = cache, at + count
            elif random.random() < 0.5:
                caches[index] = cache, random.choice([0, at // 2, max(0, at - 1), at // 64 * 64])
            elif at:
                end = random.randint(1, at)
                caches.append((cache.fork(end, at), end))


def test_the_memory_is_half() -> None:
    """At heads of 64, 80 and 128 numbers, as figures of a plan and of what a planner counts."""
    for width, most in ((64, 0.54), (80, 0.54), (128, 0.54)):
        program = build_program({**golden_models.configs()["llama"], "head_dim": width})
        read, team = golden_models.tensors(program, "bf16").__getitem__, Team(1)
        plain, coded = (CpuSpan(program, Span(0, 1), read, kind, team) for kind in ("bf16", with_codes("bf16")))
        assert coded.bytes_per_token == bytes_per_position(program.layers[0], 2, has_codes=True)
        assert coded.bytes_per_token <= most * plain.bytes_per_token
        caches = [span.new_cache(640) for span in (plain, coded)]
        assert caches[1].num_bytes <= most * caches[0].num_bytes


def test_latents_are_refused_and_so_is_what_has_no_codes() -> None:
    config = golden_models.configs()["deepseek_v3"]
    with pytest.raises(ModelError, match=r"latents.*leave --cache-dtype out"):
        program_of(config, "bf16+c8")
    with pytest.raises(BadRequest, match="not in fp32"):
        with_codes("fp32")
    plan = Plan("scalar", "bf16", [32, 32], 1, "f32", 64)
    for latent, coded in ((1, 1), (0, 2), (0, -1)):
        with pytest.raises(ModelError, match="shapes"):
            plan.add(library.ATTENTION, (0, 0, 0, 1, 1, 1, 32, 32, 0, latent, coded), (1.0, 0.0))


def test_they_name_the_class(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A precision of its own: records, leases and routes compare it, so that forms never mix in a route."""
    program = build_program(golden_models.configs()["llama"])
    coded = [precision for precision in PRECISIONS if caches_codes(precision)]
    assert [weight_precision(precision) for precision in coded] == ["bf16", "w8", "w4"]
    classes = {program_class(program, precision) for precision in PRECISIONS if precision not in ("fp16", "fp32")}
    assert len(classes) == 6
    (tmp_path / "cache.json").write_text("{}")
    plain, before = program_class(program, "w4"), program_class(program, CODED)
    monkeypatch.setattr(golden, "CACHE_FILE", tmp_path / "cache.json")
    assert program_class(program, "w4") == plain and program_class(program, CODED) != before


def test_a_back_end_is_proven_where_such_caches_are_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cache.json").write_text('{"cache codes edges": "00"}')
    monkeypatch.setattr(golden, "CACHE_FILE", tmp_path / "cache.json")
    monkeypatch.setenv(library.FORCED, "scalar")
    golden._unlike.cache_clear()
    golden._chosen.cache_clear()
    try:
        assert set(golden.failures("scalar")) == set(golden_cache.CASES)
        program = build_program(golden_models.configs()["llama"])
        read, team = golden_models.tensors(program, "bf16").__getitem__, Team(1)
        CpuSpan(program, Span(0, 1), read, "bf16", team)
        with pytest.raises(ModelError, match=r"cache codes edges.* without --cache-dtype needs fewer"):
            CpuSpan(program, Span(0, 1), read, "bf16+c8", team)
    finally:
        golden._unlike.cache_clear()
        golden._chosen.cache_clear()


def test_digests_of_caches_stand_apart() -> None:
    assert {name for name in golden.recorded() if name.startswith("cache ")} == set(golden_cache.CASES)
    assert {golden.file_of(name).name for name in golden_cache.CASES} == {"golden_cache.json"}
