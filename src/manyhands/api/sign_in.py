"""Links that sign this machine's owner in on the page: each is good once, for LINK_S, in a browser of this machine.

    owner ─ POST /api/session/link ─► "#/sign-in/TOKEN" ─ opened ─► the page ─ POST /api/session/redeem ─► a secret of its own

The token is in the fragment of the address, which a browser keeps to itself: no request line, no log, no Referer has it. The
secret counts as the owner's until the page signs out, MAX_PAGES later ones were made, or the process ends.
"""

import hashlib
import secrets
import time
from collections.abc import Callable
from typing import Annotated, Any, Final

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field

from manyhands.api.http.hosts import OWNER_HEADER, Authority, is_loopback
from manyhands.api.run import Caller
from manyhands.errors import BadRequest, Forbidden, Unauthorized

LINK_S: Final = 600.0
MAX_LINKS: Final = 8  # that are good at a time; one more ends the oldest
MAX_PAGES: Final = 32  # that are signed in at a time
FRAGMENT: Final = "#/sign-in/"
REDEEM_PATH: Final = "/api/session/redeem"
_NO_STORE: Final = {"cache-control": "no-store", "cross-origin-resource-policy": "same-origin"}


class OwnerLinks:
    """The links that are good, and the secrets of the pages that used one. Both are kept as hashes. `clock` is monotonic."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._links: dict[str, float] = {}  # hash of a token -> when it ends, the oldest first
        self._pages: dict[str, None] = {}  # hashes of secrets, the oldest first

    def make(self) -> str:
        """The fragment of a new link."""
        token, now = secrets.token_urlsafe(16), self._clock()
        self._links = {each: ends for each, ends in self._links.items() if ends > now}
        self._links[_hash(token)] = now + LINK_S
        _trim(self._links, MAX_LINKS)
        return FRAGMENT + token

    def redeem(self, token: str) -> str:
        """The secret of the page that shows `token`, which is worth nothing from now on. Raises Unauthorized."""
        if self._links.pop(_hash(token), 0.0) <= self._clock():
            raise Unauthorized("this link has been used or is too old: `manyhands page` prints a new one")
        secret = secrets.token_urlsafe(32)
        self._pages[_hash(secret)] = None
        _trim(self._pages, MAX_PAGES)
        return secret

    def knows(self, secret: str | None) -> bool:
        """Whether it is the secret of a page that is signed in."""
        return secret is not None and _hash(secret) in self._pages

    def end(self, secret: str | None) -> bool:
        """Sign the page of that secret out; whether it was in."""
        is_in = self.knows(secret)
        if secret is not None and is_in:
            del self._pages[_hash(secret)]
        return is_in


def _hash(text: str) -> str:
    """What is kept: a comparison of hashes of random texts tells nothing about them, however long it takes."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def _trim(kept: dict[str, Any], most: int) -> None:
    while len(kept) > most:
        del kept[next(iter(kept))]


# -- the paths --------------------------------------------------------------------------------------------------------


class Redeemed(BaseModel):
    """What stands behind FRAGMENT in the link."""

    model_config = ConfigDict(extra="forbid", strict=True)
    token: Annotated[str, Field(min_length=1, max_length=64)]


def sign_in_router(links: OwnerLinks) -> APIRouter:
    """What the owner's links need."""
    router = APIRouter(tags=["session"])

    @router.post("/api/session/link", summary="A link that signs the owner in", response_model=dict[str, str | float])
    async def make(request: Request) -> JSONResponse:
        """For the owner alone: the `fragment` to put behind the address of the page, and how many `seconds` it is good for."""
        caller: Caller = request.state.caller
        is_page = links.knows(request.headers.get(OWNER_HEADER))  # which would outlive its own end by links
        if not caller.is_admin or caller.name is not None or is_page:
            raise Forbidden("only the owner makes links: run `manyhands page` as the user who started this gateway")
        return JSONResponse({"fragment": links.make(), "seconds": LINK_S}, headers=_NO_STORE)

    @router.post(REDEEM_PATH, summary="Use such a link", response_model=dict[str, str])
    async def redeem(body: Redeemed, request: Request) -> JSONResponse:
        """For a page of this gateway, in a browser of this machine: the `secret` that it shows in x-manyhands-owner."""
        check_is_here(request)
        return JSONResponse({"secret": links.redeem(body.token)}, headers=_NO_STORE)

    @router.delete("/api/session", summary="Sign a page out", response_model=dict[str, bool])
    async def leave(request: Request) -> JSONResponse:
        """The secret that came by a link is worth nothing any more; `ended`: whether it was one."""
        return JSONResponse({"ended": links.end(request.headers.get(OWNER_HEADER))}, headers=_NO_STORE)

    return router


def check_is_here(request: Request) -> None:
    """Raise Forbidden unless a page of this gateway asks, which a browser of this machine has from a loopback address.

    The connection is looked at, and what the browser says of itself: behind a proxy of this machine one of them is another's.
    """
    origin = request.headers.get("origin", "").partition("://")[2]
    named = (request.client.host if request.client else "", _host(request.headers.get("host")), _host(origin))
    if request.state.sender != "page" or not all(map(is_loopback, named)):
        raise Forbidden(
            "a link signs in on the machine of its gateway alone, at http://127.0.0.1: elsewhere use an admin's key "
            "(manyhands key add NAME --admin)"
        )


def _host(text: str | None) -> str:
    try:
        return Authority.parse(text or "").host
    except BadRequest:
        return ""
