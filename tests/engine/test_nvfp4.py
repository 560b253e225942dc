"""NVFP4 checkpoints by the native engine: the numbers of the formula, the logits of transformers on them, what is refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

from manyhands.checkpoint.verify import ignore
from manyhands.core import Precision, Span
from manyhands.engine.mapped import MappedTensors
from manyhands.engine.quants import packed_bytes
from manyhands.errors import ModelError
from manyhands.place.shape import stored_precision
from manyhands.worker.runner import load_span
from tests.engine.test_quantised import logits, numbers, theirs, types
from tests.quantised_files import MODELOPT, PACKED_FLOAT4, nvfp4_tiny

FLOAT8_WEIGHTS = {"num_bits": 8, "type": "float", "strategy": "tensor"}
MIXED_PACKED = {
    **PACKED_FLOAT4,
    "format": "mixed-precision",
    "config_groups": {
        **PACKED_FLOAT4["config_groups"],
        "group_1": {"targets": ["re:.*self_attn.*"], "weights": FLOAT8_WEIGHTS, "format": "float-quantized"},
    },
}
MIXED = {
    **MODELOPT,
    "quant_algo": "MIXED_PRECISION",
    "quantized_layers": {
        "model.layers.0.mlp.up_proj": {"quant_algo": "NVFP4", "group_size": 16},
        "model.layers.0.self_attn.q_proj": {"quant_algo": "FP8"},
    },
}
OLD = {
    "quant_method": "modelopt",
    "quantization": {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8", "group_size": 16, "exclude_modules": []},
}


class Kind(NamedTuple):
    config: dict[str, Any]
    family: str = "llama"
    facts: dict[str, Any] = {}  # noqa: RUF012


KINDS = {
    "modelopt": Kind(MODELOPT),
    "of hf_quant_config.json": Kind(OLD),
    "compressed-tensors": Kind(PACKED_FLOAT4),
    "attention in FP8": Kind(MIXED, facts={"in_fp8": "self_attn"}),
    "attention in FP8, compressed-tensors": Kind(MIXED_PACKED, facts={"in_fp8": "self_attn"}),
    "attention as it was": Kind(MODELOPT, facts={"plain_in": "self_attn"}),
    "experts": Kind(MODELOPT, "qwen3_moe"),
    "experts, compressed-tensors": Kind(PACKED_FLOAT4, "qwen3_moe"),
    "shared experts": Kind(MODELOPT, "deepseek_v3", {"plain_in": "self_attn"}),
    "latent attention": Kind(MODELOPT, "deepseek_v3", {"kv_lora_rank": 32}),
    "fused": Kind(MODELOPT, "phi3"),
    "linear attention": Kind(PACKED_FLOAT4, "qwen3_next", {"plain_in": "conv1d"}),
}


def make(kind: Kind, out: Path, **sizes: Any) -> tuple[Path, Path]:
    return nvfp4_tiny(out, kind.config, family=kind.family, **{"layers": 2, "hidden": 64, **kind.facts, **sizes})


@pytest.mark.parametrize("name", KINDS)
def test_numbers_are_those_of_the_formula_and_logits_those_of_transformers(name: str, tmp_path: Path) -> None:
    folder, plain = make(KINDS[name], tmp_path / "q")
    with MappedTensors(plain, ignore) as tensors:
        for needs_blocks in (False, True):
            read = numbers(folder, needs_blocks=needs_blocks)
            assert read.keys() >= {entry.name for entry in tensors.entries if entry.name.endswith("_proj.weight")}
            for matrix in read.keys() & {
                entry.name for entry in tensors.entries
            }:  # scales of keys and values are read nowhere
                np.testing.assert_array_equal(read[matrix], tensors.read(matrix).array, matrix)
    assert "NVFP4_32" in types(folder)
    assert logits(folder).tobytes() == logits(plain).tobytes()
    if name in ("modelopt", "compressed-tensors", "experts"):
        np.testing.assert_allclose(logits(folder), theirs(plain), atol=2e-4, rtol=2e-3)


def off(found: NDArray[np.float32], exact: NDArray[np.float32]) -> float:
    """The root of the mean square of what logits are off, relative to that of the logits."""
    return float(np.sqrt(np.square(found - exact).mean() / np.square(exact).mean()))


@pytest.mark.parametrize(
    ("name", "precision"),
    [("modelopt", "w4"), ("modelopt", "w8"), ("compressed-tensors", "w4"), ("fused", "w4"), ("attention in FP8", "w8")],
)
def test_small_weights_hold_the_same_numbers(name: str, precision: Precision, tmp_path: Path) -> None:
    """Logits are off those in fp32 by the rounding of rows to 8 bits: no more than if weights were rounded to 8 bits too."""
    folder, plain = make(KINDS[name], tmp_path / "q")
    whole, exact = logits(folder, precision), logits(plain)
    assert off(whole, exact) < min(0.06, off(logits(plain, "w8"), exact))
    assert (whole.argmax(1) == exact.argmax(1)).mean() > 0.8
    assert logits(folder, precision, cuts=2).tobytes() == whole.tobytes()


def test_experts_of_small_weights_are_near_the_same_model_in_fp32(tmp_path: Path) -> None:
    folder, plain = make(KINDS["experts"], tmp_path / "q")
    exact, whole = logits(plain), logits(folder, "w8")
    most = np.abs(whole - exact).max(axis=1)  # of a row; one near a tie may choose other experts
    assert np.quantile(most, 0.9) < 0.1 * np.abs(exact).max()
    assert logits(folder, "w8", cuts=2).tobytes() == whole.tobytes()


def test_experts_of_one_layer_in_two_types_are_refused_with_the_remedy(tmp_path: Path) -> None:
    folder, _ = nvfp4_tiny(tmp_path / "q", MIXED, family="qwen3_moe", in_fp8="experts.1.", layers=1)
    with pytest.raises(
        ModelError, match=r"experts of one layer would be held as w4h and as w8, .* take --dtype bf16, or"
    ):
        load_span(folder, Span(0, 1), "w8", 1)
    assert load_span(folder, Span(0, 1), "bf16", 1).num_layers == 1


def test_it_takes_four_and_a_half_bits_a_number(tmp_path: Path) -> None:
    assert packed_bytes("w4h", 4096, 4096) * 8 / 4096**2 == 4.5 + 32 / 4096
    folder, _ = make(KINDS["modelopt"], tmp_path / "q")
    assert stored_precision(str(folder), tmp_path) == "w8"


def test_rows_of_no_whole_blocks_are_held_in_fp32_alone(tmp_path: Path) -> None:
    folder, plain = make(KINDS["modelopt"], tmp_path / "q", intermediate_size=112)
    assert types(folder) >= {"F32"}
    assert logits(folder).tobytes() == logits(plain).tobytes()
    with pytest.raises(ModelError, match="112 inputs are no multiple of 32; --dtype fp32 holds it"):
        load_span(folder, Span(0, 2), "w4", 1)


def test_every_code_is_read_as_torch_reads_it(tmp_path: Path) -> None:
    """All bytes of two floats, with all scales."""
    folder, _ = make(KINDS["modelopt"], tmp_path / "q", layers=1)
    stem = "model.layers.0.mlp.up_proj"
    tensors = load_file(folder / "model.safetensors")
    shape, groups = tensors[f"{stem}.weight"].shape, tensors[f"{stem}.weight_scale"].shape
    pairs = torch.arange(shape.numel()).remainder(256).to(torch.uint8).reshape(shape)
    scales = torch.arange(groups.numel()).remainder(127).to(torch.uint8).view(torch.float8_e4m3fn).reshape(groups)
    tensors |= {f"{stem}.weight": pairs, f"{stem}.weight_scale": scales, f"{stem}.weight_scale_2": torch.tensor(0.3)}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    floats = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    codes = torch.stack([pairs & 15, pairs >> 4], -1).long().reshape(shape[0], -1)
    signed = floats[codes & 7] * torch.where(codes > 7, -1.0, 1.0)
    by = (scales.float() * torch.tensor(0.3)).repeat_interleave(16, 1)
    np.testing.assert_array_equal(numbers(folder)[f"{stem}.weight"], (signed * by).numpy())


Tensors = dict[str, torch.Tensor]
STEM = "model.layers.0.mlp.up_proj."


def put(part: str, value: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {**tensors, STEM + part: value(tensors[STEM + part]).contiguous()}


def byte(value: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """One scale of a group is this byte."""

    def spoil(scales: torch.Tensor) -> torch.Tensor:
        found = scales.view(torch.uint8).clone()
        found[1, 2] = value
        return found.view(torch.float8_e4m3fn)

    return spoil


def drop(part: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {name: tensor for name, tensor in tensors.items() if name != STEM + part}


HOSTILE: dict[str, tuple[str, Callable[[Tensors], Tensors], str]] = {
    "a scale of NaN": ("modelopt", put("weight_scale", byte(0x7F)), r"a scale is no number \(byte 127\)"),
    "a scale of -NaN": ("modelopt", put("weight_scale", byte(0xFF)), r"a scale is no number \(byte 255\)"),
    "a scale below zero": ("modelopt", put("weight_scale", byte(0x81)), r"a scale is negative \(byte 129\)"),
    "of the whole, below zero": ("modelopt", put("weight_scale_2", lambda t: -t), "matrix's scale is -.*2\\^-100"),
    "of the whole, zero": ("modelopt", put("weight_scale_2", torch.zeros_like), "matrix's scale is 0; a number from"),
    "of the whole, tiny": ("modelopt", put("weight_scale_2", lambda t: t * 0 + 2.0**-101), "scale is 3.9.*e-31;"),
    "of the whole, huge": ("modelopt", put("weight_scale_2", lambda t: t * 0 + 2.0**101), "scale is 2.5.*30;"),
    "of the whole, NaN": ("modelopt", put("weight_scale_2", lambda t: t / 0 * 0), "matrix's scale is nan;"),
    "of the whole, zero, packed": ("compressed-tensors", put("weight_global_scale", torch.zeros_like), "scale is 0;"),
    "of the whole, two": ("modelopt", put("weight_scale_2", lambda t: t.repeat(2)), r"float32 \[2\]; one fp32"),
    "of the whole, bf16": ("modelopt", put("weight_scale_2", lambda t: t.bfloat16()), "one fp32 number is needed"),
    "no scale of the whole": ("modelopt", drop("weight_scale_2"), "lacks the scale of the whole matrix model.layers.0"),
    "no scales": ("modelopt", drop("weight_scale"), "lacks the scales of model.layers.0.mlp.up_proj.weight"),
    "too few scales": ("modelopt", put("weight_scale", lambda t: t[:, :-1]), r"its scales are uint8 .*needed"),
    "scales of floats": ("modelopt", put("weight_scale", lambda t: t.float()), "its scales are float32"),
    "one row less": ("modelopt", put("weight", lambda t: t[:-1]), "its scales are uint8"),
    "codes in 3 dimensions": ("modelopt", put("weight", lambda t: t[None]), "which is none of modelopt"),
    "no codes": ("modelopt", put("weight", lambda t: t[:0]), "which is none of modelopt"),
    "codes of 32 bits": (
        "compressed-tensors",
        put("weight_packed", lambda t: t.int()),
        r"up_proj\.weight_packed is stored as I32; bytes of two floats of 4 bit \(U8\) are needed",
    ),
    "smoothed": (
        "modelopt",
        lambda t: {**t, f"{STEM}pre_quant_scale": torch.ones(64)},
        "pre_quant_scale changes the ar",
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("precision", ["w4", "fp32"])
def test_parts_that_do_not_fit_are_refused_in_one_line(name: str, precision: Precision, tmp_path: Path) -> None:
    kind, spoil, said = HOSTILE[name]
    folder, _ = make(KINDS[kind], tmp_path / "q", layers=1)
    save_file(spoil(load_file(folder / "model.safetensors")), folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=said) as error:
        load_span(folder, Span(0, 1), precision, 1)
    assert "\n" not in str(error.value) and len(str(error.value)) < 400


def test_codes_that_the_config_does_not_name_are_refused(tmp_path: Path) -> None:
    folder, _ = make(KINDS["modelopt"], tmp_path / "q", layers=1)
    config = json.loads((folder / "config.json").read_text())
    for quantisation, said in (
        (
            {"quant_method": "modelopt", "quant_algo": "FP8"},
            "stored as U8, as NVFP4 is, which config.json does not name",
        ),
        (None, r"weight_scale_2 is a part of a matrix in NVFP4.*put what hf_quant_config.json says there"),
    ):
        given = {key: value for key, value in config.items() if key != "quantization_config"}
        (folder / "config.json").write_text(
            json.dumps(given if quantisation is None else {**given, "quantization_config": quantisation})
        )
        with pytest.raises(ModelError, match=said):
            types(folder)
