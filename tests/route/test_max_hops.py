"""Routes of at most so many hops (HN-41): against trying all, by either policy; a limit that cannot be met is named."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from manyhands.config import MAX_HOPS, RequestConfig
from manyhands.core import Span, check_cover
from manyhands.errors import BadRequest, ShardUnavailable
from manyhands.route.offer import Offer, Policy, Rules, Terms
from manyhands.route.search import cover, find_route
from tests.route.test_policies import LAYERS, ME, every, offer, rtts, seconds, shown, swarms


@settings(max_examples=60, deadline=None)
@given(swarms(), st.integers(1, LAYERS - 1))
def test_no_route_of_so_many_hops_is_cheaper(swarm: tuple[list[Offer], Terms], most: int) -> None:
    offers, terms = swarm
    terms = replace(terms, rules=Rules(max_hops=most))
    ways = [way for way in every(offers) if len(way) <= most]
    if not ways:
        with pytest.raises(ShardUnavailable, match=r"no node holds layers|max_shards_per_request is"):
            find_route(offers, LAYERS, terms=terms)
        return
    route = find_route(offers, LAYERS, terms=terms)
    check_cover([o.info.span for o in route], LAYERS)
    assert len(route) <= most
    best = min(seconds(way, offers, terms) for way in ways)
    assert seconds(route, offers, terms) == pytest.approx(best, abs=1e-7)
    spread = find_route(offers, LAYERS, terms=replace(terms, key=b"key"))
    assert len(spread) <= most


NEAR = [offer("a", 0, 4), offer("b", 4, 8), offer("c", 8, 12)]
FAR = [offer("d", 0, 6), offer("e", 6, 12)]
WAYS = rtts(me_a=1, me_b=1, me_c=1, a_b=1, b_c=1, me_d=90, me_e=90, d_e=90)


def test_a_slower_route_of_fewer_hops_is_taken_where_that_is_asked() -> None:
    def route(most: int) -> str:
        return shown(find_route([*NEAR, *FAR], 12, terms=Terms(Rules(max_hops=most), ME, rtts=WAYS)))

    assert route(MAX_HOPS) == route(3) == "a:0-3 b:4-7 c:8-11"
    assert route(2) == "d:0-5 e:6-11"


@pytest.mark.parametrize("policy", ["latency", "greedy"])
def test_a_limit_that_cannot_be_met_is_named_with_what_would_do(policy: Policy) -> None:
    terms = Terms(Rules(policy, max_hops=1), ME)
    says = "max_shards_per_request is 1, and no route over these nodes has fewer than 2 hops: raise it to 2"
    with pytest.raises(ShardUnavailable, match=says):
        find_route([*NEAR, *FAR], 12, terms=terms)


def test_greedy_keeps_it_too() -> None:
    """Queues lead over three hops; two are the most."""
    busy = [offer("d", 0, 6, queue=3), offer("e", 6, 12, queue=3)]
    assert shown(find_route([*NEAR, *busy], 12, terms=Terms(Rules("greedy"), ME))) == "a:0-3 b:4-7 c:8-11"
    assert shown(find_route([*NEAR, *busy], 12, terms=Terms(Rules("greedy", max_hops=2), ME))) == "d:0-5 e:6-11"


def test_a_longer_route_of_before_is_not_kept() -> None:
    current = find_route(NEAR, 12)
    kept = Terms(Rules(sticky=True, max_hops=2), ME, rtts=WAYS, current=current)
    assert shown(find_route([*NEAR, *FAR], 12, terms=kept)) == "d:0-5 e:6-11"


def test_full_nodes_and_those_that_would_load_are_asked_where_the_others_have_too_many_hops() -> None:
    """A full node may have room by now; it says Busy itself (HN-32)."""
    full = [offer("d", 0, 6, free_tokens=1), offer("e", 6, 12)]
    terms = Terms(Rules(max_hops=2), ME, num_tokens=100)
    assert shown(find_route([*NEAR, *full], 12, terms=terms)) == "d:0-5 e:6-11"


def test_a_spare_comes_last_within_the_limit_too() -> None:
    spare = offer("s", 0, 12, is_spare=True)
    assert shown(find_route([*FAR, spare], 12, terms=Terms(Rules(max_hops=2), ME))) == "d:0-5 e:6-11"
    assert shown(find_route([*FAR, spare], 12, terms=Terms(Rules(max_hops=1), ME))) == "s:0-11"


def test_a_run_between_two_nodes_has_at_most_so_many() -> None:
    thirds = [offer("p", 4, 6), offer("q", 6, 8)]
    assert cover(thirds, Span(4, 8), Terms(Rules(max_hops=1), ME)) == ()
    assert shown(cover(thirds, Span(4, 8), Terms(Rules(max_hops=2), ME))) == "p:4-5 q:6-7"


def test_numbers_that_are_no_limit_are_refused() -> None:
    for most in (0, 256):
        with pytest.raises(BadRequest, match=f"max_shards_per_request is {most}; it must be from 1 to 255"):
            RequestConfig(max_shards_per_request=most)
        with pytest.raises(BadRequest, match=f"max_shards_per_request is {most}"):
            Rules(max_hops=most)
    assert Rules.of(RequestConfig(max_shards_per_request=16)).max_hops == 16
