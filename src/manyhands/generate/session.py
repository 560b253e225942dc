"""One request's route as its origin sees it: open the hops, send steps, take results, close. Knows nothing of tokens.

Node (node.py) hands it what arrives for its id: `on_opened`, `on_step`, `on_credit`, `on_fault`, `on_lost`. Everything is
synchronous but `opened`, `next_result` and `aclose`, which wait.
"""

import asyncio
import os
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from manyhands.config import RequestConfig
from manyhands.core import ORIGIN_HOP, EndsAt, ModelId, NodeId, PathKind, Precision, SamplingParams, SessionId
from manyhands.errors import (
    BadRequest,
    LinkClosed,
    ManyhandsError,
    ModelError,
    PipelineAborted,
    PipelineStalled,
    ProtocolError,
    ShardUnavailable,
    WeightsMismatch,
)
from manyhands.net.transport import Link
from manyhands.route.search import Offer
from manyhands.wire.message import Close, Content, Credit, Fault, Open, Opened, Payload, Step

_ERRORS: dict[str, type[ManyhandsError]] = {
    e.code: e for e in (BadRequest, ModelError, WeightsMismatch, ShardUnavailable, PipelineStalled, PipelineAborted)
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
    arithmetic: str | None = None
    owed: int = 0
    outbox: deque[Step] = field(default_factory=deque)


class Session:
    """An open route. Created by `Node.open_session`, which also closes it; not shared between requests."""

    def __init__(self, origin: NodeId, hops: Sequence[Hop], lease: Lease, config: RequestConfig) -> None:
        self.id = SessionId(os.urandom(16))
        self.epoch = 1
        self.window = 0
        self.hops = list(hops)
        self.lease = lease
        self._origin, self._config = origin, config
        self._results: deque[Step] = deque()
        self._error: ManyhandsError | None = None
        self._arrived = asyncio.Event()

    def __repr__(self) -> str:
        return f"<Session {self.id.hex()[:8]} epoch={self.epoch} hops={len(self.hops)} error={self._error}>"

    # -- opening and closing ------------------------------------------------------------------------------------------

    async def open(self) -> None:
        """Open every hop at once and wait until all have a lease. Deadline: config.open_timeout_s.

        Raises Busy, WeightsMismatch, ContextOverflow, ... as the hops say; PipelineStalled at the deadline.
        """
        for index, hop in enumerate(self.hops):
            hop.control.send(self._open_message(index))
        try:
            async with asyncio.timeout(self._config.open_timeout_s):
                while not all(hop.arithmetic for hop in self.hops):
                    await self._wait()
        except TimeoutError:
            silent = [f"{i} ({h.offer.name})" for i, h in enumerate(self.hops) if h.arithmetic is None]
            limit = self._config.open_timeout_s
            raise PipelineStalled(f"hops {', '.join(silent)} did not answer Open within {limit:g} s") from None

    def _open_message(self, index: int) -> Open:
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
            span=self.hops[index].offer.info.span,
            capacity=lease.capacity,
            prompt_length=lease.prompt_length,
            path=lease.path,
            ends=lease.ends,
            predecessor=self.hops[index - 1].offer.node if ring and index else self._origin,
            successor=self.hops[index + 1].offer.addr if ring and not last else None,
            sampling=lease.sampling if last else None,
            window=self._config.window,
        )

    def close(self) -> None:
        """Tell every hop to free the session at once. Harmless when repeated or when links are gone."""
        self._error = self._error or PipelineAborted("the session is closed")
        for hop in self.hops:
            hop.outbox.clear()
            _try_send(hop.control, Close(self.id))

    # -- steps --------------------------------------------------------------------------------------------------------

    def send(
        self, position: int, count: int, reply_from: int, ids: tuple[int, ...] | None, payload: Payload | None
    ) -> None:
        """Send one step to hop 0, now or as soon as its credits allow. Raises the session's error if it has one."""
        if self._error is not None:
            raise self._error
        content: Content = "hidden"
        step = Step(self.id, self.epoch, 0, position, count, reply_from, self.window, content, ids, payload)
        self._forward(step)

    def abandon_window(self) -> None:
        """Steps sent so far and not yet computed need not be: hops drop them when the next one arrives."""
        self.window += 1

    async def next_result(self) -> Step:
        """The next step that reached the origin. Deadline: config.stall_timeout_s without any.

        Raises PipelineStalled, or what ended the session (PipelineAborted, Corruption, ...).
        """
        try:
            async with asyncio.timeout(self._config.stall_timeout_s):
                while not self._results:
                    await self._wait()
        except TimeoutError:
            limit = self._config.stall_timeout_s
            raise PipelineStalled(f"no step came back within {limit:g} s") from None
        return self._results.popleft()

    async def _wait(self) -> None:
        if self._error is not None:
            raise self._error
        self._arrived.clear()
        await self._arrived.wait()
        if self._error is not None and not self._results:
            raise self._error

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

    def on_opened(self, message: Opened) -> None:
        if message.hop < len(self.hops) and message.epoch == self.epoch:
            self.hops[message.hop].arithmetic = message.arithmetic
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
        self._owe(sender, link)
        if step.window < self.window:
            return
        if step.hop == ORIGIN_HOP:
            self._results.append(step)
            self._arrived.set()
        elif self.lease.path == "star" and step.hop < len(self.hops):
            self._forward(step)

    def _owe(self, sender: int, link: Link) -> None:
        hop = self.hops[sender]
        hop.owed += 1
        if hop.owed >= min(CREDIT_BATCH, max(1, self._config.window // 2)):
            last = sender == len(self.hops) - 1
            _try_send(link, Credit(self.id, ORIGIN_HOP if last else sender + 1, hop.owed))
            hop.owed = 0

    def on_credit(self, message: Credit) -> None:
        """Hop `message.hop` has computed steps that this origin sent it."""
        if message.hop < len(self.hops):
            hop = self.hops[message.hop]
            hop.window_left += message.steps
            self._flush(hop)

    def on_fault(self, message: Fault) -> None:
        blamed = message.hop if message.blame is None else message.blame
        who = f"hop {blamed} ({self.hops[blamed].offer.name})" if blamed < len(self.hops) else "the origin"
        self._fail(_ERRORS.get(message.code, PipelineAborted)(f"{who}: {message.detail}"))

    def on_lost(self, link: Link, reason: str) -> None:
        """One of our links is gone; the session cannot go on if a hop was behind it."""
        for index, hop in enumerate(self.hops):
            if link in (hop.control, hop.data):
                self._fail(PipelineAborted(f"hop {index} ({hop.offer.name}) is gone: {reason}"))

    def _fail(self, error: ManyhandsError) -> None:
        self._error = self._error or error
        self._arrived.set()


def _try_send(link: Link, message: Step | Credit | Close) -> None:
    """Send unless the link is gone: its loss reaches the session through on_lost."""
    if not link.is_closed:
        try:
            link.send(message)
        except LinkClosed:
            return
