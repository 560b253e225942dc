"""A muse_glimmer that predicts tokens, which transformers has with images alone, and what its tiny config needs."""

from typing import Any, Final

import torch
from transformers import GenerationMixin
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.models.muse_glimmer import MuseGlimmerTextConfig, MuseGlimmerTextModel
from transformers.models.muse_glimmer.modeling_muse_glimmer import MuseGlimmerPreTrainedModel

from manyhands.testing.tiny_latent import WINDOW, Overrides


def glimmer(hidden: int) -> Overrides:
    return {"head_dim": hidden // 2, "sliding_window": WINDOW, "output_multiplier": 0.7}


class MuseGlimmerForCausalLM(MuseGlimmerPreTrainedModel, GenerationMixin):  # type: ignore[misc]
    """Transformers' text part and a head."""

    config_class = MuseGlimmerTextConfig
    _tied_weights_keys: Final = {"lm_head.weight": "model.embed_tokens.weight"}

    def __init__(self, config: MuseGlimmerTextConfig) -> None:
        super().__init__(config)
        self.model = MuseGlimmerTextModel(config)
        self.lm_head = torch.nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(
        self, input_ids: torch.Tensor | None = None, *, logits_to_keep: int = 0, **inputs: Any
    ) -> CausalLMOutputWithPast:
        """Logits of the last `logits_to_keep` rows, 0: of all; multiplied, then capped as those of the whole model are."""
        found, cap = self.model(input_ids=input_ids, **inputs), self.config.final_logit_softcapping
        logits = self.lm_head(found.last_hidden_state[:, -logits_to_keep:]) * self.config.output_multiplier
        return CausalLMOutputWithPast(logits=cap * torch.tanh(logits / cap), past_key_values=found.past_key_values)
