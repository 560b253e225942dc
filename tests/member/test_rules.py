"""How a request's rules change the route it takes, in a running swarm; in one process, in virtual time."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from manyhands.core import SamplingParams, Span
from manyhands.errors import ShardUnavailable
from manyhands.origin import Answer
from manyhands.route.offer import Rules
from manyhands.testing.clock import run_virtual
from manyhands.testing.tiny import make_tiny
from tests.member.members import Town, town
from tests.member.test_member import until

PROMPT = tuple(range(3, 12))
PARAMS = SamplingParams(max_tokens=3, ignore_eos=True)
WHOLE = Span(0, 4)
Play = Callable[[Callable[[Town], Any]], Any]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("llama", tmp_path_factory.mktemp("rules") / "tiny", layers=4, seed=3)


@pytest.fixture
def play(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Play:
    monkeypatch.setenv("MANYHANDS_HOME", str(tmp_path))

    def start(scene: Callable[[Town], Any]) -> Any:
        async def main() -> Any:
            async with town(folder, tmp_path) as place:
                return await scene(place)

        return run_virtual(main())

    return start


async def settled(place: Town, *spans: str) -> Any:
    """Members n0, n1, ... that host `spans` ("": none), and the origin on n0 once it knows them all."""
    members = [
        (await place.host(i, span=Span.parse(span))).member if span else await place.open(i)
        for i, span in enumerate(spans)
    ]
    first, num_hosts = members[0], sum(map(bool, spans))
    await until(lambda: len([r for r in first.records() if r.info and r.info.max_sessions]) == num_hosts)
    await until(lambda: all(is_measured(first, member) for member in members[1:]))
    return place.origin(first), members


def is_measured(first: Any, other: Any) -> bool:
    link = first.node.pool.find(other.id, "control")
    return link is not None and link.health.rtt_s is not None


def level(origin: Any) -> None:
    """All nodes compute equally fast from now on, as far as `origin` knows: this machine's own pace decides no route."""
    origin.routes._informed = lambda offers: [replace(o, load=replace(o.load, layer_s=0.001)) for o in offers]


async def ask(origin: Any, rules: Rules, tenant: str | None = None) -> Answer:
    found: Answer = await origin.complete(origin.request_ids(PROMPT, PARAMS), rules=rules, tenant=tenant)
    return found


def shown(answer: Answer) -> str:
    return " ".join(f"{o.name}:{o.info.span}" for o in answer.route)


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


def place_records(origin: Any) -> list[Any]:
    return [r for r in origin.routes._directory.records() if r.info]


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
