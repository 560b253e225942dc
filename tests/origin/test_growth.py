"""Leases that grow while a session runs, in a whole swarm under the virtual clock: the text is what one lease would give."""

import asyncio
import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from manyhands.config import WorkerConfig
from manyhands.core import EndsAt, PathKind, SessionId
from manyhands.net.transport import Link
from manyhands.origin import growth
from manyhands.origin.node import FullNode
from manyhands.origin.route import Route
from manyhands.testing.tiny import make_tiny
from manyhands.wire.message import Extended
from tests.kill import NEW, PROMPTS, REQUEST, Bench, Scene, kept_models
from tests.origin.scenes import Oracle

LENGTH = len(PROMPTS[0])
U32 = (1 << 32) - 1
FEW = LENGTH + 13  # positions that hold a part of the answer


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    with kept_models() as models:
        yield Bench(make_tiny("qwen3", tmp_path_factory.mktemp("growth") / "qwen3", seed=23), models)


@pytest.fixture(autouse=True)
def few_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(growth, "LEASE_TOKENS", 5)
    monkeypatch.setattr(growth, "AHEAD", 2)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Positions that hops were asked to lease, one entry an Extend."""
    seen: list[int] = []
    plain = Route.extend

    def noting(self: Route, capacity: int) -> None:
        seen.append(capacity)
        plain(self, capacity)

    monkeypatch.setattr(Route, "extend", noting)
    return seen


def take(node: FullNode, positions: int) -> Any:
    """Lease `positions` on the node's span, as some session does; returns what gives them back."""
    host = node.hosts[0]
    place = (SessionId(bytes(16)), host.info.span)
    host.leases.take(place, positions, host.engine.cache_tokens, None)
    return lambda: host.leases.give_back(place)


@pytest.mark.parametrize("path", ["ring", "star"])
@pytest.mark.parametrize("ends", ["origin", "edges"])
@pytest.mark.parametrize("kind", ["greedy", "hot"])
def test_the_text_is_that_of_one_lease(bench: Bench, kind: str, ends: EndsAt, path: PathKind, asked: list[int]) -> None:
    """Three at the same time, drafts right and wrong among them."""

    async def main() -> None:
        async with bench.scene(ends=ends, request=replace(REQUEST, standby=True)) as scene:
            drafted = (scene.ask(kind, n, path=path, drafter=bench.half_right(kind, n)) for n in (1, 2))
            found = await asyncio.gather(scene.ask(kind, 0, path=path), *drafted)
            assert found == [bench.wanted[kind, n] for n in range(3)]
            assert {answer.finish_reason for answer in scene.answers} == {"length"}

    bench.play(main)
    assert len(set(asked)) >= 10  # five tokens at a time, of each


@pytest.mark.parametrize("victim", [0, 1, 2])
@pytest.mark.parametrize("standby", [False, True])
def test_hops_that_die_are_replaced_with_leases_that_have_grown(bench: Bench, victim: int, standby: bool) -> None:
    async def main() -> None:
        async with bench.scene(request=replace(REQUEST, standby=standby)) as scene:
            node = scene.hops[victim]
            scene.faults.at("decode", node, lambda: scene.faults.die(node), 14)
            assert await scene.ask("hot") == bench.wanted["hot", 0]
            assert len(scene.answers[0].repairs) == 1

    bench.play(main)


def test_a_standby_that_opens_late_has_the_lease_of_the_others(bench: Bench) -> None:
    """It hears of the Open after the lease has grown, and follows to the end: a hop that dies then costs one short step."""

    async def main() -> None:
        async with bench.scene(request=replace(REQUEST, standby=True)) as scene:
            origin, standby, victim = scene.swarm.origin.node, scene.hops[3], scene.hops[1]
            scene.faults.slow(scene.hops[0], 0.01)  # the clock waits for a step before each decode step
            scene.faults.delay(origin, standby, "control", 0.08)
            scene.faults.at("decode", victim, lambda: scene.faults.die(victim), 20)
            assert await scene.ask("hot") == bench.wanted["hot", 0]
            (repair,) = scene.answers[0].repairs
            assert repair.replacement == ("n3",)
            assert not scene.answers[0].session.standbys.refused  # type: ignore[union-attr]

    bench.play(main)


def test_an_answer_ends_where_no_room_comes(bench: Bench) -> None:
    """It is told as at its limit, with all that the positions allow: the last token needs none."""

    async def main() -> None:
        async with bench.scene(worker=WorkerConfig(cache_tokens=FEW)) as scene:
            assert await scene.ask("hot") == bench.wanted["hot", 0][: FEW - LENGTH + 1]
            assert scene.answers[0].finish_reason == "length"
            assert scene.answers[0].text == scene.swarm.origin.model.tokenizer.decode(scene.answers[0].token_ids)

    bench.play(main)


