"""The swarm as one member sees it: records, links and sessions, for people and `manyhands status`. Pure.

Each record is looked at a few times, however many there are; of a directory full of false ones MAX_NODES nodes and
MAX_KINDS models are shown, those that a link is open to first. Still some 50 ms for 512 nodes: make it beside the event loop.
"""

from collections import Counter
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Final

from manyhands.config import DIRECTORIES
from manyhands.core import EdgeHealth, NodeId, Span
from manyhands.member.weights import ServedModel, known_kinds
from manyhands.place.shape import ModelShape
from manyhands.place.strategy import Holding, coverage, gaps
from manyhands.plain import size_of
from manyhands.route.classes import why_split
from manyhands.swarm.complaints import MAX_SKEW_S
from manyhands.swarm.record import NEAR_DIGITS, Record

MAX_NODES: Final = 512
# Of linked nodes, by which a node judges what it may leave and whether to move: that takes their number squared.
MAX_HOLDINGS: Final = 64


@dataclass(frozen=True, slots=True)
class SwarmSnapshot:
    """What a view is made of. `edges`: control links by peer. `shapes`: of the models whose shape this member has."""

    swarm: str
    me: NodeId
    now: float
    records: Sequence[Record]
    edges: Mapping[NodeId, EdgeHealth]
    shapes: Mapping[ServedModel, ModelShape]
    sessions: int = 0  # requests of this node's own
    tokens: int = 0  # positions of cache that a span is planned with
    complaints: tuple[str, ...] = ()
    api: str = ""
    notes: tuple[str, ...] = field(default=())
    directory: str = DIRECTORIES[0]
    mixes_classes: bool = False  # its requests may run over nodes of exact classes and of class E2 together
    left: frozenset[NodeId] = frozenset()  # nodes that said so when they left


def holdings_of(kind: ServedModel, records: Sequence[Record], *, with_spares: bool = False) -> list[Holding]:
    """Which nodes host what of a model. Spares serve only in need and are left out, unless `with_spares`: with what they have
    loaded; a node that still loads is not ready."""
    return [
        Holding(record.node, record.info.span, record.load, is_ready=record.info.max_sessions > 0)
        for record in records
        if record.info is not None
        and kind.is_of(record)
        and (not record.info.is_spare or (with_spares and record.info.is_loaded))
    ]


def linked_of(holdings: Sequence[Holding], me: NodeId, linked: Container[NodeId]) -> list[Holding]:
    """Those of `me` and of `linked` nodes; of very many MAX_HOLDINGS, of each node one in turn, those of `me` first."""
    turns: Counter[NodeId] = Counter()
    ranked: list[tuple[bool, int, int]] = []
    for number, holding in enumerate(holdings):
        if holding.node == me or holding.node in linked:
            ranked.append((holding.node != me, turns[holding.node], number))
            turns[holding.node] += 1
    return [holdings[number] for _, _, number in sorted(ranked)[:MAX_HOLDINGS]]


def missing_spans(kind: ServedModel, records: Sequence[Record], *, with_spares: bool = True) -> list[Span]:
    """Layers that no node serves now, not even a spare (unless those do not count)."""
    num_layers = next((r.info.num_layers for r in records if r.info is not None and kind.is_of(r)), 0)
    ready = [holding for holding in holdings_of(kind, records, with_spares=with_spares) if holding.is_ready]
    return gaps(coverage(ready, num_layers)) if num_layers else []


def say_missing(spans: Sequence[Span], shape: ModelShape | None, tokens: int) -> str:
    """One line for people; "" if nothing is missing."""
    if not spans:
        return ""
    named = " and ".join(str(span) for span in spans)
    line = f"layers {named} {'is' if len(spans) == 1 and len(spans[0]) == 1 else 'are'} held by no node"
    if shape is None:
        return line
    needed = shape.process_bytes + sum(shape.span_bytes(span, tokens) for span in spans)
    return f"{line}: one more machine with {size_of(needed, is_limit=True)} would complete it (manyhands join)"


def say_split(kind: ServedModel, records: Sequence[Record]) -> str:
    """One line for people where nodes hold all layers, and exact ones and devices of torch would have to share a route."""
    infos = [r.info for r in records if r.info is not None and kind.is_of(r) and r.info.max_sessions > 0]
    return why_split(infos, max((info.num_layers for info in infos), default=0))


def warnings_of(kind: ServedModel, records: Sequence[Record]) -> list[str]:
    """What would stop the model: layers that one node alone serves, and no spare holds."""
    ready = [holding for holding in holdings_of(kind, records, with_spares=True) if holding.is_ready]
    num_layers = max((holding.span.end for holding in ready), default=0)
    names = {record.node: record.name for record in records}
    is_once = [count == 1 for count in coverage(ready, num_layers)]
    before = [0, *accumulate(is_once)]
    lines = []
    for holding in ready:
        start, end = holding.span.start, holding.span.end
        if before[end] > before[start]:
            runs = gaps([not once for once in is_once[start:end]])
            held = " and ".join(str(Span(start + run.start, start + run.end)) for run in runs)
            lines.append(f"{kind.name}: layers {held} are held once: losing {names[holding.node]} stops the model")
    return lines


