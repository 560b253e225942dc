"""From an admitted request to tokens: whoever speaks HTTP asks here, whoever measures or remembers looks on from here.

    async with gateway.run(Ask("tales", "chat", prompt_ids, params, key)) as run:      admission; waits for its turn
        async for token in run.tokens():                                              the route opens with the first
            ...                                                                        run.answer, run.job grow
                                                                    leaving it, however, frees session, place and quota

A consumer that stops pulling pauses its own generation and nobody else's: nothing is buffered here.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from dataclasses import dataclass, field
from typing import Literal, Protocol
from uuid import uuid4

from manyhands.api.http.watchdog import Watchdog
from manyhands.api.limits import NO_QUOTA, Admission, Quota
from manyhands.api.waterfall import TokenTime, Waterfall
from manyhands.config import LimitsConfig
from manyhands.core import Exactness, FinishReason, PathKind, SamplingParams
from manyhands.errors import Forbidden, ManyhandsError, NotFound, RateLimited
from manyhands.origin import Answer, Origin, Timings, Token
from manyhands.origin.draft import Drafting
from manyhands.origin.loop import Request
from manyhands.origin.repair_plan import Event, Repair
from manyhands.origin.route import Hop
from manyhands.origin.sampler import Constraint
from manyhands.route.search import Offer
from manyhands.wire.message import HopTiming

Api = Literal["chat", "completions", "responses", "native"]
# How often running requests are looked at for what happened to their routes: between two tokens nothing else tells of it.
LOOK_S = 0.1
# done: a finish reason · cancelled: the client left · refused: never admitted · failed: an error after that
Outcome = Literal["done", "cancelled", "refused", "failed"]


@dataclass(frozen=True, slots=True)
class Caller:
    """Whose request it is: the name of a key (None: nobody was asked for one) and what it may do.

    `models`: those it may use (None: all). `is_admin`: it may also change the swarm (evict, reassign).
    """

    name: str | None = None
    quota: Quota = NO_QUOTA
    models: frozenset[str] | None = None
    is_admin: bool = False

    def check_model(self, model: str) -> None:
        """Raise Forbidden if this key may not use `model`."""
        if self.models is not None and model not in self.models:
            raise Forbidden(
                f"key {self.name!r} may not use model {model[:100]!r}, only {', '.join(sorted(self.models))}"
            )


@dataclass(slots=True)
class Admitted:
    """An HTTP request that was let in and charged (Gateway.enter): its first job is paid."""

    is_paid: bool = True

    def spend(self) -> bool:
        """Whether the job that asks is the paid one."""
        was_paid, self.is_paid = self.is_paid, False
        return was_paid


class GatewayPart(Protocol):
    """What lives as long as the gateway is served."""

    async def open(self) -> None: ...

    async def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Ask:
    """What to generate. `prompt` is token ids (Origin.model.encode); a request for n choices asks n times."""

    model: str
    api: Api
    prompt: Sequence[int]
    params: SamplingParams
    caller: Caller = Caller()
    path: PathKind = "ring"
    constraint: Constraint | None = None  # text/grammar.py
    entry: Admitted | None = None  # None: not charged yet
    marks: Mapping[int, str] = field(default_factory=dict)  # special tokens that shall appear in the text
    draft: str = ""  # one of config.DRAFTS; "": as the node's configuration says
    is_fit: bool = False  # `prompt` and `params` are known to fit the model: once for all choices (prepare.check_fit)


@dataclass(slots=True)
class Job:
    """What may be told of a request: never its prompt, its text or its key. Grows until `outcome` is set.

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
    timings: Timings = field(default_factory=Timings)
    drafting: Drafting = field(default_factory=Drafting)
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
        self.job, self.answer, self.origin = job, answer, origin
        self._ask, self._observers = ask, observers
        self._last_at: float | None = None  # when the last token came
        self._timings: tuple[HopTiming, ...] = ()  # its hops'
        self._hops: list[Hop] | None = None  # the session's, as last seen
        self._news: asyncio.Future[None] | None = None  # done when something has happened to the route

    async def tokens(self) -> AsyncGenerator[Token, None]:
        """The tokens, to be pulled once. Raises what refuses or ends the session (errors.py)."""
        ask = self._ask
        drafter = self.origin.drafter(ask.draft)
        tokens = self.origin.stream(
            self.answer, path=ask.path, drafter=drafter, constraint=ask.constraint, marks=ask.marks
        )
        async with aclosing(tokens) as stream:
            try:
                async for token in stream:
                    self._follow()
                    self._note_turn()
                    self.job.completion_tokens += 1
                    for observer in self._observers:
                        observer.token(self.job, token)
                    yield token
            finally:
                self._follow()

    async def happenings(self) -> AsyncGenerator[Token | None, None]:
        """As `tokens`, and None when something happened to the route while the next token is waited for."""
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
        """Tell of what happened to the route since the last token."""
        if len(self.answer.events) > len(self.job.events):
            self._follow()

    def finish(self, reason: FinishReason) -> None:
        """The consumer has all it wants, and pulls no more: the job is done and not cancelled."""
        self.answer.finish_reason = reason

    def _note_turn(self) -> None:
        """A token came: where its time went. Several tokens of one step count as one turn."""
        session, timings, job = self.answer.session, self.answer.timings, self.job
        assert session is not None and timings.last_at is not None
        is_first = self._last_at is None
        turn = TokenTime()
        if session.timings is not self._timings:
            turn = TokenTime(session.timings, session.turn_s, timings.last_at - (self._last_at or timings.last_at))
        job.waterfall.note(job.hops, turn, is_first=is_first)
        self._timings, self._last_at = session.timings, timings.last_at

    def _follow(self) -> None:
        """Copy what may be told from the answer, and tell of new events."""
        job, answer = self.job, self.answer
        job.route, job.exactness, job.finish_reason = answer.route, answer.exactness, answer.finish_reason
        job.timings, job.repairs, job.drafting = answer.timings, answer.repairs, answer.drafting
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
        if self._news is not None and not self._news.done():
            self._news.set_result(None)


