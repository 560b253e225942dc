"""What a member states of its links: bounded, the nearest, and news only where it bears on routes."""

import math

from manyhands.core import NodeId
from manyhands.member.surroundings import stated
from manyhands.swarm.record import MAX_NEIGHBOURS, MAX_RTT_UNITS, NearNode
from tests.swarm.records import key_of, record_of

NODES = [key_of(i).node_id for i in range(40)]


def test_the_nearest_are_stated_and_no_more_than_a_record_holds() -> None:
    near = stated((), {node: 0.001 * (i + 1) for i, node in enumerate(NODES)})
    assert len(near) == MAX_NEIGHBOURS
    assert {each.node for each in near} == {node[:16] for node in NODES[:MAX_NEIGHBOURS]}
    assert record_of(near=near).near == near, "a record takes it as it is"


def test_what_was_not_measured_or_cannot_be_is_left_out() -> None:
    figures = dict(zip(NODES, (None, math.nan, math.inf, -1.0, 0.0, 100.0), strict=False))
    assert sorted(stated((), figures)) == sorted((NearNode(NODES[4][:16], 1), NearNode(NODES[5][:16], MAX_RTT_UNITS)))


def test_a_figure_that_trembles_is_no_news() -> None:
    node = NodeId(NODES[0])
    first = stated((), {node: 0.020})
    for rtt_s in (0.0201, 0.024, 0.016):
        assert stated(first, {node: rtt_s}) == first
    assert stated(first, {node: 0.030})[0].units == 300
    fast = stated((), {node: 0.0002})
    assert stated(fast, {node: 0.0006}) == fast and stated(fast, {node: 0.0009}) != fast
    assert stated(first, {}) == (), "a node that is not linked any more"
