"""The recipe of mistral4: deepseek_v3's attention with a table of its own, and experts that softmaxes choose."""

from dataclasses import replace
from typing import Final

from manyhands.program.blocks import Sizes
from manyhands.program.ends import with_query_scale
from manyhands.program.families.experts import GATE_UP_DOWN, top_k
from manyhands.program.families.latent import LatentSizes, sizes, with_latents
from manyhands.program.families.shared import ExpertBlocks, from_layer
from manyhands.program.fields import MOST_EXPERTS, Fields
from manyhands.program.ops import ExpertRouting, Program, Rope
from manyhands.program.rope import RopeReader

_YARN: Final = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 128.0,
    "original_max_position_embeddings": 8192,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}


def mistral4(f: Fields) -> Program:
    """Yarn, queries that are scaled by their positions, experts that are stacked."""
    f.assume(q_lora_rank=1024, kv_lora_rank=256, qk_nope_head_dim=64, n_routed_experts=128, num_experts_per_tok=4)
    f.assume(first_k_dense_replace=0, routed_scaling_factor=1.0, rope_parameters=_YARN)
    s = sizes(f)
    rope, table = _rotary_part(f, s)
    whole = with_latents(f, s, _blocks(f, s), pairs=f.flag("rope_interleave", True), rope=rope, table=table)
    return with_query_scale(whole, rope.query_scale())


def _blocks(f: Fields, s: Sizes) -> ExpertBlocks:
    """A softmax over all experts, in one group."""
    f.only("n_group", 1)
    f.only("topk_group", 1)
    count, normalise = f.count("n_routed_experts", high=MOST_EXPERTS), f.flag("norm_topk_prob", True)
    f.only("num_local_experts", count)
    scale = f.number("routed_scaling_factor")
    route = ExpertRouting("r", "routes", count, top_k(f, count, None), "softmax", normalise, scale)
    parts = GATE_UP_DOWN if f.stored("separate_gate_up") else ("gate_up_proj", "down_proj")
    return replace(ExpertBlocks.read(f, route, from_layer(f, s)), parts=parts, is_stacked=True)


def _rotary_part(f: Fields, s: Sizes) -> tuple[RopeReader, Rope]:
    """A fraction of a head's columns says the table's width. Raises ModelError if it is not that of rotary keys."""
    z = LatentSizes.read(f, s, query_rank=1024, rank=256, plain=64, rotary=64, value=128)
    width = z.plain + z.rotary
    rope = RopeReader(f, growing=True, fraction=z.rotary / width)
    table = rope.plain(width, partial=True)
    if table.width != z.rotary:
        needed = f"partial_rotary_factor = qk_rope_head_dim / qk_head_dim = {z.rotary / width:g} is needed"
        raise f.refuse("rope_parameters", needed)
    return rope, table
