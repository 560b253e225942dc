"""Members whose machine gets another address, and whose relay is away when they start. In virtual time."""

import asyncio
import socket
from typing import Any

import ifaddr
import pytest
import zeroconf

from manyhands.core import NodeAddr
from manyhands.errors import BadRequest, ShardUnavailable
from manyhands.member.bootstrap import LOOK_S as NETWORK_LOOK_S
from manyhands.member.bootstrap import REDIAL_S, SETTLE_S, SUSPENDED_S
from manyhands.member.lan_presence import RETRY_S, met_on_lan, present_on_lan
from manyhands.member.member import Member
from manyhands.member.neighbours import relays_among
from manyhands.member.own_addresses import LOOK_S, MAX_RETRY_S, UNROUTED_LOOKS
from manyhands.net.memory import MemoryNetwork, MemoryTransport
from manyhands.net.relay.tunnel import relay_of, relayed
from manyhands.swarm.announce import Announcer
from manyhands.swarm.record import BEAT_S
from manyhands.swarm.ticket import Ticket
from tests.member.members import Play, Town
from tests.member.requests import until
from tests.swarm.records import key_of

ANY = NodeAddr("0.0.0.0", 0)
HOME, OFFICE = "192.168.1.5", "10.4.0.9"
RELAY = NodeAddr("203.0.113.1", 4040)


class Machine(MemoryNetwork):
    """A network whose one machine with all of its addresses bound has `host`; relays are there from `relay_at` on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, host: str = HOME) -> None:
        super().__init__()
        self.host, self.relay_at, self.asked = host, 0.0, list[float]()
        self.gone = set[str]()  # where no relay answers
        monkeypatch.setattr("socket.socket.getsockname", lambda sock: (self.host, 9))
        monkeypatch.setattr("socket.socket.connect", lambda sock, addr: None)

    def find(self, addr: NodeAddr) -> MemoryTransport | None:
        found = super().find(addr)
        return super().find(NodeAddr(ANY.host, addr.port)) if found is None and addr.host == self.host else found

    def bind(self, addr: NodeAddr, transport: MemoryTransport) -> NodeAddr:
        if addr.host in self.gone:
            raise BadRequest(f"no relay at {relay_of(addr)}: no answer")
        if "%" not in addr.host:
            return super().bind(addr, transport)
        self.asked.append(asyncio.get_running_loop().time())
        if self.asked[-1] < self.relay_at:
            raise BadRequest(f"no relay at {RELAY}: no answer")
        return NodeAddr(addr.host, addr.port, transport.node)


def told(member: Member, of: Member) -> set[str]:
    """The hosts at which `member` would dial `of`, as the records say."""
    return {addr.host for record in member.records() if record.node == of.id for addr in record.addresses}


@pytest.mark.parametrize("first", [HOME, "127.0.0.1"])
def test_a_machine_with_a_new_address_is_found_there(first: str, play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another Wi-Fi; or a service that started before the network was there."""

    async def scene(place: Town) -> None:
        place.network = network = Machine(monkeypatch, first)
        other = await place.open(0)
        laptop = await place.open(1, listen=ANY)
        await until(lambda: told(other, laptop) == {first})
        network.host = OFFICE
        await asyncio.sleep(2 * NETWORK_LOOK_S)
        assert told(other, laptop) == {OFFICE}
        assert OFFICE in str(laptop.remembered().addresses) and first not in str(laptop.addresses)
        assert laptop.directory.members.admits(other.id, [OFFICE])
        third = await place.open(2)
        await until(lambda: told(third, laptop) == {OFFICE})
        link = await third.node.reach(third.book(laptop.id)[0], laptop.id, 1.0, "data")
        assert link.hello.listen == laptop.addresses[0]

    play(scene)


