"""Which kernels compute an operation, and over which blocks."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import takewhile
from typing import Final, NamedTuple

from manyhands.engine import library
from manyhands.engine.cuda import columns, states
from manyhands.engine.cuda.launch import MOST_PARTS, NOWHERE, THREADS, Launch, LaunchPart, Place, args, over_columns
from manyhands.engine.cuda.room import DEPTH, SMALL, Held, Room, angles_of, heads_of, whole
from manyhands.engine.library import SIDE
from manyhands.errors import ModelError
from manyhands.program.ops import SCORES

FEW_ROWS: Final = (1, 2, 3, 4, 6, 8)  # that a block of such a product takes
TILE: Final = 64  # rows and columns of a block of tiles
SOME_TILE: Final = 32  # where there are too few such blocks: threads of one share the steps
TILE_THREADS: Final = 128  # of a block of either
GROUPED_ROWS: Final = 8  # that a block puts into groups
TYPE_NAMES: Final = {number: name.upper() for name, number in library.TYPES.items()}
MIXES: Final = (library.MIX, library.RESCALE, library.SPARSIFY, library.NGRAMS, library.ADMIT, library.ATTEND_STREAMS)
SMALL_ROWS: Final = (1, 2, 4, 8)  # that a block of such a product with small weights takes
WARP: Final = 32
MOST_BLOCKS: Final = 65_535  # of a grid in its second direction, and in its third
QUERIES: Final = 32  # of one key head in a tile of attention
VALUE_COLUMNS: Final = (64, 128)  # of values that a block of it takes
CHECKED_ROWS: Final = 8  # that a block of the kernel for few rows looks at where others have tiles


class Tiles(NamedTuple):
    """Which products, and which attention, are cut into tiles. What stands here is fast on an H100.

    few, few_numbers: rows, and numbers of the result, up to which a product is not. side_by_side: blocks of TILE x TILE that
    a GPU has at once; smaller ones are used where these would leave much of it idle. few_queries: of attention, rows times
    heads, up to which each reads keys for itself. narrow: columns of values up to which the kernel for the fewest is used.
    narrow_keys: numbers of a key of linear attention up to which delta_128 is used, and not delta_256.
    """

    few: int = 8
    few_numbers: int = 200_000
    side_by_side: int = 3 * 132
    few_queries: int = 2_048
    narrow: int = 64
    narrow_keys: int = 128


FAST: Final = Tiles()


def check(kind: int, numbers: Sequence[int]) -> None:
    """Raises ModelError for an operation that the kernels do not compute."""
    states.check(kind, numbers)
    if kind in (library.COLLAPSE, library.SPREAD, library.COMPRESS, library.ATTEND_ENTRIES):
        raise ModelError("a GPU computes neither residual streams nor compressed positions")
    if kind == library.ROUTE and (any(numbers[9:10]) or numbers[4] == SCORES.index("root")):
        raise ModelError("a GPU chooses no experts by ids or by square roots")
    if library.SITU in {library.GATE: numbers[3:4], library.EXPERTS: numbers[7:8]}.get(kind, ()):
        raise ModelError("a GPU computes no gates of the kind situ")
    if kind == library.ROTARY and any(numbers[6:]):
        raise ModelError("a GPU turns no rows by the angles of positions before theirs")
    if kind in (library.CONVOLVE, library.SCALE) and any(numbers[4:5]):
        raise ModelError("a GPU neither pools entries of positions nor scales heads by numbers of their own")
    if kind == library.ATTENTION and any(numbers[12:13]):
        raise ModelError("a GPU adds no numbers by distance to scores")
    if kind == library.INDEX:
        raise ModelError("a GPU does not compute an indexer that chooses positions")
    if kind in MIXES:
        raise ModelError("a GPU does not compute streams beside each other in a row")
    if kind != library.PRODUCT:
        return
    if numbers[0] == numbers[1]:  # blocks read rows while others write
        raise ModelError("a GPU computes no product that overwrites the rows it reads")
    if any(numbers[11:12]):
        raise ModelError("a GPU computes no products of groups that share weights")
    if numbers[2] >= SMALL and any(numbers[4:]):
        raise ModelError("a GPU computes no products of some columns with small weights")


def most_rows(ops: Sequence[Held]) -> int:
    """Rows of a step for which the grids of these operations have blocks: experts take one for each row and route, attention
    one for QUERIES queries of a key head."""
    most = MOST_BLOCKS
    for op in ops:
        if op.kind == library.EXPERTS:
            most = min(most, MOST_BLOCKS // op.numbers[4])
        elif op.kind == library.ATTENTION:
            most = min(most, MOST_BLOCKS * QUERIES // (op.numbers[4] // op.numbers[5]))
    return most


def launches(room: Room, ops: Sequence[Held], table: int, rows: int, use: Tiles = FAST) -> Iterator[Launch]:
    """All kernels of a step of `rows` rows. table: the address of their Rows (common.cu)."""
    for shared in room.shared:
        given = args(
            out=room.angles(shared),
            tensors=(shared.frequencies,),
            n=(shared.turns,),
            reals=(shared.factor,),
            rows=table,
        )
        yield over_columns("angles", shared.turns, rows, given)
    at = 0
    while at < len(ops):
        op, count = ops[at], _together(ops, at)
        some = ops[at : at + count]
        if op.kind == library.PRODUCT and op.numbers[2] >= SMALL:
            if at == 0 or not _grouped_alike(ops[at - 1], op):
                yield _group(room, room.register(op.numbers[0]), room.widths[op.numbers[0]], rows)
            yield _small_products(room, some, rows, use)
        elif op.kind == library.PRODUCT:
            yield from _products(room, some, rows, use)
        elif op.kind == library.ROTARY:
            yield from _rotaries(room, some, rows)
        elif op.kind == library.ATTENTION:
            yield from _attention(room, op, room.layers[at], table, rows, use)
        elif op.kind == library.CONVOLVE:
            yield states.convolve(room, op, room.states[at], table, rows)
        elif op.kind == library.DELTA:
            yield states.attend(room, op, room.states[at], table, rows, use.narrow_keys)
        elif op.kind == library.ADD and count > 1:
            yield from _norm(room, some[1], rows, op)
        elif op.kind in columns.BY_POSITION:
            yield columns.BY_POSITION[op.kind](room, op, table, rows)
        else:
            yield from _MAKERS[op.kind](room, op, rows)
        at += count


def _together(ops: Sequence[Held], at: int) -> int:
    """How many operations from `at` on are one launch: products that read the same columns, registers that turn alike, each
    another one, an addition to the residual stream and the norm of it."""
    first = ops[at]
    if first.kind == library.ADD:
        if any(first.numbers[2:]):
            return 1
        norm = ops[at + 1] if at + 1 < len(ops) else first
        return 2 if norm.kind == library.NORM and (norm.numbers[0], norm.numbers[2]) == (0, 1) else 1
    is_product = first.kind == library.PRODUCT
    if any(first.numbers[4:]) if is_product else first.kind != library.ROTARY:
        return 1
    like = takewhile(lambda op: _is_like(first, op), ops[at : at + MOST_PARTS])
    written = [op.numbers[1 if is_product else 0] for op in like]  # the register of each
    return next((i for i, number in enumerate(written) if number in written[:i]), len(written))


def _is_like(first: Held, other: Held) -> bool:
    if first.kind != other.kind:
        return False
    if first.kind == library.ROTARY:
        return first.numbers[2:] == other.numbers[2:] and angles_of(first) == angles_of(other)
    return not any(other.numbers[4:]) and (first.numbers[0], first.numbers[2]) == (other.numbers[0], other.numbers[2])


def _products(room: Room, ops: Sequence[Held], rows: int, use: Tiles) -> Iterator[Launch]:
    source, _, kind, _, column, k, _, _, groups, step, target_step = _product_numbers(room, ops[0])
    widths = [_product_numbers(room, op)[7] for op in ops]
    is_few = _is_few(rows, groups * sum(widths), use) or bool(column % 4 or step % 4)  # tiles read four numbers at once
    side = TILE if _fills(rows, widths, groups, use.side_by_side) else SOME_TILE
    at_once = next(some for some in FEW_ROWS if some >= min(rows, FEW_ROWS[-1])) if is_few else side
    columns = side if not is_few else 2 * SIDE if at_once > 3 else SIDE
    tiles, parts, blocks = -(-rows // at_once), list[LaunchPart](), 0
    for op, n in zip(ops, widths, strict=True):
        _, target, _, activation, _, _, target_column, *_ = _product_numbers(room, op)
        parts.append(_part(op, 0, room.register(target).column(target_column), n, activation, blocks))
        blocks += -(-n // columns)
    matrix = ops[0].tensors[0]
    assert matrix is not None
    numbers = (k, int(room.rounds), matrix.num_bytes // groups, step, target_step, tiles)
    given = args(room.register(source).column(column), n=numbers, count=rows, parts=parts)
    if is_few:
        yield Launch(f"few_{TYPE_NAMES[kind]}_{at_once}", (blocks * tiles, 1, groups), given)
    else:
        name = "many" if side == TILE else "some"
        yield Launch(f"{name}_{TYPE_NAMES[kind]}", (blocks, tiles, groups), given, TILE_THREADS)


def _is_few(rows: int, columns: int, use: Tiles) -> bool:
    """Whether a product keeps the memory busy rather than the multipliers."""
    return rows <= use.few or rows * columns <= use.few_numbers


def _fills(rows: int, widths: Sequence[int], groups: int, at_once: int) -> bool:
    """Whether blocks of TILE x TILE keep a GPU busy: taken so many at once, at most a quarter of places stays empty."""
    blocks = groups * -(-rows // TILE) * sum(-(-n // TILE) for n in widths)
    return 4 * blocks >= 3 * at_once * -(-blocks // at_once)


def _grouped_alike(before: Held, op: Held) -> bool:
    """Whether what comes before has put the same rows into groups."""
    is_small = before.kind == library.PRODUCT and before.numbers[2] >= SMALL
    return is_small and before.numbers[0] == op.numbers[0]


def _group(room: Room, source: Place, width: int, rows: int) -> Launch:
    """Rows into groups of codes, for products with small weights."""
    given, steps = args(source, out=Place(room.groups, rows), n=(width,), count=rows), -(-width // DEPTH)
    return Launch("group_rows", (-(-steps * GROUPED_ROWS // THREADS), -(-rows // GROUPED_ROWS), 1), given)


def _small_products(room: Room, ops: Sequence[Held], rows: int, use: Tiles) -> Launch:
    source, _, kind = ops[0].numbers[:3]
    widths, parts, blocks = [room.widths[op.numbers[1]] for op in ops], list[LaunchPart](), 0
    is_few = _is_few(rows, sum(widths), use)
    at_once = next(some for some in SMALL_ROWS if some >= min(rows, SMALL_ROWS[-1])) if is_few else TILE
    for op, n in zip(ops, widths, strict=True):
        parts.append(_part(op, 0, room.register(op.numbers[1]), n, op.numbers[3], blocks))
        blocks += -(-n // (SIDE if is_few else TILE))
    tiles, grouped = -(-rows // at_once), Place(room.groups, rows)
    given = args(grouped, n=(room.widths[source], 0, 0, 0, 0, tiles), count=rows, parts=parts)
    if is_few:
        return Launch(f"few_{TYPE_NAMES[kind]}_{at_once}", (blocks * tiles, 1, 1), given)
    return Launch(f"many_{TYPE_NAMES[kind]}", (blocks, tiles, 1), given, TILE_THREADS)


def _product_numbers(room: Room, op: Held) -> tuple[int, ...]:
    """All eleven, zeros as what they stand for."""
    numbers = list(op.numbers[:11])
    numbers[5] = numbers[5] or room.widths[numbers[0]]
    numbers[7] = numbers[7] or room.widths[numbers[1]]
    numbers[8] = numbers[8] or 1
    return tuple(numbers)


def _part(op: Held, matrix: int, out: Place, n: int, activation: int, first: int, bias: int = 1) -> LaunchPart:
    return LaunchPart(op.address(matrix), op.address(bias), out.address, out.stride, n, activation, first)


def _attention(room: Room, op: Held, layer: int, table: int, rows: int, use: Tiles) -> Iterator[Launch]:
    query, key, value, target, count, key_heads, width, value_width, window, is_latent, *_ = op.numbers
    heads = heads_of(op, 2 if room.rounds else 4)
    is_many = rows * count > use.few_queries and not (is_latent or op.address(1) or width % 4)  # read by four
    shape = (count, key_heads, width, value_width, window, is_latent, int(room.rounds))
    numbers = (*shape, layer, heads.head_bytes, heads.key_bytes, int(is_many))
    cached = args(room.register(key), room.register(value), n=numbers, rows=table)
    yield Launch("remember", (key_heads, rows, 1), cached)
    asked = args(
        room.register(query),
        out=room.register(target),
        tensors=(op.address(0), op.address(1)),
        n=numbers,
        reals=op.reals,
        rows=table,
        count=rows,
    )
    kind = "BF16" if room.rounds else "F32"
    left = -(-rows // CHECKED_ROWS) if is_many else rows
    yield Launch(f"attend_{'latents_' if is_latent else ''}{kind}", (count, left, 1), asked)
    if is_many:
        columns = VALUE_COLUMNS[value_width > use.narrow]
        grid = (key_heads, -(-rows * (count // key_heads) // QUERIES), -(-value_width // columns))
        yield Launch(f"attend_many_{kind}_{columns}", grid, asked, TILE_THREADS)


def _norm(room: Room, op: Held, rows: int, added: Held | None = None) -> Iterator[Launch]:
    """added: the addition to its source that comes before it."""
    source, target, groups, is_layer = op.numbers[:4]
    width = room.widths[source] // groups
    each = [int(tensor is not None and tensor.num_bytes > width * 4) for tensor in op.tensors[:2]]
    term, rounds, scale = (
        (room.register(added.numbers[0]), added.numbers[1], added.reals[0]) if added else (NOWHERE, 0, 1.0)
    )
    given = args(
        room.register(source),
        term,
        room.register(target),
        tensors=(op.address(0), op.address(1)),
        n=(width, is_layer, *each, int(rounds and room.rounds)),
        reals=(*op.reals[:2], scale),
    )
    yield Launch("norm", (groups, rows, 1), given)


def _rotaries(room: Room, ops: Sequence[Held], rows: int) -> Iterator[Launch]:
    """Registers that turn alike."""
    _, _, width, offset, turns, pairs = ops[0].numbers[:6]
    parts, blocks = list[LaunchPart](), 0
    for op in ops:
        target, heads = op.numbers[:2]
        out = room.register(target)
        parts.append(LaunchPart(None, None, out.address, out.stride, heads, 0, blocks))
        blocks += -(-heads * turns // THREADS)
    given = args(y=room.angles(angles_of(ops[0])), n=(width, offset, turns, pairs), parts=parts)
    yield Launch("rotary", (blocks, rows, 1), given)


def _route(room: Room, op: Held, rows: int) -> Iterator[Launch]:
    source, target, *numbers = (*op.numbers[:8], *op.numbers[10:11])
    vectors = op.address(0), op.address(1)
    given = args(room.register(source), out=room.register(target), tensors=vectors, n=numbers, reals=op.reals)
    yield Launch("route", (rows, 1, 1), given, WARP)


def _experts(room: Room, op: Held, rows: int) -> Iterator[Launch]:
    source, routes, target, experts, top_k, inner, kind, activation, down_kind, scales, identities = op.numbers[:11]
    width, hidden, pairs, panels = room.widths[source], room.widths[target], rows * top_k, -(-inner // SIDE)
    gates, ups = room.routed(0, inner), room.routed(top_k * whole(inner), inner)
    results = room.routed(2 * top_k * whole(inner), hidden)
    chosen, rounds = room.register(routes), int(room.rounds)
    gate, up, down = op.tensors[:3]
    assert up is not None and down is not None
    given, given_rows = room.register(source), rows
    if scales:  # results come later, and are as wide
        yield over_columns("expert_scale", width, pairs, args(given, chosen, results, n=(width, top_k)))
        given, given_rows = results, pairs
    if kind >= SMALL:
        yield _group(room, given, width, given_rows)
        given = Place(room.groups, given_rows)
    parts = [_part(op, 1, ups, inner, activation if gate is None else 0, 0, 4)]
    if gate is not None:
        parts.append(_part(op, 0, gates, inner, 0, panels, 3))
    numbers = (width, rounds, up.num_bytes // experts, experts, top_k, scales)
    grid = (len(parts) * panels, pairs, 1)
    yield Launch(f"expert_{TYPE_NAMES[kind]}", grid, args(given, chosen, n=numbers, parts=parts))
    if gate is not None:
        yield over_columns("gate", inner, pairs, args(gates, ups, ups, n=(inner, activation), reals=op.reals[:3]))
    given = ups
    if down_kind >= SMALL:
        yield _group(room, given, inner, pairs)
        given = Place(room.groups, pairs)
    parts = [_part(op, 2, results, hidden, 0, 0, 5)]
    numbers = (inner, rounds, down.num_bytes // experts, experts, top_k, 1)
    yield Launch(
        f"expert_{TYPE_NAMES[down_kind]}", (-(-hidden // SIDE), pairs, 1), args(given, chosen, n=numbers, parts=parts)
    )
    if (factors := op.tensors[6]) is not None:
        yield columns.stored(results, factors, results, hidden, pairs)
        yield Launch("norm", (1, pairs, 1), args(results, out=results, n=(hidden,), reals=(op.reals[3], 0.0, 1.0)))
    own = room.register(source)
    summed = args(
        results,
        chosen,
        room.register(target),
        n=(hidden, experts, top_k, scales, identities),
        parts=[LaunchPart(None, None, own.address, own.stride)],
    )
    yield over_columns("expert_sum", hidden, rows, summed)


_MAKERS: Final[Mapping[int, Callable[[Room, Held, int], Iterator[Launch]]]] = {
    library.NORM: _norm,
    library.GATE: columns.gate,
    library.ADD: columns.add,
    library.MULTIPLY: columns.multiply,
    library.SOFTEN: columns.soften,
    library.XIELU: columns.xielu,
    library.COPY: columns.copy,
    library.ROUTE: _route,
    library.EXPERTS: _experts,
    library.DECAY: states.decay,
}
