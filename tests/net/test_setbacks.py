"""manyhands.net.setbacks: failures are remembered by node and by address, and an address is dialled for one node at a time."""

import pytest

from manyhands.core import NodeAddr, NodeId
from manyhands.net.setbacks import AGAIN_S, FIRST_S, MAX_S, Setbacks

ONE, TWO = NodeId("11" * 32), NodeId("22" * 32)
ADDR, OTHER = NodeAddr("10.66.6.6", 6666), NodeAddr("10.66.6.7", 6666)


def test_an_address_that_is_being_dialled_waits_for_others_alone() -> None:
    setbacks = Setbacks()
    setbacks.began(ONE, ADDR)
    assert setbacks.wait_s(ONE, ADDR, 0.0) == 0.0
    assert setbacks.wait_s(TWO, ADDR, 0.0) == AGAIN_S
    assert setbacks.wait_s(TWO, OTHER, 0.0) == 0.0
    setbacks.ended(ADDR)
    setbacks.ended(ADDR)
    assert setbacks.wait_s(TWO, ADDR, 0.0) == 0.0


def test_a_failure_is_on_the_node_and_on_the_address_and_doubles() -> None:
    setbacks = Setbacks()
    setbacks.failed(ONE, [ADDR], 100.0)
    assert setbacks.wait_s(TWO, ADDR, 100.0) == setbacks.wait_s(ONE, OTHER, 100.0) == FIRST_S
    setbacks.failed(TWO, [ADDR], 105.0)
    assert setbacks.wait_s(NodeId("33" * 32), ADDR, 105.0) == 2 * FIRST_S


@pytest.mark.parametrize("who", [ONE, None])
def test_a_node_that_is_linked_again_is_dialled_again_soon_where_it_was_not_reached(who: NodeId | None) -> None:
    setbacks = Setbacks()
    addr, other = (NodeAddr(at.host, at.port, ONE) for at in (ADDR, OTHER))
    for now in (0.0, 5.0, 15.0, 35.0):
        setbacks.failed(who, [addr], now)
    setbacks.failed(TWO, [OTHER], 35.0)
    setbacks.failed(TWO, [OTHER], 40.0)
    setbacks.reached(ONE)
    assert setbacks.wait_s(ONE, addr, 36.0) == FIRST_S - 1, (
        "a node that names another's address has it dialled no sooner"
    )
    assert setbacks.wait_s(ONE, addr, 40.0) == 0.0
    assert setbacks.wait_s(ONE, other, 40.0) == 2 * FIRST_S, "it was dialled for another node"


def test_a_proven_address_is_its_nodes_while_the_link_is_open() -> None:
    setbacks = Setbacks()
    setbacks.reached(ONE, ADDR)
    setbacks.failed(TWO, [ADDR], 0.0)
    assert setbacks.wait_s(ONE, ADDR, 0.0) == 0.0 and setbacks.wait_s(TWO, ADDR, 0.0) == MAX_S
    setbacks.lost(ONE)
    assert setbacks.wait_s(NodeId("33" * 32), ADDR, 0.0) == 0.0


def test_on_another_network_everything_may_be_dialled() -> None:
    setbacks = Setbacks()
    setbacks.failed(ONE, [ADDR], 0.0)
    setbacks.moved()
    assert setbacks.wait_s(ONE, ADDR, 0.0) == 0.0


def test_an_address_that_another_node_answered_at_is_left_alone_for_all_but_that_one() -> None:
    setbacks = Setbacks()
    made_up = [NodeId(f"{number:064x}") for number in range(9)]
    for now, node in enumerate(made_up):
        setbacks.failed(node, [ADDR], 400.0 * now, {(ADDR.host, ADDR.port): ONE})
        assert setbacks.wait_s(ONE, ADDR, 400.0 * now) == 0.0 and setbacks.wait_s(TWO, ADDR, 400.0 * now) >= FIRST_S
    setbacks.failed(ONE, [ADDR], 4000.0)
    assert setbacks.wait_s(ONE, ADDR, 4000.0) >= FIRST_S, "it does not answer any more"
