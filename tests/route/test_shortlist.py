"""manyhands.route.shortlist, and what a search by the price of a hop gives up: against the same searches over all offers."""

from dataclasses import replace
from itertools import pairwise
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from manyhands.core import NodeId, Span, check_cover
from manyhands.route import chain
from manyhands.route.chain import shortest, within
from manyhands.route.classes import unheld
from manyhands.route.offer import Offer, Rules, Terms, pair
from manyhands.route.search import find_route
from manyhands.route.shortlist import LEAST_PICKED, MOST_OF_NODE, MOST_OFFERS, shortlist
from manyhands.route.space import Space
from tests.route.test_policies import LAYERS, ME, MS, offer, shown, swarms

LONG = 80


def crowd(random: Random, count: int, longest: int = LONG, **other: Any) -> list[Offer]:
    """`count` spans of a model of LONG layers on nodes of their own, which cover it together."""
    spans = [(at, min(at + longest, LONG)) for at in range(0, LONG, longest)]
    while len(spans) < count:
        length = random.randint(1, longest)
        start = random.randint(0, LONG - length)
        spans.append((start, start + length))
    speeds = {"layer_s": lambda: random.uniform(1, 6) * MS, "queue": lambda: random.choice((0, 0, 0, 1, 2)), **other}
    return [
        offer(f"n{i}", start, end, **{name: draw() for name, draw in speeds.items()})
        for i, (start, end) in enumerate(spans)
    ]


def far(random: Random, offers: list[Offer]) -> Terms:
    """Nodes in a plane, up to 60 ms apart."""
    at = {node: complex(random.random(), random.random()) for node in (ME, *(o.node for o in offers))}
    ways = {pair(a, b): 5e-4 + 0.04 * abs(at[a] - at[b]) for a in at for b in at if a < b}
    return Terms(origin=ME, rtts=ways, uplink_Bps=1e7)


def cost(route: tuple[Offer, ...], offers: list[Offer], terms: Terms) -> int:
    space = Space.of(offers, terms)
    found = space.find(route)
    assert found is not None
    return space.spans.cost(found)


@given(swarms())
def test_few_offers_are_all_compared(swarm: tuple[list[Offer], Terms]) -> None:
    offers, terms = swarm
    assert shortlist(offers, Span(0, LAYERS), terms) == offers


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10_000), st.sampled_from([1, 2, 7, 40]), st.sampled_from(["latency", "greedy"]))
def test_of_many_a_bounded_number_that_covers_in_as_few_hops(seed: int, longest: int, policy: Any) -> None:
    random = Random(seed)
    offers, run = crowd(random, 700, longest), Span(0, LONG)
    terms = Terms(Rules(policy), ME)
    some = shortlist(offers, run, terms)
    fewest = len(shortest([o.info.span for o in offers], run))
    assert len(some) <= max(MOST_OFFERS, fewest + LEAST_PICKED)
    assert not unheld([o.info.span for o in some], LONG)
    assert len(shortest([o.info.span for o in some], run)) == fewest
    random.shuffle(offers)
    assert shortlist(offers, run, terms) == some


@pytest.mark.parametrize("seed", range(4))
def test_a_route_over_the_shortlist_is_near_the_cheapest_of_all(seed: int) -> None:
    random = Random(seed)
    offers = crowd(random, 250, 40)
    terms = far(random, offers)
    best = Space.of(offers, terms).cheapest(Span(0, LONG))
    assert best is not None
    found = find_route(offers, LONG, terms=terms)
    assert cost(found, offers, terms) <= 1.10 * Space.of(offers, terms).spans.cost(best)


def test_the_present_route_stays_on_it() -> None:
    random = Random(1)
    offers = crowd(random, 400, 40)
    slow = [offer("s0", 30, 40, 50 * MS), offer("s1", 40, 50, 50 * MS)]
    some = shortlist([*offers, *slow], Span(0, LONG), Terms(origin=ME, current=tuple(slow)))
    assert {"s0", "s1"} <= {o.name for o in some}
    assert not {"s0", "s1"} & {o.name for o in shortlist([*offers, *slow], Span(0, LONG), Terms(origin=ME))}


