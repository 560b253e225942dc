"""A hop of a running session that answers before its rows came, or sends on steps that were never sent to it: it loses its
place, and no honest hop does."""

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from manyhands.core import ORIGIN_HOP
from manyhands.errors import AnsweredEarly, ProtocolError, ShardUnavailable
from manyhands.net.transport import Link, try_send
from manyhands.origin.probe import misleading
from manyhands.testing.faulty_device import SlowDevice
from manyhands.testing.tiny import make_tiny
from manyhands.wire.message import Progress, Step
from manyhands.worker.session import HopSession
from tests.kill import REQUEST, Bench, Scene, kept_models
from tests.worker.hop import session_id

SPARES = ["0-1", "2-3", "4-5"]


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    with kept_models() as models:
        yield Bench(make_tiny("qwen3", tmp_path_factory.mktemp("wrong") / "qwen3", seed=21), models)


def attack(bench: Bench, begin: Callable[[Scene], list[Any]], lost: str, *, same_text: bool) -> None:
    """`begin` makes a hop of the first route hostile, and returns what it does. That hop alone loses its place, once."""

    async def main() -> None:
        async with bench.scene(spares=SPARES) as scene:
            done = begin(scene)
            tokens = await scene.ask("hot", drafter=bench.half_right("hot", 0))
            answer = scene.answers[0]
            assert done, "the attack was not made"
            assert [name for repair in answer.repairs for name in repair.lost] == [lost], answer.repairs
            assert len(tokens) == len(bench.wanted["hot", 0])
            assert not same_text or tokens == bench.wanted["hot", 0]

    bench.play(main)


def slow(scene: Scene, index: int, seconds: float = 0.05) -> None:
    """Steps of a hop take so long."""
    engine = scene.hops[index].hosts[0].engine
    engine.device = SlowDevice(engine.device, seconds)  # type: ignore[assignment]


