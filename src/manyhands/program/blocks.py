"""The shared blocks of recipes: attention, gated and plain blocks, experts, residual structures. Each returns operations.

A block reads one register and leaves its result in another. Names of tensors are relative to a layer
("self_attn.q_proj"); `TensorNames` puts the path of the layer before them.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from manyhands.program.fields import Fields
from manyhands.program.ops import (
    EXPERT,
    Activation,
    Add,
    Attention,
    ExpertRouting,
    Experts,
    Gate,
    Gating,
    Multiply,
    Norm,
    NormKind,
    Op,
    Part,
    Product,
    Rotary,
    Rows,
    Term,
    Weight,
)

Ops = tuple[Op, ...]
FourNames = tuple[str, str, str, str]


@dataclass(frozen=True, slots=True)
class Sizes:
    """What nearly every config gives, under the names that nearly every family uses."""

    layers: int
    hidden: int
    vocab: int
    heads: int
    kv_heads: int
    head: int  # columns of a head
    inner: int  # columns of a dense block

    @classmethod
    def read(cls, fields: Fields, *, kv: bool = True, free_head: bool = True, head: int | None = None) -> "Sizes":
        """Raises ModelError for impossible ones. `kv`: num_key_value_heads is required, perhaps null (else it
        defaults to all heads).

        Without `free_head`, heads must fill the hidden size; `head` is the family's own default of head_dim, which one that is
        null does not mean: heads share the hidden size then.
        """
        head = None if fields.is_null("head_dim") else head
        hidden = fields.count("hidden_size", high=1 << 17)
        heads = fields.count("num_attention_heads", high=4096)
        is_needed = kv and not fields.is_null("num_key_value_heads")
        kv_heads = fields.count("num_key_value_heads", None if is_needed else heads, high=4096)
        if heads % kv_heads:
            raise fields.refuse("num_key_value_heads", f"a divisor of the {heads} attention heads is needed")
        if hidden % heads and not (free_head and (head or fields.has("head_dim"))):
            raise fields.refuse("num_attention_heads", f"a divisor of hidden_size {hidden} is needed")
        head = fields.count("head_dim", head or hidden // heads, high=1 << 14)
        if not free_head and head != hidden // heads:
            raise fields.refuse("head_dim", f"hidden_size / num_attention_heads = {hidden // heads} is needed")
        return cls(
            layers=fields.count("num_hidden_layers", high=1024),
            hidden=hidden,
            vocab=fields.count("vocab_size", high=1 << 22),
            heads=heads,
            kv_heads=kv_heads,
            head=head,
            inner=fields.count("intermediate_size", high=1 << 20),
        )


@dataclass(frozen=True, slots=True)
class TensorNames:
    """Names of tensors below one path ("model.layers.3."). `rename`: what the checkpoint calls them there."""

    path: str
    rename: Callable[[str], str] = str

    def vector(self, name: str, size: int) -> Weight:
        """The vector `path + name`."""
        return Weight(self.path + self.rename(name), (size,))

    def linear(self, name: str, outputs: int, inputs: int, rows: Rows | None = None) -> Weight:
        """The matrix `path + name + .weight`, stored as [outputs, inputs]."""
        return Weight(self.path + self.rename(f"{name}.weight"), (outputs, inputs), rows)

    def part(self, target: str, name: str, outputs: int, inputs: int, bias: bool, rows: Rows | None = None) -> Part:
        """A product with the linear layer `name`, or with `rows` of it."""
        vector = Weight(self.path + self.rename(f"{name}.bias"), (outputs,), rows) if bias else None
        return Part(target, self.linear(name, outputs, inputs, rows), vector)


@dataclass(frozen=True, slots=True)
class NormStyle:
    """How a family norms: used for all norms of rows."""

    kind: NormKind
    eps: float
    offset: float = 0.0
    bias: bool = False

    def op(self, names: TensorNames, name: str, width: int, source: str, target: str, groups: int = 1) -> Norm:
        """The norm `name` (a weight is `width` wide); with {head} in the name each group has weights of its own."""
        each = [name.format(head=head) for head in range(groups)] if "{head}" in name else [name]
        weight = tuple(names.vector(f"{one}.weight", width) for one in each)
        bias = tuple(names.vector(f"{one}.bias", width) for one in each) if self.bias else ()
        return Norm(source, target, self.kind, self.eps, weight, bias, self.offset, groups)


@dataclass(frozen=True, slots=True)
class AttentionStyle:
    """One layer's attention, apart from sizes. `rope` is an index into Program.ropes, None for no positions."""

    scale: float
    rope: int | None = 0
    pairs: bool = False
    bias: bool = False  # of q, k and v
    out_bias: bool = False
    path: str = "self_attn"  # prefix of the names of q_proj, k_proj and v_proj
    out_name: str = "self_attn.o_proj"
    window: int | None = None
    soft_cap: float | None = None
    sinks: Weight | None = None
    head_norm: NormStyle | None = None
    norm_names: tuple[str, str] = ("self_attn.q_norm", "self_attn.k_norm")
    wide_norm: bool = False  # the norm spans all heads at once
    norm_rows: bool = False  # the norms' weights are one tensor, with a row for each head
    norm_last: bool = False  # heads are normed behind the rotary embedding
    fused: str | None = None  # the one tensor that holds q, k and v
    interleaved: bool = False  # ... head by head (q, k, v of head 0, then of head 1)
    value_eps: float | None = None  # values are normalised head by head, without weights
    is_value_key: bool = False  # values are the products of keys, before norm and rotary embedding
    is_gated: bool = False  # the tensor of q has, behind each head, a gate of its result
    gate_name: str | None = None  # the tensor that holds the gate of its result, where it is one of its own
    value_width: int | None = None  # columns of a head's values, if others than of its keys
    value_scale: float = 1.0


