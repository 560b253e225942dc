"""manyhands.api.native.routes: lattice9's paths and events, HearthNet's frames, and what an operator may do."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx2
import pytest

from manyhands.api.auth import KeyRing
from manyhands.api.native import workers
from manyhands.api.run import Job, Outcome
from manyhands.core import NodeId, Span
from manyhands.origin import Token
from manyhands.origin.repair_plan import Event
from manyhands.wire.message import Reassign
from tests.api.observed import PROMPT, Observed, events, observed, served
from tests.waiting import until

BODY = {"prompt": PROMPT, "max_tokens": 12, "deterministic": True}
Play = Callable[[Observed, httpx2.AsyncClient], Awaitable[None]]


def play(
    folder: Path, main: Play, *, spares: tuple[str, ...] = ("0-5",), patience_s: float = 1.0, **options: Any
) -> None:
    async def whole() -> None:
        async with observed(folder, spares=spares, patience_s=patience_s) as scene, served(scene, **options) as client:
            await main(scene, client)

    asyncio.run(whole())


async def stream(client: httpx2.AsyncClient, query: str = "", **body: Any) -> list[tuple[str, dict[str, Any]]]:
    async with client.stream("POST", f"/api/infer/stream{query}", json={**BODY, **body}) as response:
        assert response.status_code == 200, await response.aread()
        assert response.headers["content-type"].startswith("text/event-stream")
        return [event async for event in events(response)]


def named(told: list[tuple[str, dict[str, Any]]], name: str) -> list[dict[str, Any]]:
    return [data for event, data in told if event == name]


# -- infer ------------------------------------------------------------------------------------------------------------


def test_infer_answers_with_the_workers_that_did_it(folder: Path) -> None:
    async def main(scene: Observed, client: httpx2.AsyncClient) -> None:
        said = (await client.post("/api/infer", json=BODY)).json()
        assert said["prompt"] == PROMPT
        assert (said["tokens_generated"], said["finish_reason"]) == (12, "length")
        assert said["result"] == (await scene.answer(12, deterministic=True)).answer.text
        trace = said["worker_trace"]
        assert [(w["name"], w["layers"], w["phase"]) for w in trace] == [
            ("n0", "0-2", "encode"),
            ("n1", "3-5", "decode"),
        ]
        assert [w["calls"] for w in trace] == [12, 12]
        assert said["total_latency_ms"] >= said["timings"]["ttft_ms"] > 0
        assert said["reshard_events"] == []

    play(folder, main)


def test_a_stream_has_lattice9s_events(folder: Path) -> None:
    async def main(scene: Observed, client: httpx2.AsyncClient) -> None:
        told = await stream(client)
        assert [event for event, _ in told] == ["start", *["token"] * 12, "done"]
        start, done = told[0][1], told[-1][1]
        assert start["request_id"] == done["request_id"]
        assert start["prompt"] == PROMPT
        assert [(a["name"], a["layers"]) for a in start["assignments"]] == [("n0", "0-2"), ("n1", "3-5")]
        tokens = named(told, "token")
        assert [token["index"] for token in tokens] == list(range(12))
        assert "".join(token["token_text"] for token in tokens) == done["result"]
        assert {token["decode_worker"] for token in tokens} == {scene.node(1)}
        assert all(token["ms"] >= 0 for token in tokens)

    play(folder, main)


def test_an_evicted_worker_leaves_a_running_stream_and_stays_out(folder: Path) -> None:
    """L9-21 and L9-W01: the stream goes on, a reshard event says so, and the text is what it would have been."""

    async def main(scene: Observed, client: httpx2.AsyncClient) -> None:
        undisturbed = (await client.post("/api/infer", json=BODY)).json()["result"]
        told: list[tuple[str, dict[str, Any]]] = []
        async with client.stream("POST", "/api/infer/stream?diagnostics=1", json=BODY) as response:
            async for event in events(response):
                told.append(event)
                if event[0] == "token" and event[1]["index"] == 0:
                    gone = (await client.delete("/api/workers/n1")).json()
                    assert gone == {
                        "status": "evicted",
                        "worker_id": scene.node(1),
                        "name": "n1",
                        "repaired_sessions": gone["repaired_sessions"],
                        "finishing_sessions": 0,
                    }
        assert told[-1][0] == "done" and told[-1][1]["result"] == undisturbed
        if gone["repaired_sessions"]:
            (reshard,) = named(told, "reshard")
            assert reshard["dropped_worker"] == "n1"
            assert [hop["name"] for hop in reshard["remaining"]] == ["n0", "n2"]
        after = (await client.post("/api/infer", json=BODY)).json()
        assert after["result"] == undisturbed
        assert "n1" not in [hop["name"] for hop in after["worker_trace"]]
        workers = (await client.get("/api/workers")).json()
        assert {w["name"]: w["status"] for w in workers["workers"]} == {"n0": "active", "n1": "evicted", "n2": "active"}
        assert workers["scheduler"]["evicted_workers"] == 1
        back = (await client.post("/api/workers/n1/readmit")).json()
        assert back["status"] == "readmitted"
        # Another prompt: n2 has the beginning of the first one cached.
        again = (await client.post("/api/infer", json={**BODY, "prompt": "Something else"})).json()
        assert [hop["name"] for hop in again["worker_trace"]] == ["n0", "n1"]

    play(folder, main)


def evict_at(scene: Observed, index: int, at_token: int) -> None:
    """Evict a node just before the `at_token`-th token is told: no race with the stream."""

    class Operator:
        def started(self, job: Job) -> None: ...
        def event(self, job: Job, event: Event) -> None: ...
        def ended(self, job: Job, outcome: Outcome) -> None: ...

        def token(self, job: Job, token: Token) -> None:
            if job.completion_tokens == at_token:
                scene.swarm.origin.routes.evict(scene.node(index))

    scene.gateway.observers.append(Operator())


def test_diagnostic_frames_come_in_the_same_stream(folder: Path) -> None:
    """HN-40 and HN-R01 §4.1."""

    async def main(scene: Observed, client: httpx2.AsyncClient) -> None:
        evict_at(scene, 1, at_token=4)
        told = await stream(client, "?diagnostics=1")
        names = [event for event, _ in told]
        assert names[:4] == ["start", "shard_status", "token_delta", "token"]
        at = names.index("shard_status", 2)
        assert names[at : at + 3] == ["shard_status", "shard_failover", "reshard"]
        online, degraded = named(told, "shard_status")
        assert [s["shard_id"] for s in online["shards"]] == ["tiny:0-2", "tiny:3-5"]
        assert [s["host"] for s in online["shards"]] == [f"ed25519:{scene.node(i)}" for i in (0, 1)]
        assert (online["status"], {s["status"] for s in online["shards"]}) == ("online", {"online"})
        assert (degraded["status"], [s["status"] for s in degraded["shards"]]) == ("degraded", ["online", "degraded"])
        assert named(told, "shard_failover") == [{"failed_shard": "tiny:3-5", "replacement": "tiny:3-5@n2"}]
        (reshard,) = named(told, "reshard")
        assert (reshard["dropped_worker"], reshard["kind"]) == ("n1", "shard_failover")
        deltas, tokens = named(told, "token_delta"), named(told, "token")
        assert [d["text"] for d in deltas] == [t["token_text"] for t in tokens]
        assert tokens[0]["decode_worker"] == scene.node(1) and tokens[-1]["decode_worker"] == scene.node(2)
        last = deltas[-1]["hops"][1]
        assert (last["shard_id"], last["host"]) == ("tiny:3-5", f"ed25519:{scene.node(2)}")
        for delta in deltas[1:]:
            assert min(hop["compute_ms"] for hop in delta["hops"]) > 0
            assert min(delta[part] for part in ("queue_ms", "compute_ms", "wire_ms", "wait_ms")) >= 0
        trace = told[-1][1]["worker_trace"]
        assert trace[0]["calls"] == 12 and 0 < trace[1]["calls"] < 12

    play(folder, main)


def test_the_last_holder_that_is_evicted_serves_running_streams_to_their_end(folder: Path) -> None:
    """L9-21 without a spare: by force, the stream ends where it is; a new request finds no route. No repair, the same text."""

    async def main(scene: Observed, client: httpx2.AsyncClient) -> None:
        undisturbed = (await client.post("/api/infer", json=BODY)).json()["result"]
        told: list[tuple[str, dict[str, Any]]] = []
        async with client.stream("POST", "/api/infer/stream", json=BODY) as response:
            async for event in events(response):
                told.append(event)
                if event[0] == "token" and event[1]["index"] == 0:
                    assert (await client.delete("/api/workers/n1")).status_code == 409
                    gone = (await client.delete("/api/workers/n1?force=true")).json()
                    left = scene.gateway.num_running
                    assert (gone["repaired_sessions"], gone["finishing_sessions"]) == (0, left)
        assert told[-1][0] == "done" and told[-1][1]["result"] == undisturbed and not named(told, "reshard")
        assert (await client.post("/api/infer", json=BODY)).status_code == 503

    play(folder, main, spares=())


def test_it_leaves_them_as_soon_as_another_node_holds_its_layers(folder: Path) -> None:
    async def main(scene: Observed, client: httpx2.AsyncClient) -> None:
        routes = scene.swarm.origin.routes
        routes.evict(scene.node(2))  # the spare: n1 is the last holder of its layers
        at: list[int] = []

        class Operator:
            def started(self, job: Job) -> None: ...
            def ended(self, job: Job, outcome: Outcome) -> None: ...

            def event(self, job: Job, event: Event) -> None:
                at.append(job.completion_tokens)

            def token(self, job: Job, token: Token) -> None:
                if job.completion_tokens == 4:
                    assert routes.evict(scene.node(1)) == (0, 1)
                if job.completion_tokens == 8:
                    routes.readmit(scene.node(2))

        scene.gateway.observers.append(Operator())
        told = await stream(client)
        (reshard,) = named(told, "reshard")
        assert reshard["dropped_worker"] == "n1" and len(named(told, "token")) == 12 and min(at) >= 8

    play(folder, main)


def die_at(scene: Observed, index: int, at_token: int) -> None:
    """Kill a node just before the `at_token`-th token is told."""

    class Death:
        def started(self, job: Job) -> None: ...
        def event(self, job: Job, event: Event) -> None: ...
        def ended(self, job: Job, outcome: Outcome) -> None: ...

        def token(self, job: Job, token: Token) -> None:
            if job.completion_tokens == at_token:
                scene.faults.die(scene.swarm.hops[index])

    scene.gateway.observers.append(Death())


def test_a_loss_is_told_while_the_request_still_waits_for_its_repair(folder: Path) -> None:
    """No other node holds the layers: the stream says so, and what is done about it then saves the request."""

    async def main(scene: Observed, client: httpx2.AsyncClient) -> None:
        scene.swarm.origin.routes.evict(scene.node(2))
        die_at(scene, 1, at_token=4)
        told: list[tuple[str, dict[str, Any]]] = []
        async with client.stream("POST", "/api/infer/stream?diagnostics=1", json=BODY) as response:
            async for event in events(response):
                told.append(event)
                if event[1].get("status") == "degraded":
                    assert len(named(told, "token")) == 4
                    scene.swarm.origin.routes.readmit(scene.node(2))
        assert [event for event, _ in told[-1:]] == ["done"]
        assert len(named(told, "token")) == 12 and len(named(told, "reshard")) == 1

    play(folder, main, patience_s=10.0)


def test_without_diagnostics_only_lattice9s_events_come(folder: Path) -> None:
    async def main(scene: Observed, client: httpx2.AsyncClient) -> None:
        evict_at(scene, 1, at_token=4)
        told = await stream(client)
        assert {event for event, _ in told} == {"start", "token", "reshard", "done"}

    play(folder, main)


def test_a_stream_that_cannot_go_on_says_why(folder: Path) -> None:
    async def main(scene: Observed, client: httpx2.AsyncClient) -> None:
        die_at(scene, 1, at_token=4)
        told = await stream(client, "?diagnostics=1")
        assert [event for event, _ in told][-2:] == ["pipeline_aborted", "error"]
        error = told[-1][1]
        assert error["code"] == "shard_unavailable" and "3-5" in error["detail"]
        (job,) = (await client.get("/api/jobs")).json()["jobs"]
        assert (job["status"], job["error"]) == ("failed", "shard_unavailable")

    play(folder, main, spares=())


def test_a_stream_that_begins_alone_says_why(folder: Path) -> None:
    """F44: no node holds some layers, and the machine has a fallback: that is a change of the route without a repair."""

    async def main() -> None:
        async with observed(folder, has_fallback=True) as scene, served(scene) as client:
            undisturbed = (await client.post("/api/infer", json=BODY)).json()["result"]
            for index in range(3):
                scene.swarm.origin.routes.evict(scene.node(index))
            told = await stream(client, "?diagnostics=1")
            (reshard,) = named(told, "reshard")
            assert told[-1][0] == "done" and told[-1][1]["result"] == undisturbed
            assert (reshard["dropped_worker"], reshard["repair_ms"]) == ("", None)
            assert "this machine goes on alone" in reshard["reason"]
            assert [hop["name"] for hop in reshard["remaining"]] == ["fallback"]

    asyncio.run(main())


def test_what_cannot_be_served_is_refused_before_the_first_byte(folder: Path) -> None:
    async def main(scene: Observed, client: httpx2.AsyncClient) -> None:
        assert (await client.delete("/api/workers/n1?force=true")).status_code == 200
        for path in ("/api/infer", "/api/infer/stream"):
            refused = await client.post(path, json=BODY)
            assert refused.status_code == 503
            assert refused.json()["error"]["code"] == "shard_unavailable"

    play(folder, main, spares=())


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"no_repeat_ngram_size": 3}, "no_repeat_ngram_size"),
    ({"temperature": -1.0}, "temperature is -1.0"),
    ({"max_tokens": 0}, "max_tokens is 0"),
    ({"max_tokens": 10**30}, "max_tokens"),
    ({"max_tokens": "12"}, "max_tokens"),
    ({"seed": -1}, "seed is -1"),
    ({"model": "other"}, "not served here"),
    ({"messages": [{"role": "user", "content": "hi"}]}, "either prompt"),
    ({"prompt": None}, "either prompt"),
    ({"messages": [], "prompt": None}, "messages"),
    ({"path": "mesh"}, "path"),
    ({"draft": "model:tales"}, 'draft is "model:tales"'),
    ({"stop": [""]}, "stop"),
]
NO_REQUESTS = [
    b"",
    b"{",
    b"[]",
    b"\xff\xfe",
    b'{"temperature": NaN, "prompt": "a"}',
    b"[" * 100_000,
    b'{"prompt": "\\ud800"}',
    b'{"\\ud800": 1}',
]


def test_a_request_says_what_guesses_its_tokens(folder: Path) -> None:
    async def main(scene: Observed, client: httpx2.AsyncClient) -> None:
        told = [await client.post("/api/infer", json={**BODY, "draft": draft}) for draft in ("off", "suffix")]
        assert told[0].json()["result"] == told[1].json()["result"]
        off, suffix = [job["drafting"]["verdict"] for job in (await client.get("/api/jobs")).json()["jobs"]][::-1]
        assert off == "off" and suffix != "off"

    play(folder, main)


def test_a_refusal_has_no_links_of_pages(folder: Path) -> None:
    async def main(_: Observed, client: httpx2.AsyncClient) -> None:
        said = (await client.post("/api/infer", json={**BODY, "codec": "fp8"})).json()["error"]["message"]
        assert said.startswith('codec is "fp8"') and "with loss" in said and "](" not in said

    play(folder, main)


def test_what_is_not_understood_is_refused(folder: Path) -> None:
    async def main(scene: Observed, client: httpx2.AsyncClient) -> None:
        for change, says in REFUSED:
            for path in ("/api/infer", "/api/infer/stream"):
                refused = await client.post(path, json={**BODY, **change})
                assert refused.status_code in (400, 404), (change, refused.text)
                assert says in refused.json()["error"]["message"], (change, refused.text)
        for body in NO_REQUESTS:
            refused = await client.post("/api/infer", content=body, headers={"content-type": "application/json"})
            assert refused.status_code == 400, (body[:40], refused.text)
        assert scene.gateway.num_running == 0 and list(scene.history.recent()) == []

    play(folder, main)


def test_the_seed_is_told_and_repeats_the_text(folder: Path) -> None:
    async def main(scene: Observed, client: httpx2.AsyncClient) -> None:
        first = (await client.post("/api/infer", json={"prompt": PROMPT, "max_tokens": 8})).json()
        again = (
            await client.post("/api/infer", json={"prompt": PROMPT, "max_tokens": 8, "seed": first["seed"]})
        ).json()
        assert again["result"] == first["result"]
        assert 0 <= first["seed"] < 1 << 53

    play(folder, main)


def test_a_client_that_leaves_frees_its_session(folder: Path) -> None:
    async def main(scene: Observed, client: httpx2.AsyncClient) -> None:
        async with client.stream("POST", "/api/infer/stream", json={**BODY, "max_tokens": 400}) as response:
            async for event, _ in events(response):
                if event == "token":
                    break
        await until(lambda: not scene.swarm.origin.node.sessions and not scene.gateway.jobs)
        (job,) = (await client.get("/api/jobs")).json()["jobs"]
        assert job["status"] == "cancelled"

    play(folder, main)


# -- workers ----------------------------------------------------------------------------------------------------------


def test_workers_tell_layers_and_links(folder: Path) -> None:
    async def main(scene: Observed, client: httpx2.AsyncClient) -> None:
        await scene.answer(4)
        told = (await client.get("/api/workers")).json()
        assert sorted(w["name"] for w in told["workers"]) == ["n0", "n1", "n2"]
        first = next(w for w in told["workers"] if w["name"] == "n0")
        (span,) = first["spans"]
        assert (span["layers"], span["is_first"], span["is_last"], span["total_layers"]) == ("0-2", True, False, 6)
        assert first["bytes_sent"] > 0 and first["sessions"] == 0 and first["worker_id"] == scene.node(0)
        assert [hop["name"] for hop in told["scheduler"]["routes"]["tiny"]] == ["n0", "n1"]
        assert (await client.get(f"/api/workers/{scene.node(0)}")).json()["name"] == "n0"
        assert (await client.get(f"/api/workers/{scene.node(0)[:8]}")).json()["name"] == "n0"
        assert (await client.get("/api/workers/unknown")).status_code == 404

    play(folder, main)


def test_the_last_holder_of_layers_is_evicted_only_by_force(folder: Path) -> None:
    async def main(scene: Observed, client: httpx2.AsyncClient) -> None:
        await scene.answer(2)
        refused = await client.delete("/api/workers/n1")
        assert refused.status_code == 409
        assert "--force (force=true" in refused.json()["error"]["message"]
        assert (await client.get("/ready")).status_code == 200
        assert (await client.delete("/api/workers/n1?force=true")).status_code == 200
        assert (await client.get("/ready")).status_code == 503

    play(folder, main, spares=())


def test_a_reassignment_is_refused_with_the_nodes_reason(folder: Path) -> None:
    """Nodes of `serve` host what they were told to."""

    async def main(scene: Observed, client: httpx2.AsyncClient) -> None:
        await scene.answer(2)
        refused = await client.post("/api/workers/n1/reassign", json={"to": "0-2"})
        assert refused.status_code == 409
        assert "restart it with --layers 0-2" in refused.json()["error"]["message"]
        for body, status in (
            ({"to": "2-0"}, 400),
            ({"to": "0-2", "model": "other"}, 404),
            ({"to": "0-2", "force": 1}, 400),
        ):
            assert (await client.post("/api/workers/n1/reassign", json=body)).status_code == status
        assert (await client.post("/api/workers/unknown/reassign", json={"to": "0-2"})).status_code == 404

    play(folder, main)


def test_a_reassignment_is_asked_of_the_node(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """IN-R04's answer; 202 until the node serves the layers."""
    orders: list[tuple[NodeId, Reassign]] = []

    def obey(asker: NodeId, order: Reassign) -> str:
        orders.append((asker, order))
        return "as you wish"

    async def main(scene: Observed, client: httpx2.AsyncClient) -> None:
        await scene.answer(2)
        scene.swarm.hops[1].orders.decide_by(obey)
        told = await client.post("/api/workers/n1/reassign", json={"to": "3-5"})
        body = {"node_info": {"id": scene.node(1)}, "new_stage": "3-5", "status": "reassigned", "said": "as you wish"}
        assert (told.status_code, told.json()) == (200, body)
        monkeypatch.setattr(workers, "REASSIGN_WAIT_S", 0.1)
        scene.swarm.hops[1].orders._pauses.clear()  # the next one may come at once
        told = await client.post("/api/workers/n1/reassign", json={"to": "0-2", "force": True})
        assert (told.status_code, told.json()["status"]) == (202, "accepted")
        model = scene.swarm.origin.model
        assert [(o.model, o.precision, o.span, o.is_forced) for _, o in orders] == [
            (model.id, model.precision, Span(3, 6), False),
            (model.id, model.precision, Span(0, 3), True),
        ]
        assert {asker for asker, _ in orders} == {scene.swarm.origin.node.transport.node}

    play(folder, main)


