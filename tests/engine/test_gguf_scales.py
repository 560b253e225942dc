"""Scales beside matrices of GGUF in NVFP4: what is multiplied, which are refused, and that they go where their matrix goes."""

import json
import struct
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from typer.testing import CliRunner

from manyhands.checkpoint.gguf_folder import gguf_folder
from manyhands.checkpoint.gguf_model import tensor_entries
from manyhands.checkpoint.gguf_parts import read_gguf
from manyhands.checkpoint.manifest import build_manifest
from manyhands.checkpoint.partition import ends_tensors, span_tensors
from manyhands.checkpoint.split import split_model
from manyhands.checkpoint.verify import ignore
from manyhands.cli import app
from manyhands.core import Span
from manyhands.engine import library
from manyhands.engine.blocks import dequantise
from manyhands.engine.mapped import MappedTensors
from manyhands.engine.weights import as_fp32
from manyhands.errors import ModelError
from manyhands.testing.gguf import Written, write_gguf
from tests.engine.test_gguf import logits as exact_logits
from tests.engine.test_grids import bits
from tests.engine.test_rearranged import as_floats, pieces
from tests.gguf_files import tiny_gguf

PROJ = "model.layers.0.self_attn.q_proj.weight"


def pick(name: str, shape: tuple[int, ...]) -> str:
    """As llama.cpp's converter has a model of modelopt: the table is not in NVFP4, the head may be."""
    return "F32" if len(shape) < 2 or "gate_inp" in name or name == "token_embd.weight" else "NVFP4"


def scale_of(name: str, shape: tuple[int, ...]) -> NDArray[np.float32]:
    """One, or one of each expert; of products of keys none."""
    count = int(np.prod(shape[:-2]))
    return np.random.default_rng(len(name)).uniform(0.3, 1.7, 0 if "attn_k." in name else count).astype(np.float32)


def beside(piece: Written, ending: str = "scale") -> list[Written]:
    """The scale of a matrix."""
    name, dtype, shape, _ = piece
    found = scale_of(name, shape) if dtype == "NVFP4" else np.zeros(0, np.float32)
    return [(name.replace(".weight", f".{ending}"), "F32", found.shape, found)] if len(found) else []


def times_scale(piece: Written) -> Written:
    name, _, shape, numbers = as_floats(piece)
    for *_, scale in beside(piece):
        numbers = numbers * scale.reshape(-1, *[1] * (len(shape) - 1))
    return name, "F32", shape, numbers


def written(family: str, folder: Path) -> tuple[Path, list[Written]]:
    """A file with a scale beside each matrix in NVFP4 but those of keys, and its tensors without scales."""
    sizes = {"moe_intermediate_size": 64} if "moe" in family else {"intermediate_size": 128}
    bare, _ = tiny_gguf(family, folder / "bare.gguf", pick, layers=2, hidden=64, **sizes)
    given = pieces(bare)
    more = [scale for piece in given for ending in ("scale", "input_scale") for scale in beside(piece, ending)]
    return write_gguf(folder / "a.gguf", read_gguf(bare).facts, [*given, *more]), given


@pytest.mark.parametrize("family", ["qwen2", "qwen3_moe", "phi3"])
def test_models_are_their_numbers_times_their_scales(family: str, tmp_path: Path) -> None:
    """Experts, biases beside a scale, and parts of one matrix (phi3). Products of scales are rounded: no equal bits."""
    file, given = written(family, tmp_path)
    assert any("ffn_down_exps.scale" in tensor.name for tensor in read_gguf(file).tensors) == (family == "qwen3_moe")
    plain = write_gguf(tmp_path / "b.gguf", read_gguf(file).facts, [times_scale(piece) for piece in given])
    ours, theirs = gguf_folder(file, tmp_path / "home"), gguf_folder(plain, tmp_path / "home")
    exact = exact_logits(theirs)
    np.testing.assert_allclose(exact_logits(ours), exact, atol=1e-4, rtol=1e-4)
    small = {bits(ours, name, "w4").tobytes() for name in library.supported()}
    assert len(small) == 1
    rounded = np.frombuffer(small.pop(), np.float32).reshape(exact.shape)
    assert 0 < np.square(rounded - exact).mean() < 0.02 * np.square(exact).mean()
    with MappedTensors(ours, ignore) as mine, MappedTensors(theirs, ignore) as others:
        for entry in others.entries:
            np.testing.assert_allclose(as_fp32(mine.read(entry.name)), as_fp32(others.read(entry.name)), rtol=1e-6)


