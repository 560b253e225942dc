"""Where a chat's answers come from: this process as origin of a swarm's ticket, or a gateway's OpenAI API."""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final, Protocol
from urllib.parse import quote

from manyhands.aside import aside
from manyhands.cli.chat_events import BrokenStream, check_event, events_of
from manyhands.cli.chat_text import waiting_for
from manyhands.cli.chat_wishes import ChatWishes, openai_fields
from manyhands.cli.client import call, check_address
from manyhands.cli.exactness import audit_line, is_doubtful
from manyhands.core import MAX_TOKENS, PathKind
from manyhands.errors import BadRequest, LinkClosed, ManyhandsError
from manyhands.plain import counted, figure_of, one_line

if TYPE_CHECKING:
    from manyhands.origin import Answer, Origin
    from manyhands.origin.loop import Request
    from manyhands.route.search import Offer

Messages = Sequence[Mapping[str, str]]
ASK_S: Final = 2.0  # to learn what an answer waits for
SHOWN_PAUSE_S: Final = 1.0
MYSELF: Final = "local"  # the one tenant of this process's own origin
# Before each attempt to go on with an answer that was cut: a client's network is back within seconds, or another gateway is.
RETRY_PAUSES_S: Final = (0.0, 0.5, 1.0, 2.0, 4.0, 8.0)


@dataclass(slots=True)
class Stats:
    """How an answer came about. Seconds since it was asked for."""

    began: float = field(default_factory=time.monotonic)
    tokens: int = 0
    cached: int = 0  # tokens of the prompt that had been computed for an earlier answer
    first_s: float | None = None
    total_s: float = 0.0
    finish_reason: str | None = None
    route: list[str] = field(default_factory=list)  # the first one
    hops: list[str] = field(default_factory=list)  # the last one, after repairs
    notices: list[str] = field(default_factory=list)  # that are to be shown beside the text, oldest first
    resumed: int = 0  # how often the answer was cut and went on
    received: str = ""  # thoughts and text
    repairs: list[str] = field(default_factory=list)
    audit: str = ""  # what one found, if one was made
    is_doubtful: bool = False  # it found that something is wrong
    pause_s: float = 0.0  # the longest wait for a token after the first

    def count(self, tokens: int) -> None:
        """Some more tokens came."""
        before, self.total_s = self.total_s, time.monotonic() - self.began
        if self.first_s is None:
            self.first_s = self.total_s
        else:
            self.pause_s = max(self.pause_s, self.total_s - before)
        self.tokens += tokens

    def take_audit(self, audit: Mapping[str, Any] | None) -> None:
        """Note what an audit found (its JSON form)."""
        if audit is not None:
            self.audit, self.is_doubtful = audit_line(audit), is_doubtful(audit)

    def __str__(self) -> str:
        if self.first_s is None:
            return "no answer yet"
        speed = f"{figure_of((self.tokens - 1) / (self.total_s - self.first_s))} tokens/s" if self.tokens > 1 else ""
        parts = [
            counted(self.tokens, "token"),
            speed,
            f"first after {self.first_s:.3f} s",
            f"longest pause {self.pause_s:.1f} s" if self.repairs or self.pause_s >= SHOWN_PAUSE_S else "",
            f"{self.cached} cached" if self.cached else "",
            f"resumed {_times(self.resumed)}" if self.resumed else "",
            f"finish: {self.finish_reason or 'stopped'}",
        ]
        audit = [self.audit] if self.audit else []
        return "\n".join([" · ".join(part for part in parts if part), *self.repairs, *audit, *self._routes()])

    def _routes(self) -> list[str]:
        if not self.hops or self.hops == self.route:
            return self.route
        return ["the route at first", *self.route, "the route after that", *self.hops]


class Source(Protocol):
    """One conversation's other side. `model` may be changed between answers where there are several."""

    model: str

    async def models(self) -> list[str]: ...

    def answer(self, messages: Messages, stats: Stats) -> AsyncGenerator[str, None]:
        """The text as it grows; closing it stops the answer. Raises ManyhandsError."""
        ...

    async def waits_for(self) -> str:
        """What the answer that is under way waits for, in a few words. Raises nothing."""
        ...


