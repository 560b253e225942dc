"""mDNS on the loopback interface: real multicast, real zeroconf. What unknown hosts advertise is read strictly."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manyhands.core import NodeAddr, NodeId
from manyhands.errors import BadRequest
from manyhands.swarm.lan import Browser, Nearby, advertise, advertisement, read_advertisement
from manyhands.swarm.ticket import Ticket

NODE = NodeId("ab" * 32)
HERE = NodeAddr("127.0.0.1", 4000)
LOOPBACK = ["127.0.0.1"]
TICKET = Ticket(bytes(range(32)), "hörsaal")
QUIET = Ticket(bytes(32), "quiet")
CODED = Ticket(bytes(reversed(range(32))), "coded")
MOVED = Ticket(bytes([7] * 32), "moved")
GOOD: dict[bytes, bytes | None] = {
    b"v": b"1",
    b"swarm": TICKET.name.encode(),
    b"id": TICKET.fingerprint.encode(),
    b"node": NODE.encode(),
}


def heard(browser: Browser, ticket: Ticket) -> list[Nearby]:
    """Who advertises the ticket's swarm. Others on this machine, other tests too, may advertise theirs."""
    return [nearby for nearby in browser.found.values() if nearby.fingerprint == ticket.fingerprint]


def test_a_swarm_is_found_and_leaves() -> None:
    async def find() -> None:
        changed = asyncio.Event()
        browser = Browser(changed.set)
        async with asyncio.timeout(30), browser.listen(LOOPBACK):
            async with advertise(TICKET, NODE, [HERE], "lan", LOOPBACK):
                while not heard(browser, TICKET):
                    await changed.wait()
                    changed.clear()
                (nearby,) = heard(browser, TICKET)
                assert (nearby.swarm, nearby.node) == ("hörsaal", NODE)
                assert nearby.addresses == (NodeAddr("127.0.0.1", 4000, NODE),)
            while heard(browser, TICKET):
                await changed.wait()
                changed.clear()

    asyncio.run(find())


def test_a_code_is_told_while_it_is_shown() -> None:
    """With the name of the machine that shows it, and the model it serves."""

    async def scene() -> None:
        changed = asyncio.Event()
        browser = Browser(changed.set)

        async def until(port: int | None) -> Nearby:
            while (found := heard(browser, CODED)) == [] or found[0].code_port != port:
                await changed.wait()
                changed.clear()
            return found[0]

        async with asyncio.timeout(30), browser.listen(LOOPBACK):
            async with advertise(CODED, NODE, [HERE], "lan", LOOPBACK, name="desk", model="tales") as said:
                nearby = await until(None)
                assert (nearby.name, nearby.model) == ("desk", "tales") and said.is_sent
                await said.show_code(4001)
                await until(4001)
                await said.show_code(None)
                await until(None)

    asyncio.run(scene())


def test_a_node_that_moves_is_found_there_with_its_code() -> None:
    async def scene() -> None:
        changed, there = asyncio.Event(), NodeAddr("127.0.0.2", 4000, NODE)
        browser = Browser(changed.set)
        async with asyncio.timeout(30), browser.listen(LOOPBACK), advertise(MOVED, NODE, [], "lan", LOOPBACK) as said:
            assert not said.is_sent
            await said.move([HERE])
            await said.show_code(4001)
            await said.move([there])
            while [(near.addresses, near.code_port) for near in heard(browser, MOVED)] != [((there,), 4001)]:
                await changed.wait()
                changed.clear()

    asyncio.run(scene())


def test_a_long_name_of_a_model_fits() -> None:
    info = advertisement(TICKET, NODE, [HERE], "desk", "名" * 200)
    nearby = read_advertisement(info.properties, ["127.0.0.1"], 4000)
    assert nearby is not None and nearby.model.endswith("…") and len(nearby.model) == 60


def test_scope_off_says_nothing() -> None:
    async def hide() -> None:
        browser = Browser()
        async with browser.listen(LOOPBACK), advertise(QUIET, NODE, [HERE], "off", LOOPBACK):
            await asyncio.sleep(1)
            assert not heard(browser, QUIET)

    asyncio.run(hide())


def test_the_secret_is_not_in_it() -> None:
    info = advertisement(TICKET, NODE, [HERE])
    said = repr(info) + repr(info.properties)
    for form in (TICKET.secret.hex(), repr(TICKET.secret)[2:-1], TICKET.encode()[3:40]):
        assert form not in said
    assert TICKET.fingerprint == Ticket.parse(TICKET.encode()).fingerprint != Ticket.new("hörsaal").fingerprint
    with pytest.raises(BadRequest, match="--listen"):
        advertisement(TICKET, NODE, [])
    with pytest.raises(BadRequest, match=r"mDNS tells addresses, and desk\.example is a name"):
        advertisement(TICKET, NODE, [NodeAddr("desk.example", 7700)])  # --advertise desk.example:7700


def test_a_good_advertisement_is_read() -> None:
    nearby = read_advertisement(GOOD, ["127.0.0.1", "fe80::1%2"], 4000)
    assert nearby is not None and nearby.addresses[1] == NodeAddr("fe80::1%2", 4000, NODE)


@pytest.mark.parametrize(
    ("changes", "hosts", "port"),
    [
        ({b"v": b"2"}, ["127.0.0.1"], 4000),
        ({b"v": None}, ["127.0.0.1"], 4000),
        ({b"swarm": b""}, ["127.0.0.1"], 4000),
        ({b"swarm": b"\xff"}, ["127.0.0.1"], 4000),
        ({b"swarm": b"a\x1b[2J"}, ["127.0.0.1"], 4000),
        ({b"swarm": b"x" * 65}, ["127.0.0.1"], 4000),
        ({b"node": b"ab" * 31}, ["127.0.0.1"], 4000),
        ({b"node": b"AB" * 32}, ["127.0.0.1"], 4000),
        ({b"id": b"short"}, ["127.0.0.1"], 4000),
        ({b"code": b"0"}, ["127.0.0.1"], 4000),
        ({b"code": b"65536"}, ["127.0.0.1"], 4000),
        ({b"code": b"-1"}, ["127.0.0.1"], 4000),
        ({b"code": "٤".encode()}, ["127.0.0.1"], 4000),
        ({b"code": b"9" * 200}, ["127.0.0.1"], 4000),
        ({b"name": b"a\nb"}, ["127.0.0.1"], 4000),
        ({b"name": b"x" * 65}, ["127.0.0.1"], 4000),
        ({b"model": b"a\x1b[2J"}, ["127.0.0.1"], 4000),
        ({b"model": b"x" * 250}, ["127.0.0.1"], 4000),
        ({}, [], 4000),
        ({}, ["example.org"], 4000),
        ({}, ["127.0.0.1"], None),
        ({}, ["127.0.0.1"], 0),
        ({}, ["127.0.0.1"], 65536),
    ],
)
def test_nonsense_is_not(changes: dict[bytes, bytes | None], hosts: list[str], port: int | None) -> None:
    assert read_advertisement(GOOD | changes, hosts, port) is None


@given(st.dictionaries(st.sampled_from(list(GOOD)), st.binary(max_size=80)), st.lists(st.text(max_size=20), max_size=3))
def test_random_advertisements_raise_nothing(properties: dict[bytes, bytes | None], hosts: list[str]) -> None:
    read_advertisement(properties, hosts, 4000)
    read_advertisement(GOOD, hosts, 4000)
