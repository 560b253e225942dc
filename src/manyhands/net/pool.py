"""Links by (peer, lane): dialled once, shared, and closed here. Knows nothing of what they carry."""

import asyncio
from collections.abc import Callable
from dataclasses import replace

from manyhands.core import EdgeHealth, NodeAddr, NodeId
from manyhands.errors import LinkClosed
from manyhands.net.liveness import stretched_s
from manyhands.net.transport import Link, Transport
from manyhands.wire.message import Lane

PeerLane = tuple[NodeId, Lane]

MAX_PLACES = 1024  # addresses where a node has answered, that are remembered

# How long a request waits for a link that it needs, on its origin and on its hops, where event loops run on time.
CONNECT_TIMEOUT_S = 10.0


class LinkPool:
    """All open links of a node. Owns their closing; the transport stays its maker's. `on_new` is told of each link, once.

    `late_s` gives how late this node's event loop has run lately.
    """

    def __init__(
        self,
        transport: Transport,
        on_new: Callable[[Link], None] = lambda link: None,
        late_s: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self._transport, self._on_new, self._late_s = transport, on_new, late_s
        self._added = asyncio.Event()
        self._links: dict[PeerLane, list[Link]] = {}
        self._nodes: dict[tuple[str, int], NodeId] = {}  # which node answered at an address that names none
        self._dialled: dict[Link, tuple[str, int]] = {}  # open links, and where they were dialled
        self._dialling: dict[tuple[NodeAddr, Lane], asyncio.Future[LinkClosed | None]] = {}
        self._is_closed = False

    def __repr__(self) -> str:
        return f"<LinkPool open={sum(map(len, self._open().values()))} dialling={len(self._dialling)}>"

    @property
    def connect_s(self) -> float:
        """How long a request waits for a link now: CONNECT_TIMEOUT_S, stretched by lateness."""
        return stretched_s(CONNECT_TIMEOUT_S, self._late_s())

    def find(self, node: NodeId, lane: Lane) -> Link | None:
        """An open link to `node`, whichever side dialled it; a direct one rather than one through a relay."""
        links = [link for link in self._links.get((node, lane), ()) if not link.is_closed]
        return _best(links) if links else None

    def find_at(self, addr: NodeAddr, lane: Lane) -> Link | None:
        """An open link to the node that `addr` names, or that was found at it."""
        node = addr.node or self._nodes.get((addr.host, addr.port))
        return self.find(node, lane) if node is not None else None

    def has_dialled(self, node: NodeId, addr: NodeAddr) -> bool:
        """Whether an open link to `node` was dialled at `addr`, and not at another address or by that node."""
        place = addr.host, addr.port
        return any(at == place and link.peer == node and not link.is_closed for link, at in self._dialled.items())

    def nodes(self, lane: Lane) -> set[NodeId]:
        """Those that a link of that lane is open to."""
        return {node for node, each in self._links if each == lane and self.find(node, lane) is not None}

    def in_use(self) -> set[NodeId]:
        """The nodes that more than control messages go to: a link of another lane is open or being dialled."""
        linked = {node for node, lane in self._links if lane != "control" and self.find(node, lane) is not None}
        return linked | {addr.node for addr, lane in self._dialling if lane != "control" and addr.node is not None}

    def add(self, link: Link) -> None:
        """Take over a link that is new."""
        if self._is_closed:
            link.abort("this node is stopping")
            return
        self._links = self._open()
        self._dialled = {link: place for link, place in self._dialled.items() if not link.is_closed}
        self._links.setdefault((link.peer, link.lane), []).append(link)
        self._added.set()
        self._on_new(link)

    async def accept(self) -> None:
        """Take over what peers dial, until the transport is closed."""
        while True:
            try:
                link = await self._transport.accept()
            except LinkClosed:
                return
            self.add(link)

    async def await_link(self, node: NodeId, lane: Lane) -> Link:
        """A link that `node` dialled or is about to. Deadline: the caller's."""
        while (link := self.find(node, lane)) is None:
            self._added.clear()
            await self._added.wait()
        return link

    async def get(self, addr: NodeAddr, lane: Lane) -> Link:
        """An open link to `addr`, dialled if there is none; concurrent callers share one dial and its failure.

        A caller that is cancelled does not take the others down: one of them dials again. Deadline: the caller's.
        Raises LinkClosed.
        """
        while True:
            if self._is_closed:
                raise LinkClosed(f"{addr} is not dialled: this node is stopping")
            link = self.find_at(addr, lane)
            if link is not None:
                return link
            pending = self._dialling.get((addr, lane))
            if pending is None:
                return await self._dial(addr, lane)
            await asyncio.wait([pending])
            failure = None if pending.cancelled() else pending.result()
            if failure is not None:
                raise LinkClosed(str(failure), failure.answered) from failure

    def health(self) -> dict[PeerLane, EdgeHealth]:
        """What is known of each open (peer, lane), as copies."""
        return {
            key: replace(health, rtt_samples=list(health.rtt_samples))
            for key, links in self._open().items()
            for health in [_best(links).health]
        }

    async def aclose(self) -> None:
        """Close every link, at once for all. Dials under way fail."""
        self._is_closed = True
        links = [link for some in self._links.values() for link in some]
        self._links.clear()
        await asyncio.gather(*(link.aclose() for link in links))

    async def _dial(self, addr: NodeAddr, lane: Lane) -> Link:
        pending: asyncio.Future[LinkClosed | None] = asyncio.get_running_loop().create_future()
        self._dialling[addr, lane] = pending
        try:
            link = await self._transport.dial(addr, lane)
            self._note(addr, link.peer)
            self._dialled[link] = addr.host, addr.port
            self.add(link)
            pending.set_result(None)
        except LinkClosed as exc:
            # Not `exc`, whose traceback leads here and so to itself.
            pending.set_result(LinkClosed(str(exc), exc.answered))
            raise
        finally:
            del self._dialling[addr, lane]
            pending.cancel()  # harmless when done
        if link.is_closed:
            raise LinkClosed(f"{addr} is not dialled: this node is stopping")
        return link

    def _note(self, addr: NodeAddr, node: NodeId) -> None:
        """`node` answered at `addr`. Of MAX_PLACES the oldest that no link leads to, else the oldest, is forgotten."""
        self._nodes.pop((addr.host, addr.port), None)
        self._nodes[addr.host, addr.port] = node
        if len(self._nodes) > MAX_PLACES:
            linked = {peer for peer, _ in self._links}
            del self._nodes[
                next((place for place, node in self._nodes.items() if node not in linked), next(iter(self._nodes)))
            ]

    def _open(self) -> dict[PeerLane, list[Link]]:
        """The links without the closed ones."""
        alive = {key: [link for link in links if not link.is_closed] for key, links in self._links.items()}
        return {key: links for key, links in alive.items() if links}


def _best(links: list[Link]) -> Link:
    """The oldest of those with the best path."""
    return min(links, key=lambda link: link.health.path_kind == "relay")
