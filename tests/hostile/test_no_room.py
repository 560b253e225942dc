"""Hops that grant no more cache, truly or not, or a position now and then: where another node has room for the rest of the
answer it takes the place, and the text is the same."""

import asyncio
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from manyhands.core import EndsAt, PathKind, SessionId, Span
from manyhands.origin import growth
from manyhands.origin.node import FullNode
from manyhands.origin.room import FULL_S
from manyhands.testing.tiny import make_tiny
from manyhands.worker.serve import SpanHost
from tests.kill import NEW, PROMPTS, REQUEST, Bench, Scene, kept_models, request_of

LENGTH = len(PROMPTS[0])
FIRST = 5  # tokens for which a lease has room at first
FEW = LENGTH + FIRST


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    with kept_models() as models:
        yield Bench(make_tiny("qwen3", tmp_path_factory.mktemp("room") / "qwen3", seed=23), models)


@pytest.fixture(autouse=True)
def few_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(growth, "LEASE_TOKENS", FIRST)
    monkeypatch.setattr(growth, "AHEAD", 2)


def grants(node: FullNode, most: Callable[[int, float], int]) -> None:
    """A lease on the node is extended to no more than `most` of what it has and of the time."""
    (host,) = node.hosts
    leases = host.leases
    plain = leases.extend

    def extend(place: Any, positions: int, tokens: int, now: float) -> int:
        return plain(place, min(positions, most(leases._leased[place], now)), tokens, now)

    leases.extend = extend  # type: ignore[method-assign]


def in_turn(scene: Scene) -> list[FullNode]:
    """The spares as they are asked."""
    return sorted(scene.hops[3:], key=lambda node: node.transport.node)


def leave(host: SpanHost, positions: int, part: Span | None = None) -> Callable[[], None]:
    """No more than `positions` can be leased, on the layers of `part` (default: on any), until what is returned is called."""
    place = SessionId(bytes(16)), part or host.info.span
    host.leases.take(place, host.engine.cache_tokens - positions, host.engine.cache_tokens, None)
    return lambda: host.leases.give_back(place)


def nothing(leased: int, now: float) -> int:
    return leased


def drips(pause_s: float) -> Callable[[int, float], int]:
    """A position every `pause_s`, from when it is first asked."""
    due_s = 0.0

    def most(leased: int, now: float) -> int:
        nonlocal due_s
        if now < due_s:
            return leased
        due_s = now + pause_s
        return leased + 1

    return most


async def lost_of(bench: Bench, scene: Scene, **options: Any) -> list[tuple[str, ...]]:
    """What the repairs of an answer replaced, which went on to its end with the text that it should have."""
    assert await scene.ask("hot", **options) == bench.wanted["hot", 0]
    (answer,) = scene.answers
    assert answer.session is None or not answer.session.untrusted_nodes
    return [repair.lost for repair in answer.repairs]


async def ends_early(bench: Bench, scene: Scene, **options: Any) -> int:
    """How many tokens an answer has that ends for want of room."""
    found = await scene.ask("hot", **options)
    assert found == bench.wanted["hot", 0][: len(found)] and len(found) < NEW
    assert scene.answers[0].finish_reason == "length"
    return len(found)


@pytest.mark.parametrize("path", ["ring", "star"])
@pytest.mark.parametrize("ends", ["origin", "edges"])
@pytest.mark.parametrize("standby", [False, True])
@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_full_hop_is_replaced(bench: Bench, victim: int, standby: bool, ends: EndsAt, path: PathKind) -> None:
    async def main() -> None:
        async with bench.scene(ends=ends, request=replace(REQUEST, standby=standby)) as scene:
            grants(scene.hops[victim], nothing)
            assert await lost_of(bench, scene, path=path) == [(f"n{victim}",)]
            assert asyncio.get_running_loop().time() < FULL_S + 3

    bench.play(main)


@pytest.mark.parametrize("drafted", [False, True])
@pytest.mark.parametrize("victims", [(0, 1), (0, 2), (0, 1, 2)])
def test_several_full_hops_are_replaced_at_once(bench: Bench, victims: tuple[int, ...], drafted: bool) -> None:
    async def main() -> None:
        async with bench.scene() as scene:
            for victim in victims:
                grants(scene.hops[victim], nothing)
            options: dict[str, Any] = {"drafter": bench.half_right("hot", 0)} if drafted else {}
            assert await lost_of(bench, scene, **options) == [tuple(f"n{victim}" for victim in victims)]

    bench.play(main)


