"""The recipe of longcat_flash: two latent attentions and two dense blocks a layer; experts, some of which give their source,
read what the first block reads, and join at the layer's end."""

import math
from dataclasses import replace

from manyhands.program.blocks import Branch, NormStyle, Ops, TensorNames, each_expert, gated, router, sequential
from manyhands.program.ends import EndsStyle, assemble
from manyhands.program.families.experts import GATE_UP_DOWN
from manyhands.program.families.latent import LatentSizes, latent_attention, latent_scale, sizes
from manyhands.program.fields import MOST_EXPERTS, Fields
from manyhands.program.ops import ExpertRouting, Program
from manyhands.program.rope import RopeReader


def longcat_flash(f: Fields) -> Program:
    """Queries and latents are stretched by what their ranks are narrower than the rows."""
    f.rename(intermediate_size="ffn_hidden_size", moe_intermediate_size="expert_ffn_hidden_size")
    f.rename(num_experts_per_tok="moe_topk", num_local_experts="n_routed_experts")
    f.assume(intermediate_size=12288)
    s, act, norm = sizes(f, "num_layers"), f.activation(), NormStyle("rms", f.number("rms_norm_eps", 1e-5))
    f.only("num_hidden_layers", 2 * s.layers)  # attentions, of which a layer has two
    z = LatentSizes.read(f, s, query_rank=1536, rank=512, plain=128, rotary=64, value=128)
    if z.query_rank is None:
        raise f.refuse("q_lora_rank", "a whole number is needed")
    stretch = math.sqrt(s.hidden / z.query_rank), math.sqrt(s.hidden / z.rank)
    rope, bias = RopeReader(f, theta=1e7), f.flag("attention_bias")
    scale, (route, zeros), inner = latent_scale(rope, z.plain + z.rotary), _route(f), _expert_width(f)
    _as_trained(f, z)

    def half(n: TensorNames, i: int, experts: Ops) -> Ops:
        attend = latent_attention(n, s, z, scale, pairs=True, bias=bias, path=f"self_attn.{i}", stretch=stretch)
        block = gated(n, f"mlps.{i}", s.hidden, s.inner, act, "h", "s")
        after = norm.op(n, f"post_attention_layernorm.{i}", s.hidden, "x", "h")
        return sequential(
            Branch(attend, "a", norm.op(n, f"input_layernorm.{i}", s.hidden, "x", "h")),
            Branch((*experts, *block), "s", after, terms=("s", "m") if i else ("s",)),
        )

    def layer(n: TensorNames, _: int) -> Ops:
        chosen = router(n, "mlp.router.classifier", s, route, correction="mlp.router.e_score_correction_bias")
        experts = each_expert(n, "mlp.experts", GATE_UP_DOWN, s, inner, route.experts - zeros, act)
        return (*half(n, 0, (*chosen, replace(experts, identities=zeros))), *half(n, 1, ()))

    return assemble(f, s, norm, rope, [rope.plain(z.rotary)], EndsStyle(), layer)


def _route(f: Fields) -> tuple[ExpertRouting, int]:
    """The choice, and how many of its experts give their source."""
    count = f.count("num_local_experts", 512, high=MOST_EXPERTS)
    zeros = 0 if f.is_null("zero_expert_num") else f.count("zero_expert_num", 256, low=0, high=MOST_EXPERTS - count)
    chosen, scale = f.count("num_experts_per_tok", 12, high=count + zeros), f.number("routed_scaling_factor", 6.0)
    return ExpertRouting("r", "routes", count + zeros, chosen, "softmax", normalise=False, scale=scale), zeros


def _expert_width(f: Fields) -> int:
    return f.count("moe_intermediate_size", 2048, high=1 << 20)


def _as_trained(f: Fields, z: LatentSizes) -> None:
    """Fields of published configs that transformers does not read: each must say what it computes."""
    f.only("attention_method", "MLA")
    f.only("head_dim", z.rotary)  # which transformers takes for the width of tables
    f.only("mla_scale_kv_lora", True)
    f.only("mla_scale_q_lora", True)
    f.only("norm_topk_prob", False)
    f.only("router_bias", False)
    f.only("zero_expert_type", "identity")
