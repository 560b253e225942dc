"""The ends of a recipe, and the whole Program of layers and ends."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from manyhands.program.blocks import NormStyle, Ops, Sizes, TensorNames
from manyhands.program.fields import Fields
from manyhands.program.ops import (
    AttendStreams,
    Attention,
    Clip,
    Collapse,
    Embed,
    Head,
    LatentAttention,
    Layer,
    Part,
    Product,
    Program,
    Rope,
    Rotary,
    ScaleByPosition,
    Weight,
)
from manyhands.program.rope import RopeReader


@dataclass(frozen=True, slots=True)
class EndsStyle:
    """Names of tensors and factors of a family's ends; tied: what tie_word_embeddings is where the config is silent."""

    tied: bool = False
    embed: str = "model.embed_tokens"
    norm: str = "model.norm"
    head: str = "lm_head"
    layers: str = "model.layers"
    embed_scale: float = 1.0
    round_scale: bool = False
    head_bias: bool = False
    scale: float = 1.0
    soft_cap: float | None = None


def assemble(
    fields: Fields,
    s: Sizes,
    norm: NormStyle,
    rope: RopeReader,
    ropes: list[Rope],
    ends: EndsStyle,
    layer: Callable[[TensorNames, int], Ops],
) -> Program:
    """The Program of a model whose layer i is `layer(names, i)`. Refuses fields that no part of the recipe has read."""
    tied = fields.flag("tie_word_embeddings", ends.tied)
    fields.finish()
    embedding = Weight(f"{ends.embed}.weight", (s.vocab, s.hidden))
    own = Weight(f"{ends.head}.weight", (s.vocab, s.hidden))
    bias = Weight(f"{ends.head}.bias", (s.vocab,)) if ends.head_bias else None
    return Program(
        family=str(fields.raw("model_type")),
        hidden=s.hidden,
        vocab=s.vocab,
        context=rope.context,
        ropes=tuple(ropes),
        embed=Embed(embedding, ends.embed_scale, ends.round_scale),
        layers=tuple(Layer(layer(TensorNames(f"{ends.layers}.{i}."), i)) for i in range(s.layers)),
        head=Head(
            norm=norm.op(TensorNames(""), ends.norm, s.hidden, "x", "h"),
            product=Product("h", (Part("logits", embedding if tied else own, bias),)),
            scale=ends.scale,
            soft_cap=ends.soft_cap,
            own=own if tied else None,
        ),
    )


def with_streams(program: Program, collapse: Collapse | AttendStreams, more: int = 0) -> Program:
    """A program whose rows have streams, and `more` columns, between layers; `collapse` makes the head's row of them."""
    hidden = collapse.streams * program.hidden + more
    head = replace(program.head, norm=replace(program.head.norm, source=collapse.target), before=(collapse,))
    embed = replace(program.embed, streams=collapse.streams, has_ids=more > 0)
    return replace(program, hidden=hidden, embed=embed, head=head)


def with_query_scale(program: Program, scale: ScaleByPosition | None) -> Program:
    """A program in which `scale`, if there is one, comes before every attention: queries have turned by then."""
    if scale is None:
        return program
    layers = []
    for layer in program.layers:
        parts = ((scale, op) if isinstance(op, Attention | LatentAttention) else (op,) for op in layer.ops)
        layers.append(Layer(tuple(op for part in parts for op in part)))
    return replace(program, layers=tuple(layers))


def with_clip(program: Program, limit: float | None) -> Program:
    """A program in which queries, keys and values stay between -limit and limit, if there is one, before they turn."""
    if limit is None:
        return program
    layers, clips = [], tuple(Clip(name, limit) for name in "qkv")
    for layer in program.layers:
        at = next(i for i, op in enumerate(layer.ops) if isinstance(op, Rotary | Attention))
        layers.append(Layer((*layer.ops[:at], *clips, *layer.ops[at:])))
    return replace(program, layers=tuple(layers))
