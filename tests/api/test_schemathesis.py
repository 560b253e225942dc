"""Schemathesis against our own OpenAPI document: what conforms to a schema, and what just does not, on every path.

A real server in a thread of its own, over a swarm in its process. A request that names a model mostly names the one there
is, and few tokens, so that it reaches further than the first refusal.
"""

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from fastapi import FastAPI
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from manyhands.api.gateway import Gateway
from manyhands.api.http.app import create_app
from manyhands.api.http.server import serving
from manyhands.api.jobs import History
from manyhands.api.metrics import Metrics
from manyhands.api.native.plan import plan_router
from manyhands.api.native.routes import native_router
from manyhands.api.native.swarm import HopSpeeds, swarm_router, view_by_links
from manyhands.api.openai.chat import openai_router
from manyhands.api.openai.responses import responses_router
from manyhands.api.status import status_router
from manyhands.config import LimitsConfig
from manyhands.core import NodeAddr
from manyhands.errors import ManyhandsError
from manyhands.testing.swarm import memory_swarm
from tests.api.served import HERMES_TEMPLATE, MODEL, make_model
from tests.nightly import daily

CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]
# Ours, with a code and a reason: not a failure of the server.
REFUSALS = {501, 503, 504}


@dataclass(slots=True)
class Site:
    """A running gateway."""

    addr: NodeAddr
    app: FastAPI
    gateway: Gateway


async def _serve(folder: Path, ready: Callable[[Site], None], stop: asyncio.Event) -> None:
    async with memory_swarm(folder, "0,1") as swarm:
        gateway = Gateway({MODEL: swarm.origin}, LimitsConfig(default_max_tokens=4))
        history, metrics = History(), Metrics(gateway)
        gateway.observers += [history, metrics]
        view = view_by_links(gateway, HopSpeeds())
        routers = [openai_router(gateway), responses_router(gateway), native_router(gateway, history)]
        routers += [swarm_router(view), plan_router(gateway, view)]
        app = create_app(gateway, routers=[*routers, status_router(gateway, metrics)])
        async with serving(app, "127.0.0.1", 0) as addr:
            ready(Site(addr, app, gateway))
            await stop.wait()
        assert not gateway.jobs and not swarm.origin.node.sessions


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = make_model(tmp_path_factory.mktemp("schemathesis") / "m", HERMES_TEMPLATE)
    made: list[Site] = []
    is_ready = threading.Event()
    loop = asyncio.new_event_loop()
    stop = asyncio.Event()

    def ready(one: Site) -> None:
        made.append(one)
        is_ready.set()

    thread = threading.Thread(target=lambda: loop.run_until_complete(_serve(folder, ready, stop)))
    thread.start()
    assert is_ready.wait(60)
    yield made[0]
    loop.call_soon_threadsafe(stop.set)
    thread.join(30)
    assert not thread.is_alive()
    loop.close()


def operations(document: dict[str, Any]) -> list[tuple[str, str]]:
    methods = ("get", "post", "put", "delete", "patch")
    return [(path, method) for path, item in document["paths"].items() for method in item if method in methods]


def aim(body: Any, draw: Any) -> Any:
    """Point a request at the model there is, with few tokens, where it is an object at all."""
    if isinstance(body, dict) and draw(st.integers(0, 9)):
        body = {**body, "model": MODEL} if "model" in body else body
        for name in ("max_tokens", "max_completion_tokens", "max_output_tokens"):
            if isinstance(body.get(name), int) and body[name] > 4:
                body = {**body, name: 4}
    return body


@pytest.mark.parametrize("max_examples", daily([5], [40]))
def test_every_operation_keeps_its_word(site: Site, max_examples: int) -> None:
    document = site.app.openapi()
    schema: Any = schemathesis.openapi.from_dict(document)
    seen: dict[int, int] = {}

    @settings(max_examples=max_examples, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(data=st.data(), is_negative=st.booleans())
    def check(operation: Any, data: st.DataObject, is_negative: bool) -> None:
        mode = GenerationMode.NEGATIVE if is_negative and operation.body else GenerationMode.POSITIVE
        case = data.draw(operation.as_strategy(generation_mode=mode))
        case.body = aim(case.body, data.draw)
        response = case.call(base_url=f"http://{site.addr}", timeout=30)
        seen[response.status_code] = seen.get(response.status_code, 0) + 1
        assert response.status_code != 500, (case.body, response.text[:500])
        if response.status_code >= 400:
            said = json.loads(response.content)
            error = said["error"] if isinstance(said["error"], dict) else {**said, "code": said["error"]}
            assert error["message"] and "\n" not in error["message"] and error["code"] != ManyhandsError.code
        checks = [c for c in CHECKS if c is not not_a_server_error or response.status_code not in REFUSALS]
        case.validate_response(response, checks=checks)

    for path, method in operations(document):
        check(operation=schema[path][method.upper()])
    assert {200, 400, 404} <= seen.keys(), seen
