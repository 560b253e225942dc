"""Attention of many rows on a GPU, in tiles that share keys: the CPU's bits in any company. The kernels run on the CPU
(cuda_host.py).
"""

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
import pytest
from numpy.typing import NDArray

from manyhands.engine import library
from manyhands.engine.compiled import Registers
from manyhands.engine.cuda.operations import FAST, QUERIES
from manyhands.engine.cuda.plan import CudaPlan, hold
from manyhands.engine.cuda.proof import PROVEN_TILES
from manyhands.engine.cuda.span import CudaCache
from manyhands.engine.golden_cases import POSITIONS, AttentionShape, BackEnd, Op, Step, product, reals, stored
from manyhands.engine.library import BLOCK, Array, Team
from tests.engine.cuda_host import HostDevice

K: Final = 24  # numbers of a row
SHAPES: Final[dict[str, AttentionShape]] = {
    "seven heads, which a tile is no multiple of": (7, 1, 16, 24, 0, 0.0, False),
    "a key head for each, sinks": (3, 3, 12, 40, 0, 0.0, True),
    "a window that begins in a tile, soft caps, sinks": (6, 2, 40, 100, 70, 2.5, True),
    "a window of one position": (4, 1, 32, 64, 1, 0.0, False),
    "windows about a block, values in two parts": (2, 1, 36, 130, BLOCK + 1, 0.0, False),
    "chunks that end in a tile, soft caps, sinks": (6, 2, 40, 100, -70, 2.5, True),
    "chunks of a block": (2, 1, 36, 130, -BLOCK, 0.0, False),
    "chunks of three positions": (7, 1, 16, 24, -3, 0.0, True),
    "more heads than a tile has queries": (QUERIES + 9, 1, 8, 16, 5, 3.0, True),
    "a width that tiles do not take": (4, 2, 33, 17, 0, 0.0, False),
}


class Made(NamedTuple):
    """Attention of drawn rows over drawn products."""

    widths: list[int]
    ops: list[Op]
    row_type: str

    def rows(self, seed: int, count: int) -> Array:
        drawn = np.ascontiguousarray(stored(reals(seed, count, K), self.row_type))
        return drawn.view(np.uint8).reshape(count, -1)

    def on_cpu(self) -> Step:
        return BackEnd("scalar", Team(1)).sessions(self.row_type, self.widths, self.ops, 4)()

    def on_gpu(self, device: HostDevice, tiles: int) -> CudaPlan:
        registers = Registers(self.row_type, tuple(self.widths), POSITIONS)
        held, places = hold(device, self.ops), library.apart(self.widths)
        return CudaPlan(device, registers, held, places, 4, "f32", tiles=PROVEN_TILES[tiles])


def made(shape: AttentionShape, row_type: str) -> Made:
    heads, key_heads, width, value_width, window, cap, has_sinks = shape
    widths = [K, heads * width, key_heads * width, key_heads * value_width, heads * value_width]
    ops = [product(20 + i, 0, i + 1, n, K) for i, n in enumerate(widths[1:4])]
    numbers = (1, 2, 3, 4, heads, key_heads, width, value_width, window, 0, 0)
    sinks = reals(30, heads) if has_sinks else None
    ops.append((library.ATTENTION, numbers, (width**-0.5 / 4, cap), (sinks,)))
    return Made(widths, ops, row_type)


def step(plan: CudaPlan, rows: Array, pieces: Sequence[tuple[CudaCache, int, int]]) -> NDArray[np.uint8]:
    """Of (cache, start, count) each."""
    given = [cache.begin(start, count) for cache, start, count in pieces]
    out = plan.run(given, rows, len(rows))
    for cache, start, count in pieces:
        cache.done(start + count)
    return out


@pytest.mark.parametrize("tiles", [1, 2])
@pytest.mark.parametrize("name", SHAPES)
def test_tiles_of_queries_are_the_cpus_bits(name: str, tiles: int, device: HostDevice) -> None:
    """Numbers of rows about those of tiles and blocks; then the last of them anew, as after a rollback."""
    one = made(SHAPES[name], "bf16" if tiles == 1 else "f32")
    plan, on_cpu = one.on_gpu(device, tiles), one.on_cpu()
    cache, at = CudaCache(device, plan), 0
    for start, count in ((0, 33), (None, 64), (None, 65), (None, 1), (None, 300), (400, 40), (3, 64)):
        at = at if start is None else start
        rows = one.rows(at + count, count)
        assert np.array_equal(step(plan, rows, [(cache, at, count)]), on_cpu(at, rows)), (at, count)
        at += count
    kernel = f"attend_many_{'BF16' if tiles == 1 else 'F32'}"
    assert any(launched.startswith(kernel) for launched in device.launched) == (
        name != "a width that tiles do not take"
    )


@pytest.mark.parametrize("heads", [4, 7])
def test_a_row_sees_its_own_session_whatever_shares_its_tile(heads: int, device: HostDevice) -> None:
    """Borders inside tiles; a fork and its source at the same positions, whose blocks are the same ones up to there; rows that
    go back; sessions of one row."""
    one = made((heads, 1, 16, 24, 100, 0.0, True), "bf16")
    plan, caches, right = one.on_gpu(device, 1), list[CudaCache](), list[Step]()

    def begin(cache: CudaCache, length: int) -> int:
        caches.append(cache)
        right.append(one.on_cpu())
        if length:
            right[-1](0, one.rows(1, 200)[:length])
        return len(caches) - 1

    source = begin(CudaCache(device, plan), 200)
    step(plan, one.rows(1, 200), [(caches[source], 0, 200)])
    fork = begin(caches[source].fork(130, POSITIONS), 130)
    short = begin(CudaCache(device, plan), 0)
    single = [begin(caches[source].fork(at, POSITIONS), at) for at in (64, 65, 127)]
    steps: list[list[tuple[int, int, int]]] = [
        [(source, 130, 37), (fork, 130, 37), (short, 0, 70)],
        [(short, 70, 3), *((which, 64, 1) for which in single), (source, 20, 90), (fork, 167, 5)],
        [(short, 10, 50), (fork, 20, 50), (source, 110, 20)],
    ]
    for turn, parts in enumerate(steps):
        rows, at = one.rows(turn + 2, sum(count for *_, count in parts)), 0
        found = step(plan, rows, [(caches[which], start, count) for which, start, count in parts])
        for which, start, count in parts:
            assert np.array_equal(found[at : at + count], right[which](start, rows[at : at + count])), (turn, which)
            at += count
    assert {"attend_BF16", "attend_many_BF16_64"} <= set(device.launched)


def test_steps_of_few_rows_read_keys_row_by_row(device: HostDevice) -> None:
    one = made((6, 1, 16, 24, 0, 0.0, False), "bf16")
    plan, on_cpu = one.on_gpu(device, 0), one.on_cpu()
    cache, most = CudaCache(device, plan), FAST.few_queries // 6
    rows = one.rows(1, most)
    assert np.array_equal(step(plan, rows, [(cache, 0, most)]), on_cpu(0, rows))
    assert "attend_many_BF16_64" not in device.launched
    rows = one.rows(1, most + 1)
    assert np.array_equal(step(plan, rows, [(cache, 0, most + 1)]), on_cpu(0, rows))
    assert "attend_many_BF16_64" in device.launched
