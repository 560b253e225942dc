"""The recipe of gemma3n_text: Gemma 3n E2B and E4B. Rows are those of layer_inputs.py, with several streams."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Final

from manyhands.program.blocks import AttentionStyle, NormStyle, Ops, Sizes, TensorNames
from manyhands.program.ends import EndsStyle, assemble
from manyhands.program.families.layer_inputs import (
    ENDS,
    RowLayout,
    input_added,
    inputs_made,
    sharing_attention,
    table,
    with_rows,
)
from manyhands.program.fields import WIDEST, Fields
from manyhands.program.ops import (
    Activation,
    Add,
    Copy,
    Gate,
    Gating,
    Mix,
    Multiply,
    Op,
    Product,
    Program,
    Rescale,
    SoftCap,
    Sparsify,
    Term,
)
from manyhands.program.rope import RopeReader, exp

_FULL, _SLIDING = "full_attention", "sliding_attention"
_KINDS: Final = (_FULL, _SLIDING)
_LEAST: Final = 1e-5  # mean square of a stream before it is scaled
_RARE: Final = 1e-4  # quantiles nearer to 0 and 1 are refused: transformers has few of their bits


@dataclass(frozen=True, slots=True)
class _Style:
    """What all layers have in common."""

    norm: NormStyle
    activation: Activation
    bias: bool
    rank: int
    active: int  # the stream that layers compute
    scales_active: bool


def gemma3n_text(f: Fields) -> Program:
    """Streams that are predicted before a layer and corrected behind it; a product of low rank beside attention; gates of which
    the largest stay; inputs for each layer; late layers with the keys and values of earlier ones."""
    f.ignore("altup_coef_clip", "altup_lr_multiplier")  # of training
    f.ignore("query_pre_attn_scalar", "hidden_act")  # not read by transformers
    f.only("use_bidirectional_attention", False, None)
    s, rope = _sizes(f), RopeReader(f)
    default = [_FULL if i % 5 == 4 else _SLIDING for i in range(s.layers)]
    kinds, window = f.per_layer("layer_types", s.layers, default, _KINDS), f.count("sliding_window", 512)
    layout, active = _layout(f, s, kinds)
    inner, cuts = _inner_widths(f, s.layers), _cuts(f, s.layers)
    tables = [rope.by_type(_FULL, s.head, theta=1e6, field="rope_theta", scaled=True)]
    tables.append(rope.by_type(_SLIDING, s.head, theta=1e4, field="rope_local_base_freq", scaled=False))
    style = _Style(
        NormStyle("rms", f.number("rms_norm_eps", 1e-6)),
        f.activation("hidden_activation", "gelu_pytorch_tanh"),
        f.flag("attention_bias"),
        f.count("laurel_rank", 64, high=1 << 16),
        active,
        f.flag("altup_correct_scale", True),
    )
    ends = EndsStyle(
        tied=True,
        embed_scale=s.hidden**0.5,
        round_scale=True,
        soft_cap=f.optional("final_logit_softcapping", 30.0),
    )
    each = table(f, layout)
    usual = AttentionStyle(1.0, 1, bias=style.bias, out_bias=style.bias, head_norm=style.norm, value_eps=style.norm.eps)
    attends = {_FULL: replace(usual, rope=0), _SLIDING: replace(usual, window=window)}

    def layer(n: TensorNames, i: int) -> Ops:
        attend = sharing_attention(n, s, attends[kinds[i]], layout, i, kinds[i])
        block = _block(n, replace(s, inner=inner[i]), style.activation, cuts[i])
        first = _beginning(layout, style) if i == 0 else ()
        return (
            *first,
            *_predicted(n, layout, style),
            *_branches(n, s, style, attend, block),
            *_corrected(n, layout, style, i),
        )

    program = assemble(f, s, style.norm, rope, tables, ends, layer)
    return with_rows(program, layout, each, _unified(layout))


def _sizes(f: Fields) -> Sizes:
    """The width of blocks is that of each layer by itself."""
    hidden, heads = f.count("hidden_size", high=WIDEST), f.count("num_attention_heads", high=4096)
    kv_heads = f.count("num_key_value_heads", 2, high=4096)
    if heads % kv_heads:
        raise f.refuse("num_key_value_heads", f"a divisor of the {heads} attention heads is needed")
    if hidden % heads:
        raise f.refuse("num_attention_heads", f"a divisor of hidden_size {hidden} is needed")
    layers, vocab = f.count("num_hidden_layers", high=1024), f.count("vocab_size", high=1 << 22)
    return Sizes(layers, hidden, vocab, heads, kv_heads, f.count("head_dim", 256, high=1 << 14), 0)


def _layout(f: Fields, s: Sizes, kinds: Sequence[str]) -> tuple[RowLayout, int]:
    """That of rows, and the active stream."""
    shared = f.count("num_kv_shared_layers", 15, low=0)
    streams = f.count("altup_num_inputs", 4, high=64)
    active = f.count("altup_active_idx", 0, low=0, high=streams - 1)
    own = f.count("hidden_size_per_layer_input", 256, high=WIDEST)
    kv = dict.fromkeys(kinds, s.kv_heads * s.head)
    return RowLayout.read(f, s, kinds, kv, streams=streams, own=own, shared=shared), active


def _inner_widths(f: Fields, layers: int) -> list[int]:
    given = f.raw("intermediate_size")
    if not isinstance(given, list):
        return [f.count("intermediate_size", high=1 << 20)] * layers
    good = all(isinstance(one, int) and not isinstance(one, bool) and 0 < one <= 1 << 20 for one in given)
    if not good or len(given) != layers:
        raise f.refuse(
            "intermediate_size", f"a whole number from 1 to {1 << 20} for each of the {layers} layers is needed"
        )
    return given


def _cuts(f: Fields, layers: int) -> list[float | None]:
    """How many deviations above their mean gates of a layer are cut off; None where they are not."""
    sparse = 10 if layers > 10 else 0
    given = f.raw("activation_sparsity_pattern", [0.95] * sparse + [0.0] * (layers - sparse))
    good = isinstance(given, list) and len(given) == layers
    if not good or not all(
        isinstance(one, int | float) and not isinstance(one, bool) and (one == 0 or _RARE <= one <= 1 - _RARE)
        for one in given
    ):
        raise f.refuse(
            "activation_sparsity_pattern", f"0, or {_RARE} to {1 - _RARE}, for each of the {layers} layers is needed"
        )
    return [normal_quantile(one) if one else None for one in map(float, given)]


@cache
def normal_quantile(share: float) -> float:
    """Below which that share of normal deviates lies, to 1e-9, the same bits on every machine; 1e-4 <= share <= 0.9999."""
    low, high = -5.0, 5.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _normal_share(middle) < share else (low, middle)
    return low


def _normal_share(x: float) -> float:
    """The share of normal deviates below x, |x| <= 5."""
    term = total = x
    for n in range(3, 201, 2):
        term = term * x * x / n
        total += term
    return 0.5 + total * exp(-x * x / 2) * 0.3989422804014327  # 1 / sqrt(2 pi)


def _beginning(at: RowLayout, style: _Style) -> Ops:
    """Layer 0 begins with these: inputs of layers, and the streams."""
    others = [f"u{i}" for i in range(1, at.streams)]
    parts = [ENDS.part(u, f"altup_projections.{i}", at.hidden, at.hidden, False) for i, u in enumerate(others)]
    ops = [*inputs_made(at, style.norm, parts)]
    for i, u in enumerate(others):
        ops += [Rescale(u, "e", u, _LEAST), Copy(u, "x", 0, at.hidden, at=(i + 1) * at.hidden)]
    return tuple(ops)


def _unified(at: RowLayout) -> Ops:
    """Before the final norm: "u", the mean of all streams."""
    ops, names = list[Op](), [f"u{i}" for i in range(1, at.streams)]
    for i, u in enumerate(names):
        part = ENDS.part(u, f"altup_unembed_projections.{i}", at.hidden, at.hidden, False)
        ops += [Copy("x", "t", (i + 1) * at.hidden, at.hidden), Product("t", (part,))]
    ops += [Copy("x", "u", 0, at.hidden), *(Rescale(u, "u", u, _LEAST) for u in names)]
    return (*ops, Add(tuple(map(Term, names)), target="u"), Multiply("u", 1 / at.streams, "u"))


def _coefficients(n: TensorNames, at: RowLayout, style: _Style, source: str, name: str, count: int) -> Ops:
    """Numbers of a mix of streams, "c", that a stream's row gives."""
    return (
        style.norm.op(n, "altup.router_norm", at.hidden, source, "h"),
        Multiply("h", 1 / at.hidden, "h"),
        Product("h", (n.part("r", "altup.modality_router", at.streams, at.hidden, False),)),
        SoftCap("r", 1.0),
        Product("r", (n.part("c", f"altup.{name}", count, at.streams, False),)),
    )


