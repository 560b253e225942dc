"""How a member gets its links to a swarm, and gets them back: which addresses it has, and when it dials them.

Known are those of the ticket, of the list of nodes, those of LAN discovery, and nodes that were linked before.
"""

import asyncio
import contextlib
import math
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from itertools import islice

from manyhands.core import EdgeHealth, NodeAddr, NodeId
from manyhands.errors import BadRequest, LinkClosed, ShardUnavailable, TicketError
from manyhands.net.transport import Link
from manyhands.node import Node
from manyhands.swarm.ticket import Ticket, check_address

DIAL_S = 5.0  # for one address of the ticket to answer
# While no node is linked, and for nodes of the list that are not; else at one address known from earlier.
REDIAL_S = 10.0
# Between looks at whether something calls for dialling at once: another network, a suspension, LAN discovery.
LOOK_S = 1.0
# Until the next look at the network when one has found another; doubled while it goes to and fro.
SETTLE_S, MAX_SETTLE_S = 3.0, 60.0
SUSPENDED_S = 2.0  # the machine slept for so long: links may be dead, addresses may have changed
MAX_LAN_ADDRESSES = 32  # addresses that LAN discovery found
LAN_S = 3.0  # between two rounds of dials because it found others: any machine of the network can say that there are
MAX_MET = 64  # nodes that are or were linked, whose addresses are remembered; the latter go first


def suspended_s() -> float:
    """For how long this machine has been suspended since it started; 0 where the system does not tell."""
    clock = getattr(time, "CLOCK_BOOTTIME", None)
    return 0.0 if clock is None else time.clock_gettime(clock) - time.monotonic()


