"""Recipes of families whose experts sigmoids choose, with a correction of ranks, beside attention of keys and values:
solar_open, hy_v3, exaone_moe, afmoe, mimo_v2_flash."""

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
    sandwich,
    sequential,
    sliding,
    windows,
)
from manyhands.program.ends import EndsStyle, assemble
from manyhands.program.families.experts import listed_sparse, top_k
from manyhands.program.families.shared import ExpertBlocks, grouped_route, with_blocks
from manyhands.program.families.wrapped import exaone_styles
from manyhands.program.fields import MOST_EXPERTS, Fields
from manyhands.program.ops import Add, ExpertRouting, Program, Term
from manyhands.program.rope import RopeReader

_AF_NORMS: Final = ("input_layernorm", "post_attention_layernorm", "pre_mlp_layernorm", "post_mlp_layernorm")
_FLASH_BASES: Final = {"full_attention": 5000000.0, "sliding_attention": 10000.0}
_FLASH_FRACTION: Final = 0.334  # of a head of mimo_v2_flash that turns


def solar_open(f: Fields) -> Program:
    """llama's attention; experts in every layer."""
    f.assume(n_routed_experts=128, moe_intermediate_size=1280, n_group=1, topk_group=1, routed_scaling_factor=1.0)
    f.assume(intermediate_size=1)  # of dense layers, which there are none of
    f.only("first_k_dense_replace", 0)
    f.only("use_qk_norm", False)
    s, norm = Sizes.read(f, head=128), NormStyle("rms", f.number("rms_norm_eps", 1e-5))
    style = AttentionStyle(head_scale(s.head), bias=f.flag("attention_bias"))
    blocks = ExpertBlocks.read(f, grouped_route(f), [True] * s.layers)
    return with_blocks(f, s, norm, RopeReader(f, theta=1000000.0), [style] * s.layers, blocks, partial=True)


def hy_v3(f: Fields) -> Program:
    """Norms of heads; sigmoids in one group; a list says which layers are dense."""
    s, norm, bias = Sizes.read(f, head=128), NormStyle("rms", f.number("rms_norm_eps", 1e-5)), f.flag("attention_bias")
    style = AttentionStyle(head_scale(s.head), bias=bias, out_bias=bias, head_norm=norm)
    return with_blocks(f, s, norm, RopeReader(f, theta=11158840.0), [style] * s.layers, _hy_blocks(f, s.layers))


def _hy_blocks(f: Fields, layers: int) -> ExpertBlocks:
    f.assume(moe_intermediate_size=1536)
    count = f.count("num_local_experts" if f.has("num_local_experts") else "num_experts", 192, high=MOST_EXPERTS)
    f.only("num_experts", count)
    scale = f.number("router_scaling_factor", 2.826)
    route = ExpertRouting("r", "routes", count, top_k(f, count, 8), "sigmoid", normalise=True, scale=scale)
    blocks = replace(
        ExpertBlocks.read(f, route, listed_sparse(f, layers, 1), "num_shared_experts"),
        bias=f.flag("mlp_bias"),
        gate="mlp.router.gate",
        correction="mlp.expert_bias",
        beside="mlp.shared_mlp",
    )
    _hy_as_trained(f, blocks)
    return blocks


def _hy_as_trained(f: Fields, blocks: ExpertBlocks) -> None:
    """Fields that transformers does not read: each must say what it computes. (Of where sums are rounded nothing is read.)"""
    f.only("expert_hidden_dim", blocks.inner)
    f.only("first_k_dense_replace", [*blocks.sparse, True].index(True))
    for name in ("moe_router_enable_expert_bias", "moe_router_use_sigmoid", "qk_norm", "route_norm"):
        f.only(name, True)
    f.ignore("enable_attention_fp32_softmax", "enable_lm_head_fp32", "enable_moe_fp32_combine", "use_grouped_mm")


