"""Block types of GGUF that are held as blocks of another type: their numbers, those of the blocks, models, what is refused.

Their numbers are those of the package gguf (test_gguf.py), and of Q1_0, Q2_0 and PQ2_0, which it lacks, of the description
below.
"""

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from manyhands.checkpoint.dtypes import BLOCKS, REARRANGED
from manyhands.checkpoint.gguf_folder import gguf_folder
from manyhands.checkpoint.gguf_parts import read_gguf
from manyhands.checkpoint.manifest import build_manifest
from manyhands.checkpoint.verify import ignore
from manyhands.core import SMALL_WEIGHTS
from manyhands.engine import library
from manyhands.engine.blocks import dequantise
from manyhands.engine.golden_cases import BackEnd
from manyhands.engine.library import TYPES, Team
from manyhands.engine.mapped import MappedTensors
from manyhands.engine.memory import Memory
from manyhands.engine.quants import HELD, pack_blocks
from manyhands.engine.rearranged import rearranged
from manyhands.engine.weights import Stored, held, matrix, rows_held
from manyhands.errors import ModelError
from manyhands.testing.gguf import Written, write_gguf
from tests.engine.test_gguf import logits as exact_logits
from tests.engine.test_grids import bits
from tests.engine.test_quants import numbers, rounded_rows
from tests.gguf_files import tiny_gguf

Bytes = NDArray[np.uint8]

FORMS = sorted(REARRANGED)


