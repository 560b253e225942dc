"""The layers of Mamba 1."""

from collections.abc import Mapping
from dataclasses import dataclass

from manyhands.program.blocks import NormStyle, Ops, Sizes, TensorNames
from manyhands.program.ops import (
    Activation,
    Convolution,
    Gate,
    Gating,
    Product,
    Rows,
    SelectiveScan,
    Softplus,
    Weight,
)


@dataclass(frozen=True, slots=True)
class Mamba1:
    """A layer of Mamba 1: `inner` columns with `state` numbers each; time steps are products of `rank` columns."""

    path: str  # of its tensors
    inner: int
    state: int
    rank: int
    taps: int
    bias: bool  # of the products at both ends
    conv_bias: bool
    activation: Activation
    norm: NormStyle | None  # of keys, queries and time steps
    is_log: bool  # GGUF files have minus the rates in place of their logarithms


def mamba1(n: TensorNames, s: Sizes, m: Mamba1) -> Ops:
    """From "h" to "a": products; a convolution; keys, queries and time steps of it, perhaps normed; the scan; a gate."""
    kernel = Weight(f"{n.path}{m.path}.conv1d.weight", (m.inner, 1, m.taps))
    conv_bias = n.vector(f"{m.path}.conv1d.bias", m.inner) if m.conv_bias else None
    widths, outputs, start, parts = {"dt": m.rank, "k": m.state, "q": m.state}, m.rank + 2 * m.state, 0, []
    for name, width in widths.items():
        parts.append(n.part(name, f"{m.path}.x_proj", outputs, m.inner, False, Rows(start, width)))
        start += width
    entering = [
        n.part(name, f"{m.path}.in_proj", 2 * m.inner, s.hidden, m.bias, Rows(at, m.inner))
        for name, at in (("v", 0), ("z", m.inner))
    ]
    scan = SelectiveScan(
        query="q",
        key="k",
        value="v mixed",
        step="step",
        target="o",
        rate=Weight(f"{n.path}{m.path}.A_log", (m.inner, m.state)),
        skip=n.vector(f"{m.path}.D", m.inner),
        is_log=m.is_log,
    )
    return (
        Product("h", tuple(entering)),
        Convolution("v", "v mixed", m.taps, kernel, conv_bias, m.activation),
        Product("v mixed", tuple(parts)),
        *_normed(n, m, widths),
        Product("dt", (n.part("step", f"{m.path}.dt_proj", m.inner, m.rank, False),)),
        Softplus("step", "step", n.vector(f"{m.path}.dt_proj.bias", m.inner)),
        scan,
        Gate("z", "o", "o", Gating("silu")),
        Product("o", (n.part("a", f"{m.path}.out_proj", s.hidden, m.inner, m.bias),)),
    )


def _normed(n: TensorNames, m: Mamba1, widths: Mapping[str, int]) -> Ops:
    names = [f"{m.path}.{name}_layernorm" for name in ("dt", "b", "c")]
    each = zip(names, widths.items(), strict=True)
    return tuple(m.norm.op(n, name, width, part, part) for name, (part, width) in each) if m.norm else ()
