"""Golden digests of what some families alone ask of operations: attention in chunks, factors of the position behind a row's,
experts whose sources are scaled, or whose results are normed, mixers, xIELU, gates of heads."""

from collections.abc import Callable
from typing import Final

import numpy as np

from manyhands.engine import library
from manyhands.engine.golden_cases import (
    EDGES,
    POSITIONS,
    AttentionShape,
    BackEnd,
    Op,
    attention,
    product,
    reals,
    stored,
)

# Chunks that end within blocks of keys, with them, within a few rows, and behind all but one row.
SHAPES: Final[tuple[AttentionShape, ...]] = (
    (4, 2, 16, 16, -50, 0.0, False),
    (3, 1, 40, 24, -64, 0.0, True),
    (2, 2, 33, 17, -7, 2.5, False),
    (6, 3, 16, 16, -149, 0.0, True),
)


def later_scales(machine: BackEnd) -> bytes:
    """Rows times the factors of the positions behind theirs."""
    ops: list[Op] = [(library.SCALE, (0, 8, 1), (0.1,), ())]
    return b"".join(machine.run(reals(17, 80, 40), kind, [1], ops, 0).tobytes() for kind in ("bf16", "f32"))


def several(seed: int, count: int, n: int, k: int) -> library.Array:
    """Random matrices, one behind the other."""
    return np.concatenate([library.pack(stored(reals(seed + i, n, k), "bf16"), "bf16") for i in range(count)])


def scaled_sources(machine: BackEnd) -> bytes:
    """Experts with gates and without, whose sources are times what sigmoids say."""
    found, k, n, count = [], 40, 32, 6
    for top_k, has_gates in ((1, True), (3, True), (2, False)):
        ops = [product(80, 0, 1, count, k), (library.ROUTE, (1, 2, count, top_k, 1, 0, 1, 1), (1.0, 1e-20), ())]
        matrices = several(82, count, n, k) if has_gates else None, several(90, count, n, k), several(98, count, k, n)
        ops.append((library.EXPERTS, (0, 2, 3, count, top_k, n, 0, 1, 0, 1), (1.0, 0.0, 0.0), matrices))
        widths = [count, 2 * top_k, k]
        found += [machine.run(reals(16, 33, k), kind, widths, ops, 3).tobytes() for kind in ("bf16", "f32")]
    return b"".join(found)


def identities(machine: BackEnd) -> bytes:
    """Experts with gates and without, behind which routes also name some that give their source."""
    found, k, n, count = [], 40, 32, 5
    for top_k, more, has_gates in ((1, 5, True), (4, 3, True), (9, 6, False)):
        ops = [product(80, 0, 1, count + more, k)]
        ops.append((library.ROUTE, (1, 2, count + more, top_k, 0, 0, 1, 1), (1.5, 1e-20), (reals(24, count + more),)))
        matrices = several(82, count, n, k) if has_gates else None, several(90, count, n, k), several(98, count, k, n)
        ops.append((library.EXPERTS, (0, 2, 3, count, top_k, n, 0, 1, 0, 0, more), (1.0, 0.0, 0.0), matrices))
        widths = [count + more, 2 * top_k, k]
        found += [machine.run(reals(16, 33, k), kind, widths, ops, 3).tobytes() for kind in ("bf16", "f32")]
    return b"".join(found)


def normed_results(machine: BackEnd) -> bytes:
    """Experts with gates and without, whose results are normed once they were multiplied; also of rows that are none."""
    found, k, n, count = [], 40, 32, 5
    for width, has_gates, eps in ((24, True, 1e-8), (7, False, 0.1), (300, True, 1e-5)):
        ops = [product(80, 0, 1, count, k), (library.ROUTE, (1, 2, count, 3, 1, 1, 1, 1), (1.5, 1e-15), ())]
        matrices = (
            several(82, count, n, k) if has_gates else None,
            several(90, count, n, k),
            several(98, count, width, n),
        )
        tensors = (*matrices, None, None, None, reals(25, width))
        ops.append((library.EXPERTS, (0, 2, 3, count, 3, n, 0, 1, 0), (1.0, 0.0, 0.0, eps), tensors))
        x = reals(16, 33, k)
        x[3], x[4, 5], x[5, 0] = 0, np.nan, np.inf
        found += [machine.run(x, kind, [count, 6, width], ops, 3).tobytes() for kind in ("bf16", "f32")]
    return b"".join(found)


def mixers(machine: BackEnd) -> bytes:
    """Weights of a mixer, of which a threshold leaves out none, some and nearly all."""
    found = []
    for count, top_k, threshold in ((16, 2, 0.02), (40, 3, 0.8), (9, 9, 1e9)):
        ops: list[Op] = [(library.ROUTE, (0, 1, count, top_k, 2, 0, 1, 1), (1.5, threshold), ())]
        found.append(machine.run(reals(19, 64, count, around=2), "f32", [2 * top_k], ops, 1).tobytes())
    return b"".join(found)


def logits(machine: BackEnd) -> bytes:
    """Experts ranked by logits with a correction, and without, whose weights are sigmoids; in groups too."""
    found = []
    for count, top_k, groups, normalise in ((16, 2, 1, 1), (40, 3, 5, 0), (9, 9, 1, 1)):
        for correction in (reals(31, count, around=0), None):
            shape = (0, 1, count, top_k, 4, normalise, groups, min(2, groups))
            ops: list[Op] = [(library.ROUTE, shape, (1.5, 1e-20), (correction,))]
            found.append(machine.run(reals(20, 64, count, around=2), "f32", [2 * top_k], ops, 1).tobytes())
    return b"".join(found)


