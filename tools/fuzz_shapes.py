"""Random widths of the registers of the native engine's plans, and what fits them."""

from collections.abc import Callable
from dataclasses import dataclass, field

from manyhands.engine import library

Integer = Callable[[int, int], int]


def size(integer: Integer, most: int) -> int:
    """A width of at most `most`; every other one at the edge of a block of 16, 32, 64 or 256."""
    edge = (16, 32, 64, 256)[integer(0, 3)] * integer(1, 3) + integer(-1, 1)
    return edge if edge <= most and integer(0, 1) else integer(1, most)


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
    biases: int = 0  # the register of what is added to scores, if there is one


def shape_of(integer: Integer) -> Shape:
    """Random widths, or those of attention, of latents, of latents with an index, of experts, of linear attention, of streams
    and entries, of attention over blocks that an index chooses."""
    hidden = 256 * integer(1, 3) if integer(0, 2) == 0 else size(integer, 130)
    width = size(integer, 260 if integer(0, 9) == 0 else 70)
    heads = integer(1, 6 if width <= 70 else 2)
    common: dict[int, tuple[int, ...]] = {
        library.ADD: (5, 5, 0, 5),
        library.NORM: (0, 5, 0, 0),
        library.MULTIPLY: (5, 6, 5, 0),
        library.RESCALE: (0, 5, 0, 0),
        library.MIX: (0, 6, 5, 0),
        library.ATTEND_STREAMS: (0, 6),
    }
    match integer(0, 8):
        case 1:
            key_heads, value = integer(1, 3), integer(1, 70)
            many = heads * key_heads
            widths = [hidden, many * width, key_heads * width, key_heads * value, many * value, hidden, many]
            fitting = {**common, library.ATTENTION: (1, 2, 3, 4), library.MULTIPLY: (4, 6, 4, 0)}
            if integer(0, 1):
                return Shape([*widths, many * integer(1, 150)], many, key_heads, fitting, biases=7)
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
                2 * wide,
            ]
            fitting = {
                **common,
                library.ATTENTION: (1, 2, 2, 4),
                library.INDEX: (7, 8, 9, 3),
                library.CONVOLVE: (10, 8),
            }
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
    return Shape([hidden, *(size(integer, 130) for _ in range(integer(1, 5)))])


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
