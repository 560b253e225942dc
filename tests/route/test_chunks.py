"""manyhands.route.chunks: the size of a prompt's chunks follows what was measured."""

import pytest

from manyhands.route.chunks import FIRST_BYTES, LEAST_ROWS, Stage, chunk_rows, first_rows, pipelined_s
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


def test_first_rows_save_a_round_trip_or_wait_for_the_others() -> None:
    """64 rows fit in FIRST_BYTES; a hop reads its weights in 70 ms."""
    near, far, row_bytes = [Stage(0.07, 0.001, 0.001)], [Stage(0.07, 0.001, 0.1)], FIRST_BYTES // 64
    assert first_rows(256, 256, row_bytes, near) == 0
    assert first_rows(256, 256, row_bytes, far) == 64
    assert first_rows(256, 256, row_bytes, [*near, *far]) == 64
    assert [first_rows(n, 256, row_bytes, near) for n in (1, 64, 65)] == [1, 64, 0]
    assert first_rows(300, 256, row_bytes, near) == 64  # two chunks in any case
    assert first_rows(256, 32, row_bytes, near) == 32


@pytest.mark.parametrize("num_rows", [1, 63, 64, 65, 255, 256, 257, 1000])
@pytest.mark.parametrize("chunk", [1, 32, 100, 256])
def test_first_rows_of_a_near_hop_make_no_chunk_more(num_rows: int, chunk: int) -> None:
    rows = first_rows(num_rows, chunk, FIRST_BYTES // 64, [Stage(0.07, 0.001, 0.001)])
    chunks = -(-(num_rows - rows) // chunk) + (rows > 0)
    assert 0 <= rows <= min(64, chunk, num_rows) and chunks == -(-num_rows // chunk)
