"""Golden digests of operations with states (golden.json): convolutions, decays, linear attention."""

from collections.abc import Callable
from typing import Final, NamedTuple

import numpy as np

from manyhands.engine import library
from manyhands.engine.golden_cases import EDGES, BackEnd, CompanyMatters, Op, reals, stored
from manyhands.engine.library import ACTIVATIONS, Array
from manyhands.engine.states import DELTA_BY_CHANNEL, DELTA_RULE, DELTA_SUM


class StateShape(NamedTuple):
    """Sizes of a convolution and of linear attention over it."""

    heads: int
    key_heads: int
    width: int
    value_width: int
    taps: int
    activation: str
    form: int


SHAPES: Final = (
    StateShape(4, 2, 16, 40, 4, "silu", DELTA_RULE),
    StateShape(3, 3, 9, 32, 3, "none", DELTA_RULE),
    StateShape(6, 2, 12, 20, 4, "silu", DELTA_SUM),
)
BY_CHANNEL: Final = (
    StateShape(4, 2, 16, 40, 4, "silu", DELTA_BY_CHANNEL),
    StateShape(3, 3, 9, 32, 3, "none", DELTA_BY_CHANNEL),
    StateShape(2, 1, 131, 5, 2, "silu", DELTA_BY_CHANNEL),
)


def states(row_type: str, shapes: tuple[StateShape, ...]) -> Callable[[BackEnd], bytes]:
    """A convolution, decays and linear attention over some blocks of states; a session that went back goes on alike."""

    def case(machine: BackEnd) -> bytes:
        return b"".join(_found(machine, row_type, shape).tobytes() for shape in shapes)

    return case


def _found(machine: BackEnd, row_type: str, shape: StateShape) -> Array:
    ops, parts = _ops(shape)
    entering, out = sum(parts), shape.heads * shape.value_width
    widths, x = [entering, *parts, out], reals(74, 75, entering)
    found = machine.run(x, row_type, widths, ops, 7)
    begin = machine.sessions(row_type, [entering, *widths], ops, 7)
    rows = stored(x, row_type).view(np.uint8).reshape(len(x), -1)
    step = begin()
    step(0, rows)
    if not np.array_equal(step(45, rows[45:]), found[45:]):
        raise CompanyMatters("a row's bits depend on the rows that were taken back")
    return found


def _ops(shape: StateShape) -> tuple[list[Op], tuple[int, ...]]:
    """The operations, and the columns of queries, keys, values, decays and strengths."""
    heads, key_heads, width, value_width, taps, activation, form = shape
    decays = heads * (width if form == DELTA_BY_CHANNEL else 1)
    parts = key_heads * width, key_heads * width, heads * value_width, decays, heads
    entering = sum(parts)
    bias = reals(71, entering, around=-2) if taps == 4 else None
    kernels = reals(70, taps, entering, around=-1)
    ops: list[Op] = [(library.CONVOLVE, (0, 1, taps, ACTIVATIONS.index(activation)), (), (kernels, bias))]
    for target, count in enumerate(parts):
        ops.append((library.COPY, (1, target + 2, sum(parts[:target]), 0, count, 1, 0, 0), (), ()))
    rates, shifts = np.abs(reals(72, decays)), reals(73, decays, spread=8)
    if form == DELTA_BY_CHANNEL:
        ops.append((library.DECAY, (5, 5, 1), (), (rates, shifts)))
    else:
        ops.append((library.DECAY, (5, 5), (), (rates.astype(np.float64), shifts)))
    if form == DELTA_SUM:
        ops.append((library.DECAY, (6, 6), (), (None, reals(75, heads))))
    skips = reals(76, heads) if form == DELTA_SUM else None
    ops.append((library.DELTA, (2, 3, 4, 5, 6, 7, heads, key_heads, width, value_width, form), (), (skips,)))
    return ops, parts


def pools(machine: BackEnd) -> bytes:
    """Entries of few positions and of many, of few columns and of several parts; also of rows that are no numbers."""
    found = []
    for rate, width in ((1, 5), (4, 40), (16, 128), (32, 300)):
        ops: list[Op] = [(library.CONVOLVE, (0, 1, rate, 0, 1), (), (reals(80, rate, width), None))]
        x = reals(79, 75, 2 * width, spread=6)
        x[9], x[21, ::3], x[22, 1], x[40] = np.nan, np.inf, -np.inf, 1e30
        for row_type in ("bf16", "f32"):
            found.append(machine.run(x, row_type, [width], ops, 1))
            begin = machine.sessions(row_type, [2 * width, width], ops, 1)
            rows, step = stored(x, row_type).view(np.uint8).reshape(len(x), -1), begin()
            step(0, rows)
            if not np.array_equal(step(45, rows[45:]), found[-1][45:]):
                raise CompanyMatters("a row's bits depend on the rows that were taken back")
    return b"".join(one.tobytes() for one in found)


def channel_decays(machine: BackEnd) -> bytes:
    """The function of some rates, at edges, near zero and far from it."""
    return _decays(machine, 1, (0.0,))


def bounded_decays(machine: BackEnd) -> bytes:
    """The same with bounds, of which one is below what is no denormal."""
    return _decays(machine, 2, (-5.0, -0.25, -100.0))


def _decays(machine: BackEnd, form: int, bounds: tuple[float, ...]) -> bytes:
    edges = np.array([bits | sign for bits in EDGES for sign in (0, 1 << 31)], np.uint32).view(np.float32)
    x = np.concatenate([edges, reals(77, 33 * 40 - len(edges), around=7, spread=40)]).reshape(33, 40)
    found = []
    for rates in (np.full(40, 1.0, np.float32), np.abs(reals(78, 40, around=4, spread=12))):
        for bound in bounds:
            ops: list[Op] = [(library.DECAY, (0, 1, form), (bound,), (rates, np.zeros(40, np.float32)))]
            found += [machine.run(x, kind, [40], ops, 1).tobytes() for kind in ("bf16", "f32")]
    return b"".join(found)


CASES: Final[dict[str, Callable[[BackEnd], bytes]]] = {
    "states bf16": states("bf16", SHAPES),
    "states f32": states("f32", SHAPES),
    "states by channel bf16": states("bf16", BY_CHANNEL),
    "states by channel f32": states("f32", BY_CHANNEL),
    "pools of entries": pools,
    "decays of channels": channel_decays,
    "bounded decays": bounded_decays,
}
