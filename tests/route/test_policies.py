"""manyhands.route: routes by measured costs, against trying all; filters, greedy, spreading, stickiness."""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from manyhands.core import ModelId, NodeAddr, NodeId, Span, SpanInfo, SpanLoad, check_cover
from manyhands.errors import ShardUnavailable
from manyhands.route.cost import Leg, SpanCost, queue_s, token_s
from manyhands.route.offer import Offer, Policy, Rules, Terms, pair
from manyhands.route.search import CLASS_WORTH, HYSTERESIS, NEAR, cover, find_route, next_hop

ME = NodeId("me")
HIDDEN = 64
MS = 0.001


def offer(name: str, start: int, end: int, layer_s: float = MS, **other: Any) -> Offer:
    """A span on the node `name`; `other` are fields of SpanInfo, SpanLoad or Offer."""
    info = SpanInfo(ModelId("1" * 64), "test", Span(start, end), 16, "bf16", "x", HIDDEN, 1024, False, 1000, 4)
    built = Offer(NodeAddr(name, 1), NodeId(name), name, info, SpanLoad(layer_s=layer_s))
    for key, value in other.items():
        if hasattr(info, key):
            built = replace(built, info=replace(built.info, **{key: value}))
        elif hasattr(built.load, key):
            built = replace(built, load=replace(built.load, **{key: value}))
        else:
            built = replace(built, **{key: value})
    return built


def rtts(**ms: float) -> dict[tuple[NodeId, NodeId], float]:
    """`me_a=3`: 3 ms between me and a."""
    return {pair(*map(NodeId, key.split("_"))): value * MS for key, value in ms.items()}


def shown(route: Sequence[Offer]) -> str:
    return " ".join(f"{o.name}:{o.info.span}" for o in route)


# -- latency ------------------------------------------------------------------------------------------------------------


def test_a_near_pair_beats_a_far_node_that_holds_all() -> None:
    """What fewest hops gets wrong: 80 ms of round trip cost more than a second hop on the LAN."""
    offers = [offer("far", 0, 12), offer("a", 0, 6), offer("b", 6, 12)]
    near = rtts(me_far=80, me_a=1, me_b=1, a_b=1)
    assert shown(find_route(offers, 12, terms=Terms(origin=ME, rtts=near))) == "a:0-5 b:6-11"
    assert shown(find_route(offers, 12, terms=Terms(origin=ME, rtts=rtts(me_far=1, me_a=1, me_b=1)))) == "far:0-11"


def test_the_closing_leg_counts() -> None:
    """Two second hops alike but for the way back to the origin."""
    offers = [offer("a", 0, 6), offer("b", 6, 12), offer("c", 6, 12)]
    ways = rtts(me_a=5, a_b=5, a_c=6, me_b=40, me_c=5)
    assert shown(find_route(offers, 12, terms=Terms(origin=ME, rtts=ways))) == "a:0-5 c:6-11"


def test_a_slow_uplink_counts_where_it_sends() -> None:
    """128 bytes a token at 12.8 kB/s are 10 ms on every leg out of b."""
    offers = [offer("a", 0, 12, 2 * MS), offer("b", 0, 12, 1.5 * MS, uplink_Bps=12_800.0)]
    assert shown(find_route(offers, 12)) == "a:0-11"
    assert shown(find_route([offers[0], replace(offers[1], uplink_Bps=math.inf)], 12)) == "b:0-11"


def test_a_queue_counts() -> None:
    offers = [offer("a", 0, 12, 1 * MS, queue=1, row_s=0.1 * MS), offer("b", 0, 12, 2 * MS)]
    assert shown(find_route(offers, 12)) == "b:0-11"
    assert shown(find_route([offer("a", 0, 12, 1 * MS), offers[1]], 12)) == "a:0-11"


def test_the_cut_between_overlapping_spans_gives_layers_to_the_faster() -> None:
    offers = [offer("a", 0, 10, 1 * MS), offer("b", 4, 16, 3 * MS)]
    assert shown(find_route(offers, 16)) == "a:0-9 b:10-15"
    assert shown(find_route([offer("a", 0, 10, 3 * MS), offer("b", 4, 16, 1 * MS)], 16)) == "a:0-3 b:4-15"


