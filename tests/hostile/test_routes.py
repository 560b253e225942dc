"""A peer's records times a client's wishes: what a request for a route costs the event loop.

Records are few bytes and a limit of hops is one number, and the search takes their product. The guards of CPU time are ten
times what was measured, and a tenth of what the searches took before they were bounded.
"""

import gc
import time
from collections.abc import Callable
from functools import partial
from random import Random

import pytest

from manyhands.config import MAX_HOPS
from manyhands.core import ModelId, Span, check_cover
from manyhands.errors import WeightsMismatch
from manyhands.origin.offers import shared
from manyhands.route.offer import Offer, Rules, Terms, pair
from manyhands.route.prefix import gain_s
from manyhands.route.search import cover, find_route
from tests.route.test_policies import ME, MS, offer
from tests.swarm.records import record_of

LAYERS = 126
GUARD_S = 0.3


def cpu_s(call: Callable[[], object]) -> float:
    """CPU seconds of a call, without a collection of what the tests before it left (80 ms of a large heap)."""
    gc.disable()
    began = time.thread_time()
    try:
        call()
        return time.thread_time() - began
    finally:
        gc.enable()


def thin_and_wide(count: int) -> list[Offer]:
    """Honest nodes of 8 layers, and a member's spans of one layer that state impossible speeds."""
    wide = [offer(f"w{i}", 8 * i, min(LAYERS, 8 * i + 8), 5 * MS) for i in range(16)]
    return [*wide, *(offer(f"t{i}", i % LAYERS, i % LAYERS + 1, 1e-5 * MS) for i in range(count))]


@pytest.mark.parametrize("most", [MAX_HOPS, 64, 32, 20, 16])
def test_no_limit_of_hops_makes_a_search_long(most: int) -> None:
    """528 offers took 1.73 s at a limit of 64."""
    offers, terms = thin_and_wide(512), Terms(Rules(max_hops=most), ME, key=b"key")
    route = find_route(offers, LAYERS, terms=terms)
    check_cover([o.info.span for o in route], LAYERS)
    assert len(route) <= most
    assert cpu_s(lambda: find_route(offers, LAYERS, terms=terms)) < GUARD_S


def test_a_repair_over_a_member_s_records_is_as_short() -> None:
    """With the limit of hops that is left of a request's, and then without."""
    offers = thin_and_wide(512)
    for most in (2, 9, MAX_HOPS):
        terms = Terms(Rules(max_hops=most), ME)
        found: list[Offer] = []
        assert (
            cpu_s(partial(lambda terms, found: found.extend(cover(offers, Span(16, 80), terms)), terms, found))
            < GUARD_S
        )
        assert bool(found) == (most > 2) and len(found) <= most


def test_records_of_all_layers_are_no_square_of_work() -> None:
    """4,000 offers that all hold all layers: a table of 16 million legs, once."""
    offers = [offer(f"n{i}", 0, LAYERS, (1 + i % 7) * MS) for i in range(4000)]
    assert cpu_s(lambda: find_route(offers, LAYERS, terms=Terms(origin=ME))) < GUARD_S
    assert cpu_s(lambda: gain_s(offers[:1], offers[1:2], offers, Terms(origin=ME), 100, 100)) < GUARD_S


def test_every_record_in_a_class_of_its_own_asks_for_no_search_of_its_own() -> None:
    """The cheapest chain mixes two classes, and each of 500 others covers the model alone."""
    cheap = [offer("a", 0, 63, 0.1 * MS, arithmetic="a"), offer("b", 63, LAYERS, 0.1 * MS, arithmetic="b")]
    alone = [offer(f"n{i}", 0, LAYERS, MS, arithmetic=f"class {i}") for i in range(500)]
    found: list[Offer] = []
    terms = Terms(Rules(mix_classes=True), ME)
    assert cpu_s(lambda: found.extend(find_route([*cheap, *alone], LAYERS, terms=terms))) < GUARD_S
    assert [o.name for o in found] == ["a", "b"]


def test_models_that_there_are_not_cost_no_search_each() -> None:
    """A linked node names 256 spans in its Hello, which is no record, and a ticket 16 nodes: 4,096 models took 0.8 s of each
    look for a route, and the refusal had 98,000 letters."""
    mine = [offer("honest", 0, LAYERS - 1)]
    false = [offer(f"n{i % 16}", 0, LAYERS - 1, model=ModelId(f"{i:064x}")) for i in range(1, 4097)]
    said: list[str] = []

    def look() -> None:
        with pytest.raises(WeightsMismatch) as refused:
            find_route([*mine, *false], LAYERS, (mine[0].info.model, "bf16"), Terms(origin=ME))
        said.append(str(refused.value))

    assert cpu_s(look) < GUARD_S
    assert len(said[0]) < 2000 and "honest" in said[0] and "and 4089 more" in said[0]


def test_gaps_times_full_offers_are_not_compared_one_by_one() -> None:
    """Every second layer is held by nodes without room alone, of which there are thousands."""
    free = [offer(f"n{i}", i, i + 1) for i in range(0, LAYERS, 2)]
    full = [offer(f"f{i}", 0, LAYERS, free_tokens=0) for i in range(3000)]
    assert cpu_s(lambda: find_route([*free, *full], LAYERS, terms=Terms(origin=ME, num_tokens=9))) < GUARD_S


def test_many_measured_edges_cost_little() -> None:
    """24 neighbours of each of 256 nodes, by their own statements."""
    offers, random = thin_and_wide(256), Random(1)
    nodes = [o.node for o in offers]
    ways = {pair(a, b): 0.01 for a in nodes for b in random.sample(nodes, 24) if a != b}
    terms = Terms(origin=ME, rtts=ways, key=b"k")
    assert cpu_s(lambda: find_route(offers, LAYERS, terms=terms)) < GUARD_S


def test_records_of_a_few_nodes_leave_those_of_others_their_place() -> None:
    """What an origin makes offers of: of 64 records each of 60 nodes, and of one each of 100, at most so many, in turn."""
    greedy = [one for one in map(record_of, range(60)) for _ in range(64)]
    honest = [record_of(100 + i) for i in range(100)]
    some = shared([*greedy, *honest], 512)
    assert len(some) == 512
    assert {r.node for r in some} == {r.node for r in (*greedy, *honest)}
    assert shared(honest, 512) == honest
