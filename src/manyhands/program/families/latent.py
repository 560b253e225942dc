"""Recipes of families with latent attention: deepseek_v2, deepseek_v3, kimi_k2, glm4_moe_lite, minicpm3, youtu; and of those
whose indexer chooses positions, deepseek_v32, glm_moe_dsa."""

import math
from dataclasses import dataclass

from manyhands.program.blocks import (
    Branch,
    NormStyle,
    Ops,
    Sizes,
    TensorNames,
    before_each,
    gated,
    head_scale,
    sequential,
)
from manyhands.program.ends import EndsStyle, assemble
from manyhands.program.families.experts import top_k
from manyhands.program.families.shared import ExpertBlocks, from_layer, grouped_route
from manyhands.program.fields import Fields
from manyhands.program.ops import ExpertRouting, LatentAttention, Product, Program, Rotary, Rows, Weight
from manyhands.program.rope import RopeReader, yarn_scale

_LATENT_NORM = NormStyle("rms", 1e-6)  # of latents; transformers does not take the config's epsilon there


@dataclass(frozen=True, slots=True)
class LatentSizes:
    """Widths of latent attention. `query_rank` None: queries come from the hidden state directly."""

    query_rank: int | None
    rank: int
    plain: int  # columns of a head's query and key without position
    rotary: int
    value: int

    @classmethod
    def read(
        cls, f: Fields, s: Sizes, *, query_rank: int, rank: int, plain: int, rotary: int, value: int
    ) -> "LatentSizes":
        """With the family's defaults. Raises ModelError where heads would share keys."""
        f.only("num_key_value_heads", s.heads)
        out = cls(
            query_rank=f.optional_count("q_lora_rank", query_rank),
            rank=f.count("kv_lora_rank", rank, high=1 << 16),
            plain=f.count("qk_nope_head_dim", plain, high=1 << 14),
            rotary=f.count("qk_rope_head_dim", rotary, high=1 << 14),
            value=f.count("v_head_dim", value, high=1 << 14),
        )
        f.only("qk_head_dim", out.plain + out.rotary)
        f.ignore("head_dim")  # transformers sets it to qk_rope_head_dim, whatever the config says
        return out


