"""Tours are the shortest there are, where that is promised."""

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from manyhands.place.tour import AllTours, Ways, improve, insert

COSTS = st.floats(0, 1, width=16)


@st.composite
def ways(draw: st.DrawFn) -> Ways:
    """Up to six places, asymmetric."""
    count = draw(st.integers(1, 6))
    rows = st.lists(COSTS, min_size=count, max_size=count)
    return Ways(draw(rows), draw(st.lists(rows, min_size=count, max_size=count)), draw(rows))


@settings(deadline=None)
@given(ways())
def test_every_subset_gets_its_shortest_tour(ways: Ways) -> None:
    tours = AllTours(ways)
    for mask in range(1, 1 << len(ways.out)):
        chosen = [place for place in range(len(ways.out)) if mask >> place & 1]
        best = min(map(ways.cost, itertools.permutations(chosen)))
        order = tours.order(mask)
        assert sorted(order) == chosen
        assert abs(ways.cost(order) - best) < 1e-9 and abs(tours.cost(mask) - best) < 1e-9


@settings(deadline=None)
@given(ways())
def test_improving_never_lengthens_and_loses_no_node(ways: Ways) -> None:
    order: tuple[int, ...] = ()
    for place in range(len(ways.out)):
        order = insert(ways, order, place)
    better = improve(ways, order)
    assert sorted(better) == sorted(order) and ways.cost(better) <= ways.cost(order)
