"""Random shapes and operations of the native engine's plans, which fuzz_kernels.py runs."""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from manyhands.checkpoint.dtypes import BLOCKS
from manyhands.engine import library
from manyhands.engine.golden_cases import Op, reals, stored
from manyhands.engine.golden_small import blocks
from manyhands.engine.library import Array
from manyhands.engine.quants import KEPT, pack_blocks, round_weights
from manyhands.engine.states import DELTA_SCAN

Integer = Callable[[int, int], int]


def matrix(integer: Integer, n: int, k: int, groups: int = 1) -> tuple[int, Array]:
    """Packed out of views of all kinds: as it is, transposed, every other row, rows by number, at odd addresses."""
    name = ("bf16", "f16", "f32")[integer(0, 2)]
    packed = []
    if (form := integer(0, 8)) < 3:
        fits = [kind for kind in KEPT if BLOCKS[kind][0] == 32 or k % BLOCKS[kind][0] == 0]
        kind = fits[integer(0, len(fits) - 1)]
        rows = np.array([integer(0, n - 1) for _ in range(n)], np.int64) if integer(0, 1) else None
        drawn = [blocks(integer(1, 99), n, -(-k // BLOCKS[kind][0]), kind) for _ in range(groups)]
        return library.TYPES[KEPT[kind]], np.concatenate([pack_blocks(raw, kind, rows) for raw in drawn])
    small = ("w8", "w4")[form - 3] if form < 5 else ""
    for _ in range(groups):
        whole, rows = stored(reals(integer(1, 99), 2 * n, k), name), None
        match integer(0, 4):
            case 0:
                given = whole[:n]
            case 1:
                given = np.ascontiguousarray(whole[n:].T).T
            case 2:
                given = whole[::2]
            case 3:
                given, rows = whole, np.array([integer(0, 2 * n - 1) for _ in range(n)], np.int64)
            case _:
                given = np.frombuffer(b"x" + whole[:n].tobytes(), np.uint8)[1:].view(whole.dtype).reshape(n, k)
        kept = small or ("bf16" if name == "f32" and groups == 1 and integer(0, 1) else name)
        if small:
            packed.append(round_weights("scalar", given, name, small, rows))
        else:
            packed.append(library.pack(given, name, kept, rows))
    return library.TYPES[kept], np.concatenate(packed)


def maybe(integer: Integer, n: int) -> Array | None:
    return reals(integer(1, 99), n) if integer(0, 1) else None


@dataclass(frozen=True, slots=True)
class Shape:
    """Widths of a plan's registers, the heads they hold, and registers that fit some kinds of operation."""

    widths: list[int]
    heads: int = 0
    key_heads: int = 0
    fitting: dict[int, tuple[int, ...]] = field(default_factory=dict)
    index_heads: int = 0
    chosen: int = 0  # the register of chosen positions or entries, if there is one
    streams: int = 0
    block: int = 0  # positions of a block that an index chooses


def shape_of(integer: Integer) -> Shape:
    """Random widths, or those of attention, of latents, of latents with an index, of experts, of linear attention, of streams
    and entries, of attention over blocks that an index chooses."""
    hidden, heads, width = integer(1, 4) * integer(1, 30), integer(1, 6), integer(1, 70)
    common: dict[int, tuple[int, ...]] = {
        library.ADD: (5, 5, 0, 5),
        library.NORM: (0, 5, 0, 0),
        library.MULTIPLY: (5, 6, 5, 0),
        library.RESCALE: (0, 5, 0, 0),
        library.MIX: (0, 6, 5, 0),
    }
    match integer(0, 8):
        case 1:
            key_heads, value = integer(1, 3), integer(1, 70)
            many = heads * key_heads
            widths = [hidden, many * width, key_heads * width, key_heads * value, many * value, hidden, many]
            fitting = {**common, library.ATTENTION: (1, 2, 3, 4), library.MULTIPLY: (4, 6, 4, 0)}
            return Shape(widths, many, key_heads, fitting)
        case 2:
            widths = [hidden, heads * width, width, hidden, heads * integer(1, width), hidden, 1]
            return Shape(widths, heads, 1, {**common, library.ATTENTION: (1, 2, 2, 4)})
        case 3:
            experts, inner = integer(2, 40), integer(1, 80)
            widths = [hidden, experts, 2 * integer(1, min(experts, 4)), hidden, inner, hidden, 1, inner]
            mixture = {library.ROUTE: (1, 2, 0, 0), library.EXPERTS: (0, 2, 3, 0), library.GATE: (4, 7, 4, 0)}
            return Shape(widths, 0, 0, {**common, **mixture})
        case 4:
            key_heads, value = integer(1, 3), integer(1, 70)
            many = heads * key_heads
            decays = many * (width if integer(0, 1) else 1)
            widths = [hidden, key_heads * width, key_heads * width, many * value, decays, many, many * value]
            linear = {library.DELTA: (1, 2, 3, 4, 5, 6), library.DECAY: (4, 8, 0, 0), library.CONVOLVE: (1, 2, 0, 0)}
            return Shape(
                [*widths, hidden, decays, many * value], many, key_heads, {library.NORM: (0, 7, 0, 0), **linear}
            )
        case 5:
            many, wide, top_k = integer(1, 40), integer(1, 70), integer(1, 90)
            widths = [
                hidden,
                heads * width,
                width,
                top_k,
                heads * integer(1, width),
                hidden,
                1,
                many * wide,
                wide,
                many,
            ]
            fitting = {**common, library.ATTENTION: (1, 2, 2, 4), library.INDEX: (7, 8, 9, 3)}
            return Shape(widths, heads, 1, fitting, many, 3)
        case 6:
            return shape_of_entries(integer, heads, width)
        case 7:
            key_heads, value, wide, parts = integer(1, 3), integer(1, 70), integer(1, 70), integer(1, 3)
            many, each = heads * key_heads, parts * integer(1, 3)
            widths = [
                hidden,
                many * width,
                key_heads * width,
                key_heads * value,
                key_heads * each,
                many * value,
                hidden,
            ]
            widths += [key_heads * wide, wide]
            fitting = {
                **common,
                library.ATTENTION: (1, 2, 3, 5),
                library.INDEX: (7, 8, 7, 4),
                library.ADD: (6, 6, 0, 6),
            }
            return Shape(widths, many, key_heads, fitting, key_heads, 4, block=64 * parts)
        case 8:
            return shape_of_words(integer, hidden, heads, width)
    return Shape([integer(1, 4) * integer(1, 30) for _ in range(integer(2, 6))])


def shape_of_entries(integer: Integer, heads: int, width: int) -> Shape:
    """Streams; queries, keys, what entries are made of, entries; an index of entries."""
    count, wide, values = integer(1, 4), integer(1, 40), width * integer(1, 2)
    many, narrow, top_k = integer(1, 40), integer(1, 70), integer(1, 40)
    mixes = (2 + count) * count if integer(0, 2) else 2 * count
    widths = [count * wide + integer(0, 1) * 4, mixes, wide, heads * width, width, values, values, width]
    widths += [heads * width, many * narrow, narrow, many, top_k]
    fitting: dict[int, tuple[int, ...]] = {
        library.COLLAPSE: (0, 1, 2),
        library.SPREAD: (2, 1, 0),
        library.COMPRESS: (5, 6, 7),
        library.ATTEND_ENTRIES: (3, 4, 7, 8),
        library.INDEX: (9, 10, 11, 12),
        library.NORM: (4, 7, 0, 0),
    }
    return Shape(widths, heads, 0, fitting, many, 12, count)


def shape_of_words(integer: Integer, hidden: int, heads: int, width: int) -> Shape:
    """Streams that admit a value; attention of several key heads to chosen entries; ids, and rows of a table by them."""
    count, wide, key_heads, value = integer(1, 4), integer(1, 40), integer(1, 3), integer(1, 70)
    many, narrow, top_k = integer(1, 40), integer(1, 70), integer(1, 40)
    widths = [hidden, *[count * wide] * 2, wide, count * wide, heads * key_heads * width, key_heads * width]
    widths += [key_heads * value, top_k, heads * key_heads * value, many * narrow, narrow, many]
    widths += [4, 4, 4 * integer(1, 90)]
    fitting: dict[int, tuple[int, ...]] = {
        library.ADMIT: (1, 2, 3, 4),
        library.ATTENTION: (5, 6, 7, 9),
        library.INDEX: (10, 11, 12, 8),
        library.NGRAMS: (13, 15, 14),
    }
    return Shape(widths, heads * key_heads, key_heads, fitting, many, 8, count)


def rate(integer: Integer) -> int:
    """Positions of an entry; of one in forty there are none such."""
    return 3 if integer(0, 40) == 0 else (1, 2, 4, 8, 16, 32, 64, 128)[integer(0, 7)]


def operation(integer: Integer, whole: Shape) -> Op:
    """An operation that often fits, and sometimes not."""
    kind, widths = integer(0, library.ADMIT), whole.widths
    r = [integer(0, len(widths) - 1 + (integer(0, 30) == 0)) for _ in range(6)]
    if kind in whole.fitting and integer(0, 5):
        r = list(whole.fitting[kind])
    r += [0] * (6 - len(r))
    w = [widths[i] if i < len(widths) else 8 for i in r]
    odd = integer(0, 12) == 0  # something is off by one
    shape: tuple[int, ...]
    match kind:
        case library.NORM:
            groups = next(g for g in (integer(1, 4), 1) if w[0] % g == 0)
            return kind, (r[0], r[1], groups, integer(0, 1)), (1e-5, 0.0), (maybe(integer, w[0] + odd), None)
        case library.PRODUCT:
            groups = integer(1, 3) if integer(0, 2) == 0 and min(w[:2]) >= 6 else 1
            c, t = integer(0, w[0] // groups - 1), integer(0, w[1] // groups - 1)
            k, n = integer(1, w[0] // groups - c), integer(1, w[1] // groups - t)
            number, packed = matrix(integer, n, k, groups)
            columns = (c + odd, k, t, n, groups, integer(0, w[0] // groups), w[1] // groups)
            return kind, (r[0], r[1], number, integer(0, 6), *columns), (), (packed, maybe(integer, n * groups))
        case library.ROTARY:
            turns = integer(1, max(1, w[0] // 2))
            rates = np.ones(turns + odd, np.float32)
            return kind, (r[0], 1, w[0], integer(0, max(0, w[0] - 2 * turns)), turns, integer(0, 1)), (1.0,), (rates,)
        case library.ATTENTION:
            heads, kv = whole.heads or 1, whole.key_heads or 1
            latent = int(r[1] == r[2])  # values are the beginning of keys
            value = w[3] // heads if latent else w[2] // kv
            window, coded = integer(-1, 1) * integer(1, 90), integer(0, 1) * (not latent or odd)
            seen = whole.chosen + odd if integer(0, 4) else 0
            window = (0 if latent or whole.block else integer(1, 40)) if seen and integer(0, 9) else window
            shape = (*r[:4], heads, kv, max(1, w[1] // kv), max(1, value), window, latent, coded, seen)
            return kind, shape, (0.1, integer(0, 1) * 2.0), (maybe(integer, heads + odd),)
        case library.ROUTE:
            groups = next(g for g in (integer(1, 3), 1) if w[0] % g == 0)
            top = max(1, w[1] // 2)
            vectors = maybe(integer, w[0] + odd), maybe(integer, w[0])
            score = integer(0, 3 + odd)
            normalises = integer(0, 1) * (score != 2 or odd)
            table = np.resize(np.arange(w[0] + odd, dtype=np.int32), (integer(1, 300), top)) if integer(0, 1) else None
            named = 0 if odd and integer(0, 1) else top
            shape = (r[0], r[1], w[0], named, score, normalises, groups, integer(1, groups), r[2])
            return kind, shape, (1.0, 1e-20), (*vectors, table)
        case library.EXPERTS:
            inner, top = integer(1, 40), max(1, w[1] // 2)
            experts = integer(top, top + 9)
            first, before = matrix(integer, inner, w[0], experts)
            second, after = matrix(integer, w[2], inner, experts)
            scales = integer(0, 1) * (w[0] == w[2] or odd)
            more = integer(0, 3) * ((w[0] == w[2] and not scales) or odd)
            shape = (r[0], r[1], r[2], experts + odd, top, inner, first, integer(0, 6), second, scales, more)
            gates = before if integer(0, 2) else None
            return kind, shape, (1.0, 0.0, 0.0), (gates, before, after, maybe(integer, experts * inner))
        case library.CONVOLVE:
            taps = integer(1, 32 + odd)
            weights = reals(integer(1, 99), taps, w[0] + (integer(0, 9) == 0))
            return kind, (r[0], r[1], taps, integer(0, 6 + odd)), (), (weights, maybe(integer, w[1] + odd))
        case library.DECAY:
            rates, form = np.abs(reals(integer(1, 99), w[0] + odd)), integer(0, 2)
            given = rates if form else rates.astype(np.float64) if integer(0, 2) else None
            shape, bound = (r[0], r[1], form + odd * integer(0, 1)), float(integer(0, 9) - 9)
            return kind, shape, (bound,), (given, reals(integer(1, 99), w[1]))
        case library.DELTA:
            heads, kv = whole.heads or integer(1, 4), whole.key_heads or 1
            form = integer(0, 2) if integer(0, 3) == 0 else 2 * (w[3] > heads) or integer(0, 1)
            form = DELTA_SCAN if integer(0, 3) == 0 else form
            if form == DELTA_SCAN and kind in whole.fitting:
                r[3] = r[4] = len(widths) - 1
                heads = kv = 1
            each = w[2] if form == DELTA_SCAN else heads
            shape = (*r, heads, kv, max(1, w[0] // kv) + odd, max(1, w[2] // heads), form)
            falls = -np.abs(reals(integer(1, 99), w[0], w[2] + odd)) if integer(0, 9) else None
            return kind, shape, (), (maybe(integer, each + odd), falls)
        case library.INDEX:
            heads = whole.index_heads or integer(1, 4)
            shape = (*r[:4], heads + odd, max(1, w[0] // heads), whole.streams and rate(integer))
            return kind, (*shape, whole.block + odd * integer(-64, 64), integer(-odd, 3)), (), ()
        case library.COLLAPSE:
            count = whole.streams or integer(1, 4)
            keeps = int(w[1] > count) + (w[1] == 2 * count)
            tensors = reals(integer(1, 99), w[1] + odd), reals(integer(1, 99), (1, 3, 2)[keeps])
            return kind, (*r[:3], keeps, count, integer(1 - odd, 9)), (1e-6, 1e-6, 1.5), tensors
        case library.SPREAD:
            return kind, (*r[:3], integer(0, 1), (whole.streams or integer(1, 4)) + odd), (), ()
        case library.COMPRESS:
            number = rate(integer)
            return kind, (*r[:3], number, int(w[0] == 2 * w[2])), (), (reals(integer(1, 99), number + odd, w[0]),)
        case library.ATTEND_ENTRIES:
            heads = whole.heads or integer(1, 4)
            shape = (*r[:4], heads, integer(1 - odd, 90), rate(integer), whole.chosen if integer(0, 2) else 0)
            return kind, shape, (0.1,), (maybe(integer, heads + odd),)
        case library.SCALE:
            return kind, (r[0], integer(1 - odd, 9), integer(0, 1 + odd)), (float(integer(-odd, 3)),), ()
        case library.XIELU:
            return kind, (r[0],), (), (reals(integer(1, 99), 4 + odd),)
        case library.COPY:
            shape = (r[0], r[1], *(integer(0, 9) for _ in range(6)), integer(0, 1 + odd))
            chosen = np.array([integer(0, max(0, shape[4] - 1 + odd)) for _ in range(shape[4])], np.int32)
            return kind, shape, (), (chosen if integer(0, 1) else None,)
        case library.MIX:
            width = integer(1, max(1, min(w[0], w[2]) // 2))
            sources, targets = (integer(1, max(1, some // width)) for some in (w[0], w[2]))
            by = next((i for i, have in enumerate(widths) if have == sources * targets), -1 - odd)
            start, at = (max(0, integer(0, max(0, some - n * width))) for some, n in ((w[0], sources), (w[2], targets)))
            return kind, (r[0], by, r[2], width, sources, targets, start + odd, at), (float(integer(0, 1)),), ()
        case library.RESCALE:
            return kind, tuple(r[:3]), (1e-5,), ()
        case library.SPARSIFY:
            return kind, (r[0],), (float(integer(-2, 2)),), ()
        case library.ADMIT:
            return kind, (*r[:4], (whole.streams or integer(1, 4)) + odd), (0.1,), ()
        case library.NGRAMS:
            tokens, each, rows, parts = integer(2, 3), integer(1, 2), integer(8, 90), integer(1, 3)
            number, table = matrix(integer, rows, max(1, w[1] // ((tokens - 1) * each)), parts)
            sizes = np.full((tokens - 1) * each, rows * parts // ((tokens - 1) * each) + odd, np.int64)
            firsts = np.arange(len(sizes)) * sizes
            shape = (r[0], r[1], tokens, each, number, rows, integer(0, 9), 300, *[r[2]] * (tokens - 1))
            return kind, shape, (), (np.arange(tokens) * 12345 + 7, sizes, firsts, table)
        case library.MULTIPLY:
            return kind, tuple(r[:3]), (), (maybe(integer, w[0] + odd),)
        case _:
            return kind, (*r[:3], integer(0, 6 + odd)), (1.0, float(integer(0, 3)), 0.0), ()
