"""The recipe of jamba: Mamba 1 in most layers, attention without positions in the others, experts in some."""

from manyhands.program.blocks import (
    AttentionStyle,
    Branch,
    NormStyle,
    Ops,
    Sizes,
    TensorNames,
    attention,
    each_expert,
    gated,
    head_scale,
    router,
    sequential,
)
from manyhands.program.ends import EndsStyle, assemble
from manyhands.program.families.experts import GATE_UP_DOWN, top_k
from manyhands.program.families.mamba1 import Mamba1, mamba1
from manyhands.program.fields import MOST_EXPERTS, Fields
from manyhands.program.ops import Activation, ExpertRouting, Program
from manyhands.program.rope import RopeReader


def jamba(f: Fields) -> Program:
    """A norm before each half of a layer; which layers have attention, and which experts, by period and offset."""
    f.assume(num_key_value_heads=8, max_position_embeddings=262144)
    for name in ("rope_parameters", "rope_scaling", "sliding_window"):
        f.only(name, None)
    f.ignore("rope_theta", "num_logits_to_keep", "use_mamba_kernels", "use_mambapy", "use_associative_scan")
    s, act, norm = Sizes.read(f), f.activation(), NormStyle("rms", f.number("rms_norm_eps", 1e-6))
    full, sparse = _every(f, s.layers, "attn_layer", 8, 4), _every(f, s.layers, "expert_layer", 2, 1)
    style, mixer = AttentionStyle(head_scale(s.head), rope=None), _mixer(f, s, act, norm)
    count = f.count("num_experts", f.count("num_local_experts", 16, high=MOST_EXPERTS), high=MOST_EXPERTS)
    route = ExpertRouting("r", "routes", count, top_k(f, count, 2) if count > 1 else 1, "softmax", normalise=False)
    f.ignore("num_experts_per_tok")

    def layer(n: TensorNames, i: int) -> Ops:
        first = attention(n, s, style, "h", "a") if full[i] else mamba1(n, s, mixer)
        if sparse[i] and count > 1:
            experts = each_expert(n, "feed_forward.experts", GATE_UP_DOWN, s, s.inner, count, act)
            block: Ops = (*router(n, "feed_forward.router", s, route), experts)
        else:
            block = gated(n, "feed_forward", s.hidden, s.inner, act, "h", "m")
        return sequential(
            Branch(first, "a", norm.op(n, "input_layernorm", s.hidden, "x", "h")),
            Branch(block, "m", norm.op(n, "pre_ff_layernorm", s.hidden, "x", "h")),
        )

    return assemble(f, s, norm, RopeReader(f), [], EndsStyle(norm="model.final_layernorm"), layer)


def _every(f: Fields, layers: int, name: str, period: int, offset: int) -> list[bool]:
    """Which layers are those of a period, from an offset below it. Raises ModelError."""
    period = f.count(f"{name}_period", period)
    offset = f.count(f"{name}_offset", offset, low=0, high=period - 1)
    return [i % period == offset for i in range(layers)]


def _mixer(f: Fields, s: Sizes, activation: Activation, norm: NormStyle) -> Mamba1:
    automatic = -(-s.hidden // 16)
    named = f.raw("mamba_dt_rank", "auto") == "auto"
    return Mamba1(
        path="mamba",
        inner=f.count("mamba_expand", 2, high=64) * s.hidden,
        state=f.count("mamba_d_state", 16, high=1 << 10),
        rank=automatic if named else f.count("mamba_dt_rank", high=1 << 16),
        taps=f.count("mamba_d_conv", 4, high=32),
        bias=f.flag("mamba_proj_bias"),
        conv_bias=f.flag("mamba_conv_bias", True),
        activation=activation,
        norm=norm,
        is_log=not f.stored("negative_rates"),
    )
