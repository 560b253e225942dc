"""Finding a swarm on the local network by mDNS (RFC 6762, RFC 6763): what it is called and where, never its secret.

A service of type `_manyhands._tcp.local.` has the node's address and port, and in its TXT record: v=1, swarm=NAME,
id=FINGERPRINT (`Ticket.fingerprint`, which differs for two swarms of one name), node=NODE ID, name=NAME OF THE NODE,
model=THE MODEL IT SERVES, and code=PORT while it shows a code (net/pairing). A node that receives it may dial, and is refused
without the ticket. Advertised only when the scope is not `off`; everything received is checked and bounded.
"""

import asyncio
import contextlib
import ipaddress
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from zeroconf import Error, InterfaceChoice, NonUniqueNameException, ServiceStateChange, Zeroconf
from zeroconf.asyncio import AsyncServiceBrowser, AsyncServiceInfo, AsyncZeroconf

from manyhands.core import NodeAddr, NodeId
from manyhands.errors import BadRequest
from manyhands.plain import one_line
from manyhands.swarm.record import Scope
from manyhands.swarm.ticket import MAX_NAME_BYTES, Ticket

SERVICE = "_manyhands._tcp.local."
VERSION = "1"
MAX_FOUND = 256
MAX_MODEL_CHARS = 60  # a string of a TXT record has 255 bytes
RESOLVE_TIMEOUT_S = 3.0


@dataclass(frozen=True, slots=True)
class Nearby:
    """A node of some swarm on this network, as it says: nothing here is proven before it has been dialled.

    `code_port`: where it gives the ticket to joiners that prove the code it shows; None: it shows none.
    """

    swarm: str
    fingerprint: str
    node: NodeId
    addresses: tuple[NodeAddr, ...]
    name: str = ""
    model: str = ""
    code_port: int | None = None


def advertisement(
    ticket: Ticket,
    node: NodeId,
    addresses: Sequence[NodeAddr],
    name: str = "",
    model: str = "",
    code_port: int | None = None,
    turn: int = 0,
) -> AsyncServiceInfo:
    """What to say of `node`; each `turn` says something new. `addresses` have one port.

    Raises BadRequest if there is none, or one is a name.
    """
    if not addresses:
        raise BadRequest("a node without an address cannot be found on the local network: give --listen HOST:PORT")
    if names := [addr.host for addr in addresses if not _is_numeric(addr.host)]:
        raise BadRequest(f"mDNS tells addresses, and {names[0]} is a name")
    return AsyncServiceInfo(
        SERVICE,
        f"{node[:16]}.{SERVICE}",
        port=addresses[0].port,
        parsed_addresses=[addr.host for addr in addresses],
        properties={
            "v": VERSION,
            "swarm": ticket.name,
            "id": ticket.fingerprint,
            "node": node,
            "name": name,
            "model": one_line(model, MAX_MODEL_CHARS),
            "code": "" if code_port is None else str(code_port),
            "turn": str(turn),  # who listens takes no notice of a record that it has in its cache
        },
        server=f"{node[:16]}.local.",
    )


def read_advertisement(properties: dict[bytes, bytes | None], hosts: Sequence[str], port: int | None) -> Nearby | None:
    """What an announced service says, or None if it makes no sense."""
    try:
        version, swarm, fingerprint, node = (
            (properties.get(key) or b"").decode() for key in (b"v", b"swarm", b"id", b"node")
        )
        name, model, code = ((properties.get(key) or b"").decode() for key in (b"name", b"model", b"code"))
        addresses = tuple(NodeAddr.parse(_join(host, port or 0), NodeId(node)) for host in hosts[:8])
        code_port = _port(code)
    except (ValueError, BadRequest):
        return None
    is_sound = version == VERSION and _is_hex(node, 64) and _is_hex(fingerprint, 16) and bool(port) and bool(addresses)
    if not (is_sound and swarm and all(map(_is_name, (swarm, name))) and _is_name(model, 4 * MAX_MODEL_CHARS)):
        return None
    return Nearby(swarm, fingerprint, NodeId(node), addresses, name, model, code_port)


def _is_name(text: str, max_bytes: int = MAX_NAME_BYTES) -> bool:
    return text.isprintable() and len(text.encode()) <= max_bytes