def _predicted(n: TensorNames, at: RowLayout, style: _Style) -> Ops:
    """All streams as they are guessed to be behind the layer, "p"; of the active one "y" too."""
    hidden, count = at.hidden, at.streams
    return (
        Copy("x", "y", style.active * hidden, hidden),
        *_coefficients(n, at, style, "y", "prediction_coefs", count * count),
        Copy("x", "p", 0, at.all_streams),
        Mix("x", "c", "p", hidden, count, count),
        Copy("p", "y", style.active * hidden, hidden),
    )


def _branches(n: TensorNames, s: Sizes, style: _Style, attend: Ops, block: Ops) -> Ops:
    """Attention, beside a product of low rank, and the block, on the active stream, "y"."""
    norm = style.norm
    return (
        norm.op(n, "input_layernorm", s.hidden, "y", "h"),
        Product("h", (n.part("l", "laurel.linear_left", style.rank, s.hidden, False),)),
        Product("l", (n.part("o", "laurel.linear_right", s.hidden, style.rank, False),)),
        norm.op(n, "laurel.post_laurel_norm", s.hidden, "o", "o"),
        Add((Term("h"),), target="o"),
        *attend,
        norm.op(n, "post_attention_layernorm", s.hidden, "a", "a"),
        Add((Term("a"), Term("o")), target="y"),
        Multiply("y", 0.5**0.5, "y"),
        norm.op(n, "pre_feedforward_layernorm", s.hidden, "y", "h"),
        *block,
        norm.op(n, "post_feedforward_layernorm", s.hidden, "m", "m"),
        Add((Term("m"),), target="y"),
    )


