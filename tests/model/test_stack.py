"""Decoder layers in one native call: the same bits as layer by layer, whatever part of them runs; others are left alone."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from manyhands.core import Span
from manyhands.model import tiles
from manyhands.model.cache import ShardCache, ShardSegment, StepPlan
from manyhands.model.shard import Shard
from manyhands.testing.tiny import make_tiny
from tests.model.pipeline import threads

pytestmark = pytest.mark.skipif(not tiles.available(), reason="no AMX here")

# Of 6 layers, the stretches that run in one call.
STRETCHES = {
    "llama": [range(6)],
    "qwen2": [range(6)],
    "qwen3": [range(6)],
    "gemma2": [range(6)],
    "gemma3": [range(5), range(5, 6)],  # the sixth sees all and turns by other angles
    "phi3": [range(6)],
    "glm4": [range(6)],
    "mixtral": [],  # experts
    "olmo2": [],  # norms over all heads
}


def shard_of(family: str, folder: Path, span: Span) -> Shard:
    return Shard(make_tiny(family, folder / family), span, "bf16")


def run(shard: Shard, span: Span, stacked: bool) -> list[Tensor]:
    """A prefill, a ragged step with a stranger, a window, a rollback: what comes out of each, and the caches."""
    stacks, generator = shard._stacks, torch.Generator().manual_seed(3)
    shard._stacks = stacks if stacked else {}
    caches = [shard.new_cache(600, span) for _ in range(2)]
    out: list[Tensor] = []

    def step(*rows: tuple[int, int, int]) -> None:
        segments, row = [], 0
        for session, start, count in rows:
            segments.append(ShardSegment(caches[session], start, row, count))
            row += count
        x = torch.randn(row, shard.hidden_size, generator=generator).bfloat16()
        out.append(shard.forward(x, StepPlan(segments), span))

    try:
        step((0, 0, 523))
        step((1, 0, 7), (0, 523, 1))
        step((0, 524, 9), (1, 7, 1))
        step((0, 527, 1))
        return [*out, *(t[:, :, : cache.length] for cache in caches for t in _tensors(cache))]
    finally:
        shard._stacks = stacks


def _tensors(cache: ShardCache) -> list[Tensor]:
    return [*cache.keys.values(), *cache.values.values()]


@pytest.mark.parametrize("family", STRETCHES)
def test_which_layers_run_together(family: str, tmp_path: Path) -> None:
    stacks = shard_of(family, tmp_path, Span(0, 6))._stacks
    assert list(dict.fromkeys(layers for _, layers in stacks.values())) == STRETCHES[family]
    assert all(index in layers for index, (_, layers) in stacks.items())


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("family", ["llama", "gemma2", "gemma3", "glm4"])
def test_the_bits_are_those_of_layer_by_layer(family: str, count: int, tmp_path: Path) -> None:
    """Also of a part of them, and from the middle of the model."""
    shard = shard_of(family, tmp_path, Span(1, 6))
    for span in (Span(1, 6), Span(2, 3), Span(2, 6)):
        with threads(2):
            want = run(shard, span, stacked=False)
        with threads(count):
            got = run(shard, span, stacked=True)
        assert all(map(torch.equal, got, want))


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("family", ["llama", "gemma3", "glm4"])
def test_few_rows_as_bytes_give_the_bits_of_tensors(family: str, count: int, tmp_path: Path) -> None:
    """A token, strangers, a window, a rollback; over a block of positions, at a border of which angles are worked out anew."""
    shard, random = shard_of(family, tmp_path, Span(1, 6)), torch.Generator().manual_seed(5)
    for span in (Span(1, 6), Span(2, 6)):
        few = shard.few(span)
        assert few is not None
        caches = [[shard.new_cache(600, span) for _ in range(2)] for _ in range(2)]
        for start in (0, 523):
            x = torch.randn(523 if start == 0 else 1, shard.hidden_size, generator=random).bfloat16()
            for own in caches:
                shard.forward(x, StepPlan([ShardSegment(own[0], start, 0, len(x))]), span)
        for step in ([(0, 524, 1)], [(0, 525, 1), (1, 0, 9)], [(1, 9, 1), (0, 526, 30)], [(0, 528, 1)], [(1, 3, 32)]):
            x = torch.randn(sum(rows for _, _, rows in step), shard.hidden_size, generator=random).bfloat16()
            plans = [_side_by_side([(own[session], start, rows) for session, start, rows in step]) for own in caches]
            with threads(2):
                want = shard.forward(x, plans[0], span)
            with threads(count):
                for s in plans[1].segments:
                    few.put(s.row, _bytes(x[s.row : s.row + s.count]))
                shard.forward_few(plans[1], span)
            assert b"".join(few.take(s.row, s.count) for s in plans[1].segments) == _bytes(want)
            assert [cache.length for cache in caches[0]] == [cache.length for cache in caches[1]]


def _side_by_side(parts: list[tuple[ShardCache, int, int]]) -> StepPlan:
    segments: list[ShardSegment] = []
    for cache, start, count in parts:
        segments.append(ShardSegment(cache, start, sum(s.count for s in segments), count))
    return StepPlan(segments)


def _bytes(x: Tensor) -> bytes:
    return x.contiguous().view(torch.uint8).numpy().tobytes()


def test_few_rows_say_how_large_they_are(tmp_path: Path) -> None:
    few = shard_of("llama", tmp_path, Span(0, 6)).few(Span(0, 6))
    assert few is not None
    x = torch.ones(3, few.row_bytes // 2).bfloat16() * torch.tensor([[1.0], [0.0], [3.0]]).bfloat16()
    assert few.put(2, _bytes(x)) == pytest.approx((0.0, 3 * (few.row_bytes / 2) ** 0.5))
    x[1, 4] = torch.nan
    assert math.isnan(few.put(0, _bytes(x))[1])
    with pytest.raises(ValueError, match="different structures"):
        few.put(31, _bytes(x))  # beyond the last row: nothing else is written over


@pytest.mark.parametrize("family", ["mixtral", "olmo2"])
def test_few_rows_of_other_layers_are_tensors(family: str, tmp_path: Path) -> None:
    assert shard_of(family, tmp_path, Span(0, 6)).few(Span(1, 2)) is None


Forward = Callable[..., Tensor]


def _layer(scale: float = 1.0, parallel: bool = False, swapped: bool = False, after: bool = False) -> Forward:
    """A decoder layer's forward: llama's, but for what is said."""

    def forward(self: Any, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        norms = [self.input_layernorm, self.post_attention_layernorm]
        if swapped:
            norms.reverse()
        x = hidden_states
        attended = scale * self.self_attn(hidden_states=norms[0](x), **kwargs)[0]
        middle = x if parallel else x + attended
        block = self.mlp(norms[1](middle))
        out = middle + block + (attended if parallel else 0)
        closed: Tensor = norms[1](out) if after else out
        return closed

    return forward


@pytest.mark.parametrize(
    ("forward", "is_ours"),
    [
        (_layer(), True),
        (_layer(swapped=True), True),  # which norm comes first is found, not assumed
        (_layer(scale=0.5), False),
        (_layer(parallel=True), False),
        (_layer(after=True), False),
    ],
    ids=["llama", "swapped", "scaled", "parallel", "normed"],
)
def test_a_layer_that_computes_something_else_is_left_alone(
    forward: Forward, is_ours: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LlamaDecoderLayer, "forward", forward)
    shard = shard_of("llama", tmp_path, Span(0, 6))
    assert bool(shard._stacks) == is_ours
    assert all(map(torch.equal, run(shard, Span(0, 6), stacked=True), run(shard, Span(0, 6), stacked=False)))


def test_a_step_of_no_rows(tmp_path: Path) -> None:
    shard = shard_of("llama", tmp_path, Span(0, 6))
    plan = StepPlan([ShardSegment(shard.new_cache(512), 0, 0, 0)])
    assert shard.forward(torch.zeros(0, shard.hidden_size).bfloat16(), plan).shape == (0, shard.hidden_size)


def test_more_positions_than_the_cache_has_are_refused(tmp_path: Path) -> None:
    shard = shard_of("llama", tmp_path, Span(0, 6))
    cache = shard.new_cache(512)
    with pytest.raises(ValueError, match="does not fit"):
        shard.forward(torch.zeros(2, shard.hidden_size).bfloat16(), StepPlan([ShardSegment(cache, 511, 0, 2)]))
