"""Gauges: what is true of the gateway, its links and its own spans at the moment of asking."""

from collections.abc import Iterable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from manyhands.api.gateway import Gateway
from manyhands.core import NodeId
from manyhands.origin.node import FullNode
from manyhands.route.search import Offer
from manyhands.worker.callers import OriginUse

# A node has about 15 series: 256 of them are what a small Prometheus takes without noticing.
MAX_NODES = 256
OTHER = "other"


class NodeLabels:
    """Nodes as labels: the first 12 hex digits of their id. The first MAX_NODES have one each, later ones share OTHER."""

    def __init__(self, max_nodes: int = MAX_NODES) -> None:
        self._known: set[NodeId] = set()
        self._max_nodes = max_nodes

    def label(self, node: NodeId) -> str:
        if node not in self._known:
            if len(self._known) >= self._max_nodes:
                return OTHER
            self._known.add(node)
        return node[:12]


class LiveGauges(Collector):
    """What is true of the gateway, its links and its own spans at the moment of asking."""

    def __init__(self, gateway: Gateway, labels: NodeLabels) -> None:
        self._gateway, self._labels = gateway, labels

    def describe(self) -> list[Metric]:
        """Nothing: so that registering does not collect."""
        return []

    def collect(self) -> Iterator[Metric]:
        yield from self._jobs()
        yield from self._nodes()
        yield from self._edges()
        yield from self._sessions()
        yield from _spans(self._homes())
        yield from self._origins()

    def _homes(self) -> list[FullNode]:
        """The nodes of this process that own requests; usually one."""
        return list({id(origin.node): origin.node for origin in self._gateway.origins.values()}.values())

    def _jobs(self) -> Iterator[Metric]:
        yield _gauge("requests_running", "Requests that run now", self._gateway.num_running)
        yield _gauge("requests_queued", "Requests that wait for their turn", self._gateway.num_waiting)

    def _nodes(self) -> Iterator[Metric]:
        offers = [
            (name, o) for name, origin in self._gateway.origins.items() for o in known_offers(self._gateway, name)
        ]
        evicted = {node for origin in self._gateway.origins.values() for node in origin.routes.evicted}
        linked = {offer.node for _, offer in offers}
        yield _gauge("nodes", "Nodes with an open link that offer a span of a model served here", len(linked))
        yield _gauge("nodes_active", "Of those, the ones that are not evicted", len(linked - evicted))
        yield _gauge("nodes_evicted", "Nodes kept out by an operator", len(evicted))
        info = GaugeMetricFamily(
            "manyhands_node_info", "Who a node is; always 1", labels=("node", "name", "address", "precision")
        )
        layers = GaugeMetricFamily("manyhands_node_layers", "Layers that a node offers", labels=("node", "model"))
        free = GaugeMetricFamily(
            "manyhands_node_free_positions", "Cache positions to lease, as last told", labels=("node", "model")
        )
        for name, offer in offers:
            label = self._labels.label(offer.node)
            if label != OTHER:
                info.add_metric((label, offer.name[:40], str(offer.addr), offer.info.precision), 1)
                layers.add_metric((label, name), len(offer.info.span))
                free.add_metric((label, name), offer.info.free_tokens)
        yield from (_once(info), _once(layers), _once(free))

    def _edges(self) -> Iterator[Metric]:
        rtt = GaugeMetricFamily("manyhands_node_rtt_seconds", "Round trip to a node", labels=("node",))
        moved = CounterMetricFamily(
            "manyhands_edge_bytes", "Bytes over the open links to a node", labels=("node", "lane", "direction")
        )
        for home in self._homes():
            for (peer, lane), health in home.pool.health().items():
                if (label := self._labels.label(peer)) == OTHER:
                    continue
                moved.add_metric((label, lane, "sent"), health.bytes_sent)
                moved.add_metric((label, lane, "received"), health.bytes_received)
                if lane == "control" and health.rtt_s is not None:
                    rtt.add_metric((label,), health.rtt_s)
        yield from (_once(rtt), _once(moved))

    def _sessions(self) -> Iterator[Metric]:
        family = GaugeMetricFamily(
            "manyhands_node_sessions", "Hops of this gateway's sessions on a node", labels=("node",)
        )
        for home in self._homes():
            for peer, count in sessions_by_node(home).items():
                if (label := self._labels.label(peer)) != OTHER:
                    family.add_metric((label,), count)
        yield _once(family)

    def _uses(self) -> dict[str, OriginUse]:
        """What the spans of this process did for each origin, by its label."""
        total: dict[str, OriginUse] = {}
        for host in [host for home in self._homes() for host in home.hosts]:
            for origin, use in host.engine.callers.uses.items():
                sums = total.setdefault(self._labels.label(origin) or OTHER, OriginUse())
                sums.sessions, sums.rows = sums.sessions + use.sessions, sums.rows + use.rows
        return total

    def _origins(self) -> Iterator[Metric]:
        """For whom the spans of this process computed."""
        sessions = CounterMetricFamily(
            "manyhands_origin_sessions", "Sessions that a node opened on spans of this process", labels=("node",)
        )
        rows = CounterMetricFamily(
            "manyhands_origin_rows", "Positions computed for a node by spans of this process", labels=("node",)
        )
        for label, use in self._uses().items():
            sessions.add_metric((label,), use.sessions)
            rows.add_metric((label,), use.rows)
        yield from (sessions, rows)


def _spans(homes: Iterable[FullNode]) -> Iterator[Metric]:
    """What this process hosts itself."""
    labels = ("layers", "precision")
    sessions = GaugeMetricFamily("manyhands_span_sessions", "Sessions on a span of this process", labels=labels)
    free = GaugeMetricFamily("manyhands_span_free_positions", "Cache positions left to lease", labels=labels)
    steps = CounterMetricFamily("manyhands_span_steps", "Device steps of a span of this process", labels=labels)
    rows = CounterMetricFamily("manyhands_span_rows", "Positions computed by a span of this process", labels=labels)
    stale = CounterMetricFamily(
        "manyhands_span_stale_steps", "Steps of dead guesses that a span of this process computed", labels=labels
    )
    for host in [host for home in homes for host in home.hosts]:
        at = (str(host.info.span), host.info.precision)
        sessions.add_metric(at, host.num_sessions)
        free.add_metric(at, host.info.free_tokens)
        steps.add_metric(at, host.engine.steps_run)
        rows.add_metric(at, host.engine.rows_run)
        stale.add_metric(at, host.engine.stale_steps_computed)
    yield from (_once(sessions), _once(free), _once(steps), _once(rows), _once(stale))


def known_offers(gateway: Gateway, model: str) -> list[Offer]:
    """Spans of `model` that are known now (by records, or on nodes that a link is open to), also those of evicted nodes."""
    origin = gateway.origins[model]
    kind = (origin.model.id, origin.model.precision)
    offers = origin.routes.known_offers()
    return [offer for offer in offers if (offer.info.model, offer.info.precision) == kind]


def sessions_by_node(node: FullNode) -> dict[NodeId, int]:
    """How many hops of this node's own sessions are on each node."""
    counts: dict[NodeId, int] = {}
    for session in node.sessions.values():
        for hop in session.route.hops:
            counts[hop.offer.node] = counts.get(hop.offer.node, 0) + 1
    return counts


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"manyhands_{name}", text, value=value)


def _once(family: Metric) -> Metric:
    """The family without repeated label sets, which Prometheus refuses: the last one stays."""
    family.samples = list({tuple(sorted(s.labels.items())): s for s in family.samples}.values())
    return family
