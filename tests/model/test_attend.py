"""manyhands.model.attend: our kernel for attention. A row is its query, its position and its session's past, bit for bit."""

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

import pytest
import torch
from torch import Tensor

from manyhands.model import tiles
from manyhands.model.attend import attend, serves
from manyhands.model.cache import LayerShape, ShardCache, ShardSegment, StepPlan
from tests.model.pipeline import pieces, threads

pytestmark = pytest.mark.skipif(not tiles.available(), reason="no kernel of ours here")

LAYER = 2
BORDERS = (0, 1, 15, 16, 31, 32, 63, 64, 65, 127, 128, 129, 511, 512, 513)
LENGTH = 530


@dataclass(frozen=True)
class Case:
    """Heads, widths and options of one attention."""

    heads: int = 4
    key_heads: int = 2
    key_dim: int = 16
    value_dim: int = 16
    window: int | None = None
    softcap: float | None = None
    has_sinks: bool = False
    length: int = LENGTH

    @property
    def sinks(self) -> Tensor | None:
        return torch.linspace(-2, 4, self.heads).bfloat16() if self.has_sinks else None

    def cache(self, capacity: int | None = None) -> ShardCache:
        shape = LayerShape(self.key_heads, self.key_dim, self.value_dim, torch.bfloat16)
        return ShardCache({LAYER: shape}, capacity or self.length)

    def tensors(self, seed: int = 0, length: int = 0, scale: float = 1.0) -> list[Tensor]:
        """Queries, keys, values [H, N, D] as transformers gives them: rows of all heads side by side."""
        generator = torch.Generator().manual_seed(seed)
        shapes = ((self.heads, self.key_dim), (self.key_heads, self.key_dim), (self.key_heads, self.value_dim))
        count = length or self.length
        return [
            (torch.randn(count, heads, dim, generator=generator) * scale).bfloat16().transpose(0, 1)
            for heads, dim in shapes
        ]

    def run(self, *segments: tuple[ShardCache, int, Sequence[Tensor]]) -> list[Tensor]:
        """Each segment's rows [N, H, Dv], all in one step."""
        plan, row = StepPlan([]), 0
        for cache, start, qkv in segments:
            plan.segments.append(ShardSegment(cache, start, row, qkv[0].shape[1]))
            row += qkv[0].shape[1]
        parts = [torch.cat(part, 1) for part in zip(*(qkv for *_, qkv in segments), strict=True)]
        out = attend(plan, LAYER, parts, self.key_dim**-0.5, self.softcap, self.window, self.sinks)
        return [out[s.row : s.row + s.count] for s in plan.segments]


def rows(qkv: Sequence[Tensor], start: int, stop: int) -> list[Tensor]:
    return [x[:, start:stop] for x in qkv]


