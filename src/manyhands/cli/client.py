"""How commands call a running gateway: one HTTP call at a time, its errors as ours."""

import json
import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import urlsplit

import typer

from manyhands.api.http.hosts import OWNER_HEADER, is_loopback
from manyhands.cli.owner import owner_secret
from manyhands.cli.progress import doing
from manyhands.config import home_from_env
from manyhands.errors import BadRequest, LinkClosed, ManyhandsError, Unauthorized
from manyhands.plain import one_line

if TYPE_CHECKING:  # urllib.request takes a tenth of what help and refusals of bad options may take
    import urllib.error
    import urllib.request

Api = Annotated[
    str, typer.Option("--api", envvar="MANYHANDS_API", help="The gateway; default: of a node that runs here.")
]
ApiKey = Annotated[
    str,
    typer.Option("--api-key", envvar="MANYHANDS_API_KEY", help="Its key, where it wants one; better in the variable."),
]
_HOST_PORT = re.compile(r"[\w.-]+:\d{1,5}|\[[0-9a-fA-F:]+\]:\d{1,5}")
DEFAULT_API = "http://127.0.0.1:8000"
TIMEOUT_S = 600.0
MAX_ANSWER_BYTES = 256 << 20  # 500 jobs of 255 hops each have some 100 MB
MAX_ERROR_BYTES = 1 << 20


class GatewayError(ManyhandsError):
    """What the gateway said no with."""

    def __init__(self, message: str, code: str, http_status: int) -> None:
        super().__init__(message)
        self.code, self.http_status = code, http_status


def call(api: str, key: str, method: str, path: str, body: Any = None, *, timeout_s: float = TIMEOUT_S) -> Any:
    """The JSON answer to one request, for each part of which `timeout_s` is the deadline. `api` "": of a node here.

    Raises GatewayError as the gateway says, and for an answer that none gives, LinkClosed if there is none, BadRequest for an
    address that is none.
    """
    import http.client
    import urllib.error
    import urllib.request

    api = api or running_api()
    url, headers = api.rstrip("/") + path, headers_for(api, key)
    data = None if body is None else json.dumps(body).encode()
    try:
        with _opener(api).open(urllib.request.Request(url, data, headers, method=method), timeout=timeout_s) as told:
            raw = told.read(MAX_ANSWER_BYTES + 1)
            if told.length and len(raw) <= MAX_ANSWER_BYTES:  # read does not say so where it is given a number
                raise http.client.IncompleteRead(raw, told.length)
    except urllib.error.HTTPError as error:
        raise _error(error) from error
    except http.client.HTTPException as error:  # a part of an answer came
        raise GatewayError(f"the gateway at {api} broke off its answer ({error!r:.200})", "link_closed", 502) from error
    except (OSError, ValueError) as error:
        raise LinkClosed(no_gateway(api, error)) from error
    return _answer(raw, url)


class ToldObject(dict[str, Any]):
    """An object in the answer of `url`. To look up what it lacks raises GatewayError: no gateway of manyhands gave it."""

    def __init__(self, pairs: Iterable[tuple[str, Any]], url: str) -> None:
        super().__init__(pairs)
        self._url = url

    def __missing__(self, name: str) -> Any:
        raise _is_none(self._url, f"without {name!r}")


def _answer(raw: bytes, url: str) -> ToldObject:
    """Raises GatewayError for what is no object, or too long."""
    if len(raw) > MAX_ANSWER_BYTES:
        raise _is_none(url, f"more than {MAX_ANSWER_BYTES} bytes")
    try:
        told = json.loads(raw, object_pairs_hook=lambda pairs: ToldObject(pairs, url))
    except (ValueError, RecursionError) as error:
        raise _is_none(url, f"no JSON: {one_line(error, 100)}") from error
    if not isinstance(told, ToldObject):
        raise _is_none(url, f"no object: {raw[:40]!a}")
    return told


