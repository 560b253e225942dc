"""A step3p5 that predicts tokens, which transformers has within Step-3.7 alone, and what its tiny config needs."""

from typing import Any, Final

import torch
from transformers import GenerationMixin
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.models.step3p7 import Step3p7TextConfig, Step3p7TextModel
from transformers.models.step3p7.modeling_step3p7 import Step3p7PreTrainedModel

from manyhands.testing.tiny_latent import WINDOW, Overrides

_FULL: Final = {"rope_type": "default", "rope_theta": 5e6, "partial_rotary_factor": 0.5}
_SLIDING: Final = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0}


def step(hidden: int, layers: int) -> Overrides:
    """Dense layers in front of those with experts; of both some whose activated gates are limited."""
    experts = {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": hidden // 2}
    return {
        **experts,
        "share_expert_dim": hidden,
        "head_dim": hidden // 2,
        "num_sliding_attention_heads": 6,
        "sliding_window": WINDOW,
        "moe_router_scaling_factor": 1.5,
        "mlp_layer_types": ["sparse" if i else "dense" for i in range(layers)],
        "swiglu_limits": [0.25 if i % 2 else 0.0 for i in range(layers)],
        "swiglu_limits_shared": [None if i % 3 else 0.5 for i in range(layers)],
        "rope_parameters": {"full_attention": _FULL, "sliding_attention": _SLIDING},
    }


class Step3p5ForCausalLM(Step3p7PreTrainedModel, GenerationMixin):  # type: ignore[misc]
    """Transformers' text part and a head."""

    config_class = Step3p7TextConfig
    _tied_weights_keys: Final = {"lm_head.weight": "model.embed_tokens.weight"}

    def __init__(self, config: Step3p7TextConfig) -> None:
        super().__init__(config)
        self.model = Step3p7TextModel(config)
        self.lm_head = torch.nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(
        self, input_ids: torch.Tensor | None = None, *, logits_to_keep: int = 0, **inputs: Any
    ) -> CausalLMOutputWithPast:
        """Logits of the last `logits_to_keep` rows, 0: of all."""
        found = self.model(input_ids=input_ids, **inputs)
        logits = self.lm_head(found.last_hidden_state[:, -logits_to_keep:])
        return CausalLMOutputWithPast(logits=logits, past_key_values=found.past_key_values)
