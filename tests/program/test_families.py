"""Recipes: published configs are read, every field is used or refused by name, Programs name what checkpoints hold."""

import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from manyhands.errors import ModelError
from manyhands.program.families import FAMILIES, build_program, read_program
from manyhands.program.ops import (
    Add,
    Admit,
    Attention,
    Blend,
    ChannelDecay,
    Collapse,
    Compress,
    CompressedAttention,
    Constant,
    Convolution,
    Copy,
    Decay,
    EntryIndex,
    ExpertRouting,
    Experts,
    Gate,
    GroupedProduct,
    Index,
    LatentAttention,
    Layer,
    LinearAttention,
    Mix,
    Multiply,
    Ngrams,
    Norm,
    Op,
    Pool,
    PositionEmbedding,
    Product,
    Program,
    Rescale,
    Rotary,
    ScaleByPosition,
    ScaleHeads,
    SelectiveScan,
    SharedIndex,
    SoftCap,
    Softplus,
    Sparsify,
    Spread,
    Taps,
    Xielu,
)
from manyhands.program.tensors import ends_tensors, layer_tensors
from manyhands.testing.tiny import EVERY_FAMILY, make_tiny

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "vocab_size": 100,
}
# As published, in the hub's old form.
QWEN25 = {
    "architectures": ["Qwen2ForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "hidden_act": "silu",
    "hidden_size": 896,
    "initializer_range": 0.02,
    "intermediate_size": 4864,
    "max_position_embeddings": 32768,
    "max_window_layers": 21,
    "model_type": "qwen2",
    "num_attention_heads": 14,
    "num_hidden_layers": 24,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.43.1",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
DEEPSEEK_V3 = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"},
    "aux_loss_alpha": 0.001,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "ep_size": 1,
    "first_k_dense_replace": 3,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "initializer_range": 0.02,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "model_type": "deepseek_v3",
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "pretraining_tp": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "seq_aux": True,
    "tie_word_embeddings": False,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
    "transformers_version": "4.33.1",
    "use_cache": True,
    "v_head_dim": 128,
    "vocab_size": 129280,
}
PYTHIA = {
    "architectures": ["GPTNeoXForCausalLM"],
    "bos_token_id": 0,
    "eos_token_id": 0,
    "hidden_act": "gelu",
    "hidden_size": 512,
    "initializer_range": 0.02,
    "intermediate_size": 2048,
    "layer_norm_eps": 1e-05,
    "max_position_embeddings": 2048,
    "model_type": "gpt_neox",
    "num_attention_heads": 8,
    "num_hidden_layers": 6,
    "rotary_emb_base": 10000,
    "rotary_pct": 0.25,
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
    "transformers_version": "4.24.0",
    "use_cache": True,
    "use_parallel_residual": True,
    "vocab_size": 50304,
}


@pytest.mark.parametrize("config", [QWEN25, DEEPSEEK_V3, PYTHIA], ids=lambda config: str(config["model_type"]))
def test_published_configs_are_read(config: dict[str, Any]) -> None:
    program = build_program(config)
    assert len(program.layers) == config["num_hidden_layers"]
    assert program.context == config["max_position_embeddings"]


def test_yarn_of_deepseek_scales_scores() -> None:
    """The published figure: 1 / sqrt(192) times (0.1 ln 40 + 1) squared."""
    attend = build_program(DEEPSEEK_V3).layers[0].attention
    assert attend is not None
    assert attend.scale == pytest.approx(192**-0.5 * 1.3688879454113936**2, rel=1e-12)
    assert sum(attend.cache_widths) == 576


@pytest.mark.parametrize("family", EVERY_FAMILY)
def test_a_program_names_the_checkpoints_tensors_with_their_shapes(family: str, tmp_path: Path) -> None:
    """All of them, and no others: so a missing, extra or oddly shaped tensor can be told before anything is read."""
    folder = make_tiny(family, tmp_path, layers=3)
    program = read_program(folder)
    needed = ends_tensors(program, embed=True, head=True)
    for layer in program.layers:
        needed |= layer_tensors(layer)
    with safe_open(folder / "model.safetensors", framework="np") as handle:
        stored = {name: tuple(handle.get_slice(name).get_shape()) for name in handle.keys()}
    assert needed == stored


@pytest.mark.parametrize("family", EVERY_FAMILY)
def test_every_register_is_written_before_it_is_read(family: str, tmp_path: Path) -> None:
    program = read_program(make_tiny(family, tmp_path, layers=3))
    for layer in program.layers:
        widths = register_widths(program, layer)
        assert widths["x"] == program.hidden
    assert widths_after(program, program.head.ops)["logits"] == program.vocab


def register_widths(program: Program, layer: Layer) -> dict[str, int]:
    """Widths of registers after the layer; fails where an operation finds another than it needs."""
    return widths_after(program, layer.ops)


def widths_after(program: Program, ops: Sequence[Op]) -> dict[str, int]:
    widths = {"x": program.hidden}
    for op in ops:
        take(program, op, widths)
    return widths


def take(program: Program, op: Op, widths: dict[str, int]) -> None:
    match op:
        case Norm():
            assert {w.outputs for w in (*op.weight, *op.bias)} <= {widths[op.source] // op.groups}
            widths[op.target] = widths[op.source]
        case Product():
            assert {part.weight.inputs for part in op.parts} == {widths[op.source]}
            assert all(part.bias is None or part.bias.outputs == part.weight.outputs for part in op.parts)
            widths.update((part.target, part.weight.outputs) for part in op.parts)
        case PositionEmbedding():
            assert op.table.shape == (program.context + op.offset, op.table.inputs)
            widths[op.target] = op.table.inputs
        case ScaleHeads():
            assert op.scales.outputs == op.biases.outputs and widths[op.target] % op.scales.outputs == 0
        case Rotary():
            assert widths[op.target] == op.heads * op.width
            assert op.exponents is None or 2 * op.exponents.outputs == program.ropes[op.rope].width
            assert op.offset + program.ropes[op.rope].width <= op.width
        case ScaleByPosition():
            assert widths[op.target] and op.beta > 0 and op.length > 0 and op.offset in (0, 1)
        case Attention():
            assert widths[op.query] == op.heads * op.width
            cached = (op.key, op.value, *((op.index.key,) if op.index else ()))
            assert tuple(widths[name] for name in cached) == op.cache_widths
            if op.index is not None:
                assert widths[op.index.query] == op.index.heads * op.index.width
            if isinstance(op.index, EntryIndex):
                assert (widths[op.index.key], widths[op.index.weight]) == (op.index.width, op.index.heads)
            elif op.index is not None:
                assert op.index.heads == op.kv_heads
            assert op.biases is None or (op.index is None and widths[op.biases] % op.heads == 0)
            widths[op.target] = op.heads * op.value_width
        case LatentAttention():
            assert widths[op.query] == op.heads * (op.width + op.rotary_width)
            cached = (op.latent, op.rotary, *((op.index.key,) if isinstance(op.index, Index | EntryIndex) else ()))
            assert tuple(widths.get(name, 0) for name in cached) == op.cache_widths
            if isinstance(op.index, SharedIndex):
                assert widths[op.index.source] == op.index.top_k
            elif op.index is not None:
                assert widths[op.index.query] == op.index.heads * op.index.width
                assert widths[op.index.weight] == op.index.heads
            if isinstance(op.index, Index):
                widths[op.index.target] = op.index.top_k
            assert op.key_weight.outputs == op.heads * op.width
            assert op.sinks is None or op.sinks.outputs == op.heads
            widths[op.target] = op.heads * op.value_width
        case CompressedAttention():
            assert widths[op.query] == op.heads * op.width and op.sinks.outputs == op.heads
            cached = (op.key, *((op.entry,) if op.entry else ()), *((op.index.key,) if op.index else ()))
            assert tuple(widths[name] for name in cached) == op.cache_widths
            if op.index is not None:
                assert widths[op.index.query] == op.index.heads * op.index.width
                assert widths[op.index.weight] == op.index.heads
            widths[op.target] = op.heads * op.width
        case Constant():
            widths[op.target] = len(op.numbers)
        case Pool():
            assert widths[op.values] == widths[op.gates] == op.width and op.bias.shape == (op.rate, op.width)
            widths[op.target] = op.width
        case Compress():
            assert (widths[op.values], widths[op.gates]) == op.cache_widths
            assert op.bias.shape == (op.rate, widths[op.values])
            widths[op.target] = op.width
        case Ngrams():
            assert widths[op.tokens[0]] == 4 and op.table.outputs * op.parts >= sum(op.sizes)
            widths[op.target] = len(op.sizes) * op.table.inputs
        case Admit():
            assert widths[op.key] == widths[op.query] == op.streams * widths[op.value]
            widths[op.target] = widths[op.key]
        case Collapse():
            assert op.mix.inputs == op.streams * op.width <= widths[op.source]
            assert op.mix.outputs == op.base.outputs == op.streams * (1, 2 + op.streams, 2)[op.keeps]
            assert op.scale.outputs == (1, 3, 2)[op.keeps]
            widths |= {op.kept: op.mix.outputs, op.target: op.width}
        case Spread():
            assert widths[op.kept] in ((2 + op.streams) * op.streams, 2 * op.streams)
            assert op.streams * widths[op.source] <= widths[op.target]
        case GroupedProduct():
            assert op.weight.inputs * op.groups == widths[op.source]
            assert op.is_shared or op.weight.outputs % op.groups == 0
            widths[op.target] = op.groups * op.width
        case Convolution():
            assert op.source != op.target and widths[op.source] == op.weight.outputs
            assert not isinstance(op.weight, Taps) or len(op.weight.values) == op.taps
            widths[op.target] = widths[op.source]
        case Decay():
            assert widths[op.source] == op.rate.outputs == op.bias.outputs
            widths[op.target] = widths[op.source]
        case ChannelDecay():
            assert widths[op.source] == op.bias.outputs and not op.bias.outputs % math.prod(op.rate.shape)
            widths[op.target] = widths[op.source]
        case Xielu():
            assert widths[op.target] and [weight.shape for weight in op.numbers] == [(1,), (1,), (), ()]
        case Softplus():
            assert op.bias is None or widths[op.source] == op.bias.outputs
            widths[op.target] = widths[op.source]
        case LinearAttention():
            assert op.skip is None or op.skip.outputs == op.heads
            assert widths[op.query] == widths[op.key] == op.key_heads * op.width
            assert widths[op.decay] == op.heads * (op.width if op.by_channel else 1)
            assert widths[op.strength] == op.heads and not (op.by_channel and op.is_sum)
            assert widths[op.value] == op.heads * op.value_width
            widths[op.target] = widths[op.value]
        case SelectiveScan():
            assert widths[op.query] == widths[op.key] == op.width
            assert widths[op.value] == widths[op.step] == op.columns == op.skip.outputs
            widths[op.target] = op.columns
        case Gate():
            assert widths[op.gate] == widths[op.up]
            widths[op.target] = widths[op.up]
        case ExpertRouting():
            assert widths[op.source] == op.experts + op.always and not (op.always and op.groups > 1)
            widths |= {op.target: op.top_k, op.shares: op.always}
        case Experts():
            gate = op.gate or op.up
            assert widths[op.source] == gate.inputs == op.up.inputs
            assert gate.outputs == op.up.outputs == op.down.inputs
            assert op.routes in widths and (not op.scales_source or op.down.outputs == widths[op.source])
            assert op.norm is None or op.norm.shape == (op.down.outputs,)
            widths[op.target] = op.down.outputs
        case Multiply():
            if isinstance(op.by, str):
                assert widths[op.source] % widths[op.by] == 0
            else:
                fits = isinstance(op.by, float) or op.by.shape in ((1,), (widths[op.source],))
                assert op.source == op.target and fits
            widths[op.target] = widths[op.source]
        case Copy():
            assert 0 <= op.start and 0 < op.count <= widths[op.source] - op.start
            if op.at is None or op.width is not None:
                widths[op.target] = op.width or op.count
            assert (op.at or 0) + op.count <= widths[op.target]
        case Mix():
            assert op.by is None or widths[op.by] == op.sources * op.targets
            assert op.start + op.sources * op.width <= widths[op.source] and op.source != op.target != op.by
            assert op.at + op.targets * op.width <= widths[op.target]
        case Rescale():
            assert widths[op.like] and op.like != op.target
            widths[op.target] = widths[op.source]
        case Sparsify() | SoftCap():
            assert widths[op.target]
        case Blend():
            assert widths[op.source] == widths[op.target] == op.gate.outputs
        case Add():
            assert {widths[term.source] for term in op.terms} == {widths[op.target]}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_attention_heads", 0),
        ("num_attention_heads", True),
        ("num_attention_heads", 6),
        ("num_key_value_heads", 3),
        ("num_hidden_layers", 10**9),
        ("hidden_size", 10**12),
        ("hidden_size", -64),
        ("hidden_size", "64"),
        ("vocab_size", 1e3),
        ("intermediate_size", None),
        ("head_dim", 1 << 40),
        ("rms_norm_eps", float("inf")),
        ("hidden_act", "mish"),
        ("hidden_act", ["silu"]),
        ("attention_bias", 1),
        ("tie_word_embeddings", "yes"),
        ("rope_scaling", [1]),
        ("max_position_embeddings", 1 << 60),
        ("quantization_config", {"quant_method": "mxfp4"}),
        ("new_kind_of_norm", True),
        ("sliding_window", 4096),
        ("qk_layernorm", True),
        ("text_config", {"model_type": "llama"}),
        ("logit_scale", 2.0),
    ],
)
def test_what_bears_on_arithmetic_is_used_or_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(ModelError) as caught:
        build_program({**LLAMA, field: value})
    said = str(caught.value)
    assert "\n" not in said and len(said) < 300
    assert field.removeprefix("rope_scaling") in said or "rope_parameters" in said


