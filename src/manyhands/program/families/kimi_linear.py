"""The recipe of kimi_linear: the delta rule with a decay for each number of a key in most layers, latent attention without
positions in the others; deepseek_v3's experts. Kimi K3 goes by this name too: see attention_residuals.py for its residuals."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from manyhands.program.blocks import Branch, NormStyle, Ops, Sizes, TensorNames, head_scale, sequential
from manyhands.program.ends import EndsStyle, assemble
from manyhands.program.families.attention_residuals import Residuals
from manyhands.program.families.latent import LatentSizes, latent_attention, sizes
from manyhands.program.families.linear import KINDS, W1_W3_W2, LinearStyle, delta_rule
from manyhands.program.families.shared import ExpertBlocks, LatentExperts, grouped_route
from manyhands.program.fields import Fields
from manyhands.program.ops import ChannelDecay, Gate, Gating, Part, Product, Program, Rows, Weight
from manyhands.program.rope import RopeReader

_LINEAR, _FULL = KINDS
_BLOCK: Final = "block_sparse_moe"


@dataclass(frozen=True, slots=True)
class ChannelLinear:
    """A layer with the delta rule. `bound`: of decays (ChannelDecay). `is_full`: gates come from rows directly, else by way of
    as many columns as a head has. `rates`: the shape in which those of heads are stored, perhaps with more behind them."""

    style: LinearStyle
    bound: float | None
    is_full: bool
    rates: tuple[int, ...]


def kimi_linear(f: Fields) -> Program:
    """Tensors under the names that published checkpoints have, not those of the class in transformers (5.23), which reads none
    of what Kimi K3 has besides: other gates, latent experts, gates of latent attention, attention residuals."""
    _own_names(f)
    s, gating, norm = sizes(f), _gating(f), NormStyle("rms", f.number("rms_norm_eps", 1e-5))
    z = LatentSizes.read(f, s, query_rank=None, rank=512, plain=128, rotary=64, value=128)
    inner = linear_fields(f)
    linear, kinds = _linear(f, inner, gating, norm.eps), _kinds(f, inner, s.layers)
    inner.finish()
    blocks, bias, scale = _blocks(f, s.layers, gating, norm), f.flag("attention_bias"), head_scale(z.plain + z.rotary)
    split, is_gated, residuals = f.stored("split_kv_b"), f.flag("mla_use_output_gate"), Residuals.read(f, s, norm)
    _as_trained(f)

    def attention(n: TensorNames) -> Ops:
        gate = n.part("g", "self_attn.g_proj", s.heads * z.value, s.hidden, False)
        gated = (gate, Gate("g", "a", "a", Gating("sigmoid"))) if is_gated else None
        return latent_attention(n, s, z, scale, pairs=False, bias=bias, split=split, turns=False, gate=gated)

    def layer(n: TensorNames, i: int) -> Ops:
        first = channel_attention(n, s, linear) if kinds[i] == _LINEAR else attention(n)
        block = blocks.branch(n, s, norm, i)
        if residuals is not None:
            return residuals.layer(n, i, first, block)
        return sequential(Branch(first, "a", norm.op(n, "input_layernorm", s.hidden, "x", "h")), block)

    program = assemble(f, s, norm, RopeReader(f), [], EndsStyle(), layer)
    return program if residuals is None else residuals.whole(program)


def _own_names(f: Fields) -> None:
    f.rename(max_position_embeddings="model_max_length", num_local_experts="num_experts")
    f.rename(num_experts_per_tok="num_experts_per_token", n_shared_experts="num_shared_experts")
    f.rename(norm_topk_prob="moe_renormalize", n_group="num_expert_group", scoring_func="moe_router_activation_func")
    f.assume(max_position_embeddings=1 << 20, intermediate_size=9216, moe_intermediate_size=1024)
    f.assume(n_group=1, topk_group=1, routed_scaling_factor=2.446)


def _as_trained(f: Fields) -> None:
    """Fields of published configs that transformers does not read: each must say what it computes."""
    f.only("mla_use_nope", True)
    f.only("tie_word_embeddings", False)  # transformers ties nothing here, whatever is said
    f.only("use_grouped_topk", True)
    f.ignore("rope_theta", "partial_rotary_factor")  # nothing turns


def _gating(f: Fields) -> Gating:
    """Of blocks and experts."""
    if f.raw("hidden_act") != "situ":
        f.ignore("activation_situ_beta", "activation_situ_linear_beta")
        return Gating(f.activation())
    return Gating("situ", f.number("activation_situ_beta"), f.optional("activation_situ_linear_beta"))


def linear_fields(f: Fields) -> Fields:
    """Those of `linear_attn_config`, to be finished. Raises ModelError."""
    given = f.raw("linear_attn_config", {})
    if not isinstance(given, dict):
        raise f.refuse("linear_attn_config", "an object is needed")
    return Fields(given, f"{f.where}: linear_attn_config")


def linear_sizes(f: Fields, inner: Fields, heads: int) -> tuple[int, int, int]:
    """Heads, of which there are so many where neither config says it, columns of each, taps of convolutions."""
    return (
        inner.count("num_heads", f.count("linear_num_heads", heads, high=4096), high=4096),
        inner.count("head_dim", f.count("linear_head_dim", 128, high=1 << 14), high=1 << 14),
        inner.count("short_conv_kernel_size", f.count("linear_conv_kernel_dim", 4, high=32), high=32),
    )


def _linear(f: Fields, inner: Fields, gating: Gating, eps: float) -> ChannelLinear:
    """What `inner` says goes before what stands beside it."""
    heads, width, taps = linear_sizes(f, inner, 32)
    is_log, is_full = not f.stored("negative_rates"), inner.flag("use_full_rank_gate")
    if is_full and is_log and heads > width:
        raise inner.refuse("num_heads", f"at most head_dim {width} is needed: rates of heads are padded to that")
    bound = inner.number("gate_lower_bound", positive=False) if inner.has("gate_lower_bound") else None
    if bound is not None and bound >= 0:
        raise inner.refuse("gate_lower_bound", "a number below zero is needed")
    act = "silu" if gating.activation == "situ" else gating.activation
    style = LinearStyle(heads, heads, width, width, taps, eps, act, is_log=is_log, gate="sigmoid")
    rates = (
        (1, 1, heads, 1) if not is_full else (width,) if is_log else (heads,)
    )  # not logarithms: a GGUF file has them
    return ChannelLinear(style, bound, is_full, rates)


def _kinds(f: Fields, inner: Fields, layers: int) -> Sequence[str]:
    """Of each layer, by its type, or by lists of layers that count from one."""
    default = [_FULL if i and i % 4 == 0 else _LINEAR for i in range(layers)]
    full, linear = (inner.whole_numbers(name) for name in ("full_attn_layers", "kda_layers"))
    if full or linear:
        is_whole = inner.has("full_attn_layers") and inner.has(
            "kda_layers"
        )  # transformers reads neither without the other
        if not is_whole or sorted(full + linear) != list(range(1, layers + 1)):
            raise inner.refuse("kda_layers", f"with full_attn_layers each layer from 1 to {layers} once is needed")
        default = [_FULL if i + 1 in full else _LINEAR for i in range(layers)]
        f.only("layer_types", default)
    return f.per_layer("layer_types", layers, default, KINDS)


def _blocks(f: Fields, layers: int, gating: Gating, norm: NormStyle) -> ExpertBlocks:
    dense = f.count("first_k_dense_replace", 1, low=0)
    default = ["dense" if i < dense else "sparse" for i in range(layers)]
    if f.has("first_k_dense_replace"):
        f.only("mlp_layer_types", default)
    kinds = f.per_layer("mlp_layer_types", layers, default, ("dense", "sparse"))
    sparse = [kind == "sparse" for kind in kinds]
    return replace(
        ExpertBlocks.read(f, grouped_route(f, "num_local_experts"), sparse, act=gating),
        gate=f"{_BLOCK}.gate",
        correction=f"{_BLOCK}.gate.e_score_correction_bias",
        beside=f"{_BLOCK}.shared_experts",
        experts=f"{_BLOCK}.experts",
        parts=W1_W3_W2,
        latent=_latent(f, norm),
    )


def _latent(f: Fields, norm: NormStyle) -> LatentExperts | None:
    """Where experts compute fewer columns than rows have."""
    width, has_norm = f.optional_count("routed_expert_hidden_size"), f.flag("latent_moe_use_norm")
    return None if width is None else LatentExperts(width, f"{_BLOCK}.routed_expert", norm if has_norm else None)


def channel_attention(n: TensorNames, s: Sizes, linear: ChannelLinear) -> Ops:
    """From "h" to "a": the delta rule between products."""
    style, path = linear.style, "self_attn"
    kernels = [Weight(f"{n.path}{path}.{name}_conv1d.weight", (style.keys, 1, style.taps)) for name in "qkv"]
    own = None if linear.rates[-1] <= style.heads else Rows(0, style.heads)
    rates, biases = Weight(f"{n.path}{path}.A_log", linear.rates, own), n.vector(f"{path}.dt_bias", style.keys)
    decay = ChannelDecay("a", "a", rates, biases, style.is_log, linear.bound)
    return (
        *_entering(n, s, linear, path),
        *delta_rule(n, style, kernels, f"{path}.o_norm", decay),
        Product("o", (n.part("a", f"{path}.o_proj", s.hidden, style.values, False),)),
    )


def _entering(n: TensorNames, s: Sizes, linear: ChannelLinear, path: str) -> Ops:
    """Products; decays, and gates that are not full, come by way of as many columns as a head has."""
    style, few = linear.style, "f" if linear.is_full else "fg"
    parts = [n.part(name, f"{path}.{name}_proj", style.keys, s.hidden, False) for name in "qkv"]
    parts.append(Part("b", n.linear(f"{path}.b_proj", style.heads, s.hidden), activation="sigmoid"))
    parts += [n.part(f"{name} few", f"{path}.{name}_a_proj", style.width, s.hidden, False) for name in few]
    parts += [n.part("z", f"{path}.g_proj", style.values, s.hidden, False)] if linear.is_full else []
    named = zip(few, "az", strict=False)
    behind = [(name, n.part(to, f"{path}.{name}_b_proj", style.keys, style.width, False)) for name, to in named]
    return (Product("h", tuple(parts)), *(Product(f"{name} few", (part,)) for name, part in behind))