def test_a_scale_goes_where_its_matrix_goes(tmp_path: Path) -> None:
    """To the span of the layer, to the head; into the parts that a model is cut into, which serve the same."""
    file, _ = written("qwen3_moe", tmp_path)
    names = [entry.name for entry in tensor_entries(read_gguf(file))]
    assert not any("input_scale" in name for name in names)
    assert f"{PROJ}_scale" in span_tensors(names, Span(0, 1)) and "lm_head.weight_scale" in ends_tensors(
        names, embed=False
    )
    assert "model.layers.1.mlp.experts.3.down_proj.weight_scale" in span_tensors(names, Span(1, 2))
    folder = gguf_folder(file, tmp_path / "home")
    (part,) = split_model(folder, [Span(0, 2)], tmp_path / "parts")
    assert np.array_equal(exact_logits(part), exact_logits(folder))
    assert build_manifest(part).id == build_manifest(folder).id


def test_inspect_says_what_is_stored_and_what_is_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MANYHANDS_HOME", str(tmp_path / "home"))
    file, given = written("qwen2", tmp_path)
    said = CliRunner().invoke(app, ["model", "inspect", str(file), "--json"])
    found = json.loads(said.output)
    float4 = [shape for _, dtype, shape, _ in given if dtype == "NVFP4"]
    assert found["stored"]["NVFP4"] == sum(rows * width // 64 * 36 for rows, width in float4)
    layers = [shape for name, dtype, shape, _ in given if name.startswith("blk.0") and dtype == "NVFP4"]
    vectors = sum(4 * shape[0] for name, _, shape, _ in given if name.startswith("blk.0") and len(shape) == 1)
    held = sum(rows * (width * 4.5 / 8 + 4) for rows, width in layers) + vectors + 4 * (len(layers) - 1)
    assert found["bytes"]["w4"]["layer_max"] == found["bytes"]["w8"]["layer_max"] == held


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (
            ("blk.0.attn_k.scale", "F32", (2,), np.ones(2, np.float32)),
            r"'blk.0.attn_k.scale' is F32 \[2\]; F32 \[1\] is needed",
        ),
        (("blk.0.attn_k.scale", "F16", (1,), np.ones(1, np.float16)), r"is F16 \[1\]; F32 \[1\] is needed beside \["),
        (("blk.0.attn_k.input_scale", "F32", (3,), np.ones(3, np.float32)), r"is F32 \[3\]; F32 \[1\] is needed"),
        (("token_embd.scale", "F32", (1,), np.ones(1, np.float32)), r"qwen2 has no tensor 'token_embd.scale'"),
        (
            ("blk.0.attn_norm.scale", "F32", (1,), np.ones(1, np.float32)),
            r"a scale of a matrix that is stored as F32; read are",
        ),
        (("blk.0.attn_x.scale", "F32", (1,), np.ones(1, np.float32)), r"qwen2 has no tensor 'blk.0.attn_x.scale'"),
        (("blk.9.attn_q.scale", "F32", (1,), np.ones(1, np.float32)), r"qwen2 has no tensor 'blk.9.attn_q.scale'"),
    ],
)
def test_scales_of_nothing_are_refused(tensor: Written, message: str, tmp_path: Path) -> None:
    file, given = written("qwen2", tmp_path)
    with pytest.raises(ModelError, match=message):
        tensor_entries(read_gguf(write_gguf(tmp_path / "b.gguf", read_gguf(file).facts, [*given, tensor])))


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf"), 2.0**-101])
def test_scales_out_of_bounds_are_refused(value: float, tmp_path: Path) -> None:
    file, _ = written("qwen2", tmp_path)
    raw = bytearray(file.read_bytes())
    at = next(tensor.start for tensor in read_gguf(file).tensors if tensor.name == "blk.0.attn_q.scale")
    raw[at : at + 4] = struct.pack("<f", value)
    file.write_bytes(raw)
    with MappedTensors(gguf_folder(file, tmp_path / "home"), ignore) as tensors:
        tensors.read("model.layers.0.self_attn.o_proj.weight")
        with pytest.raises(ModelError, match=rf"{PROJ}: the matrix's scale is .*; a number from 2\^-100"):
            tensors.read(PROJ)


def test_a_stack_that_stays_one_tensor_has_a_scale_for_each_matrix(tmp_path: Path) -> None:
    """mistral4's experts."""

    def of_experts(name: str, shape: tuple[int, ...]) -> str:
        return "NVFP4" if "ffn_down_exps" in name else "F32"

    bare, _ = tiny_gguf("mistral4", tmp_path / "bare.gguf", of_experts, layers=2, moe_intermediate_size=64)
    given, name = pieces(bare), "blk.1.ffn_down_exps.weight"
    stack = next(piece for piece in given if piece[0] == name)
    facts = read_gguf(bare).facts
    file = write_gguf(tmp_path / "a.gguf", facts, [*given, *beside(stack)])
    (entry,) = (one for one in tensor_entries(read_gguf(file)) if one.name.endswith("_scale"))
    with MappedTensors(gguf_folder(file, tmp_path / "home"), ignore) as tensors:
        found = as_fp32(tensors.read(entry.name.removesuffix("_scale")))
    want = dequantise(stack[3], "NVFP4") * scale_of(name, stack[2])[:, None, None]
    np.testing.assert_allclose(found, want, rtol=1e-6)
