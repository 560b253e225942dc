"""Latent attention, and what chooses positions, as native operations (compile.py has the others)."""

from collections.abc import Sequence

from manyhands.engine import library
from manyhands.engine.compressed import choice
from manyhands.engine.emitter import Emitter
from manyhands.engine.library import BLOCK, TYPES
from manyhands.engine.weights import vector
from manyhands.program.ops import Attention, BlockIndex, EntryIndex, LatentAttention, SharedIndex, Weight


def add_latent(to: Emitter, op: LatentAttention) -> None:
    """As attention with one key head over (latent, rotary key), whose beginning is the value too; products of all heads
    before and after; before it what chooses the positions, if any."""
    heads, width, rank, key_width = op.heads, op.width, op.rank, op.rank + op.rotary_width
    chosen = _choice(to, op)
    query, latent = to.source(op.query), to.source(op.latent)
    whole, key = to.target(" query", heads * key_width), to.target(" key", key_width)
    seen, target = to.target(" latents", heads * rank), to.target(op.target, heads * op.value_width)
    step = width + op.rotary_width
    _product(to, query, whole, op.key_weight, heads, True, (0, width, 0, rank, heads, step, key_width))
    to.emit(library.COPY, (latent, key, 0, 0, rank, 1, 0, 0))
    if op.rotary_width:
        to.emit(library.COPY, (query, whole, width, rank, op.rotary_width, heads, step, key_width))
        to.emit(library.COPY, (to.source(op.rotary), key, 0, rank, op.rotary_width, 1, 0, 0))
    window = op.rate if isinstance(op.index, EntryIndex) else op.window or 0
    shape = (heads, 1, key_width, rank, window, 1, 0, *chosen)
    sinks = vector([op.sinks] if op.sinks else [], to.read)
    to.emit(library.ATTENTION, (whole, key, key, seen, *shape), (op.scale, 0.0), (sinks,))
    _product(to, seen, target, op.value_weight, heads, False, (0, rank, 0, op.value_width, heads, rank, op.value_width))


def attended(to: Emitter, op: Attention) -> tuple[tuple[int, ...], int]:
    """The register of what an index chooses, or none; and the window: the positions of an entry, where entries are chosen."""
    if isinstance(op.index, EntryIndex):
        return (choice(to, op.index, op.rate),), op.rate
    chosen = () if op.index is None else (_block_choice(to, op.index),)
    return chosen, (op.window or 0) * (-1 if op.is_chunked else 1)


def _block_choice(to: Emitter, index: BlockIndex) -> int:
    """The register of the blocks that each key head sees."""
    query, key = to.source(index.query), to.source(index.key)
    chosen = to.target(" chosen", index.heads * index.top_k * index.block // BLOCK, [query, key])
    numbers = (query, key, query, chosen, index.heads, index.width, 0, index.block, index.local)
    to.emit(library.INDEX, numbers)
    return chosen


def _choice(to: Emitter, op: LatentAttention) -> tuple[int, ...]:
    """The register of the positions that a row sees, or none."""
    index = op.index
    if index is None:
        return ()
    if isinstance(index, SharedIndex):
        return (to.source(index.source),)
    if isinstance(index, EntryIndex):
        return (choice(to, index, op.rate),)
    sources = [to.source(name) for name in (index.query, index.key, index.weight)]
    chosen = to.target(index.target, index.top_k, sources)
    to.emit(library.INDEX, (*sources, chosen, index.heads, index.width))
    return (chosen,)


def _product(
    to: Emitter, source: int, target: int, weight: Weight, heads: int, turned: bool, columns: Sequence[int]
) -> None:
    """Multiply each head's columns with its rows of a weight, or with those rows as columns (`turned`)."""
    held = to.by_head(weight, heads, turned)
    to.emit(library.PRODUCT, (source, target, TYPES[held.type], 0, *columns), (), (held.array, None))