def attention(names: TensorNames, s: Sizes, style: AttentionStyle, source: str, target: str) -> Ops:
    """Queries, keys, values; norms of heads; rotary embedding; cached attention, gated or not; the product behind."""
    norms: list[Op] = []
    if style.value_eps is not None:
        norms.append(Norm("k" if style.is_value_key else "v", "v", "rms", style.value_eps, (), groups=s.kv_heads))
    if style.head_norm is not None:
        for register, heads, name in zip("qk", (s.heads, s.kv_heads), style.norm_names, strict=True):
            width, groups = (heads * s.head, 1) if style.wide_norm else (s.head, heads)
            norm = style.head_norm.op(names, name, width, register, register, groups)
            if style.norm_rows:
                each = tuple(Weight(norm.weight[0].name, (heads, width), stacked=True, part=i) for i in range(heads))
                norm = replace(norm, weight=each)
            norms.append(norm)
    turns: list[Op] = []
    if style.rope is not None:
        turns.append(Rotary("q", s.heads, s.head, style.rope, pairs=style.pairs))
        turns.append(Rotary("k", s.kv_heads, s.head, style.rope, pairs=style.pairs))
    value = style.value_width or s.head
    ops: list[Op] = [Product(source, _query_key_value(names, s, style))]
    ops += [] if style.value_scale == 1.0 else [Multiply("v", style.value_scale, "v")]
    ops += [*turns, *norms] if style.norm_last else [*norms, *turns]
    ops.append(
        Attention(
            query="q",
            key="k",
            value="v",
            target=target,
            heads=s.heads,
            kv_heads=s.kv_heads,
            width=s.head,
            value_width=value,
            scale=style.scale,
            window=style.window,
            soft_cap=style.soft_cap,
            sinks=style.sinks,
        )
    )
    if style.is_gated or style.gate_name is not None:
        ops.append(Gate("g", target, target, Gating("sigmoid")))
    out = names.part(target, style.out_name, s.hidden, s.heads * value, style.out_bias)
    return (*ops, Product(target, (out,)))


def _query_key_value(names: TensorNames, s: Sizes, style: AttentionStyle) -> tuple[Part, ...]:
    value = style.value_width or s.head
    widths = {"q": s.heads * s.head, "k": s.kv_heads * s.head, "v": s.kv_heads * value}
    if style.is_value_key:
        del widths["v"]
    if style.is_gated:
        both = [Rows(start, s.head, 2 * s.head, s.heads) for start in (0, s.head)]
        named = [("q", "q", both[0]), ("g", "q", both[1]), ("k", "k", None), ("v", "v", None)]
        widths["q"] *= 2
        return tuple(
            names.part(t, f"{style.path}.{name}_proj", widths[name], s.hidden, style.bias, rows)
            for t, name, rows in named
        )
    if style.fused is None:
        parts = [names.part(t, f"{style.path}.{t}_proj", width, s.hidden, style.bias) for t, width in widths.items()]
        if style.gate_name is not None:
            parts.append(names.part("g", style.gate_name, s.heads * value, s.hidden, False))
        return tuple(parts)
    total, start, out = sum(widths.values()), 0, []
    for number, (target, width) in enumerate(widths.items()):
        rows = Rows(number * s.head, s.head, 3 * s.head, s.heads) if style.interleaved else Rows(start, width)
        out.append(names.part(target, style.fused, total, s.hidden, style.bias, rows))
        start += width
    return tuple(out)


def head_scale(width: int) -> float:
    """1 / sqrt(width)."""
    return 1.0 / math.sqrt(width)


def gated(
    names: TensorNames,
    path: str,
    hidden: int,
    inner: int,
    activation: Activation | Gating,
    source: str,
    target: str,
    *,
    bias: bool = False,
    fused: str | None = None,
    down_name: str = "down_proj",
) -> Ops:
    """down(activation(gate(source)) * up(source)); `fused`: the one tensor that holds gate, then up."""
    if fused:
        name = f"{path}.{fused}"
        gate = names.part("gate", name, 2 * inner, hidden, bias, Rows(0, inner))
        up = names.part("up", name, 2 * inner, hidden, bias, Rows(inner, inner))
    else:
        gate = names.part("gate", f"{path}.gate_proj", inner, hidden, bias)
        up = names.part("up", f"{path}.up_proj", inner, hidden, bias)
    down = names.part(target, f"{path}.{down_name}", hidden, inner, bias)
    return Product(source, (gate, up)), Gate("gate", "up", "up", Gating.of(activation)), Product("up", (down,))


