"""One request's route as its origin sees it: open the hops, send steps, take results, close. Knows nothing of tokens.

Node (node.py) hands it what arrives for its id: `on_opened`, `on_step`, `on_credit`, `on_fault`, `on_lost`. Everything is
synchronous but `opened`, `next_result` and `aclose`, which wait.
"""

import asyncio
import contextlib
import os
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from manyhands.config import RequestConfig
from manyhands.core import ORIGIN_HOP, EndsAt, ModelId, NodeId, PathKind, Precision, SamplingParams, SessionId, Span
from manyhands.errors import (
    BadRequest,
    Corruption,
    Detour,
    Draining,
    LinkClosed,
    ManyhandsError,
    ModelError,
    PipelineAborted,
    PipelineStalled,
    ProtocolError,
    ShardUnavailable,
    WeightsMismatch,
)
from manyhands.generate.repair import Slot
from manyhands.net.transport import Link, betters
from manyhands.route.search import Offer
from manyhands.wire.message import (
    SHADOW,
    Close,
    Content,
    Credit,
    Fault,
    Feed,
    HopTiming,
    Open,
    Opened,
    Payload,
    Probe,
    Progress,
    Step,
)

_ERRORS: dict[str, type[ManyhandsError]] = {
    e.code: e
    for e in (BadRequest, ModelError, WeightsMismatch, ShardUnavailable, Draining, PipelineStalled, PipelineAborted)
}
CREDIT_BATCH = 8


@dataclass(frozen=True, slots=True)
class Lease:
    """What a session asks of its hops."""

    model: ModelId
    precision: Precision
    capacity: int
    prompt_length: int
    path: PathKind
    ends: EndsAt
    sampling: SamplingParams | None  # given iff the last hop draws the tokens


@dataclass(slots=True)
class Hop:
    """One hop of an open route. `control` and `data` are this origin's links to it (data: None in the middle of a ring)."""

    offer: Offer
    control: Link
    data: Link | None
    window_left: int
    arithmetic: str = ""
    epoch: int = 0  # of the last Opened
    has_log: bool = True
    is_whole: bool = True  # its cache holds the committed positions, or they are on their way
    owed: int = 0
    outbox: deque[Step] = field(default_factory=deque)


@dataclass(slots=True)
class Shadow:
    """A standby for the hop with the same span. Positions [0, fed) were sent to it, all committed; it has computed some.

    In a star those of [passed, fed) have yet to come by here on their way to it, from the hop before.
    """

    hop: Hop
    fed: int = 0
    computed: int = 0
    passed: int = 0

    @property
    def is_open(self) -> bool:
        """Whether it has had a place in the session."""
        return self.hop.epoch > 0


class HopLost(PipelineAborted):
    """A running session has lost hops (`Session.losses`); it can be repaired."""


