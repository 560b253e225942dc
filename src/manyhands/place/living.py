"""A swarm that runs, as machines to plan with, and what would bring it to a plan. Pure; `view` is that of GET /api/swarm.

Stickiness: a node that holds all of its part of the plan stays as it is, and a plan that gains less than WORTH over the route
of now moves no node: a move costs a download and a replay.
"""

import math
import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, count
from typing import Any, Final

from manyhands.core import NodeId, Span
from manyhands.errors import Conflict
from manyhands.place.machines import MAX_S, Fleet, Machine
from manyhands.place.plan import PlacementPlan, Task, evaluate
from manyhands.place.shape import ModelShape

MAX_MACHINES: Final = (
    64  # of a swarm, linked ones first, those with the most memory; the search grows with their square
)
TOKENS: Final = 2048  # cache that is planned for, where the model's context allows it
PROMPT: Final = 128
GATEWAY: Final = "this gateway"  # where it hosts no layers itself
WORTH: Final = 1.2  # times as fast: less moves no node

Object = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class LivingSwarm:
    """A task over the machines of a swarm, which node each is, and what they hold of the model."""

    task: Task
    nodes: Mapping[str, NodeId]  # by the name of the machine
    held: Mapping[NodeId, tuple[Span, ...]]

    def machine(self, node: NodeId) -> Machine | None:
        """The machine that a node is; None if it is not planned with."""
        name = next((name for name, other in self.nodes.items() if other == node), None)
        return None if name is None else self.task.fleet.get_machine(name)


@dataclass(frozen=True, slots=True)
class PlannedMove:
    """A node that is to serve `span` instead of `held`."""

    node: NodeId
    name: str
    held: tuple[Span, ...]
    span: Span


def swarm_of(view: Object, model_id: str, shape: ModelShape) -> LivingSwarm:
    """The machines of a swarm with what they state of themselves. Raises Conflict if no node has measured its speed."""
    tokens = min(TOKENS, shape.context)
    nodes = sorted(view["nodes"], key=_rank)[:MAX_MACHINES]
    speeds = {node["node"]: speed for node in nodes if (speed := _layer_s(node, model_id)) is not None}
    if not speeds:
        raise Conflict(f"no node has measured how fast it computes {shape.name} yet: ask again after an answer or two")
    usual_s = statistics.median(speeds.values())
    far_s = max((node["rtt_ms"] or 0.0 for node in nodes), default=0.0) / 1e3
    machines: dict[str, Machine] = {}
    names: dict[str, NodeId] = {}
    for node in nodes:
        label = _label(node["name"], node["node"], {*machines, GATEWAY})
        rtt_s = 0.0 if node["is_me"] else far_s if node["rtt_ms"] is None else node["rtt_ms"] / 1e3
        layer_s = speeds.get(node["node"], usual_s)
        memory = node["memory_bytes"] or _held_bytes(node, model_id, shape, tokens)
        machines[label] = Machine(
            label,
            max(1, memory),
            layer_s,
            ends_s=_ends_s(shape, layer_s),
            rtt_s=rtt_s,
            uplink_Bps=node.get("uplink_Bps") or math.inf,
            cores=max(1, node.get("cores") or 1),
        )
        names[label] = node["node"]
    home = next((label for label, node in zip(machines, nodes, strict=True) if node["is_me"]), GATEWAY)
    if home == GATEWAY:
        room = shape.process_bytes + shape.ends_bytes  # for embedding and head, and no layer
        machines[home] = Machine(home, room, usual_s, ends_s=_ends_s(shape, usual_s))
    fleet = Fleet(tuple(machines.values()), home, _rtts(nodes, names))
    held = {node["node"]: tuple(Span.parse(s["layers"]) for s in _spans(node, model_id)) for node in nodes}
    return LivingSwarm(Task(shape, fleet, tokens, min(PROMPT, tokens)), names, held)


def _label(name: str, node: NodeId, taken: Collection[str]) -> str:
    """What to call a machine: its name; where another has that, with something of its id, and a number where that is taken too,
    for a member may have any name."""
    others = (f"{name[:48]} {node[:6]}{more}" for more in chain([""], (f" {number}" for number in count(2))))
    return next(label for label in chain([name], others) if label not in taken)


