"""What a machine's memory holds: weights, cache, ends, the process."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manyhands.config import WorkerConfig
from manyhands.core import Span
from manyhands.errors import BadRequest
from manyhands.place.budget import MemoryBudget
from manyhands.place.shape import PROCESS_BYTES
from manyhands.plain import size_of
from tests.place.fleet import MB, shape

TOKENS, CACHE = 1000, 20_000  # 20 MB of cache beside the 100 MB of a layer
LOGS = WorkerConfig().log_bytes


def budget(megabytes: int, *, ends_mb: int = 0) -> MemoryBudget:
    """Of a machine with so much beside the process; an origin if the model has ends."""
    model = shape(6, ends_mb=ends_mb, cache_bytes=CACHE)
    return MemoryBudget(model, PROCESS_BYTES + megabytes * MB, TOKENS, with_ends=ends_mb > 0)


def test_weights_and_cache_count_to_the_byte() -> None:
    assert budget(240).fits(Span(0, 2)) and not budget(239).fits(Span(0, 2))
    assert budget(290, ends_mb=50).fits(Span(0, 2)) and not budget(289, ends_mb=50).fits(Span(0, 2))
    assert budget(240).fits(Span(4, 5), [Span(0, 1)]) and not budget(240).fits(Span(4, 6), [Span(0, 1)])


def test_what_weights_leave_is_for_the_caches() -> None:
    mine, held = budget(300), [Span(0, 1), Span(3, 4)]
    assert mine.log_bytes(held, LOGS) == 25 * MB, "a quarter of what weights leave"
    assert mine.log_bytes(held, 8) == 8, "no more than is wanted"
    assert budget(240).log_bytes(held, LOGS) == 0, "no cache that is needed"
    for logs in (0, 8, LOGS, 1000 * LOGS):
        assert mine.cache_bytes(held, logs) + mine.log_bytes(held, logs) == 100 * MB
    assert budget(100).cache_bytes([Span(0, 2)], LOGS) == 0


def test_a_span_that_cannot_be_is_refused() -> None:
    budget(240).check(Span(4, 6))
    with pytest.raises(BadRequest, match="m has layers 0-5"):
        budget(9999).check(Span(4, 7))
    needed, held = size_of(PROCESS_BYTES + 360 * MB), size_of(PROCESS_BYTES + 240 * MB)
    with pytest.raises(BadRequest, match=f"layers 0-2 of m take {needed}, --memory is {held}: give more, or fewer"):
        budget(240).check(Span(0, 3))


@given(st.integers(0, 1000), st.sets(st.integers(0, 5), min_size=1))
def test_what_fits_has_its_cache(megabytes: int, layers: set[int]) -> None:
    """Spans that fitted one after the other leave enough cache for the tokens of each, taken together."""
    mine, held = budget(megabytes), list[Span]()
    for layer in sorted(layers):
        if mine.fits(Span(layer, layer + 1), held):
            held.append(Span(layer, layer + 1))
    if held:
        assert mine.cache_bytes(held, LOGS) >= len(held) * TOKENS * CACHE
