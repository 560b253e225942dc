"""Admission and the requests that run: the HTTP routes ask here, metrics, logs and the job history observe (run.py: Observer).

    async with gateway.run(Ask("tales", "chat", prompt_ids, params, key)) as run:      admission; waits for its turn
        async for token in run.tokens():                                              the route opens with the first
            ...                                                                        run.answer, run.job grow
                                                                    leaving it, however, frees session, place and quota

A consumer that stops pulling pauses its own generation and no other: nothing is buffered here.
"""

import asyncio
import logging
import math
import time
from collections.abc import AsyncIterator, Callable, Container, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final, Protocol

from manyhands.api.callers import CallerNames
from manyhands.api.http.arrival import new_job_id
from manyhands.api.http.body import BadField
from manyhands.api.http.watchdog import Watchdog
from manyhands.api.limits import Admission
from manyhands.api.names import NO_NAMES, ModelNames, listed
from manyhands.api.run import LOOK_S, Admitted, Api, Ask, Caller, Job, Observer, Outcome, Run
from manyhands.api.streams import Claim, Streams
from manyhands.config import LimitsConfig
from manyhands.core import ModelId, Precision
from manyhands.errors import ExperimentalDisabled, ManyhandsError, ModelNotFound, RateLimited
from manyhands.origin import Origin
from manyhands.origin.loop import Request
from manyhands.plain import one_line

logger = logging.getLogger(__name__)

BRING_S: Final = 10.0  # between two attempts to load a model that could not be loaded
MAX_MODELS: Final = 32  # loaded beside this machine's own, each for good with its tokenizer, ends and metrics
MAX_BRINGING: Final = 4  # models that are loaded at once: where they come from may be slow, and others are asked for


class GatewayPart(Protocol):
    """What lives as long as the gateway is served."""

    async def open(self) -> None: ...

    async def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class OfferedModel:
    """A model that could be served here, before it is loaded. `is_covered`: nodes serve all its layers now."""

    id: ModelId
    precision: Precision
    num_layers: int
    context_length: int
    is_covered: bool = True


class OtherModels(Protocol):
    """Models that this gateway serves once they are asked for (member/models.py). `own`: the one that is hosted here, or ""."""

    @property
    def own(self) -> str: ...

    def offered(self) -> Mapping[str, OfferedModel]: ...

    async def load(self, name: str) -> Origin: ...


