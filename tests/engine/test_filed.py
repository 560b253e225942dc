"""Tables of n-grams stay in their files: the numbers are those of a table packed in memory, at no memory's cost."""

import json
import os
import random
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from manyhands.checkpoint.dtypes import BLOCKS, TABLE_BLOCKS
from manyhands.checkpoint.folder import read_entries
from manyhands.checkpoint.partition import layer_bytes
from manyhands.core import ModelId, Precision, Span
from manyhands.engine import library
from manyhands.engine.cache import SessionCache
from manyhands.engine.cpu import CpuEnds, CpuSpan
from manyhands.engine.filed import Files, TableParts
from manyhands.engine.golden_cases import Op, reals, stored
from manyhands.engine.golden_small import blocks
from manyhands.engine.library import WIDE, Array, Plan, Team
from manyhands.engine.mapped import MappedTensors
from manyhands.engine.memory import Memory
from manyhands.engine.packing import PLAIN, Keeping, Packer
from manyhands.engine.quants import IN_TABLES
from manyhands.engine.span import Piece
from manyhands.engine.weights import Read, Stored, as_bf16, as_fp32, kept_type, matrix
from manyhands.errors import ModelError
from manyhands.program.families import read_program
from manyhands.testing.tiny import make_tiny
from manyhands.weights.packed import PackedShelf, packed_folder

