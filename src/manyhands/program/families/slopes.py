"""Recipes of bloom and mpt: no head turns; from a score the distance of its position is subtracted, times a slope of the head
(ALiBi, arXiv 2108.12409)."""

from dataclasses import replace
from typing import Final

from manyhands.program.blocks import (
    AttentionStyle,
    Branch,
    NormStyle,
    Ops,
    TensorNames,
    attention,
    before_each,
    head_scale,
    plain,
    sequential,
)
from manyhands.program.ends import EndsStyle, assemble, with_clip
from manyhands.program.families.gptj import own_sizes, without_scaling
from manyhands.program.fields import Fields
from manyhands.program.ops import Attention, Program

_BIAS_MAX: Final = 8  # alibi_bias_max: the flattest slope is 2^-8
# Of training, and of how others compute it.
_UNUSED: Final = tuple(
    """
    attention_softmax_in_fp32 bias_dropout_fusion masked_softmax_fusion offset_alibi skip_bias_add skip_bias_add_qkv
    slow_but_exact
    """.split()
)
_MPT_UNUSED: Final = tuple(
    "emb_pdrop embedding_fraction init_config init_device learned_pos_emb tokenizer_name verbose".split()
)
_MPT_ROTARY: Final = ("rope_dail_config", "rope_hf_config", "rope_impl", "rope_theta")  # read where `rope` is true


def bloom(f: Fields) -> Program:
    """BLOOM, BLOOMZ: the embedding is normed; queries, key and value lie head by head."""
    f.rename(
        hidden_size="n_embed",
        num_attention_heads="n_head",
        num_hidden_layers="n_layer",
        max_position_embeddings="seq_length",
    )
    f.ignore(*_UNUSED)
    f.only("apply_residual_connection_post_layernorm", False)
    heads = f.count("num_attention_heads", 8, high=4096)
    s = own_sizes(f, 64, heads, heads, 2, 250880, None)
    f.only("n_inner", s.inner, None)
    norm, rope = NormStyle("layer", f.number("layer_norm_epsilon", 1e-5), bias=True), without_scaling(f)
    style = AttentionStyle(
        head_scale(s.head),
        rope=None,
        bias=True,
        out_bias=True,
        out_name="self_attention.dense",
        fused="self_attention.query_key_value",
        interleaved=not f.stored("qkv_by_part"),
    )
    first_norm = norm.op(TensorNames(""), "transformer.word_embeddings_layernorm", s.hidden, "x", "x")
    by_distance = bloom_slopes(heads)

    def layer(n: TensorNames, i: int) -> Ops:
        block = plain(n, ("mlp.dense_h_to_4h", "mlp.dense_4h_to_h"), s, "gelu_tanh", "h", "m", bias=True)
        ops = before_each(n, s, norm, _sloped(attention(n, s, style, "h", "a"), by_distance), block)
        return ops if i else (first_norm, *ops)

    ends = EndsStyle(tied=True, embed="transformer.word_embeddings", norm="transformer.ln_f", layers="transformer.h")
    return assemble(f, s, norm, rope, [], ends, layer)


def mpt(f: Fields) -> Program:
    """MPT. Those with another alibi_bias_max (MPT-7B-StoryWriter) are refused: transformers computes them as if it were 8."""
    f.rename(
        hidden_size="d_model",
        num_attention_heads="n_heads",
        num_hidden_layers="n_layers",
        max_position_embeddings="max_seq_len",
    )
    f.ignore(*_MPT_UNUSED)
    f.only("no_bias", True)
    f.only("expansion_ratio", 4)
    f.only("logit_scale", None)
    f.only("norm_type", "low_precision_layernorm", "layernorm")
    f.only("fc_type", "torch")
    f.only("ffn_config", {"ffn_type": "mptmlp"}, {"ffn_type": "mptmlp", "fc_type": "torch"})
    heads = f.count("num_attention_heads", 16, high=4096)
    s = own_sizes(f, 2048, heads, heads, 24, 50368, None)
    norm, rope = NormStyle("layer", f.number("layer_norm_epsilon", 1e-5)), without_scaling(f)
    scale, clip = _attention_fields(f)
    style = AttentionStyle(
        head_scale(s.head) if scale is None else scale, rope=None, out_name="attn.out_proj", fused="attn.Wqkv"
    )
    by_distance = mpt_slopes(heads)

    def layer(n: TensorNames, i: int) -> Ops:
        first = _sloped(attention(n, s, style, "h", "a"), by_distance)
        second = plain(n, ("ffn.up_proj", "ffn.down_proj"), s, "gelu", "h", "m", bias=False)
        norms = [norm.op(n, name, s.hidden, "x", "h") for name in ("norm_1", "norm_2")]
        return sequential(Branch(first, "a", norms[0]), Branch(second, "m", norms[1]))

    ends = EndsStyle(tied=True, embed="transformer.wte", norm="transformer.norm_f", layers="transformer.blocks")
    return with_clip(assemble(f, s, norm, rope, [], ends, layer), clip)


def bloom_slopes(heads: int) -> tuple[float, ...]:
    """2^(-8 i / n), i from 1 on, n being the largest power of two up to `heads`; behind these every other one of 2 n."""
    whole = 1 << heads.bit_length() - 1
    more = _powers(2 * whole)[: 2 * (heads - whole) : 2]
    return (*_powers(whole), *more)


def mpt_slopes(heads: int) -> tuple[float, ...]:
    """2^(-8 i / n), i from 1 on, n being the least power of two from `heads` on; where there are more than heads, those with
    even i come first."""
    found = _powers(1 << (heads - 1).bit_length())
    return found if len(found) == heads else (*found[1::2], *found[::2])[:heads]


def _powers(count: int) -> tuple[float, ...]:
    """In double by the C library, whose last bits differ from one to the other: rounded to fp32 they are the same."""
    return tuple(2.0 ** (-_BIAS_MAX * i / count) for i in range(1, count + 1))


def _sloped(ops: Ops, by_distance: tuple[float, ...]) -> Ops:
    return tuple(replace(op, slopes=by_distance) if isinstance(op, Attention) else op for op in ops)


def _attention_fields(f: Fields) -> tuple[float | None, float | None]:
    """What scores of mpt are multiplied by, None for the usual, and the limit of queries, keys and values, if there is one.
    Raises ModelError for what is not computed."""
    given = f.raw("attn_config", {})
    if not isinstance(given, dict):
        raise f.refuse("attn_config", "an object is needed")
    inner = Fields(given, f"{f.where}: attn_config")
    inner.ignore("attn_impl", "attn_pdrop", *_MPT_ROTARY)
    for name, value in (("alibi", True), ("alibi_bias_max", _BIAS_MAX), ("attn_type", "multihead_attention")):
        inner.only(name, value)
    for name in ("attn_uses_sequence_id", "prefix_lm", "qk_gn", "qk_ln", "rope"):
        inner.only(name, False)
    inner.only("sliding_window_size", -1)
    scale = inner.optional("softmax_scale")
    clip = inner.optional("clip_qkv") if inner.raw("clip_qkv") else None  # 0 is none
    inner.finish()
    return scale, clip
