"""A gateway over a swarm in one process, with everything that looks on; and requests to it."""

import json
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2

from manyhands.api.gateway import Gateway
from manyhands.api.http.app import create_app
from manyhands.api.http.hosts import OWNER_HEADER
from manyhands.api.http.server import serving
from manyhands.api.jobs import History
from manyhands.api.log import RequestLog
from manyhands.api.metrics import Metrics
from manyhands.api.native.routes import native_router
from manyhands.api.run import Ask, Job, Run
from manyhands.api.status import status_router
from manyhands.config import LimitsConfig, RequestConfig
from manyhands.core import NodeAddr, NodeId, SamplingParams
from manyhands.testing.faults import Faults
from manyhands.testing.swarm import MemorySwarm, memory_swarm
from manyhands.worker.execute import Device

PROMPT = "xylophone that must not stand in a log"
MODEL = "tiny"


@dataclass(slots=True)
class Observed:
    """`faults` may disturb the swarm; `metrics` and `history` look on."""

    swarm: MemorySwarm
    gateway: Gateway
    metrics: Metrics
    history: History
    faults: Faults

    def node(self, index: int) -> NodeId:
        return self.swarm.hops[index].transport.node

    def ask(self, max_tokens: int = 8, model: str = MODEL, **params: Any) -> Ask:
        ids = self.swarm.origin.model.encode(PROMPT)
        return Ask(model, "native", ids, SamplingParams(max_tokens=max_tokens, **params))

    async def answer(self, max_tokens: int = 8, **params: Any) -> Run:
        """Run a request to its end."""
        async with self.gateway.run(self.ask(max_tokens, **params)) as run, aclosing(run.tokens()) as tokens:
            async for _ in tokens:
                pass
        return run

    async def evicting(self, index: int, at_token: int, max_tokens: int = 12) -> Job:
        """Run a request, evicting node `index` once `at_token` tokens have come."""
        async with self.gateway.run(self.ask(max_tokens)) as run, aclosing(run.tokens()) as tokens:
            async for _ in tokens:
                if run.job.completion_tokens == at_token:
                    self.swarm.origin.routes.evict(self.node(index))
        return run.job


@asynccontextmanager
async def observed(
    folder: Path,
    cut: str = "0-2,3-5",
    *,
    spares: tuple[str, ...] = ("0-5",),
    has_fallback: bool = False,
    patience_s: float = 1.0,
) -> AsyncIterator[Observed]:
    faults = Faults()
    request = RequestConfig(patience_s=patience_s)
    async with memory_swarm(folder, cut, spares=spares, request=request, wrap=faults.wrap) as swarm:
        device = Device.start(1)
        try:
            if has_fallback:
                await swarm.origin.node.listen(NodeAddr("mem", 0))
                await swarm.origin.add_fallback(folder, device)
            gateway = Gateway({MODEL: swarm.origin}, LimitsConfig())
            metrics, history = Metrics(gateway), History()
            gateway.observers += [RequestLog(), metrics, history]
            yield Observed(swarm, gateway, metrics, history, faults)
        finally:
            device.close()


@asynccontextmanager
async def served(scene: Observed, **options: Any) -> AsyncIterator[httpx2.AsyncClient]:
    """A client of the scene's gateway over HTTP on loopback. `keys` as the application takes them; without, it is the owner."""
    keys = options.pop("keys", None)
    routers = [native_router(scene.gateway, scene.history), status_router(scene.gateway, scene.metrics)]
    app = create_app(scene.gateway, keys=keys, routers=routers)
    if keys is None:
        options.setdefault("headers", {})[OWNER_HEADER] = app.state.access.owner_secret
    async with serving(app, "127.0.0.1", 0) as addr:
        async with httpx2.AsyncClient(base_url=f"http://{addr}", timeout=20.0, **options) as client:
            yield client


async def events(response: httpx2.Response) -> AsyncIterator[tuple[str, dict[str, Any]]]:
    """(name, data) of a stream of server-sent events, comments left out."""
    name = ""
    async for line in response.aiter_lines():
        if line.startswith("event: "):
            name = line.removeprefix("event: ")
        elif line.startswith("data: "):
            yield name, json.loads(line.removeprefix("data: "))
