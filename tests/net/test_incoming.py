"""manyhands.net.incoming: links by who dialled them; one identity cannot use up what a node keeps open."""

import itertools
from dataclasses import dataclass
from typing import cast

from hypothesis import given
from hypothesis import strategies as st

from manyhands.core import NodeId
from manyhands.net.incoming import MAX_PER_LANE, Incoming
from manyhands.net.transport import Link
from manyhands.wire.message import LANES, Lane

ONE, TWO, THREE = (NodeId(f"{n:02x}" * 32) for n in (1, 2, 3))


@dataclass(eq=False)
class Dialled:
    peer: NodeId
    lane: Lane = "control"
    is_closed: bool = False


def add(incoming: Incoming[Link], link: Dialled) -> Dialled | None:
    """As the transports do: what has to go is closed."""
    surplus = cast(Dialled | None, incoming.add(cast(Link, link)))
    if surplus is not None:
        surplus.is_closed = True
    return surplus


def test_beyond_the_bound_of_a_lane_the_nodes_own_oldest_goes() -> None:
    incoming = Incoming[Link](256)
    other, links = Dialled(TWO), [Dialled(ONE) for _ in range(300)]
    assert add(incoming, other) is None
    gone = [add(incoming, link) for link in links]
    assert gone == [None] * MAX_PER_LANE + links[:-MAX_PER_LANE]
    assert add(incoming, Dialled(ONE, "data")) is None
    assert len(incoming) == MAX_PER_LANE + 2 and not other.is_closed


def test_beyond_the_bound_of_all_the_greediest_makes_room_and_equals_are_refused() -> None:
    incoming = Incoming[Link](6)
    greedy = [Dialled(ONE, lane) for lane in ("control", "control", "data", "data", "bulk")]
    for link in greedy:
        assert add(incoming, link) is None
    assert add(incoming, Dialled(TWO)) is None and incoming.has_room_for(TWO) and not incoming.has_room_for(ONE)
    assert add(incoming, Dialled(TWO, "data")) is greedy[0]
    assert add(incoming, Dialled(THREE)) is greedy[1]
    assert incoming.has_room_for(THREE) and not incoming.has_room_for(TWO)
    refused = Dialled(TWO, "bulk")
    assert add(incoming, refused) is refused
    greedy[-1].is_closed = True
    assert incoming.has_room_for(TWO) and len(incoming) == 5


@given(st.lists(st.tuples(st.sampled_from([ONE, TWO, THREE]), st.sampled_from(sorted(LANES))), max_size=80))
def test_whatever_comes_is_bounded_and_counted(dialled: list[tuple[NodeId, Lane]]) -> None:
    incoming, links = Incoming[Link](10), []
    for peer, lane in dialled:
        had_room = incoming.has_room_for(peer)
        links.append(Dialled(peer, lane))
        surplus = add(incoming, links[-1])
        assert surplus is not links[-1] or not had_room
        alive = [link for link in links if not link.is_closed]
        assert len(incoming) == len(alive) <= 10
        for _, same in itertools.groupby(sorted((link.peer, link.lane) for link in alive)):
            assert len(list(same)) <= MAX_PER_LANE
