"""Streams that any gateway of the swarm can go on with: which ids their events get, and what an id that comes back allows.

    start ─► Stream ─ event(choice, made) ─► id + event         Last-Event-ID ─ claim ─► resume ─► Stream: the rest

An attempt at a stream repeats the events of the first one and sends those that the client lacks: text follows
from request and seed (docs/exactness.md). Docs: docs/resume.md.
"""

import asyncio
import os
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Coroutine, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from manyhands.api.event_id import (
    ATTEMPT_BYTES,
    NO_ROUTE,
    NODE_BYTES,
    SALT_BYTES,
    STREAM_BYTES,
    BadEventId,
    Position,
    Reached,
    Sealer,
    derive,
    digest,
    marks_of,
    route_bytes,
    unseal,
)
from manyhands.api.run import Ask, Caller
from manyhands.core import Exactness, ModelId
from manyhands.errors import Conflict
from manyhands.origin.adoption import Adoption, HopMark
from manyhands.route.search import Offer

if TYPE_CHECKING:
    from manyhands.api.http.sse import Event
    from manyhands.api.preparation.desk import Prepared

# How long an id is good after its event was told.
MAX_AGE_S: Final = 3600.0
# Resumptions of a stream that are part of its request; more are requests of their own, and pay for all their tokens.
FREE_RESUMPTIONS: Final = 8
# Ids of a prompt that are looked at in one turn of the event loop: a millisecond.
IDS_A_TURN: Final = 1 << 14
# Streams of one caller of which a gateway remembers how far they were resumed; the least recently used are forgotten.
MAX_REMEMBERED: Final = 4096
_GOES_ON: Final = "the client has come back for this stream: it goes on there"


class TakenOver(Conflict):
    """The client has come back for its stream: this attempt at it ends."""

    code = "stream_resumed"


class Claim(NamedTuple):
    """An id that came back. `is_free`: going on is part of the request that was charged when the stream began. `number`: of one
    that came later it is higher."""

    position: Position
    is_free: bool
    number: int = 0


@dataclass(slots=True)
class _Known:
    """What this gateway remembers of a stream."""

    num_resumed: int = 0
    furthest: int = 0  # events that the client had when it came back last
    created: int = 0  # when its first attempt began, by the wall clock


class _OfCaller:
    """The streams of one caller that were resumed. Of those created until `forgotten`, some are not known any more."""

    def __init__(self) -> None:
        self.streams: OrderedDict[bytes, _Known] = OrderedDict()
        self.forgotten = -1

    def known(self, position: Position) -> _Known:
        """What is remembered of a stream, which is the latest used from now on. One that may have been forgotten counts as
        resumed as often as is free: who rotates ids would never pay otherwise."""
        if (known := self.streams.get(position.stream)) is None:
            is_new = position.created > self.forgotten
            known = self.streams[position.stream] = _Known(0 if is_new else FREE_RESUMPTIONS, 0, position.created)
        self.streams.move_to_end(position.stream)
        if len(self.streams) > MAX_REMEMBERED:
            self.forgotten = max(self.forgotten, self.streams.popitem(last=False)[1].created)
        return known