def plain(
    names: TensorNames, ups: tuple[str, str], s: Sizes, activation: Activation, source: str, target: str, *, bias: bool
) -> Ops:
    """second(activation(first(source))) for `ups` = (first, second)."""
    first = names.part("up", ups[0], s.inner, s.hidden, bias)
    second = names.part(target, ups[1], s.hidden, s.inner, bias)
    return Product(source, (Part("up", first.weight, first.bias, activation),)), Product("up", (second,))


def router(
    names: TensorNames,
    name: str,
    s: Sizes,
    route: ExpertRouting,
    *,
    bias: bool = False,
    correction: str | None = None,
    source: str = "h",
) -> Ops:
    """The products that rank experts, from `source` to `route.source`, and the choice. A `correction` is a vector's name."""
    if correction is not None:
        route = replace(route, correction=names.vector(correction, route.experts))
    return Product(source, (names.part(route.source, name, route.experts, s.hidden, bias),)), route


def each_expert(
    names: TensorNames, path: str, parts: Sequence[str], s: Sizes, inner: int, count: int, act: Activation | Gating
) -> Experts:
    """Experts that have tensors of their own; `parts` are the names of gate, up and down. From "h" by "routes" to "m"."""
    gate, up, down = (f"{path}.{EXPERT}.{part}" for part in parts)
    return Experts(
        source="h",
        routes="routes",
        target="m",
        experts=count,
        gating=Gating.of(act),
        gate=names.linear(gate, inner, s.hidden),
        up=names.linear(up, inner, s.hidden),
        down=names.linear(down, s.hidden, inner),
    )


def windows(fields: Fields, layers: int, default: Sequence[str], window: int | None) -> list[int | None]:
    """Each layer's attention window by `layer_types`; `window` is that of its sliding layers."""
    types = fields.per_layer("layer_types", layers, default, ("full_attention", "sliding_attention"))
    if window is None and "sliding_attention" in types:
        raise fields.refuse(
            "layer_types",
            "sliding_attention needs sliding_window (and use_sliding_window, where the family has that switch)",
        )
    return [window if kind == "sliding_attention" else None for kind in types]


def sliding(layers: int, full: Sequence[int] | range) -> list[str]:
    """layer_types with full attention in the layers `full`, sliding in all others."""
    return ["full_attention" if layer in full else "sliding_attention" for layer in range(layers)]


@dataclass(frozen=True, slots=True)
class Branch:
    """One branch of a layer: an optional norm before, a body from "h" (or "x") to `target`, an optional norm after."""

    body: Ops
    target: str
    before: Norm | None = None
    after: Norm | None = None
    terms: tuple[str, ...] = field(default=())  # what joins the residual stream, if more than `target`

    @property
    def ops(self) -> Ops:
        """All its operations."""
        return (*((self.before,) if self.before else ()), *self.body, *((self.after,) if self.after else ()))

    def joined(self, scale: float) -> tuple[Term, ...]:
        """The terms that it adds to the residual stream."""
        return tuple(Term(source, scale) for source in self.terms or (self.target,))


def sequential(first: Branch, second: Branch, scale: float = 1.0) -> Ops:
    """x += first(x); x += second(x)."""
    return (*first.ops, Add(first.joined(scale)), *second.ops, Add(second.joined(scale)))


def parallel(first: Branch, second: Branch) -> Ops:
    """x += first(x) + second(x)."""
    return (*first.ops, *second.ops, Add((*first.joined(1.0), *second.joined(1.0))))


def before_each(names: TensorNames, s: Sizes, norm: NormStyle, first: Ops, second: Ops, scale: float = 1.0) -> Ops:
    """The usual layer: a norm before attention (to "a") and one before the block (to "m"), each added to "x"."""
    return sequential(
        Branch(first, "a", before=norm.op(names, "input_layernorm", s.hidden, "x", "h")),
        Branch(second, "m", before=norm.op(names, "post_attention_layernorm", s.hidden, "x", "h")),
        scale,
    )


def sandwich(
    n: TensorNames, s: Sizes, norm: NormStyle, names: FourNames, first: Ops, second: Ops, scale: float = 1.0
) -> Ops:
    """A norm before and behind attention and block; `names` in the order of use."""
    ops = [
        norm.op(n, name, s.hidden, source, target) for name, source, target in zip(names, "xaxm", "hahm", strict=True)
    ]
    return sequential(Branch(first, "a", ops[0], ops[1]), Branch(second, "m", ops[2], ops[3]), scale)
