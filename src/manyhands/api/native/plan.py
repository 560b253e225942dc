"""POST /api/plan: what to expect of the swarm as it is, and with machines that are not there yet (`manyhands plan --add`).

Machines are those of the view of GET /api/swarm: memory, milliseconds a layer and round trips as nodes and links say. The
search runs in a process of its own, one at a time.
"""

import asyncio
import json
import os
import pickle
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Final

from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict, Field

from manyhands.api.gateway import Gateway
from manyhands.api.http.route import caller_of
from manyhands.api.native.swarm import SwarmView
from manyhands.api.preparation.child import Child
from manyhands.config import home_from_env
from manyhands.core import Span
from manyhands.errors import BadRequest, Conflict, ModelError, PipelineStalled, RateLimited
from manyhands.origin import Origin
from manyhands.place.machines import Fleet, Machine, parse_what_if
from manyhands.place.plan import Task
from manyhands.place.shape import ModelShape, look_up
from manyhands.place.whatif import DEADLINE_S, WhatIf

MAX_ADDED: Final = 8
MAX_MACHINES: Final = 64  # of a swarm, those with the most memory; the search grows with their square
TOKENS: Final = 2048  # cache that is planned for, where the model's context allows it
PROMPT: Final = 128
GATEWAY: Final = "this gateway"  # where it hosts no layers itself

Object = Mapping[str, Any]


class PlanRequest(BaseModel):
    """Machines to add, each written as for `manyhands plan --add`: "laptop:8GB@40ms", "laptop:8GB@40ms*0.5"."""

    model_config = ConfigDict(extra="forbid", strict=True)
    model: str | None = Field(
        None, max_length=512, description="One of GET /v1/models; may be left out where there is one."
    )
    add: list[Annotated[str, Field(min_length=1, max_length=128)]] = Field(
        default_factory=list,
        max_length=MAX_ADDED,
        description='"NAME:MEMORY@LATENCY", and "*SPEED" relative to this gateway',
    )


def plan_router(gateway: Gateway, view: SwarmView) -> APIRouter:
    """The route. `view`: where the machines come from."""
    router = APIRouter(tags=["plan"])
    shapes: dict[str, ModelShape] = {}
    turn = asyncio.Semaphore(1)

    @router.post("/api/plan", summary="What more machines would change", response_model=dict[str, Any])
    async def plan(body: PlanRequest, request: Request) -> dict[str, Any]:
        """Tokens a second of one stream, and which machine would hold which layers, before and after. Nothing is changed."""
        caller = caller_of(request)
        name = _model_of(gateway, body.model)
        caller.check_model(name)
        origin = await gateway.ensure(name)
        gateway.enter(caller, "native")
        if turn.locked():
            raise RateLimited("another plan is being made: ask again in a second", 1.0)
        async with turn:
            shape = shapes.get(name) or shapes.setdefault(name, await asyncio.to_thread(shape_of_origin, name, origin))
            question = question_of(await view(), name, origin.model.id, shape, body.add)
            return {"model": name, **await _search(question)}

    return router


def _model_of(gateway: Gateway, asked: str | None) -> str:
    """Raises BadRequest where it is not clear which one is meant."""
    if asked is None and len(gateway.models) != 1:
        raise BadRequest(f"model is missing: this gateway has {', '.join(gateway.models) or 'none'}")
    return asked or next(iter(gateway.models))


def shape_of_origin(name: str, origin: Origin) -> ModelShape:
    """How large a model is, from the files of its origin. Blocking. Raises Conflict."""
    try:
        found = look_up(str(Path(origin.model.folder)), origin.model.precision, home_from_env())
    except ModelError as error:
        raise Conflict(f"the size of {name} is not known here: {error}") from error
    return replace(found.shape, name=name)


# -- from the view to the question: pure ------------------------------------------------------------------------------


def question_of(view: Object, name: str, model_id: str, shape: ModelShape, added: Sequence[str]) -> WhatIf:
    """The swarm's machines as a fleet, and those to add. Raises BadRequest; Conflict if no node has measured its speed."""
    tokens = min(TOKENS, shape.context or TOKENS)
    nodes = sorted(view["nodes"], key=lambda node: (not node["is_me"], -node["memory_bytes"]))[:MAX_MACHINES]
    speeds = {node["node"]: speed for node in nodes if (speed := _layer_s(node, model_id)) is not None}
    if not speeds:
        raise Conflict(f"no node has measured how fast it computes {name} yet: ask again after an answer or two")
    usual_s = statistics.median(speeds.values())
    far_s = max((node["rtt_ms"] or 0.0 for node in nodes), default=0.0) / 1e3
    machines: dict[str, Machine] = {}
    for node in nodes:
        label = node["name"] if node["name"] not in machines else f"{node['name']} {node['node'][:6]}"
        rtt_s = 0.0 if node["is_me"] else far_s if node["rtt_ms"] is None else node["rtt_ms"] / 1e3
        layer_s = speeds.get(node["node"], usual_s)
        memory = node["memory_bytes"] or _held_bytes(node, model_id, shape, tokens)
        machines[label] = Machine(label, max(1, memory), layer_s, ends_s=_ends_s(shape, layer_s), rtt_s=rtt_s)
    home = next((label for label, node in zip(machines, nodes, strict=True) if node["is_me"]), GATEWAY)
    if home == GATEWAY:
        room = shape.process_bytes + shape.ends_bytes  # for embedding and head, and no layer
        machines[home] = Machine(home, room, usual_s, ends_s=_ends_s(shape, usual_s))
    task = Task(shape, Fleet(tuple(machines.values()), home), tokens, min(PROMPT, tokens))
    return WhatIf(task, tuple(parse_what_if(text, machines[home]) for text in added))


def _spans(node: Object, model_id: str) -> list[Object]:
    return [span for span in node["spans"] if span["model_id"] == model_id and span["state"] != "loading"]


def _layer_s(node: Object, model_id: str) -> float | None:
    measured = [span["layer_ms"] for span in _spans(node, model_id) if span["layer_ms"]]
    return min(measured) / 1e3 if measured else None


def _held_bytes(node: Object, model_id: str, shape: ModelShape, tokens: int) -> int:
    """What a node whose memory is not known has at least: room for what it holds."""
    held = [shape.span_bytes(Span.parse(span["layers"]), tokens) for span in _spans(node, model_id)]
    return shape.process_bytes + max(held, default=0)


def _ends_s(shape: ModelShape, layer_s: float) -> float:
    """Embedding and head are read once a token, as a layer is: they take as much time as their bytes."""
    layer_bytes = max(1, sum(shape.layer_bytes) // shape.num_layers)
    return layer_s * shape.ends_bytes / layer_bytes


# -- the search -------------------------------------------------------------------------------------------------------


async def _search(question: WhatIf) -> dict[str, Any]:
    """Deadline: a little more than DEADLINE_S. Raises BadRequest, PipelineStalled."""
    child = await Child.start([sys.executable, "-m", "manyhands.place.whatif"], os.environ)
    try:
        async with asyncio.timeout(2 * DEADLINE_S):
            child.stdin.write(pickle.dumps(question))
            child.stdin.write_eof()
            said = await child.stdout.read()
    except TimeoutError:
        said = b""
    finally:
        await child.end()
    if not said:
        raise PipelineStalled(f"the search for a plan took more than {DEADLINE_S} s: ask with fewer machines")
    found: dict[str, Any] = json.loads(said)
    if "error" in found:
        raise BadRequest(found["error"])
    return found
