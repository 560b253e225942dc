"""How a request's rules change the route it takes, in a running swarm; in one process, in virtual time."""

from typing import Any

import pytest

from manyhands.core import SamplingParams
from manyhands.errors import ShardUnavailable
from manyhands.route.offer import Rules
from tests.member.members import Play, Town
from tests.member.requests import WHOLE, ask, level, place_records, settled, shown, until


def test_greedy_takes_the_lowest_queue_and_latency_the_least_time(play: Play) -> None:
    """HN-22: both are idle, so greedy takes the lower id; latency the one that says it is a hundred times as fast."""

    async def scene(place: Town) -> None:
        origin, (_, one, two) = await settled(place, "", "0-3", "0-3")
        low, high = sorted((one, two), key=lambda member: member.id)
        low.layer_s[WHOLE], high.layer_s[WHOLE] = 0.1, 0.001
        for member in (low, high):
            member.directory.announce()
        wanted = {low.config.name: 0.1, high.config.name: 0.001}
        await until(lambda: {r.name: r.load.layer_s for r in place_records(origin)} == wanted)
        fast = await ask(origin, Rules("latency"))
        greedy = await ask(origin, Rules("greedy"))
        assert (shown(fast), shown(greedy)) == (f"{high.config.name}:0-3", f"{low.config.name}:0-3")
        assert fast.token_ids == greedy.token_ids
        assert greedy.routing.rules.policy == "greedy"

    play(scene)


def test_the_own_node_is_avoided_while_others_hold_the_layers(play: Play) -> None:
    """HN-15, HN-24, F25: and used where no other does."""

    async def scene(place: Town) -> None:
        origin, (_, other) = await settled(place, "0-3", "1-3")
        level(origin)
        assert shown(await ask(origin, Rules())) == "n0:0-3"
        assert shown(await ask(origin, Rules(allow_self=False))) == "n0:0 n1:1-3"
        await other.leave()
        await until(lambda: len(place_records(origin)) == 1)
        assert shown(await ask(origin, Rules(allow_self=False))) == "n0:0-3"

    play(scene)


def test_a_scope_keeps_nodes_out_and_says_how_many(play: Play) -> None:
    async def scene(place: Town) -> None:
        origin, (me, one, two) = await settled(place, "0-3", "0-3", "0-3")
        level(origin)
        everyone = {shown(await ask(origin, Rules(allow_self=False))) for _ in range(20)}
        assert everyone == {"n1:0-3", "n2:0-3"}
        alone = await ask(origin, Rules(scope="off", allow_self=False))
        assert shown(alone) == "n0:0-3"
        assert alone.routing.num_refused == 2
        me.directory.members = type(me.directory.members)("lan", frozenset({two.id}), frozenset(), "127.0.0.1")
        trusted = {shown(await ask(origin, Rules(scope="trusted", allow_self=False))) for _ in range(6)}
        assert trusted == {"n2:0-3"}
        assert one.id != two.id

    play(scene)


def test_layers_that_only_nodes_out_of_scope_hold_are_refused_at_once(play: Play) -> None:
    async def scene(place: Town) -> None:
        origin, _ = await settled(place, "0-1", "2-3")
        await ask(origin, Rules())
        with pytest.raises(
            ShardUnavailable, match="no node holds layers 2-3 of 4 among those that trust and scope admit"
        ):
            await ask(origin, Rules(scope="off"))
        refused = origin.answer(origin.request_ids((1, 2, 3), SamplingParams(max_tokens=2)))
        with pytest.raises(ShardUnavailable):
            async for _ in origin.stream(refused, path="star", rules=Rules(scope="off")):
                pass
        said = refused.routing.as_object()
        assert (said["refused_nodes"], said["path"], said["scope"]) == (1, "star", "off")

    play(scene)


def test_the_first_and_the_last_layers_go_to_trusted_nodes_alone(play: Play) -> None:
    """SH-17, F49: per request, and refused rather than computed elsewhere; repairs keep to it as well."""

    async def scene(place: Town) -> None:
        origin, (me, _, two) = await settled(place, "", "0-3", "0-3")
        level(origin)
        with pytest.raises(ShardUnavailable, match="no trusted node holds layers 0-1 of 4, and with trusted_first = 2"):
            await ask(origin, Rules(trusted_first=2))
        me.directory.members = type(me.directory.members)("lan", frozenset({two.id}), frozenset(), "127.0.0.1")
        assert {shown(await ask(origin, Rules())) for _ in range(16)} == {"n1:0-3", "n2:0-3"}
        for rules, layers in (
            (Rules(trusted_first=1), [0]),
            (Rules(trusted_last=2), [2, 3]),
            (Rules(trusted_last=9), range(4)),
        ):
            for _ in range(4):
                route = (await ask(origin, rules)).route
                assert {o.name for o in route for layer in layers if o.info.span.start <= layer < o.info.span.end} == {
                    "n2"
                }
        permitted = origin.routes.permitted(await origin.routes.offers(()), Rules(trusted_first=1, trusted_last=1))
        assert sorted(f"{o.name}:{o.info.span}" for o in permitted) == ["n1:1-2", "n2:0-3"]

    play(scene)


def test_a_sticky_request_takes_the_route_of_the_one_before(play: Play) -> None:
    """Two equal nodes: requests spread over them, those of a tenant that asks for it do not."""

    async def scene(place: Town) -> None:
        origin, _ = await settled(place, "", "0-3", "0-3")
        level(origin)
        assert len({shown(await ask(origin, Rules())) for _ in range(16)}) == 2
        first = await ask(origin, Rules(sticky=True), "me")
        assert not first.routing.is_kept
        origin.node.request = type(origin.node.request)(reuse=False)
        again = [await ask(origin, Rules(sticky=True), "me") for _ in range(12)]
        assert {shown(answer) for answer in again} == {shown(first)}
        assert all(answer.routing.is_kept for answer in again)

    play(scene)


@pytest.mark.parametrize("policy", ["latency", "greedy"])
def test_a_sticky_route_whose_node_has_left_is_given_up(play: Play, policy: Any) -> None:
    async def scene(place: Town) -> None:
        origin, (_, *others) = await settled(place, "", "0-3", "0-3")
        first = await ask(origin, Rules(policy, sticky=True))
        gone = next(member for member in others if member.config.name == first.route[0].name)
        await gone.leave()
        await until(lambda: len(place_records(origin)) == 1)
        second = await ask(origin, Rules(policy, sticky=True))
        assert shown(second) != shown(first)
        assert not second.routing.is_kept

    play(scene)
