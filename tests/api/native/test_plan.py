"""POST /api/plan: from the view of the swarm to a question, the search in its process, and its bounds."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from manyhands.api.gateway import Gateway
from manyhands.api.http.app import create_app
from manyhands.api.http.server import serving
from manyhands.api.native.plan import MAX_ADDED, plan_router, question_of
from manyhands.api.native.swarm import HopSpeeds, swarm_router, view_by_links
from manyhands.config import LimitsConfig
from manyhands.errors import BadRequest, Conflict
from manyhands.place import living
from manyhands.place.living import GATEWAY, MAX_MACHINES, swarm_of
from manyhands.place.shape import ModelShape
from manyhands.testing.swarm import memory_swarm
from tests.api.served import MODEL, make_model, raw

SHAPE = ModelShape("m", "bf16", (1_000_000,) * 12, 2_000_000, (100,) * 12, 128, 1024, process_bytes=1000)


def node(name: str, layers: str = "0-3", **facts: Any) -> dict[str, Any]:
    span = {"model_id": "id", "layers": layers, "state": "serving", "layer_ms": facts.pop("layer_ms", 2.0)}
    told = {"node": name * 8, "name": name, "is_me": False, "memory_bytes": 10**9, "rtt_ms": 5.0, "spans": [span]}
    return {**told, **facts}


def asked(view: Any, added: list[str]) -> Any:
    return question_of(swarm_of(view, "id", SHAPE), added)


def test_machines_are_as_the_swarm_says() -> None:
    nodes = [
        node("far", rtt_ms=None),
        node("me", is_me=True, layer_ms=1.0),
        node("full", memory_bytes=0, layer_ms=None),
    ]
    question = asked({"nodes": nodes}, ["laptop:8GB@40ms*0.5"])
    fleet = question.task.fleet
    assert fleet.origin == "me" and fleet.get_machine("me").rtt_s == 0.0
    assert fleet.get_machine("me").ends_s == pytest.approx(0.002)  # twice a layer's bytes
    assert fleet.get_machine("far").rtt_s == 0.005, "not linked: as far as the farthest"
    assert fleet.get_machine("full").layer_s == 0.0015, "not measured: as the others"
    assert question.task.capacity(fleet.get_machine("full")) == 4, "memory not known: what it holds"
    assert question.added[0].layer_s == 0.002 and question.added[0].rtt_s == 0.04 and question.task.tokens == 1024


def test_a_gateway_without_layers_is_a_machine_without_room() -> None:
    question = asked({"nodes": [node("a"), node("a", node="other")]}, [])
    assert question.task.fleet.origin == GATEWAY and question.task.capacity(question.task.origin) == 0
    assert [machine.name for machine in question.task.fleet.machines] == ["a", "a other", GATEWAY]


def test_what_cannot_be_planned_says_why() -> None:
    with pytest.raises(Conflict, match="ask again after an answer"):
        asked({"nodes": [node("a", layer_ms=None)]}, [])
    with pytest.raises(BadRequest, match="describes no machine"):
        asked({"nodes": [node("a")]}, ["laptop"])


def test_a_large_swarm_is_planned_with_its_largest_machines() -> None:
    nodes = [node(f"n{i}", memory_bytes=10**9 + i) for i in range(200)]
    question = asked({"nodes": nodes}, [])
    assert len(question.task.fleet.machines) == MAX_MACHINES + 1
    assert question.task.fleet.get_machine("n199").memory_bytes == 10**9 + 199


def test_a_plan_comes_over_http_one_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def post(addr: Any, body: Any) -> tuple[int, Any]:
        data = json.dumps(body).encode()
        head = f"POST /api/plan HTTP/1.1\r\nhost: {addr}\r\nconnection: close\r\ncontent-type: application/json\r\n"
        reader, writer = await asyncio.open_connection(addr.host, addr.port)
        writer.write(f"{head}content-length: {len(data)}\r\n\r\n".encode() + data)
        said = await asyncio.wait_for(reader.read(), 60)
        writer.close()
        return int(said.split()[1]), json.loads(said.split(b"\r\n\r\n", 1)[1])

    async def main() -> None:
        folder = make_model(tmp_path / "m")
        async with memory_swarm(folder, "0,1") as swarm:
            speeds = HopSpeeds()
            gateway = Gateway({MODEL: swarm.origin}, LimitsConfig(), [speeds])
            view = view_by_links(gateway, speeds)
            app = create_app(gateway, routers=[swarm_router(view), plan_router(gateway, view)])
            async with serving(app, "127.0.0.1", 0) as addr:
                assert (await post(addr, {"add": ["x:1GB"] * (MAX_ADDED + 1)}))[0] == 400
                status, said = await post(addr, {})
                assert status == 409 and "has measured" in said["error"]["message"]
                status, told = await raw(
                    addr, f"GET /api/swarm HTTP/1.1\r\nhost: {addr}\r\nconnection: close\r\n\r\n".encode()
                )
                seen = json.loads(told.split(b"\r\n\r\n", 1)[1])
                assert status == 200 and [n["spans"][0]["layers"] for n in seen["nodes"]] == ["0", "1"]
                assert seen["models"][0]["coverage"] == [1, 1] and len(seen["warnings"]) == 2
                for one in seen["nodes"]:
                    speeds._layer_ms[one["node"]] = 2.0
                asked = await asyncio.gather(*(post(addr, {"add": ["laptop:8GB@1ms*4"]}) for _ in range(2)))
                assert sorted(status for status, _ in asked) == [200, 429]
                (plan,) = (said for status, said in asked if status == 200)
                assert plan["before"]["tokens_per_s"] < plan["after"]["tokens_per_s"]
                assert plan["after"]["hops"][0]["machine"] == "laptop" and "instead of" in plan["advice"][1]
                assert (await post(addr, {"add": ["a:1GB", "a:1GB"]}))[0] == 400

    asyncio.run(main())
    assert living.TOKENS >= living.PROMPT
