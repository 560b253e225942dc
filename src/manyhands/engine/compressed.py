"""Streams, entries and attention over both as native operations (compile.py has the others), and what caches hold of them."""

from collections.abc import Sequence
from functools import singledispatch
from typing import Final

from manyhands.engine import library
from manyhands.engine.emitter import Emitter
from manyhands.engine.library import BLOCK, SIDE, TYPES
from manyhands.engine.states import MOST_BACK
from manyhands.engine.weights import vector
from manyhands.errors import ModelError
from manyhands.program.ops import (
    Collapse,
    Compress,
    CompressedAttention,
    EntryIndex,
    GroupedProduct,
    Op,
    Pool,
    Spread,
)

_LINE: Final = 64  # bytes: what an operation keeps of a block begins at multiples
_HALF: Final = 128  # columns of values, or gates, of a part of a pool's rows
_WIDE: Final = 32  # columns: keys as attention reads them are padded to a multiple


@singledispatch
def add_compressed(op: Op, to: Emitter) -> None:
    """Emits the operations that `op` is."""
    raise AssertionError(f"no way to compile {type(op).__name__}")


@add_compressed.register
def _(op: Collapse, to: Emitter) -> None:
    source, mix = to.source(op.source), to.exact(op.mix)
    kept = to.target(op.kept, op.mix.outputs, [source])
    to.emit(library.PRODUCT, (source, kept, TYPES[mix.type], 0, 0, op.mix.inputs), (), (mix.array, None))
    target = to.target(op.target, op.width, [source, kept])
    numbers, reals = (source, kept, target, op.keeps, op.streams, op.iterations), (op.norm_epsilon, op.epsilon)
    tensors = [vector([w], to.read) for w in (op.base, op.scale)]
    to.emit(library.COLLAPSE, numbers, (*reals, op.magnitude or 0.0), tensors)


@add_compressed.register
def _(op: Spread, to: Emitter) -> None:
    source, kept, target = (to.source(name) for name in (op.source, op.kept, op.target))
    to.emit(library.SPREAD, (source, kept, target, int(to.rounds(op)), op.streams))


@add_compressed.register
def _(op: GroupedProduct, to: Emitter) -> None:
    source, inputs = to.source(op.source), op.weight.inputs
    held = to.exact(op.weight) if op.is_shared else to.by_head(op.weight, op.groups, False)
    target = to.target(op.target, op.groups * op.width, [source])
    columns = (0, inputs, 0, op.width, op.groups, inputs, op.width, int(op.is_shared))
    to.emit(library.PRODUCT, (source, target, TYPES[held.type], 0, *columns), (), (held.array, None))


@add_compressed.register
def _(op: Compress, to: Emitter) -> None:
    values, gates = to.source(op.values), to.source(op.gates)
    numbers = (values, gates, to.target(op.target, op.width, [values, gates]), op.rate, int(op.is_doubled))
    to.emit(library.COMPRESS, numbers, (), (vector([op.bias], to.read),))


@add_compressed.register
def _(op: Pool, to: Emitter) -> None:
    """As a convolution of values and gates, which lie side by side in each part of a row (native/states.c)."""
    sources, width = (to.source(op.values), to.source(op.gates)), op.width
    both = to.target(" pooled", 2 * width, sources)
    for start in range(0, width, _HALF):
        count = min(width - start, _HALF)
        for i, source in enumerate(sources):
            to.emit(library.COPY, (source, both, start, 2 * start + i * count, count, 1, 0, 0))
    target = to.target(op.target, width, [both])
    to.emit(library.CONVOLVE, (both, target, op.rate, 0, 1), (), (vector([op.bias], to.read), None))


@add_compressed.register
def _(op: CompressedAttention, to: Emitter) -> None:
    """As latent attention whose values are whole keys where no positions are compressed."""
    if to.has_codes:
        raise ModelError(
            f"{to.family} caches keys that are values: they are not held in 8 bits; leave --cache-dtype out"
        )
    query, key, sinks = to.source(op.query), to.source(op.key), vector([op.sinks], to.read)
    if op.entry is None:
        shape = (to.target(op.target, op.heads * op.width, [query, key]), op.heads, 1, op.width, op.width, op.window, 1)
        to.emit(library.ATTENTION, (query, key, key, *shape), (op.scale, 0.0), (sinks,))
        return
    entry, chosen = to.source(op.entry), () if op.index is None else (choice(to, op.index, op.rate),)
    target = to.target(op.target, op.heads * op.width, [query, key, entry, *chosen])
    numbers = (query, key, entry, target, op.heads, op.window, op.rate, *chosen)
    to.emit(library.ATTEND_ENTRIES, numbers, (op.scale,), (sinks,))


def choice(to: Emitter, index: EntryIndex, rate: int) -> int:
    """The register of the entries that a row sees."""
    if to.has_codes:
        raise ModelError(f"{to.family} has an indexer: its caches are not held in 8 bits; leave --cache-dtype out")
    sources = [to.source(name) for name in (index.query, index.key, index.weight)]
    chosen = to.target(" chosen", index.top_k, sources)
    to.emit(library.INDEX, (*sources, chosen, index.heads, index.width, rate))
    return chosen


def index_bytes(index: EntryIndex, rate: int, item: int) -> int:
    """Bytes that the index keys of entries take of 64 positions: as they are read, where they fill panels."""
    entries = max(1, BLOCK // rate)
    return _lines(entries * (_row(index.width, item) if entries % SIDE else -(-index.width // _WIDE) * _WIDE * item))


def block_bytes(attend: CompressedAttention, compressed: Sequence[Compress], item: int) -> int:
    """Bytes that a layer keeps of each 64 positions of a session, in numbers of `item` bytes (native/compressed.c)."""
    if attend.entry is None:
        return -(-attend.width // _WIDE) * _WIDE * item * BLOCK
    entries = max(1, BLOCK // attend.rate)
    parts = [(BLOCK + entries) * _row(attend.width, item)]
    if attend.index is not None:
        parts.append(index_bytes(attend.index, attend.rate, item))
    parts += [2 * min(op.rate, BLOCK) * _row(op.width, item) for op in compressed if op.is_doubled]
    return sum(_lines(part) for part in parts)


def ring_bytes(op: Compress, item: int) -> int:
    """Bytes that it keeps of the last positions of a session, likewise."""
    return _lines((MOST_BACK + op.rate * (1 + op.is_doubled)) * sum(_row(width, item) for width in op.cache_widths))


def _lines(num_bytes: int) -> int:
    return -(-num_bytes // _LINE) * _LINE


def _row(width: int, item: int) -> int:
    """Bytes of a row, in whole words."""
    return -(-width * item // 4) * 4