def _port(text: str) -> int | None:
    """None for "". Raises ValueError for what is no port."""
    if not text:
        return None
    if not (text.isascii() and text.isdecimal() and len(text) <= 5 and 1 <= int(text) <= 65535):
        raise ValueError(text)
    return int(text)


def _is_numeric(host: str) -> bool:
    try:
        ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    return True


def _join(host: str, port: int) -> str:
    """Raises ValueError for what is no address."""
    if not _is_numeric(host):
        raise ValueError(host)
    return str(NodeAddr(host, port))


def _is_hex(text: str, size: int) -> bool:
    return len(text) == size and set(text) <= set("0123456789abcdef")


class Advertised:
    """A node that is announced, or is not (`is_sent`). `make` says what of it at addresses, with a code's port and a turn."""

    def __init__(
        self,
        make: Callable[[Sequence[NodeAddr], int | None, int], AsyncServiceInfo],
        interfaces: Sequence[str] | None,
    ) -> None:
        self._make, self._interfaces = make, interfaces
        self._addresses: Sequence[NodeAddr] = ()
        self._code_port: int | None = None
        self._zeroconf: AsyncZeroconf | None = None
        self._turn = 0
        self._one_at_a_time = asyncio.Lock()

    @property
    def is_sent(self) -> bool:
        return self._zeroconf is not None

    async def show_code(self, port: int | None) -> None:
        """Say where a code is served, or that none is. Raises OSError if multicast is not to be had."""
        async with self._one_at_a_time:
            self._code_port = port
            if self._zeroconf is not None:
                self._turn += 1
                info = self._make(self._addresses, port, self._turn)
                await (await self._zeroconf.async_update_service(info))

    async def move(self, addresses: Sequence[NodeAddr]) -> None:
        """Say that the node is at `addresses`, on the networks that there are now: sockets keep to those of their start.

        Raises OSError where it cannot be announced, BadRequest without an address.
        """
        async with self._one_at_a_time:
            await self._close()
            self._addresses, self._turn = addresses, self._turn + 1
            info, zeroconf = self._make(addresses, self._code_port, self._turn), _on_all(self._interfaces)
            try:
                with _explained():
                    await (await zeroconf.async_register_service(info))
            except BaseException:
                await zeroconf.async_close()
                raise
            self._zeroconf = zeroconf

    async def end(self) -> None:
        """Take it back."""
        async with self._one_at_a_time:
            await self._close()

    async def _close(self) -> None:
        zeroconf, self._zeroconf = self._zeroconf, None
        if zeroconf is not None:
            await zeroconf.async_close()  # says goodbye


@contextmanager
def _explained() -> Iterator[None]:
    """OSError in place of zeroconf's own errors, with what a person can do."""
    try:
        yield
    except NonUniqueNameException as error:
        raise OSError(
            "another machine of this network says this node's id: if it has a copy of the key, start one of the two with "
            "--key FILE"
        ) from error
    except Error as error:
        raise OSError(f"mDNS fails: {error!r}") from error


def _on_all(interfaces: Sequence[str] | None) -> AsyncZeroconf:
    """Raises OSError, as sockets do."""
    try:
        return AsyncZeroconf(interfaces=list(interfaces) if interfaces else InterfaceChoice.All)
    except RuntimeError as error:  # how zeroconf says that there is no interface to listen on
        raise OSError("no network interface of this machine is up") from error


@contextlib.asynccontextmanager
async def advertise(
    ticket: Ticket,
    node: NodeId,
    addresses: Sequence[NodeAddr],
    scope: Scope,
    interfaces: Sequence[str] | None = None,
    *,
    name: str = "",
    model: str = "",
) -> AsyncIterator[Advertised]:
    """Say where the node is until the block ends, then take it back. Does nothing if `scope` is off.

    Without `addresses` it is said from `move` on. `interfaces`: IP addresses of the network cards to use, default all. Raises
    OSError if multicast is not to be had.
    """
    said = Advertised(
        lambda places, code_port, turn: advertisement(ticket, node, places, name, model, code_port, turn), interfaces
    )
    if addresses and scope != "off":
        await said.move(addresses)
    try:
        yield said
    finally:
        await said.end()


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
        self.found.clear()  # what was there on the networks of an earlier time
        zeroconf = _on_all(interfaces)
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
