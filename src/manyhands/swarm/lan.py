"""Finding a swarm on the local network by mDNS (RFC 6762, RFC 6763): what it is called and where, never its secret.

A service of type `_manyhands._tcp.local.` has the node's address and port, and in its TXT record: v=1, swarm=NAME,
id=FINGERPRINT (`Ticket.fingerprint`, which tells two swarms of one name apart), node=NODE ID. A node that hears it may dial,
and is turned away without the ticket. Advertised only when the scope is not `off`; everything heard is checked and bounded.
"""

import asyncio
import contextlib
import ipaddress
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass

from zeroconf import InterfaceChoice, ServiceStateChange, Zeroconf
from zeroconf.asyncio import AsyncServiceBrowser, AsyncServiceInfo, AsyncZeroconf

from manyhands.core import NodeAddr, NodeId
from manyhands.errors import BadRequest
from manyhands.swarm.record import Scope
from manyhands.swarm.ticket import MAX_NAME_BYTES, Ticket

SERVICE = "_manyhands._tcp.local."
VERSION = "1"
MAX_FOUND = 256
RESOLVE_TIMEOUT_S = 3.0


@dataclass(frozen=True, slots=True)
class Nearby:
    """A node of some swarm on this network, as it says: nothing here is proven before it has been dialled."""

    swarm: str
    fingerprint: str
    node: NodeId
    addresses: tuple[NodeAddr, ...]


def advertisement(ticket: Ticket, node: NodeId, addresses: Sequence[NodeAddr]) -> AsyncServiceInfo:
    """What to say of `node`. `addresses` are numeric and have one port. Raises BadRequest if there is none."""
    if not addresses:
        raise BadRequest("a node without an address cannot be found on the local network: give --listen HOST:PORT")
    return AsyncServiceInfo(
        SERVICE,
        f"{node[:16]}.{SERVICE}",
        port=addresses[0].port,
        parsed_addresses=[addr.host for addr in addresses],
        properties={"v": VERSION, "swarm": ticket.name, "id": ticket.fingerprint, "node": node},
        server=f"{node[:16]}.local.",
    )


def read_advertisement(properties: dict[bytes, bytes | None], hosts: Sequence[str], port: int | None) -> Nearby | None:
    """What an announced service says, or None if it makes no sense."""
    try:
        version, swarm, fingerprint, node = (
            (properties.get(key) or b"").decode() for key in (b"v", b"swarm", b"id", b"node")
        )
        addresses = tuple(NodeAddr.parse(_join(host, port or 0), NodeId(node)) for host in hosts[:8])
    except (ValueError, BadRequest):
        return None
    is_sound = version == VERSION and _is_hex(node, 64) and _is_hex(fingerprint, 16) and bool(port) and bool(addresses)
    if not (is_sound and swarm.isprintable() and 1 <= len(swarm.encode()) <= MAX_NAME_BYTES):
        return None
    return Nearby(swarm, fingerprint, NodeId(node), addresses)


def _join(host: str, port: int) -> str:
    ipaddress.ip_address(host.partition("%")[0])  # ValueError for what is no address
    return str(NodeAddr(host, port))


def _is_hex(text: str, size: int) -> bool:
    return len(text) == size and set(text) <= set("0123456789abcdef")


@contextlib.asynccontextmanager
async def advertise(
    ticket: Ticket, node: NodeId, addresses: Sequence[NodeAddr], scope: Scope, interfaces: Sequence[str] | None = None
) -> AsyncIterator[None]:
    """Say where the node is until the block ends, then take it back. Does nothing if `scope` is off.

    `interfaces`: IP addresses of the network cards to use, default all. Raises OSError if multicast is not to be had.
    """
    if scope == "off":
        yield
        return
    info = advertisement(ticket, node, addresses)
    zeroconf = AsyncZeroconf(interfaces=list(interfaces) if interfaces else InterfaceChoice.All)
    try:
        await (await zeroconf.async_register_service(info))
        yield
        await (await zeroconf.async_unregister_service(info))
    finally:
        await zeroconf.async_close()


class Browser:
    """Listens for swarms nearby. `found`: service name -> what it says; `on_change` is called when that changed."""

    def __init__(self, on_change: Callable[[], None] = lambda: None) -> None:
        self.found: dict[str, Nearby] = {}
        self._on_change = on_change
        self._lookups: set[asyncio.Task[None]] = set()

    def addresses(self, ticket: Ticket) -> list[NodeAddr]:
        """Where nodes of the swarm of `ticket` say they are: unproven, so they are dialled by their NodeIds."""
        return [near.addresses[0] for near in self.found.values() if near.fingerprint == ticket.fingerprint]

    @contextlib.asynccontextmanager
    async def listen(self, interfaces: Sequence[str] | None = None) -> AsyncIterator["Browser"]:
        """Browse until the block ends. Raises OSError if multicast is not to be had."""
        zeroconf = AsyncZeroconf(interfaces=list(interfaces) if interfaces else InterfaceChoice.All)
        browser = AsyncServiceBrowser(zeroconf.zeroconf, SERVICE, handlers=[self._on_service])
        try:
            yield self
        finally:
            for task in self._lookups:
                task.cancel()
            await asyncio.gather(*self._lookups, return_exceptions=True)
            await browser.async_cancel()
            await zeroconf.async_close()

    def _on_service(self, zeroconf: Zeroconf, service_type: str, name: str, state_change: ServiceStateChange) -> None:
        if state_change is ServiceStateChange.Removed:
            if self.found.pop(name, None) is not None:
                self._on_change()
        elif len(self._lookups) < MAX_FOUND and (name in self.found or len(self.found) < MAX_FOUND):
            task = asyncio.get_running_loop().create_task(self._look_up(zeroconf, name))
            self._lookups.add(task)
            task.add_done_callback(self._lookups.discard)

    async def _look_up(self, zeroconf: Zeroconf, name: str) -> None:
        info = AsyncServiceInfo(SERVICE, name)
        if not await info.async_request(zeroconf, RESOLVE_TIMEOUT_S * 1000):
            return
        nearby = read_advertisement(info.properties, info.parsed_scoped_addresses(), info.port)
        if nearby is not None and self.found.get(name) != nearby:
            self.found[name] = nearby
            self._on_change()
