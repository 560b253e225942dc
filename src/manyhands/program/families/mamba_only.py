"""Recipes of models that have layers of Mamba and no others: mamba, falcon_mamba, mamba2."""

from collections.abc import Callable
from dataclasses import replace
from typing import Final

from manyhands.program.blocks import Branch, NormStyle, Ops, Sizes, TensorNames
from manyhands.program.ends import EndsStyle, assemble
from manyhands.program.families.mamba import NO_LIMIT, MambaStyle
from manyhands.program.families.mamba import mamba as mamba2_layer
from manyhands.program.families.mamba1 import Mamba1, mamba1
from manyhands.program.families.unweighted import Unweighted
from manyhands.program.fields import Fields
from manyhands.program.ops import Add, Program
from manyhands.program.rope import RopeReader

_ENDS: Final = EndsStyle(tied=True, embed="backbone.embeddings", norm="backbone.norm_f", layers="backbone.layers")
# Initial weights, kernels, and how rows between layers are rounded, which is as in every other family.
_UNUSED: Final = (
    "chunk_size fused_add_norm norm_before_gate pad_vocab_size_multiple rescale_prenorm_residual residual_in_fp32 "
    "time_step_floor time_step_init_scheme time_step_max time_step_min time_step_scale use_associative_scan "
    "use_falcon_mambapy use_mambapy"
).split()
_POSITIONS: Final = 1 << 20  # no config bounds them; llama.cpp's converter writes this number


def mamba(f: Fields) -> Program:
    """A norm before each layer of Mamba 1, and nothing else."""
    return _first(f, None)


def falcon_mamba(f: Fields) -> Program:
    """mamba, with norms without weights of keys, queries and time steps."""
    return _first(f, Unweighted("rms", f.number("mixer_rms_eps", 1e-6)))


def _first(f: Fields, inside: NormStyle | None) -> Program:
    s = _sizes(f, f.count("expand", 2, high=64) * f.count("hidden_size", high=1 << 17))
    automatic = f.raw("time_step_rank", "auto") == "auto"
    mixer = Mamba1(
        path="mixer",
        inner=s.inner,
        state=f.count("state_size", 16, high=1 << 10),
        rank=-(-s.hidden // 16) if automatic else f.count("time_step_rank", high=1 << 16),
        taps=f.count("conv_kernel", 4, high=32),
        bias=f.flag("use_bias"),
        conv_bias=f.flag("use_conv_bias", True),
        activation="silu",
        norm=inside,
        is_log=not f.stored("negative_rates"),
    )
    return _whole(f, s, _ENDS, lambda n: mamba1(n, s, mixer))


def mamba2(f: Fields) -> Program:
    """A norm before each layer of Mamba 2, which norms in groups behind its gate."""
    heads, groups = f.count("num_heads", 128, high=1 << 14), f.count("n_groups", 8, high=1 << 14)
    width = f.count("head_dim", 64, high=1 << 14)
    f.only("intermediate_size", heads * width)
    s, bias = _sizes(f, heads * width), f.flag("use_bias")
    if heads % groups:
        raise f.refuse("n_groups", f"a divisor of the {heads} heads is needed")
    if f.count("expand", 2, high=64) * s.hidden != s.inner:
        raise f.refuse("expand", f"times hidden_size it must be {heads} heads of {width} columns")
    f.only("time_step_limit", *NO_LIMIT)
    f.ignore("time_step_rank")
    style = MambaStyle(
        heads,
        width,
        groups,
        f.count("state_size", 128, high=1 << 14),
        f.count("conv_kernel", 4, high=32),
        f.number("layer_norm_epsilon", 1e-5),
        "silu",
        bias,
        f.flag("use_conv_bias", True),
        not f.stored("negative_rates"),
        path="mixer",
        out_bias=bias,
    )
    return _whole(f, s, replace(_ENDS, tied=False), lambda n: mamba2_layer(n, s, style, "h", "a"))


def _whole(f: Fields, s: Sizes, ends: EndsStyle, mixer: Callable[[TensorNames], Ops]) -> Program:
    """The Program of layers that add mixer(norm(x)), from "h" to "a", to x."""
    f.assume(max_position_embeddings=_POSITIONS)
    f.only("hidden_act", "silu")
    for name in ("rope_parameters", "rope_scaling"):
        f.only(name, None)
    f.ignore(*_UNUSED)
    norm = NormStyle("rms", f.number("layer_norm_epsilon", 1e-5))

    def layer(n: TensorNames, i: int) -> Ops:
        branch = Branch(mixer(n), "a", norm.op(n, "norm", s.hidden, "x", "h"))
        return (*branch.ops, Add(branch.joined(1.0)))

    return assemble(f, s, norm, RopeReader(f), [], ends, layer)


def _sizes(f: Fields, inner: int) -> Sizes:
    """Sizes of a model without attention. Fields by the names of its first publication must say the same. Raises ModelError."""
    hidden, layers = f.count("hidden_size", high=1 << 17), f.count("num_hidden_layers", high=1024)
    inner = f.count("intermediate_size", inner, high=1 << 20)
    for name, same in (
        ("d_model", hidden),
        ("n_layer", layers),
        ("d_inner", inner),
        ("rms_norm", True),
        ("ssm_cfg", {}),
    ):
        f.only(name, same)
    return Sizes(layers, hidden, f.count("vocab_size", high=1 << 22), heads=1, kv_heads=1, head=1, inner=inner)