def definition(case: Case, qkv: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """In fp64: attention, and the same over the magnitudes of the values; [N, H, Dv] both."""
    query, key, value = (x.double() for x in qkv)
    group = case.heads // case.key_heads
    key, value = key.repeat_interleave(group, 0), value.repeat_interleave(group, 0)
    scores = query @ key.transpose(1, 2) * case.key_dim**-0.5
    if case.softcap:
        scores = (scores / case.softcap).tanh() * case.softcap
    at = torch.arange(query.shape[1])
    seen = (at[None] <= at[:, None]) & (at[None] > at[:, None] - (case.window or len(at)))
    scores = scores.masked_fill(~seen, float("-inf"))
    if case.sinks is not None:
        sinks = case.sinks.double()[:, None, None].expand(-1, len(at), 1)
        scores = torch.cat([scores, sinks], 2)
    weights = scores.softmax(2)[:, :, : len(at)]
    return (weights @ value).transpose(0, 1), (weights @ value.abs()).transpose(0, 1)


WIDTHS = [
    (8, 8),
    (14, 10),
    (16, 16),
    (24, 24),
    (32, 32),
    (64, 64),
    (80, 80),
    (96, 96),
    (128, 128),
    (192, 128),
    (256, 256),
]
CASES = {
    **{f"{k} to {v} wide": Case(key_dim=k, value_dim=v, length=150) for k, v in [*WIDTHS, (24, 16), (16, 40)]},
    **{
        f"{k} x {g} heads": Case(k * g, k, length=140)
        for k, g in [(1, 1), (1, 3), (1, 8), (2, 5), (3, 7), (8, 1), (8, 8)]
    },
    **{f"window of {w}": Case(window=w) for w in (1, 2, 31, 32, 33, 63, 64, 65, 66, 127, 129, 300, 4096)},
    "long": Case(heads=7, key_heads=1, key_dim=64, value_dim=64),
    "sinks": Case(has_sinks=True),
    "sinks and window": Case(has_sinks=True, window=65, heads=6),
    "soft cap": Case(softcap=3.0),
    "soft cap and window": Case(softcap=30.0, window=100),
}


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> Case:
    return CASES[request.param]


@pytest.mark.parametrize("scale", [0.1, 1.0, 5.0])
def test_it_computes_attention(case: Case, scale: float) -> None:
    """Against fp64. A weight is rounded to bf16 (2^-8 of it at most), the result once more; fp32 adds next to nothing."""
    qkv = case.tensors(scale=scale)
    (got,) = case.run((case.cache(), 0, qkv))
    want, magnitude = definition(case, qkv)
    assert bool(((got.double() - want).abs() <= 2**-8 * (magnitude * 1.01 + want.abs()) + 1e-9).all())


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("size", [1, 7, 16, 64, 200])
def test_chunks_change_no_bit(case: Case, size: int, num_threads: int) -> None:
    """And neither does the capacity of a cache, nor the number of threads."""
    qkv = case.tensors()
    with threads(1):
        (want,) = case.run((case.cache(), 0, qkv))
    with threads(num_threads):
        cache, at = case.cache(case.length + 700), 0
        for count in pieces(case.length, size):
            (got,) = case.run((cache, at, rows(qkv, at, at + count)))
            assert torch.equal(got, want[at : at + count]), f"rows {at} to {at + count}"
            at += count


def test_windows_and_rollback_change_no_bit(case: Case) -> None:
    """Wrong rows at block borders, right ones over them; what is stale behind them is of another session, and huge."""
    qkv, wrong = case.tensors(), case.tensors(seed=8, scale=50.0)
    (want,) = case.run((case.cache(), 0, qkv))
    cache = case.cache()
    case.run((cache, 0, wrong))
    case.run((cache, 0, rows(qkv, 0, case.length)))
    for border in BORDERS:
        for size in (2, 3, 5, 9):
            stop = min(border + size, case.length)
            if stop <= border:
                continue
            case.run((cache, border, rows(wrong, border, case.length)))
            (got,) = case.run((cache, border, rows(qkv, border, stop)))
            assert torch.equal(got, want[border:stop]), f"rows {border} to {stop}"
            case.run((cache, border, rows(qkv, border, case.length)))


@pytest.mark.parametrize("num_threads", [1, 3])
def test_company_changes_no_bit(case: Case, num_threads: int) -> None:
    """Ragged steps of many sessions at random places: each row as alone."""
    draw = Random(case.key_dim * 100 + case.heads)
    sessions = [(case.cache(), case.tensors(seed)) for seed in range(6)]
    with threads(1):
        want = [case.run((case.cache(), 0, qkv))[0] for _, qkv in sessions]
    lengths = [0] * len(sessions)
    with threads(num_threads):
        for _ in range(12):
            chosen = draw.sample(range(len(sessions)), draw.randint(1, 6))
            stops = {i: min(case.length, lengths[i] + draw.choice((1, 1, 2, 9, 17, 40, 130))) for i in chosen}
            step = [i for i in chosen if stops[i] > lengths[i]]
            if not step:
                continue
            got = case.run(*((sessions[i][0], lengths[i], rows(sessions[i][1], lengths[i], stops[i])) for i in step))
            for i, out in zip(step, got, strict=True):
                assert torch.equal(out, want[i][lengths[i] : stops[i]])
                lengths[i] = stops[i]


def test_a_broken_query_breaks_its_row_alone() -> None:
    case = Case(heads=6, length=90)
    qkv = case.tensors()
    (want,) = case.run((case.cache(), 0, qkv))
    broken = {(3, 5): float("nan"), (0, 70): float("inf"), (5, 89): float("-inf")}
    query = qkv[0].clone()
    for (head, row), value in broken.items():
        query[head, row, 1] = value
    (got,) = case.run((case.cache(), 0, [query, *qkv[1:]]))
    for head in range(6):
        for row in range(90):
            if (head, row) in broken:
                assert not got[row, head].isfinite().any()
            else:
                assert torch.equal(got[row, head], want[row, head])


def test_huge_scores_choose_one_key() -> None:
    """No overflow where scores are 1e36: the weight of the greatest is one, of all others zero."""
    case = Case(heads=2, key_heads=1, length=200)
    query, key, value = case.tensors()
    (got,) = case.run((case.cache(), 0, [query * 1e18, key * 1e18, value]))
    scores = (query.double() @ key.double().transpose(1, 2)).masked_fill(~torch.ones(200, 200).tril().bool(), -1e300)
    best = scores.argmax(2)
    assert torch.equal(got, value[0][best].transpose(0, 1))


def test_rows_of_no_segment_are_zero_and_what_does_not_fit_is_refused() -> None:
    case = Case(length=600)
    cache, qkv = case.cache(), case.tensors()
    for start, row, count in ((1000, 0, 100), (-1, 0, 2), (0, 599, 2)):
        with pytest.raises(ValueError, match="does not fit"):
            attend(StepPlan([ShardSegment(cache, start, row, count)]), LAYER, qkv, 0.25, None, None, None)
    for layer, other in ((LAYER + 1, case), (1, case), (LAYER, Case(key_heads=4)), (LAYER, Case(key_dim=32))):
        with pytest.raises(ValueError, match="does not fit"):
            attend(StepPlan([ShardSegment(cache, 0, 0, 1)]), layer, other.tensors(), 0.25, None, None, None)
    assert not cache.keys[LAYER].any() and not cache.values[LAYER].any()
    out = attend(StepPlan([ShardSegment(cache, 0, 2, 3)]), LAYER, qkv, 0.25, None, None, None)
    assert not out[:2].any() and not out[5:].any() and bool(out[2:5].any())


def test_only_where_it_serves() -> None:
    """Widths of an odd number and other precisions stay with torch's kernel."""
    assert serves(torch.bfloat16, 64, 0.1)
    assert (
        not serves(torch.float32, 64, 0.1)
        and not serves(torch.bfloat16, 63, 0.1)
        and not serves(torch.bfloat16, 64, -1)
    )