def view_of(sight: SwarmSnapshot) -> dict[str, Any]:
    """Everything `manyhands status` shows; JSON-able. Seconds are `_s`, milliseconds `_ms`."""
    kinds = known_kinds(sight.records, lambda node: node == sight.me or node in sight.edges)
    nodes, left_out = _nodes(sight)
    more = [f"{left_out} more nodes are known that no link is open to"] if left_out else []
    return {
        "swarm": sight.swarm,
        "directory": sight.directory,
        "node": sight.me,
        "api": sight.api,
        "sessions": sight.sessions,
        "nodes": nodes,
        "left": sorted(sight.left)[:MAX_NODES],
        "models": [_model(kind, records) for kind, records in kinds.items()],
        "missing": [line for kind, records in kinds.items() if (line := _missing(kind, records, sight))],
        "warnings": [line for kind, records in kinds.items() for line in warnings_of(kind, records)]
        + [*more, *sight.notes],
        "complaints": list(sight.complaints),
    }


def _missing(kind: ServedModel, records: Sequence[Record], sight: SwarmSnapshot) -> str:
    line = say_missing(missing_spans(kind, records), sight.shapes.get(kind), sight.tokens)
    line = line or ("" if sight.mixes_classes else say_split(kind, records))
    return f"{kind.name}: {line}" if line else ""


def _model(kind: ServedModel, records: Sequence[Record]) -> dict[str, Any]:
    num_layers = next(record.info.num_layers for record in records if record.info is not None)
    ready = [holding for holding in holdings_of(kind, records) if holding.is_ready]
    return {
        "name": kind.name,
        "id": kind.model,
        "precision": kind.precision,
        "layers": num_layers,
        "coverage": coverage(ready, num_layers),
        "missing": [str(span) for span in missing_spans(kind, records)],
    }


def _nodes(sight: SwarmSnapshot) -> tuple[list[dict[str, Any]], int]:
    """At most MAX_NODES of them, by name, and how many are left out."""
    by_node: dict[NodeId, list[Record]] = {}
    for record in sight.records:
        by_node.setdefault(record.node, []).append(record)
    shown = sorted(by_node, key=lambda node: (node != sight.me, node not in sight.edges))[:MAX_NODES]
    known = {node[:NEAR_DIGITS]: by_node[node][0] for node in shown}
    shown.sort(key=lambda node: (by_node[node][0].name, node))
    return [_node(node, by_node[node], known, sight) for node in shown], len(by_node) - len(shown)


def _near(newest: Record, known: Mapping[str, Record]) -> list[dict[str, Any]]:
    """The round trips that a node states, to those of its neighbours that are `known` here; the nearest first."""
    told = sorted((near.units, near) for near in newest.near if near.node in known)
    return [
        {"node": known[near.node].node, "name": known[near.node].name, "rtt_ms": round(near.rtt_s * 1e3, 1)}
        for _, near in told
    ]


def _node(node: NodeId, records: Sequence[Record], known: Mapping[str, Record], sight: SwarmSnapshot) -> dict[str, Any]:
    newest = max(records, key=lambda record: record.version)
    edge = sight.edges.get(node)
    rtt_s = edge.rtt_s if edge else None
    spoke_s_ago = sight.now - newest.spoken_at
    return {
        "node": node,
        "name": newest.name,
        "is_me": node == sight.me,
        "addresses": [str(addr) for addr in newest.addresses],
        "scope": newest.scope,
        "memory_bytes": newest.memory_bytes,
        "cores": newest.cores,
        "device": newest.device,
        "spoke_s_ago": round(max(0.0, spoke_s_ago), 1) if abs(spoke_s_ago) <= MAX_SKEW_S else None,  # clocks differ
        "path": "self" if node == sight.me else edge.path_kind if edge else None,
        "rtt_ms": None if rtt_s is None else round(rtt_s * 1e3, 2),
        "near": _near(newest, known),
        "uplink_Bps": newest.uplink_Bps or None,
        "process": newest.process,
        "spans": [_span(record) for record in records if record.info is not None and record.info.is_loaded],
    }


def _span(record: Record) -> dict[str, Any]:
    assert record.info is not None
    info, load = record.info, record.load
    return {
        "model": info.model_name,
        "model_id": info.model,
        "layers": str(info.span),
        "precision": info.precision,
        "state": "loading" if info.max_sessions == 0 else "spare" if info.is_spare else "serving",
        "sessions": load.sessions,
        "max_sessions": info.max_sessions,
        "queue": load.queue,
        "layer_ms": round(load.layer_s * 1e3, 3) or None,
        "p95_ms": round(load.p95_s * 1e3, 3) or None,
        "memory_bytes": load.memory_bytes or None,
        "free_tokens": info.free_tokens,
    }
