"""The text part of Llava's kin and of models that listen (Voxtral, Qwen2-Audio) against transformers: logits, greedy ids."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForMultimodalLM, GenerationConfig, PreTrainedModel

from manyhands.checkpoint.text_part import text_config
from manyhands.engine.library import Team
from manyhands.errors import ModelError
from manyhands.program.families import build_program, read_program
from manyhands.testing.tiny import BOS, EOS, MIN_VOCAB, PAD, WINDOW, _fill
from tests.text_parts import PROMPT, greedy

CONTEXT = 512
_TEXT: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": MIN_VOCAB,
    "max_position_embeddings": CONTEXT,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "pad_token_id": PAD,
}
_CLIP = {
    "model_type": "clip_vision_model",
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 8,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
_SIGLIP = {**_CLIP, "model_type": "siglip_vision_model"}
_PIXTRAL = {**_CLIP, "model_type": "pixtral", "head_dim": 16}
_WHISPER = {"d_model": 32, "hidden_size": 32, "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 32}
_WHISPER |= {"num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 128, "num_mel_bins": 8}
_PLACES = {"image_token_index": 5, "video_token_index": 6, "image_token_id": 5, "video_token_id": 6}
# A name -> (model_type, what text_config has beside _TEXT, vision_config or audio_config, fields beside them)
KINDS: dict[str, tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "idefics2": (
        "idefics2",
        {"model_type": "mistral", "sliding_window": WINDOW, "tie_word_embeddings": True},
        {**_CLIP, "model_type": "idefics2_vision"},
        {
            "perceiver_config": {
                "resampler_n_latents": 2,
                "resampler_depth": 1,
                "resampler_n_heads": 2,
                "hidden_size": 64,
            }
            | {"resampler_head_dim": 16, "num_key_value_heads": 2}
        },
    ),
    "idefics2, tied": (
        "idefics2",
        {"model_type": "mistral"},
        {**_CLIP, "model_type": "idefics2_vision"},
        {"tie_word_embeddings": True},
    ),
    "video_llama_3": (
        "video_llama_3",
        {"model_type": "qwen2", "rope_theta": 1e6, "tie_word_embeddings": False},
        {**_CLIP, "model_type": "video_llama_3_vision"},
        {"tie_word_embeddings": True},
    ),
    "llava": ("llava", {"model_type": "llama"}, _CLIP, {}),
    "llava, tied in text_config": ("llava", {"model_type": "llama", "tie_word_embeddings": True}, _CLIP, {}),
    "llava of Pixtral": (
        "llava",
        {"model_type": "mistral", "head_dim": 32, "sliding_window": None, "rope_theta": 1e9, "is_composition": True},
        _PIXTRAL,
        {"vision_feature_layer": -1, "vision_feature_select_strategy": "full"},
    ),
    "llava_next": ("llava_next", {"model_type": "mistral", "sliding_window": WINDOW, "rope_theta": 1e6}, _CLIP, {}),
    "llava_next, tied beside text_config": (
        "llava_next",
        {"model_type": "llama", "tie_word_embeddings": False},
        _CLIP,
        {"tie_word_embeddings": True},
    ),
    "llava_next_video": ("llava_next_video", {"model_type": "llama"}, _CLIP, {"spatial_pool_mode": "average"}),
    "llava_onevision": (
        "llava_onevision",
        {"model_type": "qwen2", "use_sliding_window": False, "max_window_layers": 2, "tie_word_embeddings": True},
        _SIGLIP,
        {"vision_aspect_ratio": "anyres_max_9", "use_image_newline_parameter": True},
    ),
    "video_llava": ("video_llava", {"model_type": "llama", "tie_word_embeddings": True}, _CLIP, {}),
    "vipllava": ("vipllava", {"model_type": "llama"}, _CLIP, {"projector_layernorm_eps": 1e-3}),
    "voxtral": ("voxtral", {"model_type": "llama", "head_dim": 32, "sliding_window": None}, _WHISPER, {}),
    "qwen2_audio": (
        "qwen2_audio",
        {"model_type": "qwen2", "use_mrope": False, "rope_theta": 1e4, "tie_word_embeddings": True},
        _WHISPER,
        {"audio_token_index": 7, "ignore_index": -100},
    ),
}
# What published configs say of sizes, or less.
SILENT: dict[str, dict[str, Any]] = {
    "idefics2": {"model_type": "mistral", "rms_norm_eps": 1e-5, "vocab_size": 32003},
    "video_llama_3": {"model_type": "qwen2", "hidden_size": 1536, "num_attention_heads": 12, "num_key_value_heads": 2},
    "llava": {"model_type": "llama", "vocab_size": 32064},
    "llava_next": {"model_type": "mistral", "vocab_size": 32064, "sliding_window": None},
    "llava_onevision": {},
    "video_llava": {"max_position_embeddings": 4096},
    "voxtral": {},
    "qwen2_audio": {"model_type": "qwen2", "intermediate_size": 11008, "max_position_embeddings": 8192},
}


def make(kind: str, folder: Path) -> PreTrainedModel:
    """A checkpoint of `kind` in `folder`, as transformers writes it, with all fields of KINDS in its config; and its model."""
    family, text, tower, beside = KINDS[kind]
    of_tower = {"audio_config" if "d_model" in tower else "vision_config": tower}
    places = _PLACES if "d_model" not in tower else {}
    config = AutoConfig.for_model(family, text_config={**_TEXT, **text}, **of_tower, **places, **beside)
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForMultimodalLM.from_config(
        config, dtype=torch.float32, attn_implementation="eager"
    )
    _fill(model, 0)
    model.generation_config = GenerationConfig(bos_token_id=BOS, eos_token_id=EOS, pad_token_id=PAD)
    model.save_pretrained(folder)
    written = json.loads((folder / "config.json").read_text())
    written["text_config"] |= {key: value for key, value in text.items() if key != "rope_theta"}
    (folder / "config.json").write_text(json.dumps(written | beside))
    return model.eval()


def rename(folder: Path) -> None:
    """Names of tensors as transformers' modules have them since 2025, where they are those before, or the other way around."""
    tensors = load_file(folder / "model.safetensors")
    is_old = any(name.startswith("language_model.") for name in tensors)
    assert is_old or any(name.startswith("model.language_model.") for name in tensors)
    names = {name: _newer(name) if is_old else _older(name) for name in tensors}
    save_file({names[name]: held for name, held in tensors.items()}, folder / "model.safetensors", {"format": "pt"})


