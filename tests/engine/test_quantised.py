"""Quantised safetensors by the native engine: the numbers of each format's formula, the logits of transformers on them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.integrations import mxfp4

from manyhands.checkpoint.config_fields import parse_config
from manyhands.checkpoint.dtypes import BLOCKS
from manyhands.checkpoint.folded import folded
from manyhands.checkpoint.folder import read_config, read_entries
from manyhands.checkpoint.partition import layer_of
from manyhands.checkpoint.quantised import read_quantised
from manyhands.checkpoint.verify import ignore
from manyhands.core import SMALL_WEIGHTS, Precision, Span
from manyhands.engine.mapped import MappedTensors
from manyhands.engine.quantised import reader
from manyhands.engine.span import Piece
from manyhands.engine.weights import as_numbers
from manyhands.errors import ModelError
from manyhands.worker.runner import load_ends, load_span
from tests.quantised_cases import CASES, LOOSE, Case, scheme
from tests.quantised_files import compressed, fp8_tiny, mxfp4_tiny, quantised_tiny

IDS = [(37 * i * i + 11 * i) % 256 for i in range(60)]


def make(case: Case, out: Path, **sizes: Any) -> tuple[Path, Path]:
    return quantised_tiny(out, case.config, case.pack, **{"layers": 2, "hidden": 64, **case.facts, **sizes})


def numbers(folder: Path, *, needs_blocks: bool = False) -> dict[str, NDArray[Any]]:
    how = read_quantised(parse_config(read_config(folder)))
    with MappedTensors(folder, ignore) as tensors:
        read = reader(tensors, how, needs_blocks=needs_blocks)
        names = [each.name for each in folded(read_entries(folder), parse_config(read_config(folder)))]
        return {
            name: as_numbers(read(name)).array.copy()
            for name in names
            if layer_of(name) is not None and "norm" not in name
        }


def types(folder: Path) -> set[str]:
    """Of the quantised matrices."""
    matrices = folded(read_entries(folder), parse_config(read_config(folder)))
    return {each.dtype for each in matrices if each.dtype in BLOCKS or (each.dtype == "F32" and len(each.shape) == 2)}


def logits(folder: Path, precision: Precision = "fp32", cuts: int = 1) -> NDArray[np.float32]:
    ends, rows = load_ends(folder, precision, 1), None
    spans = [load_span(folder, Span(n * 2 // cuts, (n + 1) * 2 // cuts), precision, 1) for n in range(cuts)]
    rows = ends.embed(IDS)
    for span in spans:
        rows = span.step(rows.tobytes(), [Piece(span.new_cache(64), 0, len(IDS))], 1)
    return ends.logits(rows, len(IDS), 1)


def theirs(folder: Path) -> NDArray[np.float32]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    with torch.inference_mode():
        found: NDArray[np.float32] = model(torch.tensor([IDS]), use_cache=False).logits[0].numpy()
    return found


@pytest.mark.parametrize("name", [*CASES, *LOOSE])
def test_numbers_are_those_of_the_formula_and_logits_those_of_transformers(name: str, tmp_path: Path) -> None:
    case = {**CASES, **LOOSE}[name]
    folder, plain = make(case, tmp_path / "q")
    with MappedTensors(plain, ignore) as tensors:
        for matrix, found in numbers(folder).items():
            np.testing.assert_array_equal(found, tensors.read(matrix).array, matrix)
    assert types(folder) == {case.held}
    assert logits(folder).tobytes() == logits(plain).tobytes()
    if name in ("awq", "act-order"):
        np.testing.assert_allclose(logits(folder), theirs(plain), atol=2e-4, rtol=2e-3)


@pytest.mark.parametrize("name", CASES)
def test_small_weights_hold_the_same_codes_and_scales(name: str, tmp_path: Path) -> None:
    """Logits at w4 differ from those in fp32 by the rounding of rows to 8 bits, and cuts change no bit."""
    folder, plain = make(CASES[name], tmp_path / "q")
    whole = logits(folder, "w4")
    exact = logits(plain)
    assert np.abs(whole - exact).max() < 0.1 * np.abs(exact).max()
    assert (whole.argmax(1) == exact.argmax(1)).mean() > 0.8
    assert logits(folder, "w4", cuts=2).tobytes() == whole.tobytes()


@pytest.mark.parametrize("name", LOOSE)
@pytest.mark.parametrize("precision", sorted(SMALL_WEIGHTS))
def test_what_blocks_cannot_hold_is_refused_with_a_remedy(name: str, precision: Precision, tmp_path: Path) -> None:
    folder, _ = make(LOOSE[name], tmp_path / "q")
    with pytest.raises(ModelError, match=r"not held exactly at w4 or w8.*--dtype fp32 holds it, bf16 rounds it"):
        load_span(folder, Span(0, 2), precision, 1)


def test_fused_matrices_and_parts_of_one_product_take_their_own_orders(tmp_path: Path) -> None:
    """phi3's fused matrices; and queries, keys and values whose inputs lie in three orders."""
    for family in ("phi3", "llama"):
        folder, plain = make(CASES["act-order"], tmp_path / family, family=family)
        exact, whole = logits(plain), logits(folder, "w4")
        assert np.abs(whole - exact).max() < 0.1 * np.abs(exact).max()
        assert logits(folder, "w4", cuts=2).tobytes() == whole.tobytes()


