"""Caches on a GPU in blocks: they grow without being copied, forks have blocks in common, and what one of them writes no other
sees. The kernels run on the CPU (cuda_host.py), where dropped memory holds numbers that are none and must stay so.
"""

import gc
import random

import numpy as np
import pytest
from numpy.typing import NDArray

from manyhands.engine.cpu import CpuSpan
from manyhands.engine.cuda.span import CudaCache, CudaSpan
from manyhands.engine.library import BLOCK
from manyhands.engine.span import Piece
from manyhands.errors import ModelError
from tests.engine.cuda_host import HostDevice
from tests.engine.cuda_spans import program, rows_of, spans

Bytes = NDArray[np.uint8]
ROWS = 2 * BLOCK + 30
# One of its layers has a window.
SMALL = program(
    "gemma2",
    num_hidden_layers=2,
    layer_types=["sliding_attention", "full_attention"],
    hidden_size=32,
    intermediate_size=32,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=16,
)
X, WRONG = rows_of(SMALL, 5 * BLOCK), rows_of(SMALL, 5 * BLOCK, seed=4)


@pytest.fixture
def both(device: HostDevice) -> tuple[CudaSpan, CpuSpan]:
    return spans(device, SMALL)


@pytest.fixture
def span(both: tuple[CudaSpan, CpuSpan]) -> CudaSpan:
    return both[0]


@pytest.fixture
def right(both: tuple[CudaSpan, CpuSpan]) -> Bytes:
    """What becomes of X."""
    return both[1].step(X.copy(), [Piece(both[1].new_cache(), 0, len(X))], 1)


def stepped(span: CudaSpan, cache: CudaCache, given: Bytes, start: int) -> Bytes:
    return span.step(given.copy(), [Piece(cache, start, len(given))], 1)


def goes_on(span: CudaSpan, cache: CudaCache, right: Bytes, start: int, end: int = 0) -> bool:
    """Whether it computes what it should from what it has, for some positions: each sees all before it."""
    end = end or start + 3
    return np.array_equal(stepped(span, cache, X[start:end], start), right[start:end])


def num_there(device: HostDevice, span: CudaSpan) -> int:
    """Blocks on the device."""
    gc.collect()
    size = BLOCK * span.bytes_per_token
    return sum(len(memory) == size and not memory.is_dropped for memory in device.memories)


def leave(device: HostDevice, span: CudaSpan, blocks: int, table: int = 0) -> None:
    """Room for so many blocks, and bytes of a table."""
    device.room = blocks * BLOCK * span.bytes_per_token + table