def drawn(form: str, rows: int, numbers: int) -> Bytes:
    """Rows of blocks of every code; their factors are numbers of fp16, some of them below zero, and all scales of NVFP4."""
    draw = np.random.default_rng(5)
    count, size = BLOCKS[form]
    raw = draw.integers(0, 256, (rows, numbers // count, size), np.uint8)
    if form == "NVFP4":
        raw[..., :4] &= 127
    else:
        at = {"TQ1_0": 52, "TQ2_0": 64}.get(form, 0)
        raw[..., at : at + 2] = draw.normal(size=(rows, numbers // count, 1)).astype(np.float16).view(np.uint8)
    return raw.reshape(rows, -1)


def pieces(file: Path) -> list[Written]:
    """The tensors of a file, their bytes row by row."""
    raw = file.read_bytes()
    found = [(tensor, np.frombuffer(raw[tensor.start : tensor.end], np.uint8)) for tensor in read_gguf(file).tensors]
    return [(tensor.name, tensor.dtype, tensor.shape, each.reshape(*tensor.shape[:-1], -1)) for tensor, each in found]


def as_floats(piece: Written) -> Written:
    name, dtype, shape, raw = piece
    return name, "F32", shape, dequantise(raw, dtype) if dtype in BLOCKS else raw


def test_numbers_of_one_and_two_bits_follow_their_halves() -> None:
    for form, bits_of, count in (("Q1_0", 1, 128), ("Q2_0", 2, 64), ("PQ2_0", 2, 128)):
        raw = np.random.default_rng(5).integers(
            0, 256, (50, BLOCKS[form][1]), np.uint8
        )  # every scale: also denormal, infinite and NaN
        scales = raw[:, :2].copy().view(np.float16).astype(np.float32)
        each = 8 // bits_of
        codes = [raw[:, 2 + j // each] >> bits_of * (j % each) & (1 << bits_of) - 1 for j in range(count)]
        values = np.array([-1, 1] if bits_of == 1 else [-1, 0, 1, 2], np.float32)[np.stack(codes, 1)]
        with np.errstate(all="ignore"):
            np.testing.assert_array_equal(dequantise(raw, form), scales * values)


@pytest.mark.parametrize("form", FORMS)
def test_blocks_hold_the_same_numbers_at_every_precision(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = drawn(form, 40, 1024)
    want = dequantise(raw, form)
    assert np.array_equal(dequantise(rearranged(raw, form), REARRANGED[form]), want)
    assert np.array_equal(numbers(pack_blocks(raw, form), HELD[form], *want.shape), want)
    rows = np.array([39, 0, 9, 9, 31], np.int64)
    assert np.array_equal(numbers(pack_blocks(raw, form, rows), HELD[form], 5, 1024), want[rows])
    for precision in ("bf16", "fp32", *sorted(SMALL_WEIGHTS)):
        some, plain = (
            rows_held(stored, rows, precision, "scalar") for stored in (Stored(form, raw), Stored("f32", want))
        )
        assert precision in SMALL_WEIGHTS or np.array_equal(some.array, plain.array)
        assert precision not in SMALL_WEIGHTS or np.array_equal(some.array, pack_blocks(raw, form, rows))
    assert np.array_equal(held(Stored(form, raw), "fp32").array, want)
    whole = [matrix((Stored(form, raw), some), "w4", Memory(), "scalar").array.tobytes() for some in (None, rows)]
    monkeypatch.setattr("manyhands.engine.weights.STRETCH", 16 * 1024)
    assert [
        matrix((Stored(form, raw), some), "w4", Memory(), "scalar").array.tobytes() for some in (None, rows)
    ] == whole
    assert whole[0] == pack_blocks(raw, form).tobytes()


@pytest.mark.parametrize("count", [1, 5, 33])
@pytest.mark.parametrize("form", FORMS)
def test_products_are_those_of_rounded_rows_on_all_back_ends(form: str, count: int) -> None:
    raw, team = drawn(form, 20, 768), Team(2)
    x = np.random.default_rng(6).standard_normal((count, 768), np.float32)
    want = rounded_rows(x) @ dequantise(raw, form).astype(np.float64).T
    ops = [(library.PRODUCT, (0, 1, TYPES[HELD[form]], 0), (), (pack_blocks(raw, form), None))]
    found = {BackEnd(name, team).run(x, "f32", [20], ops, 1).tobytes() for name in library.supported()}
    assert len(found) == 1
    assert np.abs(np.frombuffer(found.pop(), np.float32).reshape(count, 20) - want).max() <= 4e-6 * np.abs(want).max()


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
@pytest.mark.parametrize("form", FORMS)
def test_whole_models_are_their_numbers_and_of_one_set_of_bits(family: str, form: str, tmp_path: Path) -> None:
    """With the table, the head and stacks of experts in this type. At fp32 the bits of a file of the numbers; small, of all
    back ends the same, those of a file in the blocks that it is held as."""
    more = {"moe_intermediate_size": 256} if family == "qwen3_moe" else {"intermediate_size": 512}

    def pick(name: str, shape: tuple[int, ...]) -> str:
        return form if len(shape) > 1 and "gate_inp" not in name else "F32"

    file, _ = tiny_gguf(family, tmp_path / "a.gguf", pick, layers=2, hidden=256, **more)
    found = read_gguf(file)
    types = {tensor.name: (tensor.dtype, len(tensor.shape)) for tensor in found.tensors}
    assert types["token_embd.weight"] == types["output.weight"] == (form, 2)
    assert family == "llama" or types["blk.0.ffn_down_exps.weight"] == (form, 3)
    plain = write_gguf(tmp_path / "b.gguf", found.facts, [as_floats(piece) for piece in pieces(file)])
    ours = gguf_folder(file, tmp_path / "home")
    exact = exact_logits(gguf_folder(plain, tmp_path / "home"))
    assert np.array_equal(exact_logits(ours), exact)
    small = {bits(ours, name, "w4").tobytes() for name in library.supported()}
    assert len(small) == 1
    rounded = np.frombuffer(small.pop(), np.float32).reshape(exact.shape)
    assert 0 < np.square(rounded - exact).mean() < 0.01 * np.square(exact).mean()
    if form == "NVFP4":  # as NVFP4_32, which is no type of GGUF
        return
    other = [
        (name, REARRANGED[dtype], shape, rearranged(raw, dtype)) if dtype in BLOCKS else (name, dtype, shape, raw)
        for name, dtype, shape, raw in pieces(file)
    ]
    same = gguf_folder(write_gguf(tmp_path / "c.gguf", found.facts, other), tmp_path / "home")
    assert np.array_equal(bits(same, "scalar", "w4"), rounded)


@pytest.mark.parametrize("form", FORMS)
def test_rows_of_a_table_that_stays_in_its_file_are_its_numbers(form: str, tmp_path: Path) -> None:
    def pick(name: str, shape: tuple[int, ...]) -> str:
        return form if name == "per_layer_token_embd.weight" else "F32"

    file, _ = tiny_gguf("gemma4_text_e4b", tmp_path / "a.gguf", pick, layers=4, hidden_size_per_layer_input=64)
    found = read_gguf(file)
    assert [tensor.shape for tensor in found.tensors if tensor.dtype == form] == [(264, 256)]
    plain = write_gguf(tmp_path / "b.gguf", found.facts, [as_floats(piece) for piece in pieces(file)])
    ours, theirs = (exact_logits(gguf_folder(path, tmp_path / "home")) for path in (file, plain))
    assert np.array_equal(ours, theirs)


def test_scales_of_nvfp4_that_are_negative_are_refused(tmp_path: Path) -> None:
    file, _ = tiny_gguf("qwen2", tmp_path / "a.gguf", "NVFP4", layers=1, intermediate_size=128)
    raw, at = bytearray(file.read_bytes()), {tensor.name: tensor.start for tensor in read_gguf(file).tensors}
    raw[at["blk.0.ffn_up.weight"] + 36 + 2] |= 128
    file.write_bytes(raw)
    with MappedTensors(gguf_folder(file, tmp_path / "home"), ignore) as tensors:
        tensors.read("model.layers.0.mlp.down_proj.weight")
        with pytest.raises(
            ModelError, match=r"mlp\.up_proj\.weight: a scale is negative \(byte 131\): the file is damaged"
        ):
            tensors.read("model.layers.0.mlp.up_proj.weight")


def test_older_files_in_q2_0_have_blocks_of_128(tmp_path: Path) -> None:
    """In 34 bytes, under the number of the type of 64: offsets tell. They are those of a file that has a number of its own."""
    file, _ = tiny_gguf("qwen3", tmp_path / "a.gguf", "PQ2_0", layers=2, hidden=256, intermediate_size=512)
    given = [(name, dtype.removeprefix("P"), shape, raw) for name, dtype, shape, raw in pieces(file)]
    old = write_gguf(tmp_path / "b.gguf", read_gguf(file).facts, given)
    assert old.read_bytes() != file.read_bytes()
    ours, theirs = ([(each.dtype, each.shape, each.start) for each in read_gguf(one).tensors] for one in (old, file))
    assert ours == theirs
    folders = [gguf_folder(one, tmp_path / "home") for one in (old, file)]
    assert build_manifest(folders[0]).id == build_manifest(folders[1]).id
    assert exact_logits(folders[0]).tobytes() == exact_logits(folders[1]).tobytes()


def stacked(count: int, *sizes: int) -> list[Written]:
    """Tensors of Q2_0 of so many rows of 1,024 numbers, whose rows have other sizes than blocks of 64 make."""
    return [(f"blk.{i}.up", "Q2_0", (count, 1024), np.zeros((count, size), np.uint8)) for i, size in enumerate(sizes)]


@pytest.mark.parametrize(
    ("tensors", "found"),
    [
        (stacked(64, 288, 288), ["Q2_0", "Q2_0"]),
        (stacked(64, 272, 272), ["PQ2_0", "PQ2_0"]),
        (stacked(64, 272, 288), None),
        (stacked(64, 288, 272), None),
        (stacked(64, 270, 272), None),
        ([("blk.0.up", "Q2_0", (1, 128), np.zeros((1, 36), np.uint8))] * 1, ["Q2_0"]),  # as long in either form
    ],
)
def test_offsets_that_are_not_all_of_one_kind_are_refused(
    tensors: list[Written], found: list[str] | None, tmp_path: Path
) -> None:
    file = write_gguf(tmp_path / "a.gguf", {"general.architecture": "qwen3"}, tensors)
    if found is None:
        with pytest.raises(ModelError, match=r"overlaps the one before it at byte|is truncated"):
            read_gguf(file)
    else:
        assert [tensor.dtype for tensor in read_gguf(file).tensors] == found
