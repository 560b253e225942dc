"""Routes that read their own bodies: how they are mounted, described, and know their callers."""

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.routing import APIRoute
from starlette.types import Receive, Scope, Send

from manyhands.api.fields import MODELS
from manyhands.api.http.document import FIELDS_OF
from manyhands.api.run import Caller

Object = dict[str, Any]


# Where a body may have max_body_bytes: what comes of it is prepared within bounds (preparation/pool.py).
LARGE_PATHS = frozenset({*MODELS, "/api/infer/stream"})
# Hidden states, which are parsed on the event loop, once: some milliseconds (tests/api/native/test_process.py).
PROCESS_PATH, PROCESS_BYTES = "/api/process", 256 << 10


class Direct(APIRoute):
    """A POST whose handler takes the Request itself: FastAPI has nothing to look up, parse, check or close for it."""

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] != "POST":
            await super().handle(scope, receive, send)  # says what may be sent
            return
        response: Response = await self.endpoint(Request(scope, receive, send))
        await response(scope, receive, send)


def describe(
    router: APIRouter,
    path: str,
    handler: Callable[[Request], Awaitable[Response]],
    says: str,
    *,
    schema_of: str = "",
    parameters: Sequence[Object] = (),
) -> None:
    """Mount a POST handler that reads its own body; the OpenAPI document, once asked for, takes its fields from fields.py."""
    schema = {FIELDS_OF: schema_of or f"{router.prefix}{path}"}
    body = {"required": True, "content": {"application/json": {"schema": schema}}}
    answers: dict[str, Any] = {"application/json": {}, "text/event-stream": {}}
    said: dict[int | str, dict[str, Any]] = {200: {"description": "the answer; events if stream", "content": answers}}
    router.add_api_route(
        path,
        handler,
        methods=["POST"],
        summary=says,
        openapi_extra={"requestBody": body, **({"parameters": list(parameters)} if parameters else {})},
        responses=said,
        response_model=None,
        route_class_override=Direct,
    )


def caller_of(request: Request) -> Caller:
    """Whose request it is, as the guard found out (app.py)."""
    caller: Caller = request.state.caller
    return caller


def client_of(request: Request) -> str:
    """The client's address: turns are taken by it where no key is needed."""
    return request.client.host if request.client is not None else ""


def last_event_of(request: Request) -> str:
    """The id of the last event of a stream that is to go on; "" if none is."""
    return request.headers.get("last-event-id", "").strip()


async def body_of(request: Request) -> bytes:
    """The body, which the guard has read whole (app.py); to be asked for once, and not kept by the Request."""
    message = await request.receive()
    return bytes(message.get("body", b""))
