"""One request of the gateway: what is asked, what may be shown of it, and its tokens as they come.

`Gateway.run` (gateway.py) makes and ends a Run; observers are told of its Job.
"""

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

from manyhands.api.auth import Caller as Caller
from manyhands.api.waterfall import NO_TURN, TokenTime, Waterfall
from manyhands.core import Exactness, FinishReason, PathKind, SamplingParams
from manyhands.origin import Answer, Origin, Timings, Token
from manyhands.origin.adoption import Adoption
from manyhands.origin.audit import Audit
from manyhands.origin.draft import Drafting
from manyhands.origin.repair_plan import Event, Repair
from manyhands.origin.request_routes import Routing
from manyhands.origin.route import Hop
from manyhands.origin.sampler import Constraint
from manyhands.route.offer import Offer, Rules
from manyhands.text.received import ReceivedText
from manyhands.wire.timings import HopTiming

Api = Literal["chat", "completions", "responses", "native", "messages", "ollama", "tokens", "debug", "bus"]
# How often running requests are looked at for what happened to their routes: between two tokens nothing else reports it.
LOOK_S = 0.1
# done: a finish reason · cancelled: the client left · refused: never admitted · failed: an error after that
Outcome = Literal["done", "cancelled", "refused", "failed"]


@dataclass(slots=True)
class Admitted:
    """An HTTP request that was let in and charged (Gateway.enter): its first job is paid. `goes_on`: with a stream that was
    charged when it began, so all of them are."""

    is_paid: bool = True
    goes_on: bool = False

    def spend(self) -> bool:
        """Whether the job that asks is a paid one."""
        was_paid, self.is_paid = self.is_paid, self.goes_on
        return was_paid


@dataclass(frozen=True, slots=True)
class Ask:
    """What to generate. `prompt` is token ids (Origin.model.encode); a request for n choices asks n times."""

    model: str
    api: Api
    prompt: Sequence[int]
    params: SamplingParams
    caller: Caller = field(default_factory=Caller)
    path: PathKind = "ring"
    constraint: Constraint | None = None  # text/grammar.py
    entry: Admitted | None = None  # None: not charged yet
    marks: Mapping[int, str] = field(default_factory=dict)  # special tokens that shall appear in the text
    draft: str = ""  # one of config.DRAFTS; "": as the node's configuration says
    rules: Rules | None = None  # how the route is chosen; None: as the node's configuration says
    is_fit: bool = False  # `prompt` and `params` are known to fit the model: once for all choices (prepare.check_fit)
    adoption: Adoption | None = None  # of an earlier attempt at the same stream, or to be adopted
    received: ReceivedText | None = None  # what the client says it has of the answer of a stream that goes on
    is_resumed: bool = False  # an earlier attempt began the stream, and told `adoption.tokens`
    job_id: str = ""  # "": a new one
    paid_tokens: int = (
        0  # of prompt and answer, that an earlier attempt at the same stream was charged for (streams.py)
    )


class Resumption(NamedTuple):
    """How an attempt at a stream went on after `tokens`: over caches that hops had kept, or without."""

    tokens: int
    by: Literal["adoption", "recomputing"]


@dataclass(slots=True)
class Job:
    """What may be shown of a request: never its prompt, its text or its key. Grows until `outcome` is set.

    `created` and `ended` are Unix times. `queue_s` is the wait for admission; `timings` begin after it. `route` is the first
    one, `hops` the present one; `session` is its public name, `untrusted_nodes` how many nodes sent impossible values.
    """

    id: str
    model: str
    api: Api
    key: str | None
    created: float
    prompt_tokens: int
    max_tokens: int
    queue_s: float | None = None  # None: not admitted yet
    completion_tokens: int = 0
    cached_tokens: int = 0  # of the prompt: an earlier request had them computed
    resumed: Resumption | None = None  # None: the first attempt
    prefilled_tokens: int = 0  # of the prompt: computed by now, those cached among them; grows before the first token
    paid_tokens: int = 0  # of prompt and answer: an earlier attempt at the same stream was charged for them
    timings: Timings = field(default_factory=Timings)
    drafting: Drafting = field(default_factory=Drafting)
    routing: Routing = field(default_factory=Routing)
    audit: Audit | None = None  # None: none was made
    session: str | None = None
    route: tuple[Offer, ...] = ()
    hops: tuple[Offer, ...] = ()
    waterfall: Waterfall = field(default_factory=Waterfall)
    untrusted_nodes: int = 0
    repairs: list[Repair] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    exactness: Exactness = "E0"
    finish_reason: FinishReason | None = None
    outcome: Outcome | None = None
    error: str | None = None  # the code of what failed (errors.py)
    ended: float | None = None
    caller: str = ""  # who asked, as a salted hash (callers.py)

    @property
    def is_prefilling(self) -> bool:
        """Whether a part of the prompt has been computed, and not all of it."""
        return 0 < self.prefilled_tokens < self.prompt_tokens


class Observer(Protocol):
    """Looks on. Called on the event loop, so it must be quick; what it raises is the gateway's bug, not the client's."""

    def started(self, job: Job) -> None:
        """It was admitted; its route opens next."""

    def token(self, job: Job, token: Token) -> None:
        """`job` counts it already."""

    def event(self, job: Job, event: Event) -> None:
        """Something happened to its route. Told within LOOK_S, and always before the token that follows it."""

    def ended(self, job: Job, outcome: Outcome) -> None:
        """Exactly once for every job, also for one that never started."""