class Streams:
    """The streams of one gateway. `secret`: the same on all gateways of a swarm. `wall_clock`: Unix seconds."""

    def __init__(self, secret: bytes | None = None, wall_clock: Callable[[], float] = time.time) -> None:
        self._secret = derive(secret or os.urandom(32), "streams 1")
        self._wall_clock = wall_clock
        self._num_claims = 0
        self._callers: dict[bytes, _OfCaller] = {}  # by their digests
        self._running: dict[bytes, Stream] = {}

    def __repr__(self) -> str:
        return (
            f"<Streams: {len(self._running)} run, {sum(len(it.streams) for it in self._callers.values())} remembered>"
        )

    def claim(self, text: str, caller: Caller) -> Claim:
        """What the id `text`, shown by `caller`, allows.

        Raises BadEventId for an id that is none, of another key, too old, or from before a point that the stream was
        resumed from. Costs microseconds, and changes nothing but a count.
        """
        position = unseal(self._secret, text)
        if position.caller != caller_digest(caller):
            raise BadEventId("Last-Event-ID is of a stream of another key: send the key that began it")
        if (age_s := self._wall_clock() - position.told) > MAX_AGE_S:
            raise BadEventId(
                f"Last-Event-ID is {age_s:.0f} s old; ids are good for {MAX_AGE_S:g} s: send the request without it"
            )
        known = self._callers.setdefault(position.caller, _OfCaller()).known(position)
        if position.num_events < known.furthest:
            raise BadEventId(
                f"Last-Event-ID is event {position.num_events} of a stream that was resumed from event {known.furthest} "
                "since: send the newest id"
            )
        known.num_resumed += 1
        self._num_claims += 1
        return Claim(position, known.num_resumed <= FREE_RESUMPTIONS, self._num_claims)

    def open(
        self, claim: Claim | None, request: bytes, caller: Caller, seed: int, num_choices: int, name: str = ""
    ) -> "Stream":
        """A new stream of the request with digest `request`, or the rest of what was claimed.

        `name`: 32 hex digits to call a new one; "": random ones.

        Raises BadEventId if that is of another request.
        """
        if claim is None:
            now, choices = int(self._wall_clock()), (Reached(),) * num_choices
            stream = bytes.fromhex(name) if name else os.urandom(STREAM_BYTES)
            salt = os.urandom(SALT_BYTES)
            return self._stream(Position(stream, now, now, seed, salt, request, caller_digest(caller), choices))
        position = claim.position
        if position.request != request or len(position.choices) != num_choices:
            raise BadEventId(
                "Last-Event-ID is of another request: send the same one again (model, prompt, every parameter), or leave "
                "the header out"
            )
        if (known := self._callers[position.caller].streams.get(position.stream)) is not None:
            known.furthest = max(known.furthest, position.num_events)
        return self._stream(position, claim)

    def _stream(self, position: Position, claim: Claim | None = None) -> "Stream":
        sealer = Sealer(self._secret, position.stream, os.urandom(ATTEMPT_BYTES))
        handle = derive(self._secret, "handle", position.stream, position.salt)
        return Stream(position, sealer, handle, self._wall_clock, self._running, claim)


class ChoiceProgress(NamedTuple):
    """How far a choice is: tokens, thoughts among them, and the hops of its route (the same list while that stands)."""

    tokens: int
    thoughts: int = 0
    hops: Sequence[Offer] = ()
    is_done: bool = False
    exactness: Exactness = "E0"


