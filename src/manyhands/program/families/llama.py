"""Recipes of dense families with a norm before attention and one before a gated block: llama and its kin."""

from typing import Final

from manyhands.program.blocks import (
    AttentionStyle,
    NormStyle,
    Ops,
    Sizes,
    TensorNames,
    attention,
    before_each,
    gated,
    head_scale,
    plain,
    sliding,
    windows,
)
from manyhands.program.ends import EndsStyle, assemble, with_query_scale
from manyhands.program.fields import Fields
from manyhands.program.ops import Program
from manyhands.program.rope import RopeReader

_CWM: Final = {
    "rope_type": "llama3",
    "rope_theta": 1000000.0,
    "factor": 16.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
}
_MINISTRAL3 = {
    "rope_type": "yarn",
    "rope_theta": 1000000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}

# Fields of hunyuan's published configs: ids, sharing of caches (switched off), media, pooling.
HUNYUAN_UNUSED: Final = tuple(
    """
    anyres_pooling_size anyres_vit_max_image_size anyres_vit_two_views cla_share_factor class_num dense_list eod_token_id
    im_end_id im_newline_id im_start_id image_token_id mask_init_id num_media_embeds org_vocab_size pad_id pool_type
    skip_cls_token text_end_id text_start_id video_end_id video_start_id vit_input_resolution vit_mapping_type
    vit_norm_type vit_patch vit_path vit_remove_prenorm vit_token vit_type vit_used_rms_norm xdrope_section
    """.split()
)


def usual(
    f: Fields,
    s: Sizes,
    rope: RopeReader,
    styles: list[AttentionStyle],
    ends: EndsStyle,
    *,
    eps: float = 1e-6,
    bias: bool = False,
    block: str = "mlp",
    fused: str | None = None,
    down: str = "down_proj",
    partial: bool = False,
    scale: float = 1.0,
) -> Program:
    """A family of usual layers, with one style of attention a layer."""
    norm, act = NormStyle("rms", f.number("rms_norm_eps", eps)), f.activation()

    def layer(n: TensorNames, i: int) -> Ops:
        body = gated(n, block, s.hidden, s.inner, act, "h", "m", bias=bias, fused=fused, down_name=down)
        return before_each(n, s, norm, attention(n, s, styles[i], "h", "a"), body, scale)

    return assemble(f, s, norm, rope, [rope.plain(s.head, partial=partial)], ends, layer)


def llama(f: Fields) -> Program:
    """The plainest of these families. In GGUF files the rows of q and k are ordered for pairs that turn."""
    s, bias = Sizes.read(f, kv=False), f.flag("attention_bias")
    f.only("is_llama_config", True)  # these two are in the configs of SmolLM
    f.only("rope_interleaved", False)
    style = AttentionStyle(head_scale(s.head), pairs=f.stored("interleaved_rope"), bias=bias, out_bias=bias)
    return usual(f, s, RopeReader(f), [style] * s.layers, EndsStyle(), bias=f.flag("mlp_bias"))


def mistral(f: Fields) -> Program:
    """A window in every layer, or in those that layer_types names."""
    s, window = Sizes.read(f), f.optional_count("sliding_window", 4096)
    found = windows(f, s.layers, sliding(s.layers, () if window else range(s.layers)), window)
    styles = [AttentionStyle(head_scale(s.head), window=w) for w in found]
    return usual(f, s, RopeReader(f), styles, EndsStyle())


def ministral(f: Fields) -> Program:
    """What transformers calls a mistral with layer_types."""
    return mistral(f)


def ministral3(f: Fields) -> Program:
    """mistral with yarn, whose queries are scaled by their positions. Rotary fields without a base have 10000, as in
    transformers; the ones that are assumed where there are none have their own."""
    s = Sizes.read(f, head=128)
    f.assume(rope_parameters=_MINISTRAL3)
    window, pairs = f.optional_count("sliding_window"), f.stored("interleaved_rope")
    style = AttentionStyle(head_scale(s.head), pairs=pairs, window=window)
    rope = RopeReader(f, growing=True)
    return with_query_scale(usual(f, s, rope, [style] * s.layers, EndsStyle(), eps=1e-5), rope.query_scale())


def qwen_windows(f: Fields, layers: int) -> list[int | None]:
    """qwen's windows: from layer max_window_layers on, if switched on at all."""
    wanted, first = f.flag("use_sliding_window"), f.count("max_window_layers", 28, low=0)
    window = f.optional_count("sliding_window", 4096) if wanted else None
    f.ignore("sliding_window")
    default = sliding(layers, range(first)) if window else ["full_attention"] * layers
    return windows(f, layers, default, window)


def qwen2(f: Fields) -> Program:
    """Biases of q, k and v."""
    s = Sizes.read(f)
    styles = [AttentionStyle(head_scale(s.head), bias=True, window=w) for w in qwen_windows(f, s.layers)]
    return usual(f, s, RopeReader(f), styles, EndsStyle())