def exaone_moe(f: Fields) -> Program:
    """exaone4's attention, with norms before; deepseek_v3's experts."""
    f.assume(num_experts=64, moe_intermediate_size=1024, n_group=1, topk_group=1)
    s, norm = Sizes.read(f), NormStyle("rms", f.number("rms_norm_eps", 1e-5))
    sparse = listed_sparse(f, s.layers, f.count("first_k_dense_replace", 1, low=0))
    f.only("is_moe_layer", sparse)
    blocks = replace(
        ExpertBlocks.read(f, grouped_route(f, "num_experts"), sparse, "num_shared_experts"),
        correction="mlp.e_score_correction_bias",
    )
    return with_blocks(f, s, norm, RopeReader(f), exaone_styles(f, s, norm), blocks)


def afmoe(f: Fields) -> Program:
    """Norms before and behind; norms and gates of heads; layers without a window have no positions either."""
    s, norm, bias = (
        Sizes.read(f, kv=False, head=128),
        NormStyle("rms", f.number("rms_norm_eps", 1e-5)),
        f.flag("attention_bias"),
    )
    found, blocks, rope = _af_windows(f, s.layers), _af_blocks(f, s), RopeReader(f)
    base = AttentionStyle(head_scale(s.head), bias=bias, out_bias=bias, head_norm=norm, gate_name="self_attn.gate_proj")

    def layer(n: TensorNames, i: int) -> Ops:
        style = replace(base, window=found[i], rope=None if found[i] is None else 0)
        block = blocks.branch(n, s, norm, i)
        joined = (Add((Term("s"),), "m"),) if "s" in block.terms else ()
        return sandwich(n, s, norm, _AF_NORMS, attention(n, s, style, "h", "a"), (*block.body, *joined))

    ends = EndsStyle(embed_scale=float(s.hidden) ** 0.5 if f.flag("mup_enabled") else 1.0)
    return assemble(f, s, norm, rope, [rope.plain(s.head)], ends, layer)


def _af_windows(f: Fields, layers: int) -> list[int | None]:
    every = f.count("global_attn_every_n_layers", 4)
    full = range(every - 1, layers, every)
    return windows(f, layers, sliding(layers, full), f.optional_count("sliding_window", 1024))


def _af_blocks(f: Fields, s: Sizes) -> ExpertBlocks:
    """Sigmoids in one group; what published configs say besides must be what is computed."""
    f.assume(moe_intermediate_size=1408, num_shared_experts=2)
    dense, scale = f.count("num_dense_layers", 1, low=0), f.number("route_scale", 1.0)
    count = f.count("num_experts", 64, high=MOST_EXPERTS)
    route = ExpertRouting("r", "routes", count, top_k(f, count, 6), "sigmoid", normalise=True, scale=scale)
    for name in ("n_group", "num_expert_groups", "num_limited_groups", "topk_group"):
        f.only(name, 1)
    f.only("route_norm", True)
    f.only("score_func", "sigmoid")
    f.ignore("load_balance_coeff", "use_grouped_mm")
    return replace(
        ExpertBlocks.read(f, route, [i >= dense for i in range(s.layers)], "num_shared_experts"),
        gate="mlp.router.gate",
        correction="mlp.expert_bias",
    )


