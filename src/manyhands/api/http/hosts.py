"""What a web page may make a browser ask of a gateway: Host, Origin and content type. Pure: headers in, decision out.

A page of any site can have its reader's browser send requests to 127.0.0.1 (CSRF), and can read the answers if its own name
is made to point there (DNS rebinding). A browser always says which name it asked and, since 2020, where the page came from:

    Host             an address, or a name that this gateway has: else 421. Missing (HTTP/1.1), repeated or malformed: 400
    Origin           a page of this gateway, or an origin that [api] cors allows: else 403
    Sec-Fetch-Site   the same where there is no Origin; following a link from elsewhere to a document here is allowed
    content-type     application/json wherever there is a body: else 415. A browser asks first (CORS) before it sends that.
                     Programs may leave it out on Ollama's paths
"""

import ipaddress
import re
import socket
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

from manyhands.errors import BadRequest, Forbidden, ManyhandsError

# program: nothing says that a browser sent it · page: a page of this gateway · site: a page of an origin that is allowed
Sender = Literal["program", "page", "site"]
Headers = Mapping[str, str]

OWNER_HEADER: Final = "x-manyhands-owner"
KEY_HEADER: Final = "x-api-key"
TOKEN_HEADER: Final = "x-manyhands-token"
SAFE_METHODS: Final = frozenset({"GET", "HEAD", "OPTIONS"})
# Ollama's own paths, which its documentation asks with a bare `curl -d`; every other one below /api is ours.
OLLAMA_REFUSED: Final = ("embed", "embeddings", "pull", "push", "create", "copy", "delete")
OLLAMA_PATHS: Final = frozenset(
    f"/api/{name}" for name in ("tags", "show", "chat", "generate", "version", "ps", *OLLAMA_REFUSED)
)
# Two of one of these, and two readers could each believe another one.
_ONCE: Final = frozenset({"host", "origin", "authorization", "content-type", KEY_HEADER, OWNER_HEADER, TOKEN_HEADER})
_AUTHORITY: Final = re.compile(
    r"(?:\[(?P<ipv6>[0-9A-Fa-f:.]+)\]|(?P<name>[A-Za-z0-9_-]+(?:\.[A-Za-z0-9_-]+)*)\.?)(?::(?P<port>[0-9]{0,5}))?"
)
MAX_AUTHORITY_CHARS: Final = 300  # a name has at most 253
_DEFAULT_PORTS: Final = {"http": 80, "https": 443}

Address = ipaddress.IPv4Address | ipaddress.IPv6Address


class Misdirected(ManyhandsError):
    code = "misdirected_request"
    http_status = 421


class UnsupportedMediaType(ManyhandsError):
    code = "unsupported_media_type"
    http_status = 415


@dataclass(frozen=True, slots=True)
class Authority:
    """HOST or HOST:PORT. `host` is in lower case without a final dot; an address is in its shortest form."""

    host: str
    port: int | None = None
    address: Address | None = None  # None: a name

    @classmethod
    def parse(cls, text: str) -> "Authority":
        """Raises BadRequest for anything else: user names, spaces, lists, ports beyond 65535."""
        match = _AUTHORITY.fullmatch(text) if len(text) <= MAX_AUTHORITY_CHARS else None
        port = int(match["port"]) if match and match["port"] else None
        if match is None or (port or 0) > 65535 or (match["ipv6"] and address_of(match["ipv6"]) is None):
            raise BadRequest(f"{text!r:.100} is not HOST or HOST:PORT")
        host = (match["ipv6"] or match["name"]).lower()
        address = address_of(host)
        return cls(host if address is None else str(address), port, address)

    def with_port_of(self, scheme: str) -> "Authority":
        """The same with the port that `scheme` means where none is named."""
        return self if self.port is not None else replace(self, port=_DEFAULT_PORTS.get(scheme))