class OriginSource:
    """Answers of this process's own origin."""

    def __init__(self, origin: "Origin", model: str, wishes: ChatWishes, path: PathKind) -> None:
        self.model, self._origin, self._wishes, self._path = model, origin, wishes, path
        self._running: Answer | None = None

    async def models(self) -> list[str]:
        return [self.model]

    async def answer(self, messages: Messages, stats: Stats) -> AsyncGenerator[str, None]:
        answer = self._origin.answer(await aside(self._request, messages))
        self._running = answer
        try:
            async with contextlib.aclosing(self._origin.stream(answer, path=self._path, tenant=MYSELF)) as stream:
                async for token in stream:
                    stats.count(1)
                    yield token.text
        finally:
            stats.finish_reason, stats.cached = answer.finish_reason, answer.cached_tokens
            stats.route = [_place(offer) for offer in answer.route]
            stats.hops = [] if answer.session is None else [_place(hop.offer) for hop in answer.session.route.hops]
            stats.repairs = [_repair(each.at_token, each.lost, each.total_s) for each in answer.repairs]
            stats.take_audit(None if answer.audit is None else answer.audit.as_object())

    def _request(self, messages: Messages) -> "Request":
        """What is to be answered; without a limit half of what the context leaves. Raises ContextOverflow."""
        model = self._origin.model
        params = self._wishes.params_for(model.recommended)
        ids = model.encode([dict(m) for m in messages])
        left = model.context_length - len(ids)
        if params.max_tokens == MAX_TOKENS and left > 0:
            params = replace(params, max_tokens=max(1, left // 2))
        return self._origin.request_ids(ids, params)

    async def waits_for(self) -> str:
        answer = self._running
        if answer is None:
            return waiting_for(None)
        hops = () if answer.session is None else answer.session.route.hops
        return waiting_for(
            {
                "status": "running",
                "completion_tokens": len(answer.token_ids),
                "route": [_hop(offer) for offer in answer.route],
                "hops": [_hop(hop.offer) for hop in hops],
                "events": [{"kind": event.kind, "nodes": event.nodes} for event in answer.events],
            }
        )


class GatewaySource:
    """Answers of a gateway, by POST /v1/chat/completions with stream. `apis`: gateways of one swarm, the preferred first.

    An answer that is cut goes on where it was, at the first of them that is there (docs/resume.md).
    """

    def __init__(
        self, apis: Sequence[str], key: str, model: str, wishes: ChatWishes, path: PathKind, draft: str = ""
    ) -> None:
        for api in apis:
            check_address(api)
        self.model, self._apis, self._key = model, [api.rstrip("/") for api in apis], key
        self._wishes, self._path, self._draft = wishes, path, draft
        self._recommended: dict[str, Any] = {}  # of each model, as the gateway has told
        self._job = ""  # of the answer that is under way

    async def models(self) -> list[str]:
        while True:
            try:
                told = await aside(call, self._apis[0], self._key, "GET", "/v1/models")
                self._recommended = {str(model["id"]): _recommended(model) for model in told["data"]}
                return list(self._recommended)
            except LinkClosed:
                if len(self._apis) == 1:
                    raise
                del self._apis[0]

    def _fields(self) -> dict[str, Any]:
        params = self._wishes.params_for(self._recommended.get(self.model, {}))
        return openai_fields(params, self._path, self._draft)

    async def choose(self) -> list[str]:
        """Take the gateway's first model where none was named; returns the others.

        Raises BadRequest if it has none, GatewayError if it has not the one that was named.
        """
        known = await self.models()
        if self.model and self.model not in known:  # nor as an alias?
            await aside(call, self._apis[0], self._key, "GET", f"/v1/models/{quote(self.model)}")
        if not self.model and not known:
            raise BadRequest(
                "the gateway has no model yet: start one with `manyhands up MODEL`, or wait until it serves"
            )
        self.model = self.model or known[0]
        return [name for name in known if name != self.model]

    async def waits_for(self) -> str:
        if not self._job:
            return waiting_for(None)
        try:
            return waiting_for(await self._told())
        except LinkClosed:
            return "the gateway does not answer; waiting for it"
        except (ManyhandsError, KeyError, TypeError):
            return waiting_for(None)

    async def answer(self, messages: Messages, stats: Stats) -> AsyncGenerator[str, None]:
        """Raises BrokenStream if the answer is cut and no gateway goes on with it in RETRY_PAUSES_S."""
        self._job = ""
        try:
            async with contextlib.aclosing(self._pieces(messages, stats)) as pieces:
                async for text in pieces:
                    yield text
        except (
            GeneratorExit,
            asyncio.CancelledError,
        ):  # stopped: the event that would have told the rest does not come
            await self._learn(stats)
            raise

    async def _told(self) -> Mapping[str, Any]:
        """The job of the answer that is under way. Raises LinkClosed and GatewayError."""
        job: Mapping[str, Any] = await aside(
            call, self._apis[0], self._key, "GET", f"/api/jobs/{self._job}", timeout_s=ASK_S
        )
        return job

    async def _learn(self, stats: Stats) -> None:
        """Over which nodes an answer that was stopped went, and what was repaired, if the gateway tells. Raises nothing."""
        if not self._job:
            return
        with contextlib.suppress(ManyhandsError, KeyError, TypeError):
            job = await self._told()
            stats.route, stats.hops = _told_route(job["route"]), _told_route(job["hops"])
            stats.repairs = [_repair(each["at_token"], each["lost"], each["total_s"]) for each in job["repairs"]]

    async def _pieces(self, messages: Messages, stats: Stats) -> AsyncGenerator[str, None]:
        """The text, over all cuts."""
        body: dict[str, Any] = {"model": self.model, "messages": list(messages), "stream": True, **self._fields()}
        last, has_begun, pauses = "", False, list(RETRY_PAUSES_S)
        while True:
            try:
                async with contextlib.aclosing(self._texts(body, last, stats)) as pieces:
                    async for text, event_id in pieces:
                        if last and len(pauses) < len(RETRY_PAUSES_S):
                            stats.resumed += 1
                            stats.notices.append(f"[the stream was cut; it goes on at {self._apis[0]}]")
                        last, has_begun, pauses = event_id or last, True, list(RETRY_PAUSES_S)
                        if text:
                            yield text
                return
            except BrokenStream:
                can_go_on = last or (not has_begun and len(self._apis) > 1)
                if not pauses or not can_go_on:
                    raise
                if last and stats.received:  # so that it need not be drawn again token by token
                    body["manyhands"] = {**body["manyhands"], "received": [stats.received]}
                await asyncio.sleep(pauses.pop(0))
                self._apis.append(self._apis.pop(0))  # the next one, or the only one again

    async def _texts(self, body: Mapping[str, Any], last: str, stats: Stats) -> AsyncGenerator[tuple[str, str], None]:
        """What each event adds to the text, and its id."""
        api = self._apis[0]
        async with contextlib.aclosing(events_of(api, self._key, body, last, note_job=self._note_job)) as told:
            async for event_id, event in told:
                try:
                    texts = _take(event, stats)
                except (TypeError, KeyError, AttributeError) as error:
                    raise BrokenStream(f"the gateway at {api} sent what is no event: {event!r:.100}") from error
                yield "".join(texts), event_id

    def _note_job(self, job: str) -> None:
        self._job = job


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def _hop(offer: "Offer") -> dict[str, str]:
    return {"name": offer.name, "layers": str(offer.info.span)}


def _place(offer: "Offer") -> str:
    return one_line(f"layers {offer.info.span!s:<7} {offer.name} {offer.addr}")


def _repair(at_token: object, lost: Sequence[str], seconds: float) -> str:
    names = list(dict.fromkeys(lost))  # one may be lost again while it is waited for
    were = "were" if len(names) > 1 else "was"
    return one_line(f"repair at token {at_token}: {', '.join(names)} {were} lost, {seconds:.2f} s", 300)


def _take(event: Mapping[str, Any], stats: Stats) -> list[str]:
    """The texts of one chunk; what else it holds goes into `stats`. Raises GatewayError for an error."""
    texts: list[str] = []
    check_event(event)
    for choice in event.get("choices", ()):
        delta = choice.get("delta") or {}
        if delta.get("reasoning_content") or delta.get("content"):
            stats.count(1)
            stats.received += (delta.get("reasoning_content") or "") + "".join(delta.get("content") or "")
        texts += ["".join(delta["content"])] if delta.get("content") else []
        if reason := choice.get("finish_reason"):
            stats.finish_reason = one_line(reason)
        ours = choice.get("manyhands") or {}
        stats.route = _told_route(ours.get("route")) or stats.route
        stats.hops = _told_route(ours.get("hops")) or stats.hops
        told = [_repair(each["at_token"], each["lost"], each["ms"] / 1e3) for each in ours.get("repairs") or ()]
        stats.repairs = told or stats.repairs
        stats.take_audit(ours.get("audit"))
    if usage := event.get("usage"):
        stats.tokens = usage["completion_tokens"]
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
        stats.cached = cached if isinstance(cached, int) else 0
    return texts


def _told_route(hops: Sequence[Mapping[str, Any]] | None) -> list[str]:
    return [one_line(f"layers {hop['layers']:<7} {hop['name']}") for hop in hops or ()]


def _recommended(model: Mapping[str, Any]) -> Mapping[str, Any]:
    """What a gateway's entry of a model says of how to draw; nothing of one that is not loaded, or of another's gateway."""
    ours = model.get("manyhands")
    told = ours.get("recommended") if isinstance(ours, dict) else None
    return told if isinstance(told, dict) else {}
