"""The swarm behind this gateway, for `manyhands status` and the page: as the member that runs it sees it, or by open links."""

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final

from fastapi import APIRouter, Response

from manyhands.api.gateway import Gateway
from manyhands.api.http.encode import encode
from manyhands.api.native.workers import WorkerView, list_workers, meet
from manyhands.api.run import Job, Outcome
from manyhands.core import NodeId, Span
from manyhands.origin import Origin, Token
from manyhands.origin.repair_plan import Event
from manyhands.place.strategy import Holding, coverage, gaps
from manyhands.route.classes import why_split
from manyhands.route.search import Offer

SAMPLED: Final = 8  # one token of so many is looked at, for this is done in every token's time
SMOOTHING: Final = 0.25
MAX_SPEEDS: Final = 256  # nodes whose speed is remembered
SwarmView = Callable[[], Awaitable[dict[str, Any]]]


# How long a view is shown again: pages ask each second, and one of a full directory takes 0.1 s of a thread.
SHOWN_S: Final = 0.5


def swarm_router(view: SwarmView) -> APIRouter:
    """GET /api/swarm: what `view` says now (docs/operations.md)."""
    router = APIRouter(tags=["status"])
    shown = _Shown(view)

    @router.get("/api/swarm", summary="The swarm", response_model=dict[str, Any])
    async def swarm() -> Response:
        """Nodes with their spans, load and distance; coverage and missing layers of each model; warnings, complaints."""
        return Response(await shown.data(), media_type="application/json")

    return router


class _Shown:
    """A view as JSON, made once for all who ask within SHOWN_S, beside the event loop."""

    def __init__(self, view: SwarmView) -> None:
        self._view, self._turn = view, asyncio.Lock()
        self._data, self._until = b"", -math.inf

    async def data(self) -> bytes:
        now = asyncio.get_running_loop().time
        asked = now()
        async with self._turn:
            if asked >= self._until:
                self._data = await asyncio.to_thread(encode, await self._view())
                self._until = now() + SHOWN_S  # from here on: who asked while it was made, however long, has it too
            return self._data


class HopSpeeds:
    """An observer (run.py): what one layer takes on the nodes that answered lately, by what they say of their steps."""

    def __init__(self) -> None:
        self._layer_ms: dict[NodeId, float] = {}

    def started(self, job: Job) -> None:
        """Nothing ran yet."""

    def token(self, job: Job, token: Token) -> None:
        """Smooth over some four steps. The first token's step had the prompt in it."""
        if job.completion_tokens % SAMPLED != 2:
            return
        for hop, said in zip(job.hops, job.waterfall.last.hops, strict=False):
            fresh = said.compute_us / 1e3 / len(hop.info.span)
            known = self._layer_ms.pop(hop.node, fresh)
            self._layer_ms[hop.node] = known + SMOOTHING * (fresh - known)
        while len(self._layer_ms) > MAX_SPEEDS:
            del self._layer_ms[next(iter(self._layer_ms))]

    def event(self, job: Job, event: Event) -> None:
        """Repairs say nothing of speed."""

    def ended(self, job: Job, outcome: Outcome) -> None:
        """What was learnt stays."""

    def layer_ms(self, node: NodeId) -> float | None:
        """None for a node that computed nothing for this gateway lately."""
        return self._layer_ms.get(node)


def view_by_links(gateway: Gateway, speeds: HopSpeeds) -> SwarmView:
    """The view of a gateway that is no member (`local`, `serve`): nodes that a link is open to. The same keys as a member's."""

    async def view() -> dict[str, Any]:
        await meet(gateway)
        workers = [worker for worker in list_workers(gateway) if worker.offers]
        models = [_model(name, gateway, workers) for name in gateway.origins]
        return {
            "swarm": "",
            "directory": "static",
            "node": next((str(o.node.transport.node) for o in gateway.origins.values()), ""),
            "api": "",
            "sessions": gateway.num_running,
            "nodes": [_node(worker, speeds.layer_ms(worker.node)) for worker in workers],
            "left": [],
            "models": models,
            "missing": [
                f"{model['name']}: layers {' and '.join(model['missing'])} are held by no node"
                for model in models
                if model["missing"]
            ]
            + [line for name, origin in gateway.origins.items() if (line := _split(name, origin, workers))],
            "warnings": [line for name in gateway.origins for line in _warnings(name, workers)],
            "complaints": [],
        }

    return view