@pytest.mark.parametrize("path", ["ring", "star"])
@pytest.mark.parametrize("credits", [1, 2])
def test_a_full_first_hop_is_replaced_whose_text_takes_more_steps_than_its_credits(
    bench: Bench, credits: int, path: PathKind
) -> None:
    """The last token follows the text that is sent again. (It came before the end of it, for which no credits were left as the
    lease grew: the new hop, which called the origin faulty, was replaced, and the one after it ended the request.)"""

    async def main() -> None:
        async with bench.scene(request=replace(REQUEST, credits=credits, prefill_chunk=8)) as scene:
            grants(scene.hops[0], nothing)
            assert await lost_of(bench, scene, path=path) == [("n0",)]

    bench.play(main)


def test_no_hop_is_replaced_while_another_keeps_the_answer_from_going_on(bench: Bench) -> None:
    async def main() -> None:
        async with bench.scene(spares=["0-1"]) as scene:
            grants(scene.hops[0], nothing)
            grants(scene.hops[1], nothing)
            assert await ends_early(bench, scene) == FIRST + 1
            assert not scene.answers[0].repairs

    bench.play(main)


@pytest.mark.parametrize("is_roomy", [True, False])
def test_a_full_node_loses_all_its_places_or_none(bench: Bench, is_roomy: bool) -> None:
    """Two hops died, one node has taken both places, and has room in one of them alone; another has it for both, or one."""

    async def main() -> None:
        async with bench.scene(spares=["0-5", "0-5"]) as scene:

            def both_die() -> None:
                scene.faults.die(scene.hops[0])
                scene.faults.die(scene.hops[2])

            scene.faults.at("decode", scene.hops[0], both_die, 2)
            (host,), (other,) = (node.hosts for node in in_turn(scene))
            give_back = leave(other, LENGTH + NEW if is_roomy else FEW, Span(4, 6))
            plain = host.leases.extend

            def extend(place: Any, positions: int, tokens: int, now: float) -> int:
                most = host.leases._leased[place] if place[1].start == 0 else positions
                return plain(place, min(positions, most), tokens, now)

            host.leases.extend = extend  # type: ignore[method-assign]
            if is_roomy:
                first, second = await lost_of(bench, scene)
                assert sorted(first) == ["n0", "n2"] and len(second) == 2 and len(set(second)) == 1
                assert second[0] != scene.answers[0].repairs[1].replacement[0]
            else:
                await ends_early(bench, scene)
                assert len(scene.answers[0].repairs) == 1
            give_back()

    bench.play(main)


def test_a_node_with_room_for_one_session_takes_two_places_of_it(bench: Bench) -> None:
    """Room was counted for each place as if it held all layers of the node: a request ended for want of some."""

    async def main() -> None:
        async with bench.scene(spares=["0-5"]) as scene:

            def both_die() -> None:
                scene.faults.die(scene.hops[0])
                scene.faults.die(scene.hops[2])

            scene.faults.at("decode", scene.hops[0], both_die, 2)
            (host,) = scene.hops[3].hosts
            give_back = leave(host, LENGTH + NEW)
            await lost_of(bench, scene)
            (repair,) = scene.answers[0].repairs
            assert sorted(repair.lost) == ["n0", "n2"] and len(set(repair.replacement)) == 1 < len(repair.replacement)
            give_back()

    bench.play(main)


@pytest.mark.parametrize("pause_s", [2.5, 4.9, 9.0, 29.0])
def test_a_hop_that_drips_is_replaced(bench: Bench, pause_s: float) -> None:
    """Each position buys a second."""

    async def main() -> None:
        async with bench.scene() as scene:
            grants(scene.hops[1], drips(pause_s))
            assert await lost_of(bench, scene) == [("n1",)]
            assert asyncio.get_running_loop().time() < 4 * FULL_S

    bench.play(main)


def test_a_hop_that_drips_a_position_a_second_keeps_its_place(bench: Bench) -> None:
    async def main() -> None:
        async with bench.scene() as scene:
            grants(scene.hops[1], drips(1.0))
            assert await lost_of(bench, scene) == []

    bench.play(main)


@pytest.mark.parametrize(("most", "num_tokens"), [(nothing, 6), (drips(29.0), 8), (drips(15.0), 9)])
def test_a_full_hop_that_none_can_replace_is_waited_for(
    bench: Bench, most: Callable[[int, float], int], num_tokens: int
) -> None:
    """All together no longer than patience goes, and a second for each position."""

    async def main() -> None:
        async with bench.scene(spares=()) as scene:
            grants(scene.hops[1], most)
            assert await ends_early(bench, scene) == num_tokens
            assert not scene.answers[0].repairs
            assert 0 <= asyncio.get_running_loop().time() - REQUEST.patience_s < num_tokens + 1

    bench.play(main)


