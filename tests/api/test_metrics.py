"""manyhands.api.metrics: what is counted, that names and labels are bounded, that nothing private is told."""

import asyncio
import json
import re
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from manyhands.api.auth import ApiKey
from manyhands.api.callers import CallerCounts, CallerNames
from manyhands.api.gauges import OTHER, NodeLabels
from manyhands.api.jobs import job_object
from manyhands.api.limits import Quota
from manyhands.api.metrics import Metrics
from manyhands.api.run import Caller, Job
from manyhands.core import NodeId
from manyhands.errors import RateLimited
from manyhands.origin.adoption import Adoption, HopMark
from manyhands.testing.faulty_device import Poison
from manyhands.testing.swarm import node_id
from manyhands.worker.callers import REST, Callers
from tests.api.observed import MODEL, PROMPT, Observed, observed

ROOT = Path(__file__).parent.parent.parent
Values = dict[tuple[str, frozenset[tuple[str, str]]], float]


def values(metrics: Metrics) -> Values:
    families = text_string_to_metric_families(b"".join(metrics.exposition()).decode())
    return {(s.name, frozenset(s.labels.items())): s.value for family in families for s in family.samples}


def value(metrics: Metrics, name: str, **labels: str) -> float:
    """The one sample of `name` with these labels (and maybe others); 0 if there is none."""
    wanted = set(labels.items())
    found = [v for (n, have), v in values(metrics).items() if n == f"manyhands_{name}" and wanted <= have]
    assert len(found) <= 1, found
    return found[0] if found else 0.0


def play(folder: Path, main: Callable[[Observed], Awaitable[None]], **options: bool) -> None:
    async def whole() -> None:
        async with observed(folder, **options) as scene:  # type: ignore[arg-type]
            await main(scene)

    asyncio.run(whole())


def test_a_request_is_counted(folder: Path) -> None:
    async def main(scene: Observed) -> None:
        run = await scene.answer(8)
        told = scene.metrics
        assert value(told, "requests_total", model=MODEL, api="native", outcome="length") == 1
        assert value(told, "tokens_total", kind="completion") == 8 == run.job.completion_tokens
        assert value(told, "tokens_total", kind="prompt") == run.job.prompt_tokens
        for name in ("queue", "route_open", "time_to_first_token", "request"):
            assert value(told, f"{name}_seconds_count") == 1, name
        assert value(told, "token_seconds_count") == 7
        assert value(told, "decode_tokens_per_second_count") == 1
        for index in (0, 1):
            label = scene.node(index)[:12]
            assert value(told, "node_requests_total", node=label) == 1
            assert value(told, "node_tokens_total", node=label) == 8
            assert value(told, "node_layers", node=label, model=MODEL) == 3
        assert value(told, "node_requests_total", node=scene.node(2)[:12]) == 0

    play(folder, main)


def test_gauges_follow_what_runs_and_who_is_there(folder: Path) -> None:
    async def main(scene: Observed) -> None:
        told = scene.metrics
        async with scene.gateway.run(scene.ask()) as run:
            tokens = run.tokens()
            await anext(tokens)
            assert value(told, "requests_running") == 1
            assert value(told, "node_sessions", node=scene.node(0)[:12]) == 1
            assert value(told, "edge_bytes_total", node=scene.node(0)[:12], lane="data", direction="sent") > 0
            await tokens.aclose()
        assert value(told, "requests_running") == 0
        assert value(told, "node_sessions", node=scene.node(0)[:12]) == 0
        assert (value(told, "nodes"), value(told, "nodes_active"), value(told, "nodes_evicted")) == (3, 3, 0)
        scene.swarm.origin.routes.evict(scene.node(2))
        assert (value(told, "nodes"), value(told, "nodes_active"), value(told, "nodes_evicted")) == (3, 2, 1)
        assert value(told, "requests_total", outcome="cancelled") == 1

    play(folder, main)


def test_what_was_not_computed_again_and_streams_that_went_on_are_counted(folder: Path) -> None:
    """A second request of a tenant begins with the first one's cache; an attempt adopts, or has nothing to adopt."""

    async def main(scene: Observed) -> None:
        told, ask = scene.metrics, replace(scene.ask(), caller=Caller(tenant="me"))

        async def answer(adoption: Adoption | None = None) -> Job:
            resumed = adoption is not None and adoption.tokens > 0
            async with scene.gateway.run(replace(ask, adoption=adoption, is_resumed=resumed)) as run:
                async for _ in run.tokens():
                    pass
            return run.job

        assert (await answer(Adoption(b"h" * 16))).cached_tokens == value(told, "cached_tokens_total") == 0
        hops = (await answer(Adoption(b"h" * 16))).hops
        cached = value(told, "cached_tokens_total", model=MODEL)
        assert cached == len(ask.prompt) - 1 and value(told, "resumed_streams_total", by="adoption") == 0
        marks = tuple([HopMark(hop.node[:12], hop.info.span.start, hop.info.span.end) for hop in hops])
        assert (await answer(Adoption(b"h" * 16, marks, 4))).resumed == (4, "adoption")
        assert value(told, "resumed_streams_total", model=MODEL, by="adoption") == 1
        assert value(told, "cached_tokens_total") == cached + len(ask.prompt)
        assert value(told, "tokens_total", kind="completion") == 8 + 8 + 4
        assert (await answer(Adoption(b"x" * 16, marks, 4))).resumed == (4, "recomputing")
        assert value(told, "resumed_streams_total", model=MODEL, by="recomputing") == 1

    play(folder, main)