def qwen3(f: Fields) -> Program:
    """Norms of heads."""
    s, bias = Sizes.read(f, head=128), f.flag("attention_bias")
    norm = NormStyle("rms", f.number("rms_norm_eps", 1e-6))
    found = qwen_windows(f, s.layers)
    styles = [AttentionStyle(head_scale(s.head), bias=bias, out_bias=bias, head_norm=norm, window=w) for w in found]
    return usual(f, s, RopeReader(f), styles, EndsStyle())


def phi3(f: Fields) -> Program:
    """Fused tensors; a part of a head may turn; original_max_position_embeddings stands outside of the rotary fields."""
    s = Sizes.read(f, kv=False)
    window = f.optional_count("sliding_window")
    f.only("full_attn_mod", 1)  # these three are in the configs of Phi-4-mini
    f.only("interpolate_factor", 1)
    f.only("lm_head_bias", False)
    style = AttentionStyle(head_scale(s.head), fused="self_attn.qkv_proj", window=window)
    rope = RopeReader(f, fraction=f.number("partial_rotary_factor", 1.0), original=4096)
    return usual(f, s, rope, [style] * s.layers, EndsStyle(), eps=1e-5, fused="gate_up_proj", partial=True)


def smollm3(f: Fields) -> Program:
    """Some layers without positions; windows only there, if at all."""
    s, bias, pairs = Sizes.read(f), f.flag("attention_bias"), f.stored("interleaved_rope")
    every = f.count("no_rope_layer_interval", 4)
    turns = f.whole_numbers("no_rope_layers") or [int((i + 1) % every != 0) for i in range(s.layers)]
    if len(turns) != s.layers:
        raise f.refuse("no_rope_layers", f"a switch for each of the {s.layers} layers is needed")
    wanted = f.flag("use_sliding_window") and f.has("sliding_window")
    window = f.count("sliding_window") if wanted else None
    f.ignore("sliding_window", "max_window_layers")
    found = windows(f, s.layers, sliding(s.layers, [i for i in range(s.layers) if turns[i] or not wanted]), window)
    styles = [
        AttentionStyle(head_scale(s.head), 0 if turn else None, pairs, bias=bias, out_bias=bias, window=w)
        for turn, w in zip(turns, found, strict=True)
    ]
    return usual(f, s, RopeReader(f, theta=2000000.0), styles, EndsStyle(tied=True), bias=f.flag("mlp_bias"))


def granite(f: Fields) -> Program:
    """Four multipliers."""
    s, bias = Sizes.read(f, kv=False), f.flag("attention_bias")
    style = AttentionStyle(
        f.number("attention_multiplier", 1.0), pairs=f.stored("interleaved_rope"), bias=bias, out_bias=bias
    )
    scale = f.number("residual_multiplier", 1.0)
    return usual(f, s, RopeReader(f), [style] * s.layers, granite_ends(f), bias=f.flag("mlp_bias"), scale=scale)


def granite_ends(f: Fields) -> EndsStyle:
    """Two of the multipliers."""
    return EndsStyle(embed_scale=f.number("embedding_multiplier", 1.0), scale=1.0 / f.number("logits_scaling", 1.0))


def ernie4_5(f: Fields) -> Program:
    """Pairs turn; one switch for all biases."""
    s, bias = Sizes.read(f, head=128), f.flag("use_bias")
    style = AttentionStyle(head_scale(s.head), pairs=True, bias=bias, out_bias=bias)
    rope = RopeReader(f, theta=500000.0)
    return usual(f, s, rope, [style] * s.layers, EndsStyle(tied=True), eps=1e-5, bias=bias)


def seed_oss(f: Fields) -> Program:
    """A switch of its own for the bias behind attention."""
    s, bias = Sizes.read(f, head=128), f.flag("attention_bias", True)
    style = AttentionStyle(head_scale(s.head), bias=bias, out_bias=f.flag("attention_out_bias"))
    return usual(f, s, RopeReader(f), [style] * s.layers, EndsStyle(), bias=f.flag("mlp_bias"))


def glm(f: Fields) -> Program:
    """Pairs of the first half of a head turn; fused gate and up. Some GGUF files have one tensor for q, k and v."""
    s, bias = Sizes.read(f, head=128), f.flag("attention_bias", True)
    fused = "self_attn.qkv_proj" if f.stored("qkv_by_part") else None
    style = AttentionStyle(head_scale(s.head), pairs=True, bias=bias, fused=fused)
    rope = RopeReader(f, fraction=f.number("partial_rotary_factor", 0.5))
    return usual(f, s, rope, [style] * s.layers, EndsStyle(), eps=1.5625e-07, fused="gate_up_proj", partial=True)


def helium(f: Fields) -> Program:
    """Pairs turn."""
    s = Sizes.read(f, head=128)
    if s.heads * s.head != s.hidden:
        raise f.refuse("head_dim", f"hidden_size / num_attention_heads = {s.hidden / s.heads:g} is needed")
    style = AttentionStyle(head_scale(s.head), pairs=True, bias=f.flag("attention_bias"))
    rope = RopeReader(f, theta=100000.0)
    return usual(f, s, rope, [style] * s.layers, EndsStyle(), eps=1e-8, bias=f.flag("mlp_bias"))


