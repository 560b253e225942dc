"""Models in GGUF files by the native engine: the logits of transformers on the weights that the files store."""

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.numpy import save_file
from torch import Tensor

from manyhands.checkpoint.dtypes import BLOCKS
from manyhands.checkpoint.gguf_folder import gguf_folder
from manyhands.checkpoint.gguf_model import tensor_entries
from manyhands.checkpoint.gguf_parts import read_gguf
from manyhands.checkpoint.manifest import TensorDigest
from manyhands.checkpoint.partition import tensor_bytes
from manyhands.checkpoint.verify import ignore
from manyhands.core import SMALL_WEIGHTS, Precision, Span
from manyhands.engine import weights
from manyhands.engine.blocks import dequantise
from manyhands.engine.cpu import CpuEnds, CpuSpan, Piece
from manyhands.engine.library import Team
from manyhands.engine.mapped import MappedTensors
from manyhands.engine.memory import Memory
from manyhands.engine.quants import packed_bytes
from manyhands.engine.span import Piece as TorchPiece
from manyhands.engine.torch import TorchEnds, TorchSpan
from manyhands.engine.weights import Stored, as_fp32, held, kept_type, matrix, take
from manyhands.program.families import read_program
from manyhands.program.ops import Rows, Weight
from manyhands.testing.gguf import write_gguf
from tests.engine.oracle import stock_model
from tests.gguf_files import FAMILIES, tiny_gguf

PRECISIONS: tuple[Precision, ...] = ("bf16", "fp32")
IDS = [(37 * i * i + 11 * i) % 256 for i in range(60)]


def logits(folder: Path) -> NDArray[np.float32]:
    program, team = read_program(folder), Team(2)
    with MappedTensors(folder, ignore) as tensors:
        span = CpuSpan(program, Span(0, len(program.layers)), tensors.read, "fp32", team)
        ends = CpuEnds(program, tensors.read, "fp32", team)
    rows = span.step(ends.embed(IDS), [Piece(span.new_cache(), 0, len(IDS))], 2)
    return ends.logits(rows, len(IDS), 2)


def theirs(folder: Path) -> NDArray[np.float32]:
    model = stock_model(folder)
    with torch.inference_mode():
        found: NDArray[np.float32] = model(torch.tensor([IDS]), use_cache=False).logits[0].numpy()
    return found


@pytest.mark.parametrize(
    "family",
    [
        name
        for name in FAMILIES
        if not name.endswith(("_limited", "_part")) and "kimi_k3" not in name and "nanbeige" not in name
    ],
)  # limits, and parts of heads, that it ignores, and models that it has not
def test_logits_are_those_of_transformers_on_the_same_weights(family: str, tmp_path: Path) -> None:
    file, folder = tiny_gguf(family, tmp_path / "tiny.gguf", layers=4)
    np.testing.assert_allclose(logits(gguf_folder(file, tmp_path)), theirs(folder), atol=2e-4, rtol=2e-3)


@pytest.mark.parametrize("family", ["llama_nanbeige", "llama_nanbeige_plain"])
def test_layers_that_are_gone_through_again_are_layers_of_their_own(family: str, tmp_path: Path) -> None:
    """Twice with the last norm in between, three times without: transformers' llama, its layers one after the other again."""
    file, folder = tiny_gguf(family, tmp_path / "tiny.gguf", layers=3)
    model, times = stock_model(folder), 3 if family.endswith("plain") else 2
    with torch.inference_mode():
        positions = torch.arange(len(IDS))[None]
        rows = model.model.embed_tokens(torch.tensor([IDS]))
        turns = model.model.rotary_emb(rows, positions)
        ahead = torch.full((len(IDS), len(IDS)), -torch.inf).triu(1)[None, None]
        for time in range(times):
            rows = model.model.norm(rows) if time and times == 2 else rows
            for layer in model.model.layers:
                rows = layer(rows, attention_mask=ahead, position_embeddings=turns)
        expected = model.lm_head(model.model.norm(rows))[0].numpy()
    made = gguf_folder(file, tmp_path)
    np.testing.assert_allclose(logits(made), expected, atol=2e-4, rtol=2e-3)
    assert len(read_program(made).layers) == 3 * times


def test_the_torch_engine_reads_heads_that_are_stacked(tmp_path: Path) -> None:
    """deepseek2 holds what makes keys of latents head by head, and transposed."""
    folder = gguf_folder(tiny_gguf("deepseek_v3", tmp_path / "tiny.gguf", layers=3)[0], tmp_path)
    program = read_program(folder)
    with MappedTensors(folder, ignore) as tensors:

        def read(name: str) -> Tensor:
            return torch.from_numpy(as_fp32(tensors.read(name)).copy())

        span, ends = TorchSpan(program, Span(0, 3), read), TorchEnds(program, read)
    rows = span.step(ends.embed(torch.tensor(IDS)), [TorchPiece(span.new_cache(len(IDS)), 0, len(IDS))])
    np.testing.assert_allclose(ends.logits(rows).numpy(), logits(folder), atol=2e-4, rtol=2e-3)


def test_a_llama_31_file_holds_its_frequencies_as_factors(tmp_path: Path) -> None:
    file, folder = tiny_gguf("llama_tied", tmp_path / "tiny.gguf", layers=1)
    ours, given = read_program(gguf_folder(file, tmp_path)).ropes[0], read_program(folder).ropes[0]
    np.testing.assert_allclose(ours.frequencies, given.frequencies, rtol=1e-6)


