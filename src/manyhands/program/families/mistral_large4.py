"""The recipe of mistral_large4_text (Mistral Large 4): latent attention over the positions that an indexer chooses; queries of
both grow with their positions, each head by numbers of its own; learnt factors of rotary frequencies, and layers without
positions; mistral4's experts; soft-capped logits."""

from dataclasses import dataclass, replace
from typing import Final

from manyhands.program.blocks import Branch, NormStyle, Ops, Sizes, TensorNames, sequential
from manyhands.program.ends import EndsStyle, assemble
from manyhands.program.families.choices import FULL, with_choices
from manyhands.program.families.experts import listed_sparse, top_k
from manyhands.program.families.indexer import INDEXED, IndexStyle
from manyhands.program.families.latent import LatentSizes, indexers, latent_attention, latent_scale, sizes
from manyhands.program.families.llama4 import turning
from manyhands.program.families.shared import ExpertBlocks
from manyhands.program.fields import MOST_EXPERTS, Fields
from manyhands.program.ops import ExpertRouting, Layer, Product, Program, Rotary, ScaleHeads, Weight
from manyhands.program.rope import RopeReader

_YARN: Final = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 2048.0,
    "original_max_position_embeddings": 512,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "attention_factor": 1.0,
}
_ENDS: Final = EndsStyle(embed="tok_embeddings", norm="norm", head="output", layers="layers")
# What published checkpoints call parts of a layer, in the order in which they are replaced.
_PUBLISHED: Final = (
    ("self_attn.", "attention."),
    (".q_proj.", ".wq."),
    (".kv_a_proj_with_mqa.", ".wkv_a_with_mqa."),
    (".kv_a_layernorm.", ".kv_a_norm."),
    (".kv_b_proj.", ".wkv_b."),
    (".o_proj.", ".wo."),
    ("input_layernorm.", "attention_norm."),
    ("post_attention_layernorm.", "ffn_norm."),
    ("mlp.gate.", "gate."),
    ("mlp.experts.", "experts."),
    ("mlp.shared_experts.", "shared_experts."),
    ("mlp.", "feed_forward."),
    (".gate_proj.", ".w1."),
    (".down_proj.", ".w2."),
    (".up_proj.", ".w3."),
)


@dataclass(frozen=True, slots=True)
class _Index(IndexStyle):
    """An indexer whose queries come of "h" by a norm of its own, and grow; in some layers nothing turns."""

    hidden: int = 1
    turns: bool = True

    def late(self, n: TensorNames) -> Ops:
        path = "self_attn.indexer"
        norm = NormStyle("layer", self.eps, bias=True).op(n, f"{path}.q_input_norm", self.hidden, "h", "iq")
        queries = norm, Product("iq", (self.query(n, self.hidden),)), _grown(n, path, "iq", self.heads)
        return (*queries, self.key_norm(n), *(self.turned() if self.turns else ()))


def mistral_large4_text(f: Fields) -> Program:
    """Layers may use what the one before has chosen, as in GLM-5.2."""
    _defaults(f)
    s, norm, bias = sizes(f), NormStyle("rms", f.number("rms_norm_eps", 1e-5)), f.flag("attention_bias")
    z = LatentSizes.read(f, s, query_rank=None, rank=512, plain=64, rotary=64, value=128)
    turned = replace(z, norm=norm)
    unturned = replace(turned, plain=z.plain + z.rotary, rotary=0)
    rope, blocks, turns = RopeReader(f), _blocks(f, s), turning(f, s.layers)
    table, scale, kinds = rope.plain(z.rotary), latent_scale(rope, z.plain + z.rotary), indexers(f, s.layers)
    index = _index(f, s, z, rope)
    ends = replace(_ENDS, soft_cap=f.number("final_logit_softcapping", 30.0))

    def layer(names: TensorNames, i: int) -> Ops:
        n, own = replace(names, rename=_published), replace(index, turns=turns[i]) if kinds[i] == FULL else None
        grown, widths = (_grown(n, "self_attn", "q", s.heads),), turned if turns[i] else unturned
        first = latent_attention(n, s, widths, scale, pairs=True, bias=bias, index=own, turns=turns[i], grown=grown)
        return sequential(
            Branch(first, "a", norm.op(n, "input_layernorm", s.hidden, "x", "h")), blocks.branch(n, s, norm, i)
        )

    program = with_choices(f, assemble(f, s, norm, rope, [table], ends, layer), kinds)
    return _with_exponents(program, z.rotary // 2)


def _defaults(f: Fields) -> None:
    f.rename(n_routed_experts="num_local_experts")
    f.assume(max_position_embeddings=1 << 20, rope_parameters=_YARN, index_n_heads=32, moe_intermediate_size=6144)
    f.only("q_lora_rank", None)


def _published(name: str) -> str:
    for usual, published in _PUBLISHED:
        name = name.replace(usual, published)
    return name


def _grown(n: TensorNames, path: str, register: str, heads: int) -> ScaleHeads:
    """Queries of some heads, by their positions."""
    return ScaleHeads(register, *(n.vector(f"{path}.ssmax_scaling.{part}", heads) for part in ("s", "b")))


def _with_exponents(program: Program, frequencies: int) -> Program:
    """A program all of whose rotary embeddings have the learnt factors of the checkpoint (LeRoPE)."""
    alpha = Weight("lerope.alpha", (frequencies,))
    layers = (
        tuple(replace(op, exponents=alpha) if isinstance(op, Rotary) else op for op in layer.ops)
        for layer in program.layers
    )
    return replace(program, layers=tuple(map(Layer, layers)))


def _index(f: Fields, s: Sizes, z: LatentSizes, rope: RopeReader) -> _Index:
    """Refuses layers that share latents: those of another may be on another node."""
    f.per_layer("layer_types", s.layers, [INDEXED[0]] * s.layers, INDEXED)
    own = list(range(s.layers))
    if f.raw("kv_source_layers", own) != own:
        raise f.refuse(
            "kv_source_layers", f"only 0 to {s.layers - 1} in order is supported: latents of each layer's own"
        )
    return replace(_Index.read(f, z.rotary, rope.context, pairs=True), hidden=s.hidden)


def _blocks(f: Fields, s: Sizes) -> ExpertBlocks:
    """A softmax over all experts, in one group."""
    f.only("n_group", 1)
    f.only("topk_group", 1)
    count, scale = f.count("n_routed_experts", 128, low=2, high=MOST_EXPERTS), f.number("routed_scaling_factor", 1.0)
    route = ExpertRouting("r", "routes", count, top_k(f, count, 4), "softmax", True, scale)
    return ExpertBlocks.read(f, route, listed_sparse(f, s.layers, f.count("first_k_dense_replace", 1, low=0)))
