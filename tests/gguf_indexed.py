"""Models with an indexer in latent attention, as llama.cpp's converter writes them: dots3-note, Hy4, GLM-5.3-Flash."""

import re
from typing import Any

import numpy as np
from numpy.typing import NDArray

Piece = tuple[str, NDArray[np.float32]]

# What a GGUF file cannot say otherwise: latents of queries, and what turns, are as wide with a window as without.
DOTS3: dict[str, Any] = {
    "index_head_dim": 64,  # a Hadamard matrix of llama.cpp
    "shared_experts_intermediate_size": 32,
    "swa_q_lora_rank": 32,
    "swa_head_dim": 24,
    "swa_qk_nope_head_dim": 16,
}


HY_V4_SHARED: dict[str, Any] = {
    "indexer_types": ["full", "shared", "shared", "full"],
    "hc_mult": 2,
    "hc_magnitude": 1.5,
    "swiglu_limit": 0.25,
    "mlp_layer_types": ["dense", "dense", "sparse", "sparse"],
}


# Fields that published configs state; one number of heads for both kinds of layers, four streams, as llama.cpp wants.
_GLM5: dict[str, Any] = {
    "rms_norm_eps": 1e-5, "hc_eps": 1e-6, "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "norm_topk_prob": True,
    "routed_scaling_factor": 2.5, "linear_num_heads": 4, "linear_head_dim": 32, "linear_conv_kernel_dim": 4,
    "linear_lower_bound": -5.0, "index_n_heads": 8, "index_head_dim": 64, "moe_intermediate_size": 32,
}  # fmt: skip
GLM5_FIXED: dict[str, dict[str, Any]] = {
    "glm5_next": {**_GLM5, "index_topk": 16},  # two entries of eight
    "glm5_next_plain": {
        **_GLM5, "index_kpool": 4, "index_topk": 64, "n_shared_experts": 2, "linear_lower_bound": -3.0, "hc_eps": 1e-5,
        "indexer_types": ["full"] * 4, "mlp_layer_types": ["dense", "dense", "sparse", "sparse"],
    },
}  # fmt: skip


def of_layer(config: dict[str, Any], name: str) -> dict[str, Any]:
    """The config with what it says of the layer of this tensor alone."""
    found = re.match(r"model\.layers\.(\d+)\.", name)
    return {**config, **config.get("per_layer_config", {}).get(found[1] if found else "", {})}


def stretched(name: str, array: NDArray[np.float32], config: dict[str, Any]) -> NDArray[np.float32]:
    """The norm of a latent with what the latent is multiplied by."""
    is_latent = name.endswith(("q_a_layernorm.weight", "kv_a_layernorm.weight"))
    return array * np.float32((config["hidden_size"] / len(array)) ** 0.5) if is_latent else array


def by_halves(name: str, array: NDArray[np.float32], width: int, rotary: int) -> NDArray[np.float32]:
    """A tensor of dots3-note's indexer, of heads so wide, with the first columns of rotary pairs before the second ones: so
    llama.cpp turns them, the publisher and transformers by pairs."""
    if "indexer." not in name or "proj" in name:
        return array
    heads = array.reshape(-1, width, *array.shape[1:])
    parts = heads[:, :rotary:2], heads[:, 1:rotary:2], heads[:, rotary:]
    return np.concatenate(parts, 1).reshape(array.shape)


def dots3_facts(config: dict[str, Any], rope: dict[str, Any]) -> dict[str, Any]:
    """A layer that guesses tokens ahead comes last, with a window: its tensors may be absent."""
    slides = [kind == "sliding_attention" for kind in config["layer_types"]]
    layers = [of_layer(config, f"model.layers.{i}.") for i in range(len(slides))]
    own = layers[slides.index(True)]
    full, sliding = config["kv_lora_rank"], own["kv_lora_rank"]
    rotary = own["qk_rope_head_dim"]
    return {
        "block_count": len(slides) + 1,
        "nextn_predict_layers": 1,
        "attention.head_count": np.array([one["num_attention_heads"] for one in (*layers, own)], np.int32),
        "attention.sliding_window": config["sliding_window"],
        "attention.sliding_window_pattern": np.array(slides),
        "attention.indexer.types": ~np.array(slides),
        "attention.key_length": full + config["qk_rope_head_dim"],
        "attention.value_length": full,
        "attention.kv_lora_rank_swa": sliding,
        "attention.key_length_swa": sliding + rotary,
        "attention.value_length_swa": sliding,
        "attention.key_length_mla_swa": own["qk_nope_head_dim"] + rotary,
        "attention.value_length_mla_swa": own["v_head_dim"],
        "rope.freq_base": float(rope["indexed_attention"]["rope_theta"]),
        "rope.freq_base_swa": float(rope["sliding_attention"]["rope_theta"]),
    }


def hy_v4_facts(config: dict[str, Any]) -> dict[str, Any]:
    """All layers clamp experts alike."""
    return {
        "attention.indexer.types": np.array([kind == "full" for kind in config["indexer_types"]]),
        "hyper_connection.count": config["hc_mult"],
        "hyper_connection.epsilon": config["hc_eps"],
        "hyper_connection.magnitude": config["hc_magnitude"],
        "swiglu_clamp_exp": np.array([config["swiglu_limit"]] * config["num_hidden_layers"], np.float32),
    }


def glm5_facts(config: dict[str, Any]) -> dict[str, Any]:
    """A layer that guesses tokens ahead comes last, but where the file lists the indexers."""
    kinds, types = config["layer_types"], config.get("indexer_types")
    ahead = [] if types else [1]
    layers = len(kinds) + len(ahead)
    limits = np.array([config["swiglu_limit"]] * layers, np.float32)
    inner = config["n_shared_experts"] * config["moe_intermediate_size"]
    return {
        "block_count": layers,
        "nextn_predict_layers": len(ahead),
        "attention.head_count_kv": np.array([int(kind != "linear_attention") for kind in kinds] + ahead, np.int32),
        "attention.layer_norm_epsilon": 1e-6,
        "attention.indexer.kpool": config["index_kpool"],
        **({} if types else {"attention.indexer.index_share_mtp": True, "expert_shared_feed_forward_length": inner}),
        "attention.indexer.kpool_select_tail": True,
        **({"attention.indexer.types": np.array([kind == "full" for kind in types])} if types else {}),
        "kda.head_dim": config["linear_head_dim"],
        "kda.gate_lower_bound": float(config["linear_lower_bound"]),
        "ssm.conv_kernel": config["linear_conv_kernel_dim"],
        "hyper_connection.count": config["hc_mult"],
        "hyper_connection.sinkhorn_iterations": config["hc_sinkhorn_iters"],
        "hyper_connection.epsilon": config["hc_eps"],
        "swiglu_clamp_exp": limits,
        "swiglu_clamp_shexp": limits,
    }