PRECISIONS: tuple[Precision, ...] = ("bf16", "fp32", "w8", "w4")
IDS = [(37 * i * i + 11 * i + i // 7) % 250 for i in range(60)]
SHARD = ".ngram_embedding.shard_"


def ignore(*_: object) -> None:
    pass


def drawn(seed: int, rows: int, width: int, name: str) -> Array:
    """Numbers of all sizes: small ones, rows of zeros, and what is none; or any blocks."""
    if name in BLOCKS:
        return blocks(seed, rows, width // BLOCKS[name][0], name)
    found = reals(seed, rows, width, spread=12)
    flat = found.reshape(-1)
    for at, bits in enumerate((0x7F800000, 0xFFC00001, 0x007FFFFF, 0x00400000, 0x7F7FFFFF, 0x80000000)):
        flat[(at * 977 + seed) % flat.size : (at * 977 + seed) % flat.size + 1] = np.uint32(bits).view(np.float32)
    found[rows // 2] = 0
    with np.errstate(over="ignore"):
        return stored(found, name)


def packed_rows(parts: list[tuple[str, Array]], rows: list[int], precision: Precision, back_end: str) -> Array:
    """Rows of a table that is held in memory, each part packed; of blocks as small weights are, which bf16 rounds."""
    height, width = Stored(*parts[0]).shape
    held = [
        matrix((Stored(name, array), None), "w8" if name in BLOCKS else precision, Memory(), back_end)
        for name, array in parts
    ]
    found = []
    for row in rows:
        part = held[row // height]
        one = library.embed(back_end, part.array, part.type, (height, width), [row % height], 1, "f32").view(np.float32)
        rounds = precision == "bf16" and parts[row // height][0] in BLOCKS
        found.append(as_fp32(Stored("bf16", as_bf16(one))) if rounds else one)
    return np.concatenate(found)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("back_end", library.supported())
def test_rows_are_those_of_a_packed_table(back_end: str, precision: Precision) -> None:
    """Of random tables whose parts are of several types, also of blocks, for n-grams of two to five tokens, by 1 and 3
    threads."""
    chance = random.Random(f"{precision}")
    for trial in range(12):
        tokens, each = chance.randint(2, 5), chance.choice([1, 2, 5, 8, 17])
        height, width, count = chance.randint(1, 40), chance.choice([1, 7, 32, 33, 160, 256, 700]), chance.randint(1, 4)
        heads, end, vocab = (tokens - 1) * each, 9, 70_000
        whole = [name for name in TABLE_BLOCKS if width % BLOCKS[name][0] == 0]
        names = [chance.choice((*WIDE, *whole)) for _ in range(count)]
        parts = [(name, drawn(trial * 8 + i, height, width, name)) for i, name in enumerate(names)]
        firsts = [chance.randrange(height * count) for _ in range(heads)]
        sizes = [chance.randint(1, height * count - first) for first in firsts]
        by = [chance.randrange(1, 1 << 46, 2) for _ in range(tokens)]
        ids = [chance.choice([end, chance.randrange(vocab), chance.randrange(300)]) for _ in range(20)]
        wanted = []
        for position in range(len(ids)):
            mixed, is_over = ids[position] * by[0], False
            for back in range(1, tokens):
                token = end if back > position or is_over else ids[position - back]
                is_over = token == end
                mixed ^= token * by[back]
                some = range((back - 1) * each, back * each)
                wanted += [firsts[head] + mixed % sizes[head] for head in some]
        before = [[ids[max(0, position - back)] for back in range(tokens)] for position in range(len(ids))]
        digits = (np.array(before)[:, :, None] >> np.array([0, 8, 16, 24]) & 255).reshape(len(ids), -1)
        x = digits.astype(np.float32) / np.float32(256)
        numbers = [np.array(given, np.int64) for given in (by, sizes, firsts, [IN_TABLES[name] for name in names])]
        shape = (tokens, each, library.TYPES[kept_type("f32", precision)], height, end, vocab)
        table = TableParts(tuple(array for _, array in parts))
        ops: list[Op] = [(library.COPY, (0, i + 1, 4 * i, 0, 4, 1, 0, 0), (), ()) for i in range(tokens)]
        ops.append(
            (library.NGRAMS, (1, tokens + 1, *shape, *range(2, tokens + 1)), (), (*numbers[:3], table, numbers[3]))
        )
        plan = Plan(back_end, "f32", [4 * tokens, *[4] * tokens, heads * width], tokens + 1, "f32", 64)
        for op in ops:
            plan.add(*op)
        right = packed_rows(parts, wanted, precision, back_end).tobytes()
        for threads in (1, 3):
            rows = x.view(np.uint8).reshape(-1)
            segments = [SessionCache(plan).segment(0, 0, len(ids))]
            assert plan.run(Team(threads), threads, segments, rows, len(ids)).tobytes() == right, (trial, names, width)


def span_of(read: Read, folder: Path, precision: Precision = "bf16", packer: Packer = PLAIN) -> CpuSpan:
    program = read_program(folder)
    return CpuSpan(program, Span(0, len(program.layers)), read, precision, Team(2), packer=packer)


def loaded(folder: Path, precision: Precision = "bf16", packer: Packer = PLAIN) -> CpuSpan:
    with MappedTensors(folder, ignore) as tensors:
        return span_of(tensors.read, folder, precision, packer)


def ends_of(folder: Path) -> CpuEnds:
    with MappedTensors(folder, ignore) as tensors:
        return CpuEnds(read_program(folder), tensors.read, "bf16", Team(1), head=False)


def rows_of(span: CpuSpan, folder: Path) -> bytes:
    """What leaves the span, of IDS."""
    return span.step(ends_of(folder).embed(IDS).tobytes(), [Piece(span.new_cache(), 0, len(IDS))], 2).tobytes()


def in_files(one: Path, out: Path) -> Path:
    """The checkpoint in `one` file in three, each with a part of its table."""
    shutil.copytree(one, out)
    tensors = load_file(out / "model.safetensors")
    (out / "model.safetensors").unlink()
    files = {name: f"model-{1 + i % 3:05}-of-00003.safetensors" for i, name in enumerate(sorted(tensors))}
    for file in set(files.values()):
        save_file({name: tensors[name] for name in files if files[name] == file}, out / file, {"format": "pt"})
    (out / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    return out


@pytest.mark.parametrize("precision", ["bf16", "w8", "w4"])
def test_parts_lie_in_several_files_or_in_memory(precision: Precision, tmp_path: Path) -> None:
    one = make_tiny("qwen4_exp_text", tmp_path / "one", layers=2)
    many = in_files(one, tmp_path / "many")
    assert len({entry.file for entry in read_entries(many) if SHARD in entry.name}) == 3
    with MappedTensors(one, ignore) as tensors:
        entries = {entry.name: tensors.read(entry.name) for entry in tensors.entries}
        copies = {name: found._replace(array=found.array.copy()) for name, found in entries.items()}
    right = rows_of(span_of(copies.__getitem__, one, precision), one)
    assert rows_of(loaded(one, precision), one) == right
    assert rows_of(loaded(many, precision), many) == right


def test_a_file_that_was_cut_is_an_error_and_not_the_end_of_the_process(tmp_path: Path) -> None:
    """Of steps through the layer with the table alone: the others compute on."""
    folder = in_files(make_tiny("qwen4_exp_text", tmp_path / "one", layers=2), tmp_path / "many")
    span, rows = loaded(folder), ends_of(folder).embed(IDS).tobytes()
    caches = [span.new_cache(0, Span(*cut)) for cut in ((0, 2), (1, 2))]
    right = [span.step(rows, [Piece(cache, 0, len(IDS))], 2) for cache in caches]
    (file, *_) = {entry.file for entry in read_entries(folder) if SHARD in entry.name}
    whole = (folder / file).read_bytes()
    os.truncate(folder / file, 64)
    with pytest.raises(
        ModelError, match=r"^a file of the checkpoint was cut to 64 bytes, of [0-9]+, since .*restore it"
    ):
        span.step(rows, [Piece(caches[0], 0, len(IDS))], 2)
    assert np.array_equal(span.step(rows, [Piece(caches[1], 0, len(IDS))], 2), right[1])
    (folder / file).write_bytes(whole)
    assert np.array_equal(span.step(rows, [Piece(caches[0], 0, len(IDS))], 2), right[0])


def test_files_that_are_removed_serve_on(tmp_path: Path) -> None:
    folder = make_tiny("qwen4_exp_text", tmp_path, layers=1)
    span = loaded(folder)
    rows = ends_of(folder).embed(IDS).tobytes()
    right = span.step(rows, [Piece(span.new_cache(), 0, len(IDS))], 2)
    (folder / "model.safetensors").unlink()
    assert np.array_equal(span.step(rows, [Piece(span.new_cache(), 0, len(IDS))], 2), right)


def test_memory_that_is_no_file_is_not_let_go_of() -> None:
    """Memory (engine/memory.py) is mapped too: what was let go of it would be zeros."""
    array = Memory().array(5000, np.uint8)
    array[:] = 7
    files = Files([array])
    files.check()
    files.let_go()
    assert array.min() == 7


def refused(folder: Path, change: Any, message: str) -> None:
    """The first layer, with one part of its table changed."""

    def read(name: str) -> Stored:
        found = tensors.read(name)
        return change(found) if f"{SHARD}2." in name else found

    with MappedTensors(folder, ignore) as tensors, pytest.raises(ModelError, match=message) as error:
        CpuSpan(read_program(folder), Span(0, 1), read, "w4", Team(1))
    assert "\n" not in str(error.value)


def test_parts_of_other_shapes_and_of_other_blocks_are_refused(tmp_path: Path) -> None:
    folder = make_tiny("qwen4_exp_text", tmp_path, layers=1)
    shape = r"shard_2\.weight is stored as \[[0-9]+, [0-9]+\], needed is \[[0-9]+, [0-9]+\]$"
    for change in (lambda a: a[:-1], lambda a: a[:, :-1], lambda a: a.T.copy()):
        refused(folder, lambda found, change=change: found._replace(array=change(found.array)), shape)
    refused(folder, lambda found: found._replace(type="i32"), r"shard_2\.weight is stored as whole numbers \(i32\)")
    refused(folder, lambda found: found._replace(array=found.array[::-1]), r"is not contiguous$")

    def blocks(found: Stored) -> Stored:
        rows, width = found.shape
        return Stored("Q4_Z", np.zeros((rows, width // 32 * 19), np.uint8))

    wide = make_tiny("qwen4_exp_text", tmp_path / "wide", layers=1, ple_embed_dim=128)
    refused(wide, blocks, r"shard_2\.weight is stored as Q4_Z: bf16, f16, f32, Q4_0.* are read of a table")


def resident() -> int:
    """Bytes of this process's own memory, and of files that it has mapped."""
    found = re.findall(r"Rss(?:Anon|File):\s+(\d+) kB", Path("/proc/self/status").read_text())
    return sum(int(size) << 10 for size in found)


@pytest.mark.parametrize("precision", ["bf16", "w4"])
def test_no_memory_holds_them_and_none_is_counted(precision: Precision, tmp_path: Path) -> None:
    small = make_tiny("qwen4_exp_text", tmp_path / "small", layers=1)
    large = make_tiny("qwen4_exp_text", tmp_path / "large", layers=1, ngram_vocab_size_base=400_000)
    table = sum(len(entry) for entry in read_entries(large) if SHARD in entry.name)
    assert table > 24_000_000
    sizes = [layer_bytes(read_entries(folder), 1, precision) for folder in (small, large)]
    assert sizes[0] == sizes[1]
    rows_of(loaded(small, precision), small)  # what is loaded once
    before = resident()
    span = loaded(large, precision)
    assert len(set(rows_of(span, large))) > 50
    assert resident() - before < table // 4


def test_what_is_kept_packed_lacks_them(tmp_path: Path) -> None:
    folder, home, model = (
        make_tiny("qwen4_exp_text", tmp_path, layers=1, ngram_vocab_size_base=20_000),
        tmp_path,
        ModelId("ab" * 32),
    )
    right, table = rows_of(loaded(folder, "w4"), folder), sum(len(e) for e in read_entries(folder) if SHARD in e.name)
    for num_made in (True, False):
        keeping = Keeping(PackedShelf(home, model), "w4")
        assert rows_of(loaded(folder, "w4", keeping), folder) == right
        keeping.keep()
        assert bool(keeping.num_made) == num_made
    assert 0 < sum(file.stat().st_size for file in packed_folder(home, model).iterdir()) < table // 4