def _block(n: TensorNames, s: Sizes, activation: Activation, cut: float | None) -> Ops:
    """From "h" to "m", a gated block of whose gates those below a cut count as zero."""
    gate, up = (n.part(name, f"mlp.{name}_proj", s.inner, s.hidden, False) for name in ("gate", "up"))
    return (
        Product("h", (gate, up)),
        *(() if cut is None else (Sparsify("gate", cut),)),
        Gate("gate", "up", "up", Gating(activation)),
        Product("up", (n.part("m", "mlp.down_proj", s.hidden, s.inner, False),)),
    )


def _corrected(n: TensorNames, at: RowLayout, style: _Style, i: int) -> Ops:
    """All streams by how far the active one's guess was from "y"; to all but the first the layer's own input is added."""
    hidden, active = at.hidden, style.active * at.hidden
    scale = n.vector("altup.correct_output_scale", hidden)
    return (
        *_coefficients(n, at, style, "y", "correction_coefs", at.streams),
        Copy("p", "s", active, hidden),
        Add((Term("s", -1.0),), target="y"),
        Mix("y", "c", "p", hidden, 1, at.streams, offset=1.0),
        Copy("p", "s", active, hidden),
        *((Multiply("s", scale, "s"),) if style.scales_active else ()),
        *input_added(n, at, style.norm, style.activation, i, "s"),
        *((Mix("f", None, "p", hidden, 1, at.streams - 1, at=hidden),) if at.streams > 1 else ()),
        Copy("p", "x", 0, at.all_streams, at=0),
    )