def test_a_new_node_is_tried() -> None:
    """Unmeasured counts as fast as the fastest: it beats the slow, and loses to none by more than a tie."""
    assert shown(find_route([offer("a", 0, 12, 2 * MS), offer("new", 0, 12, 0, free_tokens=9999)], 12)) == "new:0-11"


def test_figures_that_cannot_be_count_as_not_measured() -> None:
    """Impossible figures of a record neither win every request nor break the search."""
    good = offer("good", 0, 12)
    for layer_s, queue, row_s, uplink in [(math.nan, 0, 0, 1.0), (-1, -5, -1, -1), (math.inf, 1, math.inf, math.nan)]:
        bad = offer("bad", 0, 12, layer_s, queue=queue, row_s=row_s, uplink_Bps=uplink, free_tokens=1)
        assert shown(find_route([bad, good], 12)) == "good:0-11"
        assert shown(find_route([bad], 12)) == "bad:0-11"
    odd = {pair(ME, NodeId("good")): math.nan, pair(ME, NodeId("x")): -1.0}
    assert shown(find_route([good], 12, terms=Terms(origin=ME, rtts=odd))) == "good:0-11"


def test_where_no_round_trip_is_known_those_on_the_lan_are_near() -> None:
    """HN-23, and else as far apart as the farther of two is from the origin."""
    offers = [offer("a", 0, 12), offer("b", 0, 12, 1.1 * MS, is_lan=True)]
    assert shown(find_route(offers, 12, terms=Terms(origin=ME))) == "b:0-11"
    halves = [offer("a", 0, 6), offer("b", 0, 6), offer("c", 6, 12)]
    assert shown(find_route(halves, 12, terms=Terms(origin=ME, rtts=rtts(me_a=90, me_b=2, me_c=2)))) == "b:0-5 c:6-11"


def test_between_other_ends_than_the_origin() -> None:
    """A repair covers a lost run: its ends are the neighbours of the run."""
    offers = [offer("a", 4, 8), offer("b", 4, 8)]
    ways = rtts(me_a=1, me_b=50, p_a=50, a_s=50, p_b=1, b_s=1)
    assert shown(cover(offers, Span(4, 8), Terms(origin=ME, rtts=ways))) == "a:4-7"
    assert shown(cover(offers, Span(4, 8), Terms(origin=ME, rtts=ways), (NodeId("p"), NodeId("s")))) == "b:4-7"


LAYERS = 5
NODES = "abcd"
COSTS = st.integers(0, 30)  # ms


@st.composite
def swarms(draw: st.DrawFn) -> tuple[list[Offer], Terms]:
    """Up to 5 spans on 4 nodes, with any round trips, uplinks and loads."""
    offers: list[Offer] = []
    for _ in range(draw(st.integers(1, 5))):
        start = draw(st.integers(0, LAYERS - 1))
        end = draw(st.integers(start + 1, LAYERS))
        one = offer(
            draw(st.sampled_from(NODES)),
            start,
            end,
            draw(st.integers(1, 30)) * MS,
            queue=draw(st.integers(0, 2)),
            row_s=draw(st.integers(1, 5)) * MS,
            uplink_Bps=10_000.0,
        )
        if (one.node, one.info.span) not in {(o.node, o.info.span) for o in offers}:  # one record for node and span
            offers.append(one)
    ways = {pair(a, b): draw(COSTS) * MS for a in map(NodeId, ("me", *NODES)) for b in map(NodeId, NODES) if a != b}
    return offers, Terms(origin=ME, rtts=ways, uplink_Bps=50_000.0)


