"""The architectures of GGUF that are served: their tensors under the names of transformers, and what their configs add.

What llama.cpp's converter changes in a checkpoint is a convention: it is stated in the config, and the family's recipe asks
for it (Fields.stored).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from manyhands.checkpoint.gguf_keys import GgufKeys
from manyhands.checkpoint.gguf_names import (
    BIASED_ENDS,
    DEEPSEEK2,
    ENDS,
    GEMMA2,
    GEMMA3,
    GLM4,
    GPT_NEOX,
    GPT_NEOX_ENDS,
    GPT_OSS,
    LLAMA,
    MIXTRAL,
    OLMO2,
    PHI2,
    PHI2_ENDS,
    PHI3,
    QWEN2_MOE,
    QWEN3,
    QWEN3_MOE,
    STABLELM,
    STARCODER2,
)

PAIRS: Final = "interleaved_rope"  # rotary pairs lie side by side in the heads of q and k
PLUS_ONE: Final = "norms_plus_one"  # norms hold 1 + weight
SPLIT: Final = "split_kv_b"  # keys and values of latents have tensors of their own, with heads as first dimension
BY_PART: Final = "qkv_by_part"  # one tensor holds all of q, then k, then v
SEPARATE: Final = "separate_gate_up"  # gate and up of experts are tensors of their own
_QKV: Final = ("attn_q", "attn_k", "attn_v")
_ATTENTION: Final = (*_QKV, "attn_output")
_UP_DOWN: Final = ("ffn_up", "ffn_down")
_NORMS: Final = (None, ("attn_norm", "ffn_norm"))
_BLOCK: Final = ("ffn_gate", "ffn_up", "ffn_down")
# Products that have biases together or not at all, and the field of the config that says so; None where the recipe knows.
Biases = tuple[tuple[str | None, tuple[str, ...]], ...]
Config = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Architecture:
    """How one architecture of GGUF is read: its model_type and class in transformers, its tensors, what its config adds.

    `tensors` (gguf_names.py): of a layer. `ends`: all others. `layers`: the path of layers. `eps`: the epsilon's field.
    `latent`: attention is latent, its widths are read by `more`.
    """

    model_type: str
    name: str
    tensors: Mapping[str, str]
    more: Callable[[GgufKeys, Config], Config] = lambda keys, config: {}
    conventions: tuple[str, ...] = ()
    latent: bool = False
    eps: str = "rms_norm_eps"
    ends: Mapping[str, str] = field(default_factory=lambda: ENDS)
    layers: str = "model.layers"
    biases: Biases = (("attention_bias", _ATTENTION), ("mlp_bias", _BLOCK))

    def layer_tensor(self, name: str) -> str | None:
        """The name in transformers of a layer's tensor, None if it has no such tensor."""
        stem, _, kind = name.rpartition(".")
        if kind not in ("weight", "bias"):
            return None
        whole, known = self.tensors.get(name), self.tensors.get(stem)
        return whole or (None if known is None else f"{known}.{kind}")


def _gemma(keys: GgufKeys, config: Config) -> Config:
    return {"hidden_activation": "gelu_pytorch_tanh"}


def _scale_width(keys: GgufKeys, config: Config, largest: int) -> Config:
    """Queries are scaled by the width of a head; in the largest model of a family by hidden / heads."""
    is_largest = config["num_hidden_layers"] == largest
    width = config["hidden_size"] // config["num_attention_heads"] if is_largest else config["head_dim"]
    return {"hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": width}


def _gemma2(keys: GgufKeys, config: Config) -> Config:
    return {
        **_scale_width(keys, config, 46),
        "sliding_window": keys.count("attention.sliding_window", 4096),
        "attn_logit_softcapping": keys.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": keys.number("final_logit_softcapping", 30.0),
    }


def _gemma3(keys: GgufKeys, config: Config) -> Config:
    added = {
        **_scale_width(keys, config, 62),
        "sliding_window": keys.count("attention.sliding_window"),
        "sliding_window_pattern": keys.count("attention.sliding_window_pattern", 6),
        "rope_local_base_freq": keys.number("rope.freq_base_swa", 10000.0),
    }
    return {**added, "rope_theta": keys.number("rope.freq_base", 1000000.0)}


