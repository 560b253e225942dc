"""Which kernels compute operations on columns of rows by themselves."""

from collections.abc import Callable, Iterator, Mapping
from typing import Final

from manyhands.engine import library
from manyhands.engine.cuda.device import CudaMemory
from manyhands.engine.cuda.launch import Launch, Place, args, over_columns
from manyhands.engine.cuda.room import Held, Room


def gate(room: Room, op: Held, rows: int) -> Iterator[Launch]:
    """The function of a gated block."""
    gate, up, target, activation = op.numbers[:4]
    places = (room.register(number) for number in (gate, up, target))
    yield over_columns(
        "gate", room.widths[target], rows, args(*places, n=(room.widths[target], activation), reals=op.reals)
    )


def add(room: Room, op: Held, rows: int) -> Iterator[Launch]:
    """A term to a register, the residual stream or another."""
    term, rounds, target = op.numbers[:3]
    x, width = room.register(target), room.widths[target]
    yield over_columns(
        "add", width, rows, args(x, room.register(term), x, n=(width, int(rounds and room.rounds)), reals=op.reals)
    )


def multiply(room: Room, op: Held, rows: int) -> Iterator[Launch]:
    """A register by the numbers of another, part by part; or by stored ones, one for each column."""
    source, by, target = op.numbers[:3]
    width = room.widths[target]
    if op.tensors[0] is not None:
        yield stored(room.register(source), op.tensors[0], room.register(target), width, rows)
        return
    places = (room.register(number) for number in (source, by, target))
    yield over_columns("multiply", width, rows, args(*places, n=(width, width // room.widths[by])))


def stored(source: Place, numbers: CudaMemory, target: Place, width: int, rows: int) -> Launch:
    """Rows by stored numbers, one for each column: a gate without an activation, whose other rows are all the same."""
    given = args(source, Place(numbers.address), target, n=(width, 0), reals=(1.0, 0.0, 0.0))
    return over_columns("gate", width, rows, given)


def scale(room: Room, op: Held, table: int, rows: int) -> Launch:
    """The factors of rows' positions. table: the address of their Rows (common.cu)."""
    number, *shape = op.numbers[:4]
    out, width = room.register(number), room.widths[number]
    return over_columns("scale", width, rows, args(out=out, n=(width, *shape), reals=op.reals, rows=table))


def position(room: Room, op: Held, table: int, rows: int) -> Launch:
    """Embeddings of rows' positions. table: as of `scale`."""
    number, *shape = op.numbers[:3]
    out, width = room.register(number), room.widths[number]
    given = args(out=out, tensors=(op.address(0),), n=(width, *shape), rows=table)
    return over_columns("position", width, rows, given)


def xielu(room: Room, op: Held, rows: int) -> Iterator[Launch]:
    """The function of two alphas."""
    out, width = room.register(op.numbers[0]), room.widths[op.numbers[0]]
    yield over_columns("xielu", width, rows, args(out=out, tensors=(op.address(0),), n=(width,)))


def soften(room: Room, op: Held, rows: int) -> Iterator[Launch]:
    """A number, and a soft cap."""
    width = room.widths[op.numbers[0]]
    yield over_columns("soften", width, rows, args(out=room.register(op.numbers[0]), n=(width,), reals=op.reals))


def copy(room: Room, op: Held, rows: int) -> Iterator[Launch]:
    """Columns of a register into another, those of the residual stream rounded."""
    source, target, *numbers, rounds = op.numbers[:9]
    n = (*numbers, int(rounds and room.rounds))
    given = args(room.register(source), out=room.register(target), tensors=(op.address(0),), n=n)
    yield over_columns("copy", numbers[2] * numbers[3], rows, given)


BY_POSITION: Final[Mapping[int, Callable[[Room, Held, int, int], Launch]]] = {
    library.SCALE: scale,
    library.POSITION: position,
}
