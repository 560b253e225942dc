"""The recipe of step3p5: gated attention with heads, windows and tables by type of layer; experts whose activated gates may be
limited."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

from manyhands.program.blocks import (
    AttentionStyle,
    Branch,
    NormStyle,
    Ops,
    Sizes,
    TensorNames,
    attention,
    sequential,
    windows,
)
from manyhands.program.ends import EndsStyle, assemble
from manyhands.program.families.experts import listed_sparse, top_k
from manyhands.program.families.shared import ExpertBlocks, limited_blocks
from manyhands.program.fields import MOST_EXPERTS, Fields
from manyhands.program.ops import ExpertRouting, Multiply, Part, Product, Program
from manyhands.program.rope import RopeReader

_FULL, _SLIDING = "full_attention", "sliding_attention"
_LISTS: Final = (
    "layer_types",
    "mlp_layer_types",
    "partial_rotary_factors",
    "rope_theta",
    "swiglu_limits",
    "swiglu_limits_shared",
    "use_rope_layers",
)
_STACKED: Final = ("gate_proj.weight", "up_proj.weight", "down_proj.weight")


def step3p5(f: Fields) -> Program:
    """Norms of heads; a sigmoid multiplies each head's result; experts that sigmoids choose beside a shared one."""
    s, offset = _read(f), 0.0 if f.stored("norms_plus_one") else 1.0
    norm = NormStyle("rms", f.number("rms_norm_eps", 1e-5), offset)
    found = windows(f, s.layers, [_FULL] * s.layers, f.optional_count("sliding_window"))
    kinds = [_FULL if window is None else _SLIDING for window in found]
    sizes, blocks, rope = _sizes(f, s, kinds), _blocks(f, s), _with_tables(f, kinds)
    tables = {kind: rope.by_type(kind, s.head, theta=1e4, scaled=False, partial=True) for kind in sorted(set(kinds))}
    bias, scale = f.flag("attention_bias"), 1.0 / math.sqrt(f.number("query_pre_attn_scalar", float(s.head)))
    base = AttentionStyle(scale, bias=bias, out_bias=bias, head_norm=norm)

    def layer(n: TensorNames, i: int) -> Ops:
        style = replace(base, rope=list(tables).index(kinds[i]), window=found[i])
        body = _with_gates(n, sizes[i], attention(n, sizes[i], style, "h", "a"))
        return sequential(
            Branch(body, "a", norm.op(n, "input_layernorm", s.hidden, "x", "h")), blocks[i].branch(n, s, norm, i)
        )

    return assemble(f, s, norm, rope, list(tables.values()), EndsStyle(), layer)


def _read(f: Fields) -> Sizes:
    """The sizes of layers without a window, by the names of published configs, whose lists go on for layers that guess tokens
    ahead."""
    f.rename(num_key_value_heads="num_attention_groups", n_routed_experts="moe_num_experts")
    f.rename(num_experts_per_tok="moe_top_k", share_expert_dim="share_expert_dims")
    f.assume(num_key_value_heads=8)
    s = Sizes.read(f, head=128)
    f.shorten(s.layers + f.count("num_nextn_predict_layers", 0, low=0, high=1024), s.layers, *_LISTS)
    _as_trained(f, s.layers)
    return s


def _sizes(f: Fields, s: Sizes, kinds: Sequence[str]) -> list[Sizes]:
    """The sizes of each layer: those with a window may have a number of query heads of their own."""
    name = "num_sliding_attention_heads"
    heads = f.count(name, _other_heads(f, s), high=4096)
    if heads % s.kv_heads:
        raise f.refuse(name, f"a multiple of the {s.kv_heads} key heads is needed")
    each = {str(i): {"num_attention_heads": heads} for i, kind in enumerate(kinds) if kind == _SLIDING}
    f.only("per_layer_config", each, *([{}] if heads == s.heads else []))
    return [replace(s, heads=heads) if kind == _SLIDING else s for kind in kinds]


def _other_heads(f: Fields, s: Sizes) -> int:
    """The number of query heads that published configs give layers with a window."""
    name, other = "attention_other_setting", f.raw("attention_other_setting", {})
    if not isinstance(other, dict):
        raise f.refuse(name, "an object is needed")
    inner = Fields(other, f"{f.where}: {name}")
    inner.only("attention_type", _SLIDING)
    inner.only("num_attention_groups", s.kv_heads)
    inner.only("head_dim", s.head)
    inner.only("true_head_dim", s.head)
    heads = inner.count("num_attention_heads", s.heads, high=4096)
    inner.finish()
    return heads


