"""Stated round trips: a statement bears on the edges of the node that makes it, and shortens none that the other end knows."""

from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from manyhands.core import NodeId
from manyhands.route.edges import stated_rtts
from manyhands.route.offer import pair

ME, A, B, C = (NodeId(letter * 64) for letter in "0abc")
DIGITS = 16


def near(**seconds: float) -> dict[str, float]:
    return {name.lower() * DIGITS: value for name, value in seconds.items()}


def test_where_both_ends_state_an_edge_the_longer_counts() -> None:
    said = {A: near(b=0.010, c=0.020), B: near(a=0.012), C: near(a=0.001)}
    assert stated_rtts(said, DIGITS, ME, {}) == {pair(A, B): 0.012, pair(A, C): 0.020}


def test_one_end_alone_cannot_make_an_edge_shorter_than_the_origin_knows_it_to_be() -> None:
    """A is 10 ms and C 90 ms from here: whatever A says, they are 80 ms apart or more."""
    own = {A: 0.010, C: 0.090}
    assert stated_rtts({A: near(c=0.0001), C: {}}, DIGITS, ME, own) == {pair(A, C): 0.08}
    assert stated_rtts({A: near(c=0.085), C: {}}, DIGITS, ME, own) == {pair(A, C): 0.085}


def test_edges_of_the_origin_and_to_nodes_without_a_record_do_not_count() -> None:
    said = {A: {**near(b=0.001), "0" * DIGITS: 0.0, "a" * DIGITS: 0.0, "f" * DIGITS: 0.1}, ME: near(a=5.0)}
    assert stated_rtts(said, DIGITS, ME, {A: 0.01}) == {}


times = st.floats(0.0001, 6.5)


@given(st.data())
def test_a_false_statement_changes_no_edge_of_others_and_shortens_none_that_is_known(data: st.DataObject) -> None:
    nodes = [NodeId(f"{i:x}" * 64) for i in range(1, 6)]
    true = {frozenset(two): data.draw(times) for two in combinations(nodes, 2)}
    said = {a: {b[:DIGITS]: true[frozenset((a, b))] for b in nodes if b != a} for a in nodes}
    honest = stated_rtts(said, DIGITS, ME, {})
    false = nodes[0]
    said[false] = {name: data.draw(times) for name in data.draw(st.sets(st.sampled_from([n[:DIGITS] for n in nodes])))}
    got = stated_rtts(said, DIGITS, ME, {})
    for edge, seconds in got.items():
        assert seconds >= honest[edge]
        assert false in edge or seconds == honest[edge]