def _newer(name: str) -> str:
    if name.startswith("language_model.lm_head."):
        return name.removeprefix("language_model.")
    return f"model.{name}".replace("model.language_model.model.", "model.language_model.")


def _older(name: str) -> str:
    if name.startswith("lm_head."):
        return f"language_model.{name}"
    return name.replace("model.language_model.", "model.language_model.model.").removeprefix("model.")


@pytest.mark.parametrize(
    ("kind", "renamed"), [(kind, renamed) for kind in KINDS for renamed in (False, True)[: 2 - ("idefics2" in kind)]]
)  # idefics2 has had the same names from the start
def test_text_is_computed_as_transformers_computes_it(kind: str, renamed: bool, tmp_path: Path, team: Team) -> None:
    model = make(kind, tmp_path)
    if renamed:
        rename(tmp_path)
    program, ids, ours = greedy(tmp_path, team)
    with torch.inference_mode():
        theirs = model(input_ids=torch.tensor([ids[:-1]]), use_cache=False).logits[0].numpy()
    assert np.abs(ours - theirs).max() / np.abs(theirs).max() < 2e-5
    assert ids[len(PROMPT) :] == theirs.argmax(-1)[len(PROMPT) - 1 :].tolist()
    assert program.context == CONTEXT


@pytest.mark.parametrize("family", SILENT)
def test_sizes_that_a_config_leaves_out_are_those_of_transformers(family: str) -> None:
    theirs = AutoConfig.for_model(family, text_config=SILENT[family]).text_config.to_dict()
    ours = text_config({"model_type": family, "text_config": SILENT[family]})
    assert build_program(ours) == build_program(theirs)


def test_fields_that_are_not_known_are_refused(tmp_path: Path) -> None:
    make("llava", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    for place in (config, config["text_config"]):
        place["surprise"] = 1
        (tmp_path / "config.json").write_text(json.dumps(config))
        with pytest.raises(ModelError, match="surprise is 1, a field that this family's recipe does not know"):
            read_program(tmp_path)
        del place["surprise"]