def test_blocks_come_as_positions_are_written_and_are_never_copied(
    both: tuple[CudaSpan, CpuSpan], device: HostDevice, right: Bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    span, on_cpu = both
    assert span.bytes_per_token == on_cpu.bytes_per_token  # the plan of a swarm counts on it
    monkeypatch.setattr(device, "copy", None)
    before = len(device.memories)
    cache = span.new_cache(10 * BLOCK)
    assert len(device.memories) == before and cache.positions == 0
    assert np.array_equal(stepped(span, cache, X[:257], 0), right[:257])
    assert num_there(device, span) == 5 and cache.positions == cache.num_bytes // span.bytes_per_token == 5 * BLOCK
    assert len(device.memories) == before + 6  # and a table
    assert goes_on(span, cache, right, 257, 5 * BLOCK) and len(device.memories) == before + 6
    stepped(span, cache, WRONG, 5 * BLOCK)
    assert len(device.memories) == before + 11  # the table has room for its lease
    del cache
    assert num_there(device, span) == 0


def test_recorded_steps_go_on_where_a_cache_grew_and_its_table_moved(
    span: CudaSpan, device: HostDevice, right: Bytes
) -> None:
    cache, tables = span.new_cache(), set[int]()
    for at in range(0, 5 * BLOCK, 8):
        assert goes_on(span, cache, right, at, at + 8), at
        tables.add(cache.address)
    assert device.recorded == 1 and len(tables) > 1


@pytest.mark.parametrize("at", [BLOCK + 1, 2 * BLOCK])
@pytest.mark.parametrize("start", [0, 5, BLOCK])
def test_neither_a_fork_nor_its_source_sees_what_the_other_writes(
    span: CudaSpan, right: Bytes, at: int, start: int
) -> None:
    """Also where one goes back to before the fork, as a repair may, and writes rows that are wrong."""
    for is_forks_turn in (True, False):
        source = span.new_cache(ROWS)
        stepped(span, source, X[:at], 0)
        fork, second = span.fork(source, at, ROWS), span.fork(source, at, ROWS)
        writer, reader = (fork, source) if is_forks_turn else (source, fork)
        back = min(start, at)
        stepped(span, writer, WRONG[:66], back)
        assert (writer.length, reader.length) == (back + 66, at)
        assert goes_on(span, reader, right, at) and goes_on(span, second, right, at)
        assert goes_on(span, writer, right, back)


def test_a_fork_takes_memory_for_one_block(span: CudaSpan, device: HostDevice, right: Bytes) -> None:
    source = span.new_cache(ROWS)
    stepped(span, source, X[:ROWS], 0)
    assert num_there(device, span) == 3
    fork, whole = span.fork(source, ROWS - 1, 5 * BLOCK), span.fork(source, 2 * BLOCK, ROWS)
    assert num_there(device, span) == 4 and (fork.positions, whole.positions) == (3 * BLOCK, 2 * BLOCK)
    stepped(span, fork, WRONG[:1], 0)  # at the beginning of a block: nothing of it is needed
    assert num_there(device, span) == 4 and fork.positions == BLOCK
    del source, fork
    assert num_there(device, span) == 2 and goes_on(span, whole, right, 2 * BLOCK)


def test_forks_of_forks_outlive_their_source_and_write_for_themselves(
    span: CudaSpan, device: HostDevice, right: Bytes
) -> None:
    source = span.new_cache(ROWS)
    stepped(span, source, X[:ROWS], 0)
    fork = span.fork(source, 2 * BLOCK, ROWS)
    third = span.fork(fork, BLOCK + 7, ROWS)
    last = span.fork(third, BLOCK, 0)
    del source
    assert num_there(device, span) == 3
    stepped(span, fork, WRONG[:50], BLOCK - 9)  # into a block that all have
    assert goes_on(span, last, right, BLOCK) and goes_on(span, third, right, BLOCK + 7)
    stepped(span, third, WRONG[:ROWS], 0)
    assert goes_on(span, last, right, BLOCK - 1) and goes_on(span, fork, right, BLOCK - 9)
    del fork, third
    assert num_there(device, span) == 2 and goes_on(span, last, right, 2)


def test_sessions_of_different_lengths_share_a_step(span: CudaSpan, right: Bytes) -> None:
    """One block, five, and forks of it of which one goes back into what they share, in one step."""
    long = span.new_cache(5 * BLOCK)
    stepped(span, long, X[: 4 * BLOCK + 3], 0)
    short, fork, back = span.new_cache(1), span.fork(long, 3 * BLOCK, 0), span.fork(long, 4 * BLOCK, 0)
    parts = [(short, 0, 3), (long, 4 * BLOCK + 3, 5), (back, BLOCK + 9, 90), (fork, 3 * BLOCK, 2)]
    given = np.concatenate([X[start : start + count] for _, start, count in parts])
    wanted = np.concatenate([right[start : start + count] for _, start, count in parts])
    assert np.array_equal(span.step(given, [Piece(*part) for part in parts], 1), wanted)
    assert [cache.length for cache, *_ in parts] == [3, 4 * BLOCK + 8, BLOCK + 99, 3 * BLOCK + 2]
    assert goes_on(span, long, right, 4 * BLOCK + 8) and goes_on(span, fork, right, 3 * BLOCK + 2)
    assert goes_on(span, long, right, 70)


def test_a_step_without_room_loses_nothing(span: CudaSpan, device: HostDevice, right: Bytes) -> None:
    """In the middle of its growth, for the table, and of the second of two sessions."""
    cache, other = span.new_cache(BLOCK), span.new_cache(BLOCK)
    stepped(span, cache, X[:BLOCK], 0)
    stepped(span, other, X[:10], 0)
    for blocks in (0, 2, 1):  # of the four that are needed
        leave(device, span, blocks)
        with pytest.raises(ModelError, match="not free on the GPU"):
            stepped(span, cache, X[BLOCK:], BLOCK)
        assert cache.length == BLOCK
    device.room = 7  # all blocks are there, and no room for the longer table
    with pytest.raises(ModelError, match="not free on the GPU"):
        stepped(span, cache, X[BLOCK : 4 * BLOCK], BLOCK)
    device.room = 100
    assert goes_on(span, cache, right, BLOCK - 2, BLOCK)
    with pytest.raises(ModelError, match="not free on the GPU"):
        pieces = [Piece(cache, BLOCK, 3), Piece(other, 10, BLOCK)]
        span.step(np.concatenate([X[BLOCK : BLOCK + 3], X[10 : BLOCK + 10]]), pieces, 1)
    device.room = None
    assert num_there(device, span) == 5
    assert goes_on(span, cache, right, BLOCK, 5 * BLOCK) and goes_on(span, other, right, 10, 70)


def test_without_room_for_its_own_blocks_no_session_writes_those_of_another(
    span: CudaSpan, device: HostDevice, right: Bytes
) -> None:
    source = span.new_cache(ROWS)
    stepped(span, source, X[:ROWS], 0)
    fork = span.fork(source, 2 * BLOCK, 5 * BLOCK)
    stepped(span, fork, X[2 * BLOCK : ROWS], 2 * BLOCK)  # what it has is listed on the device
    leave(device, span, 0)
    with pytest.raises(ModelError, match="not free on the GPU"):
        span.fork(source, BLOCK + 1, ROWS)
    with pytest.raises(ModelError, match="not free on the GPU"):
        stepped(span, fork, WRONG[:3], 10)  # no room for the copy: all is as it was
    assert fork.length == ROWS and goes_on(span, fork, right, ROWS - 1)
    leave(device, span, 1)
    with pytest.raises(ModelError, match="not free on the GPU"):
        stepped(span, fork, WRONG[: 4 * BLOCK], 10)  # for the copy, and not for what follows it
    assert fork.length == 10
    device.room = 0
    stepped(span, fork, WRONG[:50], 10)  # it needs no more
    device.room = None
    assert goes_on(span, source, right, 11) and goes_on(span, fork, right, 10)


def test_whatever_becomes_of_sessions_their_bits_are_the_cpus(
    both: tuple[CudaSpan, CpuSpan], device: HostDevice
) -> None:
    """Steps, rollbacks, forks, ends and a GPU that is full, at random; no block is lost and none held."""
    span, on_cpu = both
    chance, start = random.Random(11), (span.new_cache(), on_cpu.new_cache())
    span.step(X[: 3 * BLOCK].copy(), [Piece(start[0], 0, 3 * BLOCK)], 1)
    on_cpu.step(X[: 3 * BLOCK].copy(), [Piece(start[1], 0, 3 * BLOCK)], 1)
    sessions = [start, *[(span.fork(start[0], at, 0), on_cpu.fork(start[1], at, 0)) for at in (BLOCK, 3 * BLOCK - 1)]]
    del start
    most_shared = 0
    for turn in range(60):
        source, at = chance.choice(sessions), chance.randint(1, 3 * BLOCK)
        if at <= source[0].length and chance.random() < 0.5:
            sessions.append((span.fork(source[0], at, 0), on_cpu.fork(source[1], at, 0)))
        del source, sessions[6:], sessions[: len(sessions) > 2 and chance.random() < 0.1]
        parts = []
        for pair in chance.sample(sessions, chance.randint(1, min(3, len(sessions)))):
            back = chance.choice([0, 0, 0, 0, 0, 9, 70, 1000])
            parts.append((pair, max(0, pair[0].length - back), chance.choice([1, 3, 20])))
        given = rows_of(SMALL, sum(count for *_, count in parts), seed=turn)
        on_gpu = [Piece(pair[0], start, count) for pair, start, count in parts]
        device.room = chance.choice([None, None, BLOCK * span.bytes_per_token])
        try:
            found = span.step(given, on_gpu, 1)
        except ModelError:
            device.room = None
            found = span.step(given, on_gpu, 1)
        device.room = None
        wanted = on_cpu.step(given.copy(), [Piece(pair[1], start, count) for pair, start, count in parts], 1)
        assert np.array_equal(found, wanted), turn
        assert [there.length for there, _ in sessions] == [here.length for _, here in sessions]
        del parts, on_gpu, pair
        blocks = [block.address for there, _ in sessions for block in there._blocks]
        most_shared = max(most_shared, len(blocks) - len(set(blocks)))
        assert turn % 9 or num_there(device, span) == len(set(blocks))
    assert most_shared > 1