@pytest.mark.parametrize("dtype", sorted(BLOCKS.keys() - {"Q4_Z", "NVFP4_32", "Q1_0", "Q2_0", "PQ2_0"}))
def test_numbers_are_those_of_the_gguf_package(dtype: str) -> None:
    draw = np.random.default_rng(5)
    raw = draw.integers(0, 256, (300, 4 * BLOCKS[dtype][1]), np.uint8)  # every scale: also denormal, infinite and NaN
    if dtype == "NVFP4":
        raw.reshape(-1, 36)[:, :4] &= 127  # scales have no sign
    with np.errstate(all="ignore"):
        expected = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[dtype])
    np.testing.assert_array_equal(dequantise(raw, dtype), expected)


@pytest.mark.parametrize("is_stacked", [False, True])
def test_a_part_of_a_vector_in_blocks_is_of_its_numbers(is_stacked: bool) -> None:
    """It was cut out of its bytes: other numbers, or a ValueError."""
    raw = np.random.default_rng(5).integers(0, 256, (3, 6 * 34), np.uint8)
    raw[:, ::34], raw[:, 1::34] = 0, 0x2C
    stored = Stored("Q8_0", raw if is_stacked else raw[1])
    weight = Weight("b", (3, 192) if is_stacked else (192,), Rows(32, 2, 4, 16), stacked=is_stacked)
    expected = dequantise(raw, "Q8_0")[1].reshape(-1, 4)[8:24, :2].reshape(-1)
    np.testing.assert_array_equal(as_fp32(take(weight, lambda _: stored, 1)), expected)


@pytest.mark.parametrize("dtype", ["Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "F16", "BF16"])
def test_fp32_computes_with_exactly_what_the_file_stores(dtype: str, tmp_path: Path) -> None:
    file, folder = tiny_gguf("qwen2", tmp_path / "tiny.gguf", dtype, layers=2)
    store(folder, file)
    np.testing.assert_allclose(logits(gguf_folder(file, tmp_path)), theirs(folder), atol=2e-4, rtol=2e-3)


@pytest.mark.parametrize("dtype", ["Q4_K", "Q5_K", "Q6_K", "MXFP4", "IQ4_NL", "IQ4_XS", "Q3_K", "Q2_K"])
def test_types_that_only_llama_cpp_writes_are_computed_exactly_too(dtype: str, tmp_path: Path) -> None:
    """Blocks of random codes and scales; factors that make weights of a usual size."""
    file, folder = tiny_gguf("qwen2", tmp_path / "tiny.gguf", dtype, layers=2, hidden=256, intermediate_size=512)
    store(folder, file)
    np.testing.assert_allclose(logits(gguf_folder(file, tmp_path)), theirs(folder), atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize(("family", "dtype"), [("gpt_oss", "MXFP4"), ("gemma4_text", "Q8_0")])
def test_experts_of_blocks_are_the_numbers_that_they_store(family: str, dtype: str, tmp_path: Path) -> None:
    """gpt-oss as it is published: matrices of experts in MXFP4, all else in floats. Of gemma4 one tensor has gates and ups."""
    file, _ = tiny_gguf(family, tmp_path / "a.gguf", lambda name, _: dtype if name.endswith("exps.weight") else "F32")
    found = read_gguf(file)
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(file).tensors}
    numbers = [
        (
            t.name,
            "F32",
            t.shape,
            dequantise(tensors[t.name].data, t.dtype) if t.dtype in BLOCKS else tensors[t.name].data,
        )
        for t in found.tensors
    ]
    plain = write_gguf(tmp_path / "b.gguf", found.facts, numbers)
    ours, expected = (logits(gguf_folder(path, tmp_path / "home")) for path in (file, plain))
    np.testing.assert_array_equal(ours, expected)


@pytest.mark.parametrize("dtype", sorted(BLOCKS))
@pytest.mark.parametrize("precision", sorted(SMALL_WEIGHTS))
def test_plans_count_blocks_as_they_are_held(dtype: str, precision: Precision) -> None:
    held_bytes = packed_bytes(kept_type(dtype, precision), 64, 512)
    assert tensor_bytes(TensorDigest("m", dtype, (64, 512), ""), precision) == held_bytes


def store(folder: Path, file: Path) -> None:
    """Replace the weights of `folder` by the numbers that the GGUF file of a qwen2 model stores."""
    reader = gguf.GGUFReader(file)
    names = {entry.start: entry.name for entry in tensor_entries(read_gguf(file))}
    stored = {
        names[tensor.data_offset]: gguf.quants.dequantize(tensor.data, tensor.tensor_type).reshape(tensor.shape[::-1])
        for tensor in reader.tensors
    }
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})


def test_a_matrix_of_blocks_is_packed_in_stretches_as_it_is_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = np.random.default_rng(6)
    raw = gguf.quants.quantize(draw.standard_normal((200, 64), np.float32), gguf.GGMLQuantizationType.Q4_0)
    stored, rows = Stored("Q4_0", raw), draw.permutation(200)[:150]
    whole = {
        precision: matrix((stored, rows), precision, Memory(), "scalar").array.tobytes() for precision in PRECISIONS
    }
    held_whole = held(stored, "bf16").array
    monkeypatch.setattr(weights, "STRETCH", 64 * 32)
    for precision in PRECISIONS:
        assert matrix((stored, rows), precision, Memory(), "scalar").array.tobytes() == whole[precision]
    plain = Stored("f32", dequantise(raw, "Q4_0"))
    assert matrix((plain, rows), "fp32", Memory(), "scalar").array.tobytes() == whole["fp32"]
    np.testing.assert_array_equal(held(stored, "bf16").array, held_whole)
    np.testing.assert_array_equal(held(plain, "bf16").array, held_whole)
