"""Random plans, shapes and steps against one back end after the other: python -m tests.engine.fuzz LIBRARY SEED SECONDS.

What fits must compute the same bits on all of them; what does not fit must be refused. Run it with a library built with
-fsanitize=address,undefined (test_sanitized.py does) to see that nothing is read or written beyond what was given.
"""

import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from manyhands.engine import library
from manyhands.engine.cache import SessionCache
from manyhands.engine.golden import Op, reals, stored
from manyhands.engine.library import Array, Plan, Team
from manyhands.errors import ManyhandsError

Integer = Callable[[int, int], int]


def matrix(integer: Integer, n: int, k: int) -> tuple[int, Array]:
    name = ("bf16", "f16", "f32")[integer(0, 2)]
    return library.TYPES[name], library.pack(stored(reals(integer(1, 99), n, k), name), name)


def maybe(integer: Integer, n: int) -> Array | None:
    return reals(integer(1, 99), n) if integer(0, 1) else None


def operation(integer: Integer, widths: list[int], positions: int) -> Op:
    """An operation that often fits, and sometimes not."""
    kind = integer(0, 10)
    r = [integer(0, len(widths) - 1 + (integer(0, 30) == 0)) for _ in range(4)]
    w = [widths[i] if i < len(widths) else 8 for i in r]
    odd = integer(0, 12) == 0  # something is off by one
    match kind:
        case library.NORM:
            groups = next(g for g in (integer(1, 4), 1) if w[0] % g == 0)
            return kind, (r[0], r[1], groups, integer(0, 1)), (1e-5, 0.0), (maybe(integer, w[0] + odd), None)
        case library.PRODUCT:
            c, t = integer(0, w[0] - 1), integer(0, w[1] - 1)
            k, n = integer(1, w[0] - c), integer(1, w[1] - t)
            number, packed = matrix(integer, n, k)
            return kind, (r[0], r[1], number, integer(0, 6), c + odd, k, t, n), (), (packed, maybe(integer, n))
        case library.ROTARY:
            turns = integer(1, max(1, w[0] // 2))
            rates = np.ones(turns + odd, np.float32)
            return kind, (r[0], 1, w[0], integer(0, max(0, w[0] - 2 * turns)), turns, integer(0, 1)), (1.0,), (rates,)
        case library.ATTENTION:
            kv = next(h for h in (2, 1) if all(x % h == 0 for x in w))
            heads = kv * (w[0] // w[1] if w[1] and w[0] % w[1] == 0 else 1)
            shape = (*r, heads, kv, max(1, w[1] // kv), max(1, w[2] // kv), integer(0, 1) * integer(1, 90))
            return kind, shape, (0.1, integer(0, 1) * 2.0), (maybe(integer, heads + odd),)
        case library.ROUTE:
            groups = next(g for g in (integer(1, 3), 1) if w[0] % g == 0)
            top = max(1, w[1] // 2)
            return kind, (r[0], r[1], w[0], top, integer(0, 1), integer(0, 1), groups, integer(1, groups)), (1.0,), ()
        case library.EXPERTS:
            inner, experts, top = integer(1, 40), integer(1, 9), max(1, w[1] // 2)
            before = np.concatenate(
                [library.pack(stored(reals(e, inner, w[0]), "bf16"), "bf16") for e in range(experts)]
            )
            after = np.concatenate(
                [library.pack(stored(reals(e, w[2], inner), "bf16"), "bf16") for e in range(experts)]
            )
            shape = (r[0], r[1], r[2], experts + odd, top, inner, 0, integer(0, 6))
            return kind, shape, (1.0, 0.0, 0.0), (before, before, after, maybe(integer, experts * inner))
        case library.COPY:
            return kind, (r[0], r[1], *(integer(0, 9) for _ in range(6))), (), ()
        case _:
            return kind, (*r[:3], integer(0, 7)), (1.0, float(integer(0, 3)), 0.0), ()


def step(plan: Plan, team: Team, integer: Integer, width: int, row_type: str) -> list[bytes]:
    """A few steps of a few sessions; what they gave."""
    caches, at, out = [SessionCache(plan) for _ in range(3)], [0, 0, 0], []
    for _ in range(3):
        counts = [integer(1, 40) if integer(0, 9) else integer(200, 300) for _ in caches]
        segments, row = [], 0
        for i, count in enumerate(counts):
            start = integer(0, at[i])
            segments.append(caches[i].segment(start, row, count))
            at[i], row = start + count, row + count
        rows = np.ascontiguousarray(stored(reals(integer(1, 99), row, width), row_type)).view(np.uint8).reshape(-1)
        try:
            out.append(plan.run(team, integer(1, 4), segments, rows, row).tobytes())
        except ManyhandsError as error:
            out.append(str(error).encode())
    return out


def case(seed: int, teams: Team) -> bool:
    """One random plan on every back end; whether it had operations that fit."""
    found = []
    for back_end in library.supported():
        random = np.random.default_rng(seed)

        def integer(low: int, high: int, random: np.random.Generator = random) -> int:
            return int(random.integers(low, high + 1))

        widths = [integer(1, 4) * integer(1, 30) for _ in range(integer(2, 6))]
        row_type = ("bf16", "f32")[integer(0, 1)]
        plan = Plan(back_end, row_type, widths, integer(0, len(widths) - 1), "f32", 700)
        accepted = 0
        for _ in range(integer(1, 12)):
            try:
                plan.add(*operation(integer, widths, 700))
                accepted += 1
            except ManyhandsError:
                pass
        found.append((accepted, step(plan, teams, integer, widths[0], row_type)))
    assert all(other == found[0] for other in found), f"seed {seed}: back ends differ"
    return found[0][0] > 0


def main(path: str, seed: int, seconds: float) -> None:
    library.PATH = Path(path)
    team, until, fitting, number = Team(3), time.monotonic() + seconds, 0, 0
    while time.monotonic() < until:
        fitting += case(seed + number, team)
        number += 1
    sys.stdout.write(f"{number} plans, {fitting} with operations\n")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]))