@pytest.mark.parametrize("drafted", [False, True])
def test_an_answer_waits_for_room(bench: Bench, drafted: bool) -> None:
    """No other node could take the place: tests/hostile/test_no_room.py."""

    async def main() -> None:
        async with bench.scene(worker=WorkerConfig(cache_tokens=LENGTH + NEW), spares=()) as scene:
            loop = asyncio.get_running_loop()
            give_back = take(scene.hops[1], NEW - 12)
            loop.call_later(20, give_back)
            options: dict[str, Any] = {"drafter": bench.half_right("hot", 0)} if drafted else {}
            assert await scene.ask("hot", **options) == bench.wanted["hot", 0]
            assert loop.time() >= 20 and not scene.answers[0].repairs

    bench.play(main)


def test_what_was_drawn_before_the_last_token_of_a_lease_is_shown(bench: Bench) -> None:
    """A window of drafts ends the lease: all but its last token, with which the answer may end, do not wait for room."""

    async def main() -> None:
        async with bench.scene(worker=WorkerConfig(cache_tokens=LENGTH + NEW), spares=()) as scene:
            loop, shown = asyncio.get_running_loop(), list[int]()
            loop.call_later(20, take(scene.hops[1], NEW - 12))
            loop.call_later(19, lambda: shown.append(len(scene.answers[0].token_ids)))
            known = [*PROMPTS[0], *bench.wanted["hot", 0]]
            drafter = Oracle(known, 3, lambda position: False, ahead=False)
            assert await scene.ask("hot", drafter=drafter) == bench.wanted["hot", 0]
            assert shown == [12]  # of 13

    bench.play(main)


@contextlib.asynccontextmanager
async def held(bench: Bench, monkeypatch: pytest.MonkeyPatch, **options: Any) -> Any:
    """A scene, and an event that is set when its request waits for room, which hop 1 does not have."""
    waits = asyncio.Event()
    plain = growth.Growth.more

    async def noting(self: growth.Growth, *known: Any) -> bool:
        waits.set()
        return await plain(self, *known)

    monkeypatch.setattr(growth.Growth, "more", noting)
    async with bench.scene(**options) as scene:
        host = scene.hops[1].hosts[0]
        give_back = take(scene.hops[1], host.engine.cache_tokens - FEW)
        yield scene, waits
        if scene.hops[1].transport.node not in scene.faults.trouble.dead | scene.faults.trouble.frozen:
            give_back()


@pytest.mark.parametrize("victim", [0, 1, 2])
@pytest.mark.parametrize("way", ["die", "freeze"])
def test_a_hop_is_lost_while_an_answer_waits(
    bench: Bench, victim: int, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is replaced at once, or where it does not answer after a while. Only where it was the full one the answer goes on."""

    async def main() -> None:
        async with held(bench, monkeypatch) as (scene, waits):
            asking = asyncio.create_task(scene.ask("hot"))
            await waits.wait()
            await asyncio.sleep(0.5)
            getattr(scene.faults, way)(scene.hops[victim])
            found, wanted = await asking, bench.wanted["hot", 0]
            assert found == (wanted if victim == 1 else wanted[: FEW - LENGTH + 1])
            assert len(scene.answers[0].repairs) == 1

    bench.play(main)


def test_a_client_leaves_while_its_answer_waits(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is left: the scene looks."""

    async def main() -> None:
        async with held(bench, monkeypatch) as (scene, waits):
            asking = asyncio.create_task(scene.ask("hot"))
            await waits.wait()
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)

    bench.play(main)


@pytest.mark.parametrize("stated", [0, 1, LENGTH, U32])
def test_what_a_hop_states_changes_no_text(bench: Bench, stated: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Less than it had, or more than it was asked for: the lease never shrinks, and is never more than was asked for. With
    no more than it had, or without an answer, it is replaced."""

    async def main() -> None:
        async with bench.scene(worker=WorkerConfig(cache_tokens=LENGTH + NEW)) as scene:
            misstate(scene, stated, monkeypatch)
            assert await scene.ask("hot") == bench.wanted["hot", 0]
            assert [repair.lost for repair in scene.answers[0].repairs] == ([] if stated == U32 else [("n1",)])

    bench.play(main)


def misstate(scene: Scene, stated: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hop 1 says that it has leased so many positions, whatever it has."""
    stating = scene.hops[1].transport.node
    sessions = scene.swarm.origin.node.requests
    plain = sessions._hand_on

    def told(message: Any, link: Link, take: Any) -> bool:
        if isinstance(message, Extended) and link.peer == stating:
            route = sessions.active[message.session].route
            take_told = lambda session: session.wake() if route.extended(replace(message, capacity=stated)) else None  # noqa: E731
            return plain(message, link, take_told)
        return plain(message, link, take)

    monkeypatch.setattr(sessions, "_hand_on", told)
