"""The swarm behind this gateway, as the member that runs it sees it: for `manyhands status` and dashboards."""

from collections.abc import Callable
from typing import Any

from fastapi import APIRouter


def swarm_router(view: Callable[[], dict[str, Any]]) -> APIRouter:
    """GET /api/swarm: what `view` says now (docs/operations.md)."""
    router = APIRouter(tags=["status"])

    @router.get("/api/swarm", summary="The swarm")
    async def swarm() -> dict[str, Any]:
        """Nodes with their spans, load and distance; coverage and missing layers of each model; warnings, complaints."""
        return view()

    return router