def _model(name: str, gateway: Gateway, workers: Sequence[WorkerView]) -> dict[str, Any]:
    model = gateway.origins[name].model
    held = coverage(_holdings(name, workers), model.num_layers)
    return {
        "name": name,
        "id": model.id,
        "precision": model.precision,
        "layers": model.num_layers,
        "coverage": held,
        "missing": [str(span) for span in gaps(coverage(_holdings(name, workers, with_spares=True), model.num_layers))],
    }


def _split(name: str, origin: Origin, workers: Sequence[WorkerView]) -> str:
    """Layers that are held, by nodes that share no route of this gateway's; "" if there are none."""
    held = [offer.info for w in workers if not w.is_evicted for model, offer in w.offers if model == name]
    line = "" if origin.node.request.mix_classes else why_split(held, origin.model.num_layers)
    return f"{name}: {line}" if line else ""


def _holdings(model: str, workers: Sequence[WorkerView], *, with_spares: bool = False) -> list[Holding]:
    """Who serves what of a model; evicted nodes do not, spares only in need."""
    return [
        Holding(offer.node, offer.info.span, offer.load)
        for worker in workers
        if not worker.is_evicted
        for name, offer in worker.offers
        if name == model and (with_spares or not offer.info.is_spare)
    ]


def _warnings(model: str, workers: Sequence[WorkerView]) -> list[str]:
    """Layers of which one node alone holds each, and no other stands by to serve or load them."""
    layers = {
        worker.node: {
            n for name, o in worker.offers if name == model for n in range(o.info.span.start, o.info.span.end)
        }
        for worker in workers
        if not worker.is_evicted
    }
    lines = []
    for worker in (worker for worker in workers if worker.node in layers):
        others = set[int]().union(*(held for node, held in layers.items() if node != worker.node))
        if alone := sorted(layers[worker.node] - others):
            held = " and ".join(str(part) for part in _runs(alone))
            lines.append(f"{model}: layers {held} are held once: losing {worker.name} stops the model")
    return lines


def _runs(layers: Sequence[int]) -> list[Span]:
    """Spans that make up ascending layers."""
    found: list[Span] = []
    for layer in layers:
        if found and found[-1].end == layer:
            found[-1] = Span(found[-1].start, layer + 1)
        else:
            found.append(Span(layer, layer + 1))
    return found


def _node(worker: WorkerView, layer_ms: float | None) -> dict[str, Any]:
    control = worker.edges.get("control")
    rtt_s = control.rtt_s if control else None
    return {
        "node": worker.node,
        "name": worker.name,
        "is_me": False,
        "addresses": [worker.address],
        "scope": "",
        "memory_bytes": 0,
        "cores": 0,
        "device": "",
        "spoke_s_ago": 0.0,
        "path": control.path_kind if control else None,
        "rtt_ms": None if rtt_s is None else round(rtt_s * 1e3, 2),
        "spans": [
            _span(name, offer, worker.num_sessions, layer_ms) for name, offer in worker.offers if offer.info.is_loaded
        ],
    }


def _span(model: str, offer: Offer, sessions: int, layer_ms: float | None) -> dict[str, Any]:
    info = offer.info
    if offer.layer_s is not None:
        layer_ms = offer.layer_s * 1e3
    return {
        "model": model,
        "model_id": info.model,
        "layers": str(info.span),
        "precision": info.precision,
        "state": "spare" if info.is_spare else "serving",
        "sessions": sessions,
        "max_sessions": info.max_sessions,
        "queue": offer.load.queue,
        "layer_ms": None if layer_ms is None else round(layer_ms, 3),
        "free_tokens": info.free_tokens,
    }
