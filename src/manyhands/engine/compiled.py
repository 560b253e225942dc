"""What compile.py makes of a Program: native operations with their weights, and plans of any stretch of them."""

from collections.abc import Sequence
from dataclasses import dataclass

from manyhands.engine.filed import Given
from manyhands.engine.library import Plan
from manyhands.engine.registers import offsets, touched

# A native operation: its kind, numbers, reals and tensors (native/plan.c).
Emitted = tuple[int, Sequence[int], Sequence[float], Sequence[Given]]


@dataclass(frozen=True, slots=True)
class Registers:
    """What plans of one program have in common: the type of rows, the registers' widths, the positions there are."""

    row_type: str
    widths: Sequence[int]
    context: int


@dataclass(frozen=True, slots=True)
class Compiled:
    """Layers, or the head, with their weights packed, of which any stretch becomes a plan; plans share the weights."""

    registers: Registers
    ops: Sequence[Emitted]
    starts: Sequence[int]  # the first operation of each layer, and the end of all
    out: int  # the register whose rows leave
    out_type: str

    def stretch(self, first: int = 0, end: int | None = None) -> tuple[slice, list[int]]:
        """Which operations layers [first, end) are, counted from 0 (default: all), and the columns at which registers begin."""
        starts = self.starts[first : len(self.starts) if end is None else end + 1]
        some = slice(starts[0], starts[-1])
        layers = [start - starts[0] for start in starts[:-1]]
        reach = [touched(kind, numbers) for kind, numbers, _, _ in self.ops[some]]
        return some, offsets(self.registers.widths, reach, self.out, layers)

    def plan(self, back_end: str, first: int = 0, end: int | None = None) -> Plan:
        """Layers [first, end) of these for a back end of the CPU."""
        some, places = self.stretch(first, end)
        r = self.registers
        plan = Plan(back_end, r.row_type, r.widths, self.out, self.out_type, r.context, places)
        for op in self.ops[some]:
            plan.add(*op)
        return plan