def _phi3(keys: GgufKeys, config: Config) -> Config:
    window = keys.count("attention.sliding_window", 0, least=0)
    return {"sliding_window": window} if 0 < window < config["max_position_embeddings"] else {}


def _experts(keys: GgufKeys, config: Config) -> Config:
    return {"num_local_experts": keys.count("expert_count"), "num_experts_per_tok": keys.count("expert_used_count")}


def _gpt_oss(keys: GgufKeys, config: Config) -> Config:
    """The file does not say that the ends of yarn's ramp are not rounded, as OpenAI computes it (llama.cpp rounds them)."""
    keys.only("attention.sliding_window_pattern", 2)
    scaling = config.get("rope_scaling", {"rope_type": "default"})
    return {
        **_experts(keys, config),
        "intermediate_size": keys.count("expert_feed_forward_length"),
        "sliding_window": keys.count("attention.sliding_window"),
        "rope_scaling": {**scaling, **({"truncate": False} if scaling["rope_type"] == "yarn" else {})},
    }


def _deepseek2(keys: GgufKeys, config: Config) -> Config:
    """Sizes of latent attention, which newer files describe as attention with one key head; the choice of experts."""
    if keys.one("expert_gating_func") != 2 or "exp_probs_b.bias" not in keys.tensors:  # V2 has softmax, or no such key
        raise keys.refused("its experts are not chosen as those of DeepSeek-V3 are: by sigmoid (2), with exp_probs_b")
    is_split = "attn_k_b.weight" in keys.tensors
    key, value = (keys.count(f"attention.{name}_length") for name in ("key", "value"))
    if is_split:
        key, value = (keys.count(f"attention.{name}_length_mla") for name in ("key", "value"))
    rotary, groups = config["head_dim"], keys.count("expert_group_count", 1)
    if key <= rotary:
        raise keys.refused(
            f"attention.key_length{'_mla' * is_split} is {key}; more than the {rotary} that turn is needed"
        )
    log, scaling = keys.number("rope.scaling.yarn_log_multiplier", 0.0), config.get("rope_scaling")
    if scaling:
        if scaling["rope_type"] == "yarn" and log <= 0:
            raise keys.refused("its positions are scaled by yarn without rope.scaling.yarn_log_multiplier")
        mscale = float(str(np.float32(10 * log)))  # the converter writes a tenth
        scaling = scaling | ({"mscale": mscale, "mscale_all_dim": mscale} if scaling["rope_type"] == "yarn" else {})
    return {
        **_experts(keys, config),
        "quantization_config": config["quantization_config"] | ({SPLIT: True} if is_split else {}),
        "q_lora_rank": keys.count("attention.q_lora_rank", 0, least=0) or None,
        "kv_lora_rank": keys.count("attention.kv_lora_rank"),
        "qk_rope_head_dim": rotary,
        "qk_nope_head_dim": key - rotary,
        "v_head_dim": value,
        "rope_scaling": scaling,
        "first_k_dense_replace": keys.count("leading_dense_block_count", 0, least=0),
        "n_routed_experts": keys.count("expert_count"),
        "n_shared_experts": keys.count("expert_shared_count"),
        "moe_intermediate_size": keys.count("expert_feed_forward_length"),
        "n_group": groups,
        "topk_group": keys.count("expert_group_used_count", groups),
        "norm_topk_prob": keys.flag("expert_weights_norm", False),
        "routed_scaling_factor": keys.number("expert_weights_scale", 1.0),
    }


