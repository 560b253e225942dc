"""GGUF types whose numbers are entries of a grid: held without loss, and one set of bits on all back ends."""

import sys
from pathlib import Path
from unittest.mock import Mock

import gguf
import numpy as np
import pytest
from numpy.typing import NDArray

from manyhands.checkpoint.dtypes import BLOCKS, GRIDS
from manyhands.checkpoint.gguf_folder import gguf_folder
from manyhands.checkpoint.gguf_parts import read_gguf
from manyhands.checkpoint.verify import ignore
from manyhands.core import Precision, Span
from manyhands.engine import golden, grids, library, packing
from manyhands.engine.blocks import dequantise
from manyhands.engine.cpu import CpuEnds, CpuSpan, Piece
from manyhands.engine.golden_cases import BackEnd, reals
from manyhands.engine.golden_small import blocks, put_half
from manyhands.engine.library import TYPES, Team
from manyhands.engine.mapped import MappedTensors
from manyhands.engine.memory import Memory
from manyhands.engine.quants import KEPT, pack_blocks, packed_bytes
from manyhands.engine.weights import Stored, held, matrix
from manyhands.errors import ModelError
from manyhands.program.families import read_program
from manyhands.testing.gguf import write_gguf
from tests.engine.test_gguf import IDS, PRECISIONS
from tests.engine.test_gguf import logits as exact_logits
from tests.engine.test_gguf_hybrids import numbers as stored_numbers
from tests.engine.test_quants import numbers
from tests.gguf_files import tiny_gguf

FORMS = tuple(GRIDS)
ONES = ("IQ1_S", "IQ1_M")  # whose numbers are 1, 7 and 9 eighths
# Numbers that share a scale; of IQ1_M what moves them.
GROUPS = {"IQ3_S": 32, "IQ3_XXS": 32, "IQ2_S": 16, "IQ2_XS": 16, "IQ2_XXS": 32, "IQ1_S": 32, "IQ1_M": 8}


def oracle(raw: NDArray[np.uint8], form: str) -> NDArray[np.float32]:
    with np.errstate(all="ignore"):
        return np.asarray(gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[form]), np.float32)


def every_scale(form: str) -> NDArray[np.uint8]:
    """Random blocks; in turn with a factor that is zero, minus zero, negative, denormal, the largest, infinite, no number."""
    raw = np.random.default_rng(1).integers(0, 256, (48, 3, BLOCKS[form][1]), np.uint8)
    given = np.array([0, 0x8000, 0xB800, 0x0001, 0x83FF, 0x7BFF, 0x7C00, 0xFC00, 0x7E01, 0x3C00, 0x0400, 0x1234], "<u2")
    raw[7, 1], raw[8, 2], raw[9, 0] = 0, 255, 0x80
    put_half(raw, form, 0, np.resize(given, (48, 3, 1)))
    return raw.reshape(48, -1)


@pytest.mark.parametrize("form", FORMS)
def test_what_is_packed_is_what_the_gguf_package_reads(form: str) -> None:
    """Bit for bit, infinite factors too; and rows in any order, of whole stretches by threads."""
    raw = every_scale(form)
    want = oracle(raw, form)
    np.testing.assert_array_equal(dequantise(raw, form), want)
    np.testing.assert_array_equal(numbers(pack_blocks(raw, form), KEPT[form], *want.shape), want)
    rows = np.array([47, 0, 9, 9, 31], np.int64)
    np.testing.assert_array_equal(numbers(pack_blocks(raw, form, rows), KEPT[form], 5, want.shape[1]), want[rows])
    for precision in PRECISIONS:
        kept, plain = (held(stored, precision).array for stored in (Stored(form, raw), Stored("f32", want)))
        np.testing.assert_array_equal(kept, plain)


@pytest.mark.parametrize("form", FORMS)
def test_every_entry_is_read_with_all_signs(form: str) -> None:
    """Each entry of the grid, and each number of the table in both signs, occur in what is compared."""
    raw = np.random.default_rng(2).integers(0, 256, (256, BLOCKS[form][1]), np.uint8)
    put_half(raw, form, 0, np.ones(1, np.float16))
    want = oracle(raw, form)
    np.testing.assert_array_equal(numbers(pack_blocks(raw, form), KEPT[form], *want.shape), want)
    groups = want.reshape(-1, GROUPS[form])
    most = 9 if form in ONES else max(grids.SIZES[form])
    sizes = np.unique(np.rint(groups * (most / np.abs(groups).max(1, keepdims=True))))
    assert {int(s) for s in sizes} >= {
        sign * size for size in ((1, 7, 9) if form in ONES else grids.SIZES[form]) for sign in (1, -1)
    }
    width = GRIDS[form][1]
    seen = np.unique(np.abs(groups / groups[:, :1]).reshape(-1, width), axis=0)
    assert len(seen) > len(grids.grid(form)) // 2


