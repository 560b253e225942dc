"""A plan applied to a running swarm: nodes are asked to serve their part, and requests go by it. In virtual time."""

from dataclasses import replace
from typing import Any

from manyhands.api.gateway import Gateway
from manyhands.api.native.placement import apply_plan, assign, move_all
from manyhands.api.native.workers import find_worker, register
from manyhands.checkpoint.manifest import Silent
from manyhands.config import BalanceConfig
from manyhands.core import Span
from manyhands.member.weights import weights_of
from manyhands.place.living import PlannedMove, swarm_of
from manyhands.route.offer import Rules
from tests.member.members import Town, room_for, spans
from tests.member.requests import ask, level, shown, until
from tests.member.test_member import Stage, folder, stage

__all__ = ["folder", "stage"]


EQUAL = {"n0": "0-1", "n1": "2-3", "n2": "4-5"}


async def apply(gateway: Gateway, hosting: Any, parts: dict[str, str], *, force: bool = False) -> dict[str, Any]:
    """As POST /api/plan with apply, of a plan that gives each node its part."""
    origin = gateway.origins["tiny"]
    swarm = swarm_of(hosting.view(), origin.model.id, hosting.weights.shape)
    hops = [{"machine": name, "layers": layers} for name, layers in parts.items()]
    return await apply_plan(gateway, "tiny", origin, swarm, {"hops": hops}, force=force)


async def swarm_of_three(place: Town, stage: Any) -> list[Any]:
    """n0 holds the model, n1 layers 0-2 and n2 3-5, as they chose."""
    weights = await weights_of(str(stage.folder), "bf16", (), stage.home, Silent())
    room = room_for(weights, 3)
    hostings = [await place.host(0)] + [await place.host(i, memory_bytes=room) for i in (1, 2)]
    first = hostings[0].member
    await until(lambda: spans(first) == {"n0": ["0-5"], "n1": ["0-2"], "n2": ["3-5"]})
    await until(lambda: all(first.edges()[h.member.id].rtt_s is not None for h in hostings[1:]))
    return hostings


def test_nodes_move_to_their_part_of_the_plan(stage: Stage) -> None:
    """F23: equal shares are 0-1, 2-3 and 4-5; n0 and n2 hold theirs and stay, n1 moves."""

    async def scene(place: Town) -> None:
        hostings = await swarm_of_three(place, stage)
        origin = place.origin(hostings[0].member)
        gateway = Gateway({"tiny": origin})
        before = await ask(origin, Rules())
        told = await apply(gateway, hostings[0], EQUAL, force=True)
        assert [(m["name"], m["from"], m["to"]) for m in told["moves"]] == [("n1", ["0-2"], "2-3")]
        assert told["status"] == "applied"
        await until(lambda: spans(hostings[0].member)["n1"] == ["2-3"])
        again = await apply(gateway, hostings[0], EQUAL, force=True)
        assert (again["status"], again["moves"]) == ("kept", [])
        assert (await ask(origin, Rules())).token_ids == before.token_ids

    stage.play(scene)


def test_a_plan_that_gains_little_moves_no_node(stage: Stage) -> None:
    async def scene(place: Town) -> None:
        hostings = await swarm_of_three(place, stage)
        origin = place.origin(hostings[0].member)
        level(origin)
        assert shown(await ask(origin, Rules())) == "n0:0-5"
        told = await apply(Gateway({"tiny": origin}), hostings[0], EQUAL)
        assert (told["status"], told["moves"]) == ("kept", []) and "1.2 times" in told["said"]
        assert spans(hostings[0].member)["n1"] == ["0-2"]

    stage.play(scene)


def test_a_node_that_is_needed_says_so_and_stays(stage: Stage) -> None:
    async def scene(place: Town) -> None:
        first = await place.host(0, span=Span(0, 2))
        weights = await weights_of(str(stage.folder), "bf16", (), stage.home, Silent())
        await place.host(1, memory_bytes=room_for(weights, 4))
        await until(lambda: spans(first.member) == {"n0": ["0-1"], "n1": ["2-5"]})
        gateway = Gateway({"tiny": place.origin(first.member)})
        other = PlannedMove(first.member.id, "n0", (Span(0, 2),), Span(3, 6))
        (mine,) = [r.node for r in first.member.records() if r.name == "n1"]
        told = await move_all(gateway, "tiny", [PlannedMove(mine, "n1", (Span(2, 6),), Span(0, 3)), other], force=False)
        (refused,) = [m for m in told if m["name"] == "n1"]
        assert refused["status"] == "refused" and "no other node serves" in refused["said"]
        assert spans(first.member)["n1"] == ["2-5"]

    stage.play(scene)


def test_a_plan_that_every_node_refuses_is_refused(stage: Stage) -> None:
    """n1 was started with --layers 0-2, and n0 asks it to serve 3-5."""

    async def scene(place: Town) -> None:
        first = await place.host(0)
        second = await place.host(1, span=Span(0, 3))
        await until(lambda: spans(first.member) == {"n0": ["0-5"], "n1": ["0-2"]})
        await until(lambda: first.member.edges()[second.member.id].rtt_s is not None)
        gateway = Gateway({"tiny": place.origin(first.member)})
        told = await apply(gateway, first, {"n0": "0-2", "n1": "3-5"}, force=True)
        assert (told["status"], [move["name"] for move in told["moves"]]) == ("refused", ["n1"])
        assert "was started with --layers 0-2" in told["moves"][0]["said"]

    stage.play(scene)


def test_a_node_that_is_registered_gets_the_layers_that_are_missing(stage: Stage) -> None:
    """L9-25: n1 and n2 serve 0-2, and n0, which had the rest, has left. The gateway is told of n2 and assigns 3-5 to it."""

    async def scene(place: Town) -> None:
        weights = await weights_of(str(stage.folder), "bf16", (), stage.home, Silent())
        room, calm = room_for(weights, 3), BalanceConfig(period_s=36_000.0)
        whole = await place.host(0)
        one = await place.host(1, span=Span(0, 3), memory_bytes=room, balance=calm)
        two = await place.host(2, span=Span(0, 3), memory_bytes=room, balance=calm)
        two.member.config = replace(two.member.config, span=None)  # from now on others may move it
        gateway = Gateway({"tiny": place.origin(one.member)})
        await whole.member.leave()
        await until(lambda: spans(one.member) == {"n1": ["0-2"], "n2": ["0-2"]})

        async def registered(member: Any, layers: str = "") -> tuple[str, list[str]]:
            """What POST /api/workers/register does."""
            worker = await register(gateway, str(member.addresses[0]))
            said = await assign(gateway, worker, layers)
            return said, [str(o.info.span) for _, o in find_worker(gateway, worker.node).offers]

        assert await registered(two.member) == ("moves to layers 3-5", ["3-5"])
        assert spans(one.member) == {"n1": ["0-2"], "n2": ["3-5"]}
        assert await registered(two.member) == ("", ["3-5"]), "nothing is missing now"
        said, held = await registered(one.member, "3-5")
        assert held == ["0-2"] and "layers 0-2" in said

    stage.play(scene)
