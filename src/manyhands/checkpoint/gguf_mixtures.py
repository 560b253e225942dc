"""More architectures of GGUF whose blocks are experts: names of their tensors, what their metadata adds, and their table."""

from collections.abc import Mapping, Sequence
from typing import Final

from manyhands.checkpoint.gguf_architecture import ATTENTION, CORRECTED, STEPS, Architecture
from manyhands.checkpoint.gguf_configs import (
    BY_PART,
    LOGLESS,
    PLUS_ONE,
    layer_types,
    layers_here,
    stated,
    stated_windows,
)
from manyhands.checkpoint.gguf_experts import SIGMOID, SOFTMAX, beside_shared, by_sigmoid
from manyhands.checkpoint.gguf_keys import Config, GgufKeys
from manyhands.checkpoint.gguf_latent import bailing3
from manyhands.checkpoint.gguf_latent_names import LING3, LING3_ENDS
from manyhands.checkpoint.gguf_minimax import MINIMAX_01
from manyhands.checkpoint.gguf_names import DOTS1, MINIMAX_M2, QWEN3_MOE
from manyhands.checkpoint.gguf_phimoe import PHIMOE
from manyhands.checkpoint.gguf_qwen4 import QWEN4

_GATES: Final = {"per-head": False, "per-element": True}  # whether each column of a head has one
_HY_V3: Final = {
    **DOTS1,
    "ffn_gate_inp": "mlp.router.gate",
    "exp_probs_b.": "mlp.expert_bias",  # so its converter calls it: without .bias
    "exp_probs_b.bias": "mlp.expert_bias",
    **{f"ffn_{part}_shexp": f"mlp.shared_mlp.{part}_proj" for part in ("gate", "up", "down")},
}
_AFMOE: Final = {
    **DOTS1,
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_mlp_layernorm",
    "post_ffw_norm": "post_mlp_layernorm",
    "attn_gate": "self_attn.gate_proj",
    "ffn_gate_inp": "mlp.router.gate",
    "exp_probs_b.bias": "mlp.expert_bias",
}
_LAGUNA: Final = {
    **DOTS1,
    "attn_gate": "self_attn.g_proj",
    "exp_probs_b.bias": "mlp.experts.e_score_correction_bias",
    **{f"ffn_{part}_shexp": f"mlp.shared_expert.{part}_proj" for part in ("gate", "up", "down")},
}
_STEP: Final = {
    **DOTS1,
    "attn_gate": "self_attn.g_proj",
    "ffn_gate_inp": "moe.gate",
    "exp_probs_b.bias": "moe.router_bias",
    **{f"ffn_{part}_exps.weight": f"moe.{part}_proj.weight" for part in ("gate", "up", "down")},
    **{f"ffn_{part}_shexp": f"share_expert.{part}_proj" for part in ("gate", "up", "down")},
}
_LING: Final = {**DOTS1, "attn_qkv": "self_attn.qkv_proj"}
_MINIMAX_M3: Final = {
    **MINIMAX_M2,
    **{f"ffn_{part}_shexp": f"block_sparse_moe.shared_experts.{part}_proj" for part in ("gate", "up", "down")},
    **{f"indexer.{part}": f"self_attn.index_{part}" for part in ("q_proj", "k_proj", "q_norm", "k_norm")},
}


