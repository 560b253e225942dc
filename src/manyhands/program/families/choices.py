"""Layers that use the positions that a layer before them has chosen ("shared"): rows bring them the choice.

Behind the residual stream, or streams, register "x" has columns for the positions that the last layer with an indexer chose,
`parts` times as many as it chooses. A row of bf16 holds whole numbers to 256, so a position is the sum of parts: itself
rounded, what is left of it rounded, and so on, exact after three for each position below 2^26. So a model is cut anywhere.
Columns hold parts times UNIT: the norms of rows, by which hops know damaged ones (worker/bounds.py), are as without them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Final

from manyhands.program.blocks import Ops
from manyhands.program.fields import WIDEST, Fields
from manyhands.program.ops import (
    RESIDUAL,
    Add,
    Copy,
    Index,
    LatentAttention,
    Layer,
    Multiply,
    Op,
    Program,
    SharedIndex,
    Term,
)

FULL: Final = "full"  # a layer with an indexer
SHARED: Final = "shared"
UNIT: Final = 2.0**-30
_STREAM: Final = "y"  # the residual stream of a row that has more


def with_choices(f: Fields, program: Program, kinds: Sequence[str]) -> Program:
    """The program with rows that bring the choice of the last layer that is "full" to those that are "shared", whose attention
    has no index yet. Raises ModelError if none is before them, or where rows become wider than WIDEST."""
    if SHARED not in kinds:
        return program
    attention = program.layers[0].attention
    if not isinstance(attention, LatentAttention) or not isinstance(attention.index, Index):
        raise f.refuse("indexer_types", "a first layer with an indexer, full, is needed")
    columns = ChoiceColumns(program.hidden, attention.index.top_k, parts_of(program.context))
    if columns.end > WIDEST:
        raise f.refuse("index_topk", f"rows of {columns.end} columns follow: at most {WIDEST} are served")
    program = program if program.has_streams else _with_stream(program)
    layers = list[Layer]()
    for layer, kind, after in zip(program.layers, kinds, (*kinds[1:], FULL), strict=True):
        ops = (*layer.ops, *(columns.kept() if (kind, after) == (FULL, SHARED) else ()))
        layers.append(Layer(columns.used(ops) if kind == SHARED else ops))
    return replace(program, hidden=columns.end, layers=tuple(layers))


def parts_of(context: int) -> int:
    """Numbers of 8 bit and a sign that each position below `context`, 2^24 at most, is the sum of."""
    return 1 + (context > 1 << 8) + (context > 1 << 17)


def _with_stream(program: Program) -> Program:
    """The program whose layers, and head, take and leave the residual stream as the first columns of a row."""
    width = program.hidden
    taken, left = Copy(RESIDUAL, _STREAM, 0, width), Copy(_STREAM, RESIDUAL, 0, width, at=0)
    layers = tuple(Layer((taken, *map(_on_stream, layer.ops), left)) for layer in program.layers)
    head = replace(program.head, before=(taken,), norm=replace(program.head.norm, source=_STREAM))
    return replace(program, layers=layers, head=head)


def _on_stream(op: Op) -> Op:
    named: dict[str, Any] = {one.name: _STREAM for one in fields(op) if getattr(op, one.name) == RESIDUAL}
    return replace(op, **named) if named else op


@dataclass(frozen=True, slots=True)
class ChoiceColumns:
    """Of a row, from `start` on: `parts` of `count` positions each."""

    start: int
    count: int
    parts: int

    @property
    def end(self) -> int:
        return self.start + self.parts * self.count

    def kept(self) -> Ops:
        """From "chosen" into the row."""
        ops: list[Op] = [Multiply("chosen", UNIT, "chosen"), Copy("chosen", RESIDUAL, 0, self.count, at=self.start)]
        for at in range(self.start + self.count, self.end, self.count):
            ops += [Copy(RESIDUAL, "part", at - self.count, self.count), Add((Term("part", -1.0),), "chosen")]
            ops += [Copy("chosen", RESIDUAL, 0, self.count, at=at)]
        return tuple(ops)

    def taken(self) -> Ops:
        """From the row to "chosen"."""
        ops: list[Op] = [Copy(RESIDUAL, "chosen", self.start, self.count)]
        for at in range(self.start + self.count, self.end, self.count):
            ops += [Copy(RESIDUAL, "part", at, self.count), Add((Term("part"),), "chosen")]
        return (*ops, Multiply("chosen", 1 / UNIT, "chosen"))

    def used(self, ops: Ops) -> Ops:
        """The operations of a layer whose attention sees what the row brings."""
        index = SharedIndex("chosen", self.count)
        return (*self.taken(), *(replace(op, index=index) if isinstance(op, LatentAttention) else op for op in ops))
