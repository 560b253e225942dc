"""What the configs of tiny models with latent attention, and of those with experts like theirs, need (tiny_configs.py)."""

from typing import Any, Final

WINDOW: Final = 24  # positions; small, so that tests cross it

Overrides = dict[str, Any]  # keyword arguments of a transformers config


def mla(hidden: int) -> Overrides:
    head = hidden // 4
    return {
        "q_lora_rank": hidden // 2,
        "kv_lora_rank": hidden // 4,
        "qk_nope_head_dim": head // 2,
        "qk_rope_head_dim": head // 2,
        "v_head_dim": head,
        "num_key_value_heads": 4,
    }


def experts(hidden: int, count: int) -> Overrides:
    return {"num_experts": count, "num_experts_per_tok": 2, "moe_intermediate_size": hidden // 2}


def deepseek(hidden: int) -> Overrides:
    routing = {"n_routed_experts": 8, "n_group": 2, "topk_group": 1, "n_shared_experts": 1, "first_k_dense_replace": 2}
    return {**mla(hidden), **routing, "num_experts_per_tok": 2, "moe_intermediate_size": hidden // 2}


def indexed(hidden: int) -> Overrides:
    return {**deepseek(hidden), "index_n_heads": 8, "index_head_dim": hidden // 2, "index_topk": WINDOW}


def shared_choice(hidden: int) -> Overrides:
    """Two of three layers use what the one before has chosen."""
    return {**indexed(hidden), "index_topk_freq": 3, "index_skip_topk_offset": 1}


def axk2(hidden: int) -> Overrides:
    # Fewer heads would have scores of zero, which are equal.
    index = {"index_n_heads": 16, "index_head_dim": hidden // 2, "index_topk": WINDOW}
    routing = {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": hidden // 2}
    return {**mla(hidden), **index, **routing, "gated_norm_rank": 5}


def dots3(hidden: int) -> Overrides:
    """Heads of layers with a window have other numbers and widths than those of the others."""
    sizes = {"num_attention_heads": 2, "num_key_value_heads": 2, "q_lora_rank": 28, "kv_lora_rank": 20, "head_dim": 24}
    own = {**sizes, "qk_nope_head_dim": 10, "v_head_dim": 18}
    index = {"index_n_heads": 8, "index_head_dim": hidden // 2, "index_topk": WINDOW, "sliding_window": WINDOW}
    experts = {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": hidden // 2}
    experts["shared_experts_intermediate_size"] = hidden // 2 + 8
    return {**mla(hidden), **index, **experts, **{f"swa_{name}": value for name, value in own.items()}}


def hy_v4(hidden: int) -> Overrides:
    index = {"index_n_heads": 8, "index_head_dim": hidden // 2, "index_topk": WINDOW}
    return {**glm4_lite(hidden), **index, "swiglu_limit": 1.0, "pad_token_id": None}


def longcat(hidden: int) -> Overrides:
    experts = {"n_routed_experts": 8, "zero_expert_num": 4, "moe_topk": 3, "expert_ffn_hidden_size": hidden // 2}
    return {**mla(hidden), **experts, "head_dim": hidden // 8, "routed_scaling_factor": 1.5}


def glm4_lite(hidden: int) -> Overrides:
    routing = {"n_routed_experts": 8, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2}
    return {**mla(hidden), **routing, "moe_intermediate_size": hidden // 2}


def kimi_linear(hidden: int) -> Overrides:
    heads = {"linear_num_heads": 3, "linear_head_dim": hidden // 4 + 4, "q_lora_rank": None}
    return {**mla(hidden), **heads, **experts(hidden, 8), "n_shared_experts": 1}


def bailing(hidden: int) -> Overrides:
    heads = {name: value for name, value in mla(hidden).items() if name != "q_lora_rank"}
    routing = {"n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}
    return {**heads, **experts(hidden, 8), **routing, "head_dim": hidden // 4 + 4}


def kimi(hidden: int) -> Overrides:
    return {**deepseek(hidden), "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}


def deepseek_v2(hidden: int) -> Overrides:
    return {**mla(hidden), **beside_shared(hidden), "q_lora_rank": None}


def beside_shared(hidden: int) -> Overrides:
    routing = {"n_routed_experts": 8, "n_shared_experts": 1, "first_k_dense_replace": 1, "num_experts_per_tok": 2}
    return {**routing, "moe_intermediate_size": hidden // 2}


def mistral4(hidden: int) -> Overrides:
    width = hidden // 4
    yarn = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 8}
    scales = {"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1, "partial_rotary_factor": 0.5}
    experts = {"n_routed_experts": 8, "num_experts_per_tok": 3, "first_k_dense_replace": 1}
    return {**mla(hidden), **experts, "moe_intermediate_size": width, "rope_parameters": {**yarn, **scales}}
