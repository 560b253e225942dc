"""Errors as HTTP answers, in the shape that clients of a path read: OpenAI's, Anthropic's, Ollama's or HearthNet's. Pure."""

from collections.abc import Callable, Mapping
from http import HTTPStatus
from typing import Any, Final, Literal

from fastapi.responses import JSONResponse

from manyhands.api.http.hosts import OLLAMA_PATHS
from manyhands.errors import ContextOverflow, ManyhandsError, RateLimited
from manyhands.plain import one_line

Object = dict[str, Any]
Dialect = Literal["openai", "anthropic", "ollama", "hearthnet"]
MAX_MESSAGE_CHARS = 2000  # of an error: it may quote what was sent

_OPENAI_TYPES: Mapping[int, str] = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
_TOO_LONG = "prompt is too long"
_ANTHROPIC_TYPES: Mapping[int, str] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class NotOffered(ManyhandsError):
    """Another server's path that this gateway has not."""

    code = "not_offered"
    http_status = 501


def error_object(error: Exception) -> Object:
    """What OpenAI's clients understand: its codes where it has one, else ours (errors.py). A bug's text is not shown."""
    is_ours = isinstance(error, ManyhandsError)
    status = status_of(error)
    kind = _OPENAI_TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    message = one_line(error, MAX_MESSAGE_CHARS) if is_ours else "this is a bug in the gateway: see its log"
    code = (error.api_code or error.code) if isinstance(error, ManyhandsError) else ManyhandsError.code
    return {"message": message, "type": kind, "param": getattr(error, "param", None), "code": code}


def status_of(error: Exception) -> int:
    return error.http_status if isinstance(error, ManyhandsError) else 500


def error_body(path: str, said: Object, status: int) -> Object:
    """`said` (error_object) as the clients of `path` read it."""
    return _SHAPES[dialect_of(path)](said, status)


def error_response(error: Exception, path: str) -> JSONResponse:
    """`error` as HTTP: its status, Retry-After where trying again helps, and a word against it where it never does."""
    status, headers = status_of(error), {}
    if isinstance(error, RateLimited):
        headers["retry-after"] = str(max(1, round(error.retry_after_s)))
    elif status == 503:
        headers["retry-after"] = "1"
    elif status == 401:
        headers["www-authenticate"] = "Bearer"
    elif status == 501:
        headers["x-should-retry"] = "false"  # OpenAI's and Anthropic's clients repeat every other 5xx
    return JSONResponse(error_body(path, error_object(error), status), status, headers)


def routing_error(method: str, path: str, status: int, detail: str, headers: Mapping[str, str] | None) -> JSONResponse:
    """What the router itself says: no such path, no such method."""
    code = HTTPStatus(status).phrase.lower().replace(" ", "_")
    message = f"{method} {one_line(path)}: {detail}; {_remedy(path)}"
    said = {"message": message, "type": "invalid_request_error", "param": None, "code": code}
    return JSONResponse(error_body(path, said, status), status, headers)


def _remedy(path: str) -> str:
    """What to do about a path that does not exist: a base URL is often given with /v1 to programs that add it themselves."""
    if path.startswith(("/v1/v1/", "/v1/api/")):
        return "this program adds the rest itself: end its base URL before /v1"
    return "/docs lists what there is"


def dialect_of(path: str) -> Dialect:
    """Whose shape the errors of a path have."""
    if path == "/v1/messages" or path.startswith("/v1/messages/"):
        return "anthropic"
    if path.startswith("/bus/"):
        return "hearthnet"
    return "ollama" if path in OLLAMA_PATHS else "openai"


def _openai(said: Object, _: int) -> Object:
    return {"error": said}


def _anthropic(said: Object, status: int) -> Object:
    kind = _ANTHROPIC_TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    message: str = said["message"]
    # By these words its clients know that they must shorten the conversation.
    if said["code"] == ContextOverflow.api_code and not message.startswith(_TOO_LONG):
        message = f"{_TOO_LONG}: {message}"
    error: Object = {"type": kind, "message": message}
    if said["param"] == "thread":  # the tool runner of its client then sends the whole conversation
        error["details"] = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
    return {"type": "error", "error": error}


def _hearthnet(said: Object, _: int) -> Object:
    return {"error": said["code"], "message": said["message"]}


def _ollama(said: Object, _: int) -> Object:
    return {"error": said["message"]}


_SHAPES: Final[Mapping[Dialect, Callable[[Object, int], Object]]] = {
    "openai": _openai,
    "anthropic": _anthropic,
    "ollama": _ollama,
    "hearthnet": _hearthnet,
}