def sizes(f: Fields) -> Sizes:
    """Sizes of a config in which head_dim says nothing."""
    hidden, heads = f.count("hidden_size", high=1 << 17), f.count("num_attention_heads", high=4096)
    return Sizes(
        layers=f.count("num_hidden_layers", high=1024),
        hidden=hidden,
        vocab=f.count("vocab_size", high=1 << 22),
        heads=heads,
        kv_heads=heads,
        head=max(1, hidden // heads),
        inner=f.count("intermediate_size", high=1 << 20),
    )


def latent_attention(
    n: TensorNames, s: Sizes, z: LatentSizes, scale: float, *, pairs: bool, bias: bool, split: bool = False
) -> Ops:
    """From "h" to "a": queries (by way of a latent of their own, if any), the cached latent and rotary key."""
    width, down = z.plain + z.rotary, "self_attn.kv_a_proj_with_mqa"
    latent = n.part("c", down, z.rank + z.rotary, s.hidden, bias, Rows(0, z.rank))
    rotary = n.part("r", down, z.rank + z.rotary, s.hidden, bias, Rows(z.rank, z.rotary))
    query: Ops = (Product("h", (n.part("q", "self_attn.q_proj", s.heads * width, s.hidden, False), latent, rotary)),)
    if z.query_rank is not None:
        query = (
            Product("h", (n.part("q", "self_attn.q_a_proj", z.query_rank, s.hidden, bias), latent, rotary)),
            _LATENT_NORM.op(n, "self_attn.q_a_layernorm", z.query_rank, "q", "q"),
            Product("q", (n.part("q", "self_attn.q_b_proj", s.heads * width, z.query_rank, False),)),
        )
    key, value = _keys_values(n, s, z, split)
    attend = LatentAttention(
        query="q",
        latent="c",
        rotary="r",
        target="a",
        heads=s.heads,
        width=z.plain,
        rotary_width=z.rotary,
        value_width=z.value,
        rank=z.rank,
        scale=scale,
        key_weight=key,
        value_weight=value,
    )
    return (
        *query,
        _LATENT_NORM.op(n, "self_attn.kv_a_layernorm", z.rank, "c", "c"),
        Rotary("q", s.heads, width, 0, offset=z.plain, pairs=pairs),
        Rotary("r", 1, z.rotary, 0, pairs=pairs),
        attend,
        Product("a", (n.part("a", "self_attn.o_proj", s.hidden, s.heads * z.value, bias),)),
    )


def _keys_values(n: TensorNames, s: Sizes, z: LatentSizes, split: bool) -> tuple[Weight, Weight]:
    """What makes keys and values of a latent: rows of one tensor, head by head; `split`: in two, those of keys transposed."""
    if split:
        key, value = f"{n.path}self_attn.k_b_proj.weight", f"{n.path}self_attn.v_b_proj.weight"
        return (
            Weight(key, (s.heads, z.rank, z.plain), transposed=True, stacked=True),
            Weight(value, (s.heads, z.value, z.rank), stacked=True),
        )
    stride = z.plain + z.value
    name, stored = f"{n.path}self_attn.kv_b_proj.weight", (s.heads * stride, z.rank)
    return (
        Weight(name, stored, Rows(0, z.plain, stride, s.heads)),
        Weight(name, stored, Rows(z.plain, z.value, stride, s.heads)),
    )


def latent_scale(rope: RopeReader, width: int) -> float:
    """1 / sqrt(width), times the square of yarn's scale where mscale_all_dim asks for it."""
    mscale, factor = rope.attention_scale()
    return head_scale(width) * (yarn_scale(factor, mscale) ** 2 if mscale else 1.0)


def deepseek_v3(f: Fields) -> Program:
    """Experts in groups, chosen with a correction; one block of shared experts; the first layers dense."""
    f.assume(first_k_dense_replace=3)
    s = sizes(f)
    return _deepseek(
        f, s, ExpertBlocks.read(f, grouped_route(f), from_layer(f, s)), pairs=f.flag("rope_interleave", True)
    )


def kimi_k2(f: Fields) -> Program:
    """deepseek_v3 by another name, with its defaults."""
    return deepseek_v3(f)


def glm4_moe_lite(f: Fields) -> Program:
    """deepseek_v3 with defaults of its own; a list says which layers are dense (GLM-4.7-Flash)."""
    f.assume(q_lora_rank=768, qk_nope_head_dim=192, v_head_dim=256, rms_norm_eps=1e-5, n_group=1, topk_group=1)
    f.assume(n_routed_experts=64, moe_intermediate_size=1536, num_experts_per_tok=4, routed_scaling_factor=1.8)
    s = sizes(f)
    default = ["dense", *["sparse"] * (s.layers - 1)]
    kinds = f.per_layer("mlp_layer_types", s.layers, default, ("dense", "sparse"))
    f.only("first_k_dense_replace", [*kinds, "sparse"].index("sparse"))  # published beside it, not read by transformers
    blocks = ExpertBlocks.read(f, grouped_route(f), [kind == "sparse" for kind in kinds])
    return _deepseek(f, s, blocks, pairs=f.flag("rope_interleave", True))


def deepseek_v2(f: Fields) -> Program:
    """deepseek_v3 with the softmax of all experts, neither grouped nor corrected."""
    f.assume(n_routed_experts=64, moe_intermediate_size=1407, n_shared_experts=2, first_k_dense_replace=0)
    f.only("topk_method", "greedy")
    f.only("scoring_func", "softmax")
    f.only("norm_topk_prob", False)
    f.ignore("n_group", "topk_group")  # of the other method
    s, count, scale = sizes(f), f.count("n_routed_experts", high=4096), f.number("routed_scaling_factor", 1.0)
    route = ExpertRouting("r", "routes", count, top_k(f, count, None), "softmax", normalise=False, scale=scale)
    return _deepseek(f, s, ExpertBlocks.read(f, route, from_layer(f, s)), pairs=True)


def deepseek_v32(f: Fields) -> Program:
    """deepseek_v3 whose attention goes over at most index_topk positions that an indexer chooses (DeepSeek-V3.2)."""
    f.only("indexer_rope_interleave", False)
    return _indexed(f)


def glm_moe_dsa(f: Fields) -> Program:
    """deepseek_v32 with sizes of its own, whose indexer turns pairs (GLM-5)."""
    f.assume(q_lora_rank=2048, qk_nope_head_dim=192, v_head_dim=256, rms_norm_eps=1e-5, n_group=1, topk_group=1)
    f.only("indexer_rope_interleave", True)
    f.ignore("indexer_types", "index_topk_pattern", "index_topk_freq", "index_skip_topk_offset")
    return _indexed(f)


def _indexed(f: Fields) -> Program:
    """Held to the context in which the indexer chooses all positions."""
    s = sizes(f)
    dense = min(f.count("first_k_dense_replace", 3, low=0), s.layers)
    default = ["dense"] * dense + ["sparse"] * (s.layers - dense)
    kinds = f.per_layer("mlp_layer_types", s.layers, default, ("dense", "sparse"))
    f.per_layer("layer_types", s.layers, ["indexed_attention"] * s.layers, ("indexed_attention",))
    f.only("rope_interleave", True)
    f.ignore("index_head_dim", "index_n_heads")
    blocks = ExpertBlocks.read(f, grouped_route(f), [kind == "sparse" for kind in kinds])
    return _deepseek(f, s, blocks, pairs=True, most=f.count("index_topk", 2048))


def _deepseek(f: Fields, s: Sizes, blocks: ExpertBlocks, *, pairs: bool, most: int | None = None) -> Program:
    """`most`: positions to which the model is held."""
    z = LatentSizes.read(f, s, query_rank=1536, rank=512, plain=128, rotary=64, value=128)
    norm, bias, rope = NormStyle("rms", f.number("rms_norm_eps", 1e-6)), f.flag("attention_bias"), RopeReader(f)
    scale, split = latent_scale(rope, z.plain + z.rotary), f.stored("split_kv_b")
    rope.context = min(rope.context, most or rope.context)

    def layer(n: TensorNames, i: int) -> Ops:
        first = latent_attention(n, s, z, scale, pairs=pairs, bias=bias, split=split)
        before = norm.op(n, "input_layernorm", s.hidden, "x", "h")
        return sequential(Branch(first, "a", before), blocks.branch(n, s, norm, i))

    return assemble(f, s, norm, rope, [rope.plain(z.rotary)], EndsStyle(), layer)


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
