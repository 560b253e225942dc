"""Golden digests of attention whose scores take a number by distance, of products that groups share (golden.json)."""

from collections.abc import Callable, Sequence
from typing import Final

import numpy as np

from manyhands.engine import library
from manyhands.engine.golden_cases import BackEnd, Op, product, reals, stored

# Heads, key heads, width, value width, window, soft cap, sinks, columns of a part, extent: one position, less than a block,
# more than two blocks, and all that there are.
Shape = tuple[int, int, int, int, int, float, bool, int, int]
SHAPES: Final[tuple[Shape, ...]] = (
    (4, 2, 16, 16, 0, 0.0, False, 8, 40),
    (3, 1, 40, 24, 70, 0.0, True, 16, 70),
    (2, 2, 33, 17, 0, 2.5, False, 5, 133),
    (6, 3, 16, 16, -50, 0.0, False, 40, 1),
    (9, 1, 16, 16, 0, 0.0, True, 8, 200),
)


def shared(seed: int, groups: int, width: int, n: int, numbers: tuple[int, int], type_name: str = "bf16") -> Op:
    """A product of each part of `width` columns with one matrix."""
    packed = library.pack(stored(reals(seed, n, width), type_name), type_name)
    columns = (0, width, 0, n, groups, width, n, 1)
    return library.PRODUCT, (*numbers, library.TYPES[type_name], 0, *columns), (), (packed, None)


def biased(row_type: str, shapes: Sequence[Shape] = SHAPES, *, has_codes: bool = False) -> Callable[[BackEnd], bytes]:
    """Grouped heads, windows, chunks, sinks and soft caps over several blocks of keys, in a cache of codes or not."""
    return lambda machine: b"".join(_attended(machine, row_type, shape, has_codes) for shape in shapes)


def _attended(machine: BackEnd, row_type: str, shape: Shape, has_codes: bool) -> bytes:
    heads, key_heads, width, value_width, window, cap, sinks, part, extent = shape
    widths = [heads * width, key_heads * width, key_heads * value_width, heads * value_width]
    ops = [product(20 + i, 0, i + 1, n, 24) for i, n in enumerate(widths[:3])]
    kind = "f32" if part > 16 else "bf16"
    ops += [product(28, 0, 5, heads * part, 24), shared(29, heads, part, extent, (5, 6), kind)]
    numbers = (1, 2, 3, 4, heads, key_heads, width, value_width, window, 0, int(has_codes), 0, 6)
    given = (reals(30, heads) if sinks else None,)
    ops.append((library.ATTENTION, numbers, (width**-0.5 / 16, cap), given))
    return machine.run(reals(12, 150, 24), row_type, [*widths, heads * part, heads * extent], ops, 4).tobytes()


# Heads, key heads, width, value width, window, soft cap, sinks.
SLOPED: Final = ((4, 4, 16, 16, 0, 0.0, False), (3, 1, 40, 24, 70, 2.5, True), (6, 3, 16, 16, -50, 0.0, False))


def sloped(row_type: str, *, has_codes: bool = False) -> Callable[[BackEnd], bytes]:
    """Heads that share keys and others, windows, chunks, sinks and soft caps, with slopes by distance."""

    def case(machine: BackEnd) -> bytes:
        found = []
        for heads, key_heads, width, value_width, window, cap, sinks in SLOPED:
            widths = [heads * width, key_heads * width, key_heads * value_width, heads * value_width]
            ops = [product(20 + i, 0, i + 1, n, 24) for i, n in enumerate(widths[:3])]
            numbers = (1, 2, 3, 4, heads, key_heads, width, value_width, window, 0, int(has_codes))
            vectors = reals(30, heads) if sinks else None, np.abs(reals(31, heads))
            ops.append((library.ATTENTION, numbers, (width**-0.5 / 16, cap), vectors))
            found.append(machine.run(reals(12, 150, 24), row_type, widths, ops, 4).tobytes())
        return b"".join(found)

    return case


CASES: Final[dict[str, Callable[[BackEnd], bytes]]] = {
    "attention by distance bf16": biased("bf16"),
    "attention by distance f32": biased("f32"),
    "attention with slopes bf16": sloped("bf16"),
    "attention with slopes f32": sloped("f32"),
}
