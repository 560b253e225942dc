"""manyhands.api.trace: one span a request, its hops and repairs below it, and nothing private in them."""

import asyncio
import json
from pathlib import Path

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from manyhands.api.trace import Tracing, open_tracing
from manyhands.errors import BadRequest, ShardUnavailable
from tests.api.observed import PROMPT, Observed, observed, served


class Seen:
    """Spans as they end."""

    def __init__(self, scene: Observed) -> None:
        self._exporter = InMemorySpanExporter()
        provider = TracerProvider(shutdown_on_exit=False)
        provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        self.tracing = Tracing(provider)
        scene.gateway.observers.append(self.tracing)

    def named(self, name: str) -> list[ReadableSpan]:
        return [span for span in self._exporter.get_finished_spans() if span.name.startswith(name)]

    def text(self) -> str:
        return json.dumps([json.loads(span.to_json()) for span in self._exporter.get_finished_spans()])


def attributes(span: ReadableSpan) -> dict[str, object]:
    return {key.removeprefix("manyhands."): value for key, value in (span.attributes or {}).items()}


def test_a_request_is_a_span_with_its_hops_below(folder: Path) -> None:
    async def main() -> None:
        async with observed(folder) as scene:
            seen = Seen(scene)
            run = await scene.answer(8)
            (request,) = seen.named("request")
            assert request.context is not None
            facts = attributes(request)
            assert (facts["request"], facts["session"]) == (run.job.id, run.job.session)
            assert (facts["outcome"], facts["finish_reason"], facts["completion_tokens"]) == ("done", "length", 8)
            assert [event.name for event in request.events] == ["first token"]
            hops = seen.named("hop")
            assert sorted(attributes(hop)["node_name"] for hop in hops) == ["n0", "n1"]  # type: ignore[type-var]
            assert {hop.parent.span_id for hop in hops if hop.parent} == {request.context.span_id}
            assert PROMPT not in seen.text() and "xylophone" not in seen.text()

    asyncio.run(main())


@pytest.mark.parametrize(
    "header, is_followed", [("00-" + "ab" * 16 + "-" + "cd" * 8 + "-01", True), ("00-nonsense", False)]
)
def test_a_request_goes_on_with_its_callers_trace(header: str, is_followed: bool, folder: Path) -> None:
    """W3C Trace Context; the next request on the same connection has a trace of its own."""

    async def main() -> None:
        async with observed(folder) as scene, served(scene) as client:
            seen = Seen(scene)
            body = {"prompt": PROMPT, "max_tokens": 2}
            for headers in ({"traceparent": header}, {}):
                assert (await client.post("/api/infer", json=body, headers=headers)).status_code == 200
            first, second = seen.named("request")
            assert first.context is not None and second.parent is None
            assert (first.parent is not None) == is_followed
            if first.parent is not None:
                assert (first.context.trace_id, first.parent.span_id) == (int("ab" * 16, 16), int("cd" * 8, 16))

    asyncio.run(main())


def test_a_repair_has_its_span_and_changes_the_hops(folder: Path) -> None:
    async def main() -> None:
        async with observed(folder) as scene:
            seen = Seen(scene)
            job = await scene.evicting(1, at_token=4)
            (repair,) = seen.named("repair")
            assert attributes(repair)["lost"] == "n1" and attributes(repair)["at_token"] == job.repairs[0].at_token
            assert repair.end_time is not None and repair.start_time is not None
            assert repair.end_time - repair.start_time == int(job.repairs[0].total_s * 1e9)
            ends = {attributes(hop)["node_name"]: hop.end_time for hop in seen.named("hop")}
            assert set(ends) == {"n0", "n1", "n2"}
            assert ends["n1"] is not None and ends["n0"] is not None and ends["n1"] < ends["n0"]
            (request,) = seen.named("request")
            assert [event.name for event in request.events] == ["first token", "shard_status", "shard_failover"]

    asyncio.run(main())


def test_a_stream_that_goes_on_has_its_hops_from_its_first_token_on(folder: Path) -> None:
    """They began and ended with the request: what was drawn before is told of by no token."""

    async def main() -> None:
        async with observed(folder) as scene, served(scene) as client:
            seen = Seen(scene)
            body = {"prompt": PROMPT, "max_tokens": 12, "seed": 1}
            told = await client.post("/api/infer/stream", json=body)
            ids = [line.removeprefix("id: ") for line in told.text.splitlines() if line.startswith("id: ")]
            again = await client.post("/api/infer/stream", json=body, headers={"last-event-id": ids[5]})
            assert again.status_code == 200 and '"redrawn_tokens":5' in again.text
            _, request = seen.named("request")
            assert [event.name for event in request.events] == ["first token"] and len(seen.named("hop")) == 4

    asyncio.run(main())


def test_a_failure_is_an_error(folder: Path) -> None:
    async def main() -> None:
        async with observed(folder) as scene:
            seen = Seen(scene)
            for index in range(3):
                scene.swarm.origin.routes.evict(scene.node(index))
            with pytest.raises(ShardUnavailable):
                await scene.answer()
            (request,) = seen.named("request")
            assert request.status.status_code == StatusCode.ERROR
            assert request.status.description == "shard_unavailable"

    asyncio.run(main())


def test_requests_at_once_have_their_own_hops(folder: Path) -> None:
    async def main() -> None:
        async with observed(folder) as scene:
            seen = Seen(scene)
            await asyncio.gather(*(scene.answer(6) for _ in range(3)))
            assert len(seen.named("request")) == 3 and len(seen.named("hop")) == 6

    asyncio.run(main())


def test_an_exporter_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        pytest.raises(BadRequest, match=r"no trace exporter 'smoke' is installed; there is .*console"),
        open_tracing("smoke"),
    ):
        pass
    monkeypatch.setattr("manyhands.api.trace.entry_points", lambda group, name="": [])
    with (
        pytest.raises(BadRequest, match=r"'otlp' is installed; .*: .* -m pip install opentelemetry-exporter-otlp$"),
        open_tracing("otlp"),
    ):
        pass


def test_spans_reach_the_exporter(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is found by its standard entry point, and what is left is sent on leaving."""
    exporter = InMemorySpanExporter()

    class Point:
        def load(self) -> type[InMemorySpanExporter]:
            return lambda: exporter  # type: ignore[return-value]

    monkeypatch.setattr("manyhands.api.trace.entry_points", lambda group, name: [Point()])

    async def main() -> None:
        async with observed(folder) as scene:
            with open_tracing("otlp") as tracing:
                scene.gateway.observers.append(tracing)
                await scene.answer(2)
            assert sorted(span.name for span in exporter.get_finished_spans()) == ["hop 0", "hop 1", "request"]

    asyncio.run(main())
