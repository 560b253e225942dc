"""What happens to a request before anything else looks at it: its path as written by habit, HEAD, and its id.

GET /v1/models/ ─► /v1/models · POST /chat/completions ─► /v1/chat/completions · HEAD ─► GET without a body
every answer has x-request-id, which is also the id of its first job (GET /api/jobs/{id}), and openai-processing-ms; those of
/v1/messages have it as request-id too
"""

import time
from collections.abc import Awaitable
from contextvars import ContextVar
from secrets import token_hex

from starlette.types import Message, Scope, Send

# Programs that are given a base URL without /v1 ask for these.
UNVERSIONED = frozenset(
    {
        "/chat/completions",
        "/completions",
        "/embeddings",
        "/messages",
        "/messages/count_tokens",
        "/models",
        "/responses",
        "/responses/input_tokens",
    }
)
ANTHROPIC = "/v1/messages"  # its clients read the id from request-id


class RequestId:
    """The id of one HTTP request: its first job has it too, the others have their own."""

    def __init__(self) -> None:
        self.text = token_hex(16)
        self._is_taken = False

    def take(self) -> str:
        """An id for one job."""
        if self._is_taken:
            return token_hex(16)
        self._is_taken = True
        return self.text


_CURRENT: ContextVar[RequestId | None] = ContextVar("request_id", default=None)


def new_job_id() -> str:
    """The id of a job that the HTTP request of this context makes; outside of one, any."""
    current = _CURRENT.get()
    return token_hex(16) if current is None else current.take()


def arrived(scope: Scope, send: Send) -> tuple[Scope, Send]:
    """The request as the application is to see it, and its way back, which adds the headers above."""
    path = scope["path"].rstrip("/") or "/"
    path = f"/v1{path}" if path in UNVERSIONED else path
    method = "GET" if scope["method"] == "HEAD" else scope["method"]  # the server sends no body after a HEAD
    began, request_id = time.monotonic(), RequestId()
    _CURRENT.set(request_id)

    def answer(message: Message) -> Awaitable[None]:
        if message["type"] == "http.response.start":
            told = _headers(path, request_id, time.monotonic() - began)
            message = {**message, "headers": [*message.get("headers", ()), *told]}
        return send(message)

    return {**scope, "path": path, "method": method}, answer


def _headers(path: str, request_id: RequestId, seconds: float) -> list[tuple[bytes, bytes]]:
    """What an answer that took `seconds` so far has more."""
    text = request_id.text.encode()
    told = [(b"x-request-id", text), (b"openai-processing-ms", b"%d" % round(seconds * 1e3))]
    return [*told, (b"request-id", text)] if path.startswith(ANTHROPIC) else told