def arcee(f: Fields) -> Program:
    """A plain block with squared relu."""
    s, act, bias = Sizes.read(f, kv=False), f.activation("hidden_act", "relu2"), f.flag("attention_bias")
    norm, rope, block_bias = NormStyle("rms", f.number("rms_norm_eps", 1e-5)), RopeReader(f), f.flag("mlp_bias")
    style = AttentionStyle(head_scale(s.head), pairs=f.stored("interleaved_rope"), bias=bias, out_bias=bias)

    def layer(n: TensorNames, i: int) -> Ops:
        block = plain(n, ("mlp.up_proj", "mlp.down_proj"), s, act, "h", "m", bias=block_bias)
        return before_each(n, s, norm, attention(n, s, style, "h", "a"), block)

    return assemble(f, s, norm, rope, [rope.plain(s.head)], EndsStyle(), layer)


def cwm(f: Fields) -> Program:
    """Windows in three of four layers."""
    f.assume(rope_parameters=_CWM)
    s = Sizes.read(f, head=128)
    found = windows(f, s.layers, sliding(s.layers, range(0, s.layers, 4)), f.optional_count("sliding_window", 8192))
    styles = [AttentionStyle(head_scale(s.head), window=w) for w in found]
    rope = RopeReader(f, theta=1000000.0)
    return usual(f, s, rope, styles, EndsStyle(), eps=1e-5, bias=f.flag("mlp_bias"))


def internlm3(f: Fields) -> Program:
    """llama with one switch for all biases, which has two names of its own."""
    f.assume(num_key_value_heads=2)
    s = Sizes.read(f, kv=False, head=128)
    names = "qkv_bias", "attention_bias", "bias", "mlp_bias"
    bias = any(f.flag(name) for name in names)
    for name in names:
        f.only(name, *((bias,) if f.has(name) else (False,)))
    style = AttentionStyle(head_scale(s.head), bias=bias, out_bias=bias)
    return usual(f, s, RopeReader(f), [style] * s.layers, EndsStyle(), eps=1e-5, bias=bias)


def iquestcoder(f: Fields) -> Program:
    """llama by another name."""
    f.assume(num_key_value_heads=8)
    s, bias = Sizes.read(f, kv=False, head=128), f.flag("attention_bias")
    f.only("clip_qkv", None)
    f.only("use_sliding_window", False)
    f.ignore("max_window_layers", "sliding_window")
    style = AttentionStyle(head_scale(s.head), bias=bias, out_bias=bias)
    return usual(f, s, RopeReader(f), [style] * s.layers, EndsStyle(), eps=1e-5, bias=f.flag("mlp_bias"))


def hunyuan_v1_dense(f: Fields) -> Program:
    """Heads are normed behind the rotary embedding."""
    s = Sizes.read(f, kv=False)
    style, _, rope = hunyuan_attention(f, s)
    return usual(f, s, rope, [style] * s.layers, EndsStyle(), eps=1e-5)


def hunyuan_attention(f: Fields, s: Sizes) -> tuple[AttentionStyle, NormStyle, RopeReader]:
    """Attention, norms and rotary fields of both families; refuses what their published configs may say otherwise."""
    f.only("attention_head_dim", s.head)
    f.only("norm_type", "rms")
    for name in ("position_embedding_xdrope", "use_cla", "add_classification_head"):
        f.only(name, False)
    for name in ("use_qk_norm", "use_rotary_pos_emb"):
        f.only(name, True)
    f.ignore(*HUNYUAN_UNUSED)
    norm, bias = NormStyle("rms", f.number("rms_norm_eps", 1e-5)), f.flag("attention_bias")
    names = ("self_attn.query_layernorm", "self_attn.key_layernorm")
    pairs = f.stored("interleaved_rope")
    style = AttentionStyle(
        head_scale(s.head), pairs=pairs, bias=bias, out_bias=bias, head_norm=norm, norm_names=names, norm_last=True
    )
    return style, norm, RopeReader(f, stretched=True)


def nanbeige(f: Fields) -> Program:
    """llama whose layers are gone through several times, with the last norm in between. Read of GGUF files, where layers that
    are gone through again are layers of their own."""
    if not f.stored("unrolled"):
        raise f.refuse("model_type", "which is read of GGUF files alone: take one of the model")
    s, act, times = Sizes.read(f, kv=False), f.activation(), f.count("num_loops", 1)
    norm, rope = NormStyle("rms", f.number("rms_norm_eps", 1e-6)), RopeReader(f)
    each = s.layers // times if f.flag("skip_loop_final_norm") is False else s.layers
    style = AttentionStyle(head_scale(s.head), pairs=f.stored("interleaved_rope"))

    def layer(n: TensorNames, i: int) -> Ops:
        block = gated(n, "mlp", s.hidden, s.inner, act, "h", "m")
        ops = before_each(n, s, norm, attention(n, s, style, "h", "a"), block)
        return ops if i % each or not i else (norm.op(n, "loop_norm", s.hidden, "x", "x"), *ops)

    return assemble(f, s, norm, rope, [rope.plain(s.head)], EndsStyle(), layer)
