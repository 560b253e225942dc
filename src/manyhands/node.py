"""A node without roles: its links, its tasks, and a table {message type: handlers} that roles register with.

    pool ─ new link ─► watch.read ─ message ─► the handlers of its type, in the order of registration, until one takes it

`async with Node(...)` owns one TaskGroup; leaving it cancels its tasks and closes every link.
"""

import asyncio
import contextlib
import logging
import os
from collections.abc import Callable, Coroutine, Iterable, Sequence
from functools import partial
from types import TracebackType
from typing import Any, Self, TypeVar

from manyhands.core import NodeAddr, NodeId, SpanInfo
from manyhands.errors import LinkClosed, ProtocolError
from manyhands.net.pool import LinkPool
from manyhands.net.setbacks import Setbacks, not_again
from manyhands.net.transport import Link, Transport
from manyhands.net.watch import Watch, read
from manyhands.wire.message import PROTOCOL_VERSION, Hello, Lane, Message, Token

logger = logging.getLogger(__name__)

M = TypeVar("M", bound=Message)
Handler = Callable[[M, Link], bool]  # whether the message was for it
Undo = Callable[[], None]


class Node:
    """`make_transport` gets the function that makes this node's Hello, which names its `spans`. Enter it before use."""

    def __init__(
        self,
        make_transport: Callable[[Callable[[Lane], Hello]], Transport],
        *,
        name: str,
        spans: Callable[[], tuple[SpanInfo, ...]],
    ) -> None:
        self.name = name
        self.address: NodeAddr | None = None
        self._spans = spans
        self.transport = make_transport(self._hello)
        self.pool = LinkPool(self.transport, self._linked, self._late_s)
        self.watch = Watch(self._peers_in_use)
        self._in_use: list[Callable[[], Iterable[NodeId]]] = [self.pool.in_use]
        self.setbacks = Setbacks()  # which nodes and addresses not to dial now
        self._handlers: dict[type[Any], list[Handler[Any]]] = {}
        self._on_linked: list[Callable[[Link], None]] = []
        self._on_lost: list[Callable[[Link, str], None]] = []
        self._on_gone: list[Callable[[NodeId], None]] = []
        self._on_unreachable: list[Callable[[NodeId], None]] = []
        self._running: set[asyncio.Task[None]] = set()
        self._tasks = asyncio.TaskGroup()

    # -- roles --------------------------------------------------------------------------------------------------------

    def handle(self, kind: type[M], handler: Handler[M]) -> Undo:
        """Give messages of type `kind` to `handler`, after those registered before it, until the result is called."""
        return _registered(self._handlers.setdefault(kind, []), handler)

    def wait_for(self, peers: Callable[[], Iterable[NodeId]]) -> None:
        """`peers` gives those whose silence holds work of a role up: they are given up sooner (net/watch.py)."""
        self._in_use.append(peers)

    def _peers_in_use(self) -> set[NodeId]:
        return {peer for peers in self._in_use for peer in peers()}

    def observe_links(
        self,
        linked: Callable[[Link], None] | None = None,
        lost: Callable[[Link, str], None] | None = None,
        gone: Callable[[NodeId], None] | None = None,
        unreachable: Callable[[NodeId], None] | None = None,
    ) -> Undo:
        """Call `linked` for every new link and `lost` (with the reason) for every closed one, until the result is called;
        `gone` when the last control link to a node broke, before `lost`; `unreachable` when a dial of a node failed.
        """
        undos: list[Undo] = []
        if linked is not None:
            undos.append(_registered(self._on_linked, linked))
        if lost is not None:
            undos.append(_registered(self._on_lost, lost))
        if gone is not None:
            undos.append(_registered(self._on_gone, gone))
        if unreachable is not None:
            undos.append(_registered(self._on_unreachable, unreachable))
        return lambda: _call_all(undos)

    # -- life ---------------------------------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        await self._tasks.__aenter__()
        self.start(self.pool.accept())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(2):
                await self.pool.aclose()
                await self.transport.aclose()
        for task in list(self._running):
            task.cancel()
        await self._tasks.__aexit__(None, None, None)

    @property
    def tasks(self) -> frozenset["asyncio.Task[None]"]:
        """The tasks of this node that have not ended."""
        return frozenset(self._running)

    def start(self, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        """Run `work` as a task of this node until it ends or the node stops. Its failure stops the node."""
        task = self._tasks.create_task(work)
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return task

    async def listen(self, addr: NodeAddr) -> NodeAddr:
        """Accept peers at `addr` (port 0: any). Raises BadRequest if the port is taken."""
        self.address = await self.transport.listen(addr)
        return self.address

    def _late_s(self) -> float:
        return self.watch.stalls.worst_s(asyncio.get_running_loop().time())

    def _hello(self, lane: Lane) -> Hello:
        return Hello(PROTOCOL_VERSION, lane, self.name, self.address, self._spans(), Token(os.urandom(16).hex()))

    # -- links --------------------------------------------------------------------------------------------------------

    async def reach(
        self, addr: NodeAddr, node: NodeId, timeout_s: float, lane: Lane = "control", *, is_hearsay: bool = False
    ) -> Link:
        """A link to `node`, dialled at `addr` if there is none. `is_hearsay`: another peer named `addr`, perhaps wrongly, so
        that a failure is one of the address and not of the node.

        Raises LinkClosed, at once if `node` or `addr` could not be reached lately (setbacks.py).
        """
        if (link := self.pool.find(node, lane)) is not None:
            return link
        wait_s = self.setbacks.wait_s(node, addr, asyncio.get_running_loop().time())
        if wait_s:
            raise not_again(addr, wait_s)
        self.setbacks.began(node, addr)
        try:
            async with asyncio.timeout(timeout_s):
                link = await self.pool.get(NodeAddr(addr.host, addr.port, node), lane)
        except (LinkClosed, TimeoutError) as error:
            self.note_unreachable(node, [addr], error, is_hearsay=is_hearsay)
            raise LinkClosed(str(error) or f"{addr} did not answer within {timeout_s:g} s") from error
        finally:
            self.setbacks.ended(addr)
        self.setbacks.reached(node, addr)
        return link

    def note_unreachable(
        self, node: NodeId, addrs: Sequence[NodeAddr], error: LinkClosed | TimeoutError, *, is_hearsay: bool = False
    ) -> None:
        """A dial of `node` at `addrs` failed. `is_hearsay`: as of `reach`."""
        answered = error.answered if isinstance(error, LinkClosed) else {}
        self.setbacks.failed(None if is_hearsay else node, addrs, asyncio.get_running_loop().time(), answered)
        if not is_hearsay:
            for tell in list(self._on_unreachable):
                tell(node)

    def _linked(self, link: Link) -> None:
        """The pool has a new link: watch and read it."""
        self.start(self._read(link))
        if self.watch.add(link):
            self.start(self.watch.run())
        self.setbacks.reached(link.peer)
        for tell in list(self._on_linked):
            tell(link)

    async def _read(self, link: Link) -> None:
        """Dispatch what arrives on a link until it ends; then tell the roles."""
        reason = await read(link, partial(self._dispatch, link=link))
        if link.lane == "control" and self.pool.find(link.peer, "control") is None:
            self.setbacks.lost(link.peer)
            for gone in list(self._on_gone):
                gone(link.peer)
        for tell in list(self._on_lost):
            tell(link, reason)

    def _dispatch(self, message: Message, link: Link) -> None:
        for handler in self._handlers.get(type(message), ()):
            if handler(message, link):
                return
        if isinstance(message, Hello):
            raise ProtocolError("a second Hello")
        logger.debug("peer=%s: a %s without a receiver", link.peer[:8], type(message).__name__)


T = TypeVar("T")


def _registered(found: list[T], one: T) -> Undo:
    found.append(one)
    return lambda: found.remove(one)


def _call_all(undos: Sequence[Undo]) -> None:
    for undo in undos:
        undo()
