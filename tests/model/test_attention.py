"""manyhands.model.attention: the kernel is right, and a row's bits depend on nothing but its session's past."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from manyhands.errors import ModelError
from manyhands.model.attention import attention, running
from manyhands.model.cache import CacheProbe, LayerShape, ShardCache, ShardSegment, StepPlan
from tests.model.pipeline import threads
from tests.nightly import daily

LENGTH = 700
LAYER = 3
# Positions around the borders of key blocks (512) and of row padding (4).
STARTS = (0, 1, 2, 3, 4, 5, 7, 8, 31, 100, 255, 256, 509, 510, 511, 512, 513, 514, 600, 699)


@dataclass(frozen=True)
class Case:
    """One kind of attention. `window`, `softcap` and `sinks` as their families use them; value_dim differs in MLA."""

    heads: int = 4
    key_heads: int = 2
    key_dim: int = 16
    value_dim: int = 16
    dtype: torch.dtype = torch.bfloat16
    window: int | None = None
    softcap: float | None = None
    has_sinks: bool = False
    by_torch: bool = False

    def tensors(self, count: int = LENGTH, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        shapes = ((self.heads, self.key_dim), (self.key_heads, self.key_dim), (self.key_heads, self.value_dim))
        query, key, value = (torch.randn(1, h, count, d, generator=generator).to(self.dtype) for h, d in shapes)
        return query, key, value

    def sinks(self) -> Tensor | None:
        return torch.linspace(-1, 2, self.heads).to(self.dtype) if self.has_sinks else None

    def cache(self, capacity: int = LENGTH) -> ShardCache:
        return ShardCache({LAYER: LayerShape(self.key_heads, self.key_dim, self.value_dim, self.dtype)}, capacity)


CASES = {
    "one head a key": Case(key_heads=4),
    "grouped": Case(),
    "grouped by 3": Case(heads=6, key_dim=24, value_dim=24),
    "one key head": Case(heads=8, key_heads=1, key_dim=20, value_dim=20),
    "one key head, odd": Case(heads=3, key_heads=1, has_sinks=True),
    "one head": Case(heads=1, key_heads=1, key_dim=64, value_dim=64),
    "latent": Case(key_heads=4, key_dim=24, value_dim=16),
    "sliding": Case(window=100),
    "sinks": Case(has_sinks=True, window=100),
    "soft cap": Case(softcap=5.0),
    "sliding soft cap": Case(softcap=5.0, window=100),
}
BY_TORCH = ("grouped", "one key head, odd", "latent", "sliding", "sinks")
CASES |= {f"{name} by torch": replace(CASES[name], by_torch=True) for name in BY_TORCH}
CASES |= {f"{name} fp32": replace(case, dtype=torch.float32) for name, case in CASES.items() if not case.by_torch}


def attend(case: Case, segments: list[tuple[ShardCache, int, tuple[Tensor, Tensor, Tensor]]]) -> list[Tensor]:
    """Run segments (cache, start, q k v) side by side; each one's output [count, heads, value_dim]."""
    plan, row = StepPlan([]), 0
    for cache, start, (query, _, _) in segments:
        plan.segments.append(ShardSegment(cache, start, row, query.shape[2]))
        row += query.shape[2]
    query, key, value = (torch.cat(part, 2) for part in zip(*(qkv for _, _, qkv in segments), strict=True))
    module = nn.Module()
    module.layer_idx = LAYER  # type: ignore[assignment]
    with running(plan), torch.inference_mode():
        out, _ = attention(
            module, query, key, value, None, softcap=case.softcap, sliding_window=case.window, s_aux=case.sinks()
        )
    return [out[0, s.row : s.row + s.count].clone() for s in plan.segments]


def rows(qkv: tuple[Tensor, Tensor, Tensor], start: int, stop: int) -> tuple[Tensor, Tensor, Tensor]:
    query, key, value = qkv
    return query[:, :, start:stop], key[:, :, start:stop], value[:, :, start:stop]


