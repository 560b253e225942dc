"""The recipe of kimi_linear: the delta rule with a decay for each number of a key in most layers, latent attention without
positions in the others; deepseek_v3's experts."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from manyhands.program.blocks import Branch, NormStyle, Ops, Sizes, TensorNames, head_scale, sequential
from manyhands.program.ends import EndsStyle, assemble
from manyhands.program.families.latent import LatentSizes, latent_attention, sizes
from manyhands.program.families.linear import KINDS, W1_W3_W2, LinearStyle, delta_rule
from manyhands.program.families.shared import ExpertBlocks, grouped_route
from manyhands.program.fields import Fields
from manyhands.program.ops import Activation, ChannelDecay, Part, Product, Program, Weight
from manyhands.program.rope import RopeReader

_LINEAR, _FULL = KINDS
_BLOCK: Final = "block_sparse_moe"


def kimi_linear(f: Fields) -> Program:
    """Tensors under the names that published checkpoints have, not those of the class in transformers."""
    _own_names(f)
    s, act, norm = sizes(f), f.activation(), NormStyle("rms", f.number("rms_norm_eps", 1e-5))
    z = LatentSizes.read(f, s, query_rank=None, rank=512, plain=128, rotary=64, value=128)
    inner = _linear_fields(f)
    linear, kinds = _linear_style(f, inner, act, norm.eps), _kinds(f, inner, s.layers)
    inner.finish()
    blocks, bias, scale = _blocks(f, s.layers), f.flag("attention_bias"), head_scale(z.plain + z.rotary)
    split = f.stored("split_kv_b")
    _as_trained(f)

    def layer(n: TensorNames, i: int) -> Ops:
        first = latent_attention(n, s, z, scale, pairs=False, bias=bias, split=split, turns=False)
        if kinds[i] == _LINEAR:
            first = _linear_attention(n, s, linear)
        before = norm.op(n, "input_layernorm", s.hidden, "x", "h")
        return sequential(Branch(first, "a", before), blocks.branch(n, s, norm, i))

    return assemble(f, s, norm, RopeReader(f), [], EndsStyle(), layer)


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


def _linear_fields(f: Fields) -> Fields:
    given = f.raw("linear_attn_config", {})
    if not isinstance(given, dict):
        raise f.refuse("linear_attn_config", "an object is needed")
    return Fields(given, f"{f.where}: linear_attn_config")


def _linear_style(f: Fields, inner: Fields, act: Activation, eps: float) -> LinearStyle:
    """What `inner` says goes before what stands beside it."""
    heads = inner.count("num_heads", f.count("linear_num_heads", 32, high=4096), high=4096)
    width = inner.count("head_dim", f.count("linear_head_dim", 128, high=1 << 14), high=1 << 14)
    taps = inner.count("short_conv_kernel_size", f.count("linear_conv_kernel_dim", 4, high=32), high=32)
    is_log = not f.stored("negative_rates")
    return LinearStyle(heads, heads, width, width, taps, eps, act, is_log=is_log, gate="sigmoid")


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


def _blocks(f: Fields, layers: int) -> ExpertBlocks:
    dense = f.count("first_k_dense_replace", 1, low=0)
    default = ["dense" if i < dense else "sparse" for i in range(layers)]
    if f.has("first_k_dense_replace"):
        f.only("mlp_layer_types", default)
    kinds = f.per_layer("mlp_layer_types", layers, default, ("dense", "sparse"))
    blocks = ExpertBlocks.read(f, grouped_route(f, "num_local_experts"), [kind == "sparse" for kind in kinds])
    return replace(
        blocks,
        gate=f"{_BLOCK}.gate",
        correction=f"{_BLOCK}.gate.e_score_correction_bias",
        beside=f"{_BLOCK}.shared_experts",
        experts=f"{_BLOCK}.experts",
        parts=W1_W3_W2,
    )


def _linear_attention(n: TensorNames, s: Sizes, style: LinearStyle) -> Ops:
    """The delta rule between products; decays and gates come by way of as many columns as a head has."""
    parts = [n.part(name, f"self_attn.{name}_proj", style.keys, s.hidden, False) for name in "qkv"]
    parts.append(Part("b", n.linear("self_attn.b_proj", style.heads, s.hidden), activation="sigmoid"))
    parts += [n.part(f"{name} few", f"self_attn.{name}_a_proj", style.width, s.hidden, False) for name in "fg"]
    kernels = [Weight(f"{n.path}self_attn.{name}_conv1d.weight", (style.keys, 1, style.taps)) for name in "qkv"]
    rate = Weight(f"{n.path}self_attn.A_log", (1, 1, style.heads, 1))
    decay = ChannelDecay("a", "a", rate, n.vector("self_attn.dt_bias", style.keys), style.is_log)
    return (
        Product("h", tuple(parts)),
        Product("f few", (n.part("a", "self_attn.f_b_proj", style.keys, style.width, False),)),
        Product("g few", (n.part("z", "self_attn.g_b_proj", style.keys, style.width, False),)),
        *delta_rule(n, style, kernels, "self_attn.o_norm", decay),
        Product("o", (n.part("a", "self_attn.o_proj", s.hidden, style.values, False),)),
    )
