"""The recipe of glm5_next_text (GLM-5.3-Flash): deepseek_v4's residual streams; kimi_linear's delta rule in most layers, latent
attention without positions in the others, over entries of positions that an indexer chooses; clamped experts."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from manyhands.program.blocks import NormStyle, Ops, Sizes, TensorNames, head_scale
from manyhands.program.ends import EndsStyle, assemble
from manyhands.program.families.choices import SHARED
from manyhands.program.families.experts import listed_sparse
from manyhands.program.families.indexer import INDEXED, MOST_CHOSEN, RATES, IndexStyle
from manyhands.program.families.kimi_linear import ChannelLinear, channel_attention, linear_fields, linear_sizes
from manyhands.program.families.latent import LatentSizes, indexers, latent_attention, sizes
from manyhands.program.families.linear import KINDS, LinearStyle
from manyhands.program.families.residual_streams import ResidualStreams
from manyhands.program.families.shared import ExpertBlocks, grouped_route
from manyhands.program.fields import Fields
from manyhands.program.ops import (
    Add,
    Copy,
    EntryIndex,
    Gating,
    Mix,
    Multiply,
    Part,
    Pool,
    Program,
    Term,
    Weight,
)
from manyhands.program.rope import RopeReader


def glm5_next_text(f: Fields) -> Program:
    """Tensors under the names that published checkpoints have, not those of the class in transformers (5.23)."""
    _defaults(f)
    s, norm, bias, rope = (
        sizes(f),
        NormStyle("rms", f.number("rms_norm_eps", 1e-5)),
        f.flag("attention_bias"),
        RopeReader(f),
    )
    z = LatentSizes.read(f, s, query_rank=1536, rank=512, plain=256, rotary=0, value=256)
    if z.query_rank is None or z.rotary:
        raise f.refuse("qk_rope_head_dim", "0, and a q_lora_rank, are needed")
    z, kinds = replace(z, norm=norm), _kinds(f, s.layers)
    index = _index(f, kinds, rope.context)
    gating, streams = Gating(f.activation(), limit=f.number("swiglu_limit", 10.0)), ResidualStreams.read(f, s, norm)
    linear, blocks = _linear(f, norm.eps), ExpertBlocks.read(f, grouped_route(f), _sparse(f, s.layers), act=gating)
    scale, split = head_scale(z.plain), f.stored("split_kv_b")

    def layer(n: TensorNames, i: int) -> Ops:
        first = (
            channel_attention(n, s, linear)
            if kinds[i] == KINDS[0]
            else latent_attention(n, s, z, scale, pairs=False, bias=bias, split=split, turns=False, index=index)
        )
        block = blocks.branch(n, s, norm, i)
        joined: Ops = (Add((Term("s"),), "m"),) if "s" in block.terms else ()
        before, after = (
            norm.op(n, name, s.hidden, "u", "h") for name in ("input_layernorm", "post_attention_layernorm")
        )
        attention, experts = (before, *first), (after, *block.body, *joined)
        return (*streams.around(n, "attn", attention, "a"), *streams.around(n, "ffn", experts, "m"))

    return _with_mean(assemble(f, s, norm, rope, [], EndsStyle(), layer), streams)


def _with_mean(program: Program, streams: ResidualStreams) -> Program:
    """The head reads the mean of all streams, "u"."""
    rest = (Mix("x", None, "u", streams.width, streams.count - 1, 1, start=streams.width),) if streams.count > 1 else ()
    before = (Copy("x", "u", 0, streams.width), *rest, Multiply("u", 1.0 / streams.count, "u"))
    head = replace(program.head, norm=replace(program.head.norm, source="u"), before=before)
    embed = replace(program.embed, streams=streams.count)
    return replace(program, hidden=streams.count * streams.width, embed=embed, head=head)


def _defaults(f: Fields) -> None:
    f.assume(
        max_position_embeddings=1 << 20, intermediate_size=12288, moe_intermediate_size=2048, n_group=1, topk_group=1
    )
    f.assume(n_routed_experts=288, index_n_heads=32)
    f.only("use_grouped_topk", True)
    for name in ("mla_use_nope", "mhc", "index_kpool_compress"):  # of published configs; transformers reads none
        f.only(name, True)
    f.only("moe_router_dtype", "float32")
    f.ignore("indexer_rope_interleave")  # nothing turns
    f.ignore("index_share_for_mtp_iteration")  # of the layer that guesses tokens ahead


def _sparse(f: Fields, layers: int) -> list[bool]:
    """Which layers have experts. Published configs say it twice: transformers reads the list alone."""
    sparse = listed_sparse(f, layers, 3)
    f.only("first_k_dense_replace", [*sparse, True].index(True))
    return sparse


def _kinds(f: Fields, layers: int) -> list[str]:
    """Of each layer: attention goes by several names."""
    default = [INDEXED[0] if i % 4 == 3 else KINDS[0] for i in range(layers)]
    kinds = f.per_layer("layer_types", layers, default, (*KINDS, *INDEXED))
    return kinds


@dataclass(frozen=True, slots=True)
class _Entries(IndexStyle):
    """An indexer that chooses entries of `rate` positions, whose keys are pooled by gates of their own."""

    def early(self, n: TensorNames, s: Sizes) -> tuple[Part, ...]:
        gates = Weight(f"{n.path}self_attn.indexer.index_kpool_compress_gate", (self.width, s.hidden))
        return (*super(_Entries, self).early(n, s), Part("ig", gates))

    def late(self, n: TensorNames) -> Ops:
        bias = Weight(f"{n.path}self_attn.indexer.index_kpool_compress_ape", (self.rate, self.width))
        return (self.key_norm(n), Pool("ik", "ig", "ie", self.width, self.rate, bias))

    def op(self) -> EntryIndex:
        return EntryIndex("iq", "ie", "iw", self.heads, self.width, self.top_k)


def _index(f: Fields, kinds: Sequence[str], context: int) -> _Entries:
    """A row sees the entries that are chosen, and the positions behind the last entry. Refuses layers that share a choice."""
    f.only("index_kpool_always_select_tail", True)
    rate, top_k = f.count("index_kpool", 16), f.count("index_topk", 2048)
    if rate not in RATES:
        raise f.refuse("index_kpool", f"one of {', '.join(map(str, RATES))} is needed")
    if top_k % rate:
        raise f.refuse("index_topk", f"a multiple of index_kpool, {rate}, is needed")
    chosen = min(top_k, -(-context // rate) * rate) // rate
    if chosen > MOST_CHOSEN:
        raise f.refuse("index_topk", f"at most {MOST_CHOSEN} entries of {rate} positions can be chosen")
    if any(kind != KINDS[0] and one == SHARED for kind, one in zip(kinds, indexers(f, len(kinds)), strict=True)):
        raise f.refuse("indexer_types", "an indexer in each layer of attention, full, is needed")
    heads, width = f.count("index_n_heads", high=4096), f.count("index_head_dim", 128, high=1 << 14)
    return _Entries(heads, width, chosen, pairs=False, rate=rate)


def _linear(f: Fields, eps: float) -> ChannelLinear:
    """By the fields that transformers writes, or those of `linear_attn_config`, which go before them."""
    inner = linear_fields(f)
    heads, width, taps = linear_sizes(f, inner, 64)
    inner.only("safe_gate", True)
    bound = inner.number("gate_lower_bound", f.number("linear_lower_bound", -5.0, positive=False), positive=False)
    if bound >= 0:
        raise f.refuse("linear_lower_bound", "a number below zero is needed")
    inner.ignore("kda_layers", "full_attn_layers")
    inner.finish()
    is_log, act = not f.stored("negative_rates"), f.activation()
    style = LinearStyle(heads, heads, width, width, taps, eps, act, is_log=is_log, gate="sigmoid")
    return ChannelLinear(style, bound, is_full=False, rates=(heads,))