def test_a_repair_is_counted_and_the_new_node_too(folder: Path) -> None:
    async def main(scene: Observed) -> None:
        job = await scene.evicting(1, at_token=4)
        told = scene.metrics
        assert job.outcome == "done"
        assert value(told, "failovers_total", model=MODEL) == 1
        assert value(told, "repair_seconds_count") == 1
        assert value(told, "route_events_total", kind="shard_status") == 1
        assert value(told, "route_events_total", kind="shard_failover") == 1
        assert value(told, "node_requests_total", node=scene.node(2)[:12]) == 1
        assert value(told, "node_tokens_total", node=scene.node(1)[:12]) < 12
        assert value(told, "fallback_to_local_total", model=MODEL) == 0

    play(folder, main)


@pytest.mark.parametrize("how", ["nan", "zero", "scale"])
def test_a_hop_that_sends_wrong_rows_is_counted(folder: Path, how: Poison) -> None:
    """HN-38: a hop that sends NaN, or norms out of bound."""

    async def main(scene: Observed) -> None:
        victim = scene.swarm.hops[0]
        scene.faults.at("decode", victim, lambda: scene.faults.poison(victim, how), skip=2)
        run = await scene.answer(10)
        assert run.job.outcome == "done"
        assert value(scene.metrics, "shard_corruption_detected_total", model=MODEL) == 1

    play(folder, main)


def test_going_on_alone_is_counted_once(folder: Path) -> None:
    async def main(scene: Observed) -> None:
        async with scene.gateway.run(scene.ask(12)) as run:
            async for _ in run.tokens():
                if run.job.completion_tokens == 3:
                    for index in range(3):
                        scene.swarm.origin.routes.evict(scene.node(index))
        assert run.job.completion_tokens == 12
        assert value(scene.metrics, "fallback_to_local_total", model=MODEL) == 1

    play(folder, main, has_fallback=True)


def test_failures_and_refusals_have_their_code(folder: Path) -> None:
    async def main(scene: Observed) -> None:
        for index in range(3):
            scene.swarm.origin.routes.evict(scene.node(index))
        with pytest.raises(Exception, match="no node that is not evicted holds"):
            await scene.answer()
        assert value(scene.metrics, "requests_total", outcome="shard_unavailable") == 1

    play(folder, main)


def test_nothing_private_is_exposed(folder: Path) -> None:
    async def main(scene: Observed) -> None:
        run = await scene.answer(8)
        text = b"".join(scene.metrics.exposition()).decode()
        for secret in (PROMPT, *PROMPT.split()[:1], run.answer.text.strip()):
            assert not secret or secret not in text

    play(folder, main)


def test_two_gateways_count_apart(folder: Path) -> None:
    """No globals: a second Metrics neither clashes nor shares."""

    async def main(scene: Observed) -> None:
        other = Metrics(scene.gateway)
        await scene.answer(4)
        assert value(scene.metrics, "tokens_total", kind="completion") == 4
        assert value(other, "tokens_total", kind="completion") == 0

    play(folder, main)


def test_labels_of_nodes_are_bounded() -> None:
    labels = NodeLabels(max_nodes=3)
    given = [labels.label(node_id(str(i))) for i in range(10)]
    assert given[:3] == [node_id(str(i))[:12] for i in range(3)]
    assert set(given[3:]) == {OTHER}
    assert labels.label(NodeId(node_id("1"))) == given[1]


def exported(folder: Path) -> set[str]:
    """Every sample name after a request."""
    names: set[str] = set()

    async def main(scene: Observed) -> None:
        await scene.swarm.hops[0].pool.get(scene.swarm.addrs[1], "control")
        await scene.evicting(1, at_token=2, max_tokens=4)
        names.update(name for name, _ in values(scene.metrics))
        families = text_string_to_metric_families(b"".join(scene.metrics.exposition()).decode())
        names.update(f"{f.name}_total" if f.type == "counter" else f.name for f in families)

    play(folder, main)
    return names