def address_of(host: str) -> Address | None:
    """`host` as an IP address, None if it is a name. IPv4 in IPv6 (::ffff:1.2.3.4) counts as IPv4."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return None
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return mapped or address


def is_loopback(host: str) -> bool:
    """Whether a server that listens at `host` is reached from this machine alone."""
    address = address_of(host)
    return host == "localhost" if address is None else address.is_loopback


def single(headers: Iterable[tuple[bytes, bytes]]) -> dict[str, str]:
    """The headers by lower-case name. Raises BadRequest if one that decides about access comes twice."""
    found: dict[str, str] = {}
    for raw_name, raw_value in headers:
        name = raw_name.decode("latin-1")
        if name in found and (name in _ONCE or name.startswith("sec-fetch-")):
            raise BadRequest(f"the header {name} was sent twice: send it once")
        found[name] = raw_value.decode("latin-1").strip(" \t")
    return found


def check_json(headers: Headers, path: str, sender: Sender) -> bool:
    """Whether a body is to be read as JSON that is not said to be. Raises UnsupportedMediaType for any other that is not:
    a page may send other types unasked.

    Clients of Ollama send no type, a form's (`curl -d`), or octets. Every browser names itself Mozilla, and
    names the origin of what a page posts.
    """
    has_body = "transfer-encoding" in headers or headers.get("content-length", "0").strip("0") != ""
    kind = headers.get("content-type", "")
    if not has_body or kind.partition(";")[0].strip().lower() == "application/json":
        return False
    if path in OLLAMA_PATHS and sender == "program" and "mozilla" not in headers.get("user-agent", "").lower():
        return True
    raise UnsupportedMediaType(f"the body is {kind!r:.80}: send JSON with content-type: application/json")


class Hosts:
    """The names of one gateway, and the origins whose pages may call it.

    `told`: names that it has elsewhere, as behind a reverse proxy ("llm.example.org", "llm.example.org:8443"). `cors`:
    origins, or "*". Until `listen` says otherwise it is reached from this machine alone.
    """

    def __init__(self, told: Sequence[str] = (), cors: Sequence[str] = ()) -> None:
        self._told = [Authority.parse(name) for name in told]
        self._cors = frozenset(cors)
        self._names = {"localhost"}
        self._is_wide = False

    @property
    def is_shared(self) -> bool:
        """Whether requests may come from other machines, directly or through a reverse proxy."""
        return self._is_wide or bool(self._told)

    def listen(self, host: str) -> None:
        """It listens at `host`. Beyond loopback every address may be one of its own (port forwarding), and so may its name."""
        self._is_wide = not is_loopback(host)
        if self._is_wide:
            name = socket.gethostname().lower()
            self._names |= {host.lower(), name, f"{name}.local"}

    def sender(self, method: str, version: str, headers: Headers, target: str = "/") -> Sender:
        """Who may be behind a request with these headers (`single`) and this request target.

        Raises BadRequest (400), Misdirected (421), Forbidden (403).
        """
        host = self._host(version, headers, target)
        origin, site = headers.get("origin"), headers.get("sec-fetch-site")
        is_from_here = site in (None, "same-origin", "none")
        if origin is not None:
            if is_from_here and self._is_own(origin, host):
                return "page"
            if origin in self._cors or "*" in self._cors:
                return "site"
            raise Forbidden(f"pages of {origin!r:.100} may not use this gateway: allow them with --cors ORIGIN")
        if site is None:
            return "program"
        if is_from_here:
            return "page"
        if "*" in self._cors or _is_link(method, headers):
            return "site"
        raise Forbidden(f"a page of another site ({site!r:.40}) may not use this gateway: allow it with --cors ORIGIN")

    def _host(self, version: str, headers: Headers, target: str) -> Authority | None:
        """What was asked for; None if an HTTP/1.0 client, which no browser is, did not say."""
        text = headers.get("host")
        if text is None:
            if version != "1.0" or not target.startswith("/"):
                raise BadRequest("the header Host is missing")
            return None
        host = Authority.parse(text)
        if not target.startswith(("/", "*")):  # the absolute form: a second place to name the host
            scheme, _, rest = target.partition("://")
            named = Authority.parse(re.split(r"[/?#]", rest, maxsplit=1)[0])
            if named.with_port_of(scheme.lower()) != host.with_port_of(scheme.lower()):
                raise BadRequest(f"the request is for {named.host!r:.100}, its header Host names {host.host!r:.100}")
        if not self._is_known(host):
            raise Misdirected(
                f"this gateway is not known as {host.host!r:.100}: ask it by its address, or tell it that name "
                "(--allow-host NAME, or hosts in [api])"
            )
        return host

    def _is_known(self, host: Authority) -> bool:
        address = host.address
        if address is not None and (address.is_loopback or self._is_wide):
            return True
        return host.host in self._names or any(
            told.host == host.host and told.port in (None, host.port) for told in self._told
        )

    def _is_own(self, origin: str, host: Authority | None) -> bool:
        """Whether the page comes from this gateway: from the host that was asked, or from a name that it was told."""
        scheme, _, rest = origin.partition("://")
        try:
            page = Authority.parse(rest).with_port_of(scheme)
        except BadRequest:
            return False
        if scheme not in _DEFAULT_PORTS:
            return False
        known = [told.with_port_of(scheme) for told in self._told]
        return page in known or (host is not None and page == host.with_port_of(scheme))


def _is_link(method: str, headers: Headers) -> bool:
    """Whether a browser follows a link to a document of its own window: the page it stood on reads nothing of it."""
    wanted = (headers.get("sec-fetch-mode"), headers.get("sec-fetch-dest"))
    return method in ("GET", "HEAD") and wanted == ("navigate", "document")
