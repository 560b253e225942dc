"""The recipe of deepseek_v4: residual streams, attention over the last positions and over entries, experts chosen by ids.

compressed_ops.py says how streams and entries are computed, and what is cached. A row on the wire is hc_mult times as wide
as the hidden size (four times: 32 KiB in bf16 of a hidden size of 4,096); with hash_moe layers it also carries its token's
id, so that any node computes them. Tensors have the names of the publisher's checkpoints ("layers.0.attn.wq_a.weight"),
which transformers reads too.
"""

from dataclasses import dataclass, replace
from typing import Any, Final

from manyhands.program.blocks import NormStyle, Ops, Sizes, TensorNames, each_expert, head_scale, router
from manyhands.program.ends import EndsStyle, assemble, with_streams
from manyhands.program.families.deepseek_v4_layers import (
    HEAVY,
    SLIDING,
    SPARSE,
    hash_layers,
    label_of,
    layer_kinds,
    rates_of,
    tables_of,
)
from manyhands.program.families.experts import top_k
from manyhands.program.families.indexer import MOST_CHOSEN
from manyhands.program.families.residual_streams import ResidualStreams
from manyhands.program.fields import MOST_EXPERTS, Fields
from manyhands.program.ops import (
    Add,
    Collapse,
    Compress,
    CompressedAttention,
    EntryIndex,
    ExpertRouting,
    Gate,
    Gating,
    GroupedProduct,
    Norm,
    Part,
    Product,
    Program,
    Rope,
    Rotary,
    Score,
    Softplus,
    Term,
    Weight,
)
from manyhands.program.rope import RopeReader

_SCORES: Final[dict[str, Score]] = {"sqrtsoftplus": "root", "sigmoid": "sigmoid"}
_DIGITS: Final = 4  # columns of a row that hold its token's id


@dataclass(frozen=True, slots=True)
class _Shape:
    """What the layers have in common. rotary: columns of a head that turn, its last ones."""

    s: Sizes
    query_rank: int
    rotary: int
    window: int
    groups: int
    out_rank: int
    streams: ResidualStreams
    norm: NormStyle
    index: tuple[int, int, int]  # heads, their columns, entries that are chosen
    rates: dict[str, int]

    def bare(self, source: str, groups: int) -> Norm:
        """A norm of each of `groups` parts, without weights."""
        return Norm(source, source, "rms", self.norm.eps, (), groups=groups)

    def turn(self, register: str, heads: int, width: int, rope: int, back: int = 0) -> Rotary:
        """The last columns of each head."""
        return Rotary(register, heads, width, rope, width - self.rotary, pairs=True, back=back)


def deepseek_v4(f: Fields) -> Program:
    """Each layer: streams collapse, attention, streams spread; streams collapse, experts, streams spread."""
    s = _sizes(f)
    kinds, by_ids = layer_kinds(f, s.layers), hash_layers(f, s.layers)
    tables, context = tables_of(f, s.head, kinds)
    shape = _shape(f, s, next(iter(tables.values())).width, kinds, context)
    route, gating, streams = _route(f), Gating(f.activation(), limit=f.number("swiglu_limit", 10.0)), shape.streams
    _as_trained(f)
    ropes = [rope for table in tables.values() for rope in (table, _reversed(table))]
    names = list(tables)

    def layer(n: TensorNames, i: int) -> Ops:
        rope = 2 * names.index(label_of(kinds[i]))
        attention = (shape.norm.op(n, "attn_norm", s.hidden, "u", "h"), *_attention(n, shape, kinds[i], rope))
        experts = (shape.norm.op(n, "ffn_norm", s.hidden, "u", "h"), *_experts(n, s, route, gating, by_ids[i]))
        return (*streams.around(n, "attn", attention, "a"), *streams.around(n, "ffn", experts, "m"))

    ends = EndsStyle(embed="embed", norm="norm", head="head", layers="layers")
    rope = RopeReader(Fields({"max_position_embeddings": context}, f.where))
    mix = Weight("hc_head_fn", (streams.count, streams.count * s.hidden))
    base, scale = Weight("hc_head_base", (streams.count,)), Weight("hc_head_scale", (1,))
    collapse = Collapse("x", "u", "hc", streams.count, mix, base, scale, shape.norm.eps, streams.epsilon)
    return with_streams(assemble(f, s, shape.norm, rope, ropes, ends, layer), collapse, any(by_ids) * _DIGITS)


