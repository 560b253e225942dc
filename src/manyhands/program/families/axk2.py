"""The recipe of axk2: deepseek_v32 whose norms before attention and experts are gated, as is what attention gives."""

from dataclasses import replace

from manyhands.program.blocks import Branch, NormStyle, Ops, TensorNames, sequential
from manyhands.program.ends import EndsStyle, assemble
from manyhands.program.families.axk1 import sparse
from manyhands.program.families.experts import top_k
from manyhands.program.families.indexer import INDEXED, IndexStyle
from manyhands.program.families.latent import LatentSizes, latent_attention, latent_scale, sizes
from manyhands.program.families.shared import ExpertBlocks
from manyhands.program.fields import MOST_EXPERTS, Fields
from manyhands.program.ops import ExpertRouting, Gate, Gating, Part, Product, Program
from manyhands.program.rope import RopeReader


def axk2(f: Fields) -> Program:
    """Gates of norms come by way of few columns; queries and gates of heads of the same tensor."""
    f.assume(index_n_heads=16)
    s, norm, bias = sizes(f), NormStyle("rms", f.number("rms_norm_eps", 1e-6)), f.flag("attention_bias")
    z = LatentSizes.read(f, s, query_rank=384, rank=128, plain=64, rotary=32, value=64)
    if z.query_rank is None:
        raise f.refuse("q_lora_rank", "a whole number is needed: queries of this family come from a latent")
    rope, blocks, few = RopeReader(f), _blocks(f, sparse(f, s)), f.count("gated_norm_rank", 16, high=1 << 14)
    index, scale = IndexStyle.read(f, z.rotary, rope.context, pairs=False), latent_scale(rope, z.plain + z.rotary)
    f.per_layer("layer_types", s.layers, [INDEXED[0]] * s.layers, INDEXED)
    for name in ("attention_output_gate", "gated_norm", "rope_interleave"):  # published, not read by transformers
        f.only(name, True)

    def gated(n: TensorNames, name: str, first: Branch) -> Branch:
        """A branch whose norm is gated by what comes of it."""
        down, up = (
            n.linear(f"{name}.W_{way}", *shape) for way, shape in (("down", (few, s.hidden)), ("up", (s.hidden, few)))
        )
        gate = Product("h", (Part("n", down, activation="silu"),)), Product("n", (Part("n", up),))
        body = (*gate, Gate("n", "h", "h", Gating("sigmoid")), *first.body)
        return replace(first, before=norm.op(n, f"{name}.norm", s.hidden, "x", "h"), body=body)

    def layer(n: TensorNames, i: int) -> Ops:
        gate = None, Gate("g", "a", "a", Gating("sigmoid"))
        first = Branch(latent_attention(n, s, z, scale, pairs=True, bias=bias, index=index, gate=gate), "a")
        second = blocks.branch(n, s, norm, i)
        second = gated(n, "post_attention_layernorm", second) if blocks.sparse[i] else second
        return sequential(gated(n, "input_layernorm", first), second)

    return assemble(f, s, norm, rope, [rope.plain(z.rotary)], EndsStyle(), layer)


def _blocks(f: Fields, are_sparse: list[bool]) -> ExpertBlocks:
    """deepseek_v3's, of one group: experts of groups that drop out rank as zeros in transformers, not behind all others."""
    f.rename(n_routed_experts="num_local_experts")
    f.only("scoring_func", "sigmoid")
    f.only("topk_method", "noaux_tc")
    count, scale = f.count("n_routed_experts", 128, high=MOST_EXPERTS), f.number("routed_scaling_factor", 2.5)
    groups = f.count("n_group", 1, high=count)
    if count % groups or (f.has("n_group") and count // groups < 2):
        raise f.refuse("n_group", f"groups of at least two of the {count} experts are needed")
    if f.raw("topk_group") != f.raw("n_group"):  # one of them alone is refused by transformers
        raise f.refuse(
            "topk_group", f"and n_group is {f.raw('n_group')!r:.40}: the same is needed, no groups may drop out"
        )
    normalise, inner = f.flag("norm_topk_prob", True), f.count("moe_intermediate_size", 512, high=1 << 20)
    route = ExpertRouting("r", "routes", count, top_k(f, count, 8), "sigmoid", normalise, scale)
    return ExpertBlocks(f.activation(), route, inner, f.count("n_shared_experts", 1, high=4096), are_sparse)
