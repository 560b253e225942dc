"""The recipe of laguna: attention gated by softplus, with heads, windows and tables by layer; experts that sigmoids choose."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from manyhands.program.blocks import (
    AttentionStyle,
    Branch,
    NormStyle,
    Ops,
    Sizes,
    TensorNames,
    attention,
    head_scale,
    sequential,
    windows,
)
from manyhands.program.ends import EndsStyle, assemble
from manyhands.program.families.experts import listed_sparse, top_k
from manyhands.program.families.shared import ExpertBlocks
from manyhands.program.fields import MOST_EXPERTS, Fields
from manyhands.program.ops import ExpertRouting, Multiply, Product, Program, Rope, Softplus
from manyhands.program.rope import RopeReader

_FULL, _SLIDING = "full_attention", "sliding_attention"
_ROPES: Final = {
    _FULL: {"rope_type": "default", "rope_theta": 500000.0, "partial_rotary_factor": 0.5},
    _SLIDING: {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0},
}


def laguna(f: Fields) -> Program:
    """Norms of heads. Tensors of experts under the names that published checkpoints have."""
    f.assume(rope_parameters=_ROPES, num_key_value_heads=8, moe_intermediate_size=512)
    _table_fields(f)
    s, norm, rope = Sizes.read(f, head=128), NormStyle("rms", f.number("rms_norm_eps", 1e-6)), RopeReader(f)
    found = windows(f, s.layers, [_FULL] * s.layers, f.optional_count("sliding_window", 512))
    kinds = [_FULL if window is None else _SLIDING for window in found]
    tables = {kind: _table(f, rope, kind, s.head) for kind in _ROPES if kind in kinds}
    sizes, bias, by_column = _sizes(f, s), f.flag("attention_bias"), _gates_columns(f, s)
    blocks = _blocks(f, s)
    base = AttentionStyle(head_scale(s.head), bias=bias, out_bias=bias, head_norm=norm)

    def layer(n: TensorNames, i: int) -> Ops:
        style = replace(base, rope=list(tables).index(kinds[i]), window=found[i])
        body = _with_gates(n, sizes[i], by_column, attention(n, sizes[i], style, "h", "a"))
        before = norm.op(n, "input_layernorm", s.hidden, "x", "h")
        return sequential(Branch(body, "a", before), blocks.branch(n, s, norm, i))

    return assemble(f, s, norm, rope, list(tables.values()), EndsStyle(), layer)


def _table_fields(f: Fields) -> None:
    """Those outside of the tables of types, which transformers does not read here, must say what the full type's has."""
    tables = f.raw("rope_parameters")
    full = tables.get(_FULL) if isinstance(tables, dict) else None
    f.only("rope_scaling", None)
    for name, default in (("rope_theta", 500000.0), ("partial_rotary_factor", 1.0)):
        f.only(name, full.get(name, default) if isinstance(full, dict) else default)


def _table(f: Fields, rope: RopeReader, kind: str, width: int) -> Rope:
    """The rotary table of a type of layers. transformers fails without the type's object, or without a base frequency there."""
    table = f.raw("rope_parameters").get(kind)
    if not isinstance(table, dict) or table.get("rope_theta") is None:
        raise f.refuse("rope_parameters", f"an object with a rope_theta is needed for {kind}, a type that layers have")
    return rope.by_type(kind, width, theta=500000.0, scaled=False, partial=True)


def _sizes(f: Fields, s: Sizes) -> list[Sizes]:
    """The sizes of each layer, which may have a number of query heads of its own."""
    name = "num_attention_heads_per_layer"
    heads = f.whole_numbers(name) if f.has(name) else [s.heads] * s.layers
    if len(heads) != s.layers or not all(1 <= n <= 4096 and n % s.kv_heads == 0 for n in heads):
        raise f.refuse(name, f"a multiple of the {s.kv_heads} key heads for each of the {s.layers} layers is needed")
    return [replace(s, heads=int(n)) for n in heads]


def _gates_columns(f: Fields, s: Sizes) -> bool:
    """Whether each column of a head has a gate of its own, else each head has one."""
    gating = f.raw("gating", True)
    if gating is not True and gating not in ("per-head", "per-element"):
        raise f.refuse("gating", "true, 'per-head' or 'per-element' is needed")
    by_column = bool(gating == "per-element")
    f.only("gating_types", ["per-element" if by_column else "per-head"] * s.layers)
    return by_column


def _with_gates(n: TensorNames, s: Sizes, by_column: bool, ops: Ops) -> Ops:
    """Attention whose result is multiplied by the softplus of products, before the product behind it."""
    *inner, out = ops
    gate = n.part("g", "self_attn.g_proj", s.heads * (s.head if by_column else 1), s.hidden, False)
    return (Product("h", (gate,)), Softplus("g", "g"), *inner, Multiply("a", "g", "a"), out)


def _blocks(f: Fields, s: Sizes) -> ExpertBlocks:
    count, scale = f.count("num_experts", 256, high=MOST_EXPERTS), f.number("moe_routed_scaling_factor", 1.0)
    route = ExpertRouting("r", "routes", count, top_k(f, count, 8), "sigmoid", normalise=True, scale=scale)
    sparse = listed_sparse(f, s.layers, 1)
    _as_trained(f, sparse)
    return replace(
        ExpertBlocks.read(f, route, sparse, "num_shared_experts"),
        correction="mlp.experts.e_score_correction_bias",
        beside="mlp.shared_expert",
        beside_inner=f.count("shared_expert_intermediate_size", 512, high=1 << 20),
    )


def _as_trained(f: Fields, sparse: Sequence[bool]) -> None:
    """Fields of what is not computed here, and those of published configs that transformers does not read, which must say what
    it computes."""
    f.only("decoder_sparse_step", 1)
    f.only("mlp_only_layers", [i for i, has_experts in enumerate(sparse) if not has_experts])
    f.only("moe_apply_router_weight_on_input", False)
    f.only("moe_router_logit_softcapping", 0.0)
    f.only("moe_router_use_sigmoid", True)
    f.only("norm_topk_prob", True)
    f.only("num_shared_experts", 1)
    f.only("qkv_bias", f.flag("attention_bias"))
    f.only("swa_attention_sink_enabled", False)
