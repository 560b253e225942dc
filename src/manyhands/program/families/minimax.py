"""The recipe of minimax, MiniMax-Text-01, and of MiniMax-M1: lightning attention (linear attention whose decays follow from the
config) in most layers, softmax attention in the others, experts; norms of the residual stream itself."""

from dataclasses import replace
from typing import Final

from manyhands.program.blocks import (
    AttentionStyle,
    NormStyle,
    Ops,
    Sizes,
    TensorNames,
    attention,
    each_expert,
    head_scale,
    router,
)
from manyhands.program.ends import EndsStyle, assemble
from manyhands.program.families.experts import top_k
from manyhands.program.families.mamba import scaled
from manyhands.program.fields import MOST_EXPERTS, Fields
from manyhands.program.ops import (
    Activation,
    Add,
    Constant,
    ExpertRouting,
    Gate,
    Gating,
    LinearAttention,
    Norm,
    Part,
    Product,
    Program,
    Rows,
    Term,
)
from manyhands.program.rope import RopeReader, exp, log

_LINEAR, _FULL = "linear_attention", "full_attention"
_FACTORS: Final = ("linear_attn", "full_attn", "mlp")
_PUBLISHED: Final = ("linear_attention", "full_attention", "mlp")  # the same in configs of the publisher
_MOST_DECAYS: Final = 1 << 16  # of all heads: 5,120 in MiniMax-M1
_EPS: Final = 1e-6  # of the norm of lightning attention; transformers does not take the config's there


def minimax(f: Fields) -> Program:
    """As transformers has it: whole heads turn, whatever rotary_dim is."""
    f.only("rotary_dim", f.raw("head_dim") or f.count("hidden_size") // f.count("num_attention_heads"))
    return _program(f)


def minimax_text_01(f: Fields) -> Program:
    """By the publisher's fields, with which the first columns of a head turn."""
    for name, published in zip(_FACTORS, _PUBLISHED, strict=True):
        for kind in ("alpha", "beta"):
            f.rename(**{f"{name}_{kind}_factor": f"layernorm_{published}_{kind}"})
    _take_types(f)
    if not f.flag("postnorm"):
        raise f.refuse("postnorm", "only true is supported: what a norm leaves is the residual stream")
    f.only("shared_intermediate_size", 0, [0])
    f.ignore("shared_moe_mode")
    return _program(f)


def _take_types(f: Fields) -> None:
    """`attn_type_list`: a number for each layer, as `layer_types` says it."""
    if not (types := f.whole_numbers("attn_type_list")):
        return
    listed = [_FULL if kind else _LINEAR for kind in types]
    if len(listed) != f.count("num_hidden_layers", high=1024):
        raise f.refuse("attn_type_list", "a number for each of the layers is needed")
    f.only("layer_types", listed)
    f.assume(layer_types=listed)


def minimax_m1(f: Fields) -> Program:
    """minimax_text_01 by another name."""
    return minimax_text_01(f)


def _program(f: Fields) -> Program:
    f.assume(num_key_value_heads=8)
    s, act, norm = Sizes.read(f), f.activation(), NormStyle("rms", f.number("rms_norm_eps", 1e-5))
    kinds = f.per_layer("layer_types", s.layers, [(_FULL, _LINEAR)[i % 2] for i in range(s.layers)], (_FULL, _LINEAR))
    if s.heads * s.layers > _MOST_DECAYS:
        raise f.refuse("num_attention_heads", f"at most {_MOST_DECAYS} heads in all layers are read")
    count = f.count("num_local_experts", 8, high=MOST_EXPERTS)
    f.only("num_experts", count)
    route = ExpertRouting("r", "routes", count, top_k(f, count, 2), "softmax", normalise=True)
    alpha, beta = ({n: f.number(f"{n}_{kind}_factor", 1.0) for n in _FACTORS} for kind in ("alpha", "beta"))
    style = AttentionStyle(head_scale(s.head), window=f.optional_count("sliding_window"))
    turned = f.count("rotary_dim", s.head, low=2, high=s.head)
    rope = RopeReader(f, theta=1000000.0, fraction=turned / s.head)
    table = rope.plain(s.head, partial=turned < s.head)
    f.only("rotary_dim", table.width)
    f.only("postnorm", True)
    f.ignore("block_size")  # positions that transformers sums at once
    out = "self_attn.o_proj" if f.stored("linear_as_output") else "self_attn.out_proj"

    def layer(n: TensorNames, i: int) -> Ops:
        is_linear = kinds[i] == _LINEAR
        body = _lightning(n, s, act, i, out) if is_linear else attention(n, s, style, "x", "a")
        name, path = _FACTORS[not is_linear], "block_sparse_moe"
        experts = each_expert(n, f"{path}.experts", ("w1", "w3", "w2"), s, s.inner, count, act)
        return (
            norm.op(n, "input_layernorm", s.hidden, "x", "x"),
            *body,
            *scaled("x", alpha[name]),
            Add((Term("a", beta[name]),)),
            norm.op(n, "post_attention_layernorm", s.hidden, "x", "x"),
            *router(n, f"{path}.gate", s, route, source="x"),
            replace(experts, source="x"),
            *scaled("x", alpha["mlp"]),
            Add((Term("m", beta["mlp"]),)),
        )

    return assemble(f, s, norm, rope, [table], EndsStyle(), layer)


def _lightning(n: TensorNames, s: Sizes, act: Activation, i: int, out: str) -> Ops:
    """From "x" to "a": sums that decay at each position, a norm of all heads at once, a gate, the product `out`."""
    width, rows = s.heads * s.head, [Rows(i * s.head, s.head, 3 * s.head, s.heads) for i in range(3)]
    each = zip("qkv", (n.linear("self_attn.qkv_proj", 3 * width, s.hidden, one) for one in rows), strict=True)
    parts = [Part(name, weight, activation=act) for name, weight in each]
    parts.append(n.part("g", "self_attn.output_gate", width, s.hidden, False))
    shape = (s.heads, s.heads, s.head, s.head)
    return (
        Product("x", tuple(parts)),
        Constant("decay", _decays(s, i)),
        Constant("one", (1.0,) * s.heads),
        LinearAttention("q", "k", "v", "decay", "one", "o", *shape, is_sum=True),
        Norm("o", "o", "rms", _EPS, (n.vector("self_attn.norm.weight", width),)),
        Gate("g", "o", "o", Gating("sigmoid")),
        Product("o", (n.part("a", out, s.hidden, width, False),)),
    )


def _decays(s: Sizes, i: int) -> tuple[float, ...]:
    """What a head's state of layer `i` is multiplied by at each position."""
    factor = 1.0 - i / (s.layers - 1 + 1e-5) + 1e-5
    return tuple(exp(-exp(-8.0 * (head + 1) / s.heads * log(2.0)) * factor) for head in range(s.heads))
