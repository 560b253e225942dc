"""Whose request it is, and what it may do: the owner of this machine, a key, or any client on this machine.

    owner    shows the secret of this process, which only its owner can read (cli/owner.py), or on the page one that a link of
             the owner gave it (sign_in.py): everything
    key      shows a key of keys.json: what the key allows
    neither  where no key is needed: generate and look, not change the swarm. A page of this gateway shows its token too,
             which pages of other origins cannot read (GET /api/session)

Keys are needed once there has been one, and wherever other machines can come in: no file that disappears opens a gateway.
"""

import hmac
import logging
import secrets
from collections.abc import Iterator
from contextlib import contextmanager

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse

from manyhands.api.auth import KeyRing
from manyhands.api.http.hosts import (
    KEY_HEADER,
    OWNER_HEADER,
    SAFE_METHODS,
    TOKEN_HEADER,
    Headers,
    Hosts,
    Sender,
    is_loopback,
)
from manyhands.api.run import Caller
from manyhands.api.sign_in import OwnerLinks
from manyhands.errors import BadRequest, Forbidden, Unauthorized

logger = logging.getLogger(__name__)

# Whose requests are those without a key, where no other machine can come in: this machine's user's.
LOCAL = "local"


class Access:
    """What one gateway asks for. `owner_secret` and `page_token` are random and die with this process."""

    def __init__(self, keys: KeyRing | None, hosts: Hosts) -> None:
        self.hosts = hosts
        self.owner_secret, self.page_token = secrets.token_urlsafe(32), secrets.token_urlsafe(32)
        self.links = OwnerLinks()
        self._keys = keys
        self._is_locked = False
        self._has_complained = False
        if keys is not None:
            with self._locking():
                self._is_locked = not keys.is_empty

    def listen(self, host: str, *, insecure: bool) -> None:
        """The gateway listens at `host`; `insecure`: others may come in without a key."""
        self.hosts.listen(host)
        self._is_locked |= not is_loopback(host) and not insecure

    async def needs_key(self) -> bool:
        """Whether a caller must show a key. Once so, always so."""
        if self._keys is not None:
            with self._locking():
                self._is_locked |= bool(await self._keys.latest())
        return self._is_locked

    async def caller(self, method: str, headers: Headers, sender: Sender, *, is_open: bool) -> Caller:
        """Whose request it is. `is_open`: its path shows nothing that needs a key.

        Raises Unauthorized; Forbidden for a page of this gateway that changes what is not open without key and token.
        """
        shown = headers.get(OWNER_HEADER)
        if _is_equal(shown, self.owner_secret) or self.links.knows(shown):
            return Caller(is_admin=True, tenant=LOCAL)
        if is_open and self._is_locked:
            return Caller()
        if not is_open and await self.needs_key():
            return self._check_key(_authorization(headers))
        is_change = sender == "page" and method not in SAFE_METHODS and not is_open
        if is_change and not _is_equal(headers.get(TOKEN_HEADER), self.page_token):
            raise Forbidden(f"a page needs the token of GET /api/session in the header {TOKEN_HEADER}, or a key")
        return Caller(tenant=None if self.hosts.is_shared else LOCAL)

    @contextmanager
    def _locking(self) -> Iterator[None]:
        """Lock if the block finds that the file of keys cannot be read."""
        try:
            yield
        except BadRequest as error:
            self._is_locked = True
            if not self._has_complained:
                logger.warning("only the owner is let in: %s", error)
            self._has_complained = True

    def _check_key(self, authorization: str | None) -> Caller:
        if self._keys is None:
            raise Unauthorized("this gateway lets in its owner alone: there are no keys")
        return self._keys.check(authorization)


def check_admin(caller: Caller) -> None:
    """Raise Forbidden for a caller that may not change the swarm."""
    if not caller.is_admin:
        whose = "a caller without a key" if caller.name is None else f"key {caller.name!r}"
        raise Forbidden(
            f"{whose} may not change the swarm: run the command as the user who started the gateway, "
            "or use an admin's key (manyhands key add NAME --admin)"
        )


async def admins_only(request: Request) -> None:
    """A route's dependency. FastAPI would run one that is not async on a thread."""
    check_admin(request.state.caller)


def session_router(access: Access) -> APIRouter:
    """GET /api/session, for pages of this gateway alone."""
    router = APIRouter(tags=["session"])

    @router.get("/api/session", summary="What a page of this gateway needs", response_model=dict[str, str | bool])
    async def session(request: Request) -> JSONResponse:
        """The token that its changes must carry in x-manyhands-token, and whether its key may change the swarm."""
        if request.state.sender == "site":
            raise Forbidden("only pages of this gateway get its token; use a key")
        told = {"token": access.page_token, "is_admin": request.state.caller.is_admin}
        headers = {"cache-control": "no-store", "cross-origin-resource-policy": "same-origin"}
        return JSONResponse(told, headers=headers)

    return router


def _authorization(headers: Headers) -> str | None:
    """The Authorization header, or Anthropic's x-api-key as one."""
    if "authorization" in headers or KEY_HEADER not in headers:
        return headers.get("authorization")
    return f"Bearer {headers[KEY_HEADER]}"


def _is_equal(shown: str | None, secret: str) -> bool:
    return shown is not None and hmac.compare_digest(shown.encode("latin-1", "replace"), secret.encode())
