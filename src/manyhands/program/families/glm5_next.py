"""The recipe of glm5_next_text (GLM-5.3-Flash): deepseek_v4's residual streams; kimi_linear's delta rule in most layers, latent
attention without positions in the others; clamped experts. An indexer chooses entries of positions that attention sees: the
model is held to the context in which it chooses all, so that it need not be computed (its keys would be kept in rings,
compressed_ops.py, which no session has beside states)."""

from dataclasses import replace

from manyhands.program.blocks import NormStyle, Ops, TensorNames, head_scale
from manyhands.program.ends import EndsStyle, assemble
from manyhands.program.families.experts import listed_sparse
from manyhands.program.families.indexer import INDEXED
from manyhands.program.families.kimi_linear import ChannelLinear, channel_attention, linear_fields, linear_sizes
from manyhands.program.families.latent import LatentSizes, latent_attention, sizes
from manyhands.program.families.linear import KINDS, LinearStyle
from manyhands.program.families.residual_streams import ResidualStreams
from manyhands.program.families.shared import ExpertBlocks, grouped_route
from manyhands.program.fields import Fields
from manyhands.program.ops import Add, Copy, Gating, Mix, Multiply, Program, Term
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
    rope.context = _whole_context(f, rope.context)
    z, kinds = replace(z, norm=norm), _kinds(f, s.layers)
    gating, streams = Gating(f.activation(), limit=f.number("swiglu_limit", 10.0)), ResidualStreams.read(f, s, norm)
    linear, blocks = (
        _linear(f, norm.eps),
        ExpertBlocks.read(f, grouped_route(f), listed_sparse(f, s.layers, 3), act=gating),
    )
    scale = head_scale(z.plain)

    def layer(n: TensorNames, i: int) -> Ops:
        first = (
            channel_attention(n, s, linear)
            if kinds[i] == KINDS[0]
            else latent_attention(n, s, z, scale, pairs=False, bias=bias, turns=False)
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
    f.only("mla_use_nope", True)


def _kinds(f: Fields, layers: int) -> list[str]:
    """Of each layer: attention goes by several names."""
    default = [INDEXED[0] if i % 4 == 3 else KINDS[0] for i in range(layers)]
    kinds = f.per_layer("layer_types", layers, default, (*KINDS, *INDEXED))
    return kinds


def _whole_context(f: Fields, context: int) -> int:
    """The positions that a row sees all of: entries of `index_kpool` positions that are chosen, and those behind the last."""
    f.only("index_kpool_always_select_tail", True)
    rate, top_k = f.count("index_kpool", 16), f.count("index_topk", 2048)
    if top_k % rate:
        raise f.refuse("index_topk", f"a multiple of index_kpool, {rate}, is needed")
    f.ignore("index_n_heads", "index_head_dim", "indexer_types", "index_topk_freq", "index_topk_pattern")
    f.ignore("index_skip_topk_offset")
    return min(context, top_k + rate - 1)


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
    style = LinearStyle(heads, heads, width, width, taps, eps, f.activation(), gate="sigmoid")
    return ChannelLinear(style, bound, is_full=False, rates=(heads,))
