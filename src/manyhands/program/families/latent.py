"""Recipes of families with latent attention: deepseek_v2, deepseek_v3, kimi_k2, glm4_moe_lite; and of those whose indexer
chooses positions, deepseek_v32, glm_moe_dsa."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from manyhands.program.blocks import (
    Branch,
    NormStyle,
    Ops,
    Sizes,
    TensorNames,
    head_scale,
    sequential,
)
from manyhands.program.ends import EndsStyle, assemble
from manyhands.program.families.choices import FULL, SHARED, with_choices
from manyhands.program.families.experts import top_k
from manyhands.program.families.indexer import INDEXED, IndexStyle
from manyhands.program.families.shared import ExpertBlocks, from_layer, grouped_route
from manyhands.program.fields import MOST_EXPERTS, Fields
from manyhands.program.ops import (
    Copy,
    ExpertRouting,
    LatentAttention,
    Multiply,
    Op,
    Part,
    Product,
    Program,
    Rope,
    Rotary,
    Rows,
    Weight,
)
from manyhands.program.rope import RopeReader, yarn_scale

_LATENT_NORM = NormStyle("rms", 1e-6)  # of latents; transformers takes the config's epsilon there in few families


@dataclass(frozen=True, slots=True)
class LatentSizes:
    """Widths of latent attention, and the norm of latents. `query_rank` None: queries come from the hidden state directly."""

    query_rank: int | None
    rank: int
    plain: int  # columns of a head's query and key without position
    rotary: int
    value: int
    norm: NormStyle = _LATENT_NORM

    @classmethod
    def read(
        cls,
        f: Fields,
        s: Sizes,
        *,
        query_rank: int | None,
        rank: int,
        plain: int,
        rotary: int,
        value: int,
        kv: bool = True,
    ) -> "LatentSizes":
        """With the family's defaults. Raises ModelError where heads would share keys; `kv`: the family reads that."""
        f.only("num_key_value_heads", s.heads if kv else f.raw("num_key_value_heads"))
        out = cls(
            query_rank=f.optional_count("q_lora_rank", query_rank),
            rank=f.count("kv_lora_rank", rank, high=1 << 16),
            plain=f.count("qk_nope_head_dim", plain, high=1 << 14),
            rotary=f.count("qk_rope_head_dim", rotary, low=min(1, rotary), high=1 << 14),
            value=f.count("v_head_dim", value, high=1 << 14),
        )
        f.only("qk_head_dim", out.plain + out.rotary)
        f.ignore("head_dim")  # transformers sets it to qk_rope_head_dim, whatever the config says
        return out


