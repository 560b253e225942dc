"""manyhands.route.cost: seconds of a token and of a first token, against numbers worked out by hand."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manyhands.core import SpanLoad
from manyhands.errors import BadRequest
from manyhands.route.cost import Leg, SpanCost, prefill_s, queue_s, token_s

MS = 0.001


def test_a_token_is_ends_and_layers_and_waits_and_all_legs() -> None:
    """Mesh's rule with the parts named: 2 + (4*1 + 3 + 0.5) + (8*2 + 0.5) + 5 + 10 + 5 ms of rtt, and 1 kB at 1 MB/s."""
    hops = [(4, SpanCost(1 * MS, 3 * MS, 0.5 * MS)), (8, SpanCost(2 * MS, 0, 0.5 * MS))]
    legs = [Leg(10 * MS), Leg(20 * MS, 1e6), Leg(10 * MS)]
    assert token_s(hops, legs, 1000, 2 * MS) == pytest.approx(47 * MS)


def test_prefill_is_paced_by_the_slowest_stage() -> None:
    """Three chunks over two hops of 10 and 30 ms a chunk: 10 + 3 * 30. A hop on its own: 3 * 10."""
    fast, slow = (10, SpanCost(0, 0, 0, row_s=1e-4)), (10, SpanCost(0, 0, 0, row_s=3e-4))
    free = [Leg(0)] * 3
    assert prefill_s([fast, slow], free, 30, 1000, 10, 0) == pytest.approx(100 * MS)
    assert prefill_s([slow, fast], free, 30, 1000, 10, 0) == pytest.approx(100 * MS)
    assert prefill_s([fast], free[:2], 30, 1000, 10, 0) == pytest.approx(30 * MS)


def test_prefill_pays_for_bytes_and_round_trips() -> None:
    """Uplink of 100 kB/s: 30 rows of 1 kB are 300 ms whatever the chunks, the last row back 10 ms, round trips once."""
    cost = (1, SpanCost(0, 0, 0, 0))
    legs = [Leg(40 * MS, 1e5), Leg(60 * MS, 1e5)]
    for chunk in (1, 7, 30, 100):
        assert prefill_s([cost], legs, 30, 1000, chunk, 5 * MS) == pytest.approx((300 + 10 + 50 + 5) * MS)


def test_a_chunk_costs_at_least_a_decode_step() -> None:
    assert SpanCost(1 * MS, 0, 0, row_s=1e-5).chunk_s(4, 1) == pytest.approx(4 * MS)
    assert SpanCost(1 * MS, 9, 0, row_s=1e-5).chunk_s(4, 200) == pytest.approx(8 * MS)
    assert SpanCost(1 * MS, 9, 0, row_s=1e-5, pass_s=3 * MS).chunk_s(4, 200) == pytest.approx(20 * MS)


PARTS = st.tuples(st.integers(1, 40), st.floats(0, 0.1), st.floats(0, 1), st.floats(0, 1e-3), st.floats(0, 0.2))


@given(st.lists(PARTS, min_size=1, max_size=5), st.integers(1, 300), st.integers(1, 300))
def test_prefill_lies_between_its_bounds(
    parts: list[tuple[int, float, float, float, float]], n: int, chunk: int
) -> None:
    """Never below the busiest hop's work, never above everything one after the other; one chunk is the latter."""
    hops = [(layers, SpanCost(layer, queue, 0, row)) for layers, layer, queue, row, _ in parts]
    legs = [Leg(rtt) for *_, rtt in parts] + [Leg(0)]
    took = prefill_s(hops, legs, n, 1, chunk, 0)
    rows = [min(chunk, n - a) for a in range(0, n, chunk)]
    works = [math.fsum(cost.chunk_s(layers, r) for r in rows) for layers, cost in hops]
    once = math.fsum(cost.queue_s for _, cost in hops) + math.fsum(leg.rtt_s / 2 for leg in legs)
    assert max(works) + once - 1e-9 <= took <= math.fsum(works) + once + 1e-9
    if chunk >= n:
        assert took == pytest.approx(math.fsum(works) + once)


def test_a_queue_is_the_running_step_and_a_row_for_each_that_joins() -> None:
    assert queue_s(SpanLoad(queue=0, row_s=1), 1 * MS, 4) == 0
    assert queue_s(SpanLoad(queue=3, row_s=0.1 * MS), 1 * MS, 4) == pytest.approx(5.2 * MS)
    assert queue_s(SpanLoad(queue=3), 1 * MS, 4) == pytest.approx(16 * MS)  # a row was not measured


@pytest.mark.parametrize(("rtt", "uplink"), [(-1, 1), (math.nan, 1), (math.inf, 1), (0, 0), (0, -5), (0, math.nan)])
def test_a_leg_that_cannot_be_is_refused(rtt: float, uplink: float) -> None:
    """Figures come from peers' records: an impossible one must not turn into a free or an endless way."""
    with pytest.raises(BadRequest):
        Leg(rtt, uplink)


@pytest.mark.parametrize("field", ["layer_s", "queue_s", "overhead_s", "row_s"])
@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf])
def test_a_cost_that_cannot_be_is_refused(field: str, value: float) -> None:
    with pytest.raises(BadRequest, match=field):
        SpanCost(**{"layer_s": 1.0, field: value})


def test_hops_and_legs_must_fit() -> None:
    hop = (1, SpanCost(1))
    with pytest.raises(BadRequest, match="1 hops and 1 legs"):
        token_s([hop], [Leg(0)], 1, 0)
    with pytest.raises(BadRequest, match="0 hops"):
        prefill_s([], [Leg(0)], 1, 1, 1, 0)
    with pytest.raises(BadRequest, match="0 rows"):
        prefill_s([hop], [Leg(0)] * 2, 0, 1, 1, 0)
