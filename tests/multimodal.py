"""Tiny multimodal checkpoints, made by transformers' own classes."""

import re
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForImageTextToText, GenerationConfig

from manyhands.testing.tiny import BOS, EOS, MIN_VOCAB, PAD, WINDOW, _fill, _tokenizer
from manyhands.testing.tiny_configs import LFM3_KINDS, NEMOTRON_KINDS

LAYERS: Final = 4
CONTEXT: Final = 512
_TEXT: Final[dict[str, Any]] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": MIN_VOCAB,
    "max_position_embeddings": CONTEXT,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "pad_token_id": PAD,
}
_TOWER: Final = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
_QWEN_TOWER: Final = {"depth": 2, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "patch_size": 14}
_YARN: Final = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 256}
_GROWING: Final = {
    **_YARN,
    "original_max_position_embeddings": 32,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
_MROPE: Final = {"type": "mrope", "mrope_section": [2, 3, 3]}
_INTERLEAVED: Final = {"rope_type": "default", "mrope_interleaved": True, "mrope_section": [6, 5, 5]}
_QWEN2_TOWER: Final = {"depth": 1, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, "mlp_ratio": 1}

_AUDIO: Final = {
    "patch_sizes": [4, 2],
    "hidden_sizes": [8, 16],
    "depths": [1, 1],
    "num_hidden_layers": 2,
    "out_hidden_size": 64,
}
_GEMMA4: Final = {
    "head_dim": 32,
    "global_head_dim": 64,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "hidden_size_per_layer_input": 0,
    "sliding_window": WINDOW,
    "use_bidirectional_attention": "vision",
}

_GEMMA4_E4B: Final = {
    **_GEMMA4,
    "attention_k_eq_v": False,
    "num_global_key_value_heads": None,
    "hidden_size_per_layer_input": 32,
    "vocab_size_per_layer_input": 264,
    "layer_types": ["sliding_attention", "full_attention"] * (LAYERS // 2),
    "num_kv_shared_layers": LAYERS // 2,
    "use_double_wide_mlp": True,
}

_LATENT: Final = {
    "q_lora_rank": 32,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "num_key_value_heads": 4,
}
_EXPERTS: Final = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
_DEEPSEEK: Final = {
    **_LATENT,
    **_EXPERTS,
    "n_routed_experts": 8,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}

_LARGE4: Final = {
    "no_rope_layer_interval": 3,
    "final_logit_softcapping": 2.0,
    "index_topk": 16,
    "index_n_heads": 16,
    "index_head_dim": 24,
}

_LLAMA4: Final = {
    "model_type": "llama4_text",
    "head_dim": 32,
    "intermediate_size_mlp": 64,
    "num_local_experts": 4,
    "interleave_moe_layer_step": 2,
    "no_rope_layer_interval": 2,
    "attention_chunk_size": WINDOW,
    "floor_scale": 16,
}

_M3: Final = {
    "head_dim": 32,
    "rotary_dim": 16,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5e6, "partial_rotary_factor": 0.5},
    "dense_intermediate_size": 80,
    "shared_intermediate_size": 48,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_layer_freq": [0, 1, 1, 1],
    "sparse_attention_config": {
        "sparse_attention_freq": [0, 1, 1, 1],
        "sparse_num_index_heads": 2,
        "sparse_index_dim": 24,
        "sparse_block_size": 64,
        "sparse_topk_blocks": 1,
        "sparse_local_block": 0,
    },
}

_COHERE2: Final = {"model_type": "cohere2", "sliding_window": WINDOW, "sliding_window_pattern": 3}
_NEMOTRON_H: Final = {
    "model_type": "nemotron_h",
    "head_dim": 32,
    "layers_block_type": list(NEMOTRON_KINDS),
    "mamba_num_heads": 8,
    "mamba_head_dim": 12,
    "n_groups": 2,
    "ssm_state_size": 20,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 40,
    "moe_shared_expert_intermediate_size": 64,
    "time_step_min": 1e-9,
}
_RADIO: Final = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "video_temporal_patch_size": 2}
_LINEAR: Final = {
    "model_type": "qwen3_5_text",
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 20,
    "linear_value_head_dim": 16,
}

