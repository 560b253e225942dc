"""Which registers of a plan may share memory: those that are never needed at once."""

from collections.abc import Sequence
from typing import Final, NamedTuple

from manyhands.engine import library
from manyhands.engine.library import SIDE


class Touched(NamedTuple):
    """Registers that an operation reads; one that it writes, and whether it writes every column of it."""

    reads: tuple[int, ...]
    writes: int
    is_whole: bool


# Places of registers that are read where one is named: of attention those of chosen positions and of what scores take besides,
# of attention to entries that of chosen ones; of a choice of experts by ids theirs.
OPTIONAL: Final = {library.ATTENTION: (11, 12), library.ATTEND_ENTRIES: (7,), library.ROUTE: (8,)}
# By kind: places of the registers read among an operation's numbers, and of the one written.
_PLACES: Final = {
    library.NORM: ((0,), 1),
    library.PRODUCT: ((0,), 1),
    library.ROTARY: ((0,), 0),
    library.ATTENTION: ((0, 1, 2), 3),
    library.GATE: ((0, 1), 2),
    library.MULTIPLY: ((0, 1), 2),
    library.SOFTEN: ((0,), 0),
    library.COPY: ((0,), 1),
    library.ROUTE: ((0,), 1),
    library.EXPERTS: ((0, 1), 2),
    library.CONVOLVE: ((0,), 1),
    library.DECAY: ((0,), 1),
    library.DELTA: ((0, 1, 2, 3, 4), 5),
    library.INDEX: ((0, 1, 2), 3),
    library.SCALE: ((0,), 0),
    library.XIELU: ((0,), 0),
    library.COLLAPSE: ((0, 1), 2),
    library.SPREAD: ((0, 1, 2), 2),
    library.COMPRESS: ((0, 1), 2),
    library.ATTEND_ENTRIES: ((0, 1, 2), 3),
    library.RESCALE: ((0, 1), 2),
    library.SPARSIFY: ((0,), 0),
    library.NGRAMS: ((0,), 1),
    library.ADMIT: ((0, 1, 2), 3),
    library.ATTEND_STREAMS: ((0,), 1),
    library.POSITION: ((), 0),
}


def touched(kind: int, numbers: Sequence[int]) -> Touched:
    """What an operation (native/plan.c) reads and writes."""
    if kind == library.ADD:  # to the residual stream, if no other is named
        target = (*numbers, 0)[2]
        return Touched((target, numbers[0]), target, True)
    if kind == library.MIX:  # without numbers of its own -1 stands for their register
        return Touched(tuple(number for number in numbers[:3] if number >= 0), numbers[2], False)
    reads, writes = _PLACES[kind]
    if kind == library.NGRAMS:  # of all its tokens
        reads = (0, *range(8, 7 + numbers[2]))
    reads = (*reads, *(place for place in OPTIONAL.get(kind, ()) if any(numbers[place : place + 1])))
    is_part = kind == library.COPY or (kind == library.PRODUCT and len(numbers) > 4)
    return Touched(tuple(numbers[place] for place in reads), numbers[writes], not is_part)


def lives(
    count: int, operations: Sequence[Touched], out: int, layers: Sequence[int] = ()
) -> list[list[tuple[int, int]]]:
    """Of each register the runs of operations, first and last, over which its numbers are needed.

    A run begins where the register is written whole, or first in a layer (`layers`: their first operations), and ends at the
    last use before the next such operation. Register 0 enters and goes from layer to layer, `out` leaves.
    """
    runs: list[list[tuple[int, int]]] = [[] for _ in range(count)]
    runs[0].append((-1, -1))
    begun = 0
    for at, operation in enumerate(operations):
        begun = at if at in layers else begun
        for number in operation.reads:
            runs[number][-1] = (runs[number][-1][0], at)
        number = operation.writes
        is_new = not runs[number] or (number and runs[number][-1][1] < begun)
        if not is_new and not (operation.is_whole and number not in operation.reads):
            runs[number][-1] = (runs[number][-1][0], at)
        else:
            runs[number].append((at, at))
    runs[out][-1] = (runs[out][-1][0], len(operations))
    return runs


def offsets(widths: Sequence[int], operations: Sequence[Touched], out: int, layers: Sequence[int] = ()) -> list[int]:
    """The columns at which registers begin: the widest first, each at the lowest place that none needed beside it has."""
    runs, placed, found = lives(len(widths), operations, out, layers), list[int](), [0] * len(widths)
    sizes = [-(-width // SIDE) * SIDE for width in widths]
    for number in sorted(range(len(widths)), key=lambda number: (number != 0, -sizes[number])):
        near = [other for other in placed if _meet(runs[number], runs[other])]
        for place in sorted([0, *(found[other] + sizes[other] for other in near)]):
            if all(place + sizes[number] <= found[o] or place >= found[o] + sizes[o] for o in near):
                found[number] = place
                break
        placed.append(number)
    return found


def _meet(ours: list[tuple[int, int]], theirs: list[tuple[int, int]]) -> bool:
    """Whether two lists of runs, each in order, have an operation in common."""
    i = j = 0
    while i < len(ours) and j < len(theirs):
        if ours[i][0] <= theirs[j][1] and theirs[j][0] <= ours[i][1]:
            return True
        if ours[i][1] < theirs[j][1]:
            i += 1
        else:
            j += 1
    return False
