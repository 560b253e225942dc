"""Experts in MXFP4 as compressed-tensors stores them, as Kimi-K3's are: the numbers of the formula, logits, what is refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from manyhands.checkpoint.folder import read_entries
from manyhands.checkpoint.quantised import read_quantised
from manyhands.checkpoint.verify import ignore
from manyhands.core import Precision, Span
from manyhands.engine.mapped import MappedTensors
from manyhands.engine.quantised import reader
from manyhands.errors import ModelError
from manyhands.place.shape import stored_precision
from manyhands.worker.runner import load_span
from tests.engine.test_nvfp4 import FLOAT8_WEIGHTS, off
from tests.engine.test_quantised import logits, numbers, types
from tests.kimi_k3 import CONFIG, make_kimi_k3
from tests.mxfp4_files import PACKED_MXFP4, pack_experts, packed_mxfp4, packed_mxfp4_tiny

MIXED = {
    **PACKED_MXFP4,
    "format": "mixed-precision",
    "config_groups": {
        **PACKED_MXFP4["config_groups"],
        "group_1": {"targets": ["re:.*self_attn.*"], "weights": FLOAT8_WEIGHTS, "format": "float-quantized"},
    },
}
FORMS: dict[str, tuple[str, dict[str, Any], str]] = {
    "kimi_linear": ("kimi_linear", PACKED_MXFP4, "-"),
    "qwen3_moe": ("qwen3_moe", PACKED_MXFP4, "-"),
    "attention in FP8": ("qwen3_moe", MIXED, "self_attn."),
}
STEM = {
    "kimi_linear": "model.layers.1.block_sparse_moe.experts.1.w2.",
    "qwen3_moe": "model.layers.0.mlp.experts.1.up_proj.",
}
Tensors = dict[str, torch.Tensor]


def make(name: str, out: Path, **sizes: Any) -> tuple[Path, Path]:
    family, config, in_fp8 = FORMS[name]
    return packed_mxfp4_tiny(out, config, family=family, in_fp8=in_fp8, **{"layers": 2, **sizes})


def make_k3(folder: Path) -> tuple[Path, Path]:
    """Two layers of Kimi K3 as published, with tensors and fields for images, and the folder of the same numbers in fp32."""
    kinds = {**CONFIG["linear_attn_config"], "full_attn_layers": [2], "kda_layers": [1]}
    sizes: dict[str, Any] = {"num_hidden_layers": 2, "attn_res_block_size": 1, "moe_intermediate_size": 32}
    plain, out = make_kimi_k3(folder / "plain", linear_attn_config=kinds, **sizes), folder / "published"
    pack_experts(plain, out)
    whole = json.loads((out / "config.json").read_text())
    whole["text_config"]["quantization_config"] = whole.pop("quantization_config")
    whole |= {
        "image_placeholder": "<|kimi_image_placeholder|>",
        "media_placeholder_token_id": 163605,
        "ignore_index": -100,
    }
    whole |= {"vision_config": {"vt_hidden_size": 1024, "mm_projector_type": "patchmergerv2"}}
    (out / "config.json").write_text(json.dumps(whole))
    images = (
        "vision_tower.encoder.blocks.0.wqkv.weight",
        "mm_projector.proj.0.weight",
        "mm_projector.post_norm.weight",
    )
    tensors = load_file(out / "model.safetensors") | {name: torch.ones(1) for name in images}
    save_file(tensors, out / "model.safetensors", {"format": "pt"})
    return out, plain


@pytest.mark.parametrize("name", FORMS)
def test_numbers_are_those_of_the_formula_and_logits_those_of_the_same_model_in_fp32(name: str, tmp_path: Path) -> None:
    folder, plain = make(name, tmp_path / "q")
    with MappedTensors(plain, ignore) as tensors:
        for needs_blocks in (False, True):
            read = numbers(folder, needs_blocks=needs_blocks)
            assert {entry.name for entry in tensors.entries if ".experts." in entry.name} <= read.keys()
            for matrix, found in read.items():
                np.testing.assert_array_equal(found, tensors.read(matrix).array, matrix)
    assert "MXFP4" in types(folder)
    for precision in ("fp32", "bf16"):
        assert logits(folder, precision).tobytes() == logits(plain, precision).tobytes()


@pytest.mark.parametrize("name", FORMS)
def test_small_weights_hold_codes_and_powers_as_they_are(name: str, tmp_path: Path) -> None:
    """Logits are off those in fp32 by the rounding of rows and of other matrices; cuts change no bit."""
    folder, plain = make(name, tmp_path / "q")
    exact = logits(plain)
    off = {kind: np.abs(logits(folder, kind) - exact).mean() / np.abs(exact).mean() for kind in ("w8", "w4")}
    assert off["w8"] < off["w4"] < 1
    assert logits(folder, "w4", cuts=2).tobytes() == logits(folder, "w4").tobytes()


def test_blocks_are_those_of_the_same_pairs_as_deepseek_v4_stores_them(tmp_path: Path) -> None:
    folder, _ = make("qwen3_moe", tmp_path / "q", layers=1)
    stem, blocks = STEM["qwen3_moe"].removesuffix("."), []
    tensors = load_file(folder / "model.safetensors")
    pairs, powers = tensors[f"{stem}.weight_packed"], tensors[f"{stem}.weight_scale"]
    theirs = {f"{stem}.weight": pairs.view(torch.int8), f"{stem}.scale": powers.view(torch.float8_e8m0fnu)}
    for stored, config in ((tensors, PACKED_MXFP4), (theirs, {"quant_method": "fp8", "fmt": "e4m3"})):
        save_file(stored, folder / "model.safetensors", {"format": "pt"})
        with MappedTensors(folder, ignore) as mapped:
            held = reader(mapped, read_quantised({"quantization_config": config}), needs_blocks=True)(f"{stem}.weight")
            assert held.type == "MXFP4"
            blocks.append(held.array.copy())
    np.testing.assert_array_equal(blocks[0], blocks[1])
    first = blocks[0][0, :17]  # the power of two, then the codes: number j beside j + 16
    codes = torch.stack([pairs[0, :16] & 15, pairs[0, :16] >> 4], -1).reshape(-1).numpy()
    assert first.tolist() == [int(powers[0, 0]), *(codes[:16] | codes[16:] << 4)]


@pytest.mark.parametrize("kind", [torch.uint8, torch.float8_e8m0fnu])
def test_every_code_is_read_at_every_power(kind: torch.dtype, tmp_path: Path) -> None:
    """2^-127, which is a denormal of fp32, to 2^125, of which 6 is a number of fp32."""
    folder, _ = make("qwen3_moe", tmp_path / "q", layers=1, hidden=256)
    stem = STEM["qwen3_moe"]
    tensors = load_file(folder / "model.safetensors")
    pairs = np.arange(128 * 128).reshape(128, 128) % 256
    codes = np.stack([pairs & 15, pairs >> 4], -1).reshape(128, 256).astype(np.uint8)
    powers = (np.arange(128 * 8).reshape(128, 8) % 253).astype(np.uint8)
    parts, expected = packed_mxfp4(codes, powers)
    tensors |= {stem + part: tensor for part, tensor in parts.items()}
    tensors[f"{stem}weight_scale"] = tensors[f"{stem}weight_scale"].view(kind)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    np.testing.assert_array_equal(numbers(folder)[f"{stem}weight"], expected)


def test_a_checkpoint_as_kimi_k3_is_published(tmp_path: Path) -> None:
    """Its config says in text_config how experts are stored; tensors for images are no part of it."""
    folder, plain = make_k3(tmp_path)
    assert {entry.name.split(".")[0] for entry in read_entries(folder)} == {"model", "lm_head"}
    assert "MXFP4" in types(folder)
    assert stored_precision(str(folder), tmp_path) == "w8"
    for precision in ("fp32", "bf16"):
        assert logits(folder, precision).tobytes() == logits(plain, precision).tobytes()
    whole = logits(folder, "w4")
    assert logits(folder, "w4", cuts=2).tobytes() == whole.tobytes()
    assert off(whole, logits(plain)) < off(logits(plain, "w4"), logits(plain))


def put(part: str, value: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Tensors, str], Tensors]:
    return lambda tensors, stem: {**tensors, stem + part: value(tensors[stem + part]).contiguous()}


def add(part: str, tensor: torch.Tensor) -> Callable[[Tensors, str], Tensors]:
    return lambda tensors, stem: {**tensors, stem + part: tensor}


def drop(part: str) -> Callable[[Tensors, str], Tensors]:
    return lambda tensors, stem: {name: tensor for name, tensor in tensors.items() if name != stem + part}


def damaged(powers: torch.Tensor) -> torch.Tensor:
    found = powers.clone()
    found[1, 0] = 255
    return found


HOSTILE: dict[str, tuple[Callable[[Tensors, str], Tensors], str]] = {
    "a power that is no number": (put("weight_scale", damaged), r"a power of two is no number \(byte 255\)"),
    "no powers": (drop("weight_scale"), "lacks the scales of .*experts.1.*weight"),
    "powers of others": (put("weight_scale", lambda t: t[:-1]), r"its powers are \[\d+, \d\], needed are"),
    "powers of 16": (put("weight_scale", lambda t: t.repeat(1, 2)), r"its powers are \[\d+, \d\], needed are"),
    "powers in a row": (put("weight_scale", lambda t: t.reshape(-1)), r"its powers are \[\d+\], needed are"),
    "powers that are floats": (
        put("weight_scale", lambda t: t.float()),
        "weight_scale is stored as F32; read is U8 or",
    ),
    "powers in E4M3": (
        put("weight_scale", lambda t: t.view(torch.float8_e4m3fn)),
        "weight_scale is stored as F8_E4M3;",
    ),
    "codes of 32 bits": (
        put("weight_packed", lambda t: t.int()),
        "weight_packed is stored as I32; bytes of two floats",
    ),
    "codes in E4M3": (
        put("weight_packed", lambda t: t.view(torch.float8_e4m3fn)),
        "weight_packed is stored as F8_E4M3;",
    ),
    "codes with a sign": (put("weight_packed", lambda t: t.view(torch.int8)), "weight_packed is stored as I8;"),
    "codes in 3 dimensions": (put("weight_packed", lambda t: t[None]), "which is none of compressed-tensors"),
    "no codes": (put("weight_packed", lambda t: t[:0]), "which is none of compressed-tensors"),
    "codes of half a group": (
        put("weight_packed", lambda t: t[:, :8]),
        "is no matrix in MXFP4: 16 inputs are no multiple",
    ),
    "one row less": (put("weight_packed", lambda t: t[:-1]), r"its powers are \[\d+, \d\], needed are"),
    "zeros": (add("weight_zero_point", torch.zeros(1)), "weight_zero_point is no part of a matrix in MXFP4"),
    "an order": (add("weight_g_idx", torch.zeros(64)), "weight_g_idx is no part of a matrix in MXFP4"),
    "a scale of the whole": (add("weight_global_scale", torch.ones(1)), "weight_global_scale is no part of a matrix"),
}


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("precision", ["w4", "fp32"])
def test_parts_that_do_not_fit_are_refused_in_one_line(name: str, precision: Precision, tmp_path: Path) -> None:
    spoil, said = HOSTILE[name]
    folder, _ = make("kimi_linear", tmp_path / "q")
    stored = spoil(load_file(folder / "model.safetensors"), STEM["kimi_linear"])
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=said) as error:
        load_span(folder, Span(0, 2), precision, 1)
    assert "\n" not in str(error.value) and len(str(error.value)) < 400
