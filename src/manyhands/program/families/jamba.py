"""The recipe of jamba: Mamba 1 in most layers, attention without positions in the others, experts in some."""

from dataclasses import dataclass

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
from manyhands.program.fields import MOST_EXPERTS, Fields
from manyhands.program.ops import (
    Activation,
    Convolution,
    ExpertRouting,
    Gate,
    Gating,
    Product,
    Program,
    Rows,
    SelectiveScan,
    Softplus,
    Weight,
)
from manyhands.program.rope import RopeReader


@dataclass(frozen=True, slots=True)
class _Mamba:
    """A layer of Mamba 1: `inner` columns with `state` numbers each; time steps are products of `rank` columns."""

    inner: int
    state: int
    rank: int
    taps: int
    bias: bool  # of the products at both ends
    conv_bias: bool
    activation: Activation
    is_log: bool  # GGUF files have minus the rates in place of their logarithms

    @classmethod
    def read(cls, f: Fields, s: Sizes, activation: Activation) -> "_Mamba":
        """Raises ModelError."""
        inner, automatic = f.count("mamba_expand", 2, high=64) * s.hidden, -(-s.hidden // 16)
        named = f.raw("mamba_dt_rank", "auto") == "auto"
        return cls(
            inner,
            f.count("mamba_d_state", 16, high=1 << 10),
            automatic if named else f.count("mamba_dt_rank", high=1 << 16),
            f.count("mamba_d_conv", 4, high=32),
            f.flag("mamba_proj_bias"),
            f.flag("mamba_conv_bias", True),
            activation,
            not f.stored("negative_rates"),
        )


def jamba(f: Fields) -> Program:
    """A norm before each half of a layer; which layers have attention, and which experts, by period and offset."""
    f.assume(num_key_value_heads=8, max_position_embeddings=262144)
    for name in ("rope_parameters", "rope_scaling", "sliding_window"):
        f.only(name, None)
    f.ignore("rope_theta", "num_logits_to_keep", "use_mamba_kernels", "use_mambapy", "use_associative_scan")
    s, act, norm = Sizes.read(f), f.activation(), NormStyle("rms", f.number("rms_norm_eps", 1e-6))
    full, sparse = _every(f, s.layers, "attn_layer", 8, 4), _every(f, s.layers, "expert_layer", 2, 1)
    style, mixer = AttentionStyle(head_scale(s.head), rope=None), _Mamba.read(f, s, act)
    count = f.count("num_experts", f.count("num_local_experts", 16, high=MOST_EXPERTS), high=MOST_EXPERTS)
    route = ExpertRouting("r", "routes", count, top_k(f, count, 2) if count > 1 else 1, "softmax", normalise=False)
    f.ignore("num_experts_per_tok")

    def layer(n: TensorNames, i: int) -> Ops:
        first = attention(n, s, style, "h", "a") if full[i] else _mamba(n, s, mixer, norm)
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


def _mamba(n: TensorNames, s: Sizes, m: _Mamba, norm: NormStyle) -> Ops:
    """From "h" to "a": products; a convolution; keys, queries and time steps of its result, each normed; the scan; a gate."""
    kernel = Weight(f"{n.path}mamba.conv1d.weight", (m.inner, 1, m.taps))
    conv_bias = n.vector("mamba.conv1d.bias", m.inner) if m.conv_bias else None
    widths, outputs, start, parts = {"dt": m.rank, "k": m.state, "q": m.state}, m.rank + 2 * m.state, 0, []
    for name, width in widths.items():
        parts.append(n.part(name, "mamba.x_proj", outputs, m.inner, False, Rows(start, width)))
        start += width
    entering = [
        n.part(name, "mamba.in_proj", 2 * m.inner, s.hidden, m.bias, Rows(at, m.inner))
        for name, at in (("v", 0), ("z", m.inner))
    ]
    norms = zip(("dt", "b", "c"), widths.items(), strict=True)
    scan = SelectiveScan(
        query="q",
        key="k",
        value="v mixed",
        step="step",
        target="o",
        rate=Weight(f"{n.path}mamba.A_log", (m.inner, m.state)),
        skip=n.vector("mamba.D", m.inner),
        is_log=m.is_log,
    )
    return (
        Product("h", tuple(entering)),
        Convolution("v", "v mixed", m.taps, kernel, conv_bias, m.activation),
        Product("v mixed", tuple(parts)),
        *(norm.op(n, f"mamba.{name}_layernorm", width, part, part) for name, (part, width) in norms),
        Product("dt", (n.part("step", "mamba.dt_proj", m.inner, m.rank, False),)),
        Softplus("step", "step", n.vector("mamba.dt_proj.bias", m.inner)),
        scan,
        Gate("z", "o", "o", Gating("silu")),
        Product("o", (n.part("a", "mamba.out_proj", s.hidden, m.inner, m.bias),)),
    )
