"""Files as llama.cpp's quantiser writes them (llama_model_quantize of llama-cpp-python): held as stored, computed like it.

MANYHANDS_TEST_LLAMA_CPP names a folder in which `llama_cpp` lies, where it is not installed.
"""

import ctypes
import json
import math
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from importlib.util import find_spec
from os import environ
from pathlib import Path
from statistics import NormalDist
from typing import Any

import gguf
import numpy as np
import pytest
from numpy.typing import NDArray

from manyhands.checkpoint.dtypes import REARRANGED
from manyhands.checkpoint.gguf_folder import gguf_folder
from manyhands.checkpoint.gguf_model import tensor_entries
from manyhands.checkpoint.gguf_parts import read_gguf
from manyhands.checkpoint.verify import ignore
from manyhands.core import Precision, Span
from manyhands.engine import library
from manyhands.engine.blocks import dequantise
from manyhands.engine.cpu import CpuEnds, CpuSpan, Piece
from manyhands.engine.library import Team
from manyhands.engine.mapped import MappedTensors
from manyhands.engine.memory import Memory
from manyhands.engine.quants import KEPT
from manyhands.engine.weights import matrix
from manyhands.program.families import build_program, read_program
from manyhands.program.ops import ExpertRouting, Norm, Op, Program
from manyhands.testing.gguf import write_gguf
from tests.engine.test_gguf_hybrids import numbers
from tests.engine.test_gguf_scales import beside
from tests.engine.test_rearranged import drawn, pieces
from tests.gguf_files import FAMILIES, tiny_gguf
from tests.gguf_indexed import by_halves

pytestmark = pytest.mark.nightly
PRECISIONS: tuple[Precision, ...] = ("w4", "fp32")
IDS = [(37 * i * i + 11 * i) % 256 for i in range(40)]
WANTED = {
    "Q4_K_M": {"Q4_K", "Q6_K"},
    "Q5_K_M": {"Q5_K", "Q6_K"},
    "Q6_K": {"Q6_K"},
    "Q5_0": {"Q5_0", "Q6_K"},
    "Q5_1": {"Q5_1"},
    "IQ4_NL": {"IQ4_NL"},
    "IQ4_XS": {"IQ4_XS"},
    "Q3_K_M": {"Q3_K"},
    "Q2_K": {"Q2_K", "Q3_K"},
    "IQ3_S": {"IQ3_S"},
}


ITS_OWN = sorted(REARRANGED.keys() - {"PQ2_0"})


@pytest.fixture(scope="module")
def llama_cpp() -> Any:
    if place := environ.get("MANYHANDS_TEST_LLAMA_CPP"):
        sys.path.insert(0, place)
    if find_spec("llama_cpp") is None:
        pytest.skip("NOT RUN: K-quants of llama.cpp's quantiser are unproven here: pip install llama-cpp-python")
    import llama_cpp

    return llama_cpp


@pytest.mark.parametrize("kind", WANTED)
def test_what_llama_cpp_writes_is_held_as_it_is_and_computed_like_it(kind: str, llama_cpp: Any, tmp_path: Path) -> None:
    plain, _ = tiny_gguf("qwen2", tmp_path / "plain.gguf", layers=3, hidden=256, intermediate_size=512)
    file, given = tmp_path / "small.gguf", llama_cpp.llama_model_quantize_default_params()
    given.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{kind}")
    assert llama_cpp.llama_model_quantize(str(plain).encode(), str(file).encode(), ctypes.byref(given)) == 0
    reader, program, team = gguf.GGUFReader(file), read_program(gguf_folder(file, tmp_path)), Team(2)
    names, found = {entry.start: entry.name for entry in tensor_entries(read_gguf(file))}, set()
    with MappedTensors(gguf_folder(file, tmp_path), ignore) as tensors:
        for tensor in (one for one in reader.tensors if one.tensor_type.name in KEPT):
            want = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
            held = matrix((tensors.read(names[tensor.data_offset]), None), "w4", Memory(), "scalar")
            got = library.embed("scalar", held.array, held.type, want.shape, range(len(want)), 1.0, "f32")
            assert held.type == KEPT[tensor.tensor_type.name] and np.array_equal(got.view(np.float32), want)
            found.add(tensor.tensor_type.name)
        ours, exact = (logits(program, tensors, precision, team) for precision in PRECISIONS)
    assert found >= WANTED[kind]
    model = llama_cpp.Llama(str(file), n_ctx=64, logits_all=True, verbose=False)
    theirs = their_logits(model)
    ours_off, theirs_off = (
        float(np.square(found - exact).mean() / np.square(exact).mean()) for found in (ours, theirs)
    )
    assert ours_off < 1.1 * theirs_off < 0.01  # both round rows to 8 bit


