"""The recipe of nemotron_h: each layer is one block, of Mamba 2, attention, a plain block, or experts without gates."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from manyhands.program.blocks import (
    AttentionStyle,
    Branch,
    NormStyle,
    Ops,
    Sizes,
    TensorNames,
    attention,
    head_scale,
    plain,
    router,
)
from manyhands.program.ends import EndsStyle, assemble
from manyhands.program.families.experts import top_k
from manyhands.program.families.mamba import NO_LIMIT, MambaStyle, mamba
from manyhands.program.fields import MOST_EXPERTS, Fields
from manyhands.program.ops import EXPERT, Activation, Add, ExpertRouting, Experts, Gating, Product, Program
from manyhands.program.rope import RopeReader

_KIND_OF_LETTER: Final = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
_OLD_KINDS: Final = {"mamba": "linear_attention", "attention": "full_attention"}
_LISTS: Final = ("layers_block_type", "layer_types")  # one field by two names
_ENDS: Final = EndsStyle(embed="backbone.embeddings", norm="backbone.norm_f", head="lm_head", layers="backbone.layers")
_OLD_FIELDS: Final = (  # of Mamba: a field, and its older name, which transformers prefers
    ("n_groups", "mamba_n_groups"),
    ("conv_kernel", "mamba_d_conv"),
    ("use_conv_bias", "mamba_conv_bias"),
    ("time_step_limit", "mamba_dt_limit"),
)
# Initial weights, chunks of kernels, and layers of multi-token prediction. Of the fields of time steps only time_step_limit
# bounds those that are computed. Attention has no rotary positions.
_UNUSED: Final = (
    "chunk_size expand mamba_chunk_size mamba_dt_init_floor mamba_dt_max mamba_dt_min mamba_expand "
    "moe_shared_expert_overlap mtp_hybrid_override_pattern mtp_layers_block_type num_logits_to_keep "
    "partial_rotary_factor rescale_prenorm_residual rope_theta time_step_floor time_step_max time_step_min "
    "time_step_rank use_mamba_kernels"
).split()
_MAMBA: Final = (
    "mamba_num_heads mamba_head_dim ssm_state_size mamba_hidden_act mamba_num_groups mamba_proj_bias mamba_state_dim "
    "mamba_ssm_cache_dtype use_bias"
).split()
_EXPERTS: Final = (
    "n_routed_experts num_local_experts n_shared_experts moe_intermediate_size moe_shared_expert_intermediate_size "
    "moe_latent_size num_experts_per_tok routed_scaling_factor n_group topk_group norm_topk_prob"
).split()


def nemotron_h(f: Fields) -> Program:
    """A norm before each block; attention without rotary positions; relu squared in plain blocks and experts."""
    kinds = _kinds(f)
    f.assume(num_hidden_layers=len(kinds), intermediate_size=21504, max_position_embeddings=4096)
    s = Sizes.read(f, head=128)
    if s.layers != len(kinds):
        raise f.refuse("num_hidden_layers", f"{len(kinds)}, as many as the kinds of layers that are listed, are needed")
    eps = f.number("layer_norm_epsilon", 1e-5)
    act, bias, norm = f.activation("mlp_hidden_act", "relu2"), f.flag("mlp_bias"), NormStyle("rms", eps)
    _check_others(f, s, eps)
    style = AttentionStyle(head_scale(s.head), rope=None, path="mixer", out_name="mixer.o_proj")
    linear = _mamba(f, eps) if "linear_attention" in kinds else None
    experts = _Mixture(f, s, act, bias) if "moe" in kinds else None
    f.ignore(*(() if linear else (*_MAMBA, *(name for pair in _OLD_FIELDS for name in pair))))
    f.ignore(*(() if experts else _EXPERTS))

    def layer(n: TensorNames, i: int) -> Ops:
        if kinds[i] == "linear_attention" and linear is not None:
            body = mamba(n, s, linear, "h", "a")
        elif kinds[i] == "full_attention":
            body = attention(n, s, style, "h", "a")
        elif kinds[i] == "moe" and experts is not None:
            return _alone(Branch(experts.ops(n), "m", norm.op(n, "norm", s.hidden, "x", "h"), terms=("m", "s")))
        else:
            body = plain(n, ("mixer.up_proj", "mixer.down_proj"), s, act, "h", "a", bias=bias)
        return _alone(Branch(body, "a", norm.op(n, "norm", s.hidden, "x", "h")))

    return assemble(f, s, norm, RopeReader(f), [], _ENDS, layer)


def _alone(branch: Branch) -> Ops:
    """x += branch(x)."""
    return (*branch.ops, Add(branch.joined(1.0)))


def _kinds(f: Fields) -> Sequence[str]:
    """The kind of each layer, from a list or from a pattern of letters. Raises ModelError."""
    lettered = _by_letter(f)
    name = next((name for name in _LISTS if f.has(name)), None)
    if name is None:
        return lettered
    given = f.raw(name)
    kinds = [_OLD_KINDS.get(str(kind), str(kind)) for kind in given] if isinstance(given, list) else []
    if not kinds or not set(kinds) <= set(_KIND_OF_LETTER.values()):
        raise f.refuse(name, f"a list of {', '.join(_KIND_OF_LETTER.values())} is needed")
    for other in _LISTS:
        f.only(other, given)
    if f.has("hybrid_override_pattern") and lettered != kinds:
        raise f.refuse("hybrid_override_pattern", f"but {name} lists other layers: leave one of them out")
    return kinds


def _by_letter(f: Fields) -> list[str]:
    pattern = f.raw("hybrid_override_pattern", "ME*-")
    if not isinstance(pattern, str) or not pattern or set(pattern) - _KIND_OF_LETTER.keys():
        raise f.refuse("hybrid_override_pattern", f"for each layer one letter of {' '.join(_KIND_OF_LETTER)} is needed")
    return [_KIND_OF_LETTER[letter] for letter in pattern]


def _check_others(f: Fields, s: Sizes, eps: float) -> None:
    """Raise ModelError for fields that contradict those that are read, and for what no recipe computes."""
    f.only("attention_head_dim", s.head)
    f.only("attention_bias", False)
    f.only("norm_eps", eps)
    f.only("num_query_groups", s.kv_heads)
    f.only("residual_in_fp32", False)
    f.only("rms_norm_eps", eps)
    f.only("rope_parameters", None)
    f.only("rope_scaling", None)
    f.only("sliding_window", None)
    f.only("tie_word_embeddings", False)  # transformers ties nothing whatever it says
    f.ignore(*_UNUSED)


def _mamba(f: Fields, eps: float) -> MambaStyle:
    n_groups, taps_name, conv_bias, limit = (new if not f.has(old) else old for new, old in _OLD_FIELDS)
    f.ignore(*(new for new, old in _OLD_FIELDS if f.has(old)))
    heads, groups = f.count("mamba_num_heads", 128, high=1 << 14), f.count(n_groups, 8, high=1 << 14)
    if heads % groups:
        raise f.refuse("mamba_num_heads", f"a multiple of the {groups} groups is needed")
    f.only(limit, *NO_LIMIT)
    f.only("mamba_num_groups", groups)
    f.only("mamba_proj_bias", False)
    f.only("mamba_ssm_cache_dtype", "float32")
    state = f.count("ssm_state_size", 128, high=1 << 14)
    f.only("mamba_state_dim", state)
    return MambaStyle(
        heads=heads,
        width=f.count("mamba_head_dim", 64, high=1 << 14),
        groups=groups,
        state=state,
        taps=f.count(taps_name, 4, high=32),
        eps=eps,
        activation=f.activation("mamba_hidden_act"),
        bias=f.flag("use_bias"),
        out_bias=f.flag("use_bias"),
        conv_bias=f.flag(conv_bias, True),
        is_log=not f.stored("negative_rates"),
        path="mixer",
    )


def _route(f: Fields) -> ExpertRouting:
    """Experts ranked by sigmoid and correction."""
    name = "num_local_experts" if f.has("num_local_experts") else "n_routed_experts"
    count, groups = f.count(name, 8, high=MOST_EXPERTS), f.count("n_group", 1, high=4096)
    f.only("n_routed_experts", count)
    if count % groups or count // groups < 2:
        raise f.refuse("n_group", f"a divisor of the {count} experts that leaves two in a group is needed")
    best = f.count("topk_group", 1, high=groups)
    scale, normalise = f.number("routed_scaling_factor", 1.0), f.flag("norm_topk_prob", True)
    top = top_k(f, count // groups * best, 2)
    return ExpertRouting("r", "routes", count, top, "sigmoid", normalise, scale, groups=groups, top_groups=best)


class _Mixture:
    """Experts without gates, and a shared block. With moe_latent_size, one product takes rows to that width before the experts,
    and another takes their sum back."""

    def __init__(self, f: Fields, s: Sizes, activation: Activation, bias: bool) -> None:
        """Raises ModelError for impossible ones."""
        f.only("n_shared_experts", 1)
        self._route, self._sizes, self._activation, self._bias = _route(f), s, activation, bias
        self._inner = f.count("moe_intermediate_size", 7688, high=1 << 20)
        self._shared = f.count("moe_shared_expert_intermediate_size", 7688, high=1 << 20)
        self._latent = f.optional_count("moe_latent_size")

    def ops(self, n: TensorNames) -> Ops:
        """From "h": the experts' sum into "m", the shared block's result into "s"."""
        shared = ("mixer.shared_experts.up_proj", "mixer.shared_experts.down_proj")
        return (
            *router(n, "mixer.gate", self._sizes, self._route, correction="mixer.gate.e_score_correction_bias"),
            *self._between(n),
            *plain(n, shared, replace(self._sizes, inner=self._shared), self._activation, "h", "s", bias=self._bias),
        )

    def _between(self, n: TensorNames) -> Ops:
        hidden, latent = self._sizes.hidden, self._latent
        if latent is None:
            return (self._experts(n, "h", hidden),)
        into = n.part("l", "mixer.fc1_latent_proj", latent, hidden, self._bias)
        out = n.part("m", "mixer.fc2_latent_proj", hidden, latent, self._bias)
        return Product("h", (into,)), self._experts(n, "l", latent), Product("m", (out,))

    def _experts(self, n: TensorNames, source: str, width: int) -> Experts:
        path = f"mixer.experts.{EXPERT}"
        return Experts(
            source=source,
            routes=self._route.target,
            target="m",
            experts=self._route.experts,
            gating=Gating(self._activation),
            gate=None,
            up=n.linear(f"{path}.up_proj", self._inner, width),
            down=n.linear(f"{path}.down_proj", width, self._inner),
        )
