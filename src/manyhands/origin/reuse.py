"""Sessions that begin where an earlier request of the same tenant got to: whether, over which hops, and how they are parked.

    find (conversations.py) ─ is it worth it? (Routes) ─ who is still there? (Routes.rejoin) ─ Open(resume) on those

Nothing here can fail a request: where it does not work out, the request computes its prompt like any other.
"""

import os
import time
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import NamedTuple, Protocol
from weakref import WeakSet

import numpy as np

from manyhands.core import Exactness, NodeId, SessionId
from manyhands.errors import ManyhandsError, ShardUnavailable
from manyhands.origin.adoption import Adoption, HopMark
from manyhands.origin.conversations import Conversations, ParkedConversation, Prefix
from manyhands.origin.lossy import LEAST_ROWS, Lossy
from manyhands.origin.repair_plan import Slot
from manyhands.origin.route import Lease, Resume
from manyhands.origin.session import First, Session
from manyhands.origin.sessions import Sessions
from manyhands.route.search import Offer


class Around(Protocol):
    """What is needed of origin/request_routes.py."""

    async def keeps(self, route: Sequence[Offer], saved: int, lease: Lease) -> bool:
        """Whether going on over `route`, where `saved` positions are cached, is no slower than the best route of today."""

    async def marked(self, marks: Sequence[HopMark]) -> tuple[Offer, ...]:
        """The hops of `marks`. Raises ShardUnavailable."""

    async def rejoin(
        self, route: Sequence[Offer], excluded: Collection[NodeId], positions: int, cuts: Collection[int]
    ) -> Sequence[Slot]:
        """`route` with its lost hops replaced, by none that reaches over the layers `cuts`. Raises ShardUnavailable."""


class Resumed(NamedTuple):
    """An open session that begins with parked positions on at least one hop, and how exact those are.

    `redraw`: so many tokens of the answer were drawn before, and the rows they were drawn from are on their way.
    """

    route: tuple[Offer, ...]
    session: Session
    exactness: Exactness
    redraw: int = 0


