"""Golden digests of whole tiny models, one of every family, in every precision ("model <family> <precision>" in golden.json,
of small weights in golden_small.json).

Their configs are in golden_models.json, which an installed package lacks; their weights are drawn here, by name, so that
neither torch nor a file is needed. `python -m manyhands.engine.golden` proves them too, and `--write` stores them.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from manyhands.core import Precision, Span
from manyhands.engine.cpu import CpuEnds, CpuSpan
from manyhands.engine.golden import recorded
from manyhands.engine.golden_cases import draw, stored
from manyhands.engine.library import Team
from manyhands.engine.span import EndsRunner, Piece, SpanRunner
from manyhands.engine.weights import Read, Stored
from manyhands.program.families import build_program
from manyhands.program.ops import Program
from manyhands.program.tensors import ends_tensors, layer_tensors, whole_tensors

FILE: Final = Path(__file__).with_name("golden_models.json")
PRECISIONS: Final[tuple[Precision, ...]] = ("bf16", "fp32", "w8", "w4")
STEPS: Final = (37, 1, 32)  # rows: many, one, and some over the end of a block
GAIN: Final = 2.6  # of a matrix, as deviation times the square root of its columns


@cache
def configs() -> Mapping[str, dict[str, Any]]:
    """By family: what its config.json holds."""
    found: dict[str, dict[str, Any]] = json.loads(FILE.read_text())
    return found


def numbers(name: str, shape: tuple[int, ...]) -> NDArray[np.float32]:
    """A tensor's numbers: of matrices around zero, of norms around one."""
    z = draw(int.from_bytes(hashlib.sha256(name.encode()).digest()[:3], "little"), int(np.prod(shape)))
    uniform = ((z >> np.uint64(40)).astype(np.float64) - 2.0**23) / 2.0**23
    if len(shape) > 1:
        return np.asarray((uniform * (GAIN / float(np.sqrt(shape[-1])))).astype(np.float32).reshape(shape))
    near = uniform * 0.2 + float("norm" in name and "bias" not in name)
    return np.asarray(near.astype(np.float32).reshape(shape))


def shapes(program: Program) -> dict[str, tuple[int, ...]]:
    """Every tensor of a model: stored name -> stored shape."""
    found = ends_tensors(program, embed=True, head=True)
    for layer in program.layers:
        found.update(layer_tensors(layer))
    return found


def tensors(program: Program, precision: Precision) -> dict[str, Stored]:
    """Every tensor of a model, as a checkpoint of that precision stores it."""
    kind, found = "f32" if precision == "fp32" else "bf16", shapes(program)
    whole = {name: Stored("i64", choices(found[name], some)) for name, some in whole_tensors(program).items()}
    floats = found.keys() - whole.keys()
    return whole | {name: Stored(kind, stored(numbers(name, found[name]), kind)) for name in floats}


def choices(shape: tuple[int, ...], some: Sequence[int]) -> NDArray[np.int64]:
    """A table of some numbers, again and again."""
    return np.resize(np.array(some), shape)


class RunnerMaker(Protocol):
    """What makes runners of a model."""

    def span(self, program: Program, span: Span, read: Read, precision: Precision) -> SpanRunner:
        """Some of its layers."""
        ...

    def ends(self, program: Program, read: Read, precision: Precision) -> EndsRunner:
        """Its embedding and head."""
        ...


class OfCpu:
    """A back end of the CPU, as a RunnerMaker."""

    def __init__(self, back_end: str) -> None:
        self._back_end, self._team = back_end, Team(2)

    def span(self, program: Program, span: Span, read: Read, precision: Precision) -> CpuSpan:
        return CpuSpan(program, span, read, precision, self._team, self._back_end)

    def ends(self, program: Program, read: Read, precision: Precision) -> CpuEnds:
        return CpuEnds(program, read, precision, self._team, self._back_end)


def computed(family: str, precision: Precision, machine: RunnerMaker) -> bytes:
    """Rows that leave the model's layers, cut into two spans, and logits, of one session's steps."""
    program = build_program(configs()[family])
    read, count = tensors(program, precision).__getitem__, len(program.layers)
    ends = machine.ends(program, read, precision)
    spans = [machine.span(program, cut, read, precision) for cut in (Span(0, count // 2), Span(count // 2, count))]
    caches, found, at = [span.new_cache(sum(STEPS)) for span in spans], [], 0
    for rows in STEPS:
        hidden = ends.embed([(37 * i * i + 11 * i) % program.vocab for i in range(at, at + rows)])
        for span, kept in zip(spans, caches, strict=True):
            hidden = span.step(hidden.tobytes(), [Piece(kept, at, rows)], 2)
        found += [hidden.tobytes(), ends.logits(hidden, rows, 2).tobytes()]
        at += rows
    return b"".join(found)


def digests(
    machine: RunnerMaker, families: Sequence[str] = (), precisions: Sequence[Precision] = PRECISIONS
) -> Iterator[tuple[str, str]]:
    """What a machine computes: name and digest, one model after the other; of all families unless some are named."""
    for family in families or tuple(configs()):
        for precision in precisions:
            data = computed(family, precision, machine)
            yield f"model {family} {precision}", hashlib.sha256(data).hexdigest()


def failures(
    machine: RunnerMaker, families: Sequence[str] = (), precisions: Sequence[Precision] = PRECISIONS
) -> tuple[str, ...]:
    """The models whose digests a machine does not reproduce."""
    right = recorded()
    return tuple(name for name, digest in digests(machine, families, precisions) if right.get(name) != digest)
