"""What a running swarm measures changes the routes of live requests; in one process, in virtual time.

Each test fails if the wire between a measurement and the route is cut (tools/mutate.py cuts each of them).
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from manyhands.config import WorkerConfig
from manyhands.core import NodeId, SamplingParams, Span
from manyhands.errors import ShardUnavailable
from manyhands.net.liveness import LinkEvidence
from manyhands.net.transport import Link, Transport
from manyhands.route.offer import Rules
from manyhands.swarm.record import NearNode
from manyhands.testing.wan import WanLink, WanProfile, WanTransport
from manyhands.wire.timings import HopTiming
from tests.member.members import Play, Town
from tests.member.requests import PROMPT, ask, level, place_records, settled, shown, until
from tests.swarm.records import key_of


async def routes_of(origin: Any, count: int = 8) -> set[str]:
    return {shown(await ask(origin, Rules())) for _ in range(count)}


def test_a_node_that_was_seen_to_be_slow_loses_its_requests(play: Play) -> None:
    """Two equal nodes; one request saw 0.5 s a step on n1."""

    async def scene(place: Town) -> None:
        origin, _ = await settled(place, "", "0-3", "0-3")
        informed, is_seen = origin.routes.informed, False
        level(origin)  # until n1 has a request, which this machine's own pace might keep from it
        while not is_seen:
            request = origin.request_ids(PROMPT, SamplingParams(max_tokens=3, ignore_eos=True))
            answer = origin.answer(request)
            async for _ in origin.stream(answer):
                if answer.route[0].name == "n1":
                    answer.session.returns.timings, is_seen = (HopTiming(0, 500_000),), True
        origin.routes.informed = informed
        assert await routes_of(origin) == {"n2:0-3"}

    play(scene)


def test_a_node_that_is_far_away_loses_its_requests(play: Play) -> None:
    async def scene(place: Town) -> None:
        origin, (first, one, _) = await settled(place, "", "0-3", "0-3")
        level(origin)
        assert await routes_of(origin, 20) == {"n1:0-3", "n2:0-3"}
        link = first.node.pool.find(one.id, "control")
        assert link is not None
        for _ in range(12):  # an average: the new figure must outweigh those before
            link.health.rtt_s = 0.4
            await ask(origin, Rules())
        link.health.rtt_s = 0.4
        assert await routes_of(origin) == {"n2:0-3"}

    play(scene)


async def attempts_of(origin: Any, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The nodes on which each of eight requests tried to open a session."""
    tried: list[list[str]] = []
    plain = origin.node.requests.open

    async def opened(route: Any, *rest: Any, **limits: Any) -> Any:
        tried[-1].append(route[0].name)
        return await plain(route, *rest, **limits)

    monkeypatch.setattr(origin.node.requests, "open", opened)
    for _ in range(8):
        tried.append([])
        await ask(origin, Rules())
    return tried