def _rank(node: Object) -> tuple[bool, bool, int]:
    """This node, then linked ones, which are there; what others state of their memory is only stated."""
    return not node["is_me"], node["rtt_ms"] is None, -node["memory_bytes"]


def _rtts(nodes: Sequence[Object], names: Mapping[str, NodeId]) -> dict[frozenset[str], float]:
    """Seconds between two machines as they state them, the longer of two statements."""
    called = {node: name for name, node in names.items()}
    found: dict[frozenset[str], float] = {}
    for node in nodes:
        for near in node.get("near", ()):
            two = frozenset((called[node["node"]], called.get(near["node"], "")))
            if len(two) == 2 and "" not in two:
                found[two] = max(found.get(two, 0.0), near["rtt_ms"] / 1e3)
    return found


def _spans(node: Object, model_id: str) -> list[Object]:
    return [span for span in node["spans"] if span["model_id"] == model_id and span["state"] != "loading"]


def _layer_s(node: Object, model_id: str) -> float | None:
    measured = [span["layer_ms"] for span in _spans(node, model_id) if span["layer_ms"]]
    return min(measured) / 1e3 if measured else None


def _held_bytes(node: Object, model_id: str, shape: ModelShape, tokens: int) -> int:
    """What a node whose memory is not known has at least: room for what it holds."""
    held = [shape.span_bytes(Span.parse(span["layers"]), tokens) for span in _spans(node, model_id)]
    return shape.process_bytes + max(held, default=0)


def _ends_s(shape: ModelShape, layer_s: float) -> float:
    """Embedding and head are read once a token, as a layer is: they take as much time as their bytes. A node may state any."""
    layer_bytes = max(1, sum(shape.layer_bytes) // shape.num_layers)
    return min(MAX_S, layer_s * shape.ends_bytes / layer_bytes)


# -- from a plan to orders --------------------------------------------------------------------------------------------


def token_s_of(swarm: LivingSwarm, route: Sequence[tuple[NodeId, Span]]) -> float | None:
    """What a token takes on a route of now, as a plan would be judged; None if a hop is on no machine that is planned with."""
    hops = [(machine, span) for node, span in route if (machine := swarm.machine(node)) is not None]
    return evaluate(swarm.task, hops).token_s if hops and len(hops) == len(route) else None


def is_worth(swarm: LivingSwarm, hops: Sequence[tuple[Machine, Span]], now_s: float | None) -> bool:
    """Whether a placement is WORTH times as fast as what takes `now_s` a token; always, where nothing serves now."""
    return now_s is None or now_s >= WORTH * evaluate(swarm.task, hops).token_s


def reassignments(swarm: LivingSwarm, hops: Sequence[tuple[str, Span]]) -> list[PlannedMove]:
    """Which nodes are to serve other layers: those that do not hold their part. Those that hold nothing yet come first."""
    moves = [
        PlannedMove(node, name, swarm.held.get(node, ()), span)
        for name, span in hops
        if (node := swarm.nodes.get(name)) is not None
        and not any(held.covers(span) for held in swarm.held.get(node, ()))
    ]
    return sorted(moves, key=lambda move: (bool(move.held), move.span))


def better_origin(task: Task, plan: PlacementPlan) -> tuple[str, float] | None:
    """The machine where requests should begin, if that makes a token WORTH times as fast, and tokens/s then (SH-19)."""
    found = [(each.token_s, name) for name in _names(task) if (each := _from(task, name, plan)) is not None]
    token_s, name = min(found, default=(math.inf, ""))
    return (name, 1 / token_s) if token_s * WORTH <= plan.token_s else None


def _names(task: Task) -> list[str]:
    return [m.name for m in task.fleet.machines if m.name != task.fleet.origin]


def _from(task: Task, origin: str, plan: PlacementPlan) -> PlacementPlan | None:
    """`plan` with its hops where they are and another origin; None where its memory holds no ends beside its layers."""
    fleet = task.fleet
    room = task.shape.process_bytes + task.shape.ends_bytes
    room += sum(hop.needs_bytes - task.shape.process_bytes for hop in plan.hops if hop.machine == origin)
    if fleet.get_machine(origin).memory_bytes < room:
        return None
    moved = Task(task.shape, fleet.seen_from(origin), task.tokens, task.prompt)
    return evaluate(moved, [(moved.fleet.get_machine(hop.machine), hop.span) for hop in plan.hops])
