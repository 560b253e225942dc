"""The native engine over whole models: near the torch reference, and the same bits on every back end, cut and company."""

import itertools
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors import safe_open

from manyhands.core import Precision, Span
from manyhands.engine import library
from manyhands.engine.cpu import CpuEnds, CpuSpan, Piece
from manyhands.engine.library import Team
from manyhands.engine.torch import TorchEnds, TorchSpan
from manyhands.engine.weights import Read, Stored
from manyhands.errors import ContextOverflow, ModelError
from manyhands.program.families import read_program
from manyhands.testing.tiny import EVERY_FAMILY, WITH_STATES, make_tiny
from tests.engine.oracle import stock_model
from tests.nightly import daily

IDS = [(37 * i * i + 11 * i) % 256 for i in range(150)]
LAYERS, CONTEXT = 4, 160
NARROW: tuple[Precision, ...] = ("bf16", "w8", "w4")
DAILY = ("llama", "gemma2", "gpt_oss", "deepseek_v3")


def reader(folder: Path) -> Read:
    names = {torch.bfloat16: "bf16", torch.float16: "f16", torch.float32: "f32", torch.int64: "i64"}
    with safe_open(folder / "model.safetensors", framework="pt") as handle:
        tensors = {name: handle.get_tensor(name) for name in handle.keys()}

    def read(name: str) -> Stored:
        tensor = tensors[name]
        bits = tensor.view(torch.uint16) if tensor.element_size() == 2 else tensor
        return Stored(names[tensor.dtype], bits.numpy())

    return read


class Model:
    """A tiny checkpoint on a back end, cut into spans."""

    def __init__(self, folder: Path, precision: Precision, back_end: str, cuts: Sequence[int] = (0, LAYERS)) -> None:
        self.team, read, program = Team(4), reader(folder), read_program(folder)
        self.ends = CpuEnds(program, read, precision, self.team, back_end)
        spans = [Span(start, end) for start, end in itertools.pairwise(cuts)]
        self.spans = [CpuSpan(program, span, read, precision, self.team, back_end) for span in spans]

    def rows(self, ids: Sequence[int], chunks: Sequence[int], threads: int = 2) -> NDArray[np.uint8]:
        """Rows that leave the last span."""
        caches, out, at = [span.new_cache() for span in self.spans], [], 0
        for count in chunks:
            rows = self.ends.embed(ids[at : at + count])
            for span, cache in zip(self.spans, caches, strict=True):
                rows = span.step(rows, [Piece(cache, at, count)], threads)
            out.append(rows)
            at += count
        return np.concatenate(out)


def by_torch(folder: Path) -> NDArray[np.float32]:
    """Logits of the torch engine."""
    program = read_program(folder)
    with safe_open(folder / "model.safetensors", framework="pt") as handle:
        tensors = {name: handle.get_tensor(name) for name in handle.keys()}
    ends = TorchEnds(program, tensors.__getitem__)
    span = TorchSpan(program, Span(0, LAYERS), tensors.__getitem__)
    hidden = span.step(ends.embed(torch.tensor(IDS)), [Piece(span.new_cache(CONTEXT), 0, len(IDS))])
    return np.asarray(ends.logits(hidden).numpy())


def by_transformers(folder: Path) -> NDArray[np.float32]:
    """Logits of transformers, in one pass."""
    with torch.inference_mode():
        return np.asarray(stock_model(folder)(torch.tensor([IDS]), use_cache=False).logits[0].numpy())


@pytest.mark.parametrize("family", EVERY_FAMILY)
def test_a_family_is_near_the_reference_and_the_same_everywhere(family: str, tmp_path: Path) -> None:
    folder = make_tiny(family, tmp_path, dtype="fp32", layers=LAYERS, context=CONTEXT)
    right = by_transformers(folder) if family in WITH_STATES else by_torch(folder)
    model = Model(folder, "fp32", "scalar")
    whole = model.rows(IDS, [len(IDS)])
    ours = model.ends.logits(whole, len(IDS), 2)
    # transformers sums linear attention over chunks of 64 positions at once.
    assert np.abs(ours - right).max() / np.abs(right).max() < (2e-4 if family in WITH_STATES else 2e-5)
    for back_end in library.supported():
        other = Model(folder, "fp32", back_end, (0, 1, LAYERS))
        assert np.array_equal(other.rows(IDS, [1, 1, 66, 64, 18], 4), whole)
        assert np.array_equal(other.ends.logits(whole, len(IDS), 4), ours)


# These have all kinds of layers. Of every family the best back end reproduces plain C's digests by day too (test_golden.py).
@pytest.mark.parametrize("family", daily(DAILY, [family for family in EVERY_FAMILY if family not in DAILY]))
@pytest.mark.parametrize("precision", NARROW)
def test_narrow_weights_give_the_same_everywhere(family: str, precision: Precision, tmp_path: Path) -> None:
    folder = make_tiny(family, tmp_path, dtype="fp32", layers=LAYERS, context=CONTEXT)
    small = Model(folder, precision, "scalar").rows(IDS, [len(IDS)], 1)
    for back_end in library.supported():
        assert np.array_equal(Model(folder, precision, back_end, (0, 3, LAYERS)).rows(IDS, [100, 49, 1], 4), small)


def test_rows_of_many_sessions_are_more_than_the_positions_of_one(tmp_path: Path) -> None:
    """Logits of all that waits are one batch: that it is longer than the context ended every request in it."""
    folder = make_tiny("llama", tmp_path, dtype="bf16", layers=1, context=64)
    ends = CpuEnds(read_program(folder), reader(folder), "bf16", Team(2))
    rows = ends.embed(IDS[:65])
    alone = [ends.logits(row.tobytes(), 1, 1) for row in rows]
    assert np.array_equal(ends.logits(rows.tobytes(), 65, 2), np.concatenate(alone))


def test_what_is_refused(tmp_path: Path) -> None:
    folder = make_tiny("llama", tmp_path, dtype="bf16", layers=1, context=CONTEXT)
    program, read, team = read_program(folder), reader(folder), Team(1)
    ends, span = CpuEnds(program, read, "bf16", team), CpuSpan(program, Span(0, 1), read, "bf16", team)
    with pytest.raises(ModelError):
        ends.embed([256 * 256])
    with pytest.raises(ContextOverflow):
        span.step(ends.embed([1]), [Piece(span.new_cache(), CONTEXT, 1)], 1)
    empty: dict[str, Stored] = {}
    with pytest.raises(ModelError, match="lacks"):
        CpuSpan(program, Span(0, 1), empty.__getitem__, "bf16", team)
    with pytest.raises(ModelError, match="stored as"):
        CpuSpan(program, Span(0, 1), lambda name: Stored("bf16", np.zeros((3, 3), np.uint16)), "bf16", team)
    with pytest.raises(ModelError, match="fp16"):
        CpuSpan(program, Span(0, 1), read, "fp16", team)
