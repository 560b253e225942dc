"""Golden digests of operations with states (golden.json): convolutions, decays, linear attention."""

from collections.abc import Callable
from typing import Final

import numpy as np

from manyhands.engine import library
from manyhands.engine.golden_cases import BackEnd, CompanyMatters, Op, reals, stored
from manyhands.engine.library import ACTIVATIONS


def states(row_type: str) -> Callable[[BackEnd], bytes]:
    """A convolution, decays and linear attention over some blocks of states; a session that went back goes on alike."""

    def case(machine: BackEnd) -> bytes:
        found = []
        for heads, key_heads, width, value_width, taps, activation, is_sum in (
            (4, 2, 16, 40, 4, "silu", 0),
            (3, 3, 9, 32, 3, "none", 0),
            (6, 2, 12, 20, 4, "silu", 1),
        ):
            parts = key_heads * width, key_heads * width, heads * value_width, heads, heads
            entering = sum(parts)
            bias = reals(71, entering, around=-2) if taps == 4 else None
            ops: list[Op] = [
                (
                    library.CONVOLVE,
                    (0, 1, taps, ACTIVATIONS.index(activation)),
                    (),
                    (reals(70, taps, entering, around=-1), bias),
                )
            ]
            for target, count in enumerate(parts):
                ops.append((library.COPY, (1, target + 2, sum(parts[:target]), 0, count, 1, 0, 0), (), ()))
            rates = np.abs(reals(72, heads)).astype(np.float64)
            ops.append((library.DECAY, (5, 5), (), (rates, reals(73, heads, spread=8))))
            if is_sum:
                ops.append((library.DECAY, (6, 6), (), (None, reals(75, heads))))
            skips = reals(76, heads) if is_sum else None
            ops.append((library.DELTA, (2, 3, 4, 5, 6, 7, heads, key_heads, width, value_width, is_sum), (), (skips,)))
            widths, x = [entering, *parts, heads * value_width], reals(74, 75, entering)
            found.append(machine.run(x, row_type, widths, ops, 7))
            begin = machine.sessions(row_type, [entering, *widths], ops, 7)
            rows = stored(x, row_type).view(np.uint8).reshape(len(x), -1)
            step = begin()
            step(0, rows)
            if not np.array_equal(step(45, rows[45:]), found[-1][45:]):
                raise CompanyMatters("a row's bits depend on the rows that were taken back")
        return b"".join(array.tobytes() for array in found)

    return case


CASES: Final[dict[str, Callable[[BackEnd], bytes]]] = {"states bf16": states("bf16"), "states f32": states("f32")}
