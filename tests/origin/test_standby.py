"""Standbys in a whole swarm, under the virtual clock: they follow, are promoted, and the text is what it would have been."""

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, cast

import pytest

from manyhands.config import RequestConfig, WorkerConfig
from manyhands.core import EndsAt, PathKind, Span
from manyhands.errors import StateGone
from manyhands.net.transport import Link, try_send
from manyhands.origin.repair_plan import Slot
from manyhands.origin.route import Route
from manyhands.origin.standby_search import FEED_ROWS, LOOK_AGAIN_ROWS
from manyhands.testing.tiny import make_tiny
from manyhands.testing.trouble import Phase
from manyhands.wire.message import Close, Open, Opened, Step
from manyhands.worker.execute import Result, SpanModel, Work
from manyhands.worker.session import HopSession
from tests.kill import REQUEST, Bench, kept_models, request_of
from tests.worker.hop import ORIGIN, Notes, opening, session_id

FOLLOWED = replace(REQUEST, standby=True)


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    with kept_models() as models:
        yield Bench(make_tiny("qwen3", tmp_path_factory.mktemp("standby") / "qwen3", seed=21), models)


def watch(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """(replay_from, replay_until) of every Open that asks for a replay."""
    seen: list[tuple[int, int]] = []
    plain = Route.open_message

    def noting(self: Route, index: int, slot: Slot, control: Link) -> Open:
        message = plain(self, index, slot, control)
        if message.replay_until:
            seen.append((message.replay_from, message.replay_until))
        return message

    monkeypatch.setattr(Route, "open_message", noting)
    return seen


@pytest.mark.parametrize(
    ("ends", "path"), [("origin", "ring"), ("edges", "ring"), ("origin", "star"), ("edges", "star")]
)
@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_standby_takes_over(
    bench: Bench, victim: int, ends: EndsAt, path: PathKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One spare follows all three hops. The hop before the lost one re-sends the rows since the last feed, no more."""

    async def main() -> None:
        async with bench.scene(request=FOLLOWED, ends=ends) as scene:
            replays = watch(monkeypatch)
            node = scene.hops[victim]
            scene.faults.slow(scene.hops[0], 0.01)  # the clock waits for the standby's thread before each decode step
            scene.faults.at("decode", node, lambda: scene.faults.die(node), 20)
            assert await scene.ask("hot", path=path) == bench.wanted["hot", 0]
            (repair,) = scene.answers[0].repairs
            assert repair.replacement == ("n3",)
            spans = [(start, until) for start, until in replays if until - start <= 2 * FEED_ROWS]
            assert spans == replays and len(spans) == (victim > 0)
            assert all(start > 0 for start, _ in spans)

    bench.play(main)


def test_a_standby_does_not_keep_its_node_from_taking_more(bench: Bench) -> None:
    """The spare, full with a standby of one hop, takes the layers of two that die at once. (It refused them as full for as long
    as the request had patience, and kept the standby.)"""

    async def main() -> None:
        async with bench.scene(request=FOLLOWED, worker=WorkerConfig(max_sessions=1)) as scene:
            scene.faults.slow(scene.hops[0], 0.01)

            def die() -> None:
                assert len(scene.hops[3].hosts[0]._places) == 1
                for victim in scene.hops[:2]:
                    scene.faults.die(victim)

            scene.faults.at("decode", scene.hops[0], die, 20)
            assert await scene.ask("hot") == bench.wanted["hot", 0]
            (repair,) = scene.answers[0].repairs
            assert repair.lost == ("n0", "n1") and repair.replacement == ("n3",)

    bench.play(main)


def test_a_standby_that_opens_again_and_again_is_fed_once(bench: Bench) -> None:
    """It says that it has nothing after each feed. (The hop before it sent all that is committed anew with each window.)"""

    async def main() -> None:
        async with bench.scene(request=FOLLOWED) as scene:
            scene.faults.slow(scene.hops[0], 0.01)
            (host,), fed = scene.hops[3].hosts, list[int]()
            taken = host.step

            def again(session: HopSession, step: Step, link: Link) -> None:
                fed.append(step.count)
                taken(session, step, link)
                opened = session.opened
                for _ in range(3):
                    said = Opened(opened.session, opened.epoch, opened.hop, "it", has_log=True, cached=0)
                    try_send(session.origin, said)

            host.step = again  # type: ignore[method-assign]
            assert await scene.ask("hot") == bench.wanted["hot", 0] and not scene.answers[0].repairs
            most = len(request_of("hot", 0)[0]) + len(bench.wanted["hot", 0])
            assert 0 < sum(fed) <= 3 * most, "three places"

    bench.play(main)


@pytest.mark.parametrize("phase", ["opening", "prefill", "decode", "window"])
@pytest.mark.parametrize("number", range(4))
def test_anything_may_die_while_standbys_follow(bench: Bench, phase: Phase, number: int) -> None:
    """A hop, the standby itself, a hop and then its promoted standby; three requests, drafts and wrong drafts."""

    async def main() -> None:
        async with bench.scene(spares=["0-5", "0-5"], request=FOLLOWED) as scene:
            nodes = [scene.hops[i] for i in ((1,), (3,), (1, 3), (2, 0))[number]]
            scene.faults.at(phase, nodes[0], lambda: scene.faults.die(nodes[0]), 6)
            if len(nodes) > 1:
                scene.faults.at("decode", nodes[1], lambda: scene.faults.die(nodes[1]), 3)
            path = "star" if (number + len(phase)) % 2 else "ring"  # over all phases everything dies on both
            drafters = [{"drafter": bench.half_right("hot", n)} if phase == "window" else {} for n in range(3)]
            got = await asyncio.gather(*(scene.ask("hot", n, path=path, **drafters[n]) for n in range(3)))
            assert got == [bench.wanted["hot", n] for n in range(3)]

    bench.play(main)


def test_a_standby_that_hears_of_its_promotion_late_gets_what_the_one_before_it_sends(bench: Bench) -> None:
    """Two hops in a row are lost; the first one's standby has more than the second's, and sends it that. (It did so before the
    other had its place, lost its own for the gap, and was not trusted any more.)"""

    async def main() -> None:
        async with bench.scene(spares=["2-3", "4-5", "0-5"], request=FOLLOWED) as scene:
            scene.faults.slow(scene.hops[0], 0.01)
            origin, lost, known = scene.swarm.origin.node, scene.hops[1:3], list[tuple[int, int]]()

            def lose() -> None:
                (session,) = origin.sessions.values()
                first, second = (session.standbys.by_span[span].computed for span in (Span(2, 4), Span(4, 6)))
                known.append((second, first))
                scene.faults.delay(origin, scene.hops[4], "control", 0.2)
                for node in lost:
                    scene.faults.die(node)

            scene.faults.at("decode", lost[0], lambda: scene.faults.cut(scene.hops[1], scene.hops[4]), 6)
            scene.faults.at("decode", lost[0], lose, 20)
            assert await scene.ask("hot") == bench.wanted["hot", 0]
            ((second, first),) = known
            assert 0 < second < first
            (repair,) = scene.answers[0].repairs
            assert repair.replacement == ("n3", "n4")

    bench.play(main)


def test_a_session_without_logs_has_standbys_that_never_catch_up(bench: Bench) -> None:
    """log_bytes 0: nothing can be fed to them (but the first hop's); repairs go the long way, and the text is the same."""

    async def main() -> None:
        async with bench.scene(request=FOLLOWED, worker=WorkerConfig(log_bytes=0)) as scene:
            node = scene.hops[1]
            scene.faults.at("decode", node, lambda: scene.faults.die(node), 12)
            assert await scene.ask("greedy") == bench.wanted["greedy", 0]
            assert scene.answers[0].repairs[0].replacement == ("n3",)

    bench.play(main)


@pytest.mark.parametrize("path", ["ring", "star"])
def test_what_a_hop_computes_again_is_not_taken_for_its_standby_s(bench: Bench, path: PathKind) -> None:
    """Hop 1 has lost its log, so when hop 2 dies, which has no standby, it gets all positions once more.

    Its own standby follows on meanwhile (in a star the origin sends on both). That is right in the end, for it takes over.
    """

    async def main() -> None:
        async with bench.scene(spares=["2-3", "4-5"], request=FOLLOWED) as scene:
            spare = scene.hops[4].hosts[0]
            room, spare.engine.cache_tokens = spare.engine.cache_tokens, 10

            def lose() -> None:
                spare.engine.cache_tokens = room
                for place in scene.hops[1].hosts[0]._places.values():
                    place.log.drop()
                scene.faults.die(scene.hops[2])

            scene.faults.at("decode", scene.hops[2], lose, 10)
            scene.faults.at("any", scene.hops[4], lambda: scene.faults.die(scene.hops[1]), 9)
            assert await scene.ask("hot", path=path) == bench.wanted["hot", 0]
            assert [(r.lost, r.replacement) for r in scene.answers[0].repairs] == [
                (("n2",), ("n4",)),
                (("n1",), ("n3",)),
            ]

    bench.play(main)


def test_a_full_spare_is_no_standby_and_no_trouble(bench: Bench) -> None:
    """It says Busy; the request does not hear of it."""

    async def main() -> None:
        async with bench.scene(request=FOLLOWED) as scene:
            scene.hops[3].hosts[0].engine.cache_tokens = 10
            assert await scene.ask("greedy") == bench.wanted["greedy", 0]
            assert not scene.answers[0].events
            assert scene.hops[3].hosts[0].engine.rows_run == 0
            scene.hops[3].hosts[0].engine.cache_tokens = scene.hops[3].worker.config.cache_tokens

    bench.play(main)


@pytest.mark.parametrize("spares", [["2-3"], ["2-3", "2-3"]])
def test_who_was_full_is_asked_again_after_the_others(bench: Bench, spares: list[str]) -> None:
    """n3 has a session of another origin when the stream begins. Where there is n4, that is asked at the next look."""

    async def main() -> None:
        config = WorkerConfig(max_sessions=1)
        async with bench.scene(spares=spares, request=replace(FOLLOWED, draft="off"), worker=config) as scene:
            first, last = scene.hops[3].hosts[0], scene.hops[-1].hosts[0]
            room = last.engine.cache_tokens
            last.engine.cache_tokens = room if first is last else room // 2  # so that n3 is asked first
            first.reserve(opening(1, model=first.info.model), cast(Link, Notes(ORIGIN)))
            scene.faults.at("decode", scene.hops[0], lambda: first.close(Close(session_id(1)), ORIGIN), 20)
            prompt, params = request_of("greedy", 0)
            asked = scene.swarm.origin.request_ids(prompt, replace(params, max_tokens=2 * LOOK_AGAIN_ROWS))
            async for _ in scene.swarm.origin.stream(scene.swarm.origin.answer(asked)):
                await asyncio.sleep(0.001)  # standbys' steps are waited for
            assert last.engine.rows_run >= LOOK_AGAIN_ROWS and (first is last or not first.engine.rows_run)
            last.engine.cache_tokens = room

    bench.play(main)


class FailsOnce:
    """A SpanModel whose first steps fail."""

    def __init__(self, plain: SpanModel) -> None:
        self._plain, self.has_failed = plain, False

    def run(self, works: Sequence[Work]) -> list[Result | Exception]:
        if self.has_failed:
            return self._plain.run(works)
        self.has_failed = True
        return [MemoryError() for _ in works]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._plain, name)


def test_where_one_standby_fails_others_on_its_node_are_replaced_too(bench: Bench) -> None:
    """n3 stands by for every hop; a step that fails ends all that the session has there, and n4 takes its place."""

    async def main() -> None:
        async with bench.scene(spares=["0-5", "0-5"], request=replace(FOLLOWED, draft="off")) as scene:
            third, fourth = scene.hops[3].hosts[0], scene.hops[4].hosts[0]
            room, fourth.engine.cache_tokens = fourth.engine.cache_tokens, fourth.engine.cache_tokens // 2
            model = FailsOnce(cast(SpanModel, third.engine.model))
            third.engine.model = cast(SpanModel, model)
            prompt, params = request_of("greedy", 0)
            asked = scene.swarm.origin.request_ids(prompt, replace(params, max_tokens=2 * LOOK_AGAIN_ROWS))
            async for _ in scene.swarm.origin.stream(scene.swarm.origin.answer(asked)):
                places = len(fourth._places)
                await asyncio.sleep(0.001)  # standbys' steps are waited for
            assert model.has_failed and places == 3
            fourth.engine.cache_tokens = room

    bench.play(main)


class NeverGoesBack:
    """A SpanModel that says of each step that it begins at a position that is gone."""

    def __init__(self, plain: SpanModel) -> None:
        self._plain, self.num_steps = plain, 0

    def run(self, works: Sequence[Work]) -> list[Result | Exception]:
        self.num_steps += 1
        return [StateGone("so it is") for _ in works]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._plain, name)


def test_a_standby_that_cannot_go_back_is_asked_again_after_the_others(bench: Bench) -> None:
    """n3 has most room and was asked first at each look, and fed all that the session had: n4 never stood by."""

    async def main() -> None:
        async with bench.scene(spares=["2-3", "2-3"], request=replace(FOLLOWED, draft="off")) as scene:
            third, fourth = scene.hops[3].hosts[0], scene.hops[4].hosts[0]
            room, fourth.engine.cache_tokens = fourth.engine.cache_tokens, fourth.engine.cache_tokens // 2
            plain = cast(SpanModel, third.engine.model)
            model = NeverGoesBack(plain)
            third.engine.model = cast(SpanModel, model)
            prompt, params = request_of("greedy", 0)
            asked = scene.swarm.origin.request_ids(prompt, replace(params, max_tokens=2 * LOOK_AGAIN_ROWS))
            async for _ in scene.swarm.origin.stream(scene.swarm.origin.answer(asked)):
                places = len(fourth._places)
                await asyncio.sleep(0.001)  # standbys' steps are waited for
            assert model.num_steps == 1 and places == 1
            third.engine.model, fourth.engine.cache_tokens = plain, room

    bench.play(main)


def test_a_standby_that_cannot_reach_the_next_hop_makes_room_for_another(bench: Bench) -> None:
    """n3 has the most room, but cannot dial n2, which takes its Open 10 s to find out."""

    async def main() -> None:
        async with bench.scene(spares=["2-3", "2-3"], request=replace(FOLLOWED, draft="off")) as scene:
            scene.faults.cut(scene.hops[3], scene.hops[2])
            scene.faults.slow(scene.hops[0], 0.5)
            second = scene.hops[4].hosts[0]
            room, second.engine.cache_tokens = second.engine.cache_tokens, second.engine.cache_tokens // 2
            prompt, params = request_of("greedy", 0)
            answer = scene.swarm.origin.answer(
                scene.swarm.origin.request_ids(prompt, replace(params, max_tokens=2 * LOOK_AGAIN_ROWS))
            )
            async for _ in scene.swarm.origin.stream(answer):
                pass
            assert not answer.repairs
            assert scene.hops[3].hosts[0].engine.rows_run == 0 and second.engine.rows_run >= LOOK_AGAIN_ROWS
            second.engine.cache_tokens = room

    bench.play(main)


def test_a_standby_whose_data_link_alone_breaks_is_told_to_free_its_place(bench: Bench) -> None:
    """Nothing else ends it there, as its control link stands: the scene ends only when no node holds a lease."""

    async def main() -> None:
        async with bench.scene(request=FOLLOWED) as scene:
            link = scene.swarm.origin.node.pool.find
            (standby,), broken = scene.hops[3].hosts, []

            def break_data() -> None:
                data = link(scene.hops[3].transport.node, "data")
                assert data is not None and standby.num_sessions
                broken.append(asyncio.ensure_future(data.aclose()))

            scene.faults.at("decode", scene.hops[1], break_data, 20)
            assert await scene.ask("greedy", path="star") == bench.wanted["greedy", 0]
            await broken[0]
            assert link(scene.hops[3].transport.node, "control") is not None and not scene.answers[0].repairs

    bench.play(main)


def test_a_ring_that_becomes_a_star_keeps_no_standby_that_it_cannot_feed(bench: Bench) -> None:
    """n3 stands by for hops 0 and 1. Hop 1 cannot reach n4, which takes the place of hop 2: rows go by way of the origin,
    which has a data link to n3, but had none for what hop 1's standby gets. (What came for it stopped the origin's node.)"""

    async def main() -> None:
        request = replace(FOLLOWED, draft="off")
        async with bench.scene(spares=["0-3", "4-5"], request=request) as scene:
            scene.faults.slow(scene.hops[0], 0.01)
            scene.faults.cut(scene.hops[1], scene.hops[4])
            scene.faults.at("decode", scene.hops[2], lambda: scene.faults.die(scene.hops[2]), 6)
            assert await scene.ask("hot") == bench.wanted["hot", 0]
            (answer,) = scene.answers
            assert answer.routing.is_star and [repair.replacement for repair in answer.repairs] == [("n4",)]

    bench.play(main)


def test_standbys_are_off_unless_asked_for(bench: Bench) -> None:
    async def main() -> None:
        async with bench.scene() as scene:
            await scene.ask("greedy")
            assert scene.hops[3].hosts[0].engine.rows_run == 0

    bench.play(main)
    assert not RequestConfig().standby
