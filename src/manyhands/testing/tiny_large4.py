"""A Mistral Large 4 of text that predicts tokens, which transformers has within the multimodal one alone."""

from typing import Any, Final

import torch
from transformers import GenerationMixin
from transformers.conversion_mapping import register_checkpoint_conversion_mapping
from transformers.core_model_loading import WeightRenaming
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.models.mistral_large4 import (
    MistralLarge4PreTrainedModel,
    MistralLarge4TextConfig,
    MistralLarge4TextModel,
)

from manyhands.testing.tiny_latent import WINDOW, Overrides, mla

_YARN: Final = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 16.0, "original_max_position_embeddings": 32}
# Published names of what the mapping of transformers has for the whole model alone, by those of this class.
_NAMES: Final = (
    (r"^tok_embeddings\.", "model.embed_tokens."),
    (r"^lerope\.alpha", "model.rotary_emb.alpha"),
    (r"^layers\.", "model.layers."),
    (r"^norm\.", "model.norm."),
    (r"^output\.", "lm_head."),
    (r"\.wo\.", ".o_proj."),
    (r"\.(feed_forward|shared_experts)\.w1\.", r".\1.gate_proj."),
    (r"\.(feed_forward|shared_experts)\.w2\.", r".\1.down_proj."),
    (r"\.(feed_forward|shared_experts)\.w3\.", r".\1.up_proj."),
)


def large4(hidden: int) -> Overrides:
    """Few positions are chosen; of three layers one has no positions."""
    index = {"index_n_heads": 16, "index_head_dim": hidden // 2, "index_topk": WINDOW, "no_rope_layer_interval": 3}
    routing = {"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": hidden // 2}
    rope = {"rope_parameters": {**_YARN, "attention_factor": 1.0}, "final_logit_softcapping": 8.0}
    return {**mla(hidden), **index, **routing, **rope, "q_lora_rank": None}


class MistralLarge4ForCausalLM(MistralLarge4PreTrainedModel, GenerationMixin):  # type: ignore[misc]
    """Transformers' text part and a head with a soft cap."""

    config_class = MistralLarge4TextConfig
    _tied_weights_keys: Final = {"lm_head.weight": "model.embed_tokens.weight"}

    def __init__(self, config: MistralLarge4TextConfig) -> None:
        super().__init__(config)
        self.model = MistralLarge4TextModel(config)
        self.lm_head = torch.nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(
        self, input_ids: torch.Tensor | None = None, *, logits_to_keep: int = 0, **inputs: Any
    ) -> CausalLMOutputWithPast:
        """Logits of the last `logits_to_keep` rows, 0: of all."""
        found, cap = self.model(input_ids=input_ids, **inputs), self.config.final_logit_softcapping
        logits = self.lm_head(found.last_hidden_state[:, -logits_to_keep:])
        return CausalLMOutputWithPast(logits=cap * (logits / cap).tanh(), past_key_values=found.past_key_values)


register_checkpoint_conversion_mapping(
    MistralLarge4ForCausalLM.__name__, [WeightRenaming(*names) for names in _NAMES], overwrite=True
)
