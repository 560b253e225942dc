"""One Transport for every way to a peer: direct ones raced first, then iroh, then a relay.

A node has several addresses: those of its record, those it said in Hello, and the relays that this node uses. Which are
tried, and when, is decided by `plan` (pure). A link through a relay is used at once and bettered later: from time to time
this node tries the peer's direct addresses, and a direct link so found joins the node's links as if the peer had dialled.
New sessions take it (LinkPool prefers direct links), running ones move to it between two steps (origin/repair.py).
Links over iroh move by themselves, running sessions too.
"""

import asyncio
import logging
import secrets
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple, NoReturn

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from manyhands.core import NodeAddr, NodeId
from manyhands.errors import BadRequest, LinkClosed
from manyhands.net.arrivals import Arrivals
from manyhands.net.iroh import PREFIX as IROH_PREFIX
from manyhands.net.relay import tunnel
from manyhands.net.relay.relay import RELAY_ALPN, Relay, RelayLimits
from manyhands.net.relay.tunnel import Tunnels, relayed
from manyhands.net.tls import TlsPolicy, TlsTransport
from manyhands.net.transport import Link, Transport
from manyhands.wire.message import Hello, Lane

logger = logging.getLogger(__name__)

LOOPBACKS = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # of what stands for every address

Book = Callable[[NodeId], Iterable[NodeAddr]]  # what the directory says of a node's addresses


@dataclass(frozen=True, slots=True)
class ReachPolicy:
    """When to try what, in seconds.

    `stagger_s` lies between two attempts of one kind (RFC 8305 §5: 250 ms); every kind starts `fallback_s` after the one
    before, or when that has failed: long enough for TCP and TLS over 300 ms of round trip.
    A relayed link is bettered after `better_s`, then after twice as long each time, at most `max_better_s`.
    """

    stagger_s: float = 0.25
    fallback_s: float = 1.0
    better_s: float = 5.0
    max_better_s: float = 300.0
    attempt_s: float = 5.0  # deadline of one attempt at bettering


class Attempt(NamedTuple):
    after_s: float  # since the dial began
    addr: NodeAddr


def kind_of(addr: NodeAddr) -> int:
    """0 direct, 1 iroh, 2 relay: the order in which they are tried."""
    if addr.host.startswith(tunnel.PREFIX):
        return 2
    return 1 if addr.host.startswith(IROH_PREFIX) else 0


def plan(addrs: Iterable[NodeAddr], policy: ReachPolicy) -> list[Attempt]:
    """Which addresses to try and when: each once, by kind, in the given order within a kind."""
    unique = list(dict.fromkeys(addrs))
    attempts: list[Attempt] = []
    start_s = 0.0
    for kind in range(3):
        same = [addr for addr in unique if kind_of(addr) == kind]
        attempts += [Attempt(start_s + index * policy.stagger_s, addr) for index, addr in enumerate(same)]
        if same:
            start_s = attempts[-1].after_s + policy.fallback_s
    return attempts


