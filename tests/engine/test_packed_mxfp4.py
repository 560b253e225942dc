"""Experts in MXFP4 as compressed-tensors stores them, as Kimi-K3's are: the numbers of the formula, logits, what is refused."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from manyhands.checkpoint.quantised import read_quantised
from manyhands.checkpoint.verify import ignore
from manyhands.core import Precision, Span
from manyhands.engine.mapped import MappedTensors
from manyhands.engine.quantised import reader
from manyhands.errors import ModelError
from manyhands.worker.runner import load_span
from tests.engine.test_nvfp4 import FLOAT8_WEIGHTS
from tests.engine.test_quantised import logits, numbers, types
from tests.mxfp4_files import PACKED_MXFP4, packed_mxfp4, packed_mxfp4_tiny

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
