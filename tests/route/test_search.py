"""manyhands.route.search: the chain of spans, and what is said where there is none."""

from dataclasses import replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manyhands.core import ModelId, NodeAddr, NodeId, Span, SpanInfo, check_cover
from manyhands.errors import ShardUnavailable, WeightsMismatch
from manyhands.route.search import Offer, find_route

ONE, OTHER = ModelId("1" * 64), ModelId("2" * 64)


def offer(name: str, start: int, end: int, free: int = 1000, model: ModelId = ONE) -> Offer:
    info = SpanInfo(
        model=model,
        model_name="test",
        span=Span(start, end),
        num_layers=12,
        precision="bf16",
        arithmetic="x",
        hidden_size=64,
        context_length=1024,
        has_ends=False,
        free_tokens=free,
        max_sessions=4,
    )
    return Offer(NodeAddr(name, 1), NodeId(name), name, info)


def names(offers: list[Offer], num_layers: int = 12) -> list[str]:
    return [o.name for o in find_route(offers, num_layers)]


def test_the_fewest_hops_win() -> None:
    """A hop costs a trip over the network: one node that holds all beats two that hold halves."""
    assert names([offer("a", 0, 6), offer("b", 6, 12), offer("c", 0, 12)]) == ["c"]
    assert names([offer("a", 0, 6), offer("b", 6, 12), offer("d", 0, 4), offer("e", 4, 8), offer("f", 8, 12)]) == [
        "a",
        "b",
    ]


def test_among_equals_the_most_free_cache_wins() -> None:
    """Load spreads over replicas."""
    assert names([offer("a", 0, 6, 10), offer("b", 0, 6, 90), offer("c", 6, 12, 50), offer("d", 6, 12, 70)]) == [
        "b",
        "d",
    ]


def test_spans_that_overlap_join_by_their_parts() -> None:
    """A node may serve any part of what it holds, so what both hold goes to one of them."""
    route = find_route([offer("a", 0, 7), offer("b", 6, 12)], 12)
    assert [(o.name, str(o.info.span)) for o in route] == [("a", "0-5"), ("b", "6-11")]


def test_hn_44_overlapping_shards() -> None:
    """HN-44: 16 layers held as 0-7, 4-11 and 8-15 are served by 0-7 and 8-15."""
    route = find_route([offer("b", 4, 12), offer("c", 8, 16), offer("a", 0, 8)], 16)
    assert [(o.name, str(o.info.span)) for o in route] == [("a", "0-7"), ("c", "8-15")]


def test_a_spare_serves_only_where_no_other_does() -> None:
    """Fewest layers on spares before fewest hops: where one is needed, it takes the hole and no more."""
    halves = [offer("a", 0, 6), offer("b", 6, 12)]
    spare = offer("s", 0, 12)
    spare = replace(spare, info=replace(spare.info, is_spare=True))
    assert names([spare, *halves]) == ["a", "b"]
    assert names([spare, halves[1]]) == ["s", "b"]
    thirds = [offer("a", 0, 4), offer("c", 8, 12)]
    assert names([spare, *thirds]) == ["a", "s", "c"]
    assert names([spare]) == ["s"]


@pytest.mark.parametrize(
    ("spans", "missing"),
    [
        ([(0, 6)], "6-11"),
        ([(6, 12)], "0-5"),
        ([(0, 4), (8, 10)], "4-7, 10-11"),
        ([(0, 5), (6, 12)], "5"),
        ([], "0-11"),
    ],
)
def test_missing_layers_are_named(spans: list[tuple[int, int]], missing: str) -> None:
    """As people count them: first and last layer of each gap."""
    with pytest.raises(ShardUnavailable, match=f"no node holds layers {missing} of 12"):
        find_route([offer(f"n{a}", a, b) for a, b in spans], 12)


def test_weights_are_never_mixed() -> None:
    """Two kinds that only together cover the model are an error that names who holds what."""
    with pytest.raises(WeightsMismatch, match=r"a 0-5: 111111111111 bf16; b 6-11: 222222222222 bf16"):
        find_route([offer("a", 0, 6), offer("b", 6, 12, model=OTHER)], 12)
    fp32 = offer("b", 6, 12)
    fp32 = replace(fp32, info=replace(fp32.info, precision="fp32"))
    with pytest.raises(WeightsMismatch):
        find_route([offer("a", 0, 6), fp32], 12)


def test_a_kind_that_covers_is_found_among_others_that_do_not() -> None:
    offers = [offer("a", 0, 6), offer("b", 0, 6, model=OTHER), offer("c", 6, 12, model=OTHER)]
    assert names(offers) == ["b", "c"]


SPANS = st.lists(st.tuples(st.integers(0, 11), st.integers(1, 12)).filter(lambda s: s[0] < s[1]), max_size=14)


def fewest(spans: list[tuple[int, int]], at: int = 0) -> int:
    """The least number of spans from layer `at` to 12, by trying all; 99 if there is no way."""
    return 0 if at == 12 else 1 + min((fewest(spans, b) for a, b in spans if a <= at < b), default=98)


@given(SPANS, st.integers(0, 1000))
def test_the_route_covers_the_model_with_as_few_hops_as_possible(spans: list[tuple[int, int]], seed: int) -> None:
    """Against an exhaustive search; the order in which nodes answered does not matter."""
    offers = [offer(f"n{i:02}", a, b, free=i) for i, (a, b) in enumerate(spans)]
    best = fewest(spans)
    if best >= 98:
        with pytest.raises(ShardUnavailable):
            find_route(offers, 12)
        return
    route = find_route(offers, 12)
    check_cover([o.info.span for o in route], 12)
    assert len(route) == best
    shuffled = list(offers)
    Random(seed).shuffle(shuffled)
    assert [o.info.span for o in find_route(shuffled, 12)] == [o.info.span for o in route] or best > 1
    assert sum(o.info.free_tokens for o in find_route(shuffled, 12)) == sum(o.info.free_tokens for o in route)