def sizes(f: Fields, layers: str = "num_hidden_layers") -> Sizes:
    """Sizes of a config in which head_dim says nothing; `layers` counts the layers."""
    hidden, heads = f.count("hidden_size", high=1 << 17), f.count("num_attention_heads", high=4096)
    return Sizes(
        layers=f.count(layers, high=1024),
        hidden=hidden,
        vocab=f.count("vocab_size", high=1 << 22),
        heads=heads,
        kv_heads=heads,
        head=max(1, hidden // heads),
        inner=f.count("intermediate_size", high=1 << 20),
    )


def latent_attention(
    n: TensorNames,
    s: Sizes,
    z: LatentSizes,
    scale: float,
    *,
    pairs: bool,
    bias: bool,
    split: bool = False,
    index: IndexStyle | None = None,
    turns: bool = True,
    path: str = "self_attn",
    stretch: tuple[float, float] | None = None,
    grown: Ops = (),
    gate: tuple[Part | None, Op] | None = None,
    sinks: str | None = None,
    out: str = "o_proj",
    table: int = 0,
    window: int | None = None,
    key_norm: str | None = None,
) -> Ops:
    """From "h" to "a": queries (by way of a latent of their own, if any), the cached latent and rotary key. An `index` takes
    such queries. Without `turns` neither has a position. `stretch` multiplies queries, and normed latents; `grown` changes
    queries that have turned. `gate`: a product of "h", and what changes the result by it; without the product gates ("g")
    come as queries do. `table`: the number of the rotary embedding. `key_norm`: of the rotary key before it turns."""
    width, down = z.plain + z.rotary, f"{path}.kv_a_proj_with_mqa"
    latent = n.part("c", down, z.rank + z.rotary, s.hidden, bias, Rows(0, z.rank))
    rotary = n.part("r", down, z.rank + z.rotary, s.hidden, bias, Rows(z.rank, z.rotary))
    early: tuple[Part, ...] = (
        *((latent, rotary) if z.rotary else (latent,)),
        *(index.early(n, s) if index else ()),
        *((gate[0],) if gate and gate[0] else ()),
    )
    given = n.vector(sinks, s.heads) if sinks else None
    return (
        *_queries(n, s, z, path, bias, early, index, gate is not None and gate[0] is None),
        *(index.late(n) if index else ()),
        z.norm.op(n, f"{path}.kv_a_layernorm", z.rank, "c", "c"),
        *((Multiply("q", stretch[0], "q"), Multiply("c", stretch[1], "c")) if stretch else ()),
        *((z.norm.op(n, key_norm, z.rotary, "r", "r"),) if key_norm else ()),
        *((Rotary("q", s.heads, width, table, offset=z.plain, pairs=pairs),) if turns else ()),
        *((Rotary("r", 1, z.rotary, table, pairs=pairs),) if turns else ()),
        *grown,
        replace(_attend(s, z, scale, _keys_values(n, s, z, split, path), index), sinks=given, window=window),
        *((gate[1],) if gate else ()),
        Product("a", (n.part("a", f"{path}.{out}", s.hidden, s.heads * z.value, bias),)),
    )


def _attend(
    s: Sizes, z: LatentSizes, scale: float, weights: tuple[Weight, Weight], index: IndexStyle | None
) -> LatentAttention:
    """From "q", "c" and "r" to "a". `weights`: what makes keys, and values, of a latent."""
    widths = (s.heads, z.plain, z.rotary, z.value, z.rank)
    attend = LatentAttention("q", "c", "r", "a", *widths, scale, *weights)
    return attend if index is None else replace(attend, index=index.op(), rate=index.rate)


def _queries(
    n: TensorNames,
    s: Sizes,
    z: LatentSizes,
    path: str,
    bias: bool,
    early: tuple[Part, ...],
    index: IndexStyle | None,
    fused: bool,
) -> Ops:
    """From "h" to "q", with the other products `early` of "h"; those of an index too. `fused`: a head's query, and gates "g" of
    its values, are rows of one tensor, which reads the latent normed and, behind that, as it is."""
    outputs, rank = s.heads * (z.plain + z.rotary), z.query_rank
    if rank is None:
        return (Product("h", (n.part("q", f"{path}.q_proj", outputs, s.hidden, False), *early)),)
    first = (index.query(n, rank),) if index else ()
    down = Product("h", (n.part("q", f"{path}.q_a_proj", rank, s.hidden, bias), *early))
    norm = z.norm.op(n, f"{path}.q_a_layernorm", rank, "q", "q")
    if fused:
        head = z.plain + z.rotary
        each = {"q": Rows(0, head, head + z.value, s.heads), "g": Rows(head, z.value, head + z.value, s.heads)}
        shape = s.heads * (head + z.value), 2 * rank
        both = tuple(n.part(name, f"{path}.q_b_proj", *shape, False, rows) for name, rows in each.items())
        copies = Copy("q", "both", 0, rank, rank, 2 * rank), Copy("q", "both", 0, rank, 0)
        return (down, copies[0], norm, copies[1], *((Product("q", first),) if first else ()), Product("both", both))
    return (
        down,
        norm,
        Product("q", (*first, n.part("q", f"{path}.q_b_proj", outputs, rank, False))),
    )


def _keys_values(n: TensorNames, s: Sizes, z: LatentSizes, split: bool, path: str) -> tuple[Weight, Weight]:
    """What makes keys and values of a latent: rows of one tensor, head by head; `split`: in two, those of keys transposed."""
    if split:
        key, value = f"{n.path}{path}.k_b_proj.weight", f"{n.path}{path}.v_b_proj.weight"
        return (
            Weight(key, (s.heads, z.rank, z.plain), transposed=True, stacked=True),
            Weight(value, (s.heads, z.value, z.rank), stacked=True),
        )
    stride = z.plain + z.value
    name, stored = f"{path}.kv_b_proj", (s.heads * stride, z.rank)
    return (
        n.linear(name, *stored, Rows(0, z.plain, stride, s.heads)),
        n.linear(name, *stored, Rows(z.plain, z.value, stride, s.heads)),
    )


def latent_scale(rope: RopeReader, width: int) -> float:
    """1 / sqrt(width), times the square of yarn's scale where mscale_all_dim asks for it."""
    mscale, factor = rope.attention_scale()
    return head_scale(width) * (yarn_scale(factor, mscale) ** 2 if mscale else 1.0)


def deepseek_v3(f: Fields) -> Program:
    """Experts in groups, chosen with a correction; one block of shared experts; the first layers dense."""
    f.assume(first_k_dense_replace=3)
    s = sizes(f)
    return with_latents(
        f, s, ExpertBlocks.read(f, grouped_route(f), from_layer(f, s)), pairs=f.flag("rope_interleave", True)
    )


def kimi_k2(f: Fields) -> Program:
    """deepseek_v3 by another name, with its defaults."""
    return deepseek_v3(f)


def glm4_moe_lite(f: Fields) -> Program:
    """deepseek_v3 with defaults of its own; a list says which layers are dense (GLM-4.7-Flash)."""
    f.assume(q_lora_rank=768, qk_nope_head_dim=192, v_head_dim=256, rms_norm_eps=1e-5, n_group=1, topk_group=1)
    f.assume(n_routed_experts=64, moe_intermediate_size=1536, num_experts_per_tok=4, routed_scaling_factor=1.8)
    f.only("head_dim", f.count("qk_rope_head_dim", 64, high=1 << 14))  # another name of it in transformers
    s = sizes(f)
    default = ["dense", *["sparse"] * (s.layers - 1)]
    kinds = f.per_layer("mlp_layer_types", s.layers, default, ("dense", "sparse"))
    f.only("first_k_dense_replace", [*kinds, "sparse"].index("sparse"))  # published beside it, not read by transformers
    blocks = ExpertBlocks.read(f, grouped_route(f), [kind == "sparse" for kind in kinds])
    return with_latents(f, s, blocks, pairs=f.flag("rope_interleave", True))


def deepseek_v2(f: Fields) -> Program:
    """deepseek_v3 with the softmax of all experts, not corrected, in groups by another rule if in any."""
    f.assume(n_routed_experts=64, moe_intermediate_size=1407, n_shared_experts=2, first_k_dense_replace=0)
    s = sizes(f)
    return with_latents(f, s, ExpertBlocks.read(f, _softmax_route(f), from_layer(f, s)), pairs=True)


def _softmax_route(f: Fields) -> ExpertRouting:
    """Of DeepSeek-V2-Lite; in V2 itself experts lie in groups, of which those of the best experts stay."""
    f.only("topk_method", "greedy", "group_limited_greedy")
    f.only("scoring_func", "softmax")
    f.only("norm_topk_prob", False)
    count, scale = f.count("n_routed_experts", high=MOST_EXPERTS), f.number("routed_scaling_factor", 1.0)
    groups, best = 1, 1
    if f.raw("topk_method") == "group_limited_greedy":
        groups = f.count("n_group", high=count)
        best = f.count("topk_group", high=groups)
    f.ignore("n_group", "topk_group")  # of the other method
    if count % groups:
        raise f.refuse("n_group", f"a divisor of the {count} experts is needed")
    route = ExpertRouting("r", "routes", count, top_k(f, count // groups * best, None), "softmax", False, scale)
    return replace(route, groups=groups, top_groups=best, is_by_best=groups > 1)


def deepseek_v32(f: Fields) -> Program:
    """deepseek_v3 whose attention goes over at most index_topk positions that an indexer chooses (DeepSeek-V3.2)."""
    f.assume(index_n_heads=64)
    f.only("indexer_rope_interleave", False)
    return _indexed(f, pairs=False)


def glm_moe_dsa(f: Fields) -> Program:
    """deepseek_v32 with sizes of its own, whose indexer turns pairs (GLM-5). Layers may use what the one before has chosen."""
    f.assume(q_lora_rank=2048, qk_nope_head_dim=192, v_head_dim=256, rms_norm_eps=1e-5, n_group=1, topk_group=1)
    f.assume(index_n_heads=32)
    f.only("indexer_rope_interleave", True)
    f.ignore("index_share_for_mtp_iteration")
    return _indexed(f, pairs=True, choosing=indexers(f, f.count("num_hidden_layers", high=1024)))


def indexers(f: Fields, layers: int) -> list[str]:
    """Which layers have an indexer ("full"), and which use the choice of the one before ("shared")."""
    step, offset = f.count("index_topk_freq", 1, low=0), f.count("index_skip_topk_offset", 2, low=0)
    kinds = [SHARED if max(i - offset + 1, 0) % max(step, 1) else FULL for i in range(layers)]
    pattern = f.raw("index_topk_pattern", kinds)
    if not isinstance(pattern, str | list) or len(pattern) != layers:
        raise f.refuse("index_topk_pattern", f"F or S for each of the {layers} layers is needed")
    kinds = [{"F": FULL, "S": SHARED}.get(str(kind), str(kind)) for kind in pattern]
    if not set(kinds) <= {FULL, SHARED}:
        raise f.refuse("index_topk_pattern", f"F or S for each of the {layers} layers is needed")
    return f.per_layer("indexer_types", layers, kinds, (FULL, SHARED))


def _indexed(f: Fields, *, pairs: bool, choosing: Sequence[str] | None = None) -> Program:
    """`choosing`: as indexers() returns it; None: each layer has an indexer."""
    s, rope = sizes(f), RopeReader(f)
    dense = min(f.count("first_k_dense_replace", 3, low=0), s.layers)
    default = ["dense"] * dense + ["sparse"] * (s.layers - dense)
    kinds = f.per_layer("mlp_layer_types", s.layers, default, ("dense", "sparse"))
    f.per_layer("layer_types", s.layers, [INDEXED[0]] * s.layers, INDEXED)
    f.only("rope_interleave", True)
    f.only("moe_router_dtype", "float32")
    if f.is_null("q_lora_rank"):
        raise f.refuse("q_lora_rank", "a whole number is needed: the indexer's queries are made of that latent")
    blocks = ExpertBlocks.read(f, grouped_route(f), [kind == "sparse" for kind in kinds])
    index = IndexStyle.read(f, f.count("qk_rope_head_dim", 64, high=1 << 14), rope.context, pairs=pairs)
    return with_latents(f, s, blocks, pairs=True, rope=rope, index=index, choosing=choosing)


def with_latents(
    f: Fields,
    s: Sizes,
    blocks: ExpertBlocks,
    *,
    pairs: bool,
    rope: RopeReader | None = None,
    index: IndexStyle | None = None,
    table: Rope | None = None,
    choosing: Sequence[str] | None = None,
) -> Program:
    """A family of deepseek_v3's attention and blocks. `rope`: with the context that it holds to; `table`: of rotary keys;
    `choosing`: which layers have the index, if not all of them, as indexers() returns it."""
    z = LatentSizes.read(f, s, query_rank=1536, rank=512, plain=128, rotary=64, value=128)
    norm, bias, rope = NormStyle("rms", f.number("rms_norm_eps", 1e-6)), f.flag("attention_bias"), rope or RopeReader(f)
    scale, split, kinds = latent_scale(rope, z.plain + z.rotary), f.stored("split_kv_b"), choosing or [FULL] * s.layers

    def layer(n: TensorNames, i: int) -> Ops:
        own = index if kinds[i] == FULL else None
        first = latent_attention(n, s, z, scale, pairs=pairs, bias=bias, split=split, index=own)
        before = norm.op(n, "input_layernorm", s.hidden, "x", "h")
        return sequential(Branch(first, "a", before), blocks.branch(n, s, norm, i))

    return with_choices(f, assemble(f, s, norm, rope, [table or rope.plain(z.rotary)], EndsStyle(), layer), kinds)