def _sizes(f: Fields) -> Sizes:
    f.only("num_key_value_heads", 1)
    inner = _by_either(f, "moe_intermediate_size", "intermediate_size", 2048, 1 << 20)
    return Sizes(
        layers=f.count("num_hidden_layers", 43, high=1024),
        hidden=f.count("hidden_size", 4096, high=1 << 17),
        vocab=f.count("vocab_size", 129280, high=1 << 22),
        heads=f.count("num_attention_heads", 64, high=4096),
        kv_heads=1,
        head=f.count("head_dim", 512, high=1 << 14),
        inner=inner,
    )


def _by_either(f: Fields, name: str, other: str, default: int, high: int) -> int:
    """A count that transformers reads by either name."""
    found = f.count(other if f.has(other) and not f.has(name) else name, default, high=high)
    f.only(other, found)
    return found


def _shape(f: Fields, s: Sizes, rotary: int, kinds: list[str], context: int) -> _Shape:
    groups = f.count("o_groups", 8, high=4096)
    if s.heads * s.head % groups:
        raise f.refuse("o_groups", f"a divisor of the {s.heads * s.head} columns of all heads is needed")
    norm = NormStyle("rms", f.number("rms_norm_eps", 1e-6))
    streams = ResidualStreams.read(f, s, norm)
    return _Shape(
        s,
        query_rank=f.count("q_lora_rank", 1024, high=1 << 17),
        rotary=rotary,
        window=f.count("sliding_window", 128),
        groups=groups,
        out_rank=f.count("o_lora_rank", 1024, high=1 << 17),
        streams=streams,
        norm=norm,
        index=_index(f, rotary, context),
        rates=rates_of(f, kinds),
    )


def _index(f: Fields, rotary: int, context: int) -> tuple[int, int, int]:
    heads, width = f.count("index_n_heads", 64, high=4096), f.count("index_head_dim", 128, low=rotary, high=1 << 14)
    chosen = min(f.count("index_topk", 512), context)
    if chosen > MOST_CHOSEN:
        raise f.refuse("index_topk", f"at most {MOST_CHOSEN} of the {context} positions can be chosen")
    return heads, width, chosen


def _reversed(table: Rope) -> Rope:
    return Rope(tuple(-value for value in table.frequencies), table.factor)


def _route(f: Fields) -> ExpertRouting:
    score = f.raw("scoring_func", "sqrtsoftplus")
    if not isinstance(score, str) or score not in _SCORES:
        raise f.refuse("scoring_func", f"supported are {', '.join(_SCORES)}")
    count = _by_either(f, "n_routed_experts", "num_local_experts", 256, MOST_EXPERTS)
    scale = f.number("routed_scaling_factor", 1.5)
    return ExpertRouting("r", "routes", count, top_k(f, count, 6), _SCORES[score], normalise=True, scale=scale)


def _as_trained(f: Fields) -> None:
    """Fields that transformers does not read, which must say what it computes."""
    f.only("n_shared_experts", 1)
    f.only("norm_topk_prob", True)
    f.only("topk_method", "noaux_tc")
    f.only("expert_dtype", "fp4", "fp8")  # of a quantised checkpoint, whose tensors say it too


