"""The architectures of GGUF that are served: their tensors under the names of transformers, and what their configs add.

What llama.cpp's converter changes in a checkpoint is a convention: it is stated in the config, and the family's recipe asks
for it (Fields.stored).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from manyhands.checkpoint.gguf_keys import GgufKeys

PAIRS: Final = "interleaved_rope"  # rotary pairs lie side by side in the heads of q and k
PLUS_ONE: Final = "norms_plus_one"  # norms hold 1 + weight
SPLIT: Final = (
    "split_kv_b"  # keys and values of latent attention are tensors of their own, with heads as first dimension
)
SEPARATE: Final = "separate_gate_up"  # gate and up of experts are tensors of their own
ENDS: Final = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LLAMA: Final = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_QKV: Final = ("attn_q", "attn_k", "attn_v")
_ATTENTION: Final = (*_QKV, "attn_output")
_QWEN3: Final = {**_LLAMA, "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_QWEN3_MOE: Final = {
    **_QWEN3,
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.{expert}.gate_proj",
    "ffn_up_exps": "mlp.experts.{expert}.up_proj",
    "ffn_down_exps": "mlp.experts.{expert}.down_proj",
}
_MIXTRAL: Final = {
    **_LLAMA,
    "ffn_gate_inp": "block_sparse_moe.gate",
    "ffn_gate_exps": "block_sparse_moe.experts.{expert}.w1",
    "ffn_up_exps": "block_sparse_moe.experts.{expert}.w3",
    "ffn_down_exps": "block_sparse_moe.experts.{expert}.w2",
}
_GEMMA2: Final = {
    **_LLAMA,
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_GEMMA3: Final = {**_GEMMA2, "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_PHI3: Final = {**_LLAMA, "attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}
_GPT_OSS: Final = {
    **_QWEN3_MOE,
    "post_attention_norm": "post_attention_layernorm",
    "attn_sinks.weight": "self_attn.sinks",
    "ffn_gate_inp": "mlp.router",
    "ffn_gate_exps.bias": "mlp.experts.gate_proj.bias",
    "ffn_up_exps.bias": "mlp.experts.up_proj.bias",
    "ffn_down_exps.bias": "mlp.experts.down_proj.bias",
}
_DEEPSEEK2: Final = {
    **_QWEN3_MOE,
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    "attn_k_b": "self_attn.k_b_proj",
    "attn_v_b": "self_attn.v_b_proj",
    "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
}

# Products that have biases together or not at all, and the field of the config that says so; None where the recipe knows.
Biases = tuple[tuple[str | None, tuple[str, ...]], ...]
Config = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Architecture:
    """How one architecture of GGUF is read: its model_type and class in transformers, its tensors, what its config adds.

    `tensors`: of a layer; names with ".weight" or ".bias" are whole, others stand for both. In a stack "{expert}" stands for
    the number of a matrix. `latent`: attention is latent, its widths are read by `more`.
    """

    model_type: str
    name: str
    tensors: Mapping[str, str]
    more: Callable[[GgufKeys, Config], Config] = lambda keys, config: {}
    conventions: tuple[str, ...] = ()
    latent: bool = False
    biases: Biases = (("attention_bias", _ATTENTION), ("mlp_bias", ("ffn_gate", "ffn_up", "ffn_down")))

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


def _qwen3_moe(keys: GgufKeys, config: Config) -> Config:
    inner = keys.count("expert_feed_forward_length")
    return {**_experts(keys, config), "moe_intermediate_size": inner, "norm_topk_prob": True}


_ROUTED: Final = (None, ("ffn_gate_inp", "ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"))
ARCHITECTURES: Final[Mapping[str, Architecture]] = {
    "llama": Architecture("llama", "LlamaForCausalLM", _LLAMA, conventions=(PAIRS,)),
    "qwen2": Architecture("qwen2", "Qwen2ForCausalLM", _LLAMA, biases=((None, _QKV),)),
    "qwen3": Architecture("qwen3", "Qwen3ForCausalLM", _QWEN3),
    "qwen3moe": Architecture("qwen3_moe", "Qwen3MoeForCausalLM", _QWEN3_MOE, _qwen3_moe),
    "gemma": Architecture("gemma", "GemmaForCausalLM", _LLAMA, _gemma, (PLUS_ONE,)),
    "gemma2": Architecture("gemma2", "Gemma2ForCausalLM", _GEMMA2, _gemma2, (PLUS_ONE,)),
    "gemma3": Architecture("gemma3_text", "Gemma3ForCausalLM", _GEMMA3, _gemma3, (PLUS_ONE,)),
    "phi3": Architecture("phi3", "Phi3ForCausalLM", _PHI3, _phi3),
    "gpt-oss": Architecture(
        "gpt_oss",
        "GptOssForCausalLM",
        _GPT_OSS,
        _gpt_oss,
        (SEPARATE,),
        biases=(("attention_bias", _ATTENTION), _ROUTED),
    ),
    "deepseek2": Architecture(
        "deepseek_v3",
        "DeepseekV3ForCausalLM",
        _DEEPSEEK2,
        _deepseek2,
        latent=True,
        biases=((None, ("exp_probs_b",)),),
    ),
}
MIXTRAL_LLAMA: Final = Architecture("mixtral", "MixtralForCausalLM", _MIXTRAL, _experts, (PAIRS,))