def _is_none(url: str, what: str) -> GatewayError:
    return GatewayError(
        f"{url} answered, and not as a gateway of manyhands does ({what}): name one with --api", "internal", 502
    )


def ask(api: str, key: str, method: str, path: str, body: Any = None) -> Any:
    """As call; a terminal shows meanwhile which gateway is asked."""
    where = api or running_api()
    with doing(f"asking the gateway at {where}"):
        return call(where, key, method, path, body)


def no_gateway(api: str, error: Exception) -> str:
    """What to say, and to do, where none answers."""
    for each in (error, getattr(error, "reason", None)):  # urllib wraps it
        if untrusted := getattr(each, "verify_message", ""):
            return (
                f"the certificate of {api} is not trusted here ({untrusted}): name the file of its CA in SSL_CERT_FILE"
            )
    return f"no gateway answers at {api} ({_why(error)}): start one (manyhands up MODEL) or name another with --api"


def running_api() -> str:
    """Where the gateway of a member on this machine answers; the usual address if none says so."""
    from manyhands.member.home import list_running

    return next((running.api for running in list_running(home_from_env()) if running.api), DEFAULT_API)


def headers_for(api: str, key: str) -> dict[str, str]:
    """The headers of a request to the gateway at `api`: the key, else what proves that this machine's owner asks.

    Raises BadRequest for what is no address of a gateway.
    """
    check_address(api)
    if not (key.isascii() and key.isprintable()):
        raise BadRequest("--api-key holds characters that no key has: copy it again, as `manyhands key add` printed it")
    headers = {"content-type": "application/json"}
    if key:
        return headers | {"authorization": f"Bearer {key}"}
    secret = owner_secret(home_from_env(), api)
    return headers if secret is None else headers | {OWNER_HEADER: secret}


def _why(error: Exception) -> str:
    """What went wrong, as people say it: no error numbers."""
    cause = getattr(error, "reason", error)
    return str(getattr(cause, "strerror", None) or cause)


def _opener(api: str) -> "urllib.request.OpenerDirector":
    """What opens URLs of `api`: never a redirect's, and those of this machine not through the proxy of the environment."""
    import urllib.request

    class NoRedirect(urllib.request.HTTPRedirectHandler):
        """A gateway does not redirect; what does would be given the key."""

        def redirect_request(self, *_: Any) -> None:
            return None

    is_here = is_loopback(urlsplit(api).hostname or "")
    proxies = [urllib.request.ProxyHandler({})] if is_here else []
    return urllib.request.build_opener(NoRedirect, *proxies)


def check_address(api: str) -> None:
    """Raise BadRequest for what is no address of a gateway."""
    try:
        url = urlsplit(api)
        is_one = url.scheme in ("http", "https") and bool(url.hostname) and url.port != 0
    except ValueError:  # a port that is no number
        is_one = False
    if not is_one:
        meant = f": write http://{api}" if _HOST_PORT.fullmatch(api) else ""
        raise BadRequest(f"--api is {api!r:.100}; it is of the form {DEFAULT_API}{meant}")


def _error(error: "urllib.error.HTTPError") -> GatewayError:
    """The error in an answer's body; whatever else answers, its status."""
    try:
        return refusal_of(json.loads(error.read(MAX_ERROR_BYTES))["error"], error.code)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        answer = f"{error.code} {one_line(error.reason)}"
        text = f"{error.url} answered {answer}, and not as a gateway of manyhands does: name one with --api"
        return GatewayError(text, "internal", error.code)
    finally:
        error.close()


def refusal_of(error: Mapping[str, Any], status: int) -> GatewayError:
    """An error of the gateway's as ours, with what a command can do about a key."""
    message = one_line(error.get("message"), 2000)
    if status == Unauthorized.http_status:
        message += "; to a command: --api-key mhk_..., or the variable MANYHANDS_API_KEY"
    return GatewayError(message, one_line(error.get("code"), 64), status)


def print_json(value: Any) -> None:
    print(json.dumps(value), flush=True)  # in ASCII: nothing in it ends a line or moves a cursor
