"""Recipes of families whose layers without a window have no rotary positions, with experts that sigmoids choose: flint,
kolibri1, beam."""

import math
from dataclasses import replace

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
from manyhands.program.families.experts import listed_sparse, sparse_layers, top_k
from manyhands.program.families.shared import ExpertBlocks, grouped_route
from manyhands.program.fields import MOST_EXPERTS, Fields
from manyhands.program.ops import (
    Add,
    Attention,
    ExpertRouting,
    Gate,
    Gating,
    Multiply,
    Part,
    Product,
    Program,
    Rows,
    ScaleByPosition,
    Score,
    Term,
    Weight,
)
from manyhands.program.rope import RopeReader

_KOLIBRI_NORMS = ("input_layernorm", "post_attn_norm", "post_attention_layernorm", "post_ffn_norm")
_BEAM_NORMS = ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")
_FULL, _SLIDING = "full_attention", "sliding_attention"


def flint(f: Fields) -> Program:
    """Norms of heads, and sinks; experts beside one that every row takes."""
    s, norm, bias = Sizes.read(f, head=128), NormStyle("rms", f.number("rms_norm_eps", 1e-6)), f.flag("attention_bias")
    full = [i for i in range(s.layers) if i < 2 or i % 4 == 1 or i == s.layers - 1]
    found = windows(f, s.layers, sliding(s.layers, full), f.count("sliding_window", 513))
    count = f.count("num_experts", 256, high=MOST_EXPERTS)
    f.only("num_local_experts", count)
    blocks = replace(
        _blocks(f, "sigmoid", sparse_layers(f, s.layers, [0, 1]), count, normalise=True, shared=1024),
        correction=None,
        beside="mlp.shared_expert",
    )
    base, rope = AttentionStyle(head_scale(s.head), bias=bias, out_bias=bias, head_norm=norm), RopeReader(f)

    def layer(n: TensorNames, i: int) -> Ops:
        sinks, turns = n.vector("self_attn.softmax_offset", s.heads), None if found[i] is None else 0
        body = attention(n, s, replace(base, rope=turns, window=found[i], sinks=sinks), "h", "a")
        before = norm.op(n, "input_layernorm", s.hidden, "x", "h")
        return sequential(Branch(body, "a", before), blocks.branch(n, s, norm, i))

    return assemble(f, s, norm, rope, [rope.plain(s.head)], EndsStyle(), layer)


def kolibri1(f: Fields) -> Program:
    """Norms of heads, before and behind; in every layer experts, ranked by logits and a correction, beside a shared one.
    Tensors under the names that published checkpoints have."""
    f.assume(intermediate_size=1)  # of dense layers, which there are none of
    s, norm = Sizes.read(f, head=128), NormStyle("rms", f.number("rms_norm_eps", 1e-6))
    window = f.optional_count("sliding_window", 513)
    if window is None:  # transformers reads one without, and fails when it runs
        raise f.refuse("sliding_window", "a whole number from 1 is needed")
    found = windows(f, s.layers, sliding(s.layers, range(4, s.layers, 5)), window)
    count = f.count("num_local_experts" if f.has("num_local_experts") else "num_experts", 384, high=MOST_EXPERTS)
    f.only("num_experts", count)
    blocks = replace(
        _blocks(f, "logit", [True] * s.layers, count, normalise=False, shared=512), correction="moe.router.expert_bias"
    )
    base, rope = AttentionStyle(head_scale(s.head), head_norm=norm), RopeReader(f)

    def layer(n: TensorNames, i: int) -> Ops:
        style = replace(base, rope=None if found[i] is None else 0, window=found[i])
        joined = (*blocks.branch(n, s, norm, i).body, Add((Term("s"),), "m"))
        return sandwich(n, s, norm, _KOLIBRI_NORMS, attention(n, s, style, "h", "a"), joined)

    return assemble(f, s, norm, rope, [rope.plain(s.head)], EndsStyle(), layer)


def _blocks(f: Fields, score: Score, sparse: list[bool], count: int, *, normalise: bool, shared: int) -> ExpertBlocks:
    """Experts of flint and kolibri1; `normalise` and `shared`, the columns of the shared one, where the config is silent."""
    route = ExpertRouting("r", "routes", count, top_k(f, count, 6), score, f.flag("norm_topk_prob", normalise))
    inner, beside = (
        f.count(name, default, high=1 << 20)
        for name, default in (("moe_intermediate_size", 512), ("shared_expert_intermediate_size", shared))
    )
    return ExpertBlocks(f.activation(), route, inner, 1, sparse, beside_inner=beside)


def beam(f: Fields) -> Program:
    """Norms of heads, before and behind; a gate of attention's result, with a bias for each head; both terms of each sum into
    the residual stream are scaled by how many there were before."""
    f.assume(rope_parameters={_SLIDING: {"rope_type": "default"}, _FULL: None})
    s, norm, bias = Sizes.read(f, head=128), NormStyle("rms", f.number("rms_norm_eps", 1e-6)), f.flag("attention_bias")
    full = [i for i in range(s.layers) if i % 6 == 5 or i == s.layers - 1]
    found = windows(f, s.layers, sliding(s.layers, full), f.optional_count("sliding_window", 512))
    kinds = [_FULL if window is None else _SLIDING for window in found]
    inner = f.count("moe_intermediate_size", 2560, high=1 << 20)
    sparse = listed_sparse(f, s.layers, min(3, s.layers))
    blocks = ExpertBlocks(f.activation(), grouped_route(f, "num_experts"), inner, 0, sparse)
    rope = RopeReader(f)
    tables = rope.by_types(set(kinds), s.head, theta=10000.0)
    base = AttentionStyle(head_scale(s.head), bias=bias, out_bias=bias, head_norm=norm)

    def layer(n: TensorNames, i: int) -> Ops:
        turns = list(tables).index(kinds[i]) if kinds[i] in tables else None
        heads = attention(n, s, replace(base, rope=turns, window=found[i]), "h", "a")
        pairs = zip((_gated(n, s, heads, turns is None), blocks.branch(n, s, norm, i).body), "am", strict=True)
        ops: list[Ops] = []
        for number, (body, target) in enumerate(pairs, 2 * i + 2):
            before, behind = _BEAM_NORMS[:2] if target == "a" else _BEAM_NORMS[2:]
            ops += [(norm.op(n, before, s.hidden, "x", "h"),), body, (norm.op(n, behind, s.hidden, target, target),)]
            ops += [(Multiply("x", math.sqrt((number - 1) / number), "x"), Add((Term(target, 1 / math.sqrt(number)),)))]
        return tuple(op for part in ops for op in part)

    ends = EndsStyle(soft_cap=f.optional("final_logit_softcapping", 30.0))
    return assemble(f, s, norm, rope, list(tables.values()), ends, layer)


def _gated(n: TensorNames, s: Sizes, ops: Ops, grows: bool) -> Ops:
    """Attention whose result is gated before the product behind it; where queries grow, they do by their positions."""
    *inner, out = ops
    gate = n.linear("self_attn.gate_proj", s.heads * s.head, s.hidden)
    bias = Weight(f"{n.path}self_attn.gate_bias", (s.heads,), Rows(0, s.heads, copies=s.head))
    at = next(i for i, op in enumerate(inner) if isinstance(op, Attention))
    growth = (ScaleByPosition("q", 0.1, 2048, offset=1, growth="power"),) if grows else ()
    behind = Gate("g", "a", "a", Gating("sigmoid"))
    return (Product("h", (Part("g", gate, bias),)), *inner[:at], *growth, *inner[at:], behind, out)
