"""Random operations of the native engine's plans, for shapes of fuzz_shapes.py; fuzz_kernels.py runs them."""

from functools import lru_cache
from typing import Final

import numpy as np

from manyhands.checkpoint.dtypes import BLOCKS
from manyhands.engine import library
from manyhands.engine.filed import Given, TableParts
from manyhands.engine.golden_cases import Op, reals, stored
from manyhands.engine.golden_small import blocks
from manyhands.engine.grids import stand_in
from manyhands.engine.library import Array
from manyhands.engine.quants import IN_TABLES, KEPT, pack_blocks, round_weights
from manyhands.engine.states import DELTA_SCAN
from tools.fuzz_shapes import Integer, Shape

# Operations to draw from: what models have most of more often, several products of one source in a row among them.
KINDS: Final = (
    *range(library.POSITION + 1),
    *[library.PRODUCT] * 7,
    *[library.ROTARY] * 3,
    *[library.ATTENTION] * 2,
    library.EXPERTS,
)
POSITIONS: Final = 5000  # of a plan
MOST_CHOSEN: Final = 20  # experts of a row: of hundreds a step would take minutes
LIMITS: Final = (
    0,
    64,
    1 << 12,
    1 << 16,
    1 << 24,
    1 << 28,
    1 << 31,
    1 << 32,
    1 << 62,
    (1 << 63) - 1,
)  # of checks; of int64