def seconds(route: Sequence[Offer], full: Sequence[Offer], terms: Terms) -> float:
    """What route.cost says of a route, whose hops are parts of spans in `full`."""

    def waits(hop: Offer) -> float:
        whole = [o for o in full if o.node == hop.node and o.info.span.covers(hop.info.span)]
        return min(queue_s(o.load, o.load.layer_s, len(o.info.span)) for o in whole if o.load == hop.load)

    nodes = [terms.origin, *(o.node for o in route), terms.origin]
    uplinks = [terms.uplink_Bps, *(o.uplink_Bps for o in route)]
    legs = [
        Leg(0 if a == b else terms.rtts[pair(a, b)], up) for a, b, up in zip(nodes, nodes[1:], uplinks, strict=False)
    ]
    hops = [(len(o.info.span), SpanCost(o.load.layer_s, waits(o))) for o in route]
    return token_s(hops, legs, 2 * HIDDEN, 0)


def every(offers: Sequence[Offer], at: int = 0) -> Iterator[tuple[Offer, ...]]:
    """Every chain from layer `at`, cut anywhere; no span takes over from itself."""
    if at == LAYERS:
        yield ()
        return
    for o in offers:
        if o.info.span.start <= at:
            for end in range(at + 1, o.info.span.end + 1):
                for rest in every(offers, end):
                    yield (o.part(Span(at, end)), *rest)


@settings(max_examples=60, deadline=None)
@given(swarms(), st.integers(0, 1000))
def test_no_route_is_cheaper(swarm: tuple[list[Offer], Terms], seed: int) -> None:
    """Against trying every chain with every cut; whatever the order of the offers, the route is the same."""
    offers, terms = swarm
    ways = list(every(offers))
    if not ways:
        with pytest.raises(ShardUnavailable, match="no node holds layers"):
            find_route(offers, LAYERS, terms=terms)
        return
    route = find_route(offers, LAYERS, terms=terms)
    check_cover([o.info.span for o in route], LAYERS)
    best = min(seconds(way, offers, terms) for way in ways)
    assert seconds(route, offers, terms) == pytest.approx(best, abs=1e-7)
    shuffled = list(offers)
    Random(seed).shuffle(shuffled)
    assert find_route(shuffled, LAYERS, terms=terms) == route


@settings(max_examples=60, deadline=None)
@given(swarms(), st.binary(min_size=1, max_size=80))
def test_a_spread_route_is_near_the_cheapest(swarm: tuple[list[Offer], Terms], key: bytes) -> None:
    """For every key, and always the same for one key."""
    offers, terms = swarm
    ways = list(every(offers))
    if ways:
        keyed = replace(terms, key=key)
        route = find_route(offers, LAYERS, terms=keyed)
        best = min(seconds(way, offers, terms) for way in ways)
        assert seconds(route, offers, terms) <= best * (1 + NEAR) + 1e-7
        assert find_route(offers[::-1], LAYERS, terms=keyed) == route


@settings(max_examples=60, deadline=None)
@given(swarms(), st.sets(st.sampled_from(NODES)), st.sampled_from(["latency", "greedy"]), st.binary(max_size=4))
def test_who_is_not_admitted_is_never_used(
    swarm: tuple[list[Offer], Terms], banned: set[str], policy: Policy, key: bytes
) -> None:
    """Trust and scope come first: an error sooner than a node that was refused."""
    offers, terms = swarm
    terms = replace(terms, admits=lambda o: o.name not in banned, rules=Rules(policy), key=key, current=tuple(offers))
    try:
        route = find_route(offers, LAYERS, terms=terms)
    except ShardUnavailable:
        held = {n for o in offers if o.name not in banned for n in range(o.info.span.start, o.info.span.end)}
        assert held != set(range(LAYERS))
    else:
        check_cover([o.info.span for o in route], LAYERS)
        assert not banned & {o.name for o in route}


# -- who may take part --------------------------------------------------------------------------------------------------


def test_layers_held_only_by_those_not_admitted_are_named() -> None:
    terms = Terms(admits=lambda o: o.name != "b")
    with pytest.raises(ShardUnavailable, match=r"no node holds layers 6-11 of 12 among those .* admit \(1 spans"):
        find_route([offer("a", 0, 6), offer("b", 6, 12)], 12, terms=terms)