@pytest.mark.parametrize(
    ("listen", "shown"), [(ANY, "127.0.0.1"), (NodeAddr("::", 0), "2001:db8:2::5")], ids=["IPv4", "IPv6"]
)
def test_a_machine_without_ipv4_notices_another_network(
    listen: NodeAddr, shown: str, play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever it listens to, its own calls go over IPv6. An address that cannot be called is not told."""
    at: list[str | None] = ["2001:db8:1::5"]

    def connect(sock: socket.socket, addr: Any) -> None:
        if sock.family == socket.AF_INET or at[0] is None:
            raise OSError("Network is unreachable")

    async def scene(place: Town) -> None:
        monkeypatch.setattr("socket.socket.connect", connect)
        monkeypatch.setattr("socket.socket.getsockname", lambda sock: (at[0], 9, 0, 0))
        monkeypatch.setattr(ifaddr, "get_adapters", lambda: [])
        laptop = await place.open(1, listen=listen)
        moves = list[str | None]()
        monkeypatch.setattr(laptop.node.watch, "moved", lambda: moves.append(at[0]))
        await asyncio.sleep(2 * NETWORK_LOOK_S)
        for now in (None, "2001:db8:1::5", "2001:db8:2::5"):
            at[0] = now
            await asyncio.sleep(UNROUTED_LOOKS * NETWORK_LOOK_S + 2 * SETTLE_S)
        assert moves == ["2001:db8:1::5", "2001:db8:2::5"]
        assert laptop.addresses[0].host == shown

    play(scene)


def test_after_a_suspension_it_looks_at_once(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene(place: Town) -> None:
        place.network = network = Machine(monkeypatch)
        laptop = await place.open(1, listen=ANY)
        await asyncio.sleep(1)
        network.host, place.slept_s = OFFICE, 2 * SUSPENDED_S
        await asyncio.sleep(REDIAL_S / 4)
        assert laptop.addresses[0].host == OFFICE

    play(scene)


@pytest.mark.parametrize(
    ("changes", "host"),
    [({"listen": ANY, "advertise": NodeAddr("198.51.100.7", 0)}, "198.51.100.7"), ({}, "127.0.0.1")],
)
def test_an_address_that_was_given_stays(
    changes: dict[str, Any], host: str, play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scene(place: Town) -> None:
        place.network = network = Machine(monkeypatch)
        member = await place.open(1, **changes)
        network.host = OFFICE
        await asyncio.sleep(3 * REDIAL_S)
        assert member.addresses[0].host == host

    play(scene)


def test_people_are_told_while_the_address_that_was_given_is_not_there(
    play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its links stood, as it calls others: it was shown as serving, and no session ran there. Another network, for a while."""
    here = {HOME}

    async def scene(place: Town) -> None:
        place.network = Machine(monkeypatch)
        monkeypatch.setattr("manyhands.member.own_addresses.is_own", lambda host: host in here)
        laptop = await place.open(1, listen=NodeAddr(HOME, 0))
        await asyncio.sleep(3 * NETWORK_LOOK_S)
        assert laptop.notes == []
        here.clear()
        await asyncio.sleep(3 * NETWORK_LOOK_S)
        assert [HOME in note and "--listen" in note for note in laptop.notes] == [True]
        here.add(HOME)
        await asyncio.sleep(3 * NETWORK_LOOK_S)
        assert laptop.notes == []

    play(scene)


def test_without_a_network_the_last_address_stays(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene(place: Town) -> None:
        place.network = network = Machine(monkeypatch)
        laptop = await place.open(1, listen=ANY)
        network.host = "127.0.0.1"
        await asyncio.sleep(3 * REDIAL_S)
        assert laptop.addresses[0].host == HOME

    play(scene)


def test_an_address_that_flaps_is_announced_once_a_look(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[float] = []
    announce = Announcer.announce

    def counted(self: Announcer, *arguments: Any) -> list[bytes]:
        said.append(asyncio.get_running_loop().time())
        return announce(self, *arguments)

    async def scene(place: Town) -> None:
        place.network = network = Machine(monkeypatch)
        await place.open(1, listen=ANY)
        said.clear()
        turns, turn_s = 600, 0.0973
        for turn in range(turns):
            network.host = (HOME, OFFICE)[turn % 2]
            await asyncio.sleep(turn_s)
        assert len(said) <= turns * turn_s * (1 / BEAT_S + 1 / SETTLE_S) + 2

    monkeypatch.setattr(Announcer, "announce", counted)
    play(scene)


def test_who_calls_while_a_relay_is_asked_hears_the_address(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    """It heard 0.0.0.0 for as long as relays did not answer."""

    async def scene(place: Town) -> None:
        place.network = Machine(monkeypatch)
        other = await place.open(0)
        member = place.member(1, listen=ANY, relays=(RELAY,))
        real, heard = member.node.transport.listen, list[NodeAddr | None]()

        async def slow(addr: NodeAddr) -> NodeAddr:
            if addr.host == relayed(RELAY).host:
                assert member.node.address is not None
                way = NodeAddr(HOME, member.node.address.port, member.id)
                heard.append((await other.node.pool.get(way, "control")).hello.listen)
            return await real(addr)

        monkeypatch.setattr(member.node.transport, "listen", slow)
        await place.stack.enter_async_context(member)
        assert heard == [member.addresses[0]]

    play(scene)


def test_a_relay_that_was_away_at_the_start_is_asked_again(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene(place: Town) -> None:
        place.network = network = Machine(monkeypatch)
        network.relay_at = 130.0
        other = await place.open(0)
        member = await place.open(1, relays=(RELAY,))
        assert [note for note in member.notes if str(RELAY) in note]
        await until(lambda: told(other, member) == {"127.0.0.1"})
        await asyncio.sleep(network.relay_at + MAX_RETRY_S)
        assert told(other, member) == {"127.0.0.1", relayed(RELAY).host}
        assert member.notes == []
        assert member.addresses[1] == relayed(RELAY, member.id)
        waits = [after - before for before, after in zip(network.asked, network.asked[1:], strict=False)]
        assert waits == [1, 2, 4, 8, 16, 32] + [MAX_RETRY_S] * (len(waits) - 6)

    play(scene)


def test_where_the_first_of_the_ticket_is_gone_another_member_is_the_relay(
    play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine, gone = NodeAddr("203.0.113.9", 1, key_of(1).node_id), NodeAddr("203.0.113.8", 2, key_of(2).node_id)
    ticket = Ticket(bytes(32), "town", (mine, NodeAddr(HOME, 1), relayed(gone), gone, RELAY))
    relays = relays_among(ticket.addresses, key_of(1).node_id)
    assert relays == (NodeAddr(gone.host, gone.port), RELAY)

    async def scene(place: Town) -> None:
        place.network = network = Machine(monkeypatch)
        network.gone = {relayed(gone).host}
        member = await place.open(1, relays=relays, is_one_relay_enough=True, scope="public")
        await until(lambda: [note for note in member.notes if str(relays[0]) in note])
        assert relayed(RELAY, member.id) not in member.addresses
        await asyncio.sleep(MAX_RETRY_S)
        assert (list(member.addresses[1:]), member.notes) == ([relayed(RELAY, member.id)], [])

    play(scene)


def test_a_silent_node_of_the_ticket_is_not_waited_for_as_a_relay(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it is called as a member, it has all of the time that a dial has."""
    listen = MemoryTransport.listen

    async def listens(self: MemoryTransport, addr: NodeAddr) -> NodeAddr:
        if "%" in addr.host:
            await asyncio.Event().wait()
        return await listen(self, addr)

    monkeypatch.setattr(MemoryTransport, "listen", listens)

    async def scene(place: Town) -> None:
        place.network = Machine(monkeypatch)
        other = await place.open(0, scope="public")
        async with asyncio.timeout(1):
            member = await place.open(1, relays=(RELAY,), is_one_relay_enough=True, scope="public")
        await until(lambda: told(other, member) == {"127.0.0.1"})

    play(scene)


@pytest.mark.parametrize("by", ["ticket", "directory", "who comes later"])
def test_a_relay_that_leaves_for_good_is_replaced(by: str, play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the next of the ticket, or by a member that came since. Records say so; one that was away for a moment stays, and one
    that is back before another is found."""
    first, second = NodeAddr("203.0.113.8", 4040), NodeAddr("203.0.113.9", 4040)

    async def scene(place: Town) -> None:
        place.network = network = Machine(monkeypatch)
        relays = (first, second) if by == "ticket" else (first,)
        member = await place.open(1, relays=relays, is_one_relay_enough=True, scope="public")
        other = await place.open(0, advertise=second if by == "directory" else None, scope="public")
        await until(lambda: told(other, member) == {"127.0.0.1", relayed(first).host})
        network.gone = {relayed(first).host}
        await asyncio.sleep(LOOK_S)
        network.gone = set()
        await asyncio.sleep(3 * LOOK_S)
        assert list(member.addresses[1:]) == [relayed(first, member.id)]
        network.gone = {relayed(first).host, relayed(second).host}
        await asyncio.sleep(3 * LOOK_S)
        assert told(other, member) == {"127.0.0.1", relayed(first).host}, "the only place where it may be found again"
        assert [str(first) in note for note in member.notes] == [True]
        network.gone = {relayed(first).host}
        if by == "who comes later":
            await place.open(2, advertise=second, scope="public")
        await asyncio.sleep(MAX_RETRY_S)
        assert told(other, member) == {"127.0.0.1", relayed(second).host} and member.notes == []
        assert list(member.addresses[1:]) == [relayed(second, member.id)]
        network.gone = {relayed(second).host}
        await asyncio.sleep(3 * LOOK_S)
        assert list(member.addresses[1:]) == [relayed(first, member.id)], "the first is back"
        network.gone = {relayed(first).host, relayed(second).host}
        await until(lambda: member.notes != [])
        network.gone = set()
        await until(lambda: member.notes == [])
        assert list(member.addresses[1:]) == [relayed(first, member.id)]

    play(scene)


class Air:
    """Stands for zeroconf: which addresses are announced, with which code's port, and how many listen."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.shown: dict[object, tuple[list[str], bytes | None]] = {}
        self.listening = 0
        self.is_down = False
        self.refusal: Exception | None = None
        monkeypatch.setattr("manyhands.swarm.lan.AsyncZeroconf", lambda interfaces: Zeroconf(self))
        monkeypatch.setattr("manyhands.swarm.lan.AsyncServiceBrowser", lambda *_, **__: Listener(self))

    def says(self) -> list[tuple[list[str], bytes | None]]:
        return list(self.shown.values())


class Zeroconf:
    def __init__(self, air: Air) -> None:
        if air.is_down:
            raise OSError("no multicast")
        self.air, self.zeroconf = air, None

    async def async_register_service(self, info: Any) -> Any:
        if self.air.refusal is not None:
            raise self.air.refusal
        self.air.shown[self] = info.parsed_addresses(), info.properties[b"code"]
        return asyncio.sleep(0)

    async_update_service = async_register_service

    async def async_close(self) -> None:
        self.air.shown.pop(self, None)


class Listener:
    def __init__(self, air: Air) -> None:
        self.air = air
        air.listening += 1

    async def async_cancel(self) -> None:
        self.air.listening -= 1


@pytest.mark.parametrize("first", [HOME, "127.0.0.1"])
def test_mdns_says_the_new_address(first: str, play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the code that is shown; on sockets that know the new network."""
    air, lines = Air(monkeypatch), list[str]()

    async def scene(place: Town) -> None:
        place.network = network = Machine(monkeypatch, first)
        laptop = await place.open(1, listen=ANY)
        async with present_on_lan(laptop, "tales", lines.append) as said:
            assert said is not None
            assert air.says() == ([([HOME], b"")] if first == HOME else [])
            await said.show_code(4001)
            network.host = OFFICE
            await until(lambda: air.says() == [([OFFICE], b"4001")])
            await until(lambda: air.listening == 1)
            air.is_down, network.host = True, HOME
            await until(lambda: not said.is_sent)
            air.is_down = False
            await until(lambda: air.says() == [([HOME], b"4001")], 2 * RETRY_S)
            await until(lambda: air.listening == 1)
        assert (air.says(), air.listening, lines) == ([], 0, [])

    play(scene)


@pytest.mark.parametrize("changes", [{"listen": ANY, "scope": "off"}, {"listen": NodeAddr("127.0.0.1", 0)}])
def test_where_no_one_could_come_nothing_is_said(
    changes: dict[str, Any], play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    air = Air(monkeypatch)

    async def scene(place: Town) -> None:
        place.network = network = Machine(monkeypatch)
        member = await place.open(1, **changes)
        async with present_on_lan(member, "tales", print) as said:
            network.host = OFFICE
            await asyncio.sleep(2 * REDIAL_S)
            assert said is None and (air.says(), air.listening) == ([], 0)

    play(scene)


def test_without_multicast_people_are_told(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    air, lines = Air(monkeypatch), list[str]()
    air.is_down = True

    async def scene(place: Town) -> None:
        place.network = Machine(monkeypatch)
        async with present_on_lan(await place.open(1, listen=ANY), "tales", lines.append) as said:
            assert said is not None and not said.is_sent
        assert ["no multicast" in line for line in lines] == [True]

    play(scene)


@pytest.mark.parametrize(
    ("refusal", "said"),
    [
        (zeroconf.NonUniqueNameException(), "another machine of this network says this node's id"),
        (zeroconf.NotRunningException(), "mDNS fails"),
    ],
)
def test_a_member_that_is_not_announced_serves_and_people_are_told_why(
    refusal: Exception, said: str, play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`up` ended with a traceback on a machine whose copy ran on the same network, or where any machine used its name."""
    air, lines = Air(monkeypatch), list[str]()
    air.refusal = refusal

    async def scene(place: Town) -> None:
        place.network = network = Machine(monkeypatch)
        laptop = await place.open(1, listen=ANY)
        async with present_on_lan(laptop, "tales", lines.append) as announced:
            assert announced is not None and not announced.is_sent
            air.refusal, network.host = None, OFFICE
            await until(lambda: air.says() == [([OFFICE], b"")])
        assert [said in line for line in lines] == [True]

    play(scene)


def test_a_machine_that_starts_no_thread_for_a_while_keeps_its_member(
    play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the limit of its user's processes: it looks at its address once a second, in a thread."""

    async def refused(*_: Any, **more: Any) -> None:
        raise RuntimeError("can't start new thread")

    async def scene(place: Town) -> None:
        place.network = network = Machine(monkeypatch)
        other, laptop = await place.open(0), await place.open(1, listen=ANY)
        with monkeypatch.context() as patch:
            patch.setattr("manyhands.member.own_addresses.aside", refused)
            await asyncio.sleep(2 * REDIAL_S)
        network.host = OFFICE
        await until(lambda: told(other, laptop) == {OFFICE})

    play(scene)


def test_a_swarm_that_has_moved_is_found_by_the_local_network(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    """The addresses of the ticket are those of last week; so is the machine's that comes back."""
    air = Air(monkeypatch)

    async def scene(place: Town) -> None:
        home = await place.open(0)
        place.ticket = Ticket(place.ticket.secret, "town", (NodeAddr("127.0.0.1", 999, home.id),))
        back = await place.stack.enter_async_context(place.member(1))
        with pytest.raises(ShardUnavailable):
            await back.meet()
        assert not await met_on_lan(back), "nothing is seen"
        seen = [NodeAddr(home.addresses[0].host, home.addresses[0].port, home.id)]
        monkeypatch.setattr("manyhands.swarm.lan.Browser.addresses", lambda browser, ticket: seen)
        back.bootstrap.found_on_lan(seen)
        assert await met_on_lan(back) and home.id in back.edges()
        assert air.listening == 0

    play(scene)
