"""GGUF files of models with linear attention or short convolutions: blocks, and layers that are left out."""

from pathlib import Path

import gguf
import numpy as np
import pytest

from manyhands.checkpoint.dtypes import BLOCKS
from manyhands.checkpoint.gguf_folder import gguf_folder
from manyhands.checkpoint.gguf_parts import read_gguf
from manyhands.checkpoint.verify import ignore
from manyhands.core import Span
from manyhands.engine.blocks import dequantise
from manyhands.engine.cache import state_bytes
from manyhands.engine.cpu import CpuSpan
from manyhands.engine.library import Team
from manyhands.engine.mapped import MappedTensors
from manyhands.program.families import read_program
from manyhands.testing.gguf import Written, write_gguf
from tests.engine.test_gguf import logits, theirs
from tests.gguf_files import tiny_gguf


def numbers(file: Path) -> list[Written]:
    """The tensors of a file, blocks as the fp32 numbers that they store."""
    read = {tensor.name: tensor.data for tensor in gguf.GGUFReader(file).tensors}
    return [
        (
            t.name,
            t.dtype if t.dtype == "I32" else "F32",
            t.shape,
            dequantise(read[t.name], t.dtype).reshape(t.shape) if t.dtype in BLOCKS else read[t.name],
        )
        for t in read_gguf(file).tensors
    ]


@pytest.mark.parametrize(
    ("family", "dtype", "hidden"),
    [
        ("qwen3_5_text", "Q4_K", 256),
        ("qwen3_next", "Q8_0", 64),
        ("qwen3_5_moe_text", "Q5_0", 64),
        ("qwen4_exp_text", "Q5_1", 64),
        ("lfm2", "Q4_0", 64),
        ("granitemoehybrid_mamba", "Q4_1", 64),
        ("nemotron_h", "Q8_0", 64),
    ],
)
def test_blocks_are_the_numbers_that_they_store(family: str, dtype: str, hidden: int, tmp_path: Path) -> None:
    """Rows are taken from matrices of blocks in another order; blocks of 256 columns have those of several heads."""

    def pick(name: str, shape: tuple[int, ...]) -> str:
        whole = len(shape) > 1 and shape[-1] % BLOCKS[dtype][0] == 0
        return dtype if whole and not name.endswith(("conv1d.weight", "conv.weight", "ssm_norm.weight")) else "F32"

    more = {"linear_num_value_heads": 4, "linear_value_head_dim": 64} if dtype == "Q4_K" else {}
    file, _ = tiny_gguf(family, tmp_path / "a.gguf", pick, layers=4, hidden=hidden, **more)
    found = read_gguf(file)
    kinds = {tensor.name: tensor.dtype for tensor in found.tensors}
    behind = "blk.0.shortconv.out_proj.weight" if family == "lfm2" else "blk.0.ssm_out.weight"
    assert kinds[behind] == dtype
    plain = write_gguf(tmp_path / "b.gguf", found.facts, numbers(file))
    ours, expected = (logits(gguf_folder(path, tmp_path / "home")) for path in (file, plain))
    np.testing.assert_array_equal(ours, expected)


def test_layers_that_guess_ahead_are_left_out(tmp_path: Path) -> None:
    """Files of Qwen3.5 have them behind the others, as one more layer of attention with a few tensors of its own."""
    file, _ = tiny_gguf("qwen3_5_text", tmp_path / "a.gguf", layers=4)
    found, whole = read_gguf(file), numbers(file)
    ahead: list[Written] = [
        (name.replace("blk.3.", "blk.4."), dtype, shape, array)
        for name, dtype, shape, array in whole
        if name.startswith("blk.3.")
    ]
    ahead.append(("blk.4.nextn.eh_proj.weight", "F32", (64, 128), np.zeros((64, 128), np.float32)))
    facts = {**found.facts, "qwen35.block_count": 5, "qwen35.nextn_predict_layers": 1}
    longer = write_gguf(tmp_path / "b.gguf", facts, [*whole, *ahead])
    ours, expected = (logits(gguf_folder(path, tmp_path / "home")) for path in (longer, file))
    np.testing.assert_array_equal(ours, expected)


def test_convolutions_of_mamba_may_have_no_bias(tmp_path: Path) -> None:
    """The tensors say so; transformers takes it that they have one."""
    file, folder = tiny_gguf("granitemoehybrid_mamba", tmp_path / "tiny.gguf", layers=2, mamba_conv_bias=False)
    np.testing.assert_allclose(logits(gguf_folder(file, tmp_path)), theirs(folder), atol=2e-4, rtol=2e-3)


@pytest.mark.parametrize(
    ("family", "flattened"), [("granitemoehybrid_mamba_dense", "ssm_norm.weight"), ("ernie4_5_moe", "exp_probs_b.bias")]
)
def test_rows_are_read_as_vectors_too(family: str, flattened: str, tmp_path: Path) -> None:
    """Norms of Mamba and corrections of ERNIE: llama.cpp's quantiser drops their first dimension where it is one."""
    file, _ = tiny_gguf(family, tmp_path / "a.gguf", layers=2)
    found, whole = read_gguf(file), numbers(file)
    flat: list[Written] = [
        (name, dtype, (array.size,) if name.endswith(flattened) else shape, array)
        for name, dtype, shape, array in whole
    ]
    assert [shape for _, _, shape, _ in flat] != [shape for _, _, shape, _ in whole]
    ours, expected = (
        logits(gguf_folder(path, tmp_path)) for path in (write_gguf(tmp_path / "b.gguf", found.facts, flat), file)
    )
    np.testing.assert_array_equal(ours, expected)


def test_states_of_tiled_heads_are_counted_as_they_are_kept(tmp_path: Path) -> None:
    """A state keeps keys once for each value head."""
    folder = gguf_folder(tiny_gguf("qwen3_5_text", tmp_path / "tiny.gguf", layers=1)[0], tmp_path)
    program = read_program(folder)
    with MappedTensors(folder, ignore) as tensors:
        span = CpuSpan(program, Span(0, 1), tensors.read, "fp32", Team(1))
    assert span.session_bytes == state_bytes(program.layers[0], 4)


def test_layers_of_nemotron_h_that_guess_ahead_are_left_out(tmp_path: Path) -> None:
    """As one more layer, with attention and experts."""
    file, _ = tiny_gguf("nemotron_h", tmp_path / "a.gguf")
    found, whole = read_gguf(file), numbers(file)
    ahead: list[Written] = [
        (f"blk.4.{name[6:]}", dtype, shape, array)
        for name, dtype, shape, array in whole
        if name.startswith(("blk.1.", "blk.2.")) and not name.endswith("attn_norm.weight")
    ]
    ahead.append(("blk.4.nextn.eh_proj.weight", "F32", (64, 128), np.zeros((64, 128), np.float32)))
    key = "nemotron_h_moe"
    lists = {
        f"{key}.{name}": np.append(found.facts[f"{key}.{name}"], np.int32(value))
        for name, value in (("attention.head_count_kv", 2), ("feed_forward_length", 40))
    }
    facts = {**found.facts, **lists, f"{key}.block_count": 5, f"{key}.nextn_predict_layers": 1}
    facts[f"{key}.attention.layer_norm_epsilon"] = 1e-5
    longer = write_gguf(tmp_path / "b.gguf", facts, [*whole, *ahead])
    ours, expected = (logits(gguf_folder(path, tmp_path / "home")) for path in (longer, file))
    np.testing.assert_array_equal(ours, expected)
