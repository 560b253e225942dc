"""manyhands.model.tiles: our AMX kernel. That rows do not know each other is test_linear's; here is what is its own."""

import math
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from manyhands.model import tiles
from manyhands.model.arithmetic import instruction_set
from tests.model.pipeline import threads

needs_tiles = pytest.mark.skipif(not tiles.available(), reason="no AMX here")


@pytest.mark.skipif(instruction_set() != "amx_tile" or "ONEDNN_MAX_CPU_ISA" in os.environ, reason="no AMX here")
def test_it_was_built() -> None:
    """`make setup` builds it wherever it can run: with a compiler of this machine, or one from the package registry."""
    assert tiles.available()


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).bfloat16()


@needs_tiles
@pytest.mark.parametrize("columns", [1, 2, 31, 32, 33, 65, 3001])
@pytest.mark.parametrize("rows", [1, 15, 16, 17, 63, 64, 65, 300])
def test_edges_of_tiles(rows: int, columns: int) -> None:
    """Weights and rows that end within a tile, at it and beyond, against fp64."""
    weight, x = normal(rows, columns), normal(67, columns)
    got = tiles.Tiled(weight, None)(x)
    assert_close(got.double(), x.double() @ weight.double().t(), atol=0.02 * columns**0.5, rtol=0.01)


@needs_tiles
def test_the_sum_is_rounded_once_and_the_bias_before() -> None:
    """256 + 1 is no bf16, nor is 257 - 0.5: exact sums, then the bias, then one rounding to even."""
    weight, x = torch.tensor([[256.0, 1.0], [256.0, 1.0]]).bfloat16(), torch.ones(1, 2).bfloat16()
    got = tiles.Tiled(weight, torch.tensor([0.0, 0.5]).bfloat16())(x)
    assert got.tolist() == [[256.0, 258.0]]


@needs_tiles
def test_rows_apart_in_memory() -> None:
    """A slice of a fused product's columns, one row seen many times, a transposed one: as their copies."""
    product, wide = tiles.Tiled(normal(48, 64), None), normal(40, 200)
    for x in (wide[:, 65:129], wide[:1, :64].expand(40, 64), wide[:, :64].t().contiguous().t()):
        assert torch.equal(product(x), product(x.contiguous()))
    assert product(wide[:0, :64]).shape == (0, 48)


@needs_tiles
def test_a_broken_row_breaks_no_other() -> None:
    product, x = tiles.Tiled(normal(70, 90), None), normal(50, 90)
    want = product(x)
    x[7], x[20, 89], x[33, 0] = float("nan"), float("inf"), 3e38
    got = product(x)
    whole = [i for i in range(50) if i not in (7, 20, 33)]
    assert torch.equal(got[whole], want[whole]) and got[7].isnan().all() and not got[20].isfinite().any()


@needs_tiles
def test_chunks_of_rows_and_shares_of_threads() -> None:
    """More rows than a core keeps at hand, on more threads than there are cores, and than there are panels."""
    x = normal(150, 8192)
    for rows in (16, 64, 4000):
        product = tiles.Tiled(normal(rows, 8192), None)
        with threads(1):
            want = product(x)
        for count in (2, 3, 8):
            with threads(count):
                assert torch.equal(product(x), want)


@needs_tiles
def test_what_does_not_fit_is_refused() -> None:
    product = tiles.Tiled(normal(16, 32), None)
    for x in (torch.zeros(2, 32), normal(2, 31), normal(2, 64)):
        with pytest.raises(TypeError, match="bf16 rows of 32"):
            product(x)


@needs_tiles
def test_without_it_onednn_does_without_amx() -> None:
    """A user who holds oneDNN back gets no tiles either, and rows that are apart all the same."""
    code = (
        "import manyhands; from manyhands.model import tiles, linear; from manyhands.model.prove import keeps_rows_apart;"
        "assert not tiles.available() and keeps_rows_apart('bf16')"
    )
    environment = {**os.environ, "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)


@needs_tiles
def test_devices_do_not_meet() -> None:
    """Two device threads with two members each, whose pauses let members fall asleep: every product is right."""
    product, x = tiles.Tiled(normal(640, 320), None), normal(40, 320)
    want = product(x)

    def device(seed: int) -> bool:
        pauses = Random(seed)
        with threads(2):
            for _ in range(150):
                count = pauses.randint(1, 40)
                if not torch.equal(product(x[:count]), want[:count]):
                    return False
                if pauses.random() < 0.1:
                    time.sleep(0.001)
        return True

    with ThreadPoolExecutor(3) as pool:
        assert all(pool.map(device, range(3)))


@needs_tiles
def test_a_device_that_ends_takes_its_threads_with_it() -> None:
    product, x = tiles.Tiled(normal(512, 512), None), normal(4, 512)

    def members() -> int:
        return sum(path.read_text() == "manyhands-tiles\n" for path in Path("/proc/self/task").glob("*/comm"))

    def use() -> int:
        before = members()
        with threads(3):
            product(x)
        return members() - before

    before = members()
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(use).result() == 2
    while members() > before:  # the system takes a moment to forget a thread that has ended
        time.sleep(0.001)


@needs_tiles
@pytest.mark.parametrize("width", [1, 15, 16, 17, 96, 896])
def test_rows_are_measured_as_torch_measures_them(width: int) -> None:
    x = (normal(7, width + 3) * 5)[1:, 2 : 2 + width]
    want = torch.linalg.vector_norm(x, dim=1, dtype=torch.float32)
    assert tiles.measure(x) == pytest.approx((float(want.min()), float(want.max())), rel=1e-5)
    assert tiles.measure(torch.zeros(2, width).bfloat16()) == (0.0, 0.0)


@needs_tiles
@pytest.mark.parametrize("row", [0, 3, 6])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_no_row_hides_one_that_is_not_finite(value: float, row: int) -> None:
    x = normal(7, 40)
    x[row, 39] = value
    assert not tiles.measure(x)[1] < math.inf