def test_what_loads_is_full_or_a_spare_is_taken_where_nothing_else_holds_a_layer() -> None:
    """As without a shortlist: the gap, and no more of them."""
    fast = {"layer_s": lambda: MS}
    offers = [o for o in crowd(Random(2), 600, 20, **fast) if o.info.span.end <= 60]
    offers += [offer(f"gap{i}", 0, LONG, 0.01 * MS, is_spare=True) for i in range(200)]
    route = find_route(offers, LONG, terms=Terms(origin=ME))
    assert sum(len(o.info.span) for o in route if o.info.is_spare) == 20
    full = [replace(o, info=replace(o.info, is_spare=False, free_tokens=0)) for o in offers if o.info.is_spare]
    rest = [o for o in offers if not o.info.is_spare]
    route = find_route([*rest, *full], LONG, terms=Terms(origin=ME, num_tokens=100))
    assert sum(len(o.info.span) for o in route if not o.info.free_tokens) == 20


def test_spans_of_one_node_leave_those_of_others_their_place() -> None:
    """500 offers of a node that states impossible speeds, 90 honest ones."""
    honest = crowd(Random(3), 90, 40)
    greedy = [replace(o, node=NodeId("x"), name="x") for o in crowd(Random(4), 500, 40, layer_s=lambda: 1e-6 * MS)]
    some = shortlist([*greedy, *honest], Span(0, LONG), Terms(origin=ME))
    chain_of = shortest([o.info.span for o in [*greedy, *honest]], Span(0, LONG))
    assert sum(o.name == "x" for o in some) <= MOST_OF_NODE + len(chain_of)
    assert sum(o.name != "x" for o in some) >= MOST_OFFERS // 2


# -- at a price -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("longest", [8, 40])
def test_a_chain_at_a_price_is_near_the_cheapest_of_so_many_hops(
    seed: int, longest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Thin spans are fast and wide ones slow, so that every limit binds."""
    random = Random(seed)
    wide = crowd(random, 40, longest)
    thin = [replace(o, node=NodeId(f"t{i}")) for i, o in enumerate(crowd(random, 40, 2, layer_s=lambda: 0.1 * MS))]
    space = Space.of([*wide, *thin], far(random, [*wide, *thin]))
    run = Span(0, LONG)
    free, fewest = space.cheapest(run), len(shortest([o.info.span for o in space.offers], run))
    assert free is not None
    for most in range(fewest, len(free), max(1, (len(free) - fewest) // 3)):
        monkeypatch.setattr(chain, "EXACT", 1 << 60)
        exact = within(space.spans, run, most).chain
        monkeypatch.setattr(chain, "EXACT", 0)
        found, price = within(space.spans, run, most)
        assert exact is not None and found is not None and price > 0
        check_cover([part.span for part in found], LONG)
        assert len(found) <= most
        assert space.spans.cost(found) <= 1.25 * space.spans.cost(exact)


@settings(max_examples=40, deadline=None)
@given(swarms(), st.integers(1, LAYERS - 1))
def test_a_limit_that_can_be_met_is_met_at_a_price(swarm: tuple[list[Offer], Terms], most: int) -> None:
    """Spares too, which cost more than all else: where they alone allow the limit, they are used."""
    offers, terms = swarm
    offers = [replace(o, info=replace(o.info, is_spare=i % 2 == 0)) for i, o in enumerate(offers)]
    run = Span(0, LAYERS)
    if unheld([o.info.span for o in offers], LAYERS):
        return
    space = Space.of(offers, terms)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chain, "EXACT", 0)
        found = within(space.spans, run, most).chain
    fewest = len(shortest([o.info.span for o in offers], run))
    assert (found is None) == (fewest > most)
    assert found is None or len(found) <= most


def test_long_runs_are_cut_where_spans_begin_or_end() -> None:
    """4,096 layers take no more steps than spans have ends."""
    layers = 4096
    ends = [0, 100, 1500, 1501, 4000, layers]
    offers = [offer(f"n{i}", a, b, MS, num_layers=layers) for i, (a, b) in enumerate(pairwise(ends))]
    assert shown(find_route(offers, layers)) == " ".join(f"{o.name}:{o.info.span}" for o in offers)
    assert len(chain._cuts(Space.of(offers, Terms()).spans, Span(0, layers))) == len(ends)