@pytest.mark.parametrize("slow_hops", [[0], [1], [0, 1]], ids=str)
def test_a_last_hop_that_answers_before_its_rows_come_is_replaced_and_no_other(
    bench: Bench, slow_hops: list[int]
) -> None:
    """Rows that it had before, for a window that is still with the hops before it. Those had not computed what the origin took
    for computed, and blamed each other, or the origin: they were replaced, and two of the latter ended the request.
    """

    def begin(scene: Scene) -> list[Any]:
        for index in slow_hops:
            slow(scene, index)
        (host,) = scene.hops[2].hosts
        (first,) = scene.hops[0].hosts
        made, rows = list[Step](), list[Step]()
        plain_deliver, plain_step = HopSession.addressed, first.step

        def addressed(place: HopSession, done: Step, *args: Any) -> Step:
            step = plain_deliver(place, done, *args)
            if place.is_last and step.payload is not None and not made:
                rows.append(step)
            return step

        def early(session: HopSession, step: Step, link: Link) -> None:
            """A window has come to hop 0: the last hop answers it at once, if it has a row that can be."""
            plain_step(session, step, link)
            if rows and step.count > 1 and not made:
                (place,) = host._places.values()
                plain, count = rows[-1], rows[-1].count
                assert plain.payload is not None
                row = bytes(plain.payload.data)[: len(plain.payload.data) // count] * step.count
                forged = plain._replace(
                    position=step.position, count=step.count, guess=step.guess, payload=plain.payload._replace(data=row)
                )
                made.append(forged)
                try_send(place.successor, forged)

        HopSession.addressed = addressed  # type: ignore[method-assign, assignment]
        first.step = early  # type: ignore[method-assign]
        return made

    plain = HopSession.addressed
    try:
        attack(bench, begin, "n2", same_text=False)
    finally:
        HopSession.addressed = plain  # type: ignore[method-assign]


def another_guess(step: Step, begins: bool, before: Step) -> list[Step]:
    """Under a number that the origin has not come to: all that follows is of an older one."""
    return [step._replace(guess=step.guess + 1000)]


def rows_more(step: Step, begins: bool, before: Step) -> list[Step]:
    """Behind the step others, the last of them of rows that the origin has not sent by then, however fast it is."""
    return [step._replace(position=step.position + step.count * i) for i in range(9)]


def repeated(step: Step, begins: bool, before: Step) -> list[Step]:
    """Within a guess, the rows that were sent before in place of those that are due."""
    return [step] if begins else [before._replace(guess=step.guess)]


def elsewhere(by: int) -> Callable[[Step, bool, Step], list[Step]]:
    """A guess begins at another position."""
    return lambda step, begins, before: [step._replace(position=step.position + by)] if begins else [step]


WAYS = {
    "another guess": another_guess,
    "rows more": rows_more,
    "repeated": repeated,
    "before": elsewhere(-3),
    "behind": elsewhere(3),
}


@pytest.mark.parametrize("sender", [0, 1])
@pytest.mark.parametrize("is_ahead", [False, True], ids=["retracts come first", "steps come first"])
@pytest.mark.parametrize("way", list(WAYS))
def test_a_hop_that_makes_up_steps_is_replaced_and_no_other(
    bench: Bench, way: str, is_ahead: bool, sender: int
) -> None:
    """From the fifth window on. The hops behind it took what came for steps of the origin, and the last of them lost its place
    for rows that were not due, or was taken for slow.
    (Where the origin has sent as far, or its Retract comes late, they are taken for wrong numbers until then.)
    """

    def begin(scene: Scene) -> list[Any]:
        (host,) = scene.hops[sender].hosts
        made, seen = list[Step](), list[Step]()

        def forge(place: HopSession) -> None:
            send, place.retract = place._send_on, lambda guess, position: None  # type: ignore[method-assign]

            def send_on(step: Step) -> None:
                begins = bool(seen) and step.guess > seen[-1].guess
                seen.append(step)
                steps = WAYS[way](step, begins, seen[-2]) if len(seen) > 5 and step.hop != ORIGIN_HOP else [step]
                if steps != [step]:
                    made.extend(steps)
                for each in steps:
                    send(each)

            place._send_on = send_on  # type: ignore[method-assign]

        put = host._places.put

        def putting(where: Any, place: HopSession) -> None:
            put(where, place)
            if place.opened.epoch == 1:
                forge(place)

        host._places.put = putting  # type: ignore[method-assign, assignment]
        if is_ahead:
            for hop in scene.hops[1:3]:
                scene.faults.delay(scene.swarm.origin.node, hop, "control", 0.03)
        return made

    attack(
        bench,
        begin,
        f"n{sender}",
        same_text=way in ("another guess", "repeated", "behind") or (way == "before" and not is_ahead),
    )


@pytest.mark.parametrize("code", [ProtocolError.code, AnsweredEarly.code])
@pytest.mark.parametrize("spares", [["0-5", "0-5"], ["0-5"]], ids=["another", "no other"])
def test_a_hop_that_doubts_what_comes_as_soon_as_it_has_its_place_holds_no_repair_up(
    bench: Bench, spares: list[str], code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first that takes a lost hop's place, in each epoch before the others have theirs. (It was told of its place anew for
    ever.)"""
    told, plain = list[HopSession](), HopSession.answer_open

    def answer_open(place: HopSession, *args: Any, **options: Any) -> None:
        plain(place, *args, **options)
        if place.opened.epoch > 1 and place.opened.hop == 1 and place in [*told, place][:1]:
            told.append(place)
            place.fault(code, "it cannot be", None if code == AnsweredEarly.code else 0)

    async def main() -> None:
        async with bench.scene(spares=spares) as scene:
            monkeypatch.setattr(HopSession, "answer_open", answer_open)
            scene.faults.at("decode", scene.hops[1], lambda: scene.faults.die(scene.hops[1]), 5)
            if len(spares) > 1:
                assert await scene.ask("hot") == bench.wanted["hot", 0]
            else:
                with pytest.raises(ShardUnavailable):
                    await scene.ask("hot")
            assert 2 < len(told) < 200 and asyncio.get_running_loop().time() < REQUEST.patience_s + 10

    bench.play(main)


def test_who_misleads_is_before_the_first_that_was_misled() -> None:
    def said(*each: tuple[int, int] | None) -> dict[int, Progress]:
        return {
            hop: Progress(session_id(1), 1, hop, one[1], 0, one[0]) for hop, one in enumerate(each) if one is not None
        }

    assert misleading(said((2, 9), (2, 10), (1, 99), (0, 99)), 2, 10) is None, "older guesses went further"
    assert misleading(said((2, 9), (2, 10), (2, 11), (3, 0)), 2, 10) == 1
    assert misleading(said((2, 9), (3, 0), (3, 0)), 2, 10) == 0
    assert misleading(said((3, 0), (3, 0)), 2, 10) == 0, "the origin sent it nothing of that"
    assert misleading(said(None, None, (3, 0)), 2, 10) == 1 and misleading({}, 0, 0) is None