@pytest.mark.parametrize("policy", ["latency", "greedy"])
def test_a_full_hop_is_no_candidate(policy: Policy) -> None:
    """HN-32: another is picked rather than a queue joined. If only full ones are left, they are asked: records are old news."""
    terms = Terms(rules=Rules(policy), num_tokens=100)
    small, crowded = offer("a", 6, 12, free_tokens=99), offer("b", 6, 12, sessions=4)
    slow = offer("c", 6, 12, 50 * MS, queue=9)
    assert shown(find_route([offer("o", 0, 6), small, crowded, slow], 12, terms=terms)) == "o:0-5 c:6-11"
    assert shown(find_route([offer("o", 0, 6), crowded], 12, terms=terms)) == "o:0-5 b:6-11"
    assert shown(find_route([offer("o", 0, 6), small, crowded], 12, terms=terms)) in ("o:0-5 a:6-11", "o:0-5 b:6-11")
    part, whole = offer("d", 6, 9), offer("e", 0, 12, sessions=4)
    assert shown(find_route([offer("o", 0, 6), part, whole], 12, terms=terms)) == "o:0-5 d:6-8 e:9-11"


def test_the_hops_of_the_present_route_have_their_lease() -> None:
    full = offer("a", 0, 12, free_tokens=0, sessions=4)
    assert find_route([full], 12, terms=Terms(num_tokens=100, current=(full,))) == (full,)


def test_one_arithmetic_class_is_worth_a_little() -> None:
    """Exactness for CLASS_WORTH of the time, no more."""
    mixed = [offer("a", 0, 6, 1 * MS, arithmetic="x"), offer("b", 6, 12, 1 * MS, arithmetic="y")]
    least = 12 * MS * (1 + CLASS_WORTH)
    dear = offer("c", 0, 12, 1.5 * least / 12, arithmetic="y")
    ways = Terms(origin=ME, rtts=rtts(me_a=0, me_b=0, me_c=0, a_b=0))
    assert shown(find_route([*mixed, dear], 12, terms=ways)) == "a:0-5 b:6-11"
    cheap = offer("c", 0, 12, 0.99 * least / 12, arithmetic="y")
    assert shown(find_route([*mixed, cheap], 12, terms=ways)) == "c:0-11"
    assert shown(find_route([*mixed, cheap], 12, terms=replace(ways, key=b"k"))) == "c:0-11"


# -- greedy, and hop by hop ----------------------------------------------------------------------------------------------


def greedy(offers: Sequence[Offer], num_layers: int = 16, **ms: float) -> str:
    return shown(find_route(offers, num_layers, terms=Terms(Rules("greedy"), ME, rtts=rtts(**ms))))


def test_hn_44_by_furthest_reach() -> None:
    """HN-44 with HN-22's rule alone could take 4-11 at layer 8; the furthest reach gives 0-7 and 8-15."""
    assert greedy([offer("b", 4, 12), offer("c", 8, 16), offer("a", 0, 8)]) == "a:0-7 c:8-15"


def test_hn_22_the_lowest_queue_comes_first() -> None:
    """Also where it reaches less far."""
    offers = [offer("a", 0, 16, queue=2), offer("b", 0, 8, queue=1), offer("c", 8, 16, queue=1)]
    assert greedy(offers) == "b:0-7 c:8-15"


def test_the_nearest_then_the_lowest_id() -> None:
    """HN-23's hop weight is the round trip, the LAN's where it is not measured."""
    offers = [offer("a", 0, 16), offer("b", 0, 16)]
    assert greedy(offers, me_a=20, me_b=10) == "b:0-15"
    assert greedy([offers[0], replace(offers[1], is_lan=True)]) == "b:0-15"
    assert greedy(offers[::-1]) == "a:0-15"


def test_greedy_figures_that_cannot_be_count_as_not_measured() -> None:
    """A queue below nothing does not win, nor a round trip that is no number."""
    offers = [offer("a", 0, 16), offer("b", 0, 16, queue=-9)]
    assert greedy(offers, me_a=10, me_b=20) == "a:0-15"
    assert greedy(offers, me_a=10, me_b=math.nan) == "a:0-15"


