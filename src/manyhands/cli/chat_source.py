"""Where a chat's answers come from: this process as origin of a swarm's ticket, or a gateway's OpenAI API."""

import asyncio
import contextlib
import http.client
import json
import socket
import ssl
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Protocol
from urllib.parse import urlsplit

from manyhands.cli.client import GatewayError, call, check_address, headers_for
from manyhands.core import PathKind, SamplingParams
from manyhands.errors import BadRequest, LinkClosed
from manyhands.plain import one_line

if TYPE_CHECKING:
    from manyhands.origin import Origin

Messages = Sequence[Mapping[str, str]]
MYSELF: Final = "local"  # the one tenant of this process's own origin


@dataclass(slots=True)
class Stats:
    """How an answer came about. Seconds since it was asked for."""

    began: float = field(default_factory=time.monotonic)
    tokens: int = 0
    cached: int = 0  # tokens of the prompt that had been computed for an earlier answer
    first_s: float | None = None
    total_s: float = 0.0
    finish_reason: str | None = None
    route: list[str] = field(default_factory=list)

    def count(self, tokens: int) -> None:
        """Some more tokens came."""
        self.total_s = time.monotonic() - self.began
        if self.first_s is None:
            self.first_s = self.total_s
        self.tokens += tokens

    def __str__(self) -> str:
        if self.first_s is None:
            return "no answer yet"
        speed = f"{(self.tokens - 1) / (self.total_s - self.first_s):.1f} tokens/s" if self.tokens > 1 else ""
        parts = [
            f"{self.tokens} tokens",
            speed,
            f"first after {self.first_s:.3f} s",
            f"{self.cached} cached" if self.cached else "",
            f"finish: {self.finish_reason or 'stopped'}",
        ]
        return "\n".join([" · ".join(part for part in parts if part), *self.route])


class BrokenStream(LinkClosed):
    """An answer that ended without its end mark: what came of it may lack any part."""


class Source(Protocol):
    """One conversation's other side. `model` may be changed between answers where there are several."""

    model: str

    async def models(self) -> list[str]: ...

    def answer(self, messages: Messages, stats: Stats) -> AsyncGenerator[str, None]:
        """The text as it grows; closing it stops the answer. Raises ManyhandsError."""
        ...


class OriginSource:
    """Answers of this process's own origin."""

    def __init__(self, origin: "Origin", model: str, params: SamplingParams, path: PathKind) -> None:
        self.model, self._origin, self._params, self._path = model, origin, params, path

    async def models(self) -> list[str]:
        return [self.model]

    async def answer(self, messages: Messages, stats: Stats) -> AsyncGenerator[str, None]:
        answer = self._origin.answer(self._origin.request([dict(m) for m in messages], self._params))
        try:
            async with contextlib.aclosing(self._origin.stream(answer, path=self._path, tenant=MYSELF)) as stream:
                async for token in stream:
                    stats.count(1)
                    yield token.text
        finally:
            stats.finish_reason, stats.cached = answer.finish_reason, answer.cached_tokens
            route = [f"layers {offer.info.span!s:<7} {offer.name} {offer.addr}" for offer in answer.route]
            stats.route = [one_line(line) for line in route]


class GatewaySource:
    """Answers of a gateway, by POST /v1/chat/completions with stream."""

    def __init__(self, api: str, key: str, model: str, params: SamplingParams, path: PathKind) -> None:
        check_address(api)
        self.model, self._api, self._key = model, api.rstrip("/"), key
        self._wishes = _wishes(params, path)

    async def models(self) -> list[str]:
        told = await asyncio.to_thread(call, self._api, self._key, "GET", "/v1/models")
        return [str(model["id"]) for model in told["data"]]

    async def choose(self) -> None:
        """Take the gateway's model where none was named. Raises BadRequest if there are several."""
        known = await self.models()
        if not self.model and len(known) != 1:
            raise BadRequest(f"the gateway has {', '.join(known) or 'no model'}: name one, manyhands chat MODEL")
        self.model = self.model or known[0]

    async def answer(self, messages: Messages, stats: Stats) -> AsyncGenerator[str, None]:
        body = {"model": self.model, "messages": list(messages), "stream": True, **self._wishes}
        async with contextlib.aclosing(_events(self._api, self._key, body)) as events:
            async for event in events:
                try:
                    texts = _take(event, stats)
                except (TypeError, KeyError, AttributeError) as error:
                    raise BrokenStream(f"the gateway at {self._api} sent what is no event: {event!r:.100}") from error
                for text in texts:
                    yield text


