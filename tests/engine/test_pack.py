"""Packing: every number where kernels.h says, of any view, and nothing beyond what was given."""

import gc
import threading
from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from manyhands.engine import library
from manyhands.engine.golden_cases import reals, stored
from manyhands.engine.library import Array
from manyhands.engine.memory import HUGE, LINE, MAPPING, Memory
from manyhands.engine.weights import Found, Stored, as_bf16, matrices
from manyhands.errors import ModelError
from tests.waiting import GUARD_S

SHAPES = [(1, 1), (16, 32), (17, 33), (50, 70), (15, 257), (48, 64), (33, 31)]


def unpacked(packed: Array, n: int, k: int, type_name: str) -> Array:
    """Row by row again, number by number, and zeros beyond the edges."""
    panels, steps = -(-n // 16), -(-k // 32)
    blocks = (
        packed.reshape(panels, steps, 16, 2, 16) if type_name != "bf16" else packed.reshape(panels, steps, 16, 16, 2)
    )
    order = (0, 4, 1, 2, 3) if type_name != "bf16" else (0, 3, 1, 2, 4)
    whole = blocks.transpose(order).reshape(panels * 16, steps * 32)
    assert not whole[n:].any() and not whole[:, k:].any()
    return whole[:n, :k]


@pytest.mark.parametrize("type_name", ["bf16", "f16", "f32"])
@pytest.mark.parametrize("n, k", SHAPES)
def test_every_number_has_its_place(n: int, k: int, type_name: str) -> None:
    big = stored(reals(n + k, 2 * n + 5, 3 * k + 2), type_name)
    views: list[Callable[[Array], Array]] = [
        lambda a: np.ascontiguousarray(a[:n, :k]),
        lambda a: a[3 : 3 + n, 1 : 1 + k],
        lambda a: a[: 2 * n : 2, : 2 * k : 2],
        lambda a: np.ascontiguousarray(a[:n, :k].T).T,
        lambda a: np.frombuffer(b"x" + a[:n, :k].tobytes(), np.uint8)[1:].view(a.dtype).reshape(n, k),
    ]
    for view in views:
        given = view(big)
        assert np.array_equal(unpacked(library.pack(given, type_name), n, k, type_name), given)


@pytest.mark.parametrize("n, k", SHAPES)
def test_rows_and_rounding(n: int, k: int) -> None:
    x = reals(5, n, k, around=100, spread=60)
    x[0, 0] = np.nan
    rows = np.array([(7 * i + 3) % n for i in range(n + 4)], np.int64)
    for given in (x, np.ascontiguousarray(x.T).T):
        packed = library.pack(given, "f32", "bf16", rows)
        assert np.array_equal(unpacked(packed, n + 4, k, "bf16"), as_bf16(x)[rows])
        assert np.array_equal(unpacked(library.pack(given, "f32", "bf16"), n, k, "bf16"), as_bf16(x))


def test_what_reaches_beyond_is_refused() -> None:
    x, out, code = np.zeros((20, 40), np.uint16), np.zeros(2 * 2 * 512, np.uint16), library.load().mh_pack

    def pack(
        types: tuple[int, int] = (0, 0), count: int = 800, n: int = 20, k: int = 40, row: int = 40, step: int = 1,
        rows: NDArray[np.int64] | None = None, size: int = out.nbytes,
    ) -> int:  # fmt: skip
        return int(code(*types, x.ctypes.data, count, n, k, row, step, library.address(rows), out.ctypes.data, size))

    assert pack() == 0
    wrong = [pack((1, 0)), pack((0, 1)), pack((0, 2)), pack((3, 3)), pack((2, 1)), pack(count=799), pack(count=0)]
    wrong += [pack(n=0), pack(k=0), pack(n=21), pack(k=41), pack(row=41), pack(row=-1), pack(step=2)]
    wrong += [pack(row=1 << 62), pack(step=1 << 62), pack(size=out.nbytes - 2), pack(size=out.nbytes + 2)]
    for bad in (-1, 20, 1 << 62):
        wrong.append(pack(rows=np.array([0] * 19 + [bad], np.int64)))
    assert all(wrong)
    with pytest.raises(ModelError):
        library.pack(x[::-1], "bf16")
    with pytest.raises(ModelError):
        library.pack(x, "bf16", out=np.zeros(8, np.uint16))


def test_memory_lies_in_lines_and_is_given_back() -> None:
    memory = Memory()
    arrays = [memory.array(count, np.uint16) for count in (1, 33, MAPPING // 2 + 1, 7)]
    assert all(array.ctypes.data % LINE == 0 and not array.any() for array in arrays)
    assert arrays[2].ctypes.data % HUGE == 0
    for i, array in enumerate(arrays):
        array[:] = i
    assert all((array == i).all() for i, array in enumerate(arrays))


@pytest.mark.parametrize("parts", [1, 2, 100])
def test_threads_that_fill_memory_take_every_part_and_end(parts: int) -> None:
    memory, taken = Memory(), set[int]()
    left = iter(range(parts))
    memory.fill(lambda: taken.update(left), parts)
    assert taken == set(range(parts))
    del memory
    gc.collect()
    for thread in threading.enumerate():
        if thread.name.startswith("pack"):
            thread.join(GUARD_S)
            assert not thread.is_alive()


@pytest.mark.parametrize("failing", [0, 99])
def test_what_a_thread_that_fills_memory_raises_is_raised_when_all_have_ended(failing: int) -> None:
    left, taken = iter(range(100)), set[int]()

    def work() -> None:
        for part in left:
            taken.add(part)
            if part == failing:
                raise ModelError(f"part {part}")

    memory = Memory()
    with pytest.raises(ModelError, match=f"part {failing}"):
        memory.fill(work, 100)
    assert failing in taken


def test_what_was_not_written_is_not_resident() -> None:
    def resident() -> int:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * 4096

    before = resident()
    held = Memory().array(1 << 30, np.uint8)
    held[:1000] = 1
    assert resident() - before < 8 * HUGE


def test_experts_are_read_one_by_one_and_held_once() -> None:
    read: list[int] = []

    def part(i: int) -> Found:
        read.append(i)
        return Stored("f32" if i != 9 else "f16", np.full((16, 32), i, np.float32)), None

    packed = matrices(3, part, "bf16", Memory(), "scalar")
    assert read == [0, 1, 2] and packed.type == "bf16" and packed.array.nbytes == 3 * 16 * 32 * 2
    with pytest.raises(ModelError, match="f16"):
        matrices(10, part, "bf16", Memory(), "scalar")
