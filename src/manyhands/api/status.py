"""Whether this gateway lives, whether it could answer, and what it counts: for supervisors and Prometheus."""

import asyncio
from typing import Any

from fastapi import APIRouter, Response
from fastapi.responses import JSONResponse

from manyhands import __version__
from manyhands.api.gateway import Gateway
from manyhands.api.metrics import CONTENT_TYPE, Metrics
from manyhands.api.native.workers import route_now
from manyhands.errors import ShardUnavailable, WeightsMismatch
from manyhands.origin import Origin

_NOT_READY: dict[str, Any] = {"description": "a model has no route now", "content": {"application/json": {}}}


def status_router(gateway: Gateway, metrics: Metrics) -> APIRouter:
    """GET /health, /api/health, /ready, /metrics."""
    router = APIRouter(tags=["status"])

    @router.get("/api/health", summary="Liveness")
    @router.get("/health", summary="Liveness")
    async def health() -> dict[str, str]:
        """Answers as long as the process does."""
        return {"status": "ok", "version": __version__}

    @router.get("/ready", summary="Readiness", responses={503: _NOT_READY})
    async def ready() -> Response:
        """200 if every model served here has a route at this moment, else 503 and what is missing."""
        found = {model: offer.is_covered for model, offer in gateway.models.items() if model not in gateway.origins}
        found |= {model: await _has_route(origin) for model, origin in [*gateway.origins.items()]}
        is_ready = bool(found) and all(found.values())
        told = {"status": "ready" if is_ready else "not ready", "models": found}
        return JSONResponse(told, 200 if is_ready else 503, None if is_ready else {"retry-after": "1"})

    @router.get("/metrics", summary="Metrics", response_class=Response)
    async def exposition() -> Response:
        """Prometheus' text format; docs/metrics.md explains every name."""
        parts = []
        for part in metrics.exposition():
            parts.append(part)
            await asyncio.sleep(0)
        return Response(b"".join(parts), media_type=CONTENT_TYPE)

    return router


async def _has_route(origin: Origin) -> bool:
    try:
        return bool(await route_now(origin))
    except (ShardUnavailable, WeightsMismatch):
        return False