@pytest.mark.parametrize("late_s", [0.5 * FULL_S, FULL_S + 0.3])
def test_a_hop_that_finds_room_in_time_keeps_its_place(bench: Bench, late_s: float) -> None:
    """Also where others are sought already; and these give back what they had leased for it."""

    async def main() -> None:
        async with bench.scene() as scene:
            loop, (spare,) = asyncio.get_running_loop(), scene.hops[3].hosts
            grants(scene.hops[1], lambda leased, now: leased if now < late_s else leased + 2 * FIRST)
            scene.faults.delay(scene.swarm.origin.node, scene.hops[3], "control", 0.4)
            origin, leased = scene.swarm.origin, []
            answer = origin.answer(origin.request_ids(*request_of("hot", 0)))
            async for _ in origin.stream(answer, draft="off"):
                await asyncio.sleep(0.1)
                leased.append(spare.leases.leased_bytes)
            assert answer.token_ids == bench.wanted["hot", 0] and not answer.repairs
            assert loop.time() > late_s and not leased[-1]

    bench.play(main)


@pytest.mark.parametrize("free_at", [5.0, 12.0, math.inf])
def test_a_spare_that_is_full_itself_is_asked_again(bench: Bench, free_at: float) -> None:
    """Until it has room, or patience has ended: no place is given up before."""

    async def main() -> None:
        async with bench.scene() as scene:
            grants(scene.hops[1], nothing)
            give_back = leave(scene.hops[3].hosts[0], FEW)
            if free_at < math.inf:
                asyncio.get_running_loop().call_later(free_at, give_back)
                assert await lost_of(bench, scene) == [("n1",)]
            else:
                assert await ends_early(bench, scene) == FIRST + 1 and not scene.answers[0].repairs
                give_back()

    bench.play(main)


async def never(opening: Any, successor: Any) -> None:
    await asyncio.sleep(math.inf)


@pytest.mark.parametrize("num_spares", [1, 2])
def test_a_spare_that_does_not_answer_keeps_no_other_from_the_place(bench: Bench, num_spares: int) -> None:
    """Without another no place is given up."""

    async def main() -> None:
        async with bench.scene(spares=["2-3"] * num_spares) as scene:
            grants(scene.hops[1], nothing)
            in_turn(scene)[0].hosts[0].open = never  # type: ignore[method-assign]
            if num_spares > 1:
                assert await lost_of(bench, scene) == [("n1",)]
            else:
                assert await ends_early(bench, scene) == FIRST + 1 and not scene.answers[0].repairs

    bench.play(main)


@pytest.mark.parametrize("max_repairs", [0, 1, 2])
def test_as_many_nodes_may_lie_as_there_are_repairs(bench: Bench, max_repairs: int) -> None:
    """Each says as a standby that it has room, and has none as a hop. The answer ends as at its limit, and is not given up."""

    async def main() -> None:
        request = replace(REQUEST, max_repairs=max_repairs)
        async with bench.scene(spares=["2-3"] * 5, request=request) as scene:
            grants(scene.hops[1], nothing)
            for node in scene.hops[3:]:
                boast(node)
            assert await ends_early(bench, scene) == FIRST + 1
            assert len(scene.answers[0].repairs) == max_repairs + 1

    bench.play(main)


def boast(node: FullNode) -> None:
    """It takes any lease, and in a second place of a session, or asked for more, it says that it has the first one's."""
    (host,) = node.hosts
    leases = host.leases
    leases.extend = lambda place, positions, tokens, now: FEW  # type: ignore[method-assign]


def test_a_hop_that_was_full_may_come_back(bench: Bench) -> None:
    """It has room again when the one that took its place has none, nor another, which could take the place as it is."""

    async def main() -> None:
        async with bench.scene(spares=["2-3", "2-3"]) as scene:
            taker, other = in_turn(scene)
            give_back = leave(other.hosts[0], FEW + FIRST)
            is_free = False

            def most(leased: int, now: float) -> int:
                return leased + FIRST if is_free else leased

            def free(leased: int, now: float) -> int:
                nonlocal is_free
                is_free = True
                return leased

            grants(scene.hops[1], most)
            grants(taker, free)
            assert await lost_of(bench, scene) == [("n1",), (taker.name,)]
            assert scene.answers[0].repairs[1].replacement == ("n1",)
            give_back()

    bench.play(main)
