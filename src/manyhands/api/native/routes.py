"""Our own API: lattice9's paths and events, with HearthNet's diagnostic frames in the same stream on request (docs/api.md).

    POST   /api/infer                  the whole answer, with the workers that made it
    POST   /api/infer/stream           events start token reshard done error; ?diagnostics=1 adds
                                       token_delta shard_status shard_failover pipeline_aborted
    GET    /api/workers   /{id}        the nodes, and which route a request would take now
    POST   /api/workers/register       use the node at an address          POST /api/workers/heartbeat
    DELETE /api/workers/{id}           evict; running requests repair      POST /api/workers/{id}/readmit  /reassign
    GET    /api/jobs      /{id}        what runs and what ran
    POST   /bus/v1/call                HearthNet's names of the same (bus.py)

Changing the swarm needs an admin's key, or the secret of the gateway's owner (access.py).
"""

from collections.abc import Iterator
from itertools import islice
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query, Request, Response
from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from manyhands.api.access import admins_only
from manyhands.api.formats import ModelFormats
from manyhands.api.gateway import Gateway
from manyhands.api.http.encode import JsonItems
from manyhands.api.http.route import caller_of
from manyhands.api.http.sse import Single, Watched
from manyhands.api.jobs import History, JobObject, job_object
from manyhands.api.native.bus import bus_router
from manyhands.api.native.infer import infer_router
from manyhands.api.native.placement import assign
from manyhands.api.native.workers import (
    WorkerView,
    check_model,
    evict,
    find_worker,
    list_workers,
    meet,
    readmit,
    reassign,
    register,
    scheduler_object,
    worker_object,
)
from manyhands.api.run import Caller
from manyhands.errors import BadRequest, NotFound

_STRICT = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


def _check_text(text: str) -> str:
    """JSON can hold half a surrogate pair, which is no text; pydantic makes a refusal of the ValueError."""
    text.encode()
    return text


Text = Annotated[str, AfterValidator(_check_text)]


class Registration(BaseModel):
    """Where a node listens, `address` or lattice9's `url`, and layers for it; "": those that no node holds.

    `worker_id`, `model_name` and `total_layers`, where given, must be what is found there and served here.
    """

    model_config = _STRICT
    address: Annotated[Text, Field(max_length=300)] = ""
    url: Annotated[Text, Field(max_length=300, description="host:port, or http://host:port")] = ""
    layers: Annotated[str, Field(max_length=32)] = ""
    worker_id: Annotated[Text, Field(max_length=200)] = ""
    model_name: Annotated[Text, Field(max_length=512)] = ""
    total_layers: Annotated[int, Field(ge=0)] = 0

    @property
    def where(self) -> str:
        """host:port. Raises BadRequest unless one of the two fields says it."""
        if bool(self.address) == bool(self.url):
            raise BadRequest("say where the node listens: address (host:port), or url")
        return self.address or self.url.partition("://")[2].rstrip("/") or self.url


class Heartbeat(BaseModel):
    model_config = _STRICT
    worker_id: Text


class Reassignment(BaseModel):
    """Layers to move to, as people write them: "0-7"."""

    model_config = _STRICT
    to: Text
    model: Text | None = Field(None, description="Whose layers; may be left out where there is one.")
    force: bool = Field(False, description="Also if no other node holds the layers that it leaves.")


def native_router(gateway: Gateway, history: History, formats: ModelFormats | None = None) -> APIRouter:
    """The routes above. `history` must be among the gateway's observers. Share `formats` with openai_router."""
    formats, router, whole = formats or ModelFormats(gateway), APIRouter(prefix="/api"), APIRouter()
    router.include_router(infer_router(gateway, formats), tags=["infer"])
    router.include_router(_workers_router(gateway), prefix="/workers", tags=["workers"])
    router.include_router(_jobs_router(gateway, history), prefix="/jobs", tags=["jobs"])
    whole.include_router(router)
    whole.include_router(bus_router(gateway, formats))
    return whole


# -- workers ----------------------------------------------------------------------------------------------------------


def _workers_router(gateway: Gateway) -> APIRouter:
    router = APIRouter()

    @router.get("", summary="Nodes and route")
    async def workers() -> dict[str, Any]:
        """Every node known here, and which hops a request would take now."""
        await meet(gateway)
        return {
            "workers": [worker_object(worker) for worker in list_workers(gateway)],
            "scheduler": await scheduler_object(gateway),
        }

    @router.post("/heartbeat", summary="Is a node still known")
    async def heartbeat(body: Heartbeat) -> dict[str, Any]:
        """404 if not: register again. Links have heartbeats of their own, so this changes nothing."""
        worker = worker_object(await _find(gateway, body.worker_id))
        return {"status": worker["status"], "worker": worker}

    @router.get("/{worker_id}", summary="One node")
    async def worker(worker_id: str) -> dict[str, Any]:
        """By id, the first digits of one, or a name."""
        return worker_object(await _find(gateway, worker_id))

    router.include_router(_changes_router(gateway))
    return router


