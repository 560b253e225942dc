"""Inkling against transformers: logits in fp32, greedy ids by way of chunks and states; whole checkpoints as published; bits
whatever the cuts and steps; bad configs."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForImageTextToText

from manyhands.checkpoint.text_part import text_name
from manyhands.core import Precision, SamplingParams
from manyhands.engine import library
from manyhands.errors import ModelError
from manyhands.origin.sampling import sampling
from manyhands.program.families import build_program, read_program
from manyhands.program.ops import Attention, ExpertRouting
from manyhands.testing.tiny import _fill, make_tiny, tiny_config
from manyhands.testing.tiny_inkling import inkling_kinds
from manyhands.worker.choice import program_of
from tests.engine.oracle import NativePair
from tests.engine.test_kimi_k3 import native

PROMPT = [(37 * i * i + 11 * i) % 256 for i in range(90)]
VARIANTS: dict[str, dict[str, Any]] = {
    "as published": {"unpadded_vocab_size": 260},
    "no growth, one expert of every row": {"log_scaling_n_floor": None, "n_shared_experts": 1, "route_scale": 8.0},
    "all layers full, extents of one position": {"layer_types": ["hybrid"] * 4, "rel_extent": 1, "d_rel": 3},
    "all layers with windows, dense": {"layer_types": ["hybrid_sliding"] * 4, "mlp_layer_types": ["dense"] * 4},
    "extents beyond all positions, strong growth": {
        "rel_extent": 300,
        "log_scaling_alpha": 2.0,
        "log_scaling_n_floor": 3,
    },
    "odd widths, other taps": {
        "head_dim": 33,
        "swa_head_dim": 20,
        "conv_kernel_size": 2,
        "n_shared_experts": 3,
        "d_rel": 16,
    },
    "as many experts as there are, gelu": {"num_experts_per_tok": 8, "hidden_act": "gelu", "sliding_window_size": 70},
}
VISION = {"hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 6}
AUDIO = {"n_mel_bins": 4, "mel_vocab_size": 16}


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_variant_computes_what_transformers_computes(variant: str, tmp_path: Path) -> None:
    pair = NativePair(tmp_path, "inkling_text", VARIANTS[variant])
    ids, last = pair.greedy(PROMPT, 64, chunk=7)
    theirs, ours = pair.theirs(ids), pair.ours(ids, pair.span.new_cache(len(ids)))
    assert ours.shape == theirs.shape
    assert float((ours - theirs).abs().max() / theirs.abs().max()) < 2e-5
    assert np.array_equal(ours[-1].numpy(), last.numpy())
    assert ids[len(PROMPT) :] == theirs.argmax(-1)[len(PROMPT) - 1 : -1].tolist()


def test_distances_matter(tmp_path: Path) -> None:
    """What is compared above depends on what is added to scores, within windows and without."""
    folder = make_tiny("inkling_text", tmp_path, dtype="fp32")
    pair = NativePair(folder, None, {})
    before = pair.theirs(PROMPT)
    for layer in pair.model.model.layers:
        proj = layer.self_attn.rel_logits_proj.proj
        proj.data = torch.zeros_like(proj)
        after = pair.theirs(PROMPT)
        assert float((after - before).abs().max() / before.abs().max()) > 1e-3
        before = after


@pytest.mark.parametrize("kept", ["bf16", "fp32", "w8", "w4", "bf16+c8"])
def test_bits_depend_neither_on_cuts_nor_on_steps(kept: Precision, tmp_path: Path) -> None:
    folder = make_tiny("inkling_text", tmp_path)
    whole = native(folder, PROMPT, kept=kept, chunk=90)
    for cuts, chunk in (((2,), 90), ((1, 4), 64), ((2, 3), 7), ((), 1)):
        assert native(folder, PROMPT, cuts=cuts, chunk=chunk, kept=kept).tobytes() == whole.tobytes()
    for back_end in library.supported():
        assert native(folder, PROMPT, back_end=back_end, kept=kept).tobytes() == whole.tobytes()


def test_a_whole_checkpoint_is_served_as_its_text_part(tmp_path: Path) -> None:
    """As published: under model_type inkling_mm_model, with fields and widths by the publisher's names."""
    text = tiny_config("inkling_text", layers=4).to_dict() | inkling_kinds(4)
    config = AutoConfig.for_model("inkling_mm_model", text_config=text, vision_config=VISION, audio_config=AUDIO)
    config._attn_implementation = "eager"
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32).eval()
    _fill(model, 0)
    make_tiny("llama", tmp_path)
    model.save_pretrained(tmp_path)
    with torch.inference_mode():
        theirs = model(torch.tensor([PROMPT]), use_cache=False).logits[0].numpy()
    said = json.loads((tmp_path / "config.json").read_text())
    ours = native(tmp_path, PROMPT)
    assert np.abs(ours - theirs).max() / np.abs(theirs).max() < 2e-5
    published = _as_published(said)
    (tmp_path / "config.json").write_text(json.dumps(published))
    assert native(tmp_path, PROMPT).tobytes() == ours.tobytes()
    assert text_name("model.audio.encoder.weight") is text_name("model.visual.layers.norm_0.weight") is None