def hy_v3(keys: GgufKeys, config: Config) -> Config:
    """Hy3, without the layers that guess tokens ahead. Which layers have experts is told by their tensors."""
    by_sigmoid(keys, SIGMOID)
    keys.only("expert_weights_norm", True)
    layers, inner = layers_here(keys, config), keys.count("expert_feed_forward_length")
    shared = keys.count("expert_shared_feed_forward_length", inner)
    if shared % inner:
        raise keys.refused(f"its shared experts are {shared} wide together, no multiple of {inner}")
    kinds = ["sparse" if on else "dense" for on in keys.layers_with("ffn_gate_inp.weight", layers)]
    scale = keys.number("expert_weights_scale", 1.0)
    more: Config = {"mlp_layer_types": kinds, "num_shared_experts": shared // inner, "router_scaling_factor": scale}
    return {**_chosen(keys), "num_hidden_layers": layers, **more}


def _chosen(keys: GgufKeys) -> Config:
    """How many experts there are, how many a row takes, and how wide they are."""
    names = {
        "num_experts": "count",
        "num_experts_per_tok": "used_count",
        "moe_intermediate_size": "feed_forward_length",
    }
    return {field: keys.count(f"expert_{name}") for field, name in names.items()}


def afmoe(keys: GgufKeys, config: Config) -> Config:
    """Trinity, of which llama.cpp knows what files do not say: every fourth layer has neither window nor positions, and
    embeddings are scaled."""
    by_sigmoid(keys, SIGMOID)
    for name, only in (("expert_group_count", 1), ("expert_group_used_count", 1), ("expert_weights_norm", True)):
        keys.only(name, only)
    keys.only("attention.sliding_window_pattern", 4)
    return {
        **_chosen(keys),
        "global_attn_every_n_layers": 4,
        "mup_enabled": True,
        "sliding_window": keys.count("attention.sliding_window"),
        "num_dense_layers": keys.count("leading_dense_block_count", 0, least=0),
        "num_shared_experts": keys.count("expert_shared_count"),
        "route_scale": keys.number("expert_weights_scale", 1.0),
    }


def laguna(keys: GgufKeys, config: Config) -> Config:
    """Laguna: its windows, where it has some, are in all but every fourth layer, from the first on."""
    by_sigmoid(keys, SIGMOID)
    for name, only in (("expert_weights_norm", True), ("expert_shared_count", 1)):
        keys.only(name, only)
    layers, window = config["num_hidden_layers"], keys.count("attention.sliding_window", 0, least=0)
    dense = keys.count("leading_dense_block_count", 0, least=0)
    windows = keys.switches("attention.sliding_window_pattern", layers) or [i % 4 != 0 for i in range(layers)]
    return {
        **_chosen(keys),
        **_laguna_attention(keys, config),
        "layer_types": layer_types([bool(window) and on for on in windows]),
        "sliding_window": window or None,
        "mlp_layer_types": _from(dense, layers, "dense", "sparse"),
        "shared_expert_intermediate_size": keys.count("expert_shared_feed_forward_length"),
        "moe_routed_scaling_factor": keys.number("expert_weights_scale", 1.0),
    }


def _laguna_attention(keys: GgufKeys, config: Config) -> Config:
    """How many heads each layer has; the width of their gates, which is that of the tensors; the rotary tables."""
    heads, head = keys.counts("attention.head_count", config["num_hidden_layers"], 0), config["head_dim"]
    rows = {tensor.name: tensor.shape[0] for tensor in keys.gguf.tensors if tensor.name.endswith(".attn_gate.weight")}
    found = [rows.get(f"blk.{i}.attn_gate.weight") for i in range(len(heads))]
    gating = next((kind for kind, wide in _GATES.items() if found == [n * (head if wide else 1) for n in heads]), None)
    if gating is None:
        raise keys.refused("its attn_gate has neither a row for each head of a layer nor one for each of their columns")
    turned = config.get("partial_rotary_factor", 1.0)
    tables = _tables(keys, config)
    tables["full_attention"]["partial_rotary_factor"] = turned
    own = keys.count("rope.dimension_count_swa", int(head * turned))
    tables["sliding_attention"]["partial_rotary_factor"] = own / head
    by_layer = {"gating": gating, "num_attention_heads_per_layer": heads, "rope_parameters": tables}
    return {"rope_theta": None, "rope_scaling": None, "partial_rotary_factor": None, **by_layer}


def _tables(keys: GgufKeys, config: Config) -> dict[str, Config]:
    """Layers with a window turn by a table of their own, which is not scaled."""
    base = config["rope_theta"]
    usual = {**config.get("rope_scaling", {"rope_type": "default"}), "rope_theta": base}
    own = {"rope_type": "default", "rope_theta": keys.number("rope.freq_base_swa", base)}
    return {"full_attention": usual, "sliding_attention": own}


def step35(keys: GgufKeys, config: Config) -> Config:
    """Step-3.5 and 3.7, without the layers that guess tokens ahead. Which layers have experts is told by their tensors."""
    by_sigmoid(keys, SIGMOID)
    keys.only("expert_weights_norm", True)
    keys.only("moe_every_n_layers", 1)
    keys.get("leading_dense_block_count")
    whole, layers = config["num_hidden_layers"], layers_here(keys, config)
    kinds, sparse = layer_types(stated_windows(keys, whole)[:layers]), keys.layers_with("ffn_gate_inp.weight", layers)
    more: Config = {"mlp_layer_types": ["sparse" if on else "dense" for on in sparse], "layer_types": kinds}
    more |= {"num_hidden_layers": layers, "sliding_window": keys.count("attention.sliding_window")}
    return {**_step35_attention(keys, config, kinds), **_step35_experts(keys, whole, layers), **more}


def _step35_experts(keys: GgufKeys, whole: int, layers: int) -> Config:
    found = _chosen(keys)
    limits = {f"swiglu_limits{name}": f"swiglu_clamp_{key}" for name, key in (("", "exp"), ("_shared", "shexp"))}
    return {
        "n_routed_experts": found.pop("num_experts"),
        **found,
        **{field: keys.numbers(name, whole, 0.0)[:layers] for field, name in limits.items()},
        "share_expert_dim": keys.count("expert_shared_feed_forward_length"),
        "moe_router_scaling_factor": keys.number("expert_weights_scale", 1.0),
    }


def _step35_attention(keys: GgufKeys, config: Config, kinds: Sequence[str]) -> Config:
    """Heads of each type of layers, and their tables: those without a window turn half of what the others do, by the first of
    rope_freqs.weight."""
    tables, turned = _tables(keys, config), config.get("partial_rotary_factor", 1.0)
    full, pairs = tables["full_attention"], int(config["head_dim"] * turned / 2) // 2
    full |= {name: full[name][:pairs] for name in ("short_factor", "long_factor") if name in full}
    full["partial_rotary_factor"], tables["sliding_attention"]["partial_rotary_factor"] = turned / 2, turned
    nulls = dict.fromkeys(("rope_theta", "rope_scaling", "partial_rotary_factor"))
    return {**nulls, "rope_parameters": tables, **heads_by_type(keys, config, kinds)}


def heads_by_type(keys: GgufKeys, config: Config, kinds: Sequence[str]) -> Config:
    heads: dict[str, int] = {}
    for kind, count in zip(kinds, keys.counts("attention.head_count", config["num_hidden_layers"], 0), strict=False):
        if heads.setdefault(kind, count) != count:
            raise keys.refused(f"its layers of {kind} have {heads[kind]} heads, and {count}")
    full = heads.get("full_attention", config["num_attention_heads"])
    return {"num_attention_heads": full, "num_sliding_attention_heads": heads.get("sliding_attention", full)}


def mellum(keys: GgufKeys, config: Config) -> Config:
    """Mellum 2: experts in all layers, whose weights add up to one."""
    layers, window = config["num_hidden_layers"], keys.count("attention.sliding_window", 0, least=0)
    windows = keys.switches("attention.sliding_window_pattern", layers)
    if bool(window) != (windows is not None):
        raise keys.refused("it has one of attention.sliding_window and attention.sliding_window_pattern alone")
    types = layer_types(windows or [False] * layers)
    turned = {"rope_theta": None, "rope_scaling": None, "rope_parameters": _tables(keys, config)}
    return {**_chosen(keys), "norm_topk_prob": True, "layer_types": types, "sliding_window": window or None, **turned}


def cohere2_moe(keys: GgufKeys, config: Config) -> Config:
    """Command A+ and North: dense layers in front, which turn whatever they see, then experts, whose sum is averaged with that
    of shared ones. Layers that guess tokens ahead are left out."""
    layers, score = layers_here(keys, config), keys.one("expert_gating_func", SIGMOID)
    windows = stated_windows(keys, config["num_hidden_layers"])
    if score not in (SIGMOID, SOFTMAX):
        raise keys.refused(f"its expert_gating_func is {score!r:.40}; 1 (softmax) or 2 (sigmoid) is needed")
    found, shared = _chosen(keys), keys.count("expert_shared_count", 0, least=0)
    inner = found.pop("moe_intermediate_size")
    keys.only("expert_shared_feed_forward_length", inner * shared)
    keys.only("expert_weights_scale", 1.0)
    return {
        **found,
        "num_hidden_layers": layers,
        "layer_types": layer_types(windows[:layers]),
        "sliding_window": keys.count("attention.sliding_window"),
        "logit_scale": keys.number("logit_scale"),
        "intermediate_size": inner,
        "prefix_dense_intermediate_size": config["intermediate_size"],
        "prefix_dense_sliding_window_pattern": 1,
        "first_k_dense_replace": keys.count("leading_dense_block_count", 0, least=0),
        "num_shared_experts": shared,
        "expert_selection_fn": "sigmoid" if score == SIGMOID else "softmax",
        "norm_topk_prob": keys.flag("expert_weights_norm", False),
    }


def ling(keys: GgufKeys, config: Config) -> Config:
    """Ling and Ring 2.0 (mini, flash, 1T): glm4_moe with one tensor of q, k and v, without layers that guess tokens ahead."""
    by_sigmoid(keys)
    blocks = beside_shared(keys)
    keys.only("expert_shared_feed_forward_length", blocks["moe_intermediate_size"])  # of each of the shared ones
    more = {"num_hidden_layers": layers_here(keys, config), "use_qk_norm": True}
    return {**stated("attention_bias")(keys, config), **blocks, **more}


_INDEX: Final = {"n_heads": "head_count", "head_dim": "key_length", "topk_blocks": "top_k", "block_size": "block_size"}


def minimax_m3(keys: GgufKeys, config: Config) -> Config:
    """MiniMax-M3: dense layers in front, then experts and an indexer in each. llama.cpp knows how gates are cut off."""
    by_sigmoid(keys)
    keys.only("expert_weights_norm", True)
    found, layers = _chosen(keys), config["num_hidden_layers"]
    inner, dense = found.pop("moe_intermediate_size"), keys.count("leading_dense_block_count", 0, least=0)
    return {
        **found,
        **{f"index_{field}": keys.count(f"attention.indexer.{name}") for field, name in _INDEX.items()},
        "index_local_blocks": keys.count("attention.indexer.local_blocks", least=0),
        "intermediate_size": inner,
        "shared_intermediate_size": inner * keys.count("expert_shared_count"),
        "dense_intermediate_size": config["intermediate_size"],
        "routed_scaling_factor": keys.number("expert_weights_scale", 1.0),
        "mlp_layer_types": _from(dense, layers, "dense", "sparse"),
        "layer_types": _from(dense, layers, "full_attention", "minimax_m3_sparse"),
    }


def _from(layer: int, layers: int, before: str, then: str) -> list[str]:
    return [before if i < layer else then for i in range(layers)]


def _cohere2_moe(eps: str) -> Architecture:
    return Architecture(
        "cohere2_moe",
        "Cohere2MoeForCausalLM",
        DOTS1,
        cohere2_moe,
        eps=eps,
        biases=(("attention_bias", ATTENTION),),
    )


MIXTURES: Final[Mapping[str, Architecture]] = {
    "hy_v3": Architecture("hy_v3", "HYV3ForCausalLM", _HY_V3, hy_v3, biases=(CORRECTED,)),
    "afmoe": Architecture("afmoe", "AfmoeForCausalLM", _AFMOE, afmoe, biases=(CORRECTED,)),
    "laguna": Architecture("laguna", "LagunaForCausalLM", _LAGUNA, laguna, varied=True, biases=(CORRECTED,)),
    "step35": Architecture(
        "step3p5", "Step3p5ForCausalLM", _STEP, step35, (PLUS_ONE,), varied=True, biases=(CORRECTED,)
    ),
    "mellum": Architecture("mellum", "MellumForCausalLM", QWEN3_MOE, mellum, biases=(("attention_bias", ATTENTION),)),
    "cohere2moe": _cohere2_moe("layer_norm_eps"),
    "bailingmoe2": Architecture("glm4_moe", "Glm4MoeForCausalLM", _LING, ling, (BY_PART,), biases=(CORRECTED,)),
    "bailingmoe3": Architecture(
        "bailing_hybrid",
        "BailingMoeV3ForCausalLM",
        LING3,
        bailing3,
        (LOGLESS,),
        latent=True,
        ends=LING3_ENDS,
        biases=(CORRECTED, *STEPS),
    ),
    "minimax-m3": Architecture(
        "minimax_m3_vl_text", "MiniMaxM3VLForCausalLM", _MINIMAX_M3, minimax_m3, (PLUS_ONE,), biases=(CORRECTED,)
    ),
    "minimax-01": MINIMAX_01,
    "phimoe": PHIMOE,
    "qwen4exp": QWEN4,
}
MIXTURE_VARIANTS: Final[Mapping[str, tuple[str, Architecture]]] = {
    "cohere2moe": ("attention.layer_norm_rms_epsilon", _cohere2_moe("rms_norm_eps")),
}
