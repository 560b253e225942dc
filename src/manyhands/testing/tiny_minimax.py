"""What the configs of tiny models of MiniMax need (tiny_configs.py)."""

from manyhands.testing.tiny_latent import Overrides


def minimax(hidden: int) -> Overrides:
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
    return {**experts, "head_dim": hidden // 2, "rotary_dim": hidden // 4}


def lightning(hidden: int) -> Overrides:
    kinds = ("full_attn", "linear_attn", "mlp")
    factors = {f"{kind}_{name}_factor": 1.5 - i / 4 for i, kind in enumerate(kinds) for name in ("alpha", "beta")}
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
    return {**factors, **experts, "head_dim": hidden // 4 + 4, "block_size": 32, "mlp_beta_factor": 0.75}


def published_lightning(hidden: int, chosen: int) -> Overrides:
    return {**lightning(hidden), "num_experts_per_tok": chosen, "postnorm": True}


def minimax_m3(hidden: int) -> Overrides:
    """Rows from position 64 on see one of two blocks."""
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "swiglu_limit": 1.0}
    widths = {"head_dim": hidden // 2, "rotary_dim": hidden // 2, "index_head_dim": hidden // 2 + 8}
    inner = {"dense_intermediate_size": 2 * hidden, "shared_intermediate_size": hidden}
    index = {"index_n_heads": 2, "index_block_size": 64, "index_topk_blocks": 1, "index_local_blocks": 0}
    return {**experts, **widths, **inner, **index}