def test_pages_and_dashboard_name_what_exists(folder: Path) -> None:
    """Every manyhands_ name in docs/metrics.md and docs/grafana.json is exported, and every exported one is documented."""
    names = exported(folder)
    page, dashboard = ((ROOT / "docs" / name).read_text("utf8") for name in ("metrics.md", "grafana.json"))
    for text in (page, dashboard):
        unknown = set(re.findall(r"\bmanyhands_[a-z_]+", text)) - names
        assert not unknown
    plain = {
        name
        for name in names
        if name.startswith("manyhands_") and not name.endswith(("_bucket", "_sum", "_count", "_created"))
    }
    assert {name for name in plain if f"`{name}`" not in page} == set()


def test_the_dashboard_can_be_imported() -> None:
    board = json.loads((ROOT / "docs" / "grafana.json").read_text("utf8"))
    panels = [p for p in board["panels"] if p["type"] != "row"]
    assert len({p["id"] for p in board["panels"]}) == len(board["panels"])
    for panel in panels:
        assert panel["targets"] and all(target["expr"] for target in panel["targets"]), panel["title"]
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        assert panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24


# -- callers ----------------------------------------------------------------------------------------------------------


def test_requests_and_tokens_are_counted_by_caller_whose_name_is_a_hash(folder: Path) -> None:
    """HN-34: two keys are two callers, told by hashes of theirs; a request that is refused is its caller's too."""

    async def main(scene: Observed) -> None:
        told, key = scene.metrics, ApiKey("ada", "5e" * 32, 0, Quota(requests_per_minute=1))
        name = scene.gateway.callers.of(key.sha256)
        ask = replace(scene.ask(4), caller=key.caller)
        async with scene.gateway.run(ask) as run:
            async for _ in run.tokens():
                pass
        with pytest.raises(RateLimited):
            scene.gateway.enter(key.caller, "native")
        await scene.answer(3)
        assert run.job.caller == name and job_object(run.job)["caller"] == name
        assert value(told, "caller_requests_total", caller=name, outcome="done") == 1
        assert value(told, "caller_requests_total", caller=name, outcome="refused") == 1
        assert value(told, "caller_tokens_total", caller=name, kind="completion") == 4
        assert value(told, "caller_tokens_total", caller=name, kind="prompt") == len(ask.prompt)
        assert value(told, "caller_tokens_total", caller="none", kind="completion") == 3
        text = b"".join(told.exposition()).decode()
        assert "ada" not in text and key.sha256[:12] not in text

    play(folder, main)


def test_callers_have_names_that_need_the_secret() -> None:
    """The same at all gateways of a swarm, another in another swarm and at each start without one."""
    one, again, other = CallerNames(b"s" * 32), CallerNames(b"s" * 32), CallerNames(b"t" * 32)
    key = "ab" * 32
    assert one.of(key) == again.of(key) != other.of(key) and len(one.of(key)) == 12
    assert CallerNames().of(key) != CallerNames().of(key)
    assert (one.of(None), one.of("local")) == ("none", "local")


def test_callers_are_bounded() -> None:
    counts = CallerCounts(max_callers=3)
    for index in range(50):
        job = Job("j", MODEL, "native", None, 0.0, prompt_tokens=2, max_tokens=1, queue_s=0.0, caller=f"c{index}")
        counts.ended(job, "done")
    requests, tokens = counts.collect()
    seen = {sample.labels["caller"]: sample.value for sample in requests.samples}
    assert seen == {"c0": 1, "c1": 1, "c2": 1, OTHER: 47}
    assert len(tokens.samples) == 8


def test_what_an_earlier_attempt_paid_is_not_counted_again() -> None:
    counts = CallerCounts()
    job = Job("j", MODEL, "native", None, 0.0, prompt_tokens=5, max_tokens=9, queue_s=0.0, paid_tokens=7)
    job.completion_tokens = 9
    counts.ended(job, "done")
    _, tokens = counts.collect()
    assert {sample.labels["kind"]: sample.value for sample in tokens.samples} == {"prompt": 0, "completion": 7}


def test_a_span_counts_for_whom_it_computes(folder: Path) -> None:
    """A hop knows the origin by its signed Open: sessions and rows, of 256 origins at most."""

    async def main(scene: Observed) -> None:
        run = await scene.answer(4)
        origin = scene.swarm.origin.node.transport.node
        for hop in scene.swarm.hops[:2]:
            (use,) = [host.engine.callers.uses[origin] for host in hop.hosts]
            assert (use.sessions, use.rows) == (1, run.job.prompt_tokens + 3)

    play(folder, main)
    callers = Callers(max_origins=2)
    for index in range(9):
        callers.opened(NodeId(str(index)))
        callers.computed(NodeId(str(index)), 2)
    assert {origin: (use.sessions, use.rows) for origin, use in callers.uses.items()} == {
        "0": (1, 2),
        "1": (1, 2),
        REST: (7, 14),
    }
