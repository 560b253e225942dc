"""What the configs of tiny models of whose layers some turn and others do not need (tiny_configs.py)."""

from manyhands.testing.tiny_latent import WINDOW, Overrides, experts


def compass(hidden: int) -> Overrides:
    rope = {"full_attention": None, "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0}}
    return {"sliding_window": WINDOW, "rope_parameters": rope, "logit_scale": 0.5}


def flint(hidden: int) -> Overrides:
    return {**experts(hidden, 8), "head_dim": hidden // 2, "sliding_window": WINDOW, "mlp_only_layers": [1]}


def kolibri(hidden: int) -> Overrides:
    kinds = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": hidden // 2}
    return {**kinds, "head_dim": hidden // 2, "sliding_window": WINDOW, "shared_expert_intermediate_size": hidden}


def beam(hidden: int) -> Overrides:
    return {**experts(hidden, 8), "head_dim": hidden // 2, "sliding_window": WINDOW, "n_group": 2, "topk_group": 1}
