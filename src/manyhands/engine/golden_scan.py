"""Golden digests of selective scans (golden.json)."""

from collections.abc import Callable
from typing import Final

import numpy as np

from manyhands.engine import library
from manyhands.engine.golden_cases import BackEnd, CompanyMatters, Op, reals, stored
from manyhands.engine.states import DELTA_SCAN

OUT: Final = 5  # the register that leaves


def scan_ops(width: int, columns: int, has_skips: bool) -> tuple[list[int], list[Op]]:
    """Widths of registers, the first of which takes a query, a key, values and time steps before softplus, and operations."""
    parts = width, width, columns, columns
    ops: list[Op] = []
    for target, count in enumerate(parts):
        ops.append((library.COPY, (0, target + 1, sum(parts[:target]), 0, count, 1, 0, 0), (), ()))
    ops.append((library.DECAY, (4, 4), (), (None, reals(140, columns, spread=8))))
    rates = -np.abs(reals(141, width, columns, around=2, spread=9))
    skips = reals(142, columns) if has_skips else None
    ops.append((library.DELTA, (1, 2, 3, 4, 4, OUT, 1, 1, width, columns, DELTA_SCAN), (), (skips, rates)))
    return [sum(parts), *parts, columns], ops


def scans(row_type: str) -> Callable[[BackEnd], bytes]:
    """Over some blocks of states, of states that decay slowly and at once; a session that went back goes on alike."""

    def case(machine: BackEnd) -> bytes:
        found = []
        for width, columns, has_skips in ((16, 40, True), (10, 33, False), (3, 70, True), (1, 5, True)):
            widths, ops = scan_ops(width, columns, has_skips)
            x = reals(143, 75, widths[0], around=1)
            x[3, -1], x[5, width] = 200, np.inf
            found.append(machine.run(x, row_type, widths[1:], ops, OUT))
            begin = machine.sessions(row_type, widths, ops, OUT)
            rows = stored(x, row_type).view(np.uint8).reshape(len(x), -1)
            step = begin()
            step(0, rows)
            if not np.array_equal(step(45, rows[45:]), found[-1][45:]):
                raise CompanyMatters("a row's bits depend on the rows that were taken back")
        return b"".join(array.tobytes() for array in found)

    return case


CASES: Final[dict[str, Callable[[BackEnd], bytes]]] = {"scans bf16": scans("bf16"), "scans f32": scans("f32")}
