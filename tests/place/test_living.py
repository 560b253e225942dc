"""A swarm as machines: what its nodes state, what a plan would move, and where requests should begin."""

from typing import Any

import pytest

from manyhands.core import NodeId, Span
from manyhands.place.living import (
    GATEWAY,
    better_origin,
    is_worth,
    reassignments,
    swarm_of,
    token_s_of,
)
from manyhands.place.machines import Fleet, Machine
from manyhands.place.plan import Task, find_plans, place
from manyhands.place.shape import ModelShape

SHAPE = ModelShape("m", "bf16", (1_000_000,) * 12, 2_000_000, (100,) * 12, 128, 1024, process_bytes=1000)


def node(name: str, layers: str = "", near: dict[str, float] | None = None, **facts: Any) -> dict[str, Any]:
    spans = [{"model_id": "id", "layers": layers, "state": "serving", "layer_ms": 2.0}] if layers else []
    told = {"node": name * 8, "name": name, "is_me": name == "me", "memory_bytes": 10**8, "rtt_ms": 50.0, "cores": 1}
    said = [{"node": other * 8, "name": other, "rtt_ms": ms} for other, ms in (near or {}).items()]
    return {**told, "spans": spans, "near": said, "uplink_Bps": None, **facts}


def test_what_nodes_state_of_their_links_is_planned_with() -> None:
    """F23: a and b are 2 ms apart, though each is 50 ms from here; of two statements the longer counts."""
    nodes = [
        node("me", "0-1"),
        node("a", "0-5", {"b": 1.0, "c": 3.0, "unknown": 1.0}, uplink_Bps=2.5e6),
        node("b", "6-11", {"a": 2.0}),
        node("c"),
    ]
    fleet = swarm_of({"nodes": nodes}, "id", SHAPE).task.fleet
    a, b, c = map(fleet.get_machine, "abc")
    assert fleet.leg(a, b).rtt_s == 0.002 and fleet.leg(a, c).rtt_s == 0.003
    assert fleet.leg(b, c).rtt_s == 0.1, "not stated: by way of here"
    assert fleet.leg(a, b).uplink_Bps == 2.5e6


def test_only_those_that_lack_their_part_are_moved_and_idle_ones_first() -> None:
    swarm = swarm_of({"nodes": [node("me", "0-11"), node("a", "0-3"), node("b", "4-11"), node("c")]}, "id", SHAPE)
    hops = [("me", Span(0, 2)), ("a", Span(2, 6)), ("b", Span(6, 9)), ("c", Span(9, 12))]
    assert [(move.name, str(move.span)) for move in reassignments(swarm, hops)] == [("c", "9-11"), ("a", "2-5")]


def test_a_plan_that_gains_little_is_not_worth_a_move() -> None:
    swarm = swarm_of({"nodes": [node("me", "0-11"), node("a", "0-11")]}, "id", SHAPE)
    now_s = token_s_of(swarm, [(NodeId("a" * 8), Span(0, 12))])
    here = [(swarm.task.fleet.get_machine("me"), Span(0, 12))]
    assert now_s is not None and is_worth(swarm, here, now_s), "50 ms of round trip less"
    assert not is_worth(swarm, here, token_s_of(swarm, [(NodeId("me" * 8), Span(0, 12))]))
    assert is_worth(swarm, here, None), "there is no route now"
    assert token_s_of(swarm, [(NodeId("x"), Span(0, 12))]) is None


def far_origin(*, room: int = 10**9) -> Task:
    """Two machines that share the model 2 ms from each other, 80 ms from the origin, which holds no layer."""
    machines = (
        Machine("me", 2_100_000, 0.002, rtt_s=0.0),
        Machine("a", room, 0.002, rtt_s=0.08),
        Machine("b", 7_000_000, 0.002, rtt_s=0.08),
    )
    return Task(SHAPE, Fleet(machines, "me", {frozenset[str](("a", "b")): 0.002}), 64, 32)


def test_the_origin_is_advised_to_sit_where_the_hops_are() -> None:
    """SH-19: the ring of Shard went from 174 to 102 ms so."""
    task = far_origin()
    plan = find_plans(task).best
    name, rate = better_origin(task, plan) or ("", 0.0)
    assert name == "a" and rate > 2 * plan.tokens_per_s
    assert better_origin(Task(SHAPE, task.fleet.seen_from("a"), 64, 32), plan) is None or rate == pytest.approx(rate)
    near = Task(SHAPE, Fleet((Machine("me", 10**9, 0.002), Machine("a", 10**9, 0.002, rtt_s=0.001)), "me"), 64, 32)
    assert better_origin(near, find_plans(near).best) is None


def test_a_machine_without_room_for_ends_is_no_origin() -> None:
    task = far_origin(room=7_000_000)
    assert {hop.machine for hop in find_plans(task).best.hops} == {"a", "b"}
    assert better_origin(task, find_plans(task).best) is None


def test_shares_by_rule_leave_out_machines_that_hold_no_layer() -> None:
    assert [hop.machine for hop in place(far_origin(), "uniform").hops] == ["a", "b"]


def test_what_one_node_states_does_not_stop_the_planning_of_all() -> None:
    """Figures at the limits of records; names that are long, alike, or those that machines are told apart by."""
    named = ["x" * 64, "x" * 64, "a", "a", "a aaaaaa", GATEWAY]
    others = [{**node("x"), "name": name, "node": str(i) + "a" * 63} for i, name in enumerate(named)]
    nodes = [node("me", "0-11"), *others]
    nodes += [node("c", spans=[{"model_id": "id", "layers": "0-11", "state": "serving", "layer_ms": 1e9}])]
    nodes[3]["node"], nodes[4]["node"] = "a" * 64, "a" * 6 + "b" * 58
    swarm = swarm_of({"nodes": nodes}, "id", SHAPE)
    assert sorted(swarm.nodes.values()) == sorted(each["node"] for each in nodes)
    assert swarm.task.fleet.origin == "me" and len(swarm.task.fleet.machines) == len(nodes)
    assert find_plans(swarm.task).best.machines == {"me"}