class Session:
    """An open route. Created by `Node.open_session`, which also closes it; not shared between requests.

    `losses` maps hops of the present route that are lost to the reason. While there are any, nothing is sent. `leaving`
    does so for hops that would like to leave. `shadows` stand by for the hops of their spans (shadow.py).
    """

    def __init__(self, origin: NodeId, hops: Sequence[Hop], lease: Lease, config: RequestConfig) -> None:
        self.id = SessionId(os.urandom(16))
        self.epoch = 0
        self.window = 0
        self.hops = list(hops)
        self.lease = lease
        self.losses: dict[int, str] = {}
        self.leaving: dict[int, str] = {}
        self.has_detour = False  # a hop is reached through a relay, and there is a direct link to it by now
        self.liars: set[NodeId] = set()
        self.shadows: dict[Span, Shadow] = {}
        self.refused: set[NodeId] = set()  # nodes that would not, or could not, go on being a shadow
        self._unclosed: list[Hop] = []  # out of the route, but the route that leaves them out does not stand yet
        self.last_progress: float = 0.0
        self.timings: tuple[HopTiming, ...] = ()  # of the last step that brought rows, one a hop
        self.turn_s = 0.0  # from the last send to that step
        self._sent_at = 0.0
        self.sent_until = 0  # the end of the last step sent: what every hop should come to compute
        self._progress: dict[int, Progress] = {}
        self._origin, self._config = origin, config
        self._results: deque[Step] = deque()
        self._error: ManyhandsError | None = None
        self._arrived = asyncio.Event()
        self._is_running = False

    def __repr__(self) -> str:
        return f"<Session {self.id.hex()[:8]} epoch={self.epoch} hops={len(self.hops)} error={self._error}>"

    @property
    def is_closed(self) -> bool:
        """Whether the session has ended, well or badly."""
        return self._error is not None

    @property
    def needs_ends(self) -> bool:
        """Whether the first and the last hop must hold the model's ends."""
        return self.lease.ends == "edges"

    # -- opening, changing and closing the route ----------------------------------------------------------------------

    async def open(self) -> None:
        """Open every hop at once and wait until all have a lease. Deadline: config.open_timeout_s.

        Raises Busy, WeightsMismatch, ContextOverflow, ... as the hops say; ShardUnavailable naming the node if one is
        lost meanwhile; PipelineStalled at the deadline.
        """
        self.epoch += 1
        try:
            await self._place([Slot(hop.offer, None) for hop in self.hops], range(len(self.hops)))
        except HopLost as error:
            refusal = ShardUnavailable(str(error))
            refusal.node = self.hops[min(self.losses)].offer.node
            raise refusal from error
        self._is_running = True

    async def reshape(self, slots: Sequence[Slot], hops: Sequence[Hop]) -> None:
        """Put the route into a new shape, in a new epoch: first the hops that recompute, then those that feed them.

        The order matters: a hop drops what reaches it before it has heard of the epoch. Hops that are no longer in the route
        are closed last: one that only wished to leave can be taken back if its replacement refuses.
        `hops` are those of `slots`, survivors among them. Deadline: config.reopen_timeout_s for each of the two. Raises
        HopLost if one of them is lost meanwhile or does not answer; what ended the session otherwise.
        """
        staying = {hop.offer.node for hop in hops}
        gone = [hop for hop in (*self.hops, *self._unclosed) if hop.offer.node not in staying]
        self._unclosed = gone
        # A node of the route is no shadow any more; places it has beside the route's are closed with the session.
        self.shadows = {span: s for span, s in self.shadows.items() if s.hop.offer.node not in staying}
        self.epoch += 1
        self.hops = list(hops)
        self.losses.clear()
        self.leaving.clear()
        self._results.clear()
        self.timings = ()
        self.sent_until = 0
        for hop in hops:
            hop.window_left, hop.owed = self._config.window, 0
            hop.outbox.clear()
        for index, hop in enumerate(hops):
            if hop.control.is_closed or (hop.data is not None and hop.data.is_closed):
                self.lose(index, "is gone")
        await self._place(slots, [i for i, slot in enumerate(slots) if slot.recomputes])
        await self._place(slots, [i for i, slot in enumerate(slots) if not slot.recomputes])
        for hop in gone:
            _try_send(hop.control, Close(self.id))
        self._unclosed = []
        self._move_shadows()

    async def _place(self, slots: Sequence[Slot], indices: Sequence[int]) -> None:
        limit = self._config.reopen_timeout_s if self._is_running else self._config.open_timeout_s
        if not all(slots[index].offer.info.is_loaded for index in indices):
            limit = self._config.load_timeout_s
        for index in indices:
            _try_send(self.hops[index].control, self._open_message(index, slots[index]))
        try:
            async with asyncio.timeout(limit):
                while any(self.hops[index].epoch < self.epoch for index in indices):
                    await self._wait()
        except TimeoutError:
            silent = [i for i in indices if self.hops[i].epoch < self.epoch]
            reason = f"did not answer Open within {limit:g} s"
            if self._is_running:
                for index in silent:
                    self.lose(index, reason)
                raise HopLost(f"hops {silent} {reason}") from None
            names = ", ".join(f"{i} ({self.hops[i].offer.name})" for i in silent)
            raise PipelineStalled(f"hops {names} {reason}") from None

    def _open_message(self, index: int, slot: Slot) -> Open:
        last = index == len(self.hops) - 1
        lease = self.lease
        ring = lease.path == "ring"
        return Open(
            session=self.id,
            epoch=self.epoch,
            hop=index,
            num_hops=len(self.hops),
            model=lease.model,
            precision=lease.precision,
            span=slot.offer.info.span,
            capacity=lease.capacity,
            prompt_length=lease.prompt_length,
            path=lease.path,
            ends=lease.ends,
            predecessor=self.hops[index - 1].offer.node if ring and index else self._origin,
            successor=self.hops[index + 1].offer.addr if ring and not last else None,
            sampling=lease.sampling if last else None,
            window=self._config.window,
            replay_from=slot.replay_from,
            replay_until=slot.replay_until,
            emit_from=slot.emit_from,
        )

    def close(self) -> None:
        """Tell every hop to free the session at once. Harmless when repeated or when links are gone."""
        self._error = self._error or PipelineAborted("the session is closed")
        for hop in (*self.hops, *self._unclosed, *(shadow.hop for shadow in self.shadows.values())):
            hop.outbox.clear()
            _try_send(hop.control, Close(self.id))

    # -- shadows ------------------------------------------------------------------------------------------------------

    def index_of(self, span: Span) -> int | None:
        """The hop of the present route that serves exactly `span`."""
        return next((i for i, hop in enumerate(self.hops) if hop.offer.info.span == span), None)

    def open_shadow(self, hop: Hop) -> None:
        """Ask `hop`, whose node is not in the route, to stand by for the hop of its span, which is."""
        self.shadows[hop.offer.info.span] = Shadow(hop)
        self._place_shadow(hop)

    def _place_shadow(self, hop: Hop) -> None:
        index = self.index_of(hop.offer.info.span)
        assert index is not None
        _try_send(hop.control, self._open_message(index, Slot(hop.offer, None, emit_from=SHADOW)))

    def _move_shadows(self) -> None:
        """The route has changed: shadows of hops that stayed get their place in the new epoch, others are let go.

        What was on its way to them is dropped there, so it is to be fed again.
        """
        for span, shadow in list(self.shadows.items()):
            if self.index_of(span) is None:
                self._drop_shadow(span)
            else:
                shadow.fed = shadow.passed = shadow.computed
                self._place_shadow(shadow.hop)

    def _drop_shadow(self, span: Span) -> None:
        gone = self.shadows.pop(span).hop
        if all(shadow.hop.offer.node != gone.offer.node for shadow in self.shadows.values()):
            _try_send(gone.control, Close(self.id))

    def feed(self, span: Span, until: int) -> None:
        """Have the hop before `span` (not the first) send its shadow the committed positions it lacks, up to `until`.

        Only after results came back in this epoch: whatever else that hop had to send of these positions came before.
        """
        shadow, index = self.shadows[span], self.index_of(span)
        assert index
        feeder = self.hops[index - 1]
        _try_send(feeder.control, Feed(self.id, self.epoch, index - 1, shadow.hop.offer.addr, shadow.fed, until))
        shadow.passed, shadow.fed = shadow.fed, until

    def feed_first(self, shadow: Shadow, position: int, ids: Sequence[int], payload: Payload | None) -> None:
        """Send the shadow of the first hop one step of committed positions, which this origin alone knows."""
        count, carried = len(ids), None if payload is not None else tuple(ids)
        step = Step(self.id, self.epoch, 0, position, count, position + count, 0, "hidden", carried, payload)
        assert shadow.hop.data is not None
        _try_send(shadow.hop.data, step)

    def is_from_shadow(self, hop: int, link: Link) -> bool:
        """Whether `link` leads to the node of the shadow of hop `hop`."""
        return self._shadow(hop) is not None and link.peer == self._shadow(hop).hop.offer.node  # type: ignore[union-attr]

    def _shadow(self, hop: int) -> Shadow | None:
        return self.shadows.get(self.hops[hop].offer.info.span) if hop < len(self.hops) else None

    def on_shadow(self, message: Opened | Progress | Fault) -> None:
        """What the shadow of hop `message.hop` says. It is worth no repair: one that is in trouble is let go."""
        shadow = self._shadow(message.hop)
        if shadow is None or message.epoch != self.epoch:
            return
        match message:
            case Opened():
                shadow.hop.epoch, shadow.hop.arithmetic = message.epoch, message.arithmetic
            case Progress():
                shadow.computed = max(shadow.computed, min(message.computed, shadow.fed))
            case Fault(blame=None) | Fault(code=Draining.code):
                self.refused.add(shadow.hop.offer.node)
                self._drop_shadow(shadow.hop.offer.info.span)

    # -- steps --------------------------------------------------------------------------------------------------------

    def send(
        self, position: int, count: int, reply_from: int, ids: tuple[int, ...] | None, payload: Payload | None
    ) -> None:
        """Send one step to hop 0, now or as soon as its credits allow. Raises the session's error if it has one.

        While hops are lost nothing is sent: whoever repairs the route sends it again.
        """
        if self._error is not None:
            raise self._error
        if self.losses:
            return
        self.sent_until = position + count
        self._sent_at = time.monotonic()
        content: Content = "hidden"
        step = Step(self.id, self.epoch, 0, position, count, reply_from, self.window, content, ids, payload)
        self._forward(step)

    async def next_result(self, deadline_s: float) -> Step:
        """The next step that reached the origin. Raises TimeoutError if none does within `deadline_s`.

        Raises HopLost if the route is broken, or what ended the session.
        """
        async with asyncio.timeout(deadline_s):
            while not self._results:
                await self._wait()
        return self._results.popleft()

    async def probe(self) -> int:
        """Ask every hop how far it is; return the hop that holds the route up. Deadline: config.probe_timeout_s.

        That is the first that has not computed what was sent: it is slow, frozen, or cut off from the hop before it. If
        all have, the last hop's answer got lost.
        """
        self._progress.clear()
        for hop in self.hops:
            _try_send(hop.control, Probe(self.id, self.epoch))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._config.probe_timeout_s):
                while len(self._progress) < len(self.hops):
                    await self._wait()
        done = {i for i, p in self._progress.items() if p.computed >= self.sent_until}
        return next((i for i in range(len(self.hops)) if i not in done), len(self.hops) - 1)

    async def _wait(self) -> None:
        if self._error is not None:
            raise self._error
        self._raise_losses()
        self._arrived.clear()
        await self._arrived.wait()
        if self._error is not None and not self._results:
            raise self._error
        self._raise_losses()

    def _raise_losses(self) -> None:
        if self.losses:
            said = "; ".join(f"hop {i} ({self.hops[i].offer.name}) {why}" for i, why in sorted(self.losses.items()))
            raise HopLost(said)

    def _forward(self, step: Step) -> None:
        hop = self.hops[step.hop]
        hop.outbox.append(step)
        self._flush(hop)

    @staticmethod
    def _flush(hop: Hop) -> None:
        while hop.outbox and hop.window_left > 0:
            hop.window_left -= 1
            assert hop.data is not None
            _try_send(hop.data, hop.outbox.popleft())

    # -- what arrives -------------------------------------------------------------------------------------------------

    def is_from(self, hop: int, link: Link) -> bool:
        """Whether `link` leads to the node of hop `hop`: what others say in its name is not heard."""
        return hop < len(self.hops) and link.peer == self.hops[hop].offer.node

    def on_opened(self, message: Opened) -> None:
        if message.epoch == self.epoch:
            hop = self.hops[message.hop]
            hop.arithmetic, hop.epoch, hop.has_log = message.arithmetic, message.epoch, message.has_log
            self._arrived.set()

    def on_step(self, step: Step, link: Link) -> None:
        """A step for the origin (the last hop's), or, in a star, for the next hop. Others are dropped.

        Raises ProtocolError if the sender is not who should have sent it.
        """
        if step.epoch != self.epoch:
            return
        sender = len(self.hops) - 1 if step.hop == ORIGIN_HOP else step.hop - 1
        if not 0 <= sender < len(self.hops) or link.peer != self.hops[sender].offer.node:
            raise ProtocolError("a step came from a node that is not the sender its route names")
        if self._pass_to_shadow(step):
            return
        self.last_progress = asyncio.get_running_loop().time()
        self._owe(sender, link)
        if step.window < self.window:
            return
        if step.hop == ORIGIN_HOP:
            if step.count and len(step.timings) == len(self.hops):
                self.timings, self.turn_s = step.timings, time.monotonic() - self._sent_at
            self._results.append(step)
            self._arrived.set()
        elif self.lease.path == "star" and step.hop < len(self.hops):
            self._forward(step)

    def _pass_to_shadow(self, step: Step) -> bool:
        """In a star: whether `step` is for a shadow (`feed`), and so no affair of the route's; it costs no credit.

        It is sent on if it is the next; else it is dropped, and the shadow falls behind.
        """
        shadow, end = self._shadow(step.hop) if self.lease.path == "star" else None, step.position + step.count
        if shadow is None or not shadow.passed < shadow.fed >= end:
            return False
        if step.position == shadow.passed:
            shadow.passed = end
            assert shadow.hop.data is not None
            _try_send(shadow.hop.data, step)
        return True

    def _owe(self, sender: int, link: Link) -> None:
        hop = self.hops[sender]
        hop.owed += 1
        if hop.owed >= min(CREDIT_BATCH, max(1, self._config.window // 2)):
            last = sender == len(self.hops) - 1
            _try_send(link, Credit(self.id, ORIGIN_HOP if last else sender + 1, hop.owed))
            hop.owed = 0

    def on_credit(self, message: Credit) -> None:
        """Hop `message.hop` has computed steps that this origin sent it."""
        hop = self.hops[message.hop]
        hop.window_left += message.steps
        self._flush(hop)

    def on_progress(self, message: Progress) -> None:
        if message.epoch == self.epoch:
            self._progress[message.hop] = message
            self._arrived.set()

    def on_fault(self, message: Fault) -> None:
        """A hop cannot go on, or blames a neighbour. Its refusal to open, and where the request itself is at fault, ends the
        session; else the hop at fault is lost. A hop knows nothing of others: such a blame falls on itself."""
        if message.epoch != self.epoch:
            return
        if message.code == Draining.code and self._is_running and self._has_opened(message.hop):
            self.leaving[message.hop] = message.detail
            return
        if message.code == Detour.code:
            self.has_detour = True
            return
        near = range(max(0, message.hop - 1), min(len(self.hops), message.hop + 2))
        at_fault = message.blame if message.blame is not None and message.blame in near else message.hop
        kind = _ERRORS.get(message.code, PipelineAborted)
        blames_origin = message.blame == ORIGIN_HOP and message.hop == 0
        is_refusal = message.blame is None and (kind is BadRequest or not self._is_running)
        if is_refusal or blames_origin:
            who = "the origin" if blames_origin else f"hop {at_fault} ({self.hops[at_fault].offer.name})"
            error = kind(f"{who}: {message.detail}")
            error.node = self.hops[at_fault].offer.node
            self._fail(error)
        else:
            self.lose(
                at_fault,
                message.detail,
                lied=message.blame is not None and message.code in (Corruption.code, ProtocolError.code),
            )

    def _has_opened(self, hop: int) -> bool:
        """Whether the hop has its place in this epoch: else a fault of it answers our Open."""
        return self.hops[hop].epoch == self.epoch

    def on_linked(self, link: Link) -> None:
        """There is a new link of this origin."""
        ours = [old for hop in self.hops for old in (hop.control, hop.data) if old is not None]
        self.has_detour |= any(betters(link, old) for old in ours)

    def on_lost(self, link: Link, reason: str) -> None:
        """One of our links is gone: the hops behind it are lost."""
        for index, hop in enumerate(self.hops):
            if link in (hop.control, hop.data):
                self.lose(index, f"is gone: {reason}")
        for span, shadow in list(self.shadows.items()):
            if link in (shadow.hop.control, shadow.hop.data):
                del self.shadows[span]

    def lose(self, index: int, reason: str, *, lied: bool = False) -> None:
        """Hop `index` cannot be relied on any more, nor can others on its node; who waits for results gets HopLost.

        `lied`: it sent what cannot be, so its node is not to come back into this session.
        """
        node = self.hops[index].offer.node
        if lied:
            self.liars.add(node)
        for other, hop in enumerate(self.hops):
            if hop.offer.node == node:
                self.losses.setdefault(other, reason)
        self._arrived.set()

    def _fail(self, error: ManyhandsError) -> None:
        self._error = self._error or error
        self._arrived.set()


def _try_send(link: Link, message: Step | Credit | Close | Open | Probe | Feed) -> None:
    """Send unless the link is gone: its loss reaches the session through on_lost."""
    if not link.is_closed:
        try:
            link.send(message)
        except LinkClosed:
            return
