"""Recipes of dense families with latent attention: minicpm3, youtu."""

import math

from manyhands.program.blocks import NormStyle, Ops, TensorNames, before_each, gated
from manyhands.program.ends import EndsStyle, assemble
from manyhands.program.families.latent import LatentSizes, latent_attention, latent_scale, sizes
from manyhands.program.fields import Fields
from manyhands.program.ops import Program
from manyhands.program.rope import RopeReader


def youtu(f: Fields) -> Program:
    """Dense, with the attention of deepseek_v3."""
    s = sizes(f)
    z = LatentSizes.read(f, s, query_rank=1536, rank=512, plain=128, rotary=64, value=128)
    norm, act, bias = NormStyle("rms", f.number("rms_norm_eps", 1e-6)), f.activation(), f.flag("attention_bias")
    pairs, rope = f.flag("rope_interleave", True), RopeReader(f)
    f.ignore("embedding_initializer_range")
    scale = latent_scale(rope, z.plain + z.rotary)

    def layer(n: TensorNames, i: int) -> Ops:
        first = latent_attention(n, s, z, scale, pairs=pairs, bias=bias)
        return before_each(n, s, norm, first, gated(n, "mlp", s.hidden, s.inner, act, "h", "m"))

    return assemble(f, s, norm, rope, [rope.plain(z.rotary)], EndsStyle(tied=True), layer)


def minicpm3(f: Fields) -> Program:
    """Dense; scaled embedding, branches and logits."""
    s = sizes(f)
    z = LatentSizes.read(f, s, query_rank=768, rank=256, plain=64, rotary=32, value=max(1, s.hidden // s.heads))
    norm, act, bias = NormStyle("rms", f.number("rms_norm_eps", 1e-5)), f.activation(), f.flag("attention_bias")
    depth, base = f.optional("scale_depth", 1.4), f.optional("dim_model_base", 256.0)
    branch = 1.0 if depth is None else depth / math.sqrt(s.layers)
    rope, block_bias = RopeReader(f), f.flag("mlp_bias")
    scale = latent_scale(rope, z.plain + z.rotary)

    def layer(n: TensorNames, i: int) -> Ops:
        first = latent_attention(n, s, z, scale, pairs=False, bias=bias)
        block = gated(n, "mlp", s.hidden, s.inner, act, "h", "m", bias=block_bias)
        return before_each(n, s, norm, first, block, branch)

    ends = EndsStyle(
        tied=True,
        embed_scale=f.number("scale_emb", 12.0),
        round_scale=True,
        scale=1.0 if base is None else base / s.hidden,
    )
    return assemble(f, s, norm, rope, [rope.plain(z.rotary)], ends, layer)
