"""The text part of models that also speak (Qwen2.5-Omni, Qwen3-Omni) against transformers: logits in fp32, and greedy ids."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    GenerationConfig,
    PreTrainedModel,
    Qwen2_5OmniThinkerConfig,
    Qwen2_5OmniThinkerForConditionalGeneration,
    Qwen3OmniMoeThinkerConfig,
    Qwen3OmniMoeThinkerForConditionalGeneration,
)

from manyhands.engine.library import Team
from manyhands.errors import ModelError
from manyhands.program.families import build_program, read_program
from manyhands.testing.tiny import BOS, EOS, MIN_VOCAB, PAD, _fill
from tests.text_parts import PROMPT, greedy

LAYERS = 4
_TEXT: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": MIN_VOCAB,
    "max_position_embeddings": 512,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "pad_token_id": PAD,
}
_ROPE = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [6, 5, 5]}
_SOUND = {"d_model": 32, "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 32, "output_dim": 64}
_TOWER = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 64}
_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "head_dim": 32}
# Which model, what its text_config has beside _TEXT, and what published ones say that no arithmetic reads.
KINDS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "qwen2_5_omni": (
        "qwen2_5_omni",
        {"rope_parameters": {**_ROPE, "mrope_section": [2, 3, 3]}},
        {"init_std": 0.02, "use_sliding_window": False, "max_window_layers": 28, "sliding_window": 32768},
    ),
    "qwen2_5_omni, windows": (
        "qwen2_5_omni",
        {"rope_parameters": {**_ROPE, "mrope_section": [2, 3, 3]}, "use_sliding_window": True}
        | {"sliding_window": 16, "max_window_layers": 2},
        {},
    ),
    "qwen3_omni_moe": (
        "qwen3_omni_moe",
        {**_EXPERTS, "rope_parameters": {**_ROPE, "interleaved": True, "mrope_interleaved": True}},
        {"use_qk_norm": True, "shared_expert_intermediate_size": 0, "sliding_window": None},
    ),
    "qwen3_omni_moe, dense layers, sums as they are": (
        "qwen3_omni_moe",
        {**_EXPERTS, "rope_parameters": _ROPE, "mlp_only_layers": [1], "norm_topk_prob": False, "attention_bias": True},
        {"use_sliding_window": True, "sliding_window": 8},
    ),
}
CLASSES: dict[str, tuple[Any, Any]] = {
    "qwen2_5_omni": (Qwen2_5OmniThinkerConfig, Qwen2_5OmniThinkerForConditionalGeneration),
    "qwen3_omni_moe": (Qwen3OmniMoeThinkerConfig, Qwen3OmniMoeThinkerForConditionalGeneration),
}


def make(kind: str, folder: Path, *, is_whole: bool) -> PreTrainedModel:
    """A checkpoint in `folder` as published, or of the part that writes alone, as transformers writes it; and its model."""
    family, text, _ = KINDS[kind]
    config_of, model_of = CLASSES[family]
    more = {} if family == "qwen2_5_omni" else {"downsample_hidden_size": 8}
    tied = {"tie_word_embeddings": kind.endswith("as they are")}
    tower = _TOWER if family == "qwen2_5_omni" else {**_TOWER, "deepstack_visual_indexes": [0]}
    config = config_of(text_config={**_TEXT, **text}, vision_config=tower, audio_config={**_SOUND, **more}, **tied)
    model: PreTrainedModel = model_of._from_config(config, dtype=torch.float32, attn_implementation="eager")
    _fill(model, 0)
    model.generation_config = GenerationConfig(bos_token_id=BOS, eos_token_id=EOS, pad_token_id=PAD)
    model.save_pretrained(folder)
    if is_whole:
        publish(kind, folder)
    return model.eval()


def publish(kind: str, folder: Path) -> None:
    """Names of tensors and a config as those of the whole model, with tensors and fields of the part that speaks."""
    family, _, said = KINDS[kind]
    thinker = json.loads((folder / "config.json").read_text())
    thinker["text_config"] |= said
    thinker |= {"position_id_per_seconds": 25, "seconds_per_chunk": 2, "audio_end_token_id": 7, "ignore_index": -100}
    speech = {"talker_config": {"text_config": {"hidden_size": 8}}, "enable_audio_output": True, "enable_talker": True}
    speech |= {"code2wav_config": {}, "token2wav_config": {}, "tts_bos_token_id": 5, "system_token_id": 8}
    config = {"model_type": family, "architectures": ["X"], "thinker_config": thinker, **speech, "im_end_token_id": EOS}
    (folder / "config.json").write_text(json.dumps(config))
    tensors = load_file(folder / "model.safetensors")
    names = {name: f"thinker.{name.replace('model.language_model.', 'model.')}" for name in tensors}
    others = {f"{part}.model.layers.0.w.weight": torch.zeros(2, 2) for part in ("talker", "code2wav", "token2wav")}
    save_file({names[name]: held for name, held in tensors.items()} | others, folder / "model.safetensors")


@pytest.mark.parametrize("is_whole", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_text_is_computed_as_transformers_computes_it(kind: str, is_whole: bool, tmp_path: Path, team: Team) -> None:
    model = make(kind, tmp_path, is_whole=is_whole)
    _, ids, ours = greedy(tmp_path, team)
    with torch.inference_mode():
        theirs = model(torch.tensor([ids[:-1]]), use_cache=False).logits[0].numpy()
    assert np.abs(ours - theirs).max() / np.abs(theirs).max() < 2e-5
    assert ids[len(PROMPT) :] == theirs.argmax(-1)[len(PROMPT) - 1 :].tolist()


@pytest.mark.parametrize("family", ["qwen3_omni_moe", "qwen2_5_omni"])
def test_fields_that_are_not_known_are_refused(family: str, tmp_path: Path) -> None:
    make(family, tmp_path, is_whole=True)
    config = json.loads((tmp_path / "config.json").read_text())
    for place in (config, config["thinker_config"], config["thinker_config"]["text_config"]):
        place["surprise"] = 1
        (tmp_path / "config.json").write_text(json.dumps(config))
        with pytest.raises(ModelError, match="surprise is 1, a field that this family's recipe does not know"):
            read_program(tmp_path)
        del place["surprise"]
    for broken in ({**config, "thinker_config": 5}, {"model_type": family}):
        with pytest.raises(ModelError):
            build_program(broken)
