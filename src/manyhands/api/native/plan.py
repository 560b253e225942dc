"""POST /api/plan: what to expect of the swarm as it is, and with machines that are not there yet (`manyhands plan --add`).

Machines are those of the view of GET /api/swarm: memory, milliseconds a layer and round trips as nodes and links say
(place/living.py). The search runs in a process of its own, one at a time. With `apply` the nodes are asked to serve it.
"""

import asyncio
import json
import os
import pickle
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict, Field

from manyhands.api.access import check_admin
from manyhands.api.gateway import Gateway
from manyhands.api.http.route import caller_of
from manyhands.api.native.placement import apply_plan
from manyhands.api.native.swarm import SwarmView
from manyhands.api.preparation.child import STARVED, Child
from manyhands.config import home_from_env
from manyhands.errors import BadRequest, Conflict, ModelError, PipelineStalled, RateLimited
from manyhands.origin import Origin
from manyhands.place.living import LivingSwarm, swarm_of
from manyhands.place.machines import parse_what_if
from manyhands.place.shape import ModelShape, look_up
from manyhands.place.strategy import Strategy
from manyhands.place.whatif import DEADLINE_S, WhatIf

MAX_ADDED: Final = 8


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
    strategy: Literal["measured", "uniform", "capacity"] = Field(
        "measured", description="The fastest plan, or equal shares, or shares by cores and memory."
    )
    apply: bool = Field(False, description="Ask the nodes to serve their part of the plan.")
    force: bool = Field(False, description="Apply it also where it gains little, or a node is needed where it is.")


def plan_router(gateway: Gateway, view: SwarmView) -> APIRouter:
    """The route. `view`: where the machines come from."""
    router = APIRouter(tags=["plan"])
    shapes: dict[str, ModelShape] = {}
    turn = asyncio.Semaphore(1)

    @router.post("/api/plan", summary="What more machines would change", response_model=dict[str, Any])
    async def plan(body: PlanRequest, request: Request) -> dict[str, Any]:
        """Tokens a second of one stream, and which machine would hold which layers, before and after. With `apply`, nodes are
        asked to serve their part, by an admin only; else nothing is changed."""
        caller = caller_of(request)
        name = gateway.names.find(body.model or gateway.unnamed(caller), gateway.models)
        caller.check_model(name)
        if body.apply:
            check_admin(caller)
            if body.add:
                raise BadRequest("add describes machines that are not there: apply a plan without them")
        gateway.enter(caller, "native")
        origin = await gateway.ensure(name)
        if turn.locked():
            raise RateLimited("another plan is being made: ask again in a second", 1.0)
        async with turn:
            shape = shapes.get(name) or shapes.setdefault(name, await asyncio.to_thread(shape_of_origin, name, origin))
            swarm = swarm_of(await view(), origin.model.id, shape)
            told = {"model": name, **await _search(question_of(swarm, body.add, body.strategy))}
            if body.apply and told["after"] is not None:
                told["applied"] = await apply_plan(gateway, name, origin, swarm, told["after"], force=body.force)
            return told

    return router


def shape_of_origin(name: str, origin: Origin) -> ModelShape:
    """How large a model is, from the files of its origin. Blocking. Raises Conflict."""
    try:
        found = look_up(str(Path(origin.model.folder)), origin.model.precision, home_from_env())
    except ModelError as error:
        raise Conflict(f"the size of {name} is not known here: {error}") from error
    return replace(found.shape, name=name)


def question_of(swarm: LivingSwarm, added: Sequence[str], strategy: Strategy = "measured") -> WhatIf:
    """The swarm's machines, those to add, and how to share. Raises BadRequest."""
    here = swarm.task.origin
    return WhatIf(swarm.task, tuple(parse_what_if(text, here) for text in added), strategy)


# -- the search -------------------------------------------------------------------------------------------------------


async def _search(question: WhatIf) -> dict[str, Any]:
    """Deadline: DEADLINE_S of CPU time, which is longer on a busy machine. Raises BadRequest, PipelineStalled."""
    child = await Child.start([sys.executable, "-P", "-m", "manyhands.place.whatif"], os.environ)
    try:
        async with asyncio.timeout(STARVED * DEADLINE_S):
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