def test_a_node_is_registered_by_its_address(folder: Path) -> None:
    async def main(scene: Observed, client: httpx2.AsyncClient) -> None:
        spare = scene.swarm.origin.routes.addrs.pop()
        await scene.answer(2)
        assert (await client.post("/api/workers/heartbeat", json={"worker_id": scene.node(2)})).status_code == 404
        said = (await client.post("/api/workers/register", json={"address": str(spare)})).json()
        assert (said["status"], said["worker"]["name"]) == ("registered", "n2")
        wanted = {"layers": "0-5", "is_first": True, "is_last": True, "total_layers": 6}
        assert said["assignment"].items() >= wanted.items() and said["said"] == ""
        told = await client.post("/api/workers/register", json={"address": str(spare), "layers": "0-2"})
        assert "serves what it was told to" in told.json()["said"] and told.json()["assignment"] == said["assignment"]
        known = (await client.post("/api/workers/heartbeat", json={"worker_id": scene.node(2)})).json()
        assert known["status"] == "active"
        await client.post("/api/workers/register", json={"address": str(spare)})
        assert len(scene.swarm.origin.routes.addrs) == 3
        sent = {"url": f"http://{spare}/", "worker_id": "n2", "total_layers": 6, "model_name": "tiny"}
        again = await client.post("/api/workers/register", json=sent)  # L9-R03's names
        assert again.json()["assignment"] == said["assignment"]
        wrong: list[tuple[str, Any, int]] = [
            ("worker_id", "n9", 409),
            ("total_layers", 7, 409),
            ("model_name", "x", 404),
        ]
        for name, value, status in [*wrong, ("cpu_cores", 2, 400), ("address", "a:1", 400)]:
            told = await client.post("/api/workers/register", json={**sent, name: value})
            assert told.status_code == status, name
        assert (await client.post("/api/workers/register", json={"address": "mem:9"})).status_code == 503
        assert (await client.post("/api/workers/register", json={"address": "nowhere"})).status_code == 400

    play(folder, main)


