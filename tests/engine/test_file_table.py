"""The second table of embeddings stays in its file: the numbers are those of a table in memory, at no memory's cost."""

import gc
import os
import re
from pathlib import Path

import numpy as np
import pytest

from manyhands.checkpoint.gguf_folder import gguf_folder
from manyhands.core import Precision, Span
from manyhands.engine import library
from manyhands.engine.cpu import CpuEnds, CpuSpan
from manyhands.engine.file_table import FileTable
from manyhands.engine.library import Team
from manyhands.engine.mapped import MappedTensors
from manyhands.engine.memory import Memory
from manyhands.engine.weights import Read, Stored, as_bf16, ends_precision, find, held, matrix, whole_numbers
from manyhands.errors import ModelError
from manyhands.program.families import read_program
from manyhands.program.ops import Ngrams, Weight
from manyhands.testing.tiny import EVERY_FAMILY, make_tiny
from tests.gguf_files import tiny_gguf
from tests.nightly import daily

NAME = "model.embed_tokens_per_layer.weight"
IDS = [7, 0, 263, 7, 300, 100]  # 300 it lacks


def ignore(*_: object) -> None:
    pass


def whole(weight: Weight, read: Read, precision: Precision) -> Stored:
    """The table in memory."""
    if precision in ("w8", "w4"):
        return matrix(find(weight, read), precision, Memory(), library.supported()[0])
    return held(find(weight, read)[0], precision)


def numbers(table: Stored, shape: tuple[int, int], ids: list[int]) -> bytes:
    return library.embed("scalar", table.array, table.type, shape, ids, 1.0, "f32").tobytes()


@pytest.mark.parametrize("precision", ["fp32", "bf16", "w8", "w4"])
@pytest.mark.parametrize("stored", ["bf16", "f32", "Q8_0", "Q5_K"])
def test_rows_are_those_of_a_table_in_memory(stored: str, precision: Precision) -> None:
    """Also where a row is no multiple of a block, which only numbers can be."""
    rng, width = np.random.default_rng(1), 256 if stored.startswith("Q") else 90
    values = rng.standard_normal((264, width)).astype(np.float32)
    if stored.startswith("Q"):
        numbers_of, size = {"Q8_0": (32, 34), "Q5_K": (256, 176)}[stored]
        blocks = rng.integers(0, 256, (264, width // numbers_of * size), np.uint8)
        blocks[:, 1::size] = 0x2C  # of the scales, that none is NaN
        blocks[:, 3::size] = 0x2C
        found = Stored(stored, blocks)
    else:
        found = Stored(stored, as_bf16(values) if stored == "bf16" else values)
    weight, kept = Weight(NAME, (264, width)), ends_precision(precision)
    rows = FileTable(weight, {NAME: found}.__getitem__, kept, "scalar").rows(IDS)
    table = whole(weight, {NAME: found}.__getitem__, kept)
    expected = numbers(table, (264, width), [each if each < 264 else 0 for each in IDS])
    assert numbers(rows, (len(IDS), width), list(range(len(IDS)))) == expected


def resident() -> int:
    """Bytes of this process's own memory."""
    found = re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) << 10


def ends_of(folder: Path, precision: Precision) -> CpuEnds:
    with MappedTensors(folder, ignore) as tensors:
        return CpuEnds(read_program(folder), tensors.read, precision, Team(1))


@pytest.mark.parametrize("precision", ["bf16", "w4"])
def test_no_memory_holds_it(precision: Precision, tmp_path: Path) -> None:
    ends_of(make_tiny("gemma3n_text", tmp_path / "first"), precision)  # what is loaded once
    folder = make_tiny("gemma3n_text", tmp_path / "large", vocab_size_per_layer_input=200_000)
    size = 200_000 * 6 * 16 * 2
    before = resident()
    ends = ends_of(folder, precision)
    rows = [ends.embed(range(start, start + 8)) for start in range(0, 200, 8)]
    assert resident() - before < size // 4
    assert len({bytes(row) for each in rows for row in each}) == 200


@pytest.mark.parametrize("family", ["gemma3n_text", "gemma4_text_e4b"])
def test_a_file_that_was_cut_is_an_error_and_not_the_end_of_the_process(family: str, tmp_path: Path) -> None:
    folder = make_tiny(family, tmp_path)
    ends = ends_of(folder, "bf16")
    ends.embed(range(8))
    os.truncate(folder / "model.safetensors", 64)
    with pytest.raises(ModelError, match=r"was cut to 64 bytes, of [0-9]+, since it was loaded: restore it"):
        ends.embed(range(8))


# Those of which something is used as it is stored in fp32, for which there is no other copy; and the one with n-grams.
PLAIN = ("deepseek_v4", "gemma3n_text", "qwen4_exp_text")


@pytest.mark.parametrize("family", daily(PLAIN, [family for family in EVERY_FAMILY if family not in PLAIN]))
def test_layers_have_nothing_in_the_files(family: str, tmp_path: Path) -> None:
    """They go on with the numbers that were proven, and do not end the process, whatever becomes of the files.

    A table of n-grams alone stays there (tests/engine/test_filed.py).
    """
    folder = make_tiny(family, tmp_path, dtype="fp32")
    program = read_program(folder)
    with MappedTensors(folder, ignore) as tensors:
        span = CpuSpan(program, Span(0, len(program.layers)), tensors.read, "fp32", Team(1), "scalar")
    gc.collect()
    has_table = any(isinstance(op, Ngrams) for layer in program.layers for op in layer.ops)
    assert span.num_layers and (str(folder) in Path("/proc/self/maps").read_text()) == has_table


def test_a_choice_by_ids_has_nothing_in_the_files() -> None:
    """Its numbers were checked, once: later ones would name experts that are not there."""
    there = np.arange(6, dtype=np.int32).reshape(3, 2)
    found = whole_numbers(Weight("table", (3, 2)), lambda _: Stored("i32", there), 6)
    assert np.array_equal(found, there) and not np.shares_memory(found, there)


def test_a_file_that_is_removed_serves_on(tmp_path: Path) -> None:
    file, _ = tiny_gguf("gemma4_text_e4b", tmp_path / "tiny.gguf", "Q8_0")
    folder = gguf_folder(file, tmp_path)
    ends = ends_of(folder, "w8")
    rows = ends.embed(range(8))
    file.unlink()
    assert np.array_equal(ends.embed(range(8)), rows)