def _take(event: Mapping[str, Any], stats: Stats) -> list[str]:
    """The texts of one chunk; what else it tells goes into `stats`. Raises GatewayError for an error."""
    texts: list[str] = []
    if "error" in event:
        raise _said(event["error"], 500)
    for choice in event.get("choices", ()):
        delta = choice.get("delta") or {}
        if delta.get("reasoning_content") or delta.get("content"):
            stats.count(1)
        texts += ["".join(delta["content"])] if delta.get("content") else []
        if reason := choice.get("finish_reason"):
            stats.finish_reason = one_line(reason)
        route = (choice.get("manyhands") or {}).get("route") or ()
        stats.route = [one_line(f"layers {hop['layers']:<7} {hop['name']}") for hop in route] or stats.route
    if usage := event.get("usage"):
        stats.tokens = usage["completion_tokens"]
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
        stats.cached = cached if isinstance(cached, int) else 0
    return texts


def _wishes(params: SamplingParams, path: PathKind) -> dict[str, Any]:
    """The sampling parameters as the OpenAI API has them, and ours in their namespace."""
    ours: dict[str, Any] = {"path": path, "top_k": params.top_k, "min_p": params.min_p}
    return {
        "max_completion_tokens": params.max_tokens,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "seed": params.seed,
        **({"stop": list(params.stop)} if params.stop else {}),
        "stream_options": {"include_usage": True},
        "manyhands": {**ours, "repetition_penalty": params.repetition_penalty},
    }


async def _events(api: str, key: str, body: Mapping[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
    """The JSON objects of an event stream. A thread reads, one line at a time; leaving ends its read at once.

    Raises GatewayError as the gateway says, BrokenStream if it is not there, or if the stream ends without its end mark.
    """
    connection = _connect(api)
    headers = headers_for(api, key)
    path = f"{urlsplit(api).path}/v1/chat/completions"
    wire: socket.socket | None = None
    response: http.client.HTTPResponse | None = None
    try:
        await asyncio.to_thread(connection.request, "POST", path, json.dumps(body), headers)
        wire = connection.sock
        response = await asyncio.to_thread(connection.getresponse)
        if response.status != 200:
            raise _refusal(response.status, await asyncio.to_thread(response.read, 1 << 20))
        while line := await asyncio.to_thread(response.readline, 1 << 20):
            if line.startswith(b"data:"):
                if line[5:].strip() == b"[DONE]":
                    return
                yield json.loads(line[5:])
        raise BrokenStream(f"the answer of {api} broke off before its end ([DONE]): it is not whole")
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise BrokenStream(f"the gateway at {api} broke off ({error!s:.200}): is it up?") from error
    finally:
        if wire is not None:
            with contextlib.suppress(OSError):
                wire.shutdown(socket.SHUT_RDWR)
            wire.close()
        if response is not None:
            response.close()
        connection.close()


def _connect(api: str) -> http.client.HTTPConnection:
    url = urlsplit(api)
    assert url.hostname is not None  # check_address
    if url.scheme == "https":
        return http.client.HTTPSConnection(url.hostname, url.port, context=ssl.create_default_context())
    return http.client.HTTPConnection(url.hostname, url.port)


def _refusal(status: int, raw: bytes) -> GatewayError:
    try:
        return _said(json.loads(raw)["error"], status)
    except (ValueError, KeyError, TypeError, AttributeError):
        return GatewayError(f"the gateway answered {status}", "internal", status)


def _said(error: Mapping[str, Any], status: int) -> GatewayError:
    return GatewayError(one_line(error.get("message"), 2000), one_line(error.get("code"), 64), status)