async def _find(gateway: Gateway, worker_id: str) -> WorkerView:
    await meet(gateway)
    return find_worker(gateway, worker_id)


def _changes_router(gateway: Gateway) -> APIRouter:
    """What changes the swarm: for admins."""
    changes = APIRouter(dependencies=[Depends(admins_only)])

    @changes.post("/register", summary="Use a node that no ticket names")
    async def register_worker(body: Registration) -> dict[str, Any]:
        """Dial it; it must prove membership of the swarm. It is asked to serve layers that no node holds, or those named; the
        answer says what it serves, its assignment, and what it `said`."""
        await check_model(gateway, body.model_name, body.total_layers)
        found = await register(gateway, body.where, body.worker_id)
        said = await assign(gateway, found, body.layers)
        worker = worker_object(find_worker(gateway, found.node))
        spans = worker["spans"]
        return {"status": "registered", "worker": worker, "assignment": spans[0] if spans else None, "said": said}

    @changes.delete("/{worker_id}", summary="Evict a node")
    async def evict_worker(
        worker_id: str,
        force: Annotated[bool, Query(description="Also if no other node holds its layers.")] = False,
    ) -> dict[str, Any]:
        """Requests that run through it repair to others at once; it stays out until it is readmitted."""
        worker = await _find(gateway, worker_id)
        told = evict(gateway, worker, force=force)
        who = {"status": "evicted", "worker_id": worker.node, "name": worker.name}
        return {**who, "repaired_sessions": told.repaired, "finishing_sessions": told.finishing}

    @changes.post("/{worker_id}/readmit", summary="Let an evicted node back")
    async def readmit_worker(worker_id: str) -> dict[str, Any]:
        """New requests and repairs may use it again."""
        worker = await _find(gateway, worker_id)
        readmit(gateway, worker)
        return {"status": "readmitted", "worker_id": worker.node, "name": worker.name}

    @changes.post(
        "/{worker_id}/reassign",
        summary="Move a node to other layers",
        responses={202: {"description": "It moves, and has not arrived yet"}, 409: {"description": "It refuses"}},
    )
    async def reassign_worker(worker_id: str, body: Reassignment, response: Response) -> dict[str, Any]:
        """The node decides. 200 once it serves the layers, 202 if that takes longer, 409 with its reason."""
        told = await reassign(gateway, await _find(gateway, worker_id), body.to, body.model, force=body.force)
        response.status_code = 200 if told["status"] == "reassigned" else 202
        return told

    return changes


# -- jobs -------------------------------------------------------------------------------------------------------------


def _jobs_router(gateway: Gateway, history: History) -> APIRouter:
    router = APIRouter()

    def may_see(caller: Caller, key: str | None) -> bool:
        """Jobs of the caller's key; an admin sees all."""
        return caller.is_admin or key == caller.name

    def visible(caller: Caller) -> Iterator[JobObject]:
        """Newest first, each made when it is asked for."""
        running = [job for job in reversed(gateway.jobs.values()) if may_see(caller, job.key)]
        ended = history.recent(lambda key: may_see(caller, key))
        yield from (job_object(job) for job in running)
        yield from ended

    @router.get("", summary="Requests that run and that ran")
    async def jobs(
        request: Request,
        limit: Annotated[int, Query(ge=1, le=1000)] = 50,
    ) -> Response:
        """Newest first, with route, timings, repairs and reshard events; never what was asked or answered."""

        async def made() -> dict[str, Any]:
            return {"jobs": JsonItems(islice(visible(caller_of(request)), limit))}

        async def work() -> Single:
            return Single(made)

        return Watched(work(), request.state.release_body)

    @router.get("/{job_id}", summary="One request")
    async def job(job_id: str, request: Request) -> dict[str, Any]:
        """404 once it is older than the history."""
        runs = gateway.jobs.get(job_id)
        found = history.find(job_id) if runs is None else job_object(runs)
        if found is None or not may_see(caller_of(request), found["key"]):
            raise NotFound(f"no job {job_id[:64]!r}: it never was, is older than the history, or is another key's")
        return found

    return router
