"""Operations of rows alone as native operations: Multiply, and those of row_ops.py (compile.py has the others)."""

from functools import singledispatch

import numpy as np

from manyhands.core import SMALL_WEIGHTS
from manyhands.engine import library
from manyhands.engine.emitter import Emitter
from manyhands.engine.filed import TableParts
from manyhands.engine.library import TYPES
from manyhands.engine.quants import IN_TABLES
from manyhands.engine.weights import Stored, as_fp32, blend_numbers, find, held, kept_type, take, vector, xielu_numbers
from manyhands.errors import ModelError
from manyhands.program.ops import (
    GROWTHS,
    RESIDUAL,
    Admit,
    AttendStreams,
    Blend,
    Clip,
    Constant,
    Copy,
    Mix,
    Multiply,
    Ngrams,
    Op,
    PositionEmbedding,
    Rescale,
    ScaleByPosition,
    ScaleHeads,
    SoftCap,
    Sparsify,
    Weight,
    Xielu,
)


@singledispatch
def add_row(op: Op, to: Emitter) -> None:
    """Emits the operations that `op` is."""
    raise AssertionError(f"no way to compile {type(op).__name__}")


@add_row.register
def _(op: Multiply, to: Emitter) -> None:
    source = to.source(op.source)
    if isinstance(op.by, str):
        by = to.source(op.by)
        to.emit(library.MULTIPLY, (source, by, to.target(op.target, to.width(op.source), [by])))
        return
    numbers = np.array(as_fp32(take(op.by, to.read)) if isinstance(op.by, Weight) else [op.by], np.float32)
    numbers = numbers + np.float32(op.offset) if op.offset else numbers
    if len(numbers) == 1:
        to.emit(library.SOFTEN, (source,), (float(numbers[0]), 0.0))
    else:
        to.emit(library.MULTIPLY, (source, source, source), (), (numbers,))


@add_row.register
def _(op: ScaleByPosition, to: Emitter) -> None:
    to.emit(library.SCALE, (to.source(op.target), op.length, op.offset, GROWTHS.index(op.growth)), (op.beta,))


@add_row.register
def _(op: PositionEmbedding, to: Emitter) -> None:
    table = held(take(op.table, to.read), "bf16" if to.precision in SMALL_WEIGHTS else to.precision)
    target = to.target(op.target, op.table.inputs)
    to.emit(library.POSITION, (target, TYPES[table.type], op.offset), (), (table.array,))


@add_row.register
def _(op: ScaleHeads, to: Emitter) -> None:
    numbers = [vector([weight], to.read) for weight in (op.scales, op.biases)]
    to.emit(library.SCALE, (to.source(op.target), 1, 0, 0, op.scales.outputs), (0.0,), numbers)


@add_row.register
def _(op: Xielu, to: Emitter) -> None:
    to.emit(library.XIELU, (to.source(op.target),), (), (xielu_numbers(op, to.read),))


@add_row.register
def _(op: Copy, to: Emitter) -> None:
    source = to.source(op.source)
    is_new = op.at is None or op.width is not None
    target = to.target(op.target, op.width or op.count, [source]) if is_new else to.source(op.target)
    rounds = int(op.at is not None and op.target == RESIDUAL)
    to.emit(library.COPY, (source, target, op.start, op.at or 0, op.count, 1, 0, 0, rounds))


@add_row.register
def _(op: Constant, to: Emitter) -> None:
    """A product of a column with zeros, and a bias."""
    count = len(op.numbers)
    zeros = library.pack(np.zeros((count, 1), np.uint16), "bf16")
    target = to.target(op.target, count, [to.source(RESIDUAL)])
    numbers = (to.source(RESIDUAL), target, library.TYPES["bf16"], 0, 0, 1, 0, count)
    to.emit(library.PRODUCT, numbers, (), (zeros, np.array(op.numbers, np.float32)))


@add_row.register
def _(op: Blend, to: Emitter) -> None:
    source, target = to.source(op.source), to.source(op.target)
    for register, numbers in zip((target, source), blend_numbers(op, to.read), strict=True):
        to.emit(library.MULTIPLY, (register, register, register), (), (numbers,))
    to.emit(library.ADD, (source, int(to.rounds(op)), target), (1.0,))


@add_row.register
def _(op: SoftCap, to: Emitter) -> None:
    to.emit(library.SOFTEN, (to.source(op.target),), (1.0, op.cap))


@add_row.register
def _(op: Clip, to: Emitter) -> None:
    to.emit(library.SOFTEN, (to.source(op.target),), (1.0, -op.limit))


@add_row.register
def _(op: Mix, to: Emitter) -> None:
    by = -1 if op.by is None else to.source(op.by)
    parts = (op.width, op.sources, op.targets, op.start, op.at)
    to.emit(library.MIX, (to.source(op.source), by, to.source(op.target), *parts), (op.offset,))


@add_row.register
def _(op: Rescale, to: Emitter) -> None:
    source, like = to.source(op.source), to.source(op.like)
    to.emit(library.RESCALE, (source, like, to.target(op.target, to.width(op.source), [like])), (op.least,))


@add_row.register
def _(op: Sparsify, to: Emitter) -> None:
    to.emit(library.SPARSIFY, (to.source(op.target),), (op.by,))


@add_row.register
def _(op: Ngrams, to: Emitter) -> None:
    now, *before = (to.source(name) for name in op.tokens)
    parts, heads = [_stored_part(op.table, number, to) for number in range(op.parts)], len(op.sizes)
    target = to.target(op.target, heads * op.table.inputs, [now, *before])
    kept = TYPES[kept_type("f32", to.precision)]
    shape = (len(op.tokens), heads // len(before), kept, op.table.outputs, op.end, op.vocab)
    numbers = [np.array(each, np.int64) for each in op.numbers]
    for weight, needed in zip(op.stored, numbers, strict=True):
        if not np.array_equal(to.read(weight.name).array, needed):
            raise ModelError(
                f"{weight.name} has other numbers than {to.family} makes of its config: {needed.tolist()[:8]}"
            )
    table = TableParts(tuple(part.array for part in parts))
    types = np.array([IN_TABLES[part.type] for part in parts], np.int64)
    to.emit(library.NGRAMS, (now, target, *shape, *before), (), (*numbers, table, types))


def _stored_part(table: Weight, number: int, to: Emitter) -> Stored:
    """A part of a table, where it is stored: rows are rounded as they are read. Raises ModelError."""
    found, _ = find(table, to.read, number)
    if found.type not in IN_TABLES or found.order is not None:
        name, needed = table.stored_name(number), f"{', '.join(IN_TABLES)} are read of a table that stays in its file"
        raise ModelError(f"{name} is stored as {found.type}: {needed}")
    return found


@add_row.register
def _(op: AttendStreams, to: Emitter) -> None:
    """Two vectors of bf16 have their product in fp32 exactly."""
    vectors = [as_fp32(take(weight, to.read)).reshape(-1) for weight in op.weights]
    by = np.prod(vectors, axis=0, dtype=np.float32)
    source = to.source(op.source)
    to.emit(library.ATTEND_STREAMS, (source, to.target(op.target, len(by), [source]), op.streams), (op.eps,), (by,))


@add_row.register
def _(op: Admit, to: Emitter) -> None:
    sources = [to.source(name) for name in (op.key, op.query, op.value)]
    target = to.target(op.target, to.width(op.key), sources)
    to.emit(library.ADMIT, (*sources, target, op.streams), (op.scale,))
