"""What the configs of tiny models of Inkling need, and the names of its published tensors for the class of text alone, which
transformers has for the whole model."""

from typing import Any

from transformers.conversion_mapping import get_checkpoint_conversion_mapping
from transformers.core_model_loading import WeightRenaming

from manyhands.testing.tiny_latent import WINDOW, Overrides


def inkling(hidden: int) -> Overrides:
    """Scores that grow with the position and distances beyond the extent within some dozens of positions."""
    near = {"swa_num_attention_heads": 6, "swa_num_key_value_heads": 2, "swa_head_dim": hidden // 4}
    experts = {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": hidden // 2}
    scores = {"d_rel": 8, "rel_extent": 40, "log_scaling_n_floor": 32, "sliding_window_size": WINDOW}
    return {
        **near,
        **experts,
        **scores,
        "head_dim": hidden // 2,
        "logits_mup_width_multiplier": 2.0,
        "route_scale": 2.0,
    }


def inkling_kinds(layers: int) -> Overrides:
    """Of each layer."""
    return {
        "layer_types": ["hybrid" if i % 3 == 2 else "hybrid_sliding" for i in range(layers)],
        "mlp_layer_types": ["sparse" if i else "dense" for i in range(layers)],
    }


def inkling_names() -> list[Any]:
    """How published names become those of the class of text."""
    found = []
    for one in get_checkpoint_conversion_mapping("inkling_mm_model") or []:
        if any("audio" in pattern or "vis" in pattern for pattern in one.source_patterns):
            continue
        if "language_model." not in one.target_patterns[0]:
            found.append(one)
            continue
        target = one.target_patterns[0].replace("language_model.", "")
        found.append(WeightRenaming(source_patterns=one.source_patterns[0], target_patterns=target))
    return found