def mimo_v2_flash(f: Fields) -> Program:
    """Values narrower than keys, and scaled; layers with a window have sinks, twice the key heads and a table of their own."""
    f.assume(moe_intermediate_size=2048, n_group=1, topk_group=1, routed_scaling_factor=1.0)
    f.assume(rope_parameters={kind: {"rope_theta": base} for kind, base in _FLASH_BASES.items()})
    s, norm = Sizes.read(f, head=192), NormStyle("rms", f.number("rms_norm_eps", 1e-5))
    value, bias = f.count("v_head_dim", 128, high=1 << 14), f.flag("attention_bias")
    found, blocks = _flash_windows(f, s.layers), _flash_blocks(f, s)
    _flash_as_trained(f, s, value, norm)
    base = AttentionStyle(
        head_scale(s.head),
        bias=bias,
        fused="self_attn.qkv_proj" if f.stored("qkv_by_part") else None,
        value_width=value,
        value_scale=f.optional("attention_value_scale", 0.707) or 1.0,
    )
    wide = replace(s, kv_heads=2 * s.kv_heads)
    if s.heads % wide.kv_heads:
        raise f.refuse("num_key_value_heads", f"half a divisor of the {s.heads} attention heads is needed")
    rope = RopeReader(f, fraction=_FLASH_FRACTION)
    ropes = [rope.by_type(kind, s.head, theta=base, scaled=True, partial=True) for kind, base in _FLASH_BASES.items()]
    _check_scaled(f)

    def layer(n: TensorNames, i: int) -> Ops:
        sinks, window = n.vector("self_attn.attention_sink_bias", s.heads), found[i]
        style = base if window is None else replace(base, rope=1, window=window, sinks=sinks)
        body = attention(n, s if window is None else wide, style, "h", "a")
        before = norm.op(n, "input_layernorm", s.hidden, "x", "h")
        return sequential(Branch(body, "a", before), blocks.branch(n, s, norm, i))

    return assemble(f, s, norm, rope, ropes, EndsStyle(), layer)


def _check_scaled(f: Fields) -> None:
    """Raises ModelError for a scaled table that does not say which part of a head turns: in transformers all of it does then,
    not the published part as without a scaling."""
    for kind in _FLASH_BASES:
        table = f.raw("rope_parameters").get(kind) or {}
        is_scaled = table.get("rope_type", table.get("type", "default")) != "default"
        if is_scaled and not ("partial_rotary_factor" in table or f.has("partial_rotary_factor")):
            raise f.refuse("rope_parameters", f"partial_rotary_factor is needed where {kind} is scaled")


def _flash_windows(f: Fields, layers: int) -> list[int | None]:
    """sliding_window_size counts the positions before a row's own, and goes before sliding_window."""
    window = f.count("sliding_window", 129)
    before = f.optional_count("sliding_window_size")
    window = window if before is None else before + 1
    f.only("attention_chunk_size", window - 1)
    full = [i for i in range(layers) if i == 0 or not (i + 1) % 6]
    if (pattern := _switches(f, "hybrid_layer_pattern", layers)) is not None:
        full = [i for i in range(layers) if not pattern[i]]
    return windows(f, layers, sliding(layers, full), window)


def _flash_blocks(f: Fields, s: Sizes) -> ExpertBlocks:
    """Experts with none beside them."""
    pattern = _switches(f, "moe_layer_freq", s.layers)
    default = (
        ["dense", *["sparse"] * (s.layers - 1)] if pattern is None else ["sparse" if p else "dense" for p in pattern]
    )
    kinds = f.per_layer("mlp_layer_types", s.layers, default, ("dense", "sparse"))
    f.only("n_shared_experts", None)
    route, inner = grouped_route(f), f.count("moe_intermediate_size", high=1 << 20)
    return ExpertBlocks(f.activation(), route, inner, 0, [kind == "sparse" for kind in kinds])


def _switches(f: Fields, name: str, layers: int) -> Sequence[int] | None:
    """A list of 0 or 1 for each layer, if the field is there."""
    found = f.whole_numbers(name)
    if found and (len(found) != layers or not set(found) <= {0, 1}):
        raise f.refuse(name, f"0 or 1 for each of the {layers} layers is needed")
    return found or None


def _flash_as_trained(f: Fields, s: Sizes, value: int, norm: NormStyle) -> None:
    """Fields of the published form that transformers does not read: each must say what it computes."""
    f.only("add_full_attention_sink_bias", False)
    f.only("add_swa_attention_sink_bias", True)
    f.only("layernorm_epsilon", norm.eps)
    f.only("partial_rotary_factor", _FLASH_FRACTION)
    f.only("rope_scaling", None)
    f.only("rope_theta", _FLASH_BASES["full_attention"])
    f.only("swa_head_dim", s.head)
    f.only("swa_num_attention_heads", s.heads)
    f.only("swa_num_key_value_heads", 2 * s.kv_heads)
    f.only("swa_rope_theta", _FLASH_BASES["sliding_attention"])
    f.only("swa_v_head_dim", value)