@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "gemma3n_text"])  # whose sizes are fixed there
def test_models_of_fp32_are_computed_as_llama_cpp_computes_them(family: str, llama_cpp: Any, tmp_path: Path) -> None:
    """Its gelu is the approximation by tanh, of 16 bits, which scores that are not scaled (gemma4) make more of. Where qwen4exp
    chooses entries (here from position 19 on) it sees as many positions in each row: also some of an entry that was not chosen,
    but for rows with three positions behind the last entry."""
    file, _ = tiny_gguf(family, tmp_path / "tiny.gguf", layers=4)
    folder = gguf_folder(file, tmp_path)
    config = json.loads((folder / "config.json").read_text())
    with MappedTensors(folder, ignore) as tensors:
        ours = logits(as_its_graph(build_program(as_it_computes(config))), tensors, "fp32", Team(2))
    theirs_too = as_it_reads(file, config)
    model = llama_cpp.Llama(str(theirs_too), n_ctx=64, logits_all=True, verbose=False, type_k=0, type_v=0)
    theirs = their_logits(model)
    same = [p for p in range(len(IDS)) if family != "qwen4_exp_text" or p < 19 or p % 4 == 2]
    ours, theirs = ours[same], theirs[same]
    assert np.abs(ours - theirs).max() < (5e-3 if "gemma4" in family else 2e-3) * np.abs(theirs).max()


@pytest.mark.parametrize("form", ITS_OWN)
def test_numbers_of_types_that_are_rearranged_are_its_own(form: str, llama_cpp: Any) -> None:
    raw = drawn(form, 40, 1024)
    want, ours = np.empty((40, 1024), np.float32), dequantise(raw, form)
    theirs = getattr(llama_cpp.llama_cpp._lib, f"dequantize_row_{form.lower()}")
    theirs(ctypes.c_void_p(raw.ctypes.data), ctypes.c_void_p(want.ctypes.data), ctypes.c_int64(want.size))
    np.testing.assert_array_equal(ours, want)


@pytest.mark.parametrize("family", ["llama", "qwen3", "bitnet_plain"])
@pytest.mark.parametrize("form", [*ITS_OWN, "NVFP4 with scales"])
def test_types_that_are_rearranged_are_computed_like_it(form: str, family: str, llama_cpp: Any, tmp_path: Path) -> None:
    """Head and table too. In many architectures (qwen2, phi3) it leaves out scales of feed-forward matrices."""
    dtype, _, scales = form.partition(" ")

    def pick(name: str, shape: tuple[int, ...]) -> str:
        return "F32" if len(shape) < 2 or (scales and name == "token_embd.weight") else dtype

    file, _ = tiny_gguf(family, tmp_path / "a.gguf", pick, layers=3, hidden=256, intermediate_size=512)
    if scales:
        given = pieces(file)
        more = [scale for piece in given for ending in ("scale", "input_scale") for scale in beside(piece, ending)]
        file = write_gguf(tmp_path / "b.gguf", read_gguf(file).facts, [*given, *more])
    folder = gguf_folder(file, tmp_path)
    with MappedTensors(folder, ignore) as tensors:
        ours, exact = (logits(read_program(folder), tensors, precision, Team(2)) for precision in PRECISIONS)
    theirs = their_logits(llama_cpp.Llama(str(file), n_ctx=64, logits_all=True, verbose=False))
    ours_off, theirs_off = (
        float(np.square(found - exact).mean() / np.square(exact).mean()) for found in (ours, theirs)
    )
    assert ours_off < 2 * theirs_off < 2e-3  # both round rows to 8 bit