def matrix(integer: Integer, n: int, k: int, groups: int = 1) -> tuple[int, Array]:
    """Packed out of views of all kinds: as it is, transposed, every other row, rows by number, at odd addresses."""
    name = ("bf16", "f16", "f32")[integer(0, 2)]
    packed = []
    form, block = integer(0, 8), 256 if k % 256 == 0 else 32
    if form < 3 or (block == 256 and integer(0, 1)):
        fits = [kind for kind in KEPT if BLOCKS[kind][0] == block]
        kind = fits[integer(0, len(fits) - 1)]
        rows = np.array([integer(0, n - 1) for _ in range(n)], np.int64) if integer(0, 1) else None
        drawn = [blocks(integer(1, 99), n, -(-k // BLOCKS[kind][0]), kind) for _ in range(groups)]
        return library.TYPES[KEPT[kind]], np.concatenate(
            [pack_blocks(raw, kind, rows, grid=stand_in(kind)) for raw in drawn]
        )
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


def gated(integer: Integer) -> tuple[float, float, float]:
    """Of a gate what its activation is given, its limit (0: none, below 0: one of its activation), and what is added to the
    other factor."""
    return (1.0, 1.702)[integer(0, 1)], float(integer(-3, 3)), float(integer(0, 1))


def rate(integer: Integer) -> int:
    """Positions of an entry; of one in forty there are none such."""
    return 3 if integer(0, 40) == 0 else (1, 2, 4, 8, 16, 32, 64, 128)[integer(0, 7)]


@lru_cache(maxsize=512)
def frequencies(turns: int, kind: int) -> Array:
    """A table of a rotary embedding, the same array for the same one: its angles are computed once for all that turn by it."""
    rates = np.float64((1e4, 5e5, 1e3)[kind % 3]) ** (-np.arange(turns) / turns)
    match kind:
        case 3:  # as those of longer contexts: the slow ones are slower still
            rates[turns // 2 :] /= 32
        case 4:  # as nanochat's
            rates = -rates
        case 5:  # as those of which a part stands still, or is beyond what angles are defined for
            rates[turns // 2 :], rates[0] = 0, 1e9
    return rates.astype(np.float32)


def rotary(integer: Integer, whole: Shape, number: int, odd: bool) -> Op:
    """Heads of a register that turn, whole or a part of each, in pairs or halves: often those of queries or keys."""
    heads = integer(1, 8)
    if whole.heads and integer(0, 2):
        number = integer(1, 2)
        heads = (whole.heads, whole.key_heads or 1)[number - 1]
    whole_width = whole.widths[number] if number < len(whole.widths) else 8
    heads = heads if whole_width % heads == 0 else 1
    width = whole_width // heads
    turns = max(1, width // 2) if integer(0, 1) else integer(1, max(1, width // 2))
    offset = integer(0, 1) * max(0, width - 2 * turns) if integer(0, 3) else integer(0, width - 1)
    shape = (number, heads, width, offset, turns + odd, integer(0, 1), integer(0, 1) * integer(0, 99))
    return library.ROTARY, shape, ((1.0, 1.3)[integer(0, 1)],), (frequencies(turns, integer(0, 5)),)


def operation(integer: Integer, whole: Shape) -> Op:
    """An operation that often fits; now and then one of its numbers is at a limit or one off, or its tensors' sizes are."""
    kind, numbers, factors, tensors = drawn(integer, whole)
    changed, place = list(numbers), integer(0, len(numbers) - 1)
    match integer(0, 9):
        case 0:
            changed[place] += integer(-1, 1)
        case 1:
            changed[place] = LIMITS[integer(0, len(LIMITS) - 1)] * (1, -1)[integer(0, 1)] + integer(-1, 1)
        case 2 if integer(0, 1):
            tensors = [_resized(integer, array) for array in tensors]
    return kind, changed, factors, tensors


def _stored_part(seed: int, rows: int, width: int, name: str) -> Array:
    """A part of a table of n-grams, as files store it."""
    numbers = BLOCKS.get(name, (1, 0))[0]
    return blocks(seed, rows, width // numbers, name) if numbers > 1 else stored(reals(seed, rows, width), name)


def _resized(integer: Integer, array: Given) -> Given:
    """The same numbers, or one less or more of them; as many parts of a table."""
    more = integer(-1, 1)
    return np.resize(array, array.size + more) if more and isinstance(array, np.ndarray) else array


def drawn(integer: Integer, whole: Shape) -> Op:
    """An operation that often fits, and sometimes not."""
    kinds = KINDS if integer(0, 1) else tuple(whole.fitting) or KINDS
    kind, widths = kinds[integer(0, len(kinds) - 1)], whole.widths
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
            vectors = maybe(integer, (w[0], w[0] // groups)[integer(0, 1)] + odd), maybe(integer, w[0])
            return kind, (r[0], r[1], groups, integer(0, 1)), (1e-5, float(integer(0, 1))), vectors
        case library.PRODUCT:
            if integer(0, 1):
                r[0], w[0] = 0, widths[0]
            groups = integer(1, 3) if integer(0, 2) == 0 and min(w[:2]) >= 6 else 1
            c, t = integer(0, w[0] // groups - 1), integer(0, w[1] // groups - 1)
            k, n = integer(1, w[0] // groups - c), integer(1, w[1] // groups - t)
            if groups == 1 and integer(0, 2):  # all columns, which other products read too, or whole blocks of 256
                c, k = 0, w[0] // 256 * 256 or w[0]
            is_shared = integer(0, 2) == 0
            number, packed = matrix(integer, n, k, 1 if is_shared else groups)
            columns = (c + odd, k, t, n, groups, integer(0, w[0] // groups), w[1] // groups, int(is_shared))
            return kind, (r[0], r[1], number, integer(0, 6), *columns), (), (packed, maybe(integer, n * groups))
        case library.ROTARY:
            return rotary(integer, whole, r[0], odd)
        case library.ATTENTION:
            heads, kv = whole.heads or 1, whole.key_heads or 1
            latent = int(r[1] == r[2])  # values are the beginning of keys
            value = w[3] // heads if latent else w[2] // kv
            window, coded = integer(-1, 1) * integer(1, 90), integer(0, 1) * (not latent or odd)
            seen = whole.chosen + odd if integer(0, 4) else 0
            entry = rate(integer) * integer(0, 1) if latent else integer(1, 40) * (not whole.block)
            window = entry if seen and integer(0, 9) else window
            added = whole.biases + odd if integer(0, 4) else 0
            shape = (*r[:4], heads, kv, max(1, w[1] // kv), max(1, value), window, latent, coded, seen, added)
            slopes = None if integer(0, 2) else reals(integer(1, 99), heads + odd)
            return kind, shape, (0.1, integer(0, 1) * 2.0), (maybe(integer, heads + odd), slopes)
        case library.ROUTE:
            groups = next(g for g in (integer(1, 3), 1) if w[0] % g == 0)
            top = min(max(1, w[1] // 2), MOST_CHOSEN)
            vectors = maybe(integer, w[0] + odd), maybe(integer, w[0])
            score = integer(0, 4 + odd)
            normalises = integer(0, 1) * (score != 2 or odd)
            table = np.resize(np.arange(w[0] + odd, dtype=np.int32), (integer(1, 300), top)) if integer(0, 1) else None
            named = 0 if odd and integer(0, 1) else top
            ids, single = (r[2], int(table is not None)), integer(0, 1 + odd)
            shape = (r[0], r[1], w[0], named, score, normalises, groups, integer(1, groups), *ids, single)
            return kind, shape, ((1.0, 2.5)[integer(0, 1)], (1e-20, 1e-6, 0.1)[integer(0, 2)]), (*vectors, table)
        case library.EXPERTS:
            top = min(max(1, w[1] // 2), MOST_CHOSEN)
            inner = 256 if top < 5 and integer(0, 3) == 0 else integer(1, 40)
            experts = integer(top, top + (9 if inner < 256 else 1))
            first, before = matrix(integer, inner, w[0], experts)
            second, after = matrix(integer, w[2], inner, experts)
            scales = integer(0, 1) * (w[0] == w[2] or odd)
            more = integer(0, 3) * ((w[0] == w[2] and not scales) or odd)
            shape = (r[0], r[1], r[2], experts + odd, top, inner, first, integer(0, 7), second, scales, more)
            gates = before if integer(0, 2) else None
            biases = [maybe(integer, experts * n) for n in (inner, inner, w[2] + odd)]
            biases[0] = biases[0] if gates is not None or odd else None
            return kind, shape, (*gated(integer), 1e-5), (gates, before, after, *biases, maybe(integer, w[2] + odd))
        case library.CONVOLVE:
            if w[0] == 2 * w[1]:  # a pool
                taps = 1 << integer(0, 5 + odd)
                gates = reals(integer(1, 99), taps, w[1] + odd * integer(0, 1))
                return kind, (r[0], r[1], taps, 0, 1 + odd * integer(0, 1)), (), (gates, None)
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
            has_entries = whole.streams or (whole.key_heads == 1 and integer(0, 1))
            shape = (*r[:4], heads + odd, max(1, w[0] // heads), has_entries and rate(integer))
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
            heads = integer(0, 1) and next(part for part in (4, 3, 1) if not w[0] % part) + odd
            shape = (r[0], integer(1 - odd, 9), integer(0, 1 + odd), integer(0, 2 + odd) * (odd or not heads), heads)
            numbers = tuple(reals(integer(1, 99), heads) for _ in range(2 * bool(heads)))
            return kind, shape, (float(integer(-odd, 3 + 2 * odd)),), numbers
        case library.POSITION:
            name, offset = ("bf16", "f16", "f32")[integer(0, 2)], integer(0, 3)
            table = stored(reals(integer(1, 99), POSITIONS + offset - odd, w[0]), name)
            return kind, (r[0], library.TYPES[name] + odd * integer(0, 9), offset), (), (table,)
        case library.SOFTEN:
            return kind, (r[0],), ((1.0, 0.5)[integer(0, 1)], float(integer(-3, 3))), ()
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
        case library.ATTEND_STREAMS:
            return kind, (r[0], r[1], integer(1, max(1, w[0] // w[1])) + odd), (1e-5,), (reals(integer(1, 99), w[1]),)
        case library.ADMIT:
            return kind, (*r[:4], (whole.streams or integer(1, 4)) + odd), (0.1,), ()
        case library.NGRAMS:
            tokens, each, rows, parts = integer(2, 3), integer(1, 2), integer(8, 90), integer(1, 3)
            kept = library.TYPES[("bf16", "f32", "w8", "w4")[integer(0, 3)]]
            width = max(1, w[1] // ((tokens - 1) * each))
            known = [name for name in IN_TABLES if width % BLOCKS.get(name, (1, 0))[0] == 0]
            names = [known[integer(0, len(known) - 1)] for _ in range(parts)]
            drawn = TableParts(tuple(_stored_part(integer(1, 99), rows, width, name) for name in names))
            types = np.array([IN_TABLES[name] for name in names], np.int64)
            sizes = np.full((tokens - 1) * each, rows * parts // ((tokens - 1) * each) + odd, np.int64)
            firsts = np.arange(len(sizes)) * sizes
            shape = (r[0], r[1], tokens, each, kept, rows, integer(0, 9), 300, *[r[2]] * (tokens - 1))
            return kind, shape, (), (np.arange(tokens) * 12345 + 7, sizes, firsts, drawn, types)
        case library.MULTIPLY:
            return kind, tuple(r[:3]), (), (maybe(integer, w[0] + odd),)
        case _:
            return kind, (*r[:3], integer(0, 6 + odd)), gated(integer), ()
