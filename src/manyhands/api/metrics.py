"""What is counted, as Prometheus reads it. Counters grow with the gateway's events (Observer); gauges are read on demand.

docs/metrics.md lists every name and what HearthNet and lattice9 call it. A registry of its own, nothing global. Labels are
bounded: models are those served, outcomes are finish reasons and error codes, and beyond MAX_NODES nodes or MAX_CALLERS callers
the rest is "other". No prompt, no activation and no key is ever a label: a caller is a salted hash (callers.py).
"""

import itertools
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from manyhands.api.callers import CallerCounts
from manyhands.api.gateway import Gateway
from manyhands.api.gauges import LiveGauges, NodeLabels
from manyhands.api.run import Job, Outcome
from manyhands.core import NodeId
from manyhands.origin import Token
from manyhands.origin.repair_plan import Event
from manyhands.route.search import Offer

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
# From a step on a LAN to an answer over a slow WAN.
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
TOKENS_PER_S = (0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)
# Of GET /metrics in one turn of the event loop.
LINES_A_TURN = 256
TALLIES_A_TURN = 12  # 252 lines


class Tally:
    """A histogram's numbers. What grows with every token is counted here, and given to Prometheus on demand."""

    __slots__ = ("_counts", "total")

    def __init__(self) -> None:
        self._counts = [0] * (len(SECONDS) + 1)
        self.total = 0.0

    def observe(self, seconds: float) -> None:
        self._counts[bisect_left(SECONDS, seconds)] += 1
        self.total += seconds

    def buckets(self) -> list[tuple[str, float]]:
        """Upper bounds, and how many were at most that."""
        bounds = [*(str(float(bound)) for bound in SECONDS), "+Inf"]
        return list(zip(bounds, itertools.accumulate(map(float, self._counts)), strict=True))


@dataclass(slots=True)
class _Words:
    """The tokens of a model: how many, and the time between them."""

    tokens: int = 0
    token_s: Tally = field(default_factory=Tally)


@dataclass(slots=True)
class _Share:
    """The part of a node in them."""

    tokens: int = 0
    queue_s: Tally = field(default_factory=Tally)
    compute_s: Tally = field(default_factory=Tally)


@dataclass(slots=True)
class _Watch:
    """What is remembered of a running job: its model's tokens, when its last one came, which nodes had a part in it."""

    words: _Words
    last_at: float | None = None
    hops: tuple[Offer, ...] = ()
    shares: list[_Share] = field(default_factory=list)  # of the hops
    nodes: set[NodeId] = field(default_factory=set)
    num_untrusted: int = 0
    fell_back: bool = False


