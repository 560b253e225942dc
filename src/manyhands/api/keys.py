"""Keys and quotas for admins over HTTP: what `manyhands key` does to the file, and how much of each quota is left.

    GET    /api/keys           names, quotas, use; never a key or its hash
    POST   /api/keys           make one; its text is in this answer and nowhere else
    DELETE /api/keys/{name}    refuse it from now on

All need an admin's key or the owner's secret (access.py).
"""

import asyncio
import time
from functools import partial
from typing import Annotated, Any, Final

from fastapi import APIRouter, Depends
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field

from manyhands.api.access import admins_only
from manyhands.api.auth import ApiKey, KeyRing
from manyhands.api.gateway import Gateway
from manyhands.api.limits import Quota
from manyhands.errors import Conflict, NotFound

# Made over HTTP: the file is read whole, on the event loop.
MAX_KEYS: Final = 256
_Limit = Annotated[int, Field(ge=1, le=1 << 50)]


class NewKey(BaseModel):
    """A key to make. A limit that is left out is the gateway's."""

    model_config = ConfigDict(extra="forbid", strict=True)
    name: str = Field(description="1 to 64 letters, digits or ._@-", max_length=64)
    concurrency: _Limit | None = None
    requests_per_minute: _Limit | None = None
    tokens_per_minute: _Limit | None = None
    tokens_per_day: _Limit | None = None
    models: list[Annotated[str, Field(min_length=1, max_length=512)]] | None = Field(None, max_length=64)
    is_admin: bool = False


def keys_router(gateway: Gateway, keys: KeyRing | None) -> APIRouter:
    """The routes above. `keys` None: a gateway that keeps none."""
    router = APIRouter(prefix="/api/keys", tags=["keys"], dependencies=[Depends(admins_only)])
    writing = asyncio.Lock()  # of the file: each write begins with what the one before left, and waits for the disk

    def ring() -> KeyRing:
        if keys is None:
            raise NotFound("this gateway keeps no keys: start it with `manyhands up` or `serve`")
        return keys

    @router.get("", summary="Keys, their quotas, and what is used of them")
    async def list_keys() -> dict[str, Any]:
        """In the order they were made. `use` is null for a key that has asked for nothing since the gateway started."""
        return {"keys": [_object(key, gateway) for key in await ring().latest()]}

    @router.post("", summary="Make a key", status_code=201, response_model=dict[str, Any])
    async def add_key(body: NewKey) -> JSONResponse:
        """`key` is shown this once: only its hash is kept. From the first key on, every request must show one."""
        quota = Quota(body.concurrency, body.requests_per_minute, body.tokens_per_minute, body.tokens_per_day)
        models = tuple(body.models) if body.models else None
        add = partial(ring().add, body.name, time.time(), quota=quota, models=models, is_admin=body.is_admin)
        async with writing:
            if len(await ring().latest()) >= MAX_KEYS:
                raise Conflict(
                    f"there are {MAX_KEYS} keys, revoked ones among them: make more with `manyhands key add NAME`"
                )
            made = await asyncio.to_thread(add)
        return JSONResponse({"name": body.name, "key": made}, 201, {"cache-control": "no-store"})

    @router.delete("/{name}", summary="Revoke a key")
    async def revoke_key(name: str) -> dict[str, str]:
        """It is refused from now on; its name stays taken."""
        async with writing:
            await asyncio.to_thread(ring().revoke, name[:64], time.time())
        return {"name": name[:64], "status": "revoked"}

    return router


def _object(key: ApiKey, gateway: Gateway) -> dict[str, Any]:
    names = ("concurrency", "requests_per_minute", "tokens_per_minute", "tokens_per_day")
    return {
        "name": key.name,
        "caller": gateway.callers.of(key.sha256),
        "created_unix_s": key.created,
        "revoked_unix_s": key.revoked,
        "is_admin": key.is_admin,
        "models": None if key.models is None else list(key.models),
        "quota": {name: getattr(key.quota, name) for name in names},
        "use": gateway.use_of(key.name),
    }
