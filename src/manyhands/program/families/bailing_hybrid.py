"""The recipe of bailing_hybrid (Ling 3.0): kimi_linear whose decays are bounded, whose queries and keys turn where attention is
latent, and whose heads are gated there."""

from dataclasses import replace
from typing import Final

from manyhands.program.blocks import Branch, NormStyle, Ops, Sizes, TensorNames, sequential
from manyhands.program.ends import EndsStyle, assemble
from manyhands.program.families.experts import listed_sparse
from manyhands.program.families.latent import LatentSizes, latent_attention, latent_scale, sizes
from manyhands.program.families.linear import KINDS, LinearStyle, delta_rule
from manyhands.program.families.shared import ExpertBlocks, grouped_route, limited_blocks
from manyhands.program.fields import Fields
from manyhands.program.ops import ChannelDecay, Multiply, Part, Product, Program, Weight
from manyhands.program.rope import RopeReader

_LINEAR, _FULL = KINDS
_PATH: Final = "attention"
_LIMITS: Final = ("expert_swiglu_limit_list", "share_expert_swiglu_limit_list")
_TRAINED: Final[dict[str, object]] = {  # of fields that transformers does not read: what it computes
    "gated_attention_proj_granularity_type": "head_wise",
    "group_norm_size": 1,
    "linear_silu": True,
    "moe_router_enable_expert_bias": True,
    "no_kda_lora": True,
    "num_kv_heads_for_linear_attn": 0,
    "rope_interleave": True,
    "router_dtype": "fp32",
    "scale_router_input": False,
    "score_function": "sigmoid",
    "tie_word_embeddings": False,
    "up_proj_norm": False,
    "use_kda_lora": False,
    "use_mla_nope": False,
    "use_nGPT": False,
    "use_qk_norm": True,
    "value_norm": False,
}


def bailing_hybrid(f: Fields) -> Program:
    """Tensors under the names that published checkpoints have. Queries may come from a latent, as of Ling 3.0 tiny, which
    transformers (5.23) does not read."""
    _own_names(f)
    s, norm = sizes(f), NormStyle("rms", f.number("rms_norm_eps", 1e-6))
    z = LatentSizes.read(f, s, query_rank=None, rank=512, plain=128, rotary=64, value=128)
    linear = _linear_style(f, s, norm.eps)
    bound = f.number("kda_lower_bound", -5.0, positive=False) if f.flag("kda_safe_gate", True) else None
    if bound is not None and bound >= 0:
        raise f.refuse("kda_lower_bound", "a number below zero is needed")
    f.ignore("kda_lower_bound")
    kinds, blocks, bias = _kinds(f, s.layers), _blocks(f, s), f.flag("attention_bias")
    _as_trained(f, z, blocks[0])
    rope = RopeReader(f, theta=6000000.0)
    if rope.kind == "default":  # which does not read it: of head_dim, it says what qk_rope_head_dim is
        f.ignore("partial_rotary_factor")
    scale, split = latent_scale(rope, z.plain + z.rotary), f.stored("split_kv_b")

    def attention(n: TensorNames) -> Ops:
        gate = Part("g", n.linear(f"{_PATH}.g_proj", s.heads, s.hidden), activation="sigmoid")
        gated = (gate, Multiply("a", "g", "a"))
        return latent_attention(n, s, z, scale, pairs=True, bias=bias, split=split, path=_PATH, gate=gated, out="dense")

    def layer(n: TensorNames, i: int) -> Ops:
        first = attention(n) if kinds[i] == _FULL else _linear_attention(n, s, linear, bound)
        before = norm.op(n, "input_layernorm", s.hidden, "x", "h")
        return sequential(Branch(first, "a", before), blocks[i].branch(n, s, norm, i))

    ends = EndsStyle(embed="model.word_embeddings")
    return assemble(f, s, norm, rope, [rope.plain(z.rotary)], ends, layer)


