"""manyhands.api.native.bus: HearthNet's capability names over a running gateway (F61, HN-14, HN-40, HN-R01)."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx2
import pytest

from manyhands.api.native.capabilities import ADVERTISE, CHAT, SERVE
from tests.api.observed import Observed, events, observed, served

MESSAGES = [{"role": "user", "content": "Hello there"}]
Play = Callable[[Observed, httpx2.AsyncClient], Awaitable[None]]


def play(folder: Path, main: Play, *, spares: tuple[str, ...] = ("0-5",)) -> None:
    async def whole() -> None:
        async with observed(folder, spares=spares) as scene, served(scene) as client:
            await main(scene, client)

    asyncio.run(whole())


def body(capability: str = f"{CHAT}@1.0", **said: Any) -> dict[str, Any]:
    params = {"model": "tiny", "sharding": "auto", **said.pop("params", {})}
    return {
        "capability": capability,
        "params": params,
        "input": {"messages": MESSAGES, "max_tokens": 8, "seed": 7, **said},
    }


async def call(client: httpx2.AsyncClient, **said: Any) -> list[tuple[str, dict[str, Any]]]:
    async with client.stream("POST", "/bus/v1/call", json=body(**said)) as response:
        assert response.status_code == 200, await response.aread()
        return [event async for event in events(response)]


def test_capabilities_have_hearthnets_names(folder: Path) -> None:
    async def main(scene: Observed, client: httpx2.AsyncClient) -> None:
        told = (await client.get("/bus/v1/capabilities")).json()
        assert [(one["name"], one["version"], one["stream"], one["trust_required"]) for one in told] == [
            (CHAT, "1.0", True, "member"),
            (ADVERTISE, "1.0", False, "trusted"),
            (SERVE, "1.0", True, "trusted"),
        ]
        assert all(name.startswith("experimental.distributed_llm.") for name in (CHAT, ADVERTISE, SERVE))
        assert told[0]["params"]["models"] == ["tiny"] and told[0]["enabled"]
        scene.swarm.origin.node.worker.switch(on=False)
        assert not (await client.get("/bus/v1/capabilities")).json()[0]["enabled"]
        said = await client.post("/bus/v1/call", json=body())
        assert (said.status_code, said.json()["error"]) == (503, "experimental_disabled")

    play(folder, main)


def test_a_call_streams_the_contracts_frames_and_the_whole_says_the_same(folder: Path) -> None:
    async def main(scene: Observed, client: httpx2.AsyncClient) -> None:
        told = await call(client)
        assert [name for name, _ in told] == ["shard_status", *["token_delta"] * 8, "done"]
        status, done = told[0][1], told[-1][1]
        assert [(s["shard_id"], s["status"]) for s in status["shards"]] == [
            ("tiny:0-2", "online"),
            ("tiny:3-5", "online"),
        ]
        assert all(s["host"] == f"ed25519:{scene.node(i)}" for i, s in enumerate(status["shards"]))
        assert (done["tokens_out"], done["stop_reason"], done["seed"]) == (8, "max_tokens", 7)
        assert next(scene.history.recent())["api"] == "bus"
        whole = (await client.post("/bus/v1/call", json=body(stream=False))).json()
        text = "".join(data["text"] for name, data in told if name == "token_delta")
        assert whole["output"]["message"] == {"role": "assistant", "content": text}
        assert whole["meta"]["tokens_in"] == done["tokens_in"]

    play(folder, main)


def test_a_failover_comes_as_its_frames(folder: Path) -> None:
    async def main(scene: Observed, client: httpx2.AsyncClient) -> None:
        victim = scene.swarm.hops[1]
        scene.faults.at("decode", victim, lambda: scene.faults.die(victim), skip=3)
        told = await call(client, max_tokens=12)
        names = [name for name, _ in told]
        assert names.count("token_delta") == 12 and names[-1] == "done"
        (failover,) = [data for name, data in told if name == "shard_failover"]
        assert failover == {"failed_shard": "tiny:3-5", "replacement": "tiny:3-5@n2"}
        assert [data["status"] for name, data in told if name == "shard_status"] == ["online", "degraded"]

    play(folder, main)


def test_a_call_that_cannot_go_on_ends_with_an_error_of_the_contracts_shape(folder: Path) -> None:
    async def main(scene: Observed, client: httpx2.AsyncClient) -> None:
        victim = scene.swarm.hops[1]
        scene.faults.at("decode", victim, lambda: scene.faults.die(victim), skip=3)
        told = await call(client, max_tokens=12)
        assert [name for name, _ in told][-2:] == ["pipeline_aborted", "error"]
        assert told[-1][1]["error"] == "shard_unavailable" and "no other node" in told[-1][1]["message"]

    play(folder, main, spares=())


@pytest.mark.parametrize(
    ("changed", "status", "code"),
    [
        ({"capability": ADVERTISE}, 501, "not_offered"),
        ({"capability": f"{SERVE}@1.0"}, 501, "not_offered"),
        ({"capability": f"{CHAT}@2.0"}, 501, "not_offered"),
        ({"capability": "llm.chat@1.0"}, 501, "not_offered"),
        ({"params": {"model": "other"}}, 404, "model_not_found"),
        ({"params": {"sharding": "manual"}}, 400, "invalid_value"),
        ({"params": {"ctx": 1 << 20}}, 400, "invalid_value"),
        ({"tools": []}, 400, "unknown_parameter"),
        ({"messages": []}, 400, "invalid_value"),
    ],
)
def test_what_cannot_be_called_says_why(folder: Path, changed: dict[str, Any], status: int, code: str) -> None:
    async def main(_: Observed, client: httpx2.AsyncClient) -> None:
        said = await client.post("/bus/v1/call", json=body(**changed))
        assert (said.status_code, set(said.json())) == (status, {"error", "message"}), said.text
        assert said.json()["error"] == code

    play(folder, main)


def test_what_is_not_called_is_said_to_bodies_of_its_own(folder: Path) -> None:
    """HearthNet's shard.serve and shard.advertise have other fields than chat: 501 whatever they are, not 400 for these."""

    async def main(_: Observed, client: httpx2.AsyncClient) -> None:
        for name in (SERVE, ADVERTISE):
            call = {"capability": name, "version": "1.0", "params": {"model": "other"}, "input": {"layer_start": 0}}
            said = await client.post("/bus/v1/call", json=call)
            assert (said.status_code, said.json()["error"]) == (501, "not_offered"), said.text

    play(folder, main)


def test_a_capability_may_stand_in_the_header(folder: Path) -> None:
    async def main(_: Observed, client: httpx2.AsyncClient) -> None:
        sent = body(stream=False)
        del sent["capability"]
        for name, status in ((f"{CHAT}@1.0", 200), (SERVE, 501)):
            said = await client.post("/bus/v1/call", json=sent, headers={"X-HearthNet-Capability": name})
            assert said.status_code == status, said.text

    play(folder, main)


def test_a_call_without_fallback_does_not_go_on_alone(folder: Path) -> None:
    """fallback_to_local: false; the machine could, and does so for another."""

    async def whole() -> None:
        async with observed(folder, has_fallback=True) as scene, served(scene) as client:
            for index in range(3):
                scene.swarm.origin.routes.evict(scene.node(index))
            refused = await client.post("/bus/v1/call", json=body(stream=False, params={"fallback_to_local": False}))
            assert (refused.status_code, refused.json()["error"]) == (503, "shard_unavailable")
            alone = await client.post("/bus/v1/call", json=body(stream=False, params={"fallback_to_local": True}))
            assert alone.status_code == 200 and alone.json()["meta"]["tokens_out"] == 8
            assert next(scene.history.recent())["routing"]["is_fallback"]

    asyncio.run(whole())
