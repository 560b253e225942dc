"""An answer of a gateway as it comes: POST /v1/chat/completions with stream, its events and where they broke off."""

import asyncio
import contextlib
import http.client
import json
import socket
import ssl
from collections.abc import AsyncGenerator, Callable, Mapping
from typing import Any, Final
from urllib.parse import urlsplit

from manyhands.aside import aside
from manyhands.cli.client import TIMEOUT_S, GatewayError, headers_for, no_gateway, refusal_of
from manyhands.errors import LinkClosed
from manyhands.plain import one_line

CHAT_PATH: Final = "/v1/chat/completions"


class BrokenStream(LinkClosed):
    """An answer that ended without its end mark: what came of it may lack any part."""


async def events_of(
    api: str,
    key: str,
    body: Mapping[str, Any],
    last: str = "",
    *,
    path: str = CHAT_PATH,
    note_job: Callable[[str], None] = lambda job: None,
) -> AsyncGenerator[tuple[str, dict[str, Any]], None]:
    """The ids and JSON objects of an event stream, from after the event `last` on ("": all of it).

    `note_job` is told the id of its job. A thread reads, one line at a time; leaving ends its read at once. Raises
    GatewayError as the gateway says, BrokenStream if it is not there, says nothing for TIMEOUT_S, or if the stream ends without
    its end mark.
    """
    connection = _connect(api)
    headers = headers_for(api, key) | ({"last-event-id": last} if last else {})
    path = f"{urlsplit(api).path}{path}"
    wire: socket.socket | None = None
    response: http.client.HTTPResponse | None = None
    try:
        await aside(connection.request, "POST", path, json.dumps(body), headers)
        wire = connection.sock
        response = await asyncio.to_thread(connection.getresponse)
        if response.status != 200:
            raise _refusal(response.status, await asyncio.to_thread(response.read, 1 << 20))
        note_job(one_line(response.headers.get("x-request-id", ""), 64))
        event_id, data = "", b""
        while line := await asyncio.to_thread(response.readline, 1 << 20):
            name, _, value = line.strip().partition(b":")
            if name == b"id":
                event_id = value.strip().decode("ascii")
            elif name == b"data":
                data = value.strip()
            elif not line.strip() and data:  # an event is whole with the empty line after it
                if data == b"[DONE]":
                    return
                yield event_id, _event(data)
                event_id, data = "", b""
        raise BrokenStream(f"the answer of {api} broke off before its end ([DONE]): it is not whole")
    except (OSError, http.client.HTTPException, ValueError) as error:
        text = f"the gateway at {api} broke off ({error!s:.200})" if wire is not None else no_gateway(api, error)
        raise BrokenStream(text) from error
    finally:
        if wire is not None:
            with contextlib.suppress(OSError):
                wire.shutdown(socket.SHUT_RDWR)
            wire.close()
        if response is not None:
            response.close()
        connection.close()


def _event(data: bytes) -> dict[str, Any]:
    """Raises ValueError for what is no object."""
    try:
        event = json.loads(data)
    except RecursionError:
        raise ValueError("an event is too deep") from None
    if not isinstance(event, dict):
        raise ValueError(f"an event is no object: {data[:40]!a}")
    return event


def _connect(api: str) -> http.client.HTTPConnection:
    url = urlsplit(api)
    assert url.hostname is not None  # check_address
    if url.scheme == "https":
        context = ssl.create_default_context()
        return http.client.HTTPSConnection(url.hostname, url.port, timeout=TIMEOUT_S, context=context)
    return http.client.HTTPConnection(url.hostname, url.port, timeout=TIMEOUT_S)


def _refusal(status: int, raw: bytes) -> GatewayError:
    try:
        return refusal_of(json.loads(raw)["error"], status)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return GatewayError(f"the gateway answered {status}", "internal", status)


def check_event(event: Mapping[str, Any]) -> None:
    """Raise GatewayError for an error event."""
    if "error" in event:
        raise refusal_of(event["error"], 500)
