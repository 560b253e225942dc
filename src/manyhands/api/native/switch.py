"""Making a member inert, and back, while it runs (docs/api.md, Switching a node off)."""

from collections.abc import Callable
from typing import Any

from fastapi import APIRouter, Depends
from pydantic import BaseModel, ConfigDict

from manyhands.api.access import admins_only


class SwitchOrder(BaseModel):
    """What the node is to be."""

    model_config = ConfigDict(extra="forbid", strict=True)
    on: bool


def switch_router(switch: Callable[[bool], None], is_on: Callable[[], bool]) -> APIRouter:
    """GET and POST /api/switch: whether this node shares and asks; only admins change it."""
    router = APIRouter(tags=["workers"])

    @router.get("/api/switch", summary="Whether this node is on")
    async def look() -> dict[str, Any]:
        """`on`: it offers its layers, takes sessions and answers requests."""
        return {"on": is_on()}

    @router.post("/api/switch", summary="Switch this node on or off", dependencies=[Depends(admins_only)])
    async def turn(body: SwitchOrder) -> dict[str, Any]:
        """Off: its records are withdrawn, its sessions are handed over, requests get 503; its weights stay loaded."""
        switch(body.on)
        return {"on": is_on()}

    return router