# -- jobs and keys ----------------------------------------------------------------------------------------------------


def test_jobs_are_listed_newest_first(folder: Path) -> None:
    async def main(scene: Observed, client: httpx2.AsyncClient) -> None:
        done = [(await client.post("/api/infer", json=BODY)).json()["request_id"] for _ in range(3)]
        told = (await client.get("/api/jobs")).json()["jobs"]
        assert [job["id"] for job in told] == done[::-1]
        assert len((await client.get("/api/jobs?limit=2")).json()["jobs"]) == 2
        one = (await client.get(f"/api/jobs/{done[0]}")).json()
        assert one["id"] == done[0] and one["api"] == "native" and one["completion_tokens"] == 12
        assert (await client.get("/api/jobs/nothing")).status_code == 404
        assert "xylophone" not in json.dumps(told)

    play(folder, main)


def test_a_running_job_is_listed(folder: Path) -> None:
    async def main(scene: Observed, client: httpx2.AsyncClient) -> None:
        async with scene.gateway.run(scene.ask()) as run:
            tokens = run.tokens()
            await anext(tokens)
            (job,) = (await client.get("/api/jobs")).json()["jobs"]
            assert (job["id"], job["status"], job["session"]) == (run.job.id, "running", run.job.session)
            await tokens.aclose()

    play(folder, main)


