"""iroh (QUIC, hole punching, relays) as a Transport: for peers behind NAT that no member can dial.

The node's own Ed25519 key is iroh's secret key, so iroh proves the peer's NodeId; both sides then prove that they know the
swarm secret, bound to both ids (`proof`), before any of our bytes. One QUIC connection with one stream is one lane's
link; the frames on it are those of every other transport. iroh moves a connection from a relay to a direct path by
itself, running sessions included; `health.path_kind` says which it is.

An address is `iroh%HOST:PORT` (UDP) with a node. With relay URLs, a peer is also looked for at the first of them.
"""

import asyncio
import hashlib
import hmac
import logging
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from manyhands.core import NodeAddr, NodeId
from manyhands.errors import BadRequest, LinkClosed
from manyhands.net.admission import Pending, PendingLimits, source_of
from manyhands.net.arrivals import Arrivals
from manyhands.net.certificate import node_id_of
from manyhands.net.incoming import Incoming
from manyhands.net.iroh import PREFIX
from manyhands.net.iroh.pipe import IrohPipe, load
from manyhands.net.link import CLOSE_S, FramedLink, Handshake
from manyhands.net.names import LOOKUPS
from manyhands.net.shares import Shares
from manyhands.net.tls import TlsPolicy
from manyhands.wire.message import Hello, Lane

logger = logging.getLogger(__name__)

ALPN = b"manyhands/1"
PROOF_BYTES = 32
# Callers whose handshake is under way, for each that may be in the handshake of TLS: iroh's first packets show no token, so
# more of them are let in, and the oldest of the source with the most makes room (admission.py).
CALLERS_PER_HANDSHAKE = 8


def proof(secret: bytes, sender: NodeId, receiver: NodeId) -> bytes:
    """What only a member can say, and only as `sender` to `receiver`: HMAC under a key derived of the swarm secret.

    iroh has proved both ids, so a proof that is overheard or passed on is of no use to anyone else.
    """
    key = HKDF(hashes.SHA256(), length=32, salt=None, info=b"manyhands swarm proof v1").derive(secret)
    return hmac.digest(key, bytes.fromhex(sender) + bytes.fromhex(receiver), hashlib.sha256)


