"""Caches in blocks: forks have blocks in common, and what one of them writes no other sees."""

import numpy as np
import pytest

from manyhands.core import Span
from manyhands.engine import golden_models, library
from manyhands.engine.cache import SessionCache
from manyhands.engine.cpu import CpuSpan
from manyhands.engine.golden_cases import reals
from manyhands.engine.library import BLOCK, Array, Team
from manyhands.engine.span import Piece
from manyhands.program.families import build_program

ROWS = 200


@pytest.fixture
def span() -> CpuSpan:
    program = build_program({**golden_models.configs()["gemma2"], "max_position_embeddings": 512})  # has windows
    read = golden_models.tensors(program, "bf16").__getitem__
    return CpuSpan(program, Span(0, len(program.layers)), read, "bf16", Team(2), library.supported()[0])


def rows(span: CpuSpan, count: int, seed: int = 9) -> Array:
    return (reals(seed, count, span.hidden_size).view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)


def stepped(span: CpuSpan, cache: SessionCache, given: Array, start: int) -> Array:
    return span.step(given.copy(), [Piece(cache, start, len(given))], 2)


@pytest.mark.parametrize("at", [1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, ROWS - 1])
@pytest.mark.parametrize("start", [0, 5, BLOCK - 1, BLOCK, BLOCK + 5])
def test_neither_a_fork_nor_its_source_sees_what_the_other_writes(span: CpuSpan, at: int, start: int) -> None:
    """Also where one goes back to before the fork, as a repair may, and writes rows that are wrong."""
    x, wrong = rows(span, ROWS), rows(span, ROWS, seed=10)
    right = stepped(span, span.new_cache(), x, 0)
    for is_forks_turn in (True, False):
        source = span.new_cache(ROWS)
        stepped(span, source, x[:at], 0)
        fork, second = span.fork(source, at, ROWS), span.fork(source, at, ROWS)
        writer, reader = (fork, source) if is_forks_turn else (source, fork)
        stepped(span, writer, wrong[: ROWS - start], min(start, at))
        assert reader.length == at
        for cache in (reader, second):
            assert np.array_equal(stepped(span, cache, x[at:], at), right[at:])
        assert np.array_equal(stepped(span, writer, x[min(start, at) :], min(start, at)), right[min(start, at) :])


def test_a_fork_takes_memory_for_one_block(span: CpuSpan) -> None:
    source = span.new_cache(ROWS)
    stepped(span, source, rows(span, ROWS), 0)
    fork = span.fork(source, ROWS - 1, 4 * ROWS)
    whole = (ROWS - 1) // BLOCK
    ours, theirs = ([block.ctypes.data for block in cache._blocks] for cache in (fork, source))
    assert ours[:whole] == theirs[:whole] and len(ours) == whole + 1 and ours[whole] != theirs[whole]
    assert fork.positions == (whole + 1) * BLOCK


def test_a_fork_outlives_its_source(span: CpuSpan) -> None:
    x, source = rows(span, ROWS), span.new_cache(ROWS)
    right = stepped(span, source, x, 0)
    fork = span.fork(source, 150, ROWS)
    del source
    assert np.array_equal(stepped(span, fork, x[150:], 150), right[150:])


def test_a_fork_of_more_blocks_than_its_table_was_made_for(span: CpuSpan) -> None:
    x, source = rows(span, 500), span.new_cache()
    right = stepped(span, source, x, 0)
    fork = span.fork(source, 450, 1)
    assert np.array_equal(stepped(span, fork, x[450:], 450), right[450:])
