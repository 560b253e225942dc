"""Models whose blocks are experts, as llama.cpp's converter writes them: what a file says of them besides the usual."""

from typing import Any

SPLIT_FAMILIES = ("deepseek_v3",)  # as newer converters write them
_YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 256, "mscale": 0.7,
    "mscale_all_dim": 0.7,
}  # fmt: skip
# What a GGUF file cannot say otherwise, and what tiny models have not of themselves.
EXPERTS_FIXED: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"mlp_only_layers": [], "norm_topk_prob": True},
    "qwen2_moe": {"mlp_only_layers": []},
    "gpt_oss": {"rope_parameters": {
        "rope_type": "yarn", "rope_theta": 150000.0, "factor": 4.0, "original_max_position_embeddings": 256,
        "truncate": False,
    }},
    "deepseek_v3": {"rope_parameters": _YARN},
}  # fmt: skip
_DEEPSEEK = {
    "expert_feed_forward_length": "moe_intermediate_size", "expert_group_count": "n_group",
    "expert_group_used_count": "topk_group", "expert_shared_count": "n_shared_experts",
    "expert_weights_scale": "routed_scaling_factor", "expert_weights_norm": "norm_topk_prob",
    "leading_dense_block_count": "first_k_dense_replace",
}  # fmt: skip
# Keys that an architecture's files have besides the usual ones, and the fields that they stand for.
EXPERTS_MORE: dict[str, dict[str, str]] = {
    "gpt-oss": {"attention.sliding_window": "sliding_window", "expert_feed_forward_length": "intermediate_size"},
    "qwen3moe": {"expert_feed_forward_length": "moe_intermediate_size"},
    "deepseek2": _DEEPSEEK,
}  # fmt: skip


def expert_facts(config: dict[str, Any], rope: dict[str, Any]) -> dict[str, Any]:
    """Keys that are no copies of fields."""
    if "kv_lora_rank" in config:
        return _latent(config, rope)
    return {}


def _latent(config: dict[str, Any], rope: dict[str, Any]) -> dict[str, Any]:
    """What the converter says of latent attention: of newer files, that it has one key head."""
    rank, rotary = config["kv_lora_rank"], config["qk_rope_head_dim"]
    own = {"key_length": config["qk_nope_head_dim"] + rotary, "value_length": config["v_head_dim"]}
    keys = {f"attention.{key}": size for key, size in own.items()} | {"rope.dimension_count": rotary}
    if config["is_split"]:
        keys |= {f"attention.{key}_mla": size for key, size in own.items()}
        keys |= {"attention.key_length": rank + rotary, "attention.value_length": rank, "attention.head_count_kv": 1}
    keys |= {"attention.q_lora_rank": config["q_lora_rank"], "attention.kv_lora_rank": rank}
    if "n_routed_experts" not in config:
        return keys
    return {**keys, "expert_gating_func": 2, "rope.scaling.yarn_log_multiplier": 0.1 * rope.get("mscale_all_dim", 0.0)}
