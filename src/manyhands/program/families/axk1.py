"""The recipe of axk1: deepseek_v3 whose experts, with the shared ones, are normed behind."""

from dataclasses import replace

from manyhands.program.blocks import Sizes
from manyhands.program.families.latent import sizes, with_latents
from manyhands.program.families.shared import ExpertBlocks, grouped_route
from manyhands.program.fields import Fields
from manyhands.program.ops import ExpertRouting, Program

_METHODS = ("noaux_tc", "greedy", "group_limited_greedy")


def axk1(f: Fields) -> Program:
    """A list, or two numbers, say which layers are dense. Checkpoints need not have a correction of ranks."""
    f.assume(n_routed_experts=192)
    if f.is_null("q_lora_rank"):
        raise f.refuse("q_lora_rank", "a whole number is needed: queries of this family come from a latent")
    s = sizes(f)
    inner, shared = f.count("moe_intermediate_size", 2048, high=1 << 20), f.count("n_shared_experts", 1, high=4096)
    blocks = ExpertBlocks(f.activation(), _route(f), inner, shared, sparse(f, s), after="post_mlp_layernorm")
    return with_latents(f, s, blocks, pairs=f.flag("rope_interleave", True))


def _route(f: Fields) -> ExpertRouting:
    """deepseek_v3's. Other methods than its own rank groups by other rules, which is the same where all groups stay."""
    route = grouped_route(f, methods=_METHODS)
    if route.top_groups < route.groups and f.raw("topk_method", _METHODS[0]) != _METHODS[0]:
        raise f.refuse(
            "topk_method", f"only {_METHODS[0]!r} is supported where {route.top_groups} of {route.groups} groups stay"
        )
    return replace(route, may_lack_correction=True)


def sparse(f: Fields, s: Sizes) -> list[bool]:
    """Which layers have experts."""
    dense, every = f.count("first_k_dense_replace", 1, low=0), f.count("moe_layer_freq", 1)
    default = ["sparse" if i >= dense and i % every == 0 else "dense" for i in range(s.layers)]
    return [kind == "sparse" for kind in f.per_layer("mlp_layer_types", s.layers, default, ("dense", "sparse"))]