class IrohTransport:
    """A Transport (see transport.Transport). `relay_urls` are iroh relays, none by default: no third party is asked.

    Owns one endpoint, a task for accepting and one for each link; aclose ends them all, links too, for they share a socket.
    """

    def __init__(
        self,
        key: Ed25519PrivateKey,
        secret: bytes,
        hello: Callable[[Lane], Hello],
        policy: TlsPolicy | None = None,
        relay_urls: Sequence[str] = (),
    ) -> None:
        self.node = node_id_of(key.public_key())
        self._key, self._secret, self._hello = key, secret, hello
        self._policy = policy or TlsPolicy()
        self._relay_urls = tuple(relay_urls)
        self._shares = Shares()
        self._endpoint: Any = None
        self._binding = asyncio.Lock()
        self._arrivals = Arrivals[FramedLink]()  # bounded by max_links
        self._incoming = Incoming[FramedLink](self._policy.max_links)
        total = CALLERS_PER_HANDSHAKE * self._policy.max_handshakes
        limits = PendingLimits(total, max(1, total // 2), self._policy.handshake_s)
        self._callers: Pending[asyncio.Task[None]] = Pending(limits)
        self._pipes: set[asyncio.Task[None]] = set()
        self._listener: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        return f"<IrohTransport {self.node[:8]} links={len(self._pipes)}>"

    async def listen(self, addr: NodeAddr) -> NodeAddr:
        if self._listener is not None:
            raise BadRequest("iroh listens already: one UDP port serves every peer")
        bound = await self._bind(addr)
        if addr.port not in (0, bound.port):
            raise BadRequest(f"iroh has UDP port {bound.port} already: listen at {addr} before dialling")
        self._listener = asyncio.create_task(self._serve(), name=f"listen {bound}")
        self._listener.add_done_callback(self._arrivals.end_with)
        return bound

    async def accept(self) -> FramedLink:
        return await self._arrivals.take()

    async def dial(self, addr: NodeAddr, lane: Lane) -> FramedLink:
        if addr.node is None:
            raise LinkClosed(f"{addr} cannot be dialled: iroh must be told which node to find")
        if not self._policy.admits(addr.node):
            raise LinkClosed(f"node {addr.node[:16]} is not admitted by this node's allow and deny lists")
        await self._bind(NodeAddr(PREFIX + "0.0.0.0", 0))
        connection = await self._connect(addr, addr.node)
        try:
            stream = await connection.open_bi()
            await stream.send().write_all(proof(self._secret, self.node, addr.node))
            await self._check_proof(stream, addr.node)
            link = self._link(addr.node, lane, connection, stream)
            try:
                await link.opened()
            except BaseException:
                link.abort("dial failed")
                raise
            return link
        except LinkClosed as exc:
            connection.close(0, b"")
            raise LinkClosed(f"{addr} refused: {exc}") from exc
        except load().IrohError as exc:
            connection.close(0, b"")
            raise LinkClosed(f"{addr} is not a member of this swarm, or does not admit this node") from exc
        except BaseException:
            connection.close(0, b"")
            raise

    async def aclose(self) -> None:
        self._arrivals.end()
        if self._listener is not None:
            self._listener.cancel()
            await asyncio.gather(self._listener, return_exceptions=True)
        await self._arrivals.aclose()
        for task in self._pipes:
            task.cancel()
        await asyncio.gather(*self._pipes, return_exceptions=True)
        if self._endpoint is not None:
            with suppress(TimeoutError):
                async with asyncio.timeout(CLOSE_S):  # it would wait 3 s for connections that were never made
                    await self._endpoint.close()

    # -- the endpoint -------------------------------------------------------------------------------------------------

    async def _bind(self, addr: NodeAddr) -> NodeAddr:
        """The endpoint's address; bound at the first call. Raises BadRequest."""
        async with self._binding:
            if self._endpoint is None:
                self._endpoint = await self._make_endpoint(addr)
            port = int(self._endpoint.bound_sockets()[0].rpartition(":")[2])
            return NodeAddr(addr.host, port, self.node)

    async def _make_endpoint(self, addr: NodeAddr) -> Any:
        iroh = load()
        iroh.iroh_ffi.uniffi_set_event_loop(asyncio.get_running_loop())
        host = NodeAddr(addr.host.removeprefix(PREFIX), addr.port)
        found = await LOOKUPS.find(host.host, host.port, socket.SOCK_DGRAM)
        mode = (
            iroh.RelayMode.custom_from_urls(list(self._relay_urls)) if self._relay_urls else iroh.RelayMode.disabled()
        )
        options = iroh.EndpointOptions(
            preset=iroh.preset_minimal(),
            bind_addr=str(NodeAddr(str(found[0][4][0]), host.port)),
            secret_key=self._key.private_bytes_raw(),
            alpns=[ALPN],
            relay_mode=mode,
        )
        try:
            return await iroh.Endpoint.bind(options)
        except iroh.IrohError as exc:
            raise BadRequest(f"cannot use UDP at {host}: {exc.message()}; choose another port (0: any)") from exc

    async def _connect(self, addr: NodeAddr, node: NodeId) -> Any:
        iroh = load()
        direct = await self._resolve(addr)
        relay = self._relay_urls[0] if self._relay_urls else None
        try:
            target = iroh.EndpointAddr(iroh.EndpointId.from_string(node), relay, direct)
            return await self._endpoint.connect(target, ALPN)
        except iroh.IrohError as exc:
            raise LinkClosed(f"{addr} cannot be reached: {exc.message()}") from exc

    async def _resolve(self, addr: NodeAddr) -> list[str]:
        """The address as iroh takes it: numbers. Empty if it cannot be found, which leaves the relay."""
        with suppress(OSError, ValueError):  # ValueError: a host that no resolver takes
            host = addr.host.removeprefix(PREFIX)
            found = await LOOKUPS.find(host, addr.port, socket.SOCK_DGRAM)
            return [str(NodeAddr(str(name[0]), addr.port)) for *_, name in found]
        return []

    # -- ways in ------------------------------------------------------------------------------------------------------

    async def _serve(self) -> None:
        """Accept for ever: a caller never waits for another. Runs until cancelled; owns the handshakes."""
        loop = asyncio.get_running_loop()
        async with asyncio.TaskGroup() as group:
            while (caller := await self._endpoint.accept_next()) is not None:
                source = await self._source_of(caller)
                if source is None:
                    continue
                task = group.create_task(self._admit(caller))
                task.add_done_callback(self._callers.leave)
                evicted = self._callers.enter(task, source, loop.time())
                if evicted is not None:
                    evicted.cancel()

    async def _source_of(self, caller: Any) -> str | None:
        """Where `caller` comes from: its network, or the node behind a relay. None: it is to show first, by another packet,
        that it gets what is sent there, since many callers are here and sources of packets can be forged."""
        try:
            if len(self._callers) >= self._policy.max_handshakes and not await caller.remote_addr_validated():
                await caller.retry()
                return None
            addr = await caller.remote_addr()
        except load().IrohError as exc:
            logger.info("refused a caller: %s", exc.message())
            return None
        if addr.is_ip():
            return source_of(addr.addr.rpartition(":")[0].strip("[]"))
        return str(addr.endpoint_id) if addr.is_relay() else "other"

    async def _admit(self, caller: Any) -> None:
        """Handshake with one caller and queue its link. An outsider sees the connection end, and no byte of ours."""
        connection = link = None
        try:
            async with asyncio.timeout(self._policy.handshake_s):
                connection = await (await caller.accept()).connect()
                link = await self._greet(connection)
                await link.opened()
            self._incoming.keep(link, self._arrivals)
        except (LinkClosed, TimeoutError, load().IrohError) as exc:
            logger.info("refused a link: %s", exc.message() if isinstance(exc, load().IrohError) else exc)
            self._give_up(connection, link)
        except BaseException:
            self._give_up(connection, link)
            raise

    def _give_up(self, connection: Any, link: FramedLink | None) -> None:
        if link is not None:
            link.abort("refused")
        if connection is not None:
            connection.close(0, b"")

    async def _greet(self, connection: Any) -> FramedLink:
        connection.set_max_concurrent_uni_streams(0)
        peer = NodeId(connection.remote_id().to_bytes().hex())
        if not self._policy.admits(peer):
            raise LinkClosed(f"node {peer[:16]} is not admitted by this node's allow and deny lists")
        self._incoming.check_room(peer)
        stream = await connection.accept_bi()
        await self._check_proof(stream, peer)
        await stream.send().write_all(proof(self._secret, self.node, peer))
        return self._link(peer, None, connection, stream)

    async def _check_proof(self, stream: Any, peer: NodeId) -> None:
        said = await stream.recv().read_exact(PROOF_BYTES)
        if not hmac.compare_digest(said, proof(self._secret, peer, self.node)):
            raise LinkClosed(f"node {peer[:16]} is not a member of this swarm")

    def _link(self, peer: NodeId, dialled: Lane | None, connection: Any, stream: Any) -> FramedLink:
        link = FramedLink(Handshake(self._hello, lambda _: peer, time.monotonic, dialled, self._shares))
        pipe = IrohPipe(connection, stream, link)
        task = asyncio.create_task(pipe.run(), name=f"iroh {peer[:8]}")
        self._pipes.add(task)
        task.add_done_callback(self._pipes.discard)
        link.connection_made(pipe)
        return link