class Reuse:
    """The parked conversations of one model. Tenants are told apart by name; None never shares anything."""

    def __init__(self, sessions: Sessions) -> None:
        self.conversations = Conversations()
        self._sessions = sessions
        self._spoilt = WeakSet[Session]()  # that ran over a node that computed wrong numbers

    async def open(
        self, tenant: str | None, prompt: Sequence[int], lease: Lease, around: Around, first: First | None = None
    ) -> Resumed | None:
        """A session that goes on with what `tenant` has parked; None if nothing fits, or it is not worth it, or is gone.
        `first` sends the rows behind that."""
        allows_loss, now = lease.lossy is not None, time.monotonic()
        found = [] if tenant is None else self.conversations.find(tenant, prompt, now, allows_loss=allows_loss)
        try:
            prefix = await _first_kept(found, lease, around)
            if prefix is None:
                return None
            conversation = prefix.conversation
            if allows_loss and (lease := _lossy(lease, prefix)).lossy is None and conversation.lossy is not None:
                return None
            resume = Resume(conversation.name, prefix.length, ())
            session = await self._open(conversation.route, resume, lease, around, first)
        except ManyhandsError:  # the usual way may do better, or says what is wrong
            return None
        if not session.begins_at:  # no hop has it any more, but the route stands
            self.conversations.lose(conversation)
            return Resumed(_offers(session), session, "E0")
        self.conversations.use(conversation, time.monotonic())
        return Resumed(_offers(session), session, conversation.exactness)

    async def adopt(self, adoption: Adoption, prompt: Sequence[int], lease: Lease, around: Around) -> Resumed | None:
        """A session that goes on where that of `adoption` was, as far as its hops still have it; None if they do not."""
        until, own = len(prompt) + adoption.tokens - 1, len(prompt) - 1
        if not adoption.route or until < 1:
            return None
        resume = Resume(SessionId(bytes(16)), until, (), adoption.handle, own if adoption.tokens else None)
        try:
            marked = await around.marked(adoption.route)
            session = await self._open(marked, resume, lease, around)
        except ManyhandsError:
            return None
        last = session.route.hops[-1]  # another in its place was asked for no rows
        redraw = max(0, (last.cached or until) - own) if last.offer == marked[-1] and last.has_log else 0
        # Which tokens the others were is not known here: they are drawn anew, after those whose rows come again.
        session.begins_at = min(session.begins_at, own + redraw)
        return Resumed(_offers(session), session, adoption.exactness, redraw)

    async def _open(
        self, before: Sequence[Offer], resume: Resume, lease: Lease, around: Around, first: First | None = None
    ) -> Session:
        """A hop that refuses or is gone is replaced, each once; the others begin with what they have."""
        excluded = set[NodeId]()
        while True:
            cuts = lease.lossy.boundaries or () if lease.lossy is not None else ()
            slots = await around.rejoin(before, excluded, resume.until, cuts)
            kept = frozenset(index for index, slot in enumerate(slots) if slot.kept is not None)
            if not kept:
                raise ShardUnavailable("no hop of the conversation is left")
            try:
                route = [slot.offer for slot in slots]
                early = first if len(kept) == len(slots) else None  # else rows have to come before those
                return await self._sessions.open(route, lease, resume._replace(kept=kept), early)
            except ShardUnavailable as refusal:
                if refusal.node is None or refusal.node in excluded:
                    raise
                excluded.add(NodeId(refusal.node))

    def park(self, tenant: str | None, session: Session, ids: Sequence[int], exactness: Exactness) -> None:
        """End the session. If every hop has cached `ids`, it is parked for the next request of `tenant`; without one, for
        a while, for the origin that adopts it, if its lease has a handle."""
        if not ids or not _is_sound(session) or session in self._spoilt:
            self._sessions.close(session)
            return
        if tenant is None:
            self._sessions.close(session, None, len(ids))
            return
        name = SessionId(os.urandom(16))
        route = _offers(session)
        self._sessions.close(session, name, len(ids))
        lossy = session.route.lease.lossy if session.route.boundaries else None
        conversation = ParkedConversation(tenant, name, np.array(ids, np.int32), route, exactness, lossy)
        self._forget(self.conversations.add(conversation, time.monotonic()))

    def distrust(self, node: NodeId) -> None:
        """`node` computed wrong numbers: go on with nothing that hops have computed from them, and park nothing of that."""
        self._forget(self.conversations.lose_over(node))
        for session in self._sessions.active.values():
            if any(hop.offer.node == node for hop in session.route.hops):
                self._spoilt.add(session)

    def _forget(self, gone: Sequence[ParkedConversation]) -> None:
        for old in gone:
            self._sessions.forget(old.name, old.route)


async def _first_kept(found: Sequence[Prefix], lease: Lease, around: Around) -> Prefix | None:
    for prefix in found:
        if await around.keeps(prefix.conversation.route, prefix.length, lease):
            return prefix
    return None


def _lossy(lease: Lease, prefix: Prefix) -> Lease:
    """`lease`, which allows loss, of a session that begins with `prefix`: what was rounded there is rounded again."""
    lossy, cached = prefix.conversation.lossy, prefix.length
    if lossy is None and lease.prompt_length - cached < LEAST_ROWS:
        return replace(lease, lossy=None)
    return replace(lease, lossy=(lossy or Lossy(())).going_on(cached, lease.prompt_length))


def _is_sound(session: Session) -> bool:
    """Whether every hop is there and has computed what is committed, and none has ever sent what cannot be."""
    if session.is_closed or session.losses or session.untrusted_nodes:
        return False
    return all(hop.is_whole and not hop.is_rebuilding and not hop.control.is_closed for hop in session.route.hops)


def _offers(session: Session) -> tuple[Offer, ...]:
    return tuple(hop.offer for hop in session.route.hops)