class Metrics(Collector):
    """Looks on at a gateway; `exposition` is the answer to GET /metrics. Append it to `gateway.observers`."""

    def __init__(self, gateway: Gateway, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.registry = registry = CollectorRegistry()
        self._gateway, self._clock = gateway, clock
        self._labels = NodeLabels()
        self._watches: dict[str, _Watch] = {}
        self._words: dict[str, _Words] = {}
        self._shares: dict[str, _Share] = {}

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"manyhands_{name}", text, labels, registry=registry)

        def histogram(name: str, text: str, *labels: str, buckets: tuple[float, ...] = SECONDS) -> Histogram:
            return Histogram(f"manyhands_{name}", text, labels, buckets=buckets, registry=registry)

        self._requests = counter(
            "requests", "Requests that ended, by finish reason or error code", "model", "api", "outcome"
        )
        self._prompt_tokens: dict[str, int] = {}
        self._cached = counter("cached_tokens", "Prompt tokens that did not have to be computed", "model")
        self._resumed = counter("resumed_streams", "Streams that went on at this gateway", "model", "by")
        self._queue_s = histogram("queue_seconds", "Wait for admission", "model")
        self._open_s = histogram("route_open_seconds", "Finding a route and opening it", "model")
        self._first_s = histogram("time_to_first_token_seconds", "From admission to the first token", "model")
        self._request_s = histogram("request_seconds", "From admission to the last token", "model")
        self._speed = histogram(
            "decode_tokens_per_second", "Tokens after the first, over their time", "model", buckets=TOKENS_PER_S
        )
        self._events = counter("route_events", "What happened to running routes (HN-40 names)", "model", "kind")
        self._failovers = counter("failovers", "Repairs that put other nodes in the place of lost ones", "model")
        self._repair_s = histogram("repair_seconds", "From noticing a loss to a new position", "model")
        self._fallbacks = counter("fallback_to_local", "Requests that went on alone on this machine", "model")
        self._corruptions = counter("shard_corruption_detected", "Hops caught sending what cannot be", "model")
        self._audits = counter("audits", "Audits of answers, by what they found", "model", "outcome")
        self._node_requests: dict[str, int] = {}
        Gauge("manyhands_start_time_seconds", "Unix time at which the gateway started", registry=registry).set(
            gateway.started_at
        )
        self._callers = CallerCounts()
        registry.register(self)
        registry.register(self._callers)
        registry.register(LiveGauges(gateway, self._labels))
        ProcessCollector(registry=registry)

    def exposition(self) -> Iterator[bytes]:
        """All metrics in Prometheus' text format (CONTENT_TYPE), some hundred lines at a time; between two of them the event
        loop may do other work."""
        last = ""
        for family in self.registry.collect():
            for part in _parts(family):
                text = generate_latest(_Only(part))
                if family.name == last:
                    text = b"".join(line for line in text.splitlines(keepends=True) if not line.startswith(b"#"))
                last = family.name
                yield text

    def describe(self) -> list[Metric]:
        """Nothing: so that registering does not collect."""
        return []

    def collect(self) -> Iterator[Metric]:
        """What the tallies hold."""
        tokens = CounterMetricFamily(
            "manyhands_tokens", "Tokens read (prompt) and written (completion)", labels=("model", "kind")
        )
        for model, words in self._words.items():
            tokens.add_metric((model, "prompt"), self._prompt_tokens[model])
            tokens.add_metric((model, "completion"), words.tokens)
        passed = CounterMetricFamily(
            "manyhands_node_tokens", "Completion tokens that passed through a node", labels=("node",)
        )
        for node, share in self._shares.items():
            passed.add_metric((node,), share.tokens)
        requests = CounterMetricFamily(
            "manyhands_node_requests", "Requests that a node had a part in", labels=("node",)
        )
        for node, count in self._node_requests.items():
            requests.add_metric((node,), count)
        yield from (tokens, passed, requests)
        between = {model: words.token_s for model, words in self._words.items()}
        yield from _tallied("token_seconds", "Between two tokens of a request", "model", between)
        queue = {node: share.queue_s for node, share in self._shares.items()}
        yield from _tallied("hop_queue_seconds", "A step's wait for a hop's device, as the hop says", "node", queue)
        compute = {node: share.compute_s for node, share in self._shares.items()}
        stall = HistogramMetricFamily("manyhands_loop_stall_seconds", "What held the event loop for more than 10 ms")
        stall.add_metric((), self._gateway.watchdog.buckets(), self._gateway.watchdog.total_s)
        yield stall
        yield from _tallied("hop_compute_seconds", "A hop's device step, as the hop says", "node", compute)

    # -- Observer -----------------------------------------------------------------------------------------------------

    def started(self, job: Job) -> None:
        words = self._words.get(job.model) or self._words.setdefault(job.model, _Words())
        self._watches[job.id] = _Watch(words)
        self._prompt_tokens[job.model] = self._prompt_tokens.get(job.model, 0) + job.prompt_tokens

    def token(self, job: Job, token: Token) -> None:
        watch, now = self._watches[job.id], self._clock()
        if watch.last_at is not None:
            watch.words.token_s.observe(now - watch.last_at)
        watch.last_at = now
        watch.words.tokens += 1
        if job.hops is not watch.hops:  # a new route is a new tuple
            watch.hops, watch.shares = job.hops, [self._share(watch, hop.node) for hop in job.hops]
        for share in watch.shares:
            share.tokens += 1
        for share, timing in zip(watch.shares, job.waterfall.last.hops, strict=False):
            share.queue_s.observe(timing.queue_us / 1e6)
            share.compute_s.observe(timing.compute_us / 1e6)

    def event(self, job: Job, event: Event) -> None:
        self._events.labels(job.model, event.kind).inc()
        if event.kind in ("shard_failover", "reshard"):
            self._failovers.labels(job.model).inc()
        watch = self._watches[job.id]
        for hop in job.hops:
            self._note_node(watch, hop.node)
        self._note_untrusted(job, watch)
        self._note_fallback(job, watch)

    def ended(self, job: Job, outcome: Outcome) -> None:
        told = job.error or (job.finish_reason if outcome == "done" else None) or outcome
        self._requests.labels(job.model, job.api, told).inc()
        self._callers.ended(job, outcome)
        watch = self._watches.pop(job.id, None)
        if watch is None:
            return
        self._note_untrusted(job, watch)
        self._note_repairs(job)
        self._cached.labels(job.model).inc(job.cached_tokens)
        if job.audit is not None:
            self._audits.labels(job.model, job.audit.outcome).inc()
        if job.resumed is not None:
            self._resumed.labels(job.model, job.resumed.by).inc()
        timings = job.timings
        for histogram, value in (
            (self._queue_s, job.queue_s),
            (self._open_s, timings.open_s),
            (self._first_s, timings.ttft_s),
            (self._request_s, timings.total_s),
            (self._speed, timings.decode_tokens_per_s(job.completion_tokens)),
        ):
            if value is not None:
                histogram.labels(job.model).observe(value)

    def _share(self, watch: _Watch, node: NodeId) -> _Share:
        self._note_node(watch, node)
        label = self._labels.label(node)
        return self._shares.get(label) or self._shares.setdefault(label, _Share())

    def _note_node(self, watch: _Watch, node: NodeId) -> None:
        if node not in watch.nodes:
            watch.nodes.add(node)
            label = self._labels.label(node)
            self._node_requests[label] = self._node_requests.get(label, 0) + 1

    def _note_untrusted(self, job: Job, watch: _Watch) -> None:
        if job.untrusted_nodes > watch.num_untrusted:
            self._corruptions.labels(job.model).inc(job.untrusted_nodes - watch.num_untrusted)
            watch.num_untrusted = job.untrusted_nodes

    def _note_fallback(self, job: Job, watch: _Watch) -> None:
        alone = self._gateway.origins[job.model].last_resort
        if alone is not None and not watch.fell_back:
            watch.fell_back = any((hop.node, hop.name) == (alone.node, alone.name) for hop in job.hops)
            self._fallbacks.labels(job.model).inc(watch.fell_back)

    def _note_repairs(self, job: Job) -> None:
        for repair in job.repairs:
            self._repair_s.labels(job.model).observe(repair.total_s)


def _tallied(name: str, text: str, label: str, tallies: Mapping[str, Tally]) -> Iterator[Metric]:
    """One family, in parts of TALLIES_A_TURN."""
    for some in batched(tallies.items(), TALLIES_A_TURN):
        family = HistogramMetricFamily(f"manyhands_{name}", text, labels=(label,))
        for value, tally in some:
            family.add_metric((value,), tally.buckets(), tally.total)
        yield family


def _parts(family: Metric) -> Iterator[Metric]:
    """The family in parts of LINES_A_TURN; one of prometheus_client's own, whose labels are few, in one."""
    if any(sample.name.endswith("_created") for sample in family.samples):
        yield family
        return
    for samples in batched(family.samples, LINES_A_TURN):
        part = Metric(family.name, family.documentation, family.type)
        part.samples = samples
        yield part


class _Only:
    """A registry of one metric."""

    def __init__(self, family: Metric) -> None:
        self._family = family

    def collect(self) -> list[Metric]:
        return [self._family]


T = TypeVar("T")


def batched(items: Iterable[T], size: int) -> list[list[T]]:
    """What there is now, in lists of at most `size`; one of none if there is nothing."""
    now = list(items)
    return [now[start : start + size] for start in range(0, max(1, len(now)), size)]
