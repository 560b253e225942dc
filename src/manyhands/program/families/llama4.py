"""The recipe of llama4_text: chunks of positions in layers that turn, queries scaled by position in those that do not, experts
whose source is scaled."""

from collections.abc import Collection, Sequence
from dataclasses import replace

from manyhands.program.blocks import (
    AttentionStyle,
    Branch,
    NormStyle,
    Ops,
    Sizes,
    TensorNames,
    attention,
    each_expert,
    gated,
    head_scale,
    router,
    sequential,
)
from manyhands.program.ends import EndsStyle, assemble
from manyhands.program.families.experts import GATE_UP_DOWN, stacked_experts, top_k
from manyhands.program.fields import MOST_EXPERTS, Fields
from manyhands.program.ops import (
    Activation,
    Attention,
    ExpertRouting,
    Experts,
    Norm,
    Op,
    Program,
    ScaleByPosition,
)
from manyhands.program.rope import RopeReader

_KINDS = ("full_attention", "chunked_attention")


def llama4_text(f: Fields) -> Program:
    """Pairs turn; heads that turned are normed behind, without weights."""
    s, act, bias = Sizes.read(f, kv=False, head=128), f.activation(), f.flag("attention_bias")
    norm, rope = NormStyle("rms", f.number("rms_norm_eps", 1e-5)), RopeReader(f, theta=500000.0)
    turns, tuned, is_normed = turning(f, s.layers), _tuning(f), f.flag("use_qk_norm", True)
    chunks = _chunks(f, turns)
    sparse, dense = _sparse(f, s.layers), f.count("intermediate_size_mlp", 16384, high=1 << 20)
    route, is_each = _route(f, sparse), f.quantised("compressed-tensors") or f.stored("separate_gate_up")
    f.ignore("for_llm_compressor")

    def heads(n: TensorNames, i: int) -> Ops:
        style = AttentionStyle(
            head_scale(s.head), 0 if turns[i] else None, pairs=True, bias=bias, out_bias=bias, window=chunks[i]
        )
        before: list[Op] = []
        if is_normed and turns[i]:
            each = zip("qk", (s.heads, s.kv_heads), strict=True)
            before = [Norm(register, register, "rms", norm.eps, (), groups=groups) for register, groups in each]
        elif tuned is not None and not turns[i]:
            before = [tuned]
        return _chunked(attention(n, s, style, "h", "a"), before)

    def block(n: TensorNames, i: int) -> Branch:
        before = norm.op(n, "post_attention_layernorm", s.hidden, "x", "h")
        if i not in sparse:
            return Branch(gated(n, "feed_forward", s.hidden, dense, act, "h", "m"), "m", before)
        experts = _experts(n, s, route.experts, act, is_each)
        beside = gated(n, "feed_forward.shared_expert", s.hidden, s.inner, act, "h", "s")
        body = (*router(n, "feed_forward.router", s, route), experts, *beside)
        return Branch(body, "m", before, terms=("s", "m"))

    def layer(n: TensorNames, i: int) -> Ops:
        before = norm.op(n, "input_layernorm", s.hidden, "x", "h")
        return sequential(Branch(heads(n, i), "a", before), block(n, i))

    return assemble(f, s, norm, rope, [rope.plain(s.head)], EndsStyle(), layer)


def turning(f: Fields, layers: int) -> list[bool]:
    """Which layers have rotary positions."""
    every, given = f.count("no_rope_layer_interval", 4), f.whole_numbers("no_rope_layers")
    if given and len(given) < layers:
        raise f.refuse("no_rope_layers", f"a switch for each of the {layers} layers is needed")
    return [bool(switch) for switch in given[:layers]] or [(i + 1) % every != 0 for i in range(layers)]


def _tuning(f: Fields) -> ScaleByPosition | None:
    """What multiplies queries in layers without rotary positions. The first published configs have 4 for true."""
    f.only("attn_temperature_tuning", True, False, 4)
    length, scale = f.count("floor_scale", 8192), f.number("attn_scale", 0.1, positive=False)
    if scale < 0.0:
        raise f.refuse("attn_scale", "a number from 0 is needed")
    return ScaleByPosition("q", scale, length, offset=1) if f.raw("attn_temperature_tuning", True) and scale else None


def _chunks(f: Fields, turns: Sequence[bool]) -> list[int | None]:
    """Each layer's chunks, in positions."""
    types = f.per_layer("layer_types", len(turns), [_KINDS[is_on] for is_on in turns], _KINDS)
    size = f.optional_count("attention_chunk_size", 8192)
    if size is None and "chunked_attention" in types:
        raise f.refuse("layer_types", "chunked_attention needs attention_chunk_size")
    return [size if kind == "chunked_attention" else None for kind in types]


def _sparse(f: Fields, layers: int) -> Collection[int]:
    """Which layers have experts."""
    if f.has("moe_layers"):
        f.ignore("interleave_moe_layer_step")
        return f.whole_numbers("moe_layers")
    step = f.count("interleave_moe_layer_step", 1)
    return range(step - 1, layers, step)


def _route(f: Fields, sparse: Collection[int]) -> ExpertRouting:
    """Sigmoids, which are not normalised; a model without experts may say that it has none."""
    low = 1 if sparse else 0
    count = f.count("num_local_experts", 16, low=low, high=MOST_EXPERTS)
    chosen = top_k(f, count, 1) if count else f.count("num_experts_per_tok", 1, low=0)
    return ExpertRouting("r", "routes", count, chosen, "sigmoid", normalise=False)


def _experts(n: TensorNames, s: Sizes, count: int, act: Activation, is_each: bool) -> Experts:
    """Stacked and transposed, gates beside ups; compressed-tensors and GGUF store each by itself."""
    path = "feed_forward.experts"
    if is_each:
        found = each_expert(n, path, GATE_UP_DOWN, s, s.inner, count, act)
    else:
        found = stacked_experts(n, path, s, s.inner, count, act, transposed=True)
    return replace(found, scales_source=True)


def _chunked(ops: Ops, before: Sequence[Op]) -> Ops:
    """Attention with `before` right before it; a window is a chunk."""
    out: list[Op] = []
    for op in ops:
        out += [*before, replace(op, is_chunked=op.window is not None)] if isinstance(op, Attention) else [op]
    return tuple(out)