def _with_tables(f: Fields, kinds: Sequence[str]) -> RopeReader:
    """A reader of the tables of types, made of lists with a number for each layer where the config has those. Layers with a
    window turn unscaled."""
    thetas, parts = (_of_types(f, name, kinds) for name in ("rope_theta", "partial_rotary_factors"))
    if f.has("rope_parameters"):
        for name in ("rope_theta", "partial_rotary_factors", "rope_scaling"):
            f.only(name, None)  # which transformers does not read then
        given = f.raw("rope_parameters")
        # Without an object for one of the types, transformers drops those of all.
        if not isinstance(given, dict) or not all(isinstance(given.get(kind), dict) for kind in kinds):
            raise f.refuse("rope_parameters", f"an object is needed for {', '.join(sorted(set(kinds)))}")
    rope = RopeReader(f)
    scaling = {_FULL: f.raw("rope_scaling", {})}
    f.assume(rope_parameters={kind: {**_table(kind, thetas, parts), **scaling.get(kind, {})} for kind in kinds})
    return rope


def _table(kind: str, thetas: dict[str, Any], parts: dict[str, Any]) -> dict[str, Any]:
    found = {"rope_type": "default", "rope_theta": thetas.get(kind, 1e4)}
    return found | ({"partial_rotary_factor": parts[kind]} if parts else {})


def _of_types(f: Fields, name: str, kinds: Sequence[str]) -> dict[str, Any]:
    """The number of each type of layers, of a list with one for each layer, or of one number for all."""
    value = f.raw(name, [])
    each = value if isinstance(value, list) else [value] * len(kinds)
    found = dict(zip(kinds, each, strict=False))
    if each and each != [found.get(kind) for kind in kinds]:
        raise f.refuse(name, f"a number for each of the {len(kinds)} layers is needed, the same in all of a type")
    return found


def _with_gates(n: TensorNames, s: Sizes, ops: Ops) -> Ops:
    """Attention, and what multiplies each head's result before the product behind it."""
    *inner, out = ops
    gate = Part("g", n.linear("self_attn.g_proj", s.heads, s.hidden), activation="sigmoid")
    return (Product("h", (gate,)), *inner, Multiply("a", "g", "a"), out)


def _blocks(f: Fields, s: Sizes) -> list[ExpertBlocks]:
    """The blocks of each layer, under the names that published checkpoints have."""
    f.assume(n_routed_experts=288, moe_intermediate_size=1280, share_expert_dim=1280)
    count, scale = f.count("n_routed_experts", high=MOST_EXPERTS), f.number("moe_router_scaling_factor", 1.0)
    f.only("num_local_experts", count)
    f.only("hidden_act", "silu", "swish")  # transformers takes it whatever is said
    route = ExpertRouting("r", "routes", count, top_k(f, count, 8), "sigmoid", normalise=True, scale=scale)
    inner, beside = (f.count(name, high=1 << 20) for name in ("moe_intermediate_size", "share_expert_dim"))
    bias, sparse = f.flag("mlp_bias"), _sparse(f, s.layers)
    blocks = ExpertBlocks("silu", route, inner, 1, sparse, bias=bias, beside_inner=beside)
    blocks = replace(blocks, gate="moe.gate", correction="moe.router_bias", beside="share_expert", experts="moe")
    return limited_blocks(f, replace(blocks, parts=_STACKED, is_stacked=True), "swiglu_limits", "swiglu_limits_shared")


def _sparse(f: Fields, layers: int) -> list[bool]:
    """Which layers have experts, by a list of kinds, or of their numbers."""
    numbers = f.raw("moe_layers_enum")
    if numbers is None:
        return listed_sparse(f, layers, min(3, layers))
    each = numbers.split(",") if isinstance(numbers, str) else numbers
    chosen = {str(one).strip() for one in each} if isinstance(each, list) else {""}
    if not chosen <= {str(i) for i in range(1 << 11)}:  # also of those that guess ahead
        raise f.refuse("moe_layers_enum", "numbers of layers are needed, with commas between them")
    found = ["sparse" if str(i) in chosen else "dense" for i in range(layers)]
    f.only("mlp_layer_types", found)
    return [kind == "sparse" for kind in found]


def _as_trained(f: Fields, layers: int) -> None:
    """Fields of published configs that transformers does not read."""
    for name in ("norm_expert_weight", "use_head_wise_attn_gate", "use_moe", "use_moe_router_bias", "use_qk_norm"):
        f.only(name, True)
    for name in ("fp32_residual_connection", "sink", "use_bidirectional_attention", "use_mfa"):
        f.only(name, False)
    f.only("att_impl_type", "GQA")
    f.only("gating", True, "per-head")
    f.only("moe_every_n_layer", 1)
    f.only("moe_layer_offset", 0)
    f.only("moe_router_activation", "sigmoid")
    f.only("use_rope_layers", [], [True] * layers)
    f.only("yarn_only_types", [_FULL], [])
    f.only("zero_centered", True)
    f.ignore("max_seq_len", "mtp_layer_types", "mtp_mlp_layer_types", "need_fp32_gate", "norm_dtype")