def groups(machine: BackEnd) -> bytes:
    """Experts of a softmax, in groups that rank by the best of each, also of one expert; and by the two best."""
    found = []
    for count, top_k, parts, best, single in ((16, 2, 4, 1, 1), (160, 6, 8, 3, 1), (9, 2, 9, 2, 1), (40, 3, 5, 2, 0)):
        shape = (0, 1, count, top_k, 0, 0, parts, best, 0, 0, single)
        ops: list[Op] = [(library.ROUTE, shape, (1.5, 1e-20), ())]
        found.append(machine.run(reals(21, 64, count, around=2), "f32", [2 * top_k], ops, 1).tobytes())
    return b"".join(found)


def powers(machine: BackEnd) -> bytes:
    """Rows times powers of their positions."""
    found = []
    for beta, length in ((0.1, 2048), (0.37, 1), (4.0, 3), (0.0, 5)):
        ops: list[Op] = [(library.SCALE, (0, length, 1, 1), (beta,), ())]
        found += [machine.run(reals(17, 80, 40), kind, [1], ops, 0).tobytes() for kind in ("bf16", "f32")]
    return b"".join(found)


def scaled_heads(machine: BackEnd) -> bytes:
    """Heads of several widths, each times its own factor of the position, also below zero."""
    found = []
    for heads, width in ((5, 16), (16, 40), (3, 7), (9, 1)):
        numbers = reals(33, heads, around=0), reals(34, heads, around=1)
        ops: list[Op] = [(library.SCALE, (0, 1, 0, 0, heads), (0.0,), numbers)]
        found += [machine.run(reals(17, 80, heads * width), kind, [1], ops, 0).tobytes() for kind in ("bf16", "f32")]
    return b"".join(found)


def lengths(machine: BackEnd) -> bytes:
    """Rows times the factors of positions by lengths, 1 of those below one."""
    found = []
    for beta, length in ((0.1, 32), (0.37, 1), (1e3, 3), (0.0, 5)):
        ops: list[Op] = [(library.SCALE, (0, length, 1, 2), (beta,), ())]
        found += [machine.run(reals(17, 80, 40), kind, [1], ops, 0).tobytes() for kind in ("bf16", "f32")]
    return b"".join(found)


def position_rows(machine: BackEnd) -> bytes:
    """Rows of a table in each type, by position."""
    found = []
    for width, offset, (name, number) in zip((40, 7, 300), (0, 2, 1), list(library.TYPES.items())[:3], strict=True):
        table = stored(reals(35, POSITIONS + offset, width), name)
        ops: list[Op] = [(library.POSITION, (1, number, offset), (), (table,)), (library.ADD, (1, 1, 0), (1.0,), ())]
        found += [machine.run(reals(36, 80, width), kind, [width], ops, 0).tobytes() for kind in ("bf16", "f32")]
    return b"".join(found)


def clips(machine: BackEnd) -> bytes:
    """Numbers between two limits, at edges and beyond."""
    edges = np.array([bits | sign for bits in EDGES for sign in (0, 1 << 31)], np.uint32).view(np.float32)
    x = np.concatenate([edges, reals(21, 33 * 40 - len(edges), around=4, spread=40)]).reshape(33, 40)
    ops: list[list[Op]] = [[(library.SOFTEN, (0,), (1.0, -limit), ())] for limit in (0.1, 6.0, 1e15)]
    return b"".join(machine.run(x, kind, [1], some, 0).tobytes() for some in ops for kind in ("bf16", "f32"))


def xielus(machine: BackEnd) -> bytes:
    """The function of two alphas, at finite edges and between, of an epsilon below zero, far below and above."""
    edges = np.array([bits | sign for bits in EDGES[:6] for sign in (0, 1 << 31)], np.uint32).view(np.float32)
    x = np.concatenate([edges, reals(21, 33 * 40 - len(edges), around=4, spread=40)]).reshape(33, 40)
    found = []
    for numbers in ((0.8, 0.9, 0.5, -1e-6), (3.0, 0.1, -0.25, -0.5), (0.0, 1.0, 1.0, 0.3)):
        ops: list[Op] = [(library.XIELU, (0,), (), (np.array(numbers, np.float32),))]
        found += [machine.run(x, kind, [1], ops, 0).tobytes() for kind in ("bf16", "f32")]
    return b"".join(found)


def head_gates(machine: BackEnd) -> bytes:
    """Heads of several widths, each times its sigmoid, in place and not."""
    found = []
    for heads, width in ((5, 16), (16, 40), (3, 7), (9, 1)):
        k = heads * width
        for target in (0, 2):
            ops = [product(100, 0, 1, heads, k, activation="sigmoid"), (library.MULTIPLY, (0, 1, target), (), ())]
            found += [machine.run(reals(23, 33, k), kind, [heads, k], ops, target) for kind in ("bf16", "f32")]
    return b"".join(rows.tobytes() for rows in found)


CASES: Final[dict[str, Callable[[BackEnd], bytes]]] = {
    "attention in chunks bf16": attention("bf16", SHAPES),
    "attention in chunks f32": attention("f32", SHAPES),
    "position scales from one": later_scales,
    "experts of scaled sources": scaled_sources,
    "experts and identities": identities,
    "experts of normed results": normed_results,
    "mixers": mixers,
    "ranks by logits": logits,
    "ranks of groups": groups,
    "powers of positions": powers,
    "scales of heads": scaled_heads,
    "position scales by lengths": lengths,
    "rows by position": position_rows,
    "clips": clips,
    "xielu": xielus,
    "gates of heads": head_gates,
}
