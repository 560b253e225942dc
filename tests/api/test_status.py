"""manyhands.api.status and manyhands.api.log: alive, ready, counted; and lines that tell ids but never a prompt."""

import asyncio
import json
import logging
from collections.abc import Collection
from io import StringIO
from pathlib import Path

import pytest

from manyhands.api.log import JsonLines, log_json
from manyhands.core import NodeId
from manyhands.route.offer import Offer
from tests.api.observed import PROMPT, observed, served


def test_alive_is_not_ready(folder: Path) -> None:
    """SH-R10: /health answers as long as the process does, /ready only while a route exists."""

    async def main() -> None:
        async with observed(folder) as scene, served(scene) as client:
            for path in ("/health", "/api/health"):
                answer = await client.get(path)
                assert (answer.status_code, answer.json()["status"]) == (200, "ok")
            ready = await client.get("/ready")  # the first question dials the nodes
            assert (ready.status_code, ready.json()) == (200, {"status": "ready", "models": {"tiny": True}})
            for index in range(3):
                scene.swarm.origin.routes.evict(scene.node(index))
            gone = await client.get("/ready")
            assert (gone.status_code, gone.json()) == (503, {"status": "not ready", "models": {"tiny": False}})
            assert gone.headers["retry-after"]
            assert (await client.get("/health")).status_code == 200
            scene.swarm.origin.routes.readmit(scene.node(2))
            assert (await client.get("/ready")).status_code == 200

    asyncio.run(main())


def test_nodes_that_die_end_readiness(folder: Path) -> None:
    async def main() -> None:
        async with observed(folder, spares=()) as scene, served(scene) as client:
            assert (await client.get("/ready")).status_code == 200
            scene.faults.die(scene.swarm.hops[1])
            assert (await client.get("/ready")).status_code == 503

    asyncio.run(main())


def test_a_gateway_without_models_is_not_ready(folder: Path) -> None:
    async def main() -> None:
        async with observed(folder) as scene, served(scene) as client:
            scene.gateway.origins.clear()
            assert (await client.get("/ready")).status_code == 503

    asyncio.run(main())


def test_a_model_that_is_loaded_meanwhile_fails_no_question(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with observed(folder) as scene, served(scene) as client:
            origin = scene.swarm.origin

            async def offers(excluded: Collection[NodeId]) -> list[Offer]:
                scene.gateway.origins[f"another{len(scene.gateway.origins)}"] = origin
                return await asked(excluded)

            asked = origin.routes.offers
            monkeypatch.setattr(origin.routes, "offers", offers)
            assert (await client.get("/ready")).status_code == 200
            assert (await client.get("/api/workers")).status_code == 200
            assert len(scene.gateway.origins) > 2

    asyncio.run(main())


def test_metrics_are_exposed(folder: Path) -> None:
    async def main() -> None:
        async with observed(folder) as scene, served(scene) as client:
            answer = await client.get("/metrics")
            assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
            assert "# TYPE manyhands_requests_total counter" in answer.text

    asyncio.run(main())


def line(message: str, *arguments: object) -> dict[str, object]:
    record = logging.LogRecord("manyhands.node", logging.WARNING, "node.py", 1, message, arguments, None)
    parsed: dict[str, object] = json.loads(JsonLines().format(record))
    return parsed


def test_ids_of_a_message_become_fields() -> None:
    told = line("session=%s hop=%d fault%s: %s", "1f2e", 2, " of hop 3", "x=1")
    assert (told["session"], told["hop"], told["level"], told["logger"]) == ("1f2e", "2", "warning", "manyhands.node")
    assert told["message"] == "fault of hop 3: x=1"
    assert line("request=%s key=%s started", "1f2e", None)["key"] is None, "and no key of the name None"


def test_a_message_is_one_line_and_keeps_its_fields() -> None:
    """What a peer says must not forge a line or a field."""
    told = line("%s", 'time=0 level=debug nonsense\n{"level": "info"}')
    assert told["level"] == "warning" and told["time"] != "0"
    assert "\n" not in JsonLines().format(logging.LogRecord("a", 20, "", 1, "a\nb", (), None))


def test_an_exception_is_told_with_its_trace() -> None:
    try:
        raise ValueError("broken")
    except ValueError as error:
        record = logging.LogRecord("a", 40, "", 1, "failed", (), (ValueError, error, error.__traceback__))
    assert "ValueError: broken" in json.loads(JsonLines().format(record))["error"]


def test_lines_carry_the_request_they_belong_to(folder: Path) -> None:
    stream = StringIO()
    ours = logging.getLogger("manyhands")
    before = (list(ours.handlers), ours.level, ours.propagate)
    try:
        log_json(stream=stream)

        async def main() -> None:
            async with observed(folder) as scene:
                await asyncio.gather(scene.answer(3), scene.evicting(1, at_token=2, max_tokens=4))
                logging.getLogger("manyhands.other").info("another's")

        asyncio.run(main())
    finally:
        ours.handlers[:], ours.propagate = before[0], before[2]
        ours.setLevel(before[1])
    lines = [json.loads(text) for text in stream.getvalue().splitlines()]
    ended = [one for one in lines if one["message"] == "ended"]
    assert len({one["request"] for one in ended}) == 2
    repaired = [one for one in lines if one["logger"] == "manyhands.origin.repair"]
    assert repaired and all(one["request"] in {e["request"] for e in ended} for one in repaired)
    assert {one["session"][:8] for one in repaired} <= {one["session"][:8] for one in ended}
    assert "request" not in next(one for one in lines if one["message"] == "another's")


def test_no_prompt_is_ever_logged(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """HN-34: at any level, in answers, repairs, failures and refusals."""
    texts: list[str] = []

    async def main() -> None:
        async with observed(folder) as scene, served(scene) as client:
            body = {"prompt": PROMPT, "max_tokens": 6}
            texts.append((await client.post("/api/infer", json=body)).json()["result"])
            await scene.evicting(1, at_token=2)
            await client.post("/api/infer", json={**body, "temperature": -1.0})
            await client.post("/api/infer", json={**body, PROMPT: 1})
            for index in range(3):
                scene.swarm.origin.routes.evict(scene.node(index))
            await client.post("/api/infer", json=body)

    with caplog.at_level(logging.DEBUG):
        asyncio.run(main())
    assert "outcome=failed" in caplog.text and "outcome=done" in caplog.text
    assert "xylophone" not in caplog.text and texts[0] not in caplog.text