def textbook(case: Case, qkv: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """Causal attention from its definition in float64, [count, heads, value_dim]."""
    query, key, value = (x[0].double() for x in qkv)
    group = case.heads // case.key_heads
    key, value = key.repeat_interleave(group, 0), value.repeat_interleave(group, 0)
    scores = query @ key.transpose(1, 2) * case.key_dim**-0.5
    if case.softcap is not None:
        scores = (scores / case.softcap).tanh() * case.softcap
    at = torch.arange(query.shape[1])
    hidden = at[None] > at[:, None]
    if case.window is not None:
        hidden |= at[None] <= at[:, None] - case.window
    scores = scores.masked_fill(hidden, float("-inf"))
    sinks = case.sinks()
    if sinks is not None:
        extra = sinks.double()[:, None, None].expand(-1, scores.shape[1], 1)
        weights = torch.cat([scores, extra], 2).softmax(2)[:, :, :-1]
    else:
        weights = scores.softmax(2)
    return (weights @ value).transpose(0, 1)


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Case:
    """In bf16 our own kernel computes it where there is one (tests/model/test_attend.py); `by_torch` shows it without."""
    chosen = CASES[request.param]
    if chosen.by_torch:
        monkeypatch.setattr("manyhands.model.attention.serves", lambda *_: False)
    return chosen


def test_it_computes_attention(case: Case) -> None:
    """Against the definition in float64, over the border of a key block."""
    qkv = case.tensors()
    tolerance = 2e-5 if case.dtype == torch.float32 else 2e-2
    (got,) = attend(case, [(case.cache(), 0, qkv)])
    assert_close(got.double(), textbook(case, qkv), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("num_threads", daily([2], [1, 3]))
def test_rows_at_block_borders_are_invariant(case: Case, num_threads: int) -> None:
    """1 to 9 rows anywhere equal the rows of one long prefill, also over stale keys that a rollback left behind."""
    qkv = case.tensors()
    cache, used = case.cache(), case.cache()
    with threads(1):
        (want,) = attend(case, [(cache, 0, qkv)])
        attend(case, [(used, 0, case.tensors(seed=9))])
    with threads(num_threads):
        for start in STARTS:
            attend(case, [(used, 0, rows(qkv, 0, start))] if start else [(used, 0, case.tensors(4, seed=9))])
            for count in (1, 2, 3, 5, 9):
                stop = min(start + count, LENGTH)
                (got,) = attend(case, [(used, start, rows(qkv, start, stop))])
                assert torch.equal(got, want[start:stop]), f"positions {start} to {stop - 1}"


@pytest.mark.parametrize("count", daily([1, 128, 513], [2, 6, 127, 129, 511, 512, 699]))
def test_chunks_of_any_size_are_invariant(case: Case, count: int) -> None:
    """A prefill cut into chunks gives the bits of the whole one."""
    qkv = case.tensors()
    (want,) = attend(case, [(case.cache(), 0, qkv)])
    cache = case.cache()
    edges = [0, count, min(2 * count, LENGTH), LENGTH]
    for start, stop in pairwise(edges):
        if stop > start:
            (got,) = attend(case, [(cache, start, rows(qkv, start, stop))])
            assert torch.equal(got, want[start:stop])


def test_sessions_side_by_side_do_not_see_each_other(case: Case) -> None:
    """Segments of other lengths and positions, before and behind, change no bit."""
    mine, other = case.tensors(), case.tensors(seed=5)
    first, second, third = case.cache(), case.cache(), case.cache()
    (want,) = attend(case, [(case.cache(), 0, mine)])
    attend(case, [(second, 0, rows(mine, 0, 520))])
    attend(case, [(first, 0, rows(other, 0, 515))])
    got = attend(
        case,
        [
            (first, 515, rows(other, 515, 518)),
            (second, 520, rows(mine, 520, 521)),
            (third, 0, rows(other, 0, 33)),
        ],
    )
    assert torch.equal(got[1], want[520:521])


def test_padding_rows_are_zero_and_touch_no_cache() -> None:
    """Rows that belong to no segment come out as zeros."""
    case = Case()
    query, key, value = case.tensors(8)
    cache = case.cache(8)
    module = nn.Module()
    module.layer_idx = LAYER  # type: ignore[assignment]
    with running(StepPlan([ShardSegment(cache, 0, 0, 3)])):
        out, _ = attention(module, query, key, value, None)
    assert out.shape == (1, 8, 4, 16)
    assert not out[0, 3:].any() and bool(out[0, :3].any())
    assert torch.equal(cache.keys[LAYER][:, :, :3], key[:, :, :3]) and not cache.keys[LAYER][:, :, 3:].any()


def test_a_probe_learns_shapes_and_computes_nothing() -> None:
    """Loading learns from one pass what each layer caches; latent attention stores values as wide as keys."""
    case = CASES["latent"]
    probe = CacheProbe()
    query, key, value = case.tensors(4)
    module = nn.Module()
    module.layer_idx = LAYER  # type: ignore[assignment]
    with running(probe):
        attention(module, query, key, value, None)
    shape = probe.shapes[LAYER]
    assert shape == LayerShape(4, 24, 16, torch.bfloat16)
    assert (shape.width, shape.bytes_per_token) == (24, 2 * 4 * 24 * 2)


@pytest.mark.parametrize(("capacity", "stored"), [(1, 512), (512, 512), (513, 1024)])
def test_a_cache_is_rounded_up_to_whole_key_blocks(capacity: int, stored: int) -> None:
    """The kernel reads whole blocks, so they must exist (and be finite) behind the last position."""
    cache = Case().cache(capacity)
    assert cache.capacity == capacity
    assert cache.keys[LAYER].shape == cache.values[LAYER].shape == (1, 2, stored, 16)
    assert not cache.keys[LAYER].any()


def test_plain_calls_would_not_be_invariant() -> None:
    """Why all this: torch's own attention over exactly the keys there are changes bits with the number of rows."""
    case = CASES["one head a key fp32"]
    query, key, value = case.tensors()
    call: Callable[..., Tensor] = torch.nn.functional.scaled_dot_product_attention
    whole = call(query, key, value, is_causal=True)
    singles = [call(query[:, :, t : t + 1], key[:, :, : t + 1], value[:, :, : t + 1]) for t in range(600, 620)]
    assert not torch.equal(torch.cat(singles, 2), whole[:, :, 600:620])


def test_a_mask_of_the_modules_own_is_refused() -> None:
    """It would be left out: ours comes from positions alone."""
    module, x = torch.nn.Linear(1, 1), torch.zeros(1, 2, 3, 16)
    with running(CacheProbe()), pytest.raises(ModelError, match="mask of its own"):
        attention(module, x, x, x, torch.zeros(1, 1, 3, 3))