def test_experts_in_an_order_of_their_own_are_refused_with_a_remedy(tmp_path: Path) -> None:
    folder, plain = make(CASES["act-order"], tmp_path / "q", family="qwen3_moe")
    with pytest.raises(ModelError, match=r"act-order.* take --dtype fp32 or bf16"):
        load_span(folder, Span(0, 1), "w4", 1)
    assert logits(folder).tobytes() == logits(plain).tobytes()


def test_scales_of_bf16_are_held_where_fp16_has_them(tmp_path: Path) -> None:
    folder, plain = make(CASES["int4"], tmp_path / "q", scale_type=torch.bfloat16)
    assert logits(folder).tobytes() == logits(plain).tobytes()
    numbers(folder, needs_blocks=True)

    def tiny_scales(q: Any) -> dict[str, NDArray[Any]]:
        return {**compressed(q, has_zeros=False), "weight_scale": np.full(q.scales.shape, 3e-9, np.float32)}

    folder, _ = quantised_tiny(tmp_path / "r", scheme(4, 32), tiny_scales, layers=1, **CASES["int4"].facts)
    with pytest.raises(ModelError, match="its scale 3e-09 is no number of fp16"):
        numbers(folder, needs_blocks=True)


def floats(strategy: str, **more: Any) -> dict[str, Any]:
    """A config of compressed-tensors for FP8."""
    weights = {"num_bits": 8, "type": "float", "strategy": strategy, **more}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": {"dynamic": True}}}
    return {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": groups}


DEEPSEEK = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
FP8: dict[str, tuple[str, dict[str, Any], tuple[int, int]]] = {
    "tiles": ("llama", {**DEEPSEEK, "weight_block_size": [40, 24]}, (40, 24)),
    "experts": ("deepseek_v3", {**DEEPSEEK, "weight_block_size": [128, 128]}, (128, 128)),
    "an index": ("deepseek_v32", {**DEEPSEEK, "scale_fmt": "ue8m0", "weight_block_size": [16, 32]}, (16, 32)),
    "fused": ("phi3", {**DEEPSEEK, "weight_block_size": [16, 32]}, (16, 32)),
    "linear attention": ("qwen3_next", {**DEEPSEEK, "weight_block_size": [128, 128]}, (128, 128)),
    "linear attention, apart": ("qwen3_5_moe_text", {**DEEPSEEK, "weight_block_size": [16, 32]}, (16, 32)),
    "a matrix": ("qwen3", {**DEEPSEEK, "activation_scheme": "static", "weight_block_size": None}, (0, 0)),
    "rows": ("llama", floats("channel"), (1, 0)),
    "compressed, a matrix": ("llama", floats("tensor"), (0, 0)),
    "compressed, tiles": ("llama", floats("block", block_structure=[32, 16]), (32, 16)),
    "powers of two": (
        "qwen3_moe",
        {"quant_method": "mxfp8", "scale_fmt": "ue8m0", "weight_block_size": [1, 32]},
        (1, 32),
    ),
    "modelopt, powers of two": ("llama", {"quant_method": "modelopt", "quant_algo": "MXFP8"}, (1, 32)),
    "fbgemm": ("llama", {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}, (1, 0)),
}


@pytest.mark.parametrize("name", FP8)
def test_fp8_has_the_numbers_of_its_floats_and_scales(name: str, tmp_path: Path) -> None:
    """As an unquantised model of these numbers at every precision."""
    family, config, tile = FP8[name]
    folder, plain = fp8_tiny(tmp_path / "q", config, tile, family=family, layers=2, hidden=64)
    with MappedTensors(plain, ignore) as tensors:
        for matrix, found in numbers(folder).items():
            np.testing.assert_array_equal(found, tensors.read(matrix).array, matrix)
    for precision in ("fp32", "bf16", "w8", "w4"):
        assert logits(folder, precision, cuts=2).tobytes() == logits(plain, precision).tobytes()


def test_every_float_of_8_bit_is_read_as_torch_reads_it(tmp_path: Path) -> None:
    folder, _ = fp8_tiny(tmp_path / "q", FP8["rows"][1], (1, 0), layers=1, hidden=64)
    name = "model.layers.0.mlp.up_proj.weight"
    tensors = load_file(folder / "model.safetensors")
    codes = torch.arange(256, dtype=torch.uint8).repeat(tensors[name].numel() // 256).view(torch.float8_e4m3fn)
    tensors |= {name: codes.reshape(tensors[name].shape), f"{name}_scale": torch.ones(len(tensors[name]), 1)}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    np.testing.assert_array_equal(numbers(folder)[name], tensors[name].float().numpy())


@pytest.mark.parametrize(
    ("scales", "said"),
    [
        (torch.zeros(96, 64), r"its scales are \[96, 64\], needed are \[3, 3\]"),
        (torch.zeros(2, 3), r"its scales are \[2, 3\], needed are \[3, 3\]"),
        (torch.zeros(3, 3, 1), "floats in rows are needed"),
        (torch.zeros(3, 3, dtype=torch.int32), "its scales are int32"),
        (torch.full((3, 3), 255, dtype=torch.uint8), "a power of two is no number"),
        (torch.zeros(9, dtype=torch.uint8), "its scales are uint8"),
        (None, "lacks the scales of model.layers.0.mlp.up_proj.weight"),
    ],
)
def test_scales_of_fp8_that_do_not_fit_are_refused(scales: torch.Tensor | None, said: str, tmp_path: Path) -> None:
    config = {**DEEPSEEK, "weight_block_size": [40, 24]}
    folder, _ = fp8_tiny(tmp_path / "q", config, (40, 24), layers=1, hidden=64)
    name = "model.layers.0.mlp.up_proj.weight_scale_inv"
    tensors = load_file(folder / "model.safetensors")
    del tensors[name]
    save_file(tensors | ({} if scales is None else {name: scales}), folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=said):
        load_span(folder, Span(0, 1), "w8", 1)


def test_experts_in_mxfp4_are_those_of_transformers(tmp_path: Path) -> None:
    folder, plain = mxfp4_tiny(tmp_path / "q", layers=2, hidden=64)
    with MappedTensors(folder, ignore) as tensors:
        read = reader(tensors, read_quantised(parse_config(read_config(folder))), needs_blocks=True)
        for matrix in ("gate_up_proj", "down_proj"):
            path = "model.layers.1.mlp.experts"
            blocks, scales = (
                torch.from_numpy(tensors.raw(f"{path}.{matrix}_{part}").copy()) for part in ("blocks", "scales")
            )
            expected = mxfp4._convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
            for expert in range(len(expected)):
                found = as_numbers(read(f"{path}.{expert}.{matrix}")).array
                np.testing.assert_array_equal(found, expected[expert].T.numpy())
    assert logits(folder).tobytes() == logits(plain).tobytes()
    np.testing.assert_allclose(logits(folder), theirs(plain), atol=2e-4, rtol=2e-3)
    exact = logits(plain)
    off = np.abs(logits(folder, "w8") - exact).max(axis=1)  # of a row; one near a tie may choose other experts
    assert np.quantile(off, 0.9) < 0.1 * np.abs(exact).max()


def test_experts_that_are_not_stored_are_named(tmp_path: Path) -> None:
    folder, _ = mxfp4_tiny(tmp_path / "q", layers=1, hidden=64)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_local_experts": 5}))
    with pytest.raises(ModelError, match=r"lacks model.layers.0.mlp.experts.4.gate_up_proj: it has 4|router"):
        load_span(folder, Span(0, 1), "w8", 1)


@pytest.mark.parametrize("family", ["qwen2", "qwen3_moe", "phi3", "gemma2"])
def test_any_family_with_plain_names_is_read(family: str, tmp_path: Path) -> None:
    """Also fused matrices, and experts with tensors of their own. (A quantised router is as exact as its numbers.)"""
    folder, plain = make(CASES["awq"], tmp_path / "q", family=family)
    assert logits(folder).tobytes() == logits(plain).tobytes()


def test_gpt2_in_gptq_is_stored_the_other_way_round(tmp_path: Path) -> None:
    """What packs it turns its matrices, of [inputs, outputs]: one of 64 to 192 was refused as [192, 64]."""
    folder, plain = make(CASES["gptq"], tmp_path / "q", family="gpt2")
    assert logits(folder).tobytes() == logits(plain).tobytes()


Spoil = Callable[[dict[str, NDArray[Any]]], dict[str, NDArray[Any]]]
HOSTILE: dict[str, tuple[str, Spoil, str]] = {
    "too few groups": ("gptq", lambda p: {**p, "scales": p["scales"][:1]}, "zeros are|groups"),
    "too many groups": ("awq", lambda p: {**p, "scales": np.repeat(p["scales"], 4, 0)}, "zeros are|groups"),
    "no scales": ("awq", lambda p: {key: p[key] for key in p if key != "scales"}, "lacks the scales"),
    "no zeros": ("gptq", lambda p: {key: p[key] for key in p if key != "qzeros"}, "lacks the zeros"),
    "zeros of floats": ("gptq", lambda p: {**p, "qzeros": p["qzeros"].astype(np.float32)}, "float32"),
    "codes of bytes": ("gptq", lambda p: {**p, "qweight": p["qweight"].astype(np.int8)}, "int32 is needed"),
    "one row less": ("gptq", lambda p: {**p, "qweight": p["qweight"][:-1]}, "g_idx|needed is|groups|no multiple"),
    "scales of ints": ("awq", lambda p: {**p, "scales": p["scales"].astype(np.int32)}, "floats in rows"),
    "scales in 3 dimensions": ("awq", lambda p: {**p, "scales": p["scales"][None]}, "floats in rows"),
    "scales in one": ("gptq", lambda p: {**p, "scales": p["scales"][0]}, "scales are"),
    "no groups": ("awq", lambda p: {**p, "scales": p["scales"][:0], "qzeros": p["qzeros"][:0]}, "floats in rows"),
    "g_idx beyond": ("gptq", lambda p: {**p, "g_idx": p["g_idx"] + 1}, "g_idx must name"),
    "g_idx below": ("gptq", lambda p: {**p, "g_idx": p["g_idx"] - 2}, "g_idx must name"),
    "g_idx short": ("gptq", lambda p: {**p, "g_idx": p["g_idx"][:-1]}, "g_idx must name"),
    "g_idx of one number": ("gptq", lambda p: {**p, "g_idx": p["g_idx"][0]}, "g_idx must name"),
    "no codes at all": ("awq", lambda p: {**p, "qweight": p["qweight"][:0]}, "which is none of awq"),
    "codes in 3 dimensions": ("awq", lambda p: {**p, "qweight": p["qweight"][None]}, "which is none of awq"),
    "zeros where sym is promised": ("gptq", lambda p: {**p, "qzeros": p["qzeros"] + 1}, "`sym` in config.json asks for 8"),
    "zero points short": ("int4 zeros", lambda p: {**p, "weight_zero_point": p["weight_zero_point"][:1]}, "points are"),
    "zero points of 9": ("int4 byte zeros", lambda p: {**p, "weight_zero_point": 0 * p["weight_zero_point"] + 9}, "is 9;"),
    "channels short": ("int8", lambda p: {**p, "weight_scale": p["weight_scale"][:-1]}, "scales are"),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_parts_that_do_not_fit_are_refused_in_one_line(name: str, tmp_path: Path) -> None:
    kind, spoil, said = HOSTILE[name]
    case = CASES[kind]
    folder, _ = quantised_tiny(tmp_path / "q", case.config, lambda q: spoil(case.pack(q)), layers=1, **case.facts)
    with pytest.raises(ModelError, match=said) as error:
        load_span(folder, Span(0, 1), "w4", 1)
    assert "\n" not in str(error.value) and len(str(error.value)) < 400