async def race(attempts: Sequence[Attempt], dial: Callable[[NodeAddr], Awaitable[Link]]) -> tuple[NodeAddr, Link]:
    """Dial as planned, the next at once where nothing runs any more; the first link wins and the others are dropped.

    Raises LinkClosed with every reason. Deadline: the caller's; cancelling leaves nothing behind.
    """
    loop = asyncio.get_running_loop()
    begin, waiting, failures = loop.time(), deque(attempts), list[str]()
    answered: dict[tuple[str, int], str] = {}
    running: dict[asyncio.Task[Link], NodeAddr] = {}
    won: Link | None = None
    try:
        while waiting or running:
            if waiting and (not running or loop.time() - begin >= waiting[0].after_s):
                addr = waiting.popleft().addr
                running[asyncio.create_task(_dial(dial, addr))] = addr
            left_s = waiting[0].after_s - (loop.time() - begin) if waiting else None
            done, _ = await asyncio.wait(running, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                addr = running[task]
                # `result` would raise it: its traceback would lead to this frame, and this frame to the task that holds it.
                if isinstance(error := task.exception(), LinkClosed):
                    failures.append(str(error))
                    answered.update(error.answered)
                    del running[task]
                    continue
                del running[task]
                won = task.result()
                return addr, won
    finally:
        try:
            await _drop(running)
        except BaseException:  # the caller is cancelled as the others go: no one takes the link
            if won is not None:
                won.abort("dial cancelled")
            raise
    raise LinkClosed("; ".join(dict.fromkeys(failures)) or "no address is known", answered)


async def _dial(dial: Callable[[NodeAddr], Awaitable[Link]], addr: NodeAddr) -> Link:
    """Raises LinkClosed alone: one way that fails, however it does, ends neither the other ways nor the caller."""
    try:
        return await dial(addr)
    except LinkClosed:
        raise
    except Exception as exc:  # such as "can't start new thread", of a lookup
        logger.warning("%.80s cannot be dialled: %r", addr, exc)
        raise LinkClosed(f"{str(addr)[:80]!r} cannot be dialled: {exc}") from exc


async def _drop(running: Iterable[asyncio.Task[Link]]) -> None:
    """Cancel attempts; a link that came all the same is closed, also if this is cancelled."""
    for task in running:
        task.cancel()
        task.add_done_callback(_close)
    await asyncio.gather(*running, return_exceptions=True)


def _close(task: asyncio.Task[Link]) -> None:
    if not task.cancelled() and task.exception() is None:
        task.result().abort("another way to this peer was faster")


class _Relayed:
    """A link through a relay, and when to try a direct way next."""

    def __init__(self, link: Link, now: float, policy: ReachPolicy) -> None:
        self.link = link
        self.wait_s = policy.better_s
        self.due_at = now + policy.better_s

    def postpone(self, now: float, policy: ReachPolicy) -> None:
        self.wait_s = min(2 * self.wait_s, policy.max_better_s)
        self.due_at = now + self.wait_s


def reach_transport(
    key: Ed25519PrivateKey,
    secret: bytes,
    hello: Callable[[Lane], Hello],
    *,
    book: Book = lambda node: (),
    limits: RelayLimits | None = None,
    iroh_urls: Sequence[str] | None = None,
    members: TlsPolicy | None = None,
    policy: ReachPolicy | None = None,
) -> "ReachTransport":
    """A node's transport over every way, and a relay for the others with `limits` (None: it is none).

    `iroh_urls` None: no iroh; else iroh's relays, perhaps none. `members` are the allow and deny lists of all ways.
    """
    guests = {RELAY_ALPN: Relay(secrets.token_bytes, limits).leg} if limits is not None else {}
    tls = TlsTransport(key, secret, hello, members, guests)
    way: Transport | None = None
    if iroh_urls is not None:
        from manyhands.net.iroh.transport import IrohTransport

        way = IrohTransport(key, secret, hello, members, iroh_urls)
    return ReachTransport(tls, Tunnels(key, secret, tls), way, book=book, policy=policy)


class ReachTransport:
    """A Transport (see transport.Transport) over tls, relays and, if given, iroh.

    `listen` goes by the address: `host:port`, `relay%host:port` (be found at that relay), `iroh%host:port`. It may be
    called several times. `book` gives what is known of a node's addresses. Owns what it is given: aclose closes it.
    """

    def __init__(
        self,
        tls: TlsTransport,
        tunnels: Tunnels,
        iroh: Transport | None = None,
        *,
        book: Book = lambda node: (),
        policy: ReachPolicy | None = None,
    ) -> None:
        self.node = tls.node
        self._tls, self._tunnels, self._iroh = tls, tunnels, iroh
        self._book = book
        self._policy = policy or ReachPolicy()
        self._arrivals = Arrivals[Link]()  # bounded by the transports' limits of links
        self._relayed: list[_Relayed] = []
        self._here: list[NodeAddr] = []  # where this node finds itself
        self._tasks: list[asyncio.Task[None]] = []

    def __repr__(self) -> str:
        return f"<ReachTransport {self.node[:8]} {self._tunnels} relayed={len(self._relayed)}>"

    async def listen(self, addr: NodeAddr) -> NodeAddr:
        kind = kind_of(addr)
        if kind == 2:
            return await self._tunnels.listen(addr)
        if kind == 1:
            if self._iroh is None:
                raise BadRequest(f"cannot listen at {addr}: this node does not use iroh")
            return await self._iroh.listen(addr)
        bound = await self._tls.listen(addr)
        own = LOOPBACKS.get(bound.host, bound.host)
        self._here.append(NodeAddr(own, bound.port, self.node))
        return bound

    async def accept(self) -> Link:
        self._start()
        return await self._arrivals.take()

    async def dial(self, addr: NodeAddr, lane: Lane) -> Link:
        attempts = plan(self._ways_to(addr), self._policy)
        way, link = await race(attempts, lambda way: self._dial(way, lane))
        self._note(link, way)
        return link

    async def aclose(self) -> None:
        self._arrivals.end()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks.clear()
        await self._tunnels.aclose()
        await self._tls.aclose()
        if self._iroh is not None:
            await self._iroh.aclose()
        await self._arrivals.aclose()

    # -- ways out -----------------------------------------------------------------------------------------------------

    def _ways_to(self, addr: NodeAddr) -> list[NodeAddr]:
        """`addr`, what the book says of its node, and at last the relays where this node waits itself. This node has a way to
        itself that no router and no change of its address can cut."""
        if addr.node is None:
            return [addr]
        if addr.node == self.node and self._here:
            return self._here
        known = [NodeAddr(other.host, other.port, addr.node) for other in self._book(addr.node)]
        relays = [relayed(relay, addr.node) for relay in self._tunnels.relays]
        ways = [addr, *known, *relays]
        return [way for way in ways if self._iroh is not None or kind_of(way) != 1] or [addr]

    async def _dial(self, addr: NodeAddr, lane: Lane) -> Link:
        kind = kind_of(addr)
        if kind == 2:
            return await self._tunnels.dial(addr, lane)
        if kind == 1:
            if self._iroh is None:
                raise LinkClosed(f"{addr} needs iroh, which this node does not use")
            return await self._iroh.dial(addr, lane)
        return await self._tls.dial(addr, lane)

    # -- ways in ------------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        if not self._tasks and not self._arrivals.has_ended:
            work = [self._pump(self._tls), self._better()] + ([self._pump(self._iroh)] if self._iroh else [])
            self._tasks = [asyncio.create_task(each, name="reach") for each in work]

    async def _pump(self, source: Transport) -> None:
        with suppress(LinkClosed):
            while True:
                link = await source.accept()
                if link.health.path_kind == "relay" and source is self._tls:
                    self._relayed.append(_Relayed(link, asyncio.get_running_loop().time(), self._policy))
                self._arrivals.put(link)
        self._arrivals.end()  # as a listener that ended does: accept says so

    # -- from relay to direct -----------------------------------------------------------------------------------------

    def _note(self, link: Link, way: NodeAddr) -> None:
        if kind_of(way) == 2:
            self._relayed.append(_Relayed(link, asyncio.get_running_loop().time(), self._policy))

    async def _better(self) -> NoReturn:
        """Try direct ways to the peers of relayed links, for ever."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(self._policy.better_s / 4)
            self._relayed = [each for each in self._relayed if not each.link.is_closed]
            due = [each for each in self._relayed if each.due_at <= loop.time()]
            found = await asyncio.gather(*(self._find_direct(each.link) for each in due))
            for each, is_found in zip(due, found, strict=True):
                if is_found:
                    self._relayed.remove(each)
                else:
                    each.postpone(loop.time(), self._policy)

    async def _find_direct(self, link: Link) -> bool:
        """Open a direct link beside a relayed one, if there is a way."""
        said = [link.hello.listen] if link.hello.listen is not None else []
        addrs = [NodeAddr(addr.host, addr.port, link.peer) for addr in (*self._book(link.peer), *said)]
        attempts = plan((addr for addr in addrs if kind_of(addr) == 0), self._policy)
        with suppress(LinkClosed, TimeoutError):
            async with asyncio.timeout(self._policy.attempt_s):
                _, direct = await race(attempts, lambda way: self._tls.dial(way, link.lane))
            logger.info("peer=%s lane=%s found a direct path beside the relay", link.peer[:8], link.lane)
            self._arrivals.put(direct)
            return True
        return False