def test_only_admins_change_the_swarm_and_see_others_jobs(folder: Path, tmp_path: Path) -> None:
    keys = KeyRing(tmp_path / "keys.json")
    ann, root = keys.add("ann", 0.0), keys.add("root", 0.0, is_admin=True)

    def key(text: str) -> dict[str, str]:
        return {"authorization": f"Bearer {text}"}

    async def main(scene: Observed, client: httpx2.AsyncClient) -> None:
        assert (await client.get("/api/workers")).status_code == 401
        own = (await client.post("/api/infer", json=BODY, headers=key(ann))).json()["request_id"]
        other = (await client.post("/api/infer", json=BODY, headers=key(root))).json()["request_id"]
        for method, path in (("DELETE", "n1"), ("POST", "n1/readmit"), ("POST", "n1/reassign"), ("POST", "register")):
            body = {"to": "0-2"} if path.endswith("reassign") else {"address": "mem:1"}
            refused = await client.request(method, f"/api/workers/{path}", json=body, headers=key(ann))
            assert refused.status_code == 403, path
        jobs = (await client.get("/api/jobs", headers=key(ann))).json()["jobs"]
        assert [job["id"] for job in jobs] == [own]
        assert (await client.get(f"/api/jobs/{other}", headers=key(ann))).status_code == 404
        jobs = (await client.get("/api/jobs", headers=key(root))).json()["jobs"]
        assert [job["id"] for job in jobs] == [other, own]
        assert (await client.delete("/api/workers/n1", headers=key(root))).status_code == 200

    play(folder, main, keys=keys)