@pytest.mark.parametrize("form", FORMS)
def test_all_back_ends_multiply_them_to_the_same_bits(form: str) -> None:
    """Rows of any size, with numbers that are not finite; factors likewise."""
    n, k, team = 48, 768, Team(2)
    ops = [(library.PRODUCT, (0, 1, TYPES[KEPT[form]], 0), (), (pack_blocks(every_scale(form), form), None))]
    for count in (1, 2, 3, 4, 5, 8, 17, 64):
        x = reals(9 + count, count, k, spread=9)
        x[count // 2, :40] = np.inf
        found = {BackEnd(name, team).run(x, "f32", [n], ops, 1).tobytes() for name in library.supported()}
        assert len(found) == 1


def bits(folder: Path, back_end: str, precision: Precision) -> NDArray[np.float32]:
    program, team = read_program(folder), Team(2)
    with MappedTensors(folder, ignore) as tensors:
        span = CpuSpan(program, Span(0, len(program.layers)), tensors.read, precision, team, back_end)
        ends = CpuEnds(program, tensors.read, precision, team, back_end)
    rows = span.step(ends.embed(IDS), [Piece(span.new_cache(), 0, len(IDS))], 2)
    return ends.logits(rows, len(IDS), 2)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("family", ["qwen2", "qwen3_moe"])
def test_whole_models_are_their_numbers_and_of_one_set_of_bits(family: str, form: str, tmp_path: Path) -> None:
    """Experts' stacks too. At fp32 the bits of a file of the numbers; small, as near as rounded rows are."""
    more = {"moe_intermediate_size": 256} if family == "qwen3_moe" else {"intermediate_size": 512}

    def pick(name: str, shape: tuple[int, ...]) -> str:
        return form if len(shape) > 1 and shape[-1] % 256 == 0 and "gate_inp" not in name else "F32"

    file, _ = tiny_gguf(family, tmp_path / "a.gguf", pick, layers=2, hidden=256, **more)
    shapes = [len(tensor.shape) for tensor in read_gguf(file).tensors if tensor.dtype == form]
    assert len(shapes) > 6 and (3 in shapes) == (family == "qwen3_moe")
    plain = write_gguf(tmp_path / "b.gguf", read_gguf(file).facts, stored_numbers(file))
    ours, expected = gguf_folder(file, tmp_path / "home"), gguf_folder(plain, tmp_path / "home")
    exact = exact_logits(expected)
    np.testing.assert_array_equal(exact_logits(ours), exact)
    small = {name: bits(ours, name, "w4") for name in library.supported()}
    assert len({found.tobytes() for found in small.values()}) == 1
    found = next(iter(small.values()))
    assert np.square(found - exact).mean() < 0.01 * np.square(exact).mean()
    assert not np.array_equal(found, exact)


@pytest.mark.parametrize("form", FORMS)
def test_a_matrix_is_packed_in_stretches_as_it_is_whole(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = blocks(3, 200, 2, form)
    rows = np.random.default_rng(6).permutation(200)[:150].astype(np.int64)
    whole = [matrix((Stored(form, raw), some), "w4", Memory(), "scalar").array.tobytes() for some in (None, rows)]
    assert whole[0] == pack_blocks(raw, form).tobytes() and whole[1] == pack_blocks(raw, form, rows).tobytes()
    monkeypatch.setattr("manyhands.engine.weights.STRETCH", 16 * 512)
    cut = [matrix((Stored(form, raw), some), "w4", Memory(), "scalar").array.tobytes() for some in (None, rows)]
    assert cut == whole


def test_files_need_the_package_and_nothing_else_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are refused by their headers. Golden digests and that of packing are made without a grid of a file."""
    files = {
        form: tiny_gguf("qwen2", tmp_path / f"{form}.gguf", form, layers=1, hidden=256, intermediate_size=256)[0]
        for form in FORMS
    }
    monkeypatch.setitem(sys.modules, "gguf", None)
    grids.grid.cache_clear()
    packing.packing_digest.cache_clear()
    for form, file in files.items():
        with pytest.raises(
            ModelError, match=rf"stored as {form}, which .* package gguf: .* -m pip install 'manyhands\[gguf\]'"
        ):
            read_gguf(file)
        with pytest.raises(ModelError, match=rf"{form} is read with the package gguf.*pip install 'manyhands\[gguf\]'"):
            pack_blocks(blocks(1, 16, 1, form), form)
        with pytest.raises(ModelError, match="pip install"):
            dequantise(blocks(1, 16, 1, form), form)
        name = f"small {form}"
        assert golden.digests("scalar", {name: golden.ALL[name]}) == {name: golden.recorded()[name]}
    assert packing.packing_digest()


def test_the_package_is_looked_for_once_whatever_the_number_of_tensors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, _ = tiny_gguf("qwen2", tmp_path / "a.gguf", "IQ2_S", layers=3, hidden=256, intermediate_size=256)
    look = Mock()
    monkeypatch.setattr("manyhands.checkpoint.gguf.find_spec", look)
    assert sum(tensor.dtype == "IQ2_S" for tensor in read_gguf(file).tensors) > 20
    look.assert_called_once_with("gguf")


@pytest.mark.parametrize("form", FORMS)
def test_another_grid_than_is_known_is_refused(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    grids.grid.cache_clear()
    theirs = getattr(gguf.quants, form)
    theirs.init_grid()
    for wrong in (theirs.grid + 1, theirs.grid[..., :-1], theirs.grid[..., ::-1, :], None):
        monkeypatch.setattr(theirs, "grid", wrong)
        if wrong is None:
            monkeypatch.setattr(theirs, "init_grid", lambda: None)
        with pytest.raises(ModelError, match=f"another grid of {form}"):
            grids.grid(form)


@pytest.mark.parametrize("form", FORMS)
def test_what_does_not_fit_is_refused(form: str) -> None:
    raw = blocks(1, 16, 2, form)
    fits = grids.grid(form)
    for grid in (fits[:-1], np.concatenate([fits, fits])):
        with pytest.raises(ModelError):
            pack_blocks(raw, form, grid=grid)
    with pytest.raises(ModelError):
        packed_bytes(KEPT[form], 16, 128)
    loud = fits | np.uint8(0xF8)  # no places: of each byte only the low bits are taken
    assert np.array_equal(pack_blocks(raw, form, grid=loud), pack_blocks(raw, form, grid=fits))