async def _next(tokens: AsyncGenerator[Token, None]) -> Token | None:
    return await anext(tokens, None)


async def _ended(pull: "asyncio.Task[Token | None]") -> None:
    """Cancel `pull` if it still runs, and wait until it has ended; its error is whoever's who asks for its result."""
    pull.cancel()
    await asyncio.wait((pull,))
    if not pull.cancelled():
        pull.exception()


class Gateway:
    """The models served here by name, and the requests that run. One event loop; not shared between loops."""

    def __init__(
        self,
        origins: Mapping[str, Origin],
        limits: LimitsConfig | None = None,
        observers: Iterable[Observer] = (),
        *,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self.origins = dict(origins)
        self.limits = limits or LimitsConfig()
        self.observers = list(observers)
        self.parts: list[GatewayPart] = []
        self.watchdog = Watchdog()
        self.jobs: dict[str, Job] = {}  # those that wait or run
        self.started_at = wall_clock()
        self._admission = Admission(self.limits, self._turn_has_come)
        self._turns: dict[str, asyncio.Future[None]] = {}
        self._runs: dict[str, Run] = {}
        self._next_look: asyncio.TimerHandle | None = None
        self._clock, self._wall_clock = clock, wall_clock

    @property
    def num_waiting(self) -> int:
        return len(self._admission.waiting)

    @property
    def num_running(self) -> int:
        return len(self._admission.running)

    def origin(self, model: str) -> Origin:
        """The origin of a model served here. Raises NotFound naming those that are."""
        if model not in self.origins:
            raise NotFound(f"model {model[:100]!r} is not served here; there is {', '.join(self.origins) or 'none'}")
        return self.origins[model]

    def enter(self, caller: Caller, api: Api) -> Admitted:
        """Charge a request before anything is done for it. Raises RateLimited if a quota is used up or the queue is full.

        Observers hear of one that is refused as of a job without a model: its body has not been read.
        """
        try:
            self._admission.enter(caller.name, caller.quota, self._clock())
        except RateLimited as error:
            job = Job(uuid4().hex, "", api, caller.name, self._wall_clock(), 0, 0, error=error.code)
            self._end(job, "refused")
            raise
        return Admitted()

    def run(self, ask: Ask) -> AbstractAsyncContextManager[Run]:
        """Admit `ask` and run it until the block is left. Waits for its turn: limits.patience_s.

        Raises NotFound, Forbidden, BadRequest, ContextOverflow; RateLimited if a quota is used up, the queue is full or
        too slow.
        """
        return self._run(ask)

    @asynccontextmanager
    async def _run(self, ask: Ask) -> AsyncIterator[Run]:
        ask.caller.check_model(ask.model)
        origin = self.origin(ask.model)
        request = Request(tuple(ask.prompt), ask.params) if ask.is_fit else origin.request_ids(ask.prompt, ask.params)
        answer = origin.answer(request)
        job = self._new_job(ask)
        outcome: Outcome = "cancelled"
        try:
            await self._admit(job, ask)
            self._tell_started(job)
            run = self._runs[job.id] = Run(ask, job, answer, origin, self.observers)
            self._keep_looking()
            yield run
        except ManyhandsError as error:
            outcome, job.error = ("refused" if job.queue_s is None else "failed"), error.code
            raise
        except Exception:
            outcome, job.error = "failed", ManyhandsError.code
            raise
        finally:
            self._end(job, "done" if job.finish_reason is not None and outcome == "cancelled" else outcome)

    def _new_job(self, ask: Ask) -> Job:
        size, limit = len(ask.prompt), ask.params.max_tokens
        return Job(uuid4().hex, ask.model, ask.api, ask.caller.name, self._wall_clock(), size, limit)

    async def _admit(self, job: Job, ask: Ask) -> None:
        asked_at, caller = self._clock(), ask.caller
        is_paid = ask.entry is not None and ask.entry.spend()
        self.jobs[job.id] = job
        turn = self._turns[job.id] = asyncio.get_running_loop().create_future()
        self._admission.ask(
            job.id, caller.name, caller.quota, job.prompt_tokens + job.max_tokens, asked_at, is_paid=is_paid
        )
        try:
            if not turn.done():
                async with asyncio.timeout(self.limits.patience_s):
                    await turn
        except TimeoutError:
            waited = f"no place within {self.limits.patience_s:g} s ({self.num_running} requests are running)"
            raise RateLimited(f"{waited}: try again later", self._admission.retry_after_s()) from None
        job.queue_s = self._clock() - asked_at

    def _turn_has_come(self, job: str) -> None:
        turn = self._turns[job]
        if not turn.done():
            turn.set_result(None)

    def _keep_looking(self) -> None:
        """Look at what runs every LOOK_S, as long as something does."""
        if self._next_look is None and self._runs:
            self._next_look = asyncio.get_running_loop().call_later(LOOK_S, self._look)

    def _look(self) -> None:
        self._next_look = None
        for run in list(self._runs.values()):
            run.look()
        self._keep_looking()

    def _tell_started(self, job: Job) -> None:
        for observer in self.observers:
            observer.started(job)

    def _end(self, job: Job, outcome: Outcome) -> None:
        job.outcome, job.ended = outcome, self._wall_clock()
        self._turns.pop(job.id, None)
        self._runs.pop(job.id, None)
        self.jobs.pop(job.id, None)
        self._admission.leave(
            job.id, job.prompt_tokens * (job.queue_s is not None) + job.completion_tokens, self._clock()
        )
        for observer in self.observers:
            observer.ended(job, outcome)