def _qwen2_moe(keys: GgufKeys, config: Config) -> Config:
    used, inner = keys.count("expert_used_count"), config["intermediate_size"]
    return {
        "num_experts": keys.count("expert_count"),
        "num_experts_per_tok": used,
        "moe_intermediate_size": keys.count("expert_feed_forward_length", inner // used),
        "shared_expert_intermediate_size": keys.count("expert_shared_feed_forward_length", inner),
    }


def _stated(*switches: str) -> Callable[[GgufKeys, Config], Config]:
    """Fields that mean something else where they are absent: switches are off, and whole heads turn."""
    return lambda keys, config: (
        {"partial_rotary_factor": config.get("partial_rotary_factor", 1.0)}
        | {name: config.get(name, False) for name in switches}
    )


def _granite(keys: GgufKeys, config: Config) -> Config:
    keys.only("rope.scaling.finetuned", True)  # the switch of rotary embeddings
    return {
        "attention_multiplier": keys.number("attention.scale", config["head_dim"] ** -0.5),
        "embedding_multiplier": keys.number("embedding_scale", 1.0),
        "residual_multiplier": keys.number("residual_scale", 1.0),
        "logits_scaling": keys.number("logit_scale"),
    }


def _olmo3(keys: GgufKeys, config: Config) -> Config:
    """Layers with a window have positions that are not scaled."""
    pattern, layers = keys.get("attention.sliding_window_pattern"), config["num_hidden_layers"]
    slides = np.arange(1, layers + 1) % 4 != 0 if pattern is None else pattern
    if not isinstance(slides, np.ndarray) or len(slides) != layers:
        raise keys.refused(
            f"attention.sliding_window_pattern is {pattern!r:.40}; a switch for each of {layers} layers is needed"
        )
    theta = {"rope_theta": config["rope_theta"]}
    scaled = theta | config.get("rope_scaling", {"rope_type": "default"})
    return {
        "sliding_window": keys.count("attention.sliding_window"),
        "layer_types": ["sliding_attention" if one else "full_attention" for one in slides],
        "rope_theta": None,
        "rope_scaling": None,
        "rope_parameters": {"full_attention": scaled, "sliding_attention": {"rope_type": "default", **theta}},
    }


def _phi2(keys: GgufKeys, config: Config) -> Config:
    """Files of Microsoft's first checkpoint, which most are, have one tensor for q, k and v."""
    fused = {BY_PART: True} if "attn_qkv.weight" in keys.tensors else {}
    return _stated()(keys, config) | {"quantization_config": config["quantization_config"] | fused}


def _stablelm(keys: GgufKeys, config: Config) -> Config:
    """Like llama.cpp by the tensors: the converter says that residuals are parallel where the checkpoint says nothing."""
    keys.get("use_parallel_residual")
    is_parallel, has_norms = "ffn_norm.weight" not in keys.tensors, "attn_q_norm.weight" in keys.tensors
    return _stated()(keys, config) | {"use_parallel_residual": is_parallel, "qk_layernorm": has_norms}


def _gpt_neox(keys: GgufKeys, config: Config) -> Config:
    if config["num_key_value_heads"] != config["num_attention_heads"]:
        raise keys.refused("its heads share keys, which gpt_neox has not")
    return {
        "num_key_value_heads": None,
        "rotary_emb_base": config["rope_theta"],
        "rotary_pct": config.get("partial_rotary_factor", 1.0),
        "partial_rotary_factor": None,
        "attention_bias": config.get("attention_bias", False),
        "use_parallel_residual": keys.flag("use_parallel_residual", True),
    }


def _cohere2(keys: GgufKeys, config: Config) -> Config:
    keys.only("attention.sliding_window_pattern", 4)
    return {"sliding_window": keys.count("attention.sliding_window"), "logit_scale": keys.number("logit_scale")}


def _qwen3_moe(keys: GgufKeys, config: Config) -> Config:
    inner = keys.count("expert_feed_forward_length")
    return {**_experts(keys, config), "moe_intermediate_size": inner, "norm_topk_prob": True}


_ROUTED: Final = (None, ("ffn_gate_inp", "ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"))
ARCHITECTURES: Final[Mapping[str, Architecture]] = {
    "llama": Architecture("llama", "LlamaForCausalLM", LLAMA, conventions=(PAIRS,)),
    "qwen2": Architecture("qwen2", "Qwen2ForCausalLM", LLAMA, biases=((None, _QKV),)),
    "qwen3": Architecture("qwen3", "Qwen3ForCausalLM", QWEN3),
    "qwen3moe": Architecture("qwen3_moe", "Qwen3MoeForCausalLM", QWEN3_MOE, _qwen3_moe),
    "gemma": Architecture("gemma", "GemmaForCausalLM", LLAMA, _gemma, (PLUS_ONE,)),
    "gemma2": Architecture("gemma2", "Gemma2ForCausalLM", GEMMA2, _gemma2, (PLUS_ONE,)),
    "gemma3": Architecture("gemma3_text", "Gemma3ForCausalLM", GEMMA3, _gemma3, (PLUS_ONE,)),
    "phi3": Architecture("phi3", "Phi3ForCausalLM", PHI3, _phi3),
    "gpt-oss": Architecture(
        "gpt_oss",
        "GptOssForCausalLM",
        GPT_OSS,
        _gpt_oss,
        (SEPARATE,),
        biases=(("attention_bias", _ATTENTION), _ROUTED),
    ),
    "deepseek2": Architecture(
        "deepseek_v3",
        "DeepseekV3ForCausalLM",
        DEEPSEEK2,
        _deepseek2,
        latent=True,
        biases=((None, ("exp_probs_b",)),),
    ),
    "qwen2moe": Architecture("qwen2_moe", "Qwen2MoeForCausalLM", QWEN2_MOE, _qwen2_moe, biases=((None, _QKV),)),
    "glm4": Architecture(
        "glm4", "Glm4ForCausalLM", GLM4, _stated("attention_bias"), biases=(("attention_bias", _QKV),)
    ),
    "granite": Architecture("granite", "GraniteForCausalLM", LLAMA, _granite, (PAIRS,)),
    "smollm3": Architecture("smollm3", "SmolLM3ForCausalLM", LLAMA, conventions=(PAIRS,)),
    "olmo2": Architecture("olmo2", "Olmo2ForCausalLM", OLMO2),
    "cohere2": Architecture("cohere2", "Cohere2ForCausalLM", LLAMA, _cohere2, eps="layer_norm_eps"),
    "ernie4_5": Architecture("ernie4_5", "Ernie4_5ForCausalLM", LLAMA, biases=(("use_bias", (*_ATTENTION, *_BLOCK)),)),
    "phi2": Architecture(
        "phi",
        "PhiForCausalLM",
        PHI2,
        _phi2,
        eps="layer_norm_eps",
        ends=PHI2_ENDS,
        biases=((None, ("attn_norm", "attn_qkv", *_ATTENTION, *_UP_DOWN)),),
    ),
    "starcoder2": Architecture(
        "starcoder2",
        "Starcoder2ForCausalLM",
        STARCODER2,
        lambda keys, config: {"use_bias": config.get("use_bias", False)},
        eps="norm_epsilon",
        ends=BIASED_ENDS,
        biases=(_NORMS, ("use_bias", (*_ATTENTION, *_UP_DOWN))),
    ),
    "stablelm": Architecture(
        "stablelm",
        "StableLmForCausalLM",
        STABLELM,
        _stablelm,
        eps="layer_norm_eps",
        ends=BIASED_ENDS,
        biases=(_NORMS, ("use_qkv_bias", _QKV)),
    ),
    "gptneox": Architecture(
        "gpt_neox",
        "GPTNeoXForCausalLM",
        GPT_NEOX,
        _gpt_neox,
        (BY_PART,),
        eps="layer_norm_eps",
        ends=GPT_NEOX_ENDS,
        layers="gpt_neox.layers",
        biases=(_NORMS, ("attention_bias", ("attn_qkv", "attn_output")), (None, _UP_DOWN)),
    ),
    "nemotron": Architecture(
        "nemotron",
        "NemotronForCausalLM",
        LLAMA,
        _stated(),
        (PLUS_ONE,),
        eps="norm_eps",
        ends=BIASED_ENDS,
        biases=(_NORMS, ("attention_bias", _ATTENTION), ("mlp_bias", _UP_DOWN)),
    ),
}
# Others that go by the same name: by a key that only they have.
VARIANTS: Final[Mapping[str, tuple[str, Architecture]]] = {
    "llama": ("expert_count", Architecture("mixtral", "MixtralForCausalLM", MIXTRAL, _experts, (PAIRS,))),
    "olmo2": ("attention.sliding_window", Architecture("olmo3", "Olmo3ForCausalLM", OLMO2, _olmo3)),
}