def _own_names(f: Fields) -> None:
    f.rename(max_position_embeddings="model_max_length", num_local_experts="num_experts")
    f.rename(num_experts_per_tok="num_experts_per_token", n_shared_experts="num_shared_experts")
    f.rename(norm_topk_prob="moe_renormalize", n_group="num_expert_group")
    f.assume(max_position_embeddings=1 << 18, intermediate_size=6144, moe_intermediate_size=768)
    f.assume(num_local_experts=512, first_k_dense_replace=2)


def _linear_style(f: Fields, s: Sizes, eps: float) -> LinearStyle:
    """transformers writes these fields by other names, which go before those of published configs, also where they are null."""
    for name in ("linear_num_heads", "linear_head_dim", "linear_conv_kernel_dim"):
        if f.is_null(name):
            raise f.refuse(name, "a whole number is needed")
    heads = f.count("linear_num_heads", s.heads, high=4096)
    width = f.count("linear_head_dim", f.count("head_dim", 128, high=1 << 14), high=1 << 14)
    taps = f.count("linear_conv_kernel_dim", f.count("short_conv_kernel_size", 4, high=32), high=32)
    is_log = not f.stored("rates")
    return LinearStyle(heads, heads, width, width, taps, eps, f.activation(), is_log=is_log, gate="sigmoid")


def _kinds(f: Fields, layers: int) -> list[str]:
    """The last of each group has attention. What is left of a group has it in the publisher's code, and not in transformers."""
    group = f.count("layer_group_size", 6)
    if layers % group and not f.has("layer_types"):
        raise f.refuse("layer_group_size", f"a divisor of the {layers} layers is needed, or layer_types")
    return f.per_layer("layer_types", layers, [_LINEAR if (i + 1) % group else _FULL for i in range(layers)], KINDS)


def _blocks(f: Fields, s: Sizes) -> list[ExpertBlocks]:
    """With the limits that the models were trained with, which publisher's servers apply; transformers (5.23) reads none."""
    sparse = listed_sparse(f, s.layers, f.count("first_k_dense_replace", low=0))
    blocks = ExpertBlocks.read(f, grouped_route(f, "num_local_experts"), sparse)
    f.shorten(s.layers + f.count("num_nextn_predict_layers", 0, low=0, high=1024), s.layers, *_LIMITS)
    found = limited_blocks(f, replace(blocks, correction="mlp.gate.expert_bias"), *_LIMITS)
    if any(block.beside_limit and not sparse[i] for i, block in enumerate(found)):
        raise f.refuse(_LIMITS[1], "no limit is needed for layers without experts")
    return found


def _as_trained(f: Fields, z: LatentSizes, blocks: ExpertBlocks) -> None:
    if "BailingMoeV2" in str(f.raw("architectures")):
        raise f.refuse("architectures", "Ling 2.5 and 2.6, of another arithmetic by the same name, have no recipe")
    for name, value in _TRAINED.items():
        f.only(name, value)
    f.only("moe_shared_expert_intermediate_size", blocks.inner * blocks.shared)
    f.only("rotary_dim", z.rotary)
    f.ignore("max_window_layers", "mtp_loss_scaling_factor", "mtp_use_kda", "output_dropout")


def _linear_attention(n: TensorNames, s: Sizes, style: LinearStyle, bound: float | None) -> Ops:
    """The delta rule between products."""
    parts = [n.part(name, f"{_PATH}.{name}_proj", style.keys, s.hidden, False) for name in "qkv"]
    parts.append(Part("b", n.linear(f"{_PATH}.b_proj", style.heads, s.hidden), activation="sigmoid"))
    named = zip("az", "fg", strict=True)
    parts += [n.part(target, f"{_PATH}.{name}_proj", style.keys, s.hidden, False) for target, name in named]
    kernels = [Weight(f"{n.path}{_PATH}.{name}_conv1d.weight", (style.keys, 1, style.taps)) for name in "qkv"]
    rates, biases = n.vector(f"{_PATH}.A_log", style.heads), n.vector(f"{_PATH}.dt_bias", style.keys)
    return (
        Product("h", tuple(parts)),
        *delta_rule(n, style, kernels, f"{_PATH}.o_norm", ChannelDecay("a", "a", rates, biases, style.is_log, bound)),
        Product("o", (n.part("a", f"{_PATH}.dense", s.hidden, style.values, False),)),
    )
