"""Models whose blocks are experts, as llama.cpp's converter writes them: what a file says of them besides the usual."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.gguf_indexed import DOTS3, GLM5_FIXED, HY_V4_SHARED, dots3_facts, glm5_facts, hy_v4_facts

Piece = tuple[str, NDArray[np.float32]]

EXPERT_FAMILIES = (
    "glm4_moe", "glm4_moe_air",
    "minimax_m2",
    "ernie4_5_moe", "ernie4_5_moe_alone",
    "hunyuan_v1_moe",
    "dots1",
    "olmoe",
    "deepseek_v2", "deepseek_v2_old", "glm4_moe_lite",
    "exaone_moe", "llama4_text", "qwen3_moe_vl",
    "glm_moe_dsa", "glm_moe_dsa_shared", "deepseek_v32", "mistral4", "mistral4_air",
    "bailing_hybrid", "bailing_hybrid_limited", "kimi_linear", "deepseek_v4", "mimo_v2_flash", "mimo_v2_flash_fused",
    "hy_v3", "afmoe", "laguna", "laguna_plain", "mellum", "cohere2_moe", "cohere2_moe_norm",
    "step3p5", "step3p5_plain",
    "minimax_m3_vl_text", "minimax", "minimax_part",
    "phimoe", "phimoe_plain", "dots3_note_text", "hy_v4", "hy_v4_shared", *GLM5_FIXED,
)  # fmt: skip
SPLIT_FAMILIES = (
    "deepseek_v3",
    "deepseek_v2",
    "glm4_moe_lite",
    "glm_moe_dsa",
    "deepseek_v32",
    "mistral4",
    "kimi_linear",
    "bailing_hybrid",
    "bailing_hybrid_limited",
    "glm_moe_dsa_shared",
    "mistral4_air",
    "kimi_k3",
    "kimi_k3_plain",
    "dots3_note_text",
    "hy_v4",
    "hy_v4_shared",
    *GLM5_FIXED,
)  # as newer converters write them
# Families that share an architecture, or have another name with their publisher.
SAME_FILES = {
    "deepseek_v2": "deepseek_v3",
    "falcon_mamba": "mamba",
    "glm4_moe_lite": "deepseek_v3",
    "minimax": "minimax_text_01",
}
_YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 256, "mscale": 0.7,
    "mscale_all_dim": 0.7,
}  # fmt: skip
_LIGHTNING = {  # one factor of all residual streams, and transformers' epsilon of lightning attention's norm
    **dict.fromkeys(("linear_attn_alpha_factor", "full_attn_alpha_factor", "mlp_alpha_factor"), 1.5),
    **dict.fromkeys(("linear_attn_beta_factor", "full_attn_beta_factor", "mlp_beta_factor"), 1.0),
    "rms_norm_eps": 1e-6,
}
# What a GGUF file cannot say otherwise, and what tiny models have not of themselves.
EXPERTS_FIXED: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"mlp_only_layers": [], "norm_topk_prob": True},
    "qwen2_moe": {"mlp_only_layers": []},
    "gpt_oss": {"rope_parameters": {
        "rope_type": "yarn", "rope_theta": 150000.0, "factor": 4.0, "original_max_position_embeddings": 256,
        "truncate": False,
    }},
    "deepseek_v3": {"rope_parameters": _YARN},
    "deepseek_v2": {"n_shared_experts": 2, "q_lora_rank": 32, "routed_scaling_factor": 1.5},
    "deepseek_v2_old": {"rope_parameters": _YARN},
    "glm_moe_dsa": {"first_k_dense_replace": 1, "rms_norm_eps": 1e-5, "index_head_dim": 64},  # a Hadamard matrix of llama.cpp
    "glm_moe_dsa_shared": {"index_head_dim": 64, "indexer_types": ["full", "full", "shared", "full"]},
    "deepseek_v32": {"rope_parameters": {**_YARN, "mscale": 1.0, "mscale_all_dim": 1.0}, "index_head_dim": 64},
    "dots3_note_text": DOTS3,
    "hy_v4_shared": HY_V4_SHARED,
    **GLM5_FIXED,
    "kimi_linear": {"linear_num_heads": 4, "norm_topk_prob": True},
    "kimi_k3": {
        "rms_norm_eps": 1e-6, "attn_res_block_size": 3, "kv_lora_rank": 32, "qk_nope_head_dim": 32,
        "moe_intermediate_size": 32,
    },
    "kimi_k3_plain": {
        "rms_norm_eps": 1e-6, "attn_res_block_size": 2, "activation_situ_linear_beta": None, "latent_moe_use_norm": False,
        "mla_use_output_gate": False, "moe_renormalize": False, "q_lora_rank": None, "routed_expert_hidden_size": None,
    },
    "bailing_hybrid_limited": {
        "expert_swiglu_limit_list": [0, 0.25, 0, 0.1], "share_expert_swiglu_limit_list": [0, 0, 0.5, 0.25],
    },
    "mistral4": {"moe_intermediate_size": 32},
    "mimo_v2_flash": {"routed_scaling_factor": 1.0},
    "deepseek_v4": {
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 128}, "num_hash_layers": 1,
        "mlp_layer_types": ["hash_moe", "moe", "moe", "moe"], "index_head_dim": 64, "routed_scaling_factor": 1.5,
    },
    "glm4_moe_lite": {"first_k_dense_replace": 1},  # as it is published
    "glm4_moe": {"n_group": 2, "topk_group": 1, "num_key_value_heads": 2, "routed_scaling_factor": 2.5},
    "glm4_moe_air": {"use_qk_norm": False, "first_k_dense_replace": 2, "norm_topk_prob": False},
    "ernie4_5_moe": {"moe_num_shared_experts": 2},
    "ernie4_5_moe_alone": {"moe_num_shared_experts": 0, "moe_layer_start_index": 2},
    "hunyuan_v1_moe": {"head_dim": 16},  # the converter takes it to be hidden / heads
    "dots1": {"num_key_value_heads": 4, "sliding_window": None, "norm_topk_prob": True, "routed_scaling_factor": 2.5},
    "olmoe": {"num_key_value_heads": 4},
    "exaone_moe": {"n_group": 1, "topk_group": 1, "sliding_window_pattern": 4, "routed_scaling_factor": 2.5},
    "hy_v3": {"attention_bias": False, "mlp_bias": False},
    "glm4_moe_fused": {"attention_bias": False, "n_shared_experts": 1, "n_group": 2, "topk_group": 1, "head_dim": 16},
    "minimax_m3_vl_text": {
        "swiglu_limit": 7.0, "index_local_blocks": 1, "intermediate_size": 96, "shared_intermediate_size": 96,
    },
    "minimax": _LIGHTNING,
    "minimax_part": {**_LIGHTNING, "layer_types": ["linear_attention", "full_attention"] * 2},
    "phimoe": {
        "lm_head_bias": True, "router_jitter_noise": 0.01, "max_position_embeddings": 131072,
        "rope_parameters": {
            "rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 4096,
            "short_factor": [1 + i / 16 for i in range(8)], "long_factor": [1 + i / 4 for i in range(8)],
            "short_mscale": 1.243163121016122, "long_mscale": 1.243163121016122,
        },
    },
    "phimoe_plain": {"lm_head_bias": True, "router_jitter_noise": 0.01, "sliding_window": 9},  # as Phi-mini-MoE
    "afmoe": {"global_attn_every_n_layers": 4},
    "laguna": {
        "layer_types": ["full_attention", *["sliding_attention"] * 3], "mlp_layer_types": ["dense", *["sparse"] * 3],
        "rope_parameters": {
            "full_attention": {
                "rope_type": "yarn", "rope_theta": 5e5, "factor": 4.0, "original_max_position_embeddings": 256,
                "beta_fast": 64.0, "beta_slow": 1.0, "partial_rotary_factor": 0.5,
            },
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0},
        },
        "moe_routed_scaling_factor": 2.5,
    },
    "laguna_plain": {  # as M.1: no layer has a window, and each column of a head has a gate
        "layer_types": ["full_attention"] * 4, "gating": "per-element",
        "num_attention_heads_per_layer": [4] * 4, "mlp_layer_types": ["dense", "dense", "sparse", "sparse"],
    },
    "step3p5": {
        "layer_types": ["full_attention", *["sliding_attention"] * 3], "mlp_layer_types": ["dense", *["sparse"] * 3],
        "rope_parameters": {
            "full_attention": {
                "rope_type": "llama3", "rope_theta": 5e6, "factor": 2.0, "original_max_position_embeddings": 64,
                "low_freq_factor": 1.0, "high_freq_factor": 32.0, "partial_rotary_factor": 0.5,
            },
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0},
        },
        "swiglu_limits": [0.0, 0.0, 0.25, 0.5], "swiglu_limits_shared": [0.0, 0.5, 0.0, 0.25],
    },
    "step3p5_plain": {  # no layer has heads of its own, and nothing is limited
        "layer_types": ["sliding_attention", "full_attention"] * 2, "mlp_layer_types": ["sparse"] * 4,
        "num_sliding_attention_heads": 4, "swiglu_limits": None, "swiglu_limits_shared": None,
    },
    "mellum": {
        "norm_topk_prob": True, "mlp_layer_types": ["sparse"] * 4, "attention_bias": False,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "rope_parameters": {
            "full_attention": {
                "rope_type": "yarn", "rope_theta": 5e5, "factor": 4.0, "original_max_position_embeddings": 256,
            },
            "sliding_attention": {"rope_type": "default", "rope_theta": 5e5},
        },
    },
    "cohere2_moe": {"expert_selection_fn": "sigmoid", "norm_topk_prob": True},
    "cohere2_moe_norm": {
        "rms_norm_eps": 1e-5, "expert_selection_fn": "softmax", "first_k_dense_replace": 0,
        "prefix_dense_intermediate_size": None, "num_shared_experts": 0, "norm_topk_prob": True,
    },
    "llama4_text": {"no_rope_layer_interval": 4, "attention_chunk_size": 8192, "floor_scale": 8192},
}  # fmt: skip
_DEEPSEEK = {
    "expert_feed_forward_length": "moe_intermediate_size", "expert_group_count": "n_group",
    "expert_group_used_count": "topk_group", "expert_shared_count": "n_shared_experts",
    "expert_weights_scale": "routed_scaling_factor", "expert_weights_norm": "norm_topk_prob",
    "leading_dense_block_count": "first_k_dense_replace",
}  # fmt: skip
_INDEXED = {
    **_DEEPSEEK, "attention.indexer.head_count": "index_n_heads", "attention.indexer.key_length": "index_head_dim",
    "attention.indexer.top_k": "index_topk",
}  # fmt: skip
# Keys that an architecture's files have besides the usual ones, and the fields that they stand for.
EXPERTS_MORE: dict[str, dict[str, str]] = {
    "gpt-oss": {"attention.sliding_window": "sliding_window", "expert_feed_forward_length": "intermediate_size"},
    "qwen3moe": {"expert_feed_forward_length": "moe_intermediate_size"},
    **dict.fromkeys(("deepseek2", "glm4moe", "dots1", "mistral4", "bailingmoe2"), _DEEPSEEK),
    "minimax-m3": {
        "feed_forward_length": "dense_intermediate_size", "expert_feed_forward_length": "intermediate_size",
        "expert_weights_scale": "routed_scaling_factor", "attention.indexer.head_count": "index_n_heads",
        "attention.indexer.key_length": "index_head_dim", "attention.indexer.top_k": "index_topk_blocks",
        "attention.indexer.block_size": "index_block_size", "attention.indexer.local_blocks": "index_local_blocks",
        "rope.dimension_count": "rotary_dim",
    },
    "bailingmoe3": {
        "expert_feed_forward_length": "moe_intermediate_size", "expert_shared_feed_forward_length": "moe_intermediate_size",
        "expert_group_count": "num_expert_group", "expert_group_used_count": "topk_group",
        "expert_shared_count": "num_shared_experts", "expert_weights_scale": "routed_scaling_factor",
        "expert_weights_norm": "moe_renormalize", "leading_dense_block_count": "first_k_dense_replace",
    },
    "kimi-linear": {
        "expert_feed_forward_length": "moe_intermediate_size", "expert_shared_count": "num_shared_experts",
        "expert_weights_scale": "routed_scaling_factor",
    },
    "kimi-k3": {
        "expert_feed_forward_length": "moe_intermediate_size", "expert_shared_count": "num_shared_experts",
        "expert_group_used_count": "topk_group", "expert_weights_scale": "routed_scaling_factor",
        "expert_weights_norm": "moe_renormalize", "leading_dense_block_count": "first_k_dense_replace",
        "expert_latent_length": "routed_expert_hidden_size", "activation.situ_beta": "activation_situ_beta",
        "attn_res.block_size": "attn_res_block_size",
    },
    **dict.fromkeys(("glm-dsa", "deepseek32", "dots3note", "hy_v4", "glm5-next"), _INDEXED),
    "deepseek4": {
        "expert_feed_forward_length": "moe_intermediate_size", "expert_weights_scale": "routed_scaling_factor",
        "attention.q_lora_rank": "q_lora_rank", "attention.output_lora_rank": "o_lora_rank",
        "attention.output_group_count": "o_groups", "attention.sliding_window": "sliding_window",
        "attention.indexer.head_count": "index_n_heads", "attention.indexer.key_length": "index_head_dim",
        "attention.indexer.top_k": "index_topk", "hyper_connection.count": "hc_mult",
        "hyper_connection.sinkhorn_iterations": "hc_sinkhorn_iters", "hyper_connection.epsilon": "hc_eps",
    },
    "mimo2": {
        "expert_feed_forward_length": "moe_intermediate_size", "attention.value_length": "v_head_dim",
        "attention.value_scale": "attention_value_scale",
    },
    "exaone-moe": {**_DEEPSEEK, "expert_shared_count": "num_shared_experts"},
    "llama4": {
        "feed_forward_length": "intermediate_size_mlp", "expert_feed_forward_length": "intermediate_size",
        "interleave_moe_layer_step": "interleave_moe_layer_step",
    },
    "hy_v3": {"expert_feed_forward_length": "moe_intermediate_size", "expert_weights_scale": "router_scaling_factor"},
    "afmoe": {
        **_DEEPSEEK, "expert_shared_count": "num_shared_experts", "expert_weights_scale": "route_scale",
        "leading_dense_block_count": "num_dense_layers", "attention.sliding_window": "sliding_window",
    },
    "step35": {
        "expert_feed_forward_length": "moe_intermediate_size", "expert_shared_feed_forward_length": "share_expert_dim",
        "expert_weights_scale": "moe_router_scaling_factor", "attention.sliding_window": "sliding_window",
    },
    "laguna": {
        "expert_feed_forward_length": "moe_intermediate_size",
        "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
        "expert_weights_scale": "moe_routed_scaling_factor",
    },
    "mellum": {"expert_feed_forward_length": "moe_intermediate_size", "attention.sliding_window": "sliding_window"},
    "cohere2moe": {
        "expert_feed_forward_length": "intermediate_size", "attention.sliding_window": "sliding_window",
        "logit_scale": "logit_scale",
        "expert_weights_norm": "norm_topk_prob", "expert_shared_count": "num_shared_experts",
    },
    "qwen3vlmoe": {"expert_feed_forward_length": "moe_intermediate_size"},
    "phimoe": {"attention.sliding_window": "sliding_window"},
    "minimax-m2": {"expert_feed_forward_length": "intermediate_size", "rope.dimension_count": "rotary_dim"},
    "ernie4_5-moe": {
        "expert_count": "moe_num_experts", "expert_used_count": "moe_k", "interleave_moe_layer_step": "moe_layer_interval",
        "leading_dense_block_count": "moe_layer_start_index", "expert_feed_forward_length": "moe_intermediate_size",
        "expert_shared_count": "moe_num_shared_experts",
    },
    "hunyuan-moe": {
        "expert_count": "num_experts", "expert_used_count": "moe_topk", "expert_feed_forward_length": "intermediate_size",
        "expert_shared_feed_forward_length": "intermediate_size",
    },
}  # fmt: skip


def expert_facts(arch: str, name: str, config: dict[str, Any], rope: dict[str, Any]) -> dict[str, Any]:
    """Keys of the tiny family `name` that are no copies of fields."""
    if arch == "deepseek4":
        return _deepseek4(config, rope)
    if arch == "mimo2":
        return _mimo2(config, rope)
    if "kv_lora_rank" in config:
        return _latent(name, config, rope)
    if arch in _MIXTURES:
        return _MIXTURES[arch](config, rope)
    if arch == "glm4moe":
        ahead = {"block_count": config["num_hidden_layers"] + 1, "nextn_predict_layers": 1}
        seen = {"rope.dimension_sections": np.array([1, 1, 2, 0], np.int32)}  # of a model that sees
        return {"expert_gating_func": 2, **(ahead if name == "glm4_moe" else seen)}
    if arch == "exaone-moe":
        slides = np.array([kind == "sliding_attention" for kind in config["layer_types"]])
        windows = {"attention.sliding_window": config["sliding_window"], "attention.sliding_window_pattern": slides}
        shared = config["moe_intermediate_size"] * config["num_shared_experts"]
        return {
            **windows,
            "expert_gating_func": 2,
            "expert_shared_feed_forward_length": shared,
            "rope.scaling.type": "none",
        }
    if arch in ("minimax-m2", "dots1"):
        return {"expert_gating_func": 2}
    if arch == "hunyuan-moe":
        width = config["head_dim"]
        larger = rope["rope_theta"] * rope["alpha"] ** (width / (width - 2))
        whole = {"rope.scaling.type": "none", "rope.scaling.factor": 1.0}
        none = {"expert_group_count": 0, "expert_group_used_count": 0}  # false in the published config
        return {**whole, **none, "rope.freq_base": larger, "expert_shared_count": 1}
    if arch == "ernie4_5-moe" and (shared := config["moe_num_shared_experts"]):
        return {"expert_shared_feed_forward_length": config["moe_intermediate_size"] * shared}
    return {}


def _latent(name: str, config: dict[str, Any], rope: dict[str, Any]) -> dict[str, Any]:
    """What the converter says of latent attention: of newer files, that it has one key head."""
    rank, rotary = config["kv_lora_rank"], config["qk_rope_head_dim"]
    own = {"key_length": config["qk_nope_head_dim"] + rotary, "value_length": config["v_head_dim"]}
    keys = {f"attention.{key}": size for key, size in own.items()} | {"rope.dimension_count": rotary}
    if config["is_split"]:
        keys |= {f"attention.{key}_mla": size for key, size in own.items()}
        keys |= {"attention.key_length": rank + rotary, "attention.value_length": rank, "attention.head_count_kv": 1}
    # llama.cpp knows by the number of layers of published models whether queries have a latent; elsewhere 0 says so.
    keys |= {"attention.q_lora_rank": config.get("q_lora_rank") or 0, "attention.kv_lora_rank": rank}
    if "num_experts_per_tok" not in config:
        return keys
    if name != "deepseek_v2_old":  # which is softmax without the key
        keys["expert_gating_func"] = 1 if name in ("deepseek_v2", "mistral4", "mistral4_air") else 2
    if "mlp_layer_types" in config:
        keys["leading_dense_block_count"] = config["mlp_layer_types"].count("dense")
    if name == "glm_moe_dsa":
        keys |= {"block_count": config["num_hidden_layers"] + 1, "nextn_predict_layers": 1}
    if name == "glm_moe_dsa_shared":
        keys["attention.indexer.types"] = np.array([kind == "full" for kind in config["indexer_types"]])
    if name.startswith("bailing_hybrid"):
        keys |= {"kda.safe_gate": True, "kda.gate_lower_bound": float(config["kda_lower_bound"])}
        limits = {"exp": "expert_swiglu_limit_list", "shexp": "share_expert_swiglu_limit_list"}
        keys |= {f"swiglu_clamp_{to}": np.array(config[of], np.float32) for to, of in limits.items() if config.get(of)}
    if name.startswith(("kimi_linear", "bailing_hybrid")):
        keys["attention.head_count_kv"] = np.array(
            [kind == "full_attention" for kind in config["layer_types"]], np.int32
        )
        keys |= {"kda.head_dim": config["linear_head_dim"], "ssm.conv_kernel": config["linear_conv_kernel_dim"]}
    if name == "dots3_note_text":
        keys |= dots3_facts(config, rope)
    if name.startswith("hy_v4"):
        keys |= hy_v4_facts(config)
    if name in GLM5_FIXED:
        keys |= glm5_facts(config)
    if name.startswith("kimi_k3"):
        keys |= _kimi_k3(config, config["linear_attn_config"])
    if name.startswith("mistral4"):
        keys["attention.temperature_scale"] = rope["llama_4_scaling_beta"]
        keys["attention.temperature_length"] = rope["original_max_position_embeddings"]
    return {**keys, "rope.scaling.yarn_log_multiplier": 0.1 * rope.get("mscale_all_dim", 0.0)}


def kimi_k3_layers(layers: int, is_bounded: bool) -> dict[str, Any]:
    """Fields of a kimi_k3 of so many layers: every second one has attention. A GGUF file states one number of heads for both
    kinds."""
    full = [*range(2, layers + 1, 2)]
    linear = {"full_attn_layers": full, "kda_layers": [*range(1, layers + 1, 2)], "head_dim": 32, "num_heads": 4}
    bound = {"gate_lower_bound": -5.0} if is_bounded else {}
    more = {"short_conv_kernel_size": 4, "use_full_rank_gate": True, **bound}
    return {"num_hidden_layers": layers, "linear_attn_config": {**linear, **more}}


def _kimi_k3(config: dict[str, Any], linear: dict[str, Any]) -> dict[str, Any]:
    """Sizes of linear attention, and which layers have it: those without key heads."""
    bound, layers = linear.get("gate_lower_bound"), range(1, config["num_hidden_layers"] + 1)
    return {
        "activation.situ_linear_beta": float(config.get("activation_situ_linear_beta") or 0),  # 0: none
        "attention.head_count_kv": np.array([i in linear["full_attn_layers"] for i in layers], np.int32),
        "kda.head_dim": linear["head_dim"],
        "ssm.conv_kernel": linear["short_conv_kernel_size"],
        **({} if bound is None else {"kda.gate_lower_bound": float(bound)}),
    }


def fused_scores(tensors: dict[str, NDArray[np.float32]]) -> dict[str, NDArray[np.float32]]:
    """With one vector in place of the norm and the projection of each attention residual (kimi_k3): their product. The first
    residual has nothing to mix; its vector is stored all the same.
    """
    out = dict(tensors)
    for name in [name for name in tensors if name.endswith("_res_norm.weight")]:
        norm, projection = out.pop(name), out.pop(name.replace("_res_norm", "_res_proj"))
        out[name.replace("_res_norm", "_res_score")] = norm * projection[0]
    unread = {
        name.replace("mlp", "self_attention"): out[name] for name in out if name.endswith("s.0.mlp_res_score.weight")
    }
    return {**unread, **out}


_RATIOS = {"sliding_attention": 0, "compressed_sparse_attention": 4, "heavily_compressed_attention": 128}


def _deepseek4(config: dict[str, Any], rope: dict[str, Any]) -> dict[str, Any]:
    """Counts layers that guess tokens ahead although the file has none, as the converter does."""
    layers, main = config["num_hidden_layers"], rope.get("main", {})
    return {
        "attention.head_count_kv": 1,
        "attention.compress_ratios": np.array([*map(_RATIOS.get, config["layer_types"]), 0], np.int32),
        "attention.compress_rope_freq_base": float(rope["compress"]["rope_theta"]),
        "rope.freq_base": float(main["rope_theta"]),
        "rope.dimension_count": int(config["head_dim"] * main["partial_rotary_factor"]),
        **{
            f"rope.scaling.{ours}": rope["compress"][theirs]
            for ours, theirs in _SCALING.items()
            if theirs in rope["compress"]
        },
        "expert_gating_func": 4,
        "expert_shared_count": 1,
        "expert_weights_norm": True,
        "hash_layer_count": config["mlp_layer_types"].count("hash_moe"),
        "nextn_predict_layers": 1,
        "swiglu_clamp_exp": np.array([config["swiglu_limit"]] * layers, np.float32),
    }


_SCALING = {
    "type": "rope_type", "factor": "factor", "original_context_length": "original_max_position_embeddings",
    "yarn_beta_fast": "beta_fast", "yarn_beta_slow": "beta_slow",
}  # fmt: skip


def _mimo2(config: dict[str, Any], rope: dict[str, Any]) -> dict[str, Any]:
    """Three layers that guess tokens ahead come last, with windows: their tensors may be absent."""
    slides, heads = (
        [kind == "sliding_attention" for kind in config["layer_types"]] + [True] * 3,
        config["num_key_value_heads"],
    )
    return {
        "block_count": config["num_hidden_layers"] + 3,
        "nextn_predict_layers": 3,
        "attention.head_count_kv": np.array([heads * (1 + on) for on in slides], np.int32),
        "attention.sliding_window": config["sliding_window"] - 1,
        "attention.sliding_window_pattern": np.array(slides),
        "rope.freq_base_swa": float(rope["sliding_attention"]["rope_theta"]),
        "expert_gating_func": 2,
    }


def _slides(config: dict[str, Any]) -> NDArray[np.bool_]:
    return np.array([kind == "sliding_attention" for kind in config["layer_types"]])


def _hy_v3(config: dict[str, Any], rope: dict[str, Any]) -> dict[str, Any]:
    """Two layers that guess tokens ahead come last: their tensors may be absent."""
    return {
        "block_count": config["num_hidden_layers"] + 2,
        "nextn_predict_layers": 2,
        "expert_gating_func": 2,
        "expert_weights_norm": True,
        "expert_shared_feed_forward_length": config["moe_intermediate_size"] * config["num_shared_experts"],
    }


def _laguna(config: dict[str, Any], rope: dict[str, Any]) -> dict[str, Any]:
    own = rope["sliding_attention"]
    windows = {"attention.sliding_window": config["sliding_window"]} if _slides(config).any() else {}
    return {
        **windows,
        "attention.head_count": np.array(config["num_attention_heads_per_layer"], np.int32),
        "expert_gating_func": 2,
        "expert_weights_norm": True,
        "leading_dense_block_count": config["mlp_layer_types"].index("sparse"),
        "rope.freq_base_swa": float(own["rope_theta"]),
        "rope.dimension_count_swa": int(config["head_dim"] * own.get("partial_rotary_factor", 1.0)),
    }


def _step35(config: dict[str, Any], rope: dict[str, Any]) -> dict[str, Any]:
    layers = config["num_hidden_layers"]
    limits = (("exp", config["swiglu_limits"]), ("shexp", config["swiglu_limits_shared"]))
    heads = (config["num_attention_heads"], config["num_sliding_attention_heads"])
    return {
        **{f"swiglu_clamp_{name}": np.array(found, np.float32) for name, found in limits if found},
        "attention.head_count": np.array([heads[int(on)] for on in _slides(config)], np.int32),
        "attention.head_count_kv": np.array([config["num_key_value_heads"]] * layers, np.int32),
        "attention.sliding_window_pattern": _slides(config),
        "expert_weights_norm": True,
        "leading_dense_block_count": config["mlp_layer_types"].index("sparse"),
        "rope.dimension_count": config["head_dim"],
        "rope.freq_base_swa": float(rope["sliding_attention"]["rope_theta"]),
    }


def _mellum(config: dict[str, Any], rope: dict[str, Any]) -> dict[str, Any]:
    base = float(rope["sliding_attention"]["rope_theta"])
    return {"attention.sliding_window_pattern": _slides(config), "rope.freq_base_swa": base}


def _cohere2_moe(config: dict[str, Any], rope: dict[str, Any]) -> dict[str, Any]:
    found = {
        "attention.sliding_window_pattern": _slides(config),
        "leading_dense_block_count": config["mlp_layer_types"].count("dense"),
        "expert_gating_func": 2 if config["expert_selection_fn"] == "sigmoid" else 1,
        "feed_forward_length": config.get("prefix_dense_intermediate_size") or config["intermediate_size"],
        "rope.scaling.type": "none",
    }
    if config.get("rms_norm_eps"):
        found["attention.layer_norm_rms_epsilon"] = config["rms_norm_eps"]
    if shared := config["num_shared_experts"]:
        found["expert_shared_feed_forward_length"] = config["intermediate_size"] * shared
    return found


def _minimax_m3(config: dict[str, Any], rope: dict[str, Any]) -> dict[str, Any]:
    dense = config["mlp_layer_types"].count("dense")
    return {
        "expert_gating_func": 2, "expert_weights_norm": True, "expert_shared_count": 1, "leading_dense_block_count": dense,
    }  # fmt: skip


def _minimax_01(config: dict[str, Any], rope: dict[str, Any]) -> dict[str, Any]:
    """Of the one without a list half of a head's columns turn, and every second layer has softmax attention."""
    linear = np.array([kind == "linear_attention" for kind in config["layer_types"]])
    is_part = config["tiny_family"] == "minimax_part"
    part = {"full_attention_interval": 2, "rope.dimension_count": config["head_dim"] // 2}
    return {
        "residual_scale": config["mlp_alpha_factor"],
        **(part if is_part else {"attention.recurrent_layers": linear}),
    }


def _phimoe(config: dict[str, Any], rope: dict[str, Any]) -> dict[str, Any]:
    """The factor of tables is not the checkpoint's."""
    context, original = config["max_position_embeddings"], rope.get("original_max_position_embeddings", 4096)
    factor = float(np.sqrt(1 + np.log(context / original) / np.log(original))) if "short_factor" in rope else None
    scaled = {} if factor is None else {"rope.scaling.attn_factor": factor}
    return {"rope.scaling.original_context_length": original, **scaled}


_MIXTURES = {
    "phimoe": _phimoe,
    "bailingmoe2": lambda config, rope: {
        "expert_gating_func": 2,
        "expert_shared_feed_forward_length": config["moe_intermediate_size"],
    },
    "minimax-01": _minimax_01,
    "minimax-m3": _minimax_m3,
    "hy_v3": _hy_v3,
    "afmoe": lambda config, rope: {"expert_gating_func": 2, "expert_weights_norm": True},
    "laguna": _laguna,
    "step35": _step35,
    "mellum": _mellum,
    "cohere2moe": _cohere2_moe,
}


def layer_ahead(tensors: list[Piece], layers: int, hidden: int) -> list[Piece]:
    """A layer that guesses tokens ahead, behind the others: the last one once more, of one stream, with a few tensors more."""
    last, ahead = f"blk.{layers - 1}.", f"blk.{layers}."
    copied = [
        (name.replace(last, ahead), array) for name, array in tensors if name.startswith(last) and ".hc_" not in name
    ]
    own = {"eh_proj": (hidden, 2 * hidden), "enorm": (hidden,), "hnorm": (hidden,), "shared_head_norm": (hidden,)}
    return copied + [(f"{ahead}nextn.{name}.weight", np.ones(shape, np.float32)) for name, shape in own.items()]
