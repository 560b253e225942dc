"""manyhands.net.setbacks: failures are remembered by node and by address, and an address is dialled for one node at a time."""

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


def test_a_proven_address_is_its_nodes_while_the_link_is_open() -> None:
    setbacks = Setbacks()
    setbacks.reached(ONE, ADDR)
    setbacks.failed(TWO, [ADDR], 0.0)
    assert setbacks.wait_s(ONE, ADDR, 0.0) == 0.0 and setbacks.wait_s(TWO, ADDR, 0.0) == MAX_S
    setbacks.lost(ONE)
    assert setbacks.wait_s(NodeId("33" * 32), ADDR, 0.0) == 0.0