def _as_published(said: dict[str, Any]) -> dict[str, Any]:
    """The same model by the fields of the publisher's config."""
    text = dict(said["text_config"])
    text["local_layer_ids"] = [i for i, kind in enumerate(text.pop("layer_types")) if kind == "hybrid_sliding"]
    text["dense_mlp_idx"] = text.pop("mlp_layer_types").count("dense")
    text["dense_intermediate_size"], text["intermediate_size"] = (
        text["intermediate_size"],
        text.pop("moe_intermediate_size"),
    )
    text["sconv_kernel_size"] = text.pop("conv_kernel_size")
    text["model_max_length"] = text.pop("max_position_embeddings")
    always = dict.fromkeys(
        ("use_sconv", "use_embed_norm", "use_gate_bias", "use_global_scale", "norm_after_topk", "shared_expert_sink"),
        True,
    )
    text |= always | {"q_bias": False, "o_bias": False, "gate_activation": "sigmoid", "final_logit_softcapping": None}
    del text["model_type"]
    mtp = {"num_nextn_predict_layers": 8, "chain_hidden_post_norm": False, "local_layer_ids": [0, 2]}
    return {**said, "text_config": text, "mtp_config": mtp}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"use_sconv": False}, "use_sconv is False, only True is supported"),
        ({"shared_expert_sink": False}, "shared_expert_sink is False"),
        ({"gate_activation": "softmax"}, "gate_activation is 'softmax', only 'sigmoid'"),
        ({"q_bias": True}, "q_bias is True"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings is True"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping is 30.0"),
        ({"swa_num_key_value_heads": 4}, "swa_num_key_value_heads is 4, a divisor of the 6 attention heads"),
        ({"rel_extent": 1 << 20}, "rel_extent is 1048576, at most 1048576 distances of all heads"),
        ({"sliding_window_size": 1 << 24}, "sliding_window_size is 16777216, at most 1048576 distances of all heads"),
        ({"conv_kernel_size": 33}, "conv_kernel_size is 33, a whole number from 1 to 32"),
        ({"n_shared_experts": 33}, "n_shared_experts is 33, a whole number from 1 to 32"),
        ({"log_scaling_alpha": -0.5}, "log_scaling_alpha is -0.5, a number from 0"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok is 9"),
        ({"n_shared_experts": 0}, "n_shared_experts is 0"),
        ({"layer_types": ["full_attention"] * 3}, "layer_types is"),
        ({"model_max_length": 5}, "max_position_embeddings is 1024, only 5"),
        ({"surprise": 1}, "surprise is 1, a field that"),
    ],
)
def test_what_is_wrong_of_a_config_is_named(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ModelError, match=said):
        build_program({**tiny_config("inkling_text", layers=3).to_dict(), **changes})


def test_a_last_hop_draws_of_the_ids_that_there_are_logits_of(tmp_path: Path) -> None:
    """A published config counts 966 ids of padding, which have no logits: with ends at the edges each request failed."""
    folder = make_tiny("inkling_text", tmp_path, layers=2, unpadded_vocab_size=260)
    sampler = sampling(folder, has_head=True)(SamplingParams(max_tokens=1))
    assert sampler.vocab_size == read_program(folder).vocab == 260
    assert json.loads((folder / "config.json").read_text())["vocab_size"] == 264


def test_defaults_are_those_of_transformers() -> None:
    """Of a config that says nothing: layers with windows but each sixth, no dense block."""
    program = build_program({"model_type": "inkling_text"})
    theirs = AutoConfig.for_model("inkling_text")
    assert program == build_program(theirs.to_dict())
    assert [layer.attention.window is None for layer in program.layers if isinstance(layer.attention, Attention)] == [
        kind == "hybrid" for kind in theirs.layer_types
    ]
    assert all(any(isinstance(op, ExpertRouting) for op in layer.ops) for layer in program.layers)


@pytest.mark.parametrize("named", ["cuda", "torch-cpu"])
def test_devices_are_refused_in_one_line(named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = read_program(make_tiny("inkling_text", tmp_path, layers=2))
    assert program.has_biases and program.has_states
    monkeypatch.setattr("manyhands.worker.choice.named_device", lambda: named)
    monkeypatch.setattr("manyhands.worker.choice.torch_device", lambda: None if named == "cuda" else "cpu")
    monkeypatch.setattr("manyhands.worker.choice._check_device", lambda *_: None)
    said = (
        "adds to scores by distance, which cuda"
        if named == "cuda"
        else "convolutions or linear attention, which torch-cpu"
    )
    with pytest.raises(ModelError, match=f"inkling_text .*{said} .*leave --device out$"):
        program_of((tmp_path / "config.json").read_bytes(), "bf16", "config.json")
