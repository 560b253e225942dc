"""Recipes of families most of whose layers have linear attention, or a short convolution, in place of attention: qwen3_next,
qwen3_5_text, qwen3_5_moe_text, lfm2, lfm2_moe."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

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
from manyhands.program.families.experts import beside_gated, sparse_layers, top_k
from manyhands.program.fields import MOST_EXPERTS, Fields
from manyhands.program.ops import (
    Activation,
    Convolution,
    Decay,
    ExpertRouting,
    Gate,
    Gating,
    LinearAttention,
    Multiply,
    Norm,
    Op,
    Part,
    Product,
    Program,
    Rows,
    Weight,
)
from manyhands.program.rope import RopeReader

UNIT_EPS: Final = 1e-6  # of the norms that make queries and keys one long
KINDS: Final = ("linear_attention", "full_attention")
W1_W3_W2: Final = ("w1", "w3", "w2")


@dataclass(frozen=True, slots=True)
class LinearStyle:
    """A layer's gated delta rule. In qwen3_next (`is_grouped`) two tensors hold what enters, by key head.

    GGUF files may have the first of the two apart, in two (`is_apart`); value heads in an order in which head h reads key head
    h % key_heads (`is_tiled`); and rates of decays, or minus them, in place of logarithms (`is_log`).
    """

    key_heads: int
    heads: int
    width: int
    value_width: int
    taps: int
    eps: float
    activation: Activation
    is_grouped: bool = False
    is_apart: bool = True
    is_tiled: bool = False
    is_log: bool = True
    gate: Activation = "silu"

    @classmethod
    def read(cls, f: Fields, activation: Activation, eps: float, *, is_grouped: bool) -> "LinearStyle":
        """Raises ModelError for impossible ones."""
        key_heads, heads = (
            f.count("linear_num_key_heads", 16, high=4096),
            f.count("linear_num_value_heads", 32, high=4096),
        )
        if heads % key_heads:
            raise f.refuse("linear_num_value_heads", f"a multiple of the {key_heads} key heads is needed")
        width, value_width = (f.count(f"linear_{kind}_head_dim", 128, high=1 << 14) for kind in ("key", "value"))
        taps, is_log = f.count("linear_conv_kernel_dim", 4, high=32), not f.stored("negative_rates")
        is_apart = not is_grouped or f.stored("separate_qkv_z")
        is_tiled = not is_grouped and f.stored("tiled_heads") and heads > key_heads
        return cls(key_heads, heads, width, value_width, taps, eps, activation, is_grouped, is_apart, is_tiled, is_log)

    @property
    def keys(self) -> int:
        """Columns of all key heads."""
        return self.key_heads * self.width

    @property
    def values(self) -> int:
        """Columns of all value heads."""
        return self.heads * self.value_width


def linear_attention(n: TensorNames, s: Sizes, style: LinearStyle, source: str, target: str) -> Ops:
    """The gated delta rule: products; a convolution of queries, keys and values; unit queries and keys; the rule; a norm of
    heads, gated; the product behind."""
    wide = _apart(n, s, style) if style.is_apart else _grouped(n, s, style)
    narrow = _grouped_narrow(n, s, style) if style.is_grouped else _apart_narrow(n, s, style)
    shape, columns = (2 * style.keys + style.values, 1, style.taps), (style.keys, style.keys, style.values)
    kernels = [
        Weight(f"{n.path}linear_attn.conv1d.weight", shape, Rows(style.keys * i, width))
        for i, width in enumerate(columns)
    ]
    return (
        Product(source, (*wide, *narrow)),
        *delta_rule(n, style, kernels, "linear_attn.norm"),
        Product("o", (n.part(target, "linear_attn.out_proj", s.hidden, style.values, False),)),
    )


def delta_rule(
    n: TensorNames, style: LinearStyle, kernels: Sequence[Weight], norm: str, decay: Op | None = None
) -> Ops:
    """What lies between the products: from "q", "k", "v", each convolved by its one of `kernels`, decays "a", strengths "b" and
    gates "z" to "o". `decay`: of each number of a key, in place of the one of a head."""
    ops: list[Op] = []
    for name, kernel in zip("qkv", kernels, strict=True):
        ops.append(Convolution(name, f"{name} mixed", style.taps, kernel, activation=style.activation))
    for name, scale in (("q mixed", 1.0 / style.width), ("k mixed", head_scale(style.width))):
        # A norm of the mean makes rows sqrt(width) long; queries are scaled by as much again.
        ops.append(Norm(name, name, "rms", UNIT_EPS / style.width, (), groups=style.key_heads))
        ops.append(Multiply(name, scale, name))
    rate, bias = (n.vector(f"linear_attn.{name}", style.heads) for name in ("A_log", "dt_bias"))
    ops.append(decay or Decay("a", "a", rate, bias, style.is_log))
    shape = (style.heads, style.key_heads, style.width, style.value_width, style.is_tiled)
    ops.append(LinearAttention("q mixed", "k mixed", "v mixed", "a", "b", "o", *shape, by_channel=decay is not None))
    ops.append(Norm("o", "o", "rms", style.eps, (n.vector(f"{norm}.weight", style.value_width),), groups=style.heads))
    return (*ops, Gate("z", "o", "o", Gating(style.gate)))


def _grouped(n: TensorNames, s: Sizes, style: LinearStyle) -> tuple[Part, ...]:
    """Parts of one tensor that lies key head by key head: its query, its key, values and gates of its value heads."""
    each = style.heads // style.key_heads
    columns, value = style.width, each * style.value_width
    starts = {"q": (0, columns), "k": (columns, columns), "v": (2 * columns, value), "z": (2 * columns + value, value)}
    stride = 2 * (columns + value)
    wide, outputs = "linear_attn.in_proj_qkvz", style.key_heads * stride
    return tuple(
        n.part(target, wide, outputs, s.hidden, False, Rows(start, count, stride, style.key_heads))
        for target, (start, count) in starts.items()
    )


def _grouped_narrow(n: TensorNames, s: Sizes, style: LinearStyle) -> tuple[Part, ...]:
    """Parts of one tensor that lies key head by key head: strengths and decays of its value heads."""
    name, both, each = "linear_attn.in_proj_ba", 2 * style.heads, style.heads // style.key_heads
    strength, decay = (Rows(start, each, 2 * each, style.key_heads) for start in (0, each))
    first = Part("b", n.linear(name, both, s.hidden, strength), activation="sigmoid")
    return first, n.part("a", name, both, s.hidden, False, decay)


def _apart(n: TensorNames, s: Sizes, style: LinearStyle) -> tuple[Part, ...]:
    """Queries, keys and values in one tensor, one behind the other; gates in a tensor of their own."""
    name, outputs = "linear_attn.in_proj_qkv", 2 * style.keys + style.values
    return (
        n.part("q", name, outputs, s.hidden, False, Rows(0, style.keys)),
        n.part("k", name, outputs, s.hidden, False, Rows(style.keys, style.keys)),
        n.part("v", name, outputs, s.hidden, False, Rows(2 * style.keys, style.values)),
        n.part("z", "linear_attn.in_proj_z", style.values, s.hidden, False),
    )


def _apart_narrow(n: TensorNames, s: Sizes, style: LinearStyle) -> tuple[Part, ...]:
    """Strengths and decays in tensors of their own."""
    first = Part("b", n.linear("linear_attn.in_proj_b", style.heads, s.hidden), activation="sigmoid")
    return first, n.part("a", "linear_attn.in_proj_a", style.heads, s.hidden, False)


Block = Callable[[TensorNames, int, Norm], Branch]  # of a layer: with the norm before it
Body = Callable[[TensorNames], Ops]


def _qwen(f: Fields, s: Sizes, block: Block, act: Activation, rope: RopeReader, *, is_grouped: bool) -> Program:
    """Layers of linear attention, and every fourth of attention with gates; norms around one."""
    eps = f.number("rms_norm_eps", 1e-6)
    norm = NormStyle("rms", eps, offset=0.0 if f.stored("norms_plus_one") else 1.0)
    bias = f.flag("attention_bias")
    style = AttentionStyle(head_scale(s.head), bias=bias, out_bias=bias, head_norm=norm, is_gated=True)
    linear = LinearStyle.read(f, act, eps, is_grouped=is_grouped)
    every = f.count("full_attention_interval", 4)
    kinds = f.per_layer("layer_types", s.layers, [KINDS[(i + 1) % every == 0] for i in range(s.layers)], KINDS)

    def layer(n: TensorNames, i: int) -> Ops:
        if kinds[i] == "linear_attention":
            first = linear_attention(n, s, linear, "h", "a")
        else:
            first = attention(n, s, style, "h", "a")
        before = norm.op(n, "input_layernorm", s.hidden, "x", "h")
        return sequential(
            Branch(first, "a", before), block(n, i, norm.op(n, "post_attention_layernorm", s.hidden, "x", "h"))
        )

    return assemble(f, s, norm, rope, [rope.plain(s.head, partial=True)], EndsStyle(), layer)


def qwen3_next(f: Fields) -> Program:
    """Experts in some layers, beside one that every row takes, with a gate of its own."""
    s, act = Sizes.read(f, head=256), f.activation()
    f.assume(num_experts_per_tok=10, norm_topk_prob=True)
    rope = RopeReader(f, fraction=f.number("partial_rotary_factor", 0.25))
    sparse, experts = sparse_layers(f, s.layers), _beside(f, s, act, f.flag("norm_topk_prob"), 512)

    def block(n: TensorNames, i: int, before: Norm) -> Branch:
        if sparse[i]:
            return experts(n, i, before)
        return Branch(gated(n, "mlp", s.hidden, s.inner, act, "h", "m"), "m", before)

    return _qwen(f, s, block, act, rope, is_grouped=True)


def qwen3_5_text(f: Fields) -> Program:
    """A gated block in every layer."""
    s, act, rope = Sizes.read(f, head=256), f.activation(), _qwen3_5_rope(f)

    def block(n: TensorNames, _: int, before: Norm) -> Branch:
        return Branch(gated(n, "mlp", s.hidden, s.inner, act, "h", "m"), "m", before)

    return _qwen(f, s, block, act, rope, is_grouped=False)


def qwen3_5_moe_text(f: Fields) -> Program:
    """Experts in every layer, beside one that every row takes."""
    f.assume(intermediate_size=1, num_experts_per_tok=8)  # which no layer has
    s, act, rope = Sizes.read(f, head=256), f.activation(), _qwen3_5_rope(f)
    f.only("norm_topk_prob", True)
    return _qwen(f, s, _beside(f, s, act, True, 256), act, rope, is_grouped=False)


def experts_beside(f: Fields, s: Sizes, act: Activation, normalise: bool, experts: int) -> Body:
    """Experts, from "h" to "m", beside one that every row takes, to "s"."""
    count = f.count("num_experts", experts, high=MOST_EXPERTS)
    inner, shared = (f.count(f"{one}_intermediate_size", 512, high=1 << 20) for one in ("moe", "shared_expert"))
    route = ExpertRouting("r", "routes", count, top_k(f, count, None), "softmax", normalise)
    return lambda n: beside_gated(n, s, route, inner, shared, act)


def _beside(f: Fields, s: Sizes, act: Activation, normalise: bool, count: int) -> Block:
    experts = experts_beside(f, s, act, normalise, count)
    return lambda n, _, before: Branch(experts(n), "m", before, terms=("m", "s"))


def _qwen3_5_rope(f: Fields) -> RopeReader:
    f.only("attn_output_gate", True)
    f.only("mamba_ssm_dtype", "float32")
    f.only("mlp_only_layers", [])
    f.only("output_gate_type", "swish")
    f.ignore("mtp_num_hidden_layers", "mtp_use_dedicated_embeddings")
    return RopeReader(f, fraction=f.number("partial_rotary_factor", 0.25), sectioned=True)


def lfm2(f: Fields) -> Program:
    """Short convolutions between gates in most layers. The width of a block may be stated, or a part of what is stated."""
    f.assume(intermediate_size=12288)
    s = _lfm2_sizes(f)
    inner, multiple = f.count("block_ff_dim", s.inner, high=1 << 20), f.count("block_multiple_of", 256)
    factor = f.number("block_ffn_dim_multiplier", 1.0)
    if f.flag("block_auto_adjust_ff_dim", True):
        inner = -(-int(factor * int(2 * inner / 3)) // multiple) * multiple
    if not 1 <= inner <= 1 << 20:
        raise f.refuse(
            "block_ffn_dim_multiplier", f"a block is {inner} columns wide by it, from 1 to {1 << 20} are needed"
        )

    def body(n: TensorNames, _: int) -> Ops:
        return w1_w3_w2(n, s, inner)

    return _lfm2(f, s, body)


def lfm2_moe(f: Fields) -> Program:
    """The same with experts in all layers but the first ones, chosen by sigmoids with a correction."""
    s = _lfm2_sizes(f)
    count, inner = f.count("num_experts", 32, high=MOST_EXPERTS), f.count("moe_intermediate_size", 1792, high=1 << 20)
    dense, correction = f.count("num_dense_layers", 2, low=0), f.flag("use_expert_bias", True)
    normalise, scale = f.flag("norm_topk_prob", True), f.number("routed_scaling_factor", 1.0)
    route = ExpertRouting("r", "routes", count, top_k(f, count, 4), "sigmoid", normalise, scale, epsilon=1e-6)

    def body(n: TensorNames, i: int) -> Ops:
        if i < dense:
            return w1_w3_w2(n, s, s.inner)
        chosen = router(n, "feed_forward.gate", s, route, correction="feed_forward.expert_bias" if correction else None)
        return (*chosen, each_expert(n, "feed_forward.experts", W1_W3_W2, s, inner, count, "silu"))

    return _lfm2(f, s, body)


def _lfm2_sizes(f: Fields) -> Sizes:
    s = Sizes.read(f, free_head=False)
    for name in ("block_dim", "conv_dim", "conv_dim_out"):  # of published configs; transformers does not read them
        f.only(name, s.hidden)
    f.only("num_heads", s.heads)
    f.only("block_use_swiglu", True)
    f.only("use_pos_enc", True)
    f.only("block_norm_eps", f.number("norm_eps", 1e-5))
    f.ignore("block_mlp_init_scale", "block_out_init_scale", "block_use_xavier_init", "conv_use_xavier_init")
    return s


def w1_w3_w2(n: TensorNames, s: Sizes, inner: int) -> Ops:
    """A gated block under the names of lfm2."""
    first = n.part("gate", "feed_forward.w1", inner, s.hidden, False)
    second = n.part("up", "feed_forward.w3", inner, s.hidden, False)
    down = n.part("m", "feed_forward.w2", s.hidden, inner, False)
    return Product("h", (first, second)), Gate("gate", "up", "up", Gating("silu")), Product("up", (down,))


def _lfm2(f: Fields, s: Sizes, body: Callable[[TensorNames, int], Ops]) -> Program:
    norm, rope = NormStyle("rms", f.number("norm_eps", 1e-5)), RopeReader(f, theta=1000000.0)
    taps, bias = f.count("conv_L_cache", 3, high=32), f.flag("conv_bias")
    full = f.whole_numbers("full_attn_idxs") if f.has("full_attn_idxs") else range(s.layers)
    kinds = f.per_layer(
        "layer_types",
        s.layers,
        ["full_attention" if i in full else "conv" for i in range(s.layers)],
        ("full_attention", "conv"),
    )
    names = ("self_attn.q_layernorm", "self_attn.k_layernorm")
    style = AttentionStyle(head_scale(s.head), head_norm=norm, norm_names=names, out_name="self_attn.out_proj")
    tied = f.flag("tie_word_embeddings", f.flag("tie_embedding", True))
    f.only("tie_embedding", tied)

    def layer(n: TensorNames, i: int) -> Ops:
        full = kinds[i] == "full_attention"
        first = attention(n, s, style, "h", "a") if full else short_convolution(n, s, taps, bias, "h", "a")
        return sequential(
            Branch(first, "a", norm.op(n, "operator_norm", s.hidden, "x", "h")),
            Branch(body(n, i), "m", norm.op(n, "ffn_norm", s.hidden, "x", "h")),
        )

    ends = EndsStyle(tied=tied, norm="model.embedding_norm")
    return assemble(f, s, norm, rope, [rope.plain(s.head)], ends, layer)


def short_convolution(n: TensorNames, s: Sizes, taps: int, bias: bool, source: str, target: str) -> Ops:
    """Gates before and behind a convolution: out_proj(c * convolution(b * x))."""
    parts = tuple(
        n.part(name, "conv.in_proj", 3 * s.hidden, s.hidden, bias, Rows(i * s.hidden, s.hidden))
        for i, name in enumerate(("b", "c", "u"))
    )
    kernel = Weight(f"{n.path}conv.conv.weight", (s.hidden, 1, taps))
    vector = n.vector("conv.conv.bias", s.hidden) if bias else None
    return (
        Product(source, parts),
        Gate("b", "u", "u", Gating("none")),
        Convolution("u", "mixed", taps, kernel, vector),
        Gate("c", "mixed", "mixed", Gating("none")),
        Product("mixed", (n.part(target, "conv.out_proj", s.hidden, s.hidden, bias),)),
    )