@pytest.mark.parametrize("dtype", ["Q8_0", "Q4_0", "Q5_1", "IQ4_NL", "MXFP4"])
def test_a_table_of_n_grams_in_blocks_is_read_as_llama_cpp_reads_it(dtype: str, llama_cpp: Any, tmp_path: Path) -> None:
    file, _ = tiny_gguf(
        "qwen4_exp_text",
        tmp_path / "tiny.gguf",
        lambda name, shape: dtype if name.startswith("per_layer_") else "F32",
        layers=4,
        indexer_budget=64,
        heads_per_ngram=1,
    )
    folder = gguf_folder(file, tmp_path)
    with MappedTensors(folder, ignore) as tensors:
        ours = logits(read_program(folder), tensors, "fp32", Team(2))
    theirs = their_logits(llama_cpp.Llama(str(file), n_ctx=64, logits_all=True, verbose=False, type_k=0, type_v=0))
    assert np.abs(ours - theirs).max() < 1e-4 * np.abs(theirs).max()


def as_it_computes(config: dict[str, Any]) -> dict[str, Any]:
    """The config with what it does otherwise: it rounds the ends of yarn's ramp, in gpt-oss too; windows of mimo2 are one
    position shorter, phimoe has none, and another factor of tables; deviations of gemma3n's gates are those of a sample; bitnet
    has silu, whatever the file says."""
    if config["model_type"] == "mimo_v2_flash":
        config["sliding_window"] -= 1
    if config["model_type"] == "bitnet":
        config["hidden_act"] = "silu"
    if config["model_type"] == "phimoe":
        config |= {"sliding_window": None}
        config.get("rope_scaling", {})["short_mscale"] = (1 + math.log(131072 / 4096) / math.log(4096)) ** 0.5
    if config["model_type"] == "gemma3n_text":
        count, normal = config["intermediate_size"], NormalDist()
        cut = normal.inv_cdf(0.95) * (count / (count - 1)) ** 0.5
        config["activation_sparsity_pattern"] = [
            normal.cdf(cut) if one else 0.0 for one in config["activation_sparsity_pattern"]
        ]
    made: dict[str, Any] = json.loads(json.dumps(config).replace('"truncate": false', '"truncate": true'))
    return made


def as_its_graph(program: Program) -> Program:
    """phimoe's without means in its norms, and with the softmax of the two best experts as their weights."""
    if program.family != "phimoe":
        return program
    layers = tuple(replace(layer, ops=tuple(map(_plainer, layer.ops))) for layer in program.layers)
    return replace(program, layers=layers, head=replace(program.head, norm=replace(program.head.norm, kind="rms")))


def _plainer(op: Op) -> Op:
    if isinstance(op, ExpertRouting):
        return replace(op, score="softmax", normalise=True, epsilon=0.0)
    return replace(op, kind="rms") if isinstance(op, Norm) else op


def as_it_reads(file: Path, config: dict[str, Any]) -> Path:
    """The file with what it reads otherwise: it turns columns of dots3-note's indexer by halves."""
    if config["model_type"] != "dots3_note_text":
        return file
    widths = config["index_head_dim"], config["qk_rope_head_dim"]
    tensors = [(name, dtype, shape, by_halves(name, array, *widths)) for name, dtype, shape, array in numbers(file)]
    return write_gguf(file.with_name("turned.gguf"), read_gguf(file).facts, tensors)


def their_logits(model: Any) -> NDArray[np.float32]:
    """In a thread of its own: llama.cpp configures a thread's AMX tiles once, and our kernels release them."""
    with ThreadPoolExecutor(1) as thread:
        thread.submit(model.eval, IDS).result()
    return np.array(model.scores[: len(IDS)], np.float32)


def logits(program: Program, tensors: MappedTensors, precision: Precision, team: Team) -> NDArray[np.float32]:
    span = CpuSpan(program, Span(0, len(program.layers)), tensors.read, precision, team)
    ends = CpuEnds(program, tensors.read, precision, team)
    rows = span.step(ends.embed(IDS), [Piece(span.new_cache(), 0, len(IDS))], 2)
    return ends.logits(rows, len(IDS), 2)
