"""F12: nodes that come back at other addresses, and halves of a swarm that do not know of each other. In virtual time."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from manyhands.core import NodeAddr
from manyhands.errors import LinkClosed
from manyhands.member.bootstrap import LAN_S, LOOK_S, MAX_LAN_ADDRESSES, MAX_MET, REDIAL_S
from manyhands.member.home import keep_ticket, load_ticket, save_ticket
from manyhands.member.member import Member
from manyhands.swarm.directory import Peer
from manyhands.swarm.lan import Browser, Nearby
from manyhands.swarm.record import BEAT_S
from manyhands.swarm.ticket import MAX_ADDRESSES, Ticket
from manyhands.wire.message import PROTOCOL_VERSION, Hello, Lane, Token
from tests.member.members import Play, Town, player
from tests.swarm.records import node_of


@pytest.fixture
def play(tmp_path: Path) -> Play:
    return player(tmp_path, tmp_path, 1000)


def seen(member: Member) -> set[str]:
    return {record.name for record in member.records()}


async def enter(place: Town, index: int, ticket: Ticket) -> Member:
    """A member with a ticket of its own, that has called whom that names."""
    place.ticket = ticket
    return await place.stack.enter_async_context(place.member(index))


async def until_all_see(members: list[Member], names: set[str], seconds: float) -> None:
    async with asyncio.timeout(seconds):
        while any(seen(member) != names for member in members):  # noqa: ASYNC110
            await asyncio.sleep(0.1)


async def kill(member: Member) -> None:
    """It says nothing more, and nothing of it listens."""
    for loop in member.directory._loops:
        loop.cancel()
    await member.node.pool.aclose()
    await member.node.transport.aclose()


def test_a_founder_that_is_killed_and_comes_back_elsewhere_finds_its_swarm(play: Play, tmp_path: Path) -> None:
    """When it was last asked to leave, or began to serve, no member had joined yet."""

    async def scene(place: Town) -> None:
        founder = await place.open(0)
        save_ticket(tmp_path, founder.remembered())
        founder.node.start(keep_ticket(tmp_path, founder))
        joined = await place.open(1)
        await asyncio.sleep(3)
        await kill(founder)
        await asyncio.sleep(30)
        ticket = load_ticket(tmp_path)
        assert ticket is not None and joined.id in {addr.node for addr in ticket.addresses}
        again = await enter(place, 0, ticket)
        assert again.addresses != founder.addresses
        await again.meet()
        await until_all_see([again, joined], {"n0", "n1"}, 15)
        assert again.remembered().addresses[0] == again.addresses[0], "its old address is forgotten"
        assert founder.addresses[0] not in again.remembered().addresses

    play(scene)


def test_halves_merge_when_one_node_knows_an_address_of_the_other(play: Play) -> None:
    """It was down when that node called it, and knows no member itself."""

    async def scene(place: Town) -> None:
        ticket = place.ticket
        port_of_c = 3  # the network gives out ports in order
        first = await enter(place, 0, ticket.with_address(NodeAddr("127.0.0.1", port_of_c, node_of(2))))
        second = await enter(place, 1, ticket.with_address(first.addresses[0]))
        await second.meet()
        third = await enter(place, 2, ticket)
        assert third.addresses[0].port == port_of_c
        fourth = await enter(place, 3, ticket.with_address(third.addresses[0]))
        await fourth.meet()
        await until_all_see([first, second, third, fourth], {"n0", "n1", "n2", "n3"}, 3 * REDIAL_S)

    play(scene)


def test_halves_merge_when_the_local_network_tells(play: Play) -> None:
    async def scene(place: Town) -> None:
        ticket = place.ticket
        pairs: list[Member] = []
        for index in (0, 2):
            pairs.append(await enter(place, index, ticket))
            pairs.append(await enter(place, index + 1, ticket.with_address(pairs[-1].addresses[0])))
            await pairs[-1].meet()
        await asyncio.sleep(60)
        assert seen(pairs[0]) == {"n0", "n1"} and seen(pairs[3]) == {"n2", "n3"}
        pairs[1].found_on_lan([pairs[2].addresses[0]])
        await until_all_see(pairs, {"n0", "n1", "n2", "n3"}, 10)

    play(scene)


def test_a_machine_that_was_suspended_calls_every_member_at_once(play: Play) -> None:
    async def scene(place: Town) -> None:
        first, second, third = [await place.open(index) for index in range(3)]
        await asyncio.sleep(REDIAL_S / 2)
        for other in (second, third):
            place.faults.cut(first.node, other.node)
            place.faults.cut(other.node, first.node)
            other.bootstrap.dial = lambda addr: note_dial([], addr)  # type: ignore[method-assign]  # they slept as well
        dialled: list[NodeAddr] = []
        first.bootstrap.dial = lambda addr: note_dial(dialled, addr)  # type: ignore[method-assign]
        place.slept_s = 3600.0
        await asyncio.sleep(1.5)
        assert not first.edges() or len(dialled) <= 2
        place.slept_s = 7200.0
        for link in [first.node.pool.find(other.id, "control") for other in (second, third)]:
            if link is not None:
                link.abort("the machine slept")
        await asyncio.sleep(1.5)
        assert {addr.node for addr in dialled} == {second.id, third.id}

    play(scene)


async def note_dial(dialled: list[NodeAddr], addr: NodeAddr) -> None:
    dialled.append(addr)


def test_what_is_remembered_is_bounded(play: Play) -> None:
    async def scene(place: Town) -> None:
        many = [NodeAddr("10.0.0.1", 1 + index, node_of(10 + index)) for index in range(MAX_ADDRESSES)]
        first = await enter(place, 0, replace(place.ticket, addresses=tuple(many)))
        others = [await enter(place, 1 + i, place.ticket.with_address(first.addresses[0])) for i in range(3)]
        for other in others:
            await other.meet()
        saved = first.remembered().addresses
        assert len(saved) == MAX_ADDRESSES and saved[0] == first.addresses[0]
        assert {addr.node for addr in saved[1:4]} == {other.id for other in others}, "linked nodes first"
        assert set(saved[4:]) <= set(many)
        first.found_on_lan(NodeAddr("10.0.0.2", 1 + index, node_of(index)) for index in range(10 * MAX_LAN_ADDRESSES))
        assert len(first.bootstrap.addresses()) <= MAX_LAN_ADDRESSES + MAX_ADDRESSES + MAX_MET
        first.bootstrap._behind.update((NodeAddr("10.0.0.3", 1 + i), node_of(i)) for i in range(1000))
        await asyncio.sleep(2 * REDIAL_S)
        assert set(first.bootstrap._behind) <= set(first.bootstrap.addresses()), "those of addresses now forgotten"

    play(scene)


def test_the_local_network_names_only_nodes_of_this_swarm() -> None:
    ticket, other = Ticket(bytes(32), "town"), Ticket(bytes(31) + b"x", "town")
    browser = Browser()
    for number, each in enumerate((ticket, other)):
        addrs = (NodeAddr("10.0.0.1", 1 + number, node_of(number)),)
        browser.found[str(number)] = Nearby(each.name, each.fingerprint, node_of(number), addrs)
    assert browser.addresses(ticket) == [NodeAddr("10.0.0.1", 1, node_of(0))]


@pytest.mark.parametrize("said", [("no host", 1), ("10.0.0.1", 0), ("", 1), ("ü" * 200, 1)])
def test_a_member_that_says_it_is_nowhere_ends_no_other(said: tuple[str, int], play: Play, tmp_path: Path) -> None:
    """A Hello may name any text and port. No ticket can hold such an address, which is saved for the next start."""

    def hello(lane: Lane) -> Hello:
        return Hello(PROTOCOL_VERSION, lane, "nowhere", NodeAddr(*said), (), Token("00" * 16))

    async def scene(place: Town) -> None:
        first, second = await place.open(0), await place.open(1)
        saving = first.node.start(keep_ticket(tmp_path, first))
        await place.network.transport(node_of(9), hello).dial(first.addresses[0], "control")
        await asyncio.sleep(2 * BEAT_S)
        assert not saving.done()
        ticket = load_ticket(tmp_path)
        assert ticket is not None and [addr.node for addr in ticket.addresses] == [first.id, second.id]

    play(scene)


def test_what_the_local_network_says_again_and_again_is_dialled_now_and_then(play: Play) -> None:
    """Any machine of it can announce nodes of this swarm, at addresses of its choice, as often as it likes."""

    async def scene(place: Town) -> None:
        first = await place.open(0)
        dialled: list[NodeAddr] = []
        first.bootstrap.dial = lambda addr: note_dial(dialled, addr)  # type: ignore[method-assign]
        for number in range(600):
            first.found_on_lan(
                NodeAddr("198.51.100.1", 1 + 100 * number + index, node_of(9)) for index in range(2 * MAX_LAN_ADDRESSES)
            )
            await asyncio.sleep(0.1)
        assert len(dialled) <= MAX_LAN_ADDRESSES * (1 + 60 / LAN_S + 60 / REDIAL_S)
        dialled.clear()
        await asyncio.sleep(LAN_S + LOOK_S)
        first.found_on_lan([NodeAddr("198.51.100.2", 1, node_of(9))])
        await asyncio.sleep(0.1)
        assert NodeAddr("198.51.100.2", 1, node_of(9)) in dialled, "what is new after a while is dialled at once"

    play(scene)


def test_addresses_are_saved_once_the_disk_has_room_again(play: Play, tmp_path: Path) -> None:
    async def scene(place: Town) -> None:
        first = await place.open(0)
        (tmp_path / "home").write_text("a file in the place of the folder")
        first.node.start(keep_ticket(tmp_path / "home", first))
        await asyncio.sleep(2 * BEAT_S)
        assert len(first.notes) == 1 and "are not remembered" in first.notes[0]
        (tmp_path / "home").unlink()
        await asyncio.sleep(2 * BEAT_S)
        assert first.notes == [] and load_ticket(tmp_path / "home") is not None

    play(scene)


def test_an_address_that_made_up_nodes_claim_is_dialled_for_its_owner(play: Play) -> None:
    """Who answered there proved its key; else a record of a made-up key for each address of others kept a node from them."""

    def hello(lane: Lane) -> Hello:
        return Hello(PROTOCOL_VERSION, lane, "owner", None, (), Token("00" * 16))

    async def scene(place: Town) -> None:
        first, owner = await place.open(0), place.network.transport(node_of(9), hello)
        at = await owner.listen(NodeAddr("127.0.0.1", 0))
        with pytest.raises(LinkClosed, match="expected"):
            await first.node.reach(at, node_of(8), 1.0)
        with pytest.raises(LinkClosed, match="lately"):
            await first.node.reach(at, node_of(7), 1.0)
        assert (await first.node.reach(at, node_of(9), 1.0)).peer == node_of(9)

    play(scene)


def test_keys_that_come_and_go_make_no_node_forget_those_it_is_linked_to(play: Play) -> None:
    """What is remembered is what the next start of this node dials."""

    def hello(lane: Lane) -> Hello:
        return Hello(PROTOCOL_VERSION, lane, "passing", NodeAddr("198.51.100.1", 1), (), Token("00" * 16))

    async def scene(place: Town) -> None:
        first, second = await place.open(0), await place.open(1)
        for index in range(2 * MAX_MET):
            link = await place.network.transport(node_of(10 + index), hello).dial(first.addresses[0], "control")
            await asyncio.sleep(0.1)
            link.abort("it goes")
        await asyncio.sleep(0.1)
        assert set(first.edges()) == {second.id} and len(first.bootstrap.met) == MAX_MET
        assert second.id in {addr.node for addr in first.remembered().addresses}

    play(scene)


def test_a_machine_with_another_key_is_found_where_the_ticket_names_the_old_one(play: Play) -> None:
    async def scene(place: Town) -> None:
        second = await enter(place, 1, place.ticket)
        at = second.addresses[0]
        first = await enter(place, 0, place.ticket.with_address(NodeAddr(at.host, at.port, node_of(9))))
        await asyncio.sleep(2 * REDIAL_S)
        assert first.edges() == {}
        first.found_on_lan([at])
        await until_all_see([first, second], {"n0", "n1"}, 10)

    play(scene)


def test_what_one_member_says_of_where_a_node_is_keeps_no_node_from_it(play: Play) -> None:
    """A dht asks nodes where others say that they are. Its failure was one of the node, which no record helped then."""

    async def scene(place: Town) -> None:
        first, second, third = (place.member(index) for index in range(3))
        for member in (first, second, third):
            await place.stack.enter_async_context(member)
        false = NodeAddr("127.0.0.1", 9)
        with pytest.raises(LinkClosed):
            await first.directory.send(Peer(second.id, (false,)), b"")
        assert (await first.node.reach(second.addresses[0], second.id, 1.0)).peer == second.id
        await first.directory.send(Peer(third.id, (false, third.addresses[0])), b"")
        assert set(first.edges()) == {second.id, third.id}

    play(scene)