# A name -> (model_type, what text_config has beside _TEXT, vision_config)
KINDS: Final[dict[str, tuple[str, dict[str, Any], dict[str, Any]]]] = {
    "gemma3": ("gemma3", {"head_dim": 32, "sliding_window": WINDOW, "sliding_window_pattern": 2}, _TOWER),
    "gemma4": ("gemma4", _GEMMA4, {**_TOWER, "num_key_value_heads": 2, "head_dim": 16}),
    "gemma4_e4b": ("gemma4", _GEMMA4_E4B, {**_TOWER, "num_key_value_heads": 2, "head_dim": 16}),
    "gemma4_unified": (
        "gemma4_unified",
        {k: v for k, v in _GEMMA4.items() if k != "hidden_size_per_layer_input"},
        {"mm_embed_dim": 64, "mm_posemb_size": 8, "patch_size": 4},
    ),
    "aya_vision": ("aya_vision", _COHERE2, {**_TOWER, "model_type": "siglip_vision_model"}),
    "cohere2_vision": ("cohere2_vision", _COHERE2, {**_TOWER, "model_type": "siglip_vision_model"}),
    "exaone4_5": (
        "exaone4_5",
        {"model_type": "exaone4", "sliding_window": WINDOW, "sliding_window_pattern": 3},
        {**_QWEN_TOWER, "out_hidden_size": 64, "num_key_value_heads": 1},
    ),
    "hyperclovax_vision_v2": (
        "hyperclovax_vision_v2",
        {"model_type": "hyperclovax", "embedding_multiplier": 10.0, "attention_multiplier": 0.2, "logits_scaling": 4.0},
        {**_QWEN_TOWER, "out_hidden_size": 64, "model_type": "qwen2_5_vl_vision"},
    ),
    "idefics3": ("idefics3", {"model_type": "llama"}, _TOWER),
    "smolvlm": ("smolvlm", {"model_type": "llama", "head_dim": 32}, _TOWER),
    "internvl": (
        "internvl",
        {"model_type": "qwen3_moe", **_EXPERTS, "num_experts": 8, "head_dim": 32},
        {**_TOWER, "image_size": [28, 28], "patch_size": [14, 14]},
    ),
    "lfm2_vl": (
        "lfm2_vl",
        {
            "model_type": "lfm2",
            "block_multiple_of": 32,
            "conv_bias": True,
            "layer_types": ["conv", "full_attention"] * 2,
        },
        {**_TOWER, "model_type": "siglip2_vision_model", "num_patches": 4},
    ),
    "lfm3_vl": (
        "lfm3_vl",
        {"model_type": "lfm3", "head_dim": 32, "sliding_window": WINDOW, "layer_types": [*LFM3_KINDS, LFM3_KINDS[0]]},
        {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2},
    ),
    "minicpmv4_6": ("minicpmv4_6", _LINEAR, {**_TOWER, "insert_layer_id": 0}),
    "minicpmv4_7": ("minicpmv4_7", _LINEAR, {**_TOWER, "insert_layer_id": 0}),
    "nemotron_h_omni": ("nemotron_h_omni", _NEMOTRON_H, _RADIO),
    "ministral3": (
        "mistral3",
        {"model_type": "ministral3", "head_dim": 32, "rope_parameters": _GROWING},
        {**_TOWER, "model_type": "pixtral"},
    ),
    "cohere_compass": (
        "cohere_compass",
        {
            "model_type": "cohere_compass_text",
            "layer_types": ["sliding_attention", "full_attention"] * (LAYERS // 2),
            "logit_scale": 0.5,
            "rope_parameters": {
                "full_attention": None,
                "sliding_attention": {"rope_type": "default", "rope_theta": 5e4, "mrope_section": [4, 2, 2]},
            },
            "sliding_window": WINDOW,
        },
        {**_QWEN_TOWER, "out_hidden_size": 64, "deepstack_visual_indexes": [0]},
    ),
    "step3p7": (
        "step3p7",
        {
            "model_type": "step3p5",
            "head_dim": 32,
            "layer_types": ["full_attention", "sliding_attention"] * (LAYERS // 2),
            "mlp_layer_types": ["dense", *["sparse"] * (LAYERS - 1)],
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "num_sliding_attention_heads": 6,
            "partial_rotary_factors": [0.5, 1.0] * (LAYERS // 2),
            "rope_theta": [5e6, 1e4] * (LAYERS // 2),
            "share_expert_dim": 40,
            "sliding_window": WINDOW,
            "swiglu_limits": [0.0, 0.0, 0.0, 0.4],
            "swiglu_limits_shared": [0.3, 0.0, 0.0, 0.2],
        },
        {
            "hidden_size": 32,
            "intermediate_size": 32,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "image_size": 28,
        },
    ),
    "glm4v": (
        "glm4v",
        {
            "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2], "partial_rotary_factor": 0.5},
            "head_dim": 16,
        },
        {**_QWEN_TOWER, "out_hidden_size": 64},
    ),
    "glm4v_moe": (
        "glm4v_moe",
        {**_EXPERTS, "n_routed_experts": 8, "head_dim": 32}
        | {"rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3], "partial_rotary_factor": 0.5}},
        {**_QWEN_TOWER, "out_hidden_size": 64},
    ),
    "kimi_k25": (
        "kimi_k25",
        {"model_type": "deepseek_v3", **_DEEPSEEK},
        {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2},
    ),
    "llama4": (
        "llama4",
        _LLAMA4,
        {**_TOWER, "vision_output_dim": 32, "projector_input_dim": 32, "projector_output_dim": 32},
    ),
    "mistral4": (
        "mistral3",
        {"model_type": "mistral4", **_DEEPSEEK, "rope_parameters": {**_GROWING, "partial_rotary_factor": 0.5}},
        {**_TOWER, "model_type": "pixtral"},
    ),
    "mistral_large4": (
        "mistral_large4",
        {"model_type": "mistral_large4_text", **_DEEPSEEK, **_LARGE4, "q_lora_rank": None},
        {**_TOWER, "model_type": "pixtral"},
    ),
    "minimax_m3": ("minimax_m3_vl", _M3, {**_TOWER, "image_size": 28}),
    "muse_glimmer": (
        "muse_glimmer",
        {"head_dim": 32, "layer_rope_theta": [1e4, 0, 1e4, 0], "sliding_window": WINDOW},
        {**_TOWER, "pos_emb_height": 4, "pos_emb_width": 4},
    ),
    "muse_spark": (
        "muse_spark",
        {"head_dim": 32, "layer_rope_theta": [5e5, 0, 5e5, 0], "sliding_window": WINDOW, "moe_hidden_size": 40}
        | {"moe_intermediate_size": 24, "num_local_experts": 8, "num_experts_per_tok": 3}
        | {"mlp_layer_types": ["dense", *["sparse"] * (LAYERS - 1)]},
        {**_TOWER, "pos_emb_height": 4, "pos_emb_width": 4},
    ),
    "mistral3": (
        "mistral3",
        {"model_type": "mistral", "head_dim": 32, "sliding_window": None},
        {**_TOWER, "model_type": "pixtral"},
    ),
    "qwen2_vl": ("qwen2_vl", {"rope_scaling": _MROPE}, _QWEN2_TOWER),
    "qwen2_5_vl": ("qwen2_5_vl", {"rope_scaling": _MROPE}, {**_QWEN_TOWER, "out_hidden_size": 64}),
    "qwen3_5": (
        "qwen3_5",
        {"head_dim": 32, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 20}
        | {"linear_value_head_dim": 16, "rope_parameters": {**_INTERLEAVED, "partial_rotary_factor": 0.25}},
        {**_QWEN_TOWER, "out_hidden_size": 64},
    ),
    "qwen4_exp": (
        "qwen4_exp",
        {"head_dim": 32, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 20}
        | {"linear_value_head_dim": 16, "rope_parameters": {**_INTERLEAVED, "partial_rotary_factor": 0.25}}
        | {**_EXPERTS, "num_experts": 8, "shared_expert_intermediate_size": 24, "hc_count": 2, "hc_lowrank": 8}
        | {"indexer_n_heads": 16, "indexer_kv_heads": 1, "indexer_head_dim": 8, "indexer_budget": 8}
        | {"indexer_compress_ratio": 4, "ple_layer_ids": [2], "ngram_vocab_size_base": 50, "heads_per_ngram": 2}
        | {"make_ngram_vocab_size_divisible_by": 8, "split_ngram_parts": 4, "ple_embed_dim": 32},
        {**_QWEN_TOWER, "out_hidden_size": 64},
    ),
    "qwen3_vl_moe": (
        "qwen3_vl_moe",
        {**_EXPERTS, "num_experts": 8, "head_dim": 32, "mlp_only_layers": [1], "rope_scaling": _INTERLEAVED},
        {**_QWEN_TOWER, "out_hidden_size": 64, "deepstack_visual_indexes": [0]},
    ),
    "qwen3_vl": (
        "qwen3_vl",
        {"head_dim": 32, "rope_scaling": _INTERLEAVED},
        {**_QWEN_TOWER, "out_hidden_size": 64, "deepstack_visual_indexes": [0]},
    ),
}


def make_multimodal(kind: str, out: Path, *, tied: bool = True, max_shard_bytes: int = 1 << 30) -> Path:
    """Write a checkpoint of one of KINDS, in fp32, with the tokenizer of tiny models; returns `out`."""
    model_type, text, tower = KINDS[kind]
    tied = tied and kind != "muse_spark"  # which transformers does not tie
    text = {**_TEXT, **text, "tie_word_embeddings": tied}
    more = {"audio_config": _AUDIO} if kind == "muse_spark" else {}
    config = AutoConfig.for_model(model_type, text_config=text, vision_config=tower, tie_word_embeddings=tied, **more)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    _fill(model, 0)
    model.generation_config = GenerationConfig(bos_token_id=BOS, eos_token_id=EOS, pad_token_id=PAD)
    model.save_pretrained(out, max_shard_size=max_shard_bytes)
    if kind == "kimi_k25":
        _as_published(out)
    _tokenizer(CONTEXT).save_pretrained(out)
    return out


def _as_published(folder: Path) -> None:
    """Layers of Kimi K2.5's text by their published names: transformers (5.23) writes them as those of images."""
    tensors = load_file(folder / "model.safetensors")
    renamed = {
        re.sub(r"^(language_model\.model)\.blocks\.", r"\1.layers.", name): held for name, held in tensors.items()
    }
    save_file(renamed, folder / "model.safetensors", {"format": "pt"})
