"""What layers are called with: the model's own numbers, for any positions in any company; models with more are refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import BloomConfig, BloomModel, GPT2Config, GPT2Model, OPTConfig, OPTModel

from manyhands.core import Span
from manyhands.errors import ContextOverflow, ModelError
from manyhands.model.cache import ShardCache, ShardSegment, StepPlan
from manyhands.model.calls import BLOCK, LayerCalls
from manyhands.model.load import ModelPart, Pass, context_length, find_layers, load_part, read_config
from manyhands.testing.tiny import make_tiny


def _plan(*starts_and_counts: tuple[int, int]) -> StepPlan:
    row, segments = 0, []
    for start, count in starts_and_counts:
        segments.append(ShardSegment(ShardCache({}, 0), start, row, count))
        row += count
    return StepPlan(segments)


def _angles(call: dict[str, Any]) -> tuple[Tensor, Tensor]:
    cos, sin = call["position_embeddings"]
    return cos, sin


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt_oss", "glm4", "deepseek_v3"])
def test_layers_get_what_the_model_gives_them(family: str, tmp_path: Path) -> None:
    folder = make_tiny(family, tmp_path / family, context=4096)
    config = read_config(folder)
    model = load_part(folder, config, ModelPart(Span(0, 2)), "fp32")
    owner, name, layers = find_layers(model, config.num_hidden_layers)
    calls = LayerCalls(model.base_model, owner, name, config.hidden_size, torch.float32, 4096)
    seen: list[dict[str, Any]] = []
    for layer in layers:
        layer.register_forward_pre_hook(lambda _, args, kwargs: seen.append(kwargs), with_kwargs=True)
        layer.forward = lambda hidden_states, **_: hidden_states
    positions = [5, 6, 7, BLOCK - 1, BLOCK, 3 * BLOCK + 2, 0]
    with torch.inference_mode():
        model.base_model(
            inputs_embeds=torch.zeros(1, len(positions), config.hidden_size), position_ids=torch.tensor([positions])
        )
    got = calls.of(_plan((5, 3), (BLOCK - 1, 2), (3 * BLOCK + 2, 1)), len(positions))  # the last is padding
    assert len(got) == len(seen) == config.num_hidden_layers
    for ours, own in zip(got, seen, strict=True):
        assert set(ours) == set(own)
        assert ours["attention_mask"] is None
        for a, b in zip(_angles(ours), _angles(own), strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-6)


def _of_a_llama(tmp_path: Path) -> LayerCalls:
    folder = make_tiny("llama", tmp_path / "llama", context=4096)
    config = read_config(folder)
    model = load_part(folder, config, ModelPart(Span(0, 1)), "bf16")
    owner, name, _ = find_layers(model, config.num_hidden_layers)
    return LayerCalls(model.base_model, owner, name, config.hidden_size, torch.bfloat16, 4096)


def test_few_groups_are_kept(tmp_path: Path) -> None:
    calls = _of_a_llama(tmp_path)
    first = [a.clone() for a in _angles(calls.of(_plan((7, 1)), 1)[0])]
    for position in range(0, 4096, 10):
        calls.of(_plan((position, 1)), 1)
    assert len(calls._groups) <= 64 < 4096 // 61
    assert all(map(torch.equal, first, _angles(calls.of(_plan((7, 1)), 1)[0])))


def test_a_row_is_the_same_in_any_company(tmp_path: Path) -> None:
    calls = _of_a_llama(tmp_path)
    alone = [calls.of(_plan((p, 1)), 1)[0] for p in range(BLOCK - 4, BLOCK + 4)]  # the table grows on the way
    together = calls.of(_plan((BLOCK - 4, 8)), 8)[0]
    ragged = calls.of(_plan((3, 2), (BLOCK - 4, 8)), 32)[0]
    for i, one in enumerate(alone):
        for a, b, c in zip(_angles(one), _angles(together), _angles(ragged), strict=True):
            assert torch.equal(a[:, 0], b[:, i])
            assert torch.equal(a[:, 0], c[:, 2 + i])


ROPES = {
    "dynamic": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0},
    "longrope": {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * 8,
        "long_factor": [3.0] * 8,
    },
}


@pytest.mark.parametrize("kind", ROPES)
@pytest.mark.parametrize("context", [700, 1100, 2 * BLOCK + 5])
def test_no_position_is_turned_for_one_that_there_is_not(kind: str, context: int, tmp_path: Path) -> None:
    """Some rotary embeddings turn a whole call by other angles if one position in it is beyond a limit. (They did.)"""
    family, options = "llama", dict[str, Any]()
    if kind == "longrope":
        family, options = "phi3", {"original_max_position_embeddings": context}
    longest = 4 * context if kind == "longrope" else context
    folder = make_tiny(family, tmp_path / family, context=longest, rope_parameters=ROPES[kind], **options)
    config = read_config(folder)
    assert context_length(config) == context
    model = load_part(folder, config, ModelPart(Span(0, 1)), "fp32")
    owner, name, _ = find_layers(model, config.num_hidden_layers)
    calls = LayerCalls(model.base_model, owner, name, config.hidden_size, torch.float32, context)
    for position in (0, context // 2, context - 1):
        got = _angles(calls.of(_plan((position, 1)), 1)[0])
        want = model.base_model.rotary_emb(torch.zeros(1, 1, 1), torch.tensor([[position]]))
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-5)
    with pytest.raises(ContextOverflow, match=f"position {context} "):
        calls.of(_plan((context - 3, 4)), 4)


SMALL = {"hidden_size": 32, "num_attention_heads": 4}
REFUSED = [
    (GPT2Model(GPT2Config(n_embd=32, n_head=4, n_layer=2)), "h"),  # learned positions
    (
        OPTModel(OPTConfig(**SMALL, num_hidden_layers=2, ffn_dim=32, word_embed_proj_dim=32)),
        "layers",
    ),  # learned positions
    (BloomModel(BloomConfig(hidden_size=32, n_head=4, n_layer=2)), "h"),  # a bias by distance, from the mask
]


@pytest.mark.parametrize(("base", "name"), REFUSED, ids=lambda x: type(x).__name__ if isinstance(x, nn.Module) else "")
def test_models_whose_layers_need_more_are_refused(base: nn.Module, name: str) -> None:
    owner = base.get_submodule("decoder") if isinstance(base, OPTModel) else base
    with pytest.raises(ModelError, match="not supported"):
        LayerCalls(base, owner, name, 32, torch.float32, 1024)


class _Odd(nn.Module):
    """Calls its first `repeats` layers, and lets them see the first hidden states if it `leaks`."""

    def __init__(self, repeats: int, leaks: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Pass(), Pass()])
        self.repeats, self.leaks = repeats, leaks

    def forward(self, inputs_embeds: Tensor, **_: object) -> Tensor:
        extra = {"skip": inputs_embeds} if self.leaks else {}
        for layer in list(self.layers)[: self.repeats]:
            inputs_embeds = layer(inputs_embeds, **extra)
        return inputs_embeds


class _Shifted(nn.Module):
    """Adds positions to what its first layer returns, in place or not."""

    def __init__(self, in_place: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Pass(), Pass(), Pass()])
        self.in_place = in_place

    def forward(self, inputs_embeds: Tensor, position_ids: Tensor, **_: object) -> Tensor:
        first, *others = self.layers
        hidden: Tensor = first(inputs_embeds.clone())
        shift = position_ids[..., None].to(hidden.dtype)
        hidden = hidden.add_(shift) if self.in_place else hidden + shift
        for layer in others:
            hidden = layer(hidden)
        return hidden


@pytest.mark.parametrize("in_place", [True, False])
def test_a_model_that_adds_positions_between_its_layers_is_refused(in_place: bool) -> None:
    base = _Shifted(in_place)
    with pytest.raises(ModelError, match="adds positions"):
        LayerCalls(base, base, "layers", 8, torch.float32, 1024)


def test_a_model_that_leaves_a_layer_out_is_refused() -> None:
    base = _Odd(1, leaks=False)
    with pytest.raises(ModelError, match="each of its layers once"):
        LayerCalls(base, base, "layers", 8, torch.float32, 1024)
    assert all(isinstance(layer, Pass) for layer in base.layers)  # and keeps its own


def test_a_model_that_passes_hidden_states_beside_the_hidden_states_is_refused() -> None:
    base = _Odd(2, leaks=True)
    with pytest.raises(ModelError, match="more than their positions"):
        LayerCalls(base, base, "layers", 8, torch.float32, 1024)