class Run:
    """One admitted request. Made by `Gateway.run`, which also ends it."""

    def __init__(self, ask: Ask, job: Job, answer: Answer, origin: Origin, observers: Sequence[Observer]) -> None:
        self.job, self.answer, self.origin, self.entry = job, answer, origin, ask.entry
        self._ask, self._observers = ask, observers
        self._last_at: float | None = None  # when the last token came
        self._timings: tuple[HopTiming, ...] = ()  # its hops'
        self._hops: list[Hop] | None = None  # the session's, as last seen
        self._news: asyncio.Future[None] | None = None  # done when something has happened to the route

    async def tokens(self) -> AsyncGenerator[Token, None]:
        """The tokens, to be pulled once. Raises what refuses or ends the session (errors.py)."""
        ask = self._ask
        tokens = self.origin.stream(
            self.answer,
            path=ask.path,
            draft=ask.draft,
            constraint=ask.constraint,
            marks=ask.marks,
            tenant=ask.caller.tenant,
            rules=ask.rules,
            adoption=ask.adoption,
        )
        async with aclosing(tokens) as stream:
            try:
                async for token in stream:
                    self._follow()
                    self._note_turn()
                    self.job.completion_tokens += 1
                    if self.job.completion_tokens > self.answer.redrawn:  # the others were told once
                        for observer in self._observers:
                            observer.token(self.job, token)
                    yield token
            finally:
                self._follow()

    async def happenings(self) -> AsyncGenerator[Token | None, None]:
        """As `tokens`, and None when something happened to the route, or more of the prompt was computed, while the next token
        is waited for."""
        async with aclosing(self.tokens()) as tokens:
            while True:
                pull = asyncio.ensure_future(_next(tokens))
                try:
                    while not pull.done():
                        self._news = asyncio.get_running_loop().create_future()
                        await asyncio.wait((pull, self._news), return_when=asyncio.FIRST_COMPLETED)
                        if not pull.done():
                            yield None
                finally:
                    await _ended(pull)
                if (token := pull.result()) is None:
                    return
                yield token

    def look(self) -> None:
        """Tell of what happened to the route since the last token, and of the prompt before the first."""
        self._note_prefill()
        if len(self.answer.events) > len(self.job.events):
            self._follow()

    def _note_prefill(self) -> None:
        job, session = self.job, self.answer.session
        if session is None or job.prefilled_tokens == job.prompt_tokens:
            return
        done = job.prompt_tokens if self.answer.token_ids else max(session.begins_at, session.returns.reached)
        if (done := min(done, job.prompt_tokens)) > job.prefilled_tokens:
            job.prefilled_tokens = done
            self._wake()

    def finish(self, reason: FinishReason) -> None:
        """The consumer has all it wants, and pulls no more: the job is done and not cancelled."""
        self.answer.finish_reason = reason

    def _note_turn(self) -> None:
        """A token came: where its time went. Several tokens of one step count as one turn."""
        session, timings, job = self.answer.session, self.answer.timings, self.job
        assert session is not None and timings.last_at is not None
        returns, last_at = session.returns, timings.last_at
        turn = NO_TURN
        if returns.timings is not self._timings:
            turn = TokenTime(returns.timings, returns.turn_s, last_at - (self._last_at or last_at))
        job.waterfall.note(job.hops, turn, is_first=self._last_at is None)
        self._timings, self._last_at = returns.timings, last_at

    def _follow(self) -> None:
        """Copy what may be shown from the answer, and report new events."""
        job, answer = self.job, self.answer
        self._note_prefill()
        job.route, job.exactness, job.finish_reason = answer.route, answer.exactness, answer.finish_reason
        job.timings, job.repairs, job.drafting = answer.timings, answer.repairs, answer.drafting
        job.cached_tokens, job.routing, job.audit = answer.cached_tokens, answer.routing, answer.audit
        if self._ask.is_resumed and self._ask.adoption is not None:
            is_adopted = answer.redrawn > 0 and answer.cached_tokens > 0
            job.resumed = Resumption(self._ask.adoption.tokens, "adoption" if is_adopted else "recomputing")
        if (session := answer.session) is not None:
            job.untrusted_nodes = len(session.untrusted_nodes)
            if session.route.hops is not self._hops:  # a new route is a new list
                self._hops = session.route.hops
                job.session, job.hops = session.name, tuple([hop.offer for hop in session.route.hops])
        if len(answer.events) > len(job.events):
            self._tell(answer.events[len(job.events) :])

    def _tell(self, fresh: Sequence[Event]) -> None:
        self.job.events = [*self.job.events, *fresh]
        for event in fresh:
            for observer in self._observers:
                observer.event(self.job, event)
        self._wake()

    def _wake(self) -> None:
        """There is something to tell before the next token."""
        if self._news is not None and not self._news.done():
            self._news.set_result(None)


async def _next(tokens: AsyncGenerator[Token, None]) -> Token | None:
    return await anext(tokens, None)


async def _ended(pull: "asyncio.Task[Token | None]") -> None:
    """Cancel `pull` if it still runs, and wait until it has ended. Its error goes to the caller that asks for its result."""
    pull.cancel()
    await asyncio.wait((pull,))
    if not pull.cancelled():
        pull.exception()
