"""Tiny multimodal checkpoints, made by transformers' own classes."""

from pathlib import Path
from typing import Any, Final

import torch
from transformers import AutoConfig, AutoModelForImageTextToText, GenerationConfig

from manyhands.testing.tiny import BOS, EOS, MIN_VOCAB, PAD, WINDOW, _fill, _tokenizer

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
_GROWING: Final = {**_YARN, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1}
_MROPE: Final = {"type": "mrope", "mrope_section": [2, 3, 3]}
_INTERLEAVED: Final = {"rope_type": "default", "mrope_interleaved": True, "mrope_section": [6, 5, 5]}
_QWEN2_TOWER: Final = {"depth": 1, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, "mlp_ratio": 1}

_GEMMA4: Final = {
    "head_dim": 32,
    "global_head_dim": 64,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "hidden_size_per_layer_input": 0,
    "sliding_window": WINDOW,
    "use_bidirectional_attention": "vision",
}

# A name -> (model_type, what text_config has beside _TEXT, vision_config)
KINDS: Final[dict[str, tuple[str, dict[str, Any], dict[str, Any]]]] = {
    "gemma3": ("gemma3", {"head_dim": 32, "sliding_window": WINDOW, "sliding_window_pattern": 2}, _TOWER),
    "gemma4": ("gemma4", _GEMMA4, {**_TOWER, "num_key_value_heads": 2, "head_dim": 16}),
    "ministral3": (
        "mistral3",
        {"model_type": "ministral3", "head_dim": 32, "rope_parameters": _GROWING},
        {**_TOWER, "model_type": "pixtral"},
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
    "qwen3_vl": (
        "qwen3_vl",
        {"head_dim": 32, "rope_scaling": _INTERLEAVED},
        {**_QWEN_TOWER, "out_hidden_size": 64, "deepstack_visual_indexes": [0]},
    ),
}


def make_multimodal(kind: str, out: Path, *, tied: bool = True, max_shard_bytes: int = 1 << 30) -> Path:
    """Write a checkpoint of one of KINDS, in fp32, with the tokenizer of tiny models; returns `out`."""
    model_type, text, tower = KINDS[kind]
    text = {**_TEXT, **text, "tie_word_embeddings": tied}
    config = AutoConfig.for_model(model_type, text_config=text, vision_config=tower, tie_word_embeddings=tied)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    _fill(model, 0)
    model.generation_config = GenerationConfig(bos_token_id=BOS, eos_token_id=EOS, pad_token_id=PAD)
    model.save_pretrained(out, max_shard_size=max_shard_bytes)
    _tokenizer(CONTEXT).save_pretrained(out)
    return out
