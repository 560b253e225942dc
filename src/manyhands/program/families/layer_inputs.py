"""Rows that bring later layers what they need: an input of each layer, keys and values that layers share.

Register "x" holds, side by side: streams; for each layer the columns of its own input; the keys and values of the layers that
later ones share, of each type. So what a layer needs of the token's id and of earlier layers comes with its row, wherever the
model is cut; a layer that shares keys and values caches them itself.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from manyhands.program.blocks import AttentionStyle, NormStyle, Ops, Sizes, TensorNames, attention
from manyhands.program.fields import WIDEST, Fields
from manyhands.program.ops import (
    Activation,
    Add,
    Attention,
    Copy,
    Embed,
    Gate,
    Gating,
    Multiply,
    Part,
    Product,
    Program,
    Rotary,
    Term,
    Weight,
)

ENDS: Final = TensorNames("model.")


@dataclass(frozen=True, slots=True)
class RowLayout:
    """Where columns of "x" begin. `kv`: columns of a position's keys, or values, by type of layer; `sources`: which layers'
    keys and values are shared, by type; `first_sharing`: the layer from which on they are."""

    hidden: int
    streams: int
    layers: int
    input: int  # columns of a layer's own input
    kv: Mapping[str, int]
    sources: Mapping[str, int]
    first_sharing: int

    @classmethod
    def read(
        cls, f: Fields, s: Sizes, kinds: Sequence[str], kv: Mapping[str, int], *, streams: int, own: int, shared: int
    ) -> "RowLayout":
        """Raises ModelError. `own`: hidden_size_per_layer_input; `shared`: num_kv_shared_layers."""
        before = kinds[: s.layers - shared] if shared < s.layers else []
        if shared and set(before) != set(kinds):
            raise f.refuse(
                "num_kv_shared_layers", f"a layer of each type before those that share, of {s.layers}, is needed"
            )
        sources = {kind: max(i for i, one in enumerate(before) if one == kind) for kind in set(kinds[len(before) :])}
        layout = cls(s.hidden, streams, s.layers, own, kv, sources if shared else {}, s.layers - shared)
        if layout.width > WIDEST:
            raise f.refuse(
                "hidden_size_per_layer_input",
                f"rows of {layout.width} columns follow: at most {WIDEST} are served",
            )
        return layout

    @property
    def all_streams(self) -> int:
        return self.streams * self.hidden

    def inputs(self, layer: int) -> int:
        return self.all_streams + layer * self.input

    def kept(self, kind: str) -> int:
        """Of the keys of a type, before its values."""
        types = sorted(self.sources)
        return self.inputs(self.layers) + 2 * sum(self.kv[one] for one in types[: types.index(kind)])

    @property
    def width(self) -> int:
        return self.inputs(self.layers) + 2 * sum(self.kv[kind] for kind in self.sources)


def table(f: Fields, at: RowLayout, least: int = 1) -> Embed:
    """The second table, whose rows are a token's part of all layers' inputs. Raises ModelError if it has fewer than `least`."""
    rows = f.count("vocab_size_per_layer_input", 262144, low=least, high=1 << 22)
    weight = Weight("model.embed_tokens_per_layer.weight", (rows, at.layers * at.input))
    return Embed(weight, at.input**0.5, round_scale=True)


def with_rows(program: Program, at: RowLayout, beside: Embed, before: Ops) -> Program:
    """The program with such rows, `beside` being the second table; `before` leaves in "u" what the head reads of one."""
    head = replace(program.head, before=before, norm=replace(program.head.norm, source="u"))
    return replace(
        program, hidden=at.width, embed=replace(program.embed, beside=beside, column=at.inputs(0)), head=head
    )


def inputs_made(at: RowLayout, norm: NormStyle, others: Sequence[Part] = ()) -> Ops:
    """Layer 0 begins with these: "x" has the embedding, which "e" becomes, and for each layer a row of the second table.
    `others` are products of the embedding too."""
    count = at.layers * at.input
    part = ENDS.part("i", "per_layer_model_projection", count, at.hidden, False)
    return (
        Copy("x", "e", 0, at.hidden),
        Product("e", (part, *others)),
        Multiply("i", at.hidden**-0.5, "i"),
        norm.op(ENDS, "per_layer_projection_norm", at.input, "i", "i", at.layers),
        Copy("x", "t", at.inputs(0), count),
        Add((Term("t"),), target="i"),
        Multiply("i", 0.5**0.5, "i"),
        Copy("i", "x", 0, count, at=at.inputs(0)),
    )


def input_added(n: TensorNames, at: RowLayout, norm: NormStyle, activation: Activation, i: int, source: str) -> Ops:
    """From `source` to "f": what a layer adds of its own input."""
    gate = n.part("g", "per_layer_input_gate", at.input, at.hidden, False)
    return (
        Product(source, (Part(gate.target, gate.weight, None, activation),)),
        Copy("x", "i", at.inputs(i), at.input),
        Gate("g", "i", "g", Gating("none")),
        Product("g", (n.part("f", "per_layer_projection", at.hidden, at.input, False),)),
        norm.op(n, "post_per_layer_input_norm", at.hidden, "f", "f"),
    )


def sharing_attention(n: TensorNames, s: Sizes, style: AttentionStyle, at: RowLayout, i: int, kind: str) -> Ops:
    """From "h" to "a". Keys and values that later layers share go into "x"; those that are shared come from there."""
    if i < at.first_sharing:
        own = attention(n, s, style, "h", "a")
        if at.sources.get(kind) != i:
            return own
        keys, count = at.kept(kind), at.kv[kind]
        return (*own, Copy("k", "x", 0, count, at=keys), Copy("v", "x", 0, count, at=keys + count))
    assert style.head_norm is not None and style.rope is not None
    queries, keys, count = s.heads * s.head, at.kept(kind), at.kv[kind]
    return (
        Product("h", (n.part("q", "self_attn.q_proj", queries, s.hidden, style.bias),)),
        style.head_norm.op(n, "self_attn.q_norm", s.head, "q", "q", s.heads),
        Rotary("q", s.heads, s.head, style.rope),
        Copy("x", "k", keys, count),
        Copy("x", "v", keys + count, count),
        Attention("q", "k", "v", "a", s.heads, s.kv_heads, s.head, s.head, style.scale, style.window),
        Product("a", (n.part("a", "self_attn.o_proj", s.hidden, queries, style.out_bias),)),
    )
