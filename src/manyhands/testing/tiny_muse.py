"""A muse_glimmer and a muse_spark that predict tokens, which transformers has with images alone, and what their tiny configs
need."""

from typing import Any, Final

import torch
from transformers import GenerationMixin
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.models.muse_glimmer import MuseGlimmerTextConfig, MuseGlimmerTextModel
from transformers.models.muse_glimmer.modeling_muse_glimmer import MuseGlimmerPreTrainedModel
from transformers.models.muse_spark import MuseSparkTextConfig, MuseSparkTextModel
from transformers.models.muse_spark.modeling_muse_spark import MuseSparkPreTrainedModel

from manyhands.testing.tiny_latent import WINDOW, Overrides


def glimmer(hidden: int) -> Overrides:
    return {"head_dim": hidden // 2, "sliding_window": WINDOW, "output_multiplier": 0.7}


def spark(hidden: int) -> Overrides:
    widths = {"moe_hidden_size": hidden // 2 + 8, "moe_intermediate_size": hidden // 2}
    experts = {"num_local_experts": 8, "num_experts_per_tok": 3, "routed_scaling_factor": 1.5}
    return {**glimmer(hidden), **widths, **experts}


class _Predicts:
    """What a class of transformers calls `model`, and a head behind it."""

    config: Any
    model: torch.nn.Module
    lm_head: torch.nn.Linear

    def forward(
        self, input_ids: torch.Tensor | None = None, *, logits_to_keep: int = 0, **inputs: Any
    ) -> CausalLMOutputWithPast:
        """Logits of the last `logits_to_keep` rows, 0: of all; multiplied, then capped as those of the whole model are."""
        found, cap = self.model(input_ids=input_ids, **inputs), self.config.final_logit_softcapping
        logits = self.lm_head(found.last_hidden_state[:, -logits_to_keep:]) * self.config.output_multiplier
        return CausalLMOutputWithPast(logits=cap * torch.tanh(logits / cap), past_key_values=found.past_key_values)


class MuseGlimmerForCausalLM(_Predicts, MuseGlimmerPreTrainedModel, GenerationMixin):  # type: ignore[misc]
    """Transformers' text part and a head."""

    config_class = MuseGlimmerTextConfig
    _tied_weights_keys: Final = {"lm_head.weight": "model.embed_tokens.weight"}

    def __init__(self, config: MuseGlimmerTextConfig) -> None:
        super().__init__(config)
        self.model = MuseGlimmerTextModel(config)
        self.lm_head = torch.nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()


class MuseSparkForCausalLM(_Predicts, MuseSparkPreTrainedModel, GenerationMixin):  # type: ignore[misc]
    """Transformers' text part and a head."""

    config_class = MuseSparkTextConfig

    def __init__(self, config: MuseSparkTextConfig) -> None:
        super().__init__(config)
        self.model = MuseSparkTextModel(config)
        self.lm_head = torch.nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()