def _attention(n: TensorNames, z: _Shape, kind: str, rope: int) -> Ops:
    """From "h" to "a"."""
    s, width = z.s, z.s.heads * z.s.head
    early, late, second, fields = _entries(n, z, kind, rope)
    attend = CompressedAttention(
        "q", "k", "a", s.heads, s.head, head_scale(s.head), z.window, n.vector("attn.attn_sink", s.heads), **fields
    )
    return (
        Product(
            "h",
            (
                n.part("q", "attn.wq_a", z.query_rank, s.hidden, False),
                n.part("k", "attn.wkv", s.head, s.hidden, False),
                *early,
            ),
        ),
        z.norm.op(n, "attn.q_norm", z.query_rank, "q", "q"),
        Product("q", (*second, n.part("q", "attn.wq_b", width, z.query_rank, False))),
        z.bare("q", s.heads),
        z.turn("q", s.heads, s.head, rope),
        z.norm.op(n, "attn.kv_norm", s.head, "k", "k"),
        z.turn("k", 1, s.head, rope),
        *late,
        attend,
        z.turn("a", s.heads, s.head, rope + 1),
        GroupedProduct("a", "o", n.linear("attn.wo_a", z.groups * z.out_rank, width // z.groups), z.groups),
        Product("o", (n.part("a", "attn.wo_b", s.hidden, z.groups * z.out_rank, False),)),
    )


def _entries(
    n: TensorNames, z: _Shape, kind: str, rope: int
) -> tuple[tuple[Part, ...], Ops, tuple[Part, ...], dict[str, Any]]:
    """Of a kind of layer: products of "h", what follows them, products of the queries' latent, and attention's fields."""
    if kind == SLIDING:
        return (), (), (), {}
    rate, doubled = z.rates[kind], kind == SPARSE
    early, late = _compressor(n, z, "attn.compressor", "e", z.s.head, rate, doubled, rope)
    if kind == HEAVY:
        return early, late, (), {"entry": "e", "rate": rate}
    heads, width, chosen = z.index
    keys, after = _compressor(n, z, "attn.indexer.compressor", "i", width, rate, doubled, rope)
    weigh = n.part("iw", "attn.indexer.weights_proj", heads, z.s.hidden, False)
    query = n.part("iq", "attn.indexer.wq_b", heads * width, z.query_rank, False)
    index = EntryIndex("iq", "i", "iw", heads, width, chosen)
    ops = (*late, *after, z.turn("iq", heads, width, rope))
    return (*early, *keys, weigh), ops, (query,), {"entry": "e", "rate": rate, "index": index}


def _compressor(
    n: TensorNames, z: _Shape, path: str, target: str, width: int, rate: int, doubled: bool, rope: int
) -> tuple[tuple[Part, ...], Ops]:
    """Products of "h", and what makes entries of them."""
    wide = width * (1 + doubled)
    values, gates = f"{target}v", f"{target}g"
    parts = (
        n.part(values, f"{path}.wkv", wide, z.s.hidden, False),
        n.part(gates, f"{path}.wgate", wide, z.s.hidden, False),
    )
    bias = Weight(f"{n.path}{path}.ape", (rate, wide))
    return parts, (
        Compress(values, gates, target, width, rate, bias, doubled),
        z.norm.op(n, f"{path}.norm", width, target, target),
        z.turn(target, 1, width, rope, rate - 1),
    )


def _experts(n: TensorNames, s: Sizes, route: ExpertRouting, gating: Gating, by_ids: bool) -> Ops:
    """From "h" to "m": experts, and one that every row takes."""
    if by_ids:
        table = Weight(f"{n.path}ffn.gate.tid2eid", (s.vocab, route.top_k))
        chosen = router(n, "ffn.gate", s, replace(route, table=table))
    else:
        chosen = router(n, "ffn.gate", s, route, correction="ffn.gate.bias")
    product, choice = chosen
    soft: Ops = (Softplus("r", "r"),) if route.score == "root" else ()
    experts = each_expert(n, "ffn.experts", ("w1", "w3", "w2"), s, s.inner, route.experts, gating)
    up = (
        n.part("gate", "ffn.shared_experts.w1", s.inner, s.hidden, False),
        n.part("up", "ffn.shared_experts.w3", s.inner, s.hidden, False),
    )
    return (
        product,
        *soft,
        choice,
        experts,
        Product("h", up),
        Gate("gate", "up", "up", gating),
        Product("up", (n.part("s", "ffn.shared_experts.w2", s.hidden, s.inner, False),)),
        Add((Term("s"),), "m"),
    )