def test_sliding_layers_without_a_window_are_refused_with_the_switch() -> None:
    with pytest.raises(ModelError, match=r"layer_types is \['sliding.* needs sliding_window \(and use_sliding_window"):
        build_program({**QWEN25, "layer_types": ["sliding_attention"] * 24})


# Of which transformers has a class of text alone (tests/engine/test_glm5_next.py and test_nemotron_nas.py have the others).
WITH_CLASS = sorted(FAMILIES.keys() - {"glm5_next_text", "nanbeige", "nemotron-nas"})


@pytest.mark.parametrize("family", WITH_CLASS)
def test_an_unknown_field_is_refused_in_every_family(family: str, tmp_path: Path) -> None:
    config = json.loads((make_tiny(family, tmp_path, layers=3) / "config.json").read_text())
    build_program({**config, "initializer_range": 9.0, "surprise": None})
    with pytest.raises(ModelError, match=r"surprise is 2\.5, a field that"):
        build_program({**config, "surprise": 2.5})


_VALUES = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(), st.lists(st.integers()))


@settings(max_examples=300)
@given(family=st.sampled_from(WITH_CLASS), data=st.data())
def test_a_damaged_config_gives_a_program_or_one_line(family: str, data: st.DataObject) -> None:
    """Any field with any value: never another exception, never a list as long as the value says."""
    config = _CONFIGS.setdefault(family, _config(family))
    field = data.draw(st.sampled_from(sorted(config)))
    try:
        build_program({**config, field: data.draw(_VALUES)})
    except ModelError as error:
        assert "\n" not in str(error)