def test_a_node_without_room_for_the_lease_is_not_asked(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its record says so: the request does not have to hear Busy first."""

    async def scene(place: Town) -> None:
        first = await place.open(0)
        for index, tokens in ((1, len(PROMPT)), (2, 4096)):
            await place.host(index, worker=WorkerConfig(cache_tokens=tokens))
        origin = place.origin(first)
        await until(lambda: len([r for r in place_records(origin) if r.info.max_sessions]) == 2)
        await until(lambda: {r.info.free_tokens > len(PROMPT) for r in place_records(origin)} == {False, True})
        level(origin)  # or the busy machine that this is may have made n2 the faster one
        assert await attempts_of(origin, monkeypatch) == [["n2"]] * 8

    play(scene)


def test_a_node_that_says_it_is_busy_is_not_asked(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a span says of its load comes from what it does now: sessions that it serves, steps that wait for it (IN-W02)."""

    async def scene(place: Town) -> None:
        first = await place.open(0)
        hosts = [await place.host(index, worker=WorkerConfig(max_sessions=1)) for index in (1, 2)]
        origin = place.origin(first)
        await until(lambda: len([r for r in place_records(origin) if r.info.max_sessions]) == 2)
        request = origin.request_ids(PROMPT, SamplingParams(max_tokens=60, ignore_eos=True))
        running = origin.answer(request)
        tokens = origin.stream(running)
        await anext(tokens)
        other = {"n1": "n2", "n2": "n1"}[running.route[0].name]
        for hosting in hosts:
            hosting.member.directory.announce()
        await until(lambda: sum(r.load.sessions for r in place_records(origin)) == 1)
        level(origin)
        assert await attempts_of(origin, monkeypatch) == [[other]] * 8
        await tokens.aclose()

    play(scene)


def test_a_node_where_steps_wait_loses_its_requests(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene(place: Town) -> None:
        first = await place.open(0)
        hosts = [await place.host(index) for index in (1, 2)]
        origin = place.origin(first)
        await until(lambda: len([r for r in place_records(origin) if r.info.max_sessions]) == 2)
        engine = hosts[0].hosts[0].engine
        monkeypatch.setattr(engine, "waiting", lambda: [object()] * 9)
        hosts[0].member.directory.announce()
        await until(lambda: sum(r.load.queue for r in place_records(origin)) == 9)
        monkeypatch.undo()
        level(origin)
        assert await routes_of(origin) == {"n2:0-3"}

    play(scene)


def test_members_hold_ends_for_origins_that_have_none(play: Play) -> None:
    """F06: ids go down the route. The whole model on a faster member without ends serves what lies between, and no edge."""

    async def scene(place: Town) -> None:
        wishes = [("0-1", True), ("2-3", True), ("0-3", False)]
        hostings = [await place.host(i, span=Span.parse(s), has_ends=e) for i, (s, e) in enumerate(wishes)]
        member = hostings[2].member
        await until(lambda: len([r for r in member.records() if r.info and r.info.max_sessions]) == 3)
        assert {r.name for r in member.records() if r.info and r.info.has_ends} == {"n0", "n1"}
        plain, weak = place.origin(member), place.origin(member, "edges")
        level(weak)
        wanted, got = await ask(plain, Rules()), await ask(weak, Rules())
        assert got.token_ids == wanted.token_ids
        assert (got.route[0].name, got.route[-1].name) == ("n0", "n1")
        await hostings[1].member.leave()
        await until(lambda: len([r for r in member.records() if r.info and r.info.max_sessions]) == 2)
        with pytest.raises(ShardUnavailable, match="do not hold the ends"):
            weak.routes.choose(weak.routes.known_offers(()))

    play(scene)


class Roads(WanTransport):
    """Links with a round trip by the pair of nodes; 1 ms where none is given."""

    def __init__(self, transport: Transport, rtts: dict[frozenset[NodeId], float]) -> None:
        super().__init__(transport, WanProfile())
        self._rtts = rtts

    def _wrap(self, link: Link) -> WanLink:
        self._up = WanProfile(self._rtts.get(frozenset((self.node, link.peer)), 0.001) / 2)
        return super()._wrap(link)


def roads(**rtts: float) -> Callable[[Transport], Transport]:
    """ "n1_n2=0.1": 100 ms between n1 and n2."""
    ends = {name: frozenset(key_of(int(end[1:])).node_id for end in name.split("_")) for name in rtts}
    return lambda transport: Roads(transport, {ends[name]: rtt_s for name, rtt_s in rtts.items()})


async def informed(origin: Any, *names: str) -> None:
    """Wait until these nodes state round trips to two others or more."""
    await until(lambda: all(len(r.near) > 1 for r in place_records(origin) if r.name in names))


def test_hops_that_are_near_each_other_are_taken(play: Play) -> None:
    """F18: n2 and n3 hold the same layers and are equally far from the origin; n3 is 300 ms from n1, where the rest is."""

    async def scene(place: Town) -> None:
        place.wrap = roads(n0_n1=0.02, n0_n2=0.02, n0_n3=0.02, n1_n2=0.01, n1_n3=0.3)
        origin, members = await settled(place, "", "0-1", "2-3", "2-3")
        level(origin)
        await informed(origin, "n1", "n2", "n3")
        assert await routes_of(origin) == {"n1:0-1 n2:2-3"}
        (said,) = [r for r in place_records(origin) if r.name == "n1"]
        assert {near.node: near.rtt_s for near in said.near}[members[3].id[:16]] == pytest.approx(0.3, rel=0.1)

    play(scene)


def test_a_node_cannot_make_its_edges_look_short(play: Play) -> None:
    """n3 states 0.1 ms to all; n1 has measured 300 ms, so requests go by n2 as before."""

    async def scene(place: Town) -> None:
        place.wrap = roads(n0_n1=0.02, n0_n2=0.02, n0_n3=0.02, n1_n2=0.1, n1_n3=0.3)
        origin, members = await settled(place, "", "0-1", "2-3", "2-3")
        level(origin)
        await informed(origin, "n1", "n2", "n3")
        faulty = members[3]
        near = tuple(NearNode(name, 1) for name, _ in faulty.announcer.profile.near)
        truth = faulty._told

        def untruth() -> Any:
            hosted = truth()
            faulty.announcer.profile = replace(faulty.announcer.profile, near=near)
            return hosted

        faulty.directory._hosted = untruth
        faulty.directory.announce()
        await until(lambda: any(r.near == near for r in place_records(origin)))
        assert await routes_of(origin) == {"n1:0-1 n2:2-3"}

    play(scene)


def test_a_node_with_a_slow_uplink_loses_its_requests(play: Play) -> None:
    async def scene(place: Town) -> None:
        origin, (_, one, _) = await settled(place, "", "0-3", "0-3")
        level(origin)
        assert await routes_of(origin, 20) == {"n1:0-3", "n2:0-3"}
        line = LinkEvidence(0, True, 1 << 24, False, 1e5, 0.02)
        one.node.watch.uplink.observe(line, 0, one.node.watch._awake_s())
        one.directory.announce()
        await until(lambda: any(r.uplink_Bps == 1e5 for r in place_records(origin)))
        assert await routes_of(origin) == {"n2:0-3"}

    play(scene)


def test_a_record_tells_what_a_span_takes_and_how_fast_it_answers(play: Play) -> None:
    """HN-10, HN-12, LP-16."""

    async def scene(place: Town) -> None:
        origin, (_, one) = await settled(place, "", "0-3")
        (before,) = place_records(origin)
        await ask(origin, Rules())
        one.directory.announce()
        await until(lambda: place_records(origin)[0].load.p95_s > 0)
        (after,) = place_records(origin)
        assert before.load.memory_bytes == after.load.memory_bytes > 100_000
        assert before.load.p95_s == 0 and before.process == after.process > 0

    play(scene)