class Bootstrap:
    """`own`: the addresses of this member. `nodes`: others to stay linked to. `keep_linked` is to run as a task of the node."""

    def __init__(
        self,
        node: Node,
        me: NodeId,
        ticket: Ticket,
        nodes: Sequence[NodeAddr],
        own: Callable[[], Sequence[NodeAddr]],
        suspended: Callable[[], float],
    ) -> None:
        self._node, self._me, self._ticket, self._nodes, self._own = node, me, ticket, nodes, own
        self._suspended = suspended
        self._behind: dict[NodeAddr, NodeId] = {}  # which node answered at an address
        self._met: dict[NodeId, NodeAddr] = {}  # nodes that were linked, and where to dial them; the latest last
        self._on_lan: list[NodeAddr] = []
        self._news = asyncio.Event()  # `_on_lan` has changed
        self._turn = 0
        self._has_stopped = False

    def edges(self) -> dict[NodeId, EdgeHealth]:
        """Control links to others."""
        health = self._node.pool.health().items()
        return {peer: edge for (peer, lane), edge in health if lane == "control" and peer != self._me}

    @property
    def met(self) -> dict[NodeId, NodeAddr]:
        """Nodes that are or were linked (the latest MAX_MET), and where to dial them; the latest last."""
        return self._met

    def answered(self) -> list[NodeAddr]:
        """Known addresses that a node took a call at."""
        return list(self._behind)

    def note_linked(self, link: Link) -> None:
        """There is a control link: remember where its node can be dialled, unless what it says is no address."""
        said = link.hello.listen
        if said is None or link.peer == self._me:
            return
        addr = NodeAddr(said.host, said.port, link.peer)
        with contextlib.suppress(TicketError):
            check_address(addr)
            self._met.pop(link.peer, None)
            self._met[link.peer] = addr
        if len(self._met) > MAX_MET:
            linked = self.edges()
            del self._met[next((node for node in self._met if node not in linked), next(iter(self._met)))]

    def stop(self) -> None:
        """Dial no more."""
        self._has_stopped = True

    async def call(self) -> int:
        """Call every node that the ticket names. Returns how many answered.

        Raises BadRequest if one of them has this node's own key; ShardUnavailable with the reasons if the ticket names
        others and none answers.
        """
        addresses = self.addresses()
        answers = await asyncio.gather(*(self.dial(addr) for addr in addresses), return_exceptions=True)
        for answer in answers:
            if isinstance(answer, BaseException) and not isinstance(answer, LinkClosed | TimeoutError):
                raise answer
        opened = sum(not isinstance(answer, BaseException) for answer in answers)
        if addresses and not opened:
            said = [str(a) or f"{d}: no answer within {DIAL_S:g} s" for d, a in zip(addresses, answers, strict=True)]
            # A node with several addresses is tried at all of them by each.
            reasons = "; ".join(dict.fromkeys("; ".join(said).split("; ")))
            raise ShardUnavailable(
                f"no node of swarm {self._ticket.name} answers ({reasons}): is it up there, and is this its newest ticket?"
            )
        return opened

    def found_on_lan(self, addrs: Iterable[NodeAddr]) -> None:
        """LAN discovery found members at `addrs` (the first MAX_LAN_ADDRESSES are used): dial those without a link."""
        found = list(islice(addrs, MAX_LAN_ADDRESSES))
        if found != self._on_lan:
            self._on_lan = found
            self._news.set()

    def addresses(self) -> list[NodeAddr]:
        """All that are known, of others. At one place another node may be by now than the one that the ticket names."""
        mine = {(addr.host, addr.port) for addr in self._own()}
        known = (*self._ticket.addresses, *self._nodes, *self._on_lan, *self._met.values())
        named = dict.fromkeys(addr for addr in reversed(known) if addr.node != self._me)
        return [addr for addr in named if (addr.host, addr.port) not in mine]

    async def dial(self, addr: NodeAddr) -> None:
        """A link to the node at `addr`. Raises LinkClosed, TimeoutError; BadRequest if it has this node's own key."""
        async with asyncio.timeout(DIAL_S):
            link = await self._node.pool.get(addr, "control")
        if link.peer == self._me:
            raise BadRequest(
                f"the node at {addr} has the same key as this one: move node.key away here, or start with --key FILE"
            )
        self._behind[addr] = link.peer

    async def keep_linked(self, look: Callable[[], Awaitable[bool]]) -> None:
        """Dial what is not linked, every REDIAL_S; at once if LAN discovery finds members, the machine slept, `look` finds it
        on another network, or the last link was lost.

        `look` is awaited before: links say at their start where this member is.
        """
        loop = asyncio.get_running_loop()
        due, slept, look_at = loop.time() + REDIAL_S, self._suspended(), loop.time()
        was_linked, settle_s, moved_at, lost_at = False, SETTLE_S, -math.inf, -math.inf
        is_told, told_at = False, -math.inf
        while not self._has_stopped:
            is_told |= await self._hears_news()
            has_news = is_told and loop.time() >= told_at + LAN_S
            is_told, told_at = is_told and not has_news, loop.time() if has_news else told_at
            has_slept = (suspended := self._suspended()) - slept > SUSPENDED_S
            has_moved = (has_slept or loop.time() >= look_at) and await look()
            if has_moved:
                settle_s = min(MAX_SETTLE_S, 2 * settle_s) if loop.time() - moved_at < MAX_SETTLE_S else SETTLE_S
                moved_at = loop.time()
                look_at = moved_at + settle_s
            has_lost = was_linked and not self.edges() and loop.time() >= lost_at + REDIAL_S
            lost_at, was_linked = loop.time() if has_lost else lost_at, bool(self.edges())
            if not (has_news or has_slept or has_moved or has_lost) and loop.time() < due:
                continue
            due, slept = loop.time() + REDIAL_S, suspended
            shut = self._unlinked_addresses(is_all=has_slept or has_moved)
            await asyncio.gather(*(self.dial(addr) for addr in shut), return_exceptions=True)

    async def _hears_news(self) -> bool:
        """Whether there is news within LOOK_S."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LOOK_S):
                await self._news.wait()
        has_news = self._news.is_set()
        self._news.clear()
        return has_news

    def _unlinked_addresses(self, *, is_all: bool) -> list[NodeAddr]:
        """Where to dial: with links, at nodes of the list and of the local network, and at one other known address in turn."""
        linked, known = self.edges(), self.addresses()
        self._behind = {addr: node for addr, node in self._behind.items() if addr in known}
        shut = [addr for addr in known if addr.node not in linked and self._behind.get(addr) not in linked]
        if is_all or not linked:
            return shut
        always = [addr for addr in shut if addr in self._nodes or addr in self._on_lan]
        others = [addr for addr in shut if addr not in always]
        self._turn += 1
        return always + ([others[self._turn % len(others)]] if others else [])