def test_hn_24_the_origin_is_not_its_own_first_hop() -> None:
    """Unless no other is."""
    own, other = offer("me", 0, 16), offer("a", 0, 16, queue=3)
    assert greedy([own, other], me_a=50) == "a:0-15"
    assert greedy([own]) == "me:0-15"
    assert greedy([own, offer("a", 0, 8)]) == "a:0-7 me:8-15"


def test_in_10_every_node_chooses_the_next_by_itself() -> None:
    """Seen from a, b is nearer; seen from c it is not. The part ends where the model does."""
    offers = [offer("b", 4, 12), offer("d", 4, 12)]
    ways = Terms(rtts=rtts(a_b=1, a_d=9, c_b=9, c_d=1))
    assert shown([next_hop(offers, 6, 10, NodeId("a"), ways)]) == "b:6-9"
    assert shown([next_hop(offers, 6, 10, NodeId("c"), ways)]) == "d:6-9"
    with pytest.raises(ShardUnavailable, match="no node holds layer 12"):
        next_hop(offers, 12, 16, NodeId("a"), ways)


# -- spreading, staying --------------------------------------------------------------------------------------------------


def test_sessions_spread_over_near_equals_and_no_further() -> None:
    """Three replicas within NEAR share 600 sessions about evenly; one that is twice as slow gets none."""
    offers = [offer(n, 0, 12) for n in "abc"] + [offer("slow", 0, 12, 2 * MS)]
    taken = Counter(find_route(offers, 12, terms=Terms(key=b"%d" % i))[0].name for i in range(600))
    assert set(taken) == {"a", "b", "c"}
    assert min(taken.values()) > 140


def test_two_choices_avoid_the_busy_one_of_equals() -> None:
    """With old news of load, a third of the sessions would still be sent to the fullest; two draws leave it 1 in 9."""
    offers = [offer("a", 0, 12), offer("b", 0, 12), offer("full", 0, 12, sessions=3)]
    taken = Counter(find_route(offers, 12, terms=Terms(key=b"%d" % i))[0].name for i in range(600))
    assert 0 < taken["full"] < 120


def test_a_session_stays_unless_another_route_is_much_better() -> None:
    """And takes the figures of today along."""
    old = (offer("a", 0, 12, 1 * MS),)
    ways = Terms(origin=ME, rtts=rtts(me_a=0, me_b=0), current=old, key=b"k")
    slower = offer("a", 0, 12, 10 * MS)
    assert find_route([slower, offer("b", 0, 12, 10 * MS * (1 - HYSTERESIS / 2))], 12, terms=ways) == (slower,)
    assert shown(find_route([slower, offer("b", 0, 12, 10 * MS * (1 - 2 * HYSTERESIS))], 12, terms=ways)) == "b:0-11"
    assert shown(find_route([offer("b", 0, 12, 10 * MS)], 12, terms=ways)) == "b:0-11"
    part = (slower.part(Span(0, 6)), offer("b", 6, 12))
    again = find_route([slower, offer("b", 0, 12, 11 * MS)], 12, terms=replace(ways, current=part))
    assert shown(again) == "a:0-5 b:6-11"


def test_a_spare_takes_the_hole_and_no_more_by_either_policy() -> None:
    """Also hop by hop, where it reaches furthest: it ends where another node begins."""
    spare, ends = offer("s", 0, 12, is_spare=True), [offer("a", 0, 4), offer("c", 8, 12)]
    for policy in ("latency", "greedy"):
        terms = Terms(Rules(policy), ME)
        assert shown(find_route([spare, *ends], 12, terms=terms)) == "a:0-3 s:4-7 c:8-11"
    full = offer("c", 8, 12, free_tokens=1)
    terms = Terms(Rules("greedy"), ME, num_tokens=100)
    assert shown(find_route([spare, ends[0], full], 12, terms=terms)) == "a:0-3 s:4-11", "where the other has no room"