class Gateway:
    """The models served here by name, and the requests that run. One event loop; not shared between loops.

    `origins` are those that are loaded; `others` may offer more, which `bring` loads.
    """

    def __init__(
        self,
        origins: Mapping[str, Origin],
        limits: LimitsConfig | None = None,
        observers: Iterable[Observer] = (),
        *,
        names: ModelNames = NO_NAMES,
        others: OtherModels | None = None,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
        secret: bytes | None = None,
    ) -> None:
        """`secret`: what all gateways of the swarm know, to go on with each other's streams; None: with its own alone."""
        self.origins = dict(origins)
        self._started_with = next(iter(origins)) if len(origins) == 1 else ""
        self.limits, self.names = limits or LimitsConfig(), names
        self.others = others
        self.refused: dict[str, str] = {}  # models that could not be loaded, and why
        self._bringing: dict[str, asyncio.Lock] = {}
        self._next_try: dict[str, float] = {}
        self.observers = list(observers)
        self.parts: list[GatewayPart] = []
        self.watchdog = Watchdog()
        self.streams = Streams(secret, wall_clock)
        self.callers = CallerNames(secret)
        self.jobs: dict[str, Job] = {}  # those that wait or run
        self.started_at = wall_clock()
        self._admission = Admission(self.limits, self._turn_has_come, self._turn_is_lost)
        self._turns: dict[str, asyncio.Future[None]] = {}
        self._runs: dict[str, Run] = {}
        self._next_look: asyncio.TimerHandle | None = None
        self._clock, self._wall_clock = clock, wall_clock

    @property
    def num_waiting(self) -> int:
        return len(self._admission.waiting)

    @property
    def max_running(self) -> int:
        """How many requests run at once."""
        return self._admission.max_running

    @property
    def num_running(self) -> int:
        return len(self._admission.running)

    @property
    def models(self) -> dict[str, OfferedModel]:
        """Every model that can be asked for here, loaded or not, by name."""
        loaded = {
            name: OfferedModel(o.model.id, o.model.precision, o.model.num_layers, o.model.context_length)
            for name, o in self.origins.items()
        }
        return loaded if self.others is None else {**loaded, **self.others.offered(), **loaded}

    @property
    def own(self) -> str:
        """The one model that this gateway was opened for, or that its machine hosts; "" if there is none."""
        return self._started_with or (self.others.own if self.others is not None else "")

    async def bring(self, model: str) -> None:
        """Load the model that is meant, and no other, if it is offered and not here yet. If it cannot be loaded, `refused` says
        why, and it is tried again BRING_S later.

        Any member can offer models; so they cost something only when they are asked for by name, and do not wait for each
        other. Raises RateLimited if MAX_BRINGING are being loaded, ModelNotFound if MAX_MODELS are loaded, ExperimentalDisabled
        while this node is switched off.
        """
        if self.others is None:
            return
        offered = self.others.offered()
        self._forget_but(offered)
        name = self.names.find(model, {**offered, **self.origins})
        if name not in offered or name in self.origins:
            return
        turn = self._bringing.setdefault(name, asyncio.Lock())
        num_loading = sum(each.locked() for each in self._bringing.values())
        if not turn.locked() and num_loading >= MAX_BRINGING:
            raise RateLimited(f"{num_loading} models are being loaded: try again later", BRING_S)
        if not turn.locked() and name != self.own and len(self.origins) + num_loading >= MAX_MODELS:
            raise ModelNotFound(
                f"this gateway serves {len(self.origins)} models, and no more than {MAX_MODELS}: ask another member for "
                f"{name[:100]!r}, or start this one anew"
            )
        async with turn:
            await self._bring(self.others, name)

    def _forget_but(self, offered: Container[str]) -> None:
        """Keep nothing of models that were offered and are not any more."""
        for name in [name for name in self._bringing if name not in offered and not self._bringing[name].locked()]:
            del self._bringing[name]
        for name in [name for name in self.refused if name not in offered]:
            del self.refused[name]
        for name in [name for name in self._next_try if name not in offered]:
            del self._next_try[name]

    async def _bring(self, others: OtherModels, name: str) -> None:
        if name in self.origins or (name in self.refused and self._clock() < self._next_try.get(name, -math.inf)):
            return
        self._next_try[name] = self._clock() + BRING_S
        try:
            self.origins[name] = await others.load(name)
            self.refused.pop(name, None)
        except ExperimentalDisabled:  # says nothing of the model, and ends when the node is switched on
            raise
        except ManyhandsError as error:
            self.refused[name] = str(error)

    def refuse(self, name: str, why: str) -> None:
        """Serve a model no more that was loaded: requests for others are not to suffer from what it is."""
        logger.warning("model %s is not served: %s", one_line(name), why)
        self.origins.pop(name, None)
        self.refused[name], self._next_try[name] = why, self._clock() + BRING_S

    async def ensure(self, model: str, caller: Caller | None = None) -> Origin:
        """The origin of a model, by any of its names, loaded if it is not yet: for `caller`, who is charged for that, unless
        the request is charged already (None). Raises ModelNotFound, with the reason; RateLimited."""
        meant = self.names.find(model, self.models)
        if meant not in self.origins:
            if caller is not None:
                self.enter(caller, "tokens")
            await self.bring(model)
        return self.origin(model)

    def origin(self, model: str) -> Origin:
        """The origin of a model, by any of its names. Raises ModelNotFound naming those that are served."""
        return self.origins[self.name(model)]

    def name(self, model: str) -> str:
        """The name of the model that is meant by it. Raises ModelNotFound."""
        meant = self.names.find(model, self.origins if model in self.origins else self.models)
        if meant not in self.origins:
            raise self.absent(model)
        return meant

    def absent(self, model: str) -> ModelNotFound:
        """Why no request for `model` is answered here now."""
        if (meant := self.names.find(model, models := self.models)) in self.refused:
            return ModelNotFound(f"model {meant[:100]!r} cannot be served here: {self.refused[meant]}", model)
        if meant in models:
            return ModelNotFound(
                f"model {meant[:100]!r} is served in this swarm and not loaded here yet: ask again", model
            )
        return ModelNotFound(f"model {model[:100]!r} is not served here; there is {listed(models)}", model)

    def unnamed(self, caller: Caller) -> str:
        """The model of a request that names none: `own`, else the only one that `caller` may use, else that of the alias "*".

        Raises BadField naming those there are, ModelNotFound if there is none.
        """
        known = list(self.models)
        allowed = [name for name in known if caller.models is None or name in caller.models] or known
        if not known:
            raise ModelNotFound("no model is served here yet: start one with `manyhands up MODEL`")
        meant = self.own if self.own in allowed else self.names.find("", allowed)
        if meant not in allowed and len(allowed) > 1:
            raise BadField(f"model is missing: name one of {listed(allowed)}", "model", "missing_required_parameter")
        return meant if meant in allowed else allowed[0]

    def use_of(self, key: str) -> dict[str, int] | None:
        """What runs for a key, and what is used of its quotas now; None if it has asked for nothing yet."""
        return self._admission.use_of(key, self._clock())

    def enter(self, caller: Caller, api: Api) -> Admitted:
        """Charge a request before anything is done for it. Raises RateLimited if a quota is used up or the queue is full.

        Observers are told of one that is refused as a job without a model: its body has not been read.
        """
        try:
            self._admission.enter(caller.name, caller.quota, self._clock())
        except RateLimited as error:
            job = Job(new_job_id(), "", api, caller.name, self._wall_clock(), 0, 0, error=error.code)
            job.caller = self.callers.of(caller.tenant)
            self._end(job, "refused")
            raise
        return Admitted()

    def claim(self, caller: Caller, api: Api, last_event: str) -> tuple[Admitted, Claim | None]:
        """As `enter`, for a request that may go on with a stream: `last_event` is the id of its last event, or "".

        Raises BadEventId as well (streams.py).
        """
        if not last_event:
            return self.enter(caller, api), None
        claim = self.streams.claim(last_event, caller)
        return Admitted(goes_on=True) if claim.is_free else self.enter(caller, api), claim

    @asynccontextmanager
    async def run(self, ask: Ask) -> AsyncIterator[Run]:
        """Admit `ask` and run it until the block is left. Waits for its turn: limits.patience_s (_admit).

        Raises ModelNotFound, Forbidden, BadRequest, ContextOverflow; RateLimited if a quota is used up, the queue is full or
        too slow.
        """
        ask.caller.check_model(ask.model)
        origin = self.origin(ask.model)
        request = Request(tuple(ask.prompt), ask.params) if ask.is_fit else origin.request_ids(ask.prompt, ask.params)
        answer = origin.answer(request)
        job = self._new_job(ask, request.params.max_tokens)
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

    def _new_job(self, ask: Ask, limit: int) -> Job:
        size = len(ask.prompt)
        paid = min(ask.paid_tokens, size + limit)
        name = ask.job_id or new_job_id()
        caller, now = ask.caller, self._wall_clock()
        job = Job(name, ask.model, ask.api, caller.name, now, size, limit, paid_tokens=paid)
        job.caller = self.callers.of(caller.tenant)
        return job

    async def _admit(self, job: Job, ask: Ask) -> None:
        """Choices of one request may have to run one after the other: patience is for what other requests hold up."""
        asked_at, caller = self._clock(), ask.caller
        is_paid = ask.entry is not None and ask.entry.spend()
        self.jobs[job.id] = job
        turn = self._turns[job.id] = asyncio.get_running_loop().create_future()
        most = job.prompt_tokens + job.max_tokens - job.paid_tokens
        self._admission.ask(job.id, caller.name, caller.quota, most, asked_at, is_paid=is_paid)
        while not turn.done():
            await asyncio.wait((turn,), timeout=self.limits.patience_s)
            is_alone = ask.entry is None or all(run.entry is not ask.entry for run in self._runs.values())
            if not turn.done() and is_alone:
                waited = f"no place within {self.limits.patience_s:g} s (requests that run: {self.num_running})"
                raise RateLimited(f"{waited}: try again later", self._admission.retry_after_s())
        turn.result()
        job.queue_s = self._clock() - asked_at

    def _turn_has_come(self, job: str) -> None:
        self._turns[job].set_result(None)

    def _turn_is_lost(self, job: str, why: RateLimited) -> None:
        self._turns[job].set_exception(why)
        self._turns[job].exception()  # seen, so that asyncio does not log it where the client has left

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
        used = job.prompt_tokens * (job.queue_s is not None) + job.completion_tokens - job.paid_tokens
        self._admission.leave(job.id, max(0, used), self._clock())
        for observer in self.observers:
            observer.ended(job, outcome)