_CONFIGS: dict[str, dict[str, Any]] = {}


def _config(family: str) -> dict[str, Any]:
    from manyhands.testing.tiny import tiny_config

    config: dict[str, Any] = json.loads(tiny_config(family, layers=3, context=512).to_json_string())
    return config


@pytest.mark.parametrize("content", ["", "[]", "{", '{"model_type": 3}', '{"model_type": "bert"}', "[" * 100_000])
def test_a_config_that_is_none_is_refused(content: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ModelError):
        read_program(tmp_path)


def test_an_oversized_config_is_refused_unread(tmp_path: Path) -> None:
    with (tmp_path / "config.json").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(ModelError, match="the limit is"):
        read_program(tmp_path)


def test_programs_are_data(tmp_path: Path) -> None:
    """Equal configs give equal Programs, which can be told apart by hash."""
    one, two = build_program(LLAMA), build_program(dict(LLAMA))
    assert one == two and hash(one) == hash(two)
    assert hash(one) != hash(build_program({**LLAMA, "rms_norm_eps": 1e-3}))
    assert "torch" not in sys.modules[Program.__module__].__dict__


def test_a_config_that_names_no_family_is_told_so() -> None:
    with pytest.raises(ModelError, match="model_type is missing; it names the family"):
        build_program({}, "x/config.json")
