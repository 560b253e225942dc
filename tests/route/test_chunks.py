"""manyhands.route.chunks: the size of a prompt's chunks follows what was measured."""

import pytest

from manyhands.route.chunks import LEAST_ROWS, Stage, chunk_rows, pipelined_s
from manyhands.route.cost import HOP_OVERHEAD_S


def test_the_size_follows_what_was_measured() -> None:
    """Rows that cost little beside a step go many at once; those that cost much go few at once."""
    dear, cheap = [Stage(0.010, 0.0010)] * 3, [Stage(0.010, 0.00001)] * 3
    assert chunk_rows(4096, dear, 16, 256) == LEAST_ROWS
    assert chunk_rows(4096, cheap, 16, 1024) == 1024
    assert chunk_rows(4096, dear[:1], 16, 256) == 256  # one hop: nothing overlaps
    assert chunk_rows(4096, [Stage(0.001, 0.00001, 0.4)] * 3, 4, 1024) == 1024  # credits come back slowly
    assert pipelined_s(4096, 32, dear, 16) / pipelined_s(4096, 4096, dear, 16) == pytest.approx(1 / 3, rel=0.05)


@pytest.mark.parametrize("most", [1, 7, 31, 32, 63, 64, 256])
@pytest.mark.parametrize("num_rows", [1, 5, 40, 4096])
def test_a_chunk_is_never_larger_than_allowed(most: int, num_rows: int) -> None:
    for stages in ([Stage(0.0, 0.0)], [Stage(0.01, 0.001), Stage(0.1, 0.0)], [Stage(1e9, 1e9, 1e9)] * 255):
        assert min(most, LEAST_ROWS) <= chunk_rows(num_rows, stages, 1, most) <= most


def test_overhead_bounds_how_small_chunks_get() -> None:
    free = [Stage(0.0, 1e-9)] * 3
    assert chunk_rows(4096, free, 16, 256) == 256
    assert pipelined_s(4096, 256, free, 16) == pytest.approx((3 + 15) * HOP_OVERHEAD_S, rel=0.01)
