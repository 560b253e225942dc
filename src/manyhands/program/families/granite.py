"""Recipes of granite's kin: granitemoeshared, granite_swa, granitemoe_swa, hyperclovax."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from manyhands.program.blocks import (
    AttentionStyle,
    Branch,
    NormStyle,
    Ops,
    Sizes,
    TensorNames,
    attention,
    before_each,
    gated,
    head_scale,
    router,
    sandwich,
    sequential,
    sliding,
    windows,
)
from manyhands.program.ends import EndsStyle, assemble
from manyhands.program.families.experts import granite_experts, stacked_experts, top_k
from manyhands.program.families.llama import granite_ends
from manyhands.program.fields import LARGEST, MOST_EXPERTS, Fields
from manyhands.program.ops import Activation, ExpertRouting, Program, Rope
from manyhands.program.rope import RopeReader

Block = Callable[[TensorNames], Branch]  # of a layer, without the norm before it
Routed = Callable[[TensorNames, Sizes, ExpertRouting, Activation], Ops]  # from "h" to "m"


def granitemoeshared(f: Fields) -> Program:
    """granitemoe with an expert that every row takes, if it has any columns."""
    s, rope = Sizes.read(f, kv=False), RopeReader(f)
    found = _Layers(f, s, f.number("rms_norm_eps", 1e-6), [rope.plain(s.head)], [_style(f)] * s.layers)
    return found.program(rope, granite_ends(f), _with_experts(f, s, _granitemoe))


def granite_swa(f: Fields) -> Program:
    """granite with sinks; windows in three of four layers; tables by layer, or no positions."""
    s, rope, eps = Sizes.read(f, kv=False), RopeReader(f), f.number("rms_norm_eps", 1e-5)
    act, bias = f.activation(), f.flag("mlp_bias")
    found = _Layers(f, s, eps, *_by_layer(f, s, rope), has_sinks=True)

    def block(n: TensorNames) -> Branch:
        return Branch(gated(n, "mlp", s.hidden, s.inner, act, "h", "m", bias=bias), "m")

    return found.program(rope, replace(granite_ends(f), tied=True), block)


def granitemoe_swa(f: Fields) -> Program:
    """granitemoeshared with granite_swa's attention, and other names of its experts."""
    s, rope = Sizes.read(f, kv=False), RopeReader(f)
    found = _Layers(f, s, f.number("rms_norm_eps", 1e-6), *_by_layer(f, s, rope), has_sinks=True)
    return found.program(rope, granite_ends(f), _with_experts(f, s, _renamed))


def _granitemoe(n: TensorNames, s: Sizes, route: ExpertRouting, act: Activation) -> Ops:
    return granite_experts(n, s, route, act, is_separate=False)


def _renamed(n: TensorNames, s: Sizes, route: ExpertRouting, act: Activation) -> Ops:
    path = "block_sparse_moe"
    return *router(n, f"{path}.router", s, route), stacked_experts(n, f"{path}.experts", s, s.inner, route.experts, act)


def _with_experts(f: Fields, s: Sizes, routed: Routed) -> Block:
    """Experts, perhaps beside a block that every row takes."""
    act, count = f.activation(), f.count("num_local_experts", 8, high=MOST_EXPERTS)
    route = ExpertRouting("r", "routes", count, top_k(f, count, 2), "softmax", normalise=True)
    shared = f.count("shared_intermediate_size", 0, low=0, high=1 << 20)

    def block(n: TensorNames) -> Branch:
        body = routed(n, s, route, act)
        if not shared:
            return Branch(body, "m")
        beside = gated(
            n, "shared_mlp", s.hidden, shared, act, "h", "s", fused="input_linear", down_name="output_linear"
        )
        return Branch((*body, *beside), "m", terms=("m", "s"))

    return block


@dataclass(frozen=True, slots=True)
class _Layers:
    """Layers of granite with tables and one style of attention each, perhaps with sinks."""

    fields: Fields
    sizes: Sizes
    eps: float
    ropes: list[Rope]
    styles: list[AttentionStyle]
    has_sinks: bool = False

    def program(self, rope: RopeReader, ends: EndsStyle, block: Block) -> Program:
        """The Program of the model that has `block` behind attention."""
        s, norm, scale = self.sizes, NormStyle("rms", self.eps), self.fields.number("residual_multiplier", 1.0)

        def layer(n: TensorNames, i: int) -> Ops:
            sinks = n.vector("self_attn.sinks", s.heads) if self.has_sinks else None
            body = attention(n, s, replace(self.styles[i], sinks=sinks), "h", "a")
            second = replace(block(n), before=norm.op(n, "post_attention_layernorm", s.hidden, "x", "h"))
            return sequential(Branch(body, "a", norm.op(n, "input_layernorm", s.hidden, "x", "h")), second, scale)

        return assemble(self.fields, s, norm, rope, self.ropes, ends, layer)


def _style(f: Fields) -> AttentionStyle:
    bias, pairs = f.flag("attention_bias"), f.stored("interleaved_rope")
    return AttentionStyle(f.number("attention_multiplier", 1.0), pairs=pairs, bias=bias, out_bias=bias)


def _by_layer(f: Fields, s: Sizes, rope: RopeReader) -> tuple[list[Rope], list[AttentionStyle]]:
    """Tables, one for each base frequency, and styles: a layer whose base is 0 has no positions."""
    found = windows(f, s.layers, sliding(s.layers, range(0, s.layers, 4)), f.optional_count("sliding_window", 128))
    bases, base = f.raw("layer_rope_theta"), _style(f)
    plain = rope.plain(s.head)
    if bases is None:
        return [plain], [replace(base, window=window) for window in found]
    good = isinstance(bases, list) and len(bases) == s.layers
    if not good or not all(type(one) in (int, float) and (one == 0 or 1 < one <= LARGEST) for one in bases):
        raise f.refuse("layer_rope_theta", f"0 or a number above 1 for each of the {s.layers} layers is needed")
    used = sorted({one for one in bases if one})
    tables = [rope.with_base(s.head, float(one)) for one in used] or [plain]
    rows = [used.index(one) if one else None for one in bases]
    return tables, [replace(base, rope=row, window=window) for row, window in zip(rows, found, strict=True)]


def hyperclovax(f: Fields) -> Program:
    """granite whose branches may be normed before they join, and whose logits are multiplied."""
    s, act, bias = Sizes.read(f, kv=False), f.activation(), f.flag("attention_bias")
    norm, is_normed = NormStyle("rms", f.number("rms_norm_eps", 1e-6)), f.flag("use_post_norm", True)
    scale, block_bias, rope = f.number("residual_multiplier", 1.0), f.flag("mlp_bias"), RopeReader(f)
    style = AttentionStyle(f.optional("attention_multiplier") or head_scale(s.head), bias=bias, out_bias=bias)

    def layer(n: TensorNames, i: int) -> Ops:
        first = attention(n, s, style, "h", "a")
        second = gated(n, "mlp", s.hidden, s.inner, act, "h", "m", bias=block_bias)
        order = ("input_layernorm", "post_norm1", "post_attention_layernorm", "post_norm2")
        if is_normed:
            return sandwich(n, s, norm, order, first, second, scale)
        return before_each(n, s, norm, first, second, scale)

    ends = EndsStyle(embed_scale=f.number("embedding_multiplier", 1.0), scale=f.number("logits_scaling", 1.0))
    return assemble(f, s, norm, rope, [rope.plain(s.head)], ends, layer)