class Stream:
    """One attempt at a stream: gives ids to its events but for those that the client has. `run` is its time."""

    def __init__(
        self,
        position: Position,
        sealer: Sealer,
        handle: bytes,
        wall_clock: Callable[[], float],
        running: "dict[bytes, Stream]",
        claim: Claim | None,
    ) -> None:
        self.position, self.is_resumed = position, claim is not None
        self._is_free, self._number = (claim.is_free, claim.number) if claim is not None else (False, 0)
        self._sealer, self._handle, self._wall_clock, self._running = sealer, handle, wall_clock, running
        self._made = [0] * len(position.choices)  # events, told or skipped
        self._choices = list(position.choices)
        self._exactness = position.exactness
        self._routes: dict[int, tuple[Sequence[Offer], bytes]] = {}
        self._work: asyncio.Task[None] | None = None
        self._is_taken_over = False

    def __repr__(self) -> str:
        return f"<Stream {self.id} of {len(self._choices)} choices, resumed={self.is_resumed}>"

    @property
    def id(self) -> str:
        """32 hex digits, the same for all attempts."""
        return self.position.stream.hex()

    def had(self, index: int) -> Reached:
        """What the client had of a choice when this attempt began."""
        return self.position.choices[index]

    def ask(self, index: int, ask: Ask) -> Ask:
        """`ask` for a choice of this attempt: what an earlier one was charged for is not charged again.

        Raises BadEventId where the rest of the text could be that of another one.
        """
        if self.is_resumed and ask.rules is not None and ask.rules.codec != "lossless":
            raise BadEventId(
                f"an answer with codec {ask.rules.codec} cannot be gone on with: ask again, without the id"
            )
        paid = len(ask.prompt) + self.had(index).tokens if self._is_free else 0
        handle = derive(self._handle, "choice", index.to_bytes(4, "big"))[:16]
        had = self.had(index)
        adoption = Adoption(handle, marks_of(had.route), had.tokens, self.position.exactness, ask.received)
        return replace(ask, paid_tokens=paid, adoption=adoption, is_resumed=self.is_resumed)

    def names(self, index: int) -> bytes:
        """What the ids of a choice's tool calls are made from. No secret."""
        return self.position.stream + index.to_bytes(4, "big")

    def is_behind(self, index: int) -> bool:
        """Whether the client has what comes next of this choice."""
        return self._made[index] < self._choices[index].events

    async def run(self, produce: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Await `produce()`, which sends the events. An attempt at the stream that still runs here ends first.

        Raises TakenOver once another attempt begins here, or where one runs that the client asked for later: what was to be
        done before this one began took longer.
        """
        while (other := self._running.get(self.position.stream)) is not None:
            if other._number > self._number:
                raise TakenOver(_GOES_ON)
            await other._end()
        self._running[self.position.stream] = self
        self._work = work = asyncio.get_running_loop().create_task(produce())
        try:
            await work
        except asyncio.CancelledError:
            if not self._is_taken_over:
                raise
            raise TakenOver(_GOES_ON) from None
        finally:
            del self._running[self.position.stream]

    async def _end(self) -> None:
        """End the attempt, and wait until its sessions are parked."""
        self._is_taken_over = True
        assert self._work is not None
        self._work.cancel()
        await asyncio.wait((self._work,))
        await asyncio.sleep(0)  # `run` leaves

    def event(self, index: int, make: "Callable[[], Event]", progress: "ChoiceProgress") -> "Event | None":
        """The next event of a choice with its id, None if the client has it. `progress`: with this event.

        To be called when it is written next (sse.py): an id counts what was told before it.
        """
        self._exactness = max(self._exactness, progress.exactness)
        self._made[index] = made = self._made[index] + 1
        reached, route = self._choices[index], self._route(index, progress.hops)
        if made <= reached.events:
            self._choices[index] = reached._replace(route=route)
            return None
        self._choices[index] = Reached(progress.tokens, made, progress.thoughts, progress.is_done, route)
        return self._with_id(make())

    def usage_event(self, make: "Callable[[], Event]") -> "Event | None":
        """The event after those of all choices with its id, None if the client has it."""
        return None if self.position.is_usage_told else self._with_id(make(), is_usage_told=True)

    def _with_id(self, event: "Event", *, is_usage_told: bool = False) -> "Event":
        stream, created, _, seed, salt, request, caller, *_ = self.position
        told, choices = int(self._wall_clock()), tuple(self._choices)
        now = Position(stream, created, told, seed, salt, request, caller, choices, is_usage_told, self._exactness)
        line = b"id: %b\n" % self._sealer.seal(now)
        if isinstance(event, bytes):
            return line + event
        pieces = iter(event)
        return chain((line + next(pieces),), pieces)

    def _route(self, index: int, hops: Sequence[Offer]) -> bytes:
        """`hops` as ids hold them, made once for each list of them; those known before where there are none yet."""
        if not hops:
            return self._choices[index].route
        seen, route = self._routes.get(index, ((), NO_ROUTE))
        if seen is not hops:
            spans = [(hop.node[: 2 * NODE_BYTES], hop.info.span) for hop in hops]
            route = route_bytes([HopMark(node, span.start, span.end) for node, span in spans])
            self._routes[index] = hops, route
        return route


def caller_digest(caller: Caller) -> bytes:
    """Tells keys apart, on all gateways that know them; callers without one are one."""
    return digest("caller", b"" if caller.name is None else (caller.tenant or caller.name).encode())


async def request_digest(path: str, model: ModelId, made: "Prepared", names: Collection[str] = ()) -> bytes:
    """Tells apart requests whose streams differ. `names`: wishes beside those of `made` that change events.

    Other work is done between parts of long prompts.
    """
    seed = made.given.get("seed", 0)
    wishes = (path, model, replace(made.params, seed=seed % (1 << 64)), made.count, made.grammar)
    reading = (made.is_open, made.is_parallel, made.is_talk, sorted(made.functions), sorted(names))
    prompts = [await _as_bytes(prompt) for prompt in made.prompts]
    return digest("request", repr((wishes, reading)).encode(), *prompts)


async def _as_bytes(ids: Sequence[int]) -> bytes:
    parts = []
    for start in range(0, len(ids), IDS_A_TURN):
        parts.append(np.asarray(ids[start : start + IDS_A_TURN], ">u4").tobytes())
        if len(ids) > IDS_A_TURN:
            await asyncio.sleep(0)
    return b"".join(parts)
