"""A member whose loads fail: it keeps what it serves, leaves the layers to others, and tries again later. In virtual time."""

import asyncio
from typing import Any

from manyhands.core import Span
from manyhands.errors import DeviceLost, ModelError
from manyhands.member.backoff import Backoff
from manyhands.member.gaps import LayerGaps
from manyhands.member.hosting import Hosting
from tests.member.members import Play, Town, spans
from tests.member.requests import until
from tests.swarm.records import key_of


class Failing:
    """In place of the worker's `host`: fails with `error`, and notes when it was asked for which layers."""

    def __init__(self, hosting: Hosting, error: Exception) -> None:
        self.error, self.asked, self.at_s = error, list[Span](), list[float]()
        self._host = hosting.member.node.worker.host
        self.is_over = False
        hosting.member.node.worker.host = self  # type: ignore[method-assign]

    async def __call__(self, folder: Any, span: Span, *rest: Any, **options: Any) -> Any:
        self.asked.append(span)
        self.at_s.append(asyncio.get_running_loop().time())
        if self.is_over:
            return await self._host(folder, span, *rest, **options)
        raise self.error

    @property
    def pauses_s(self) -> list[float]:
        return [later - earlier for earlier, later in zip(self.at_s, self.at_s[1:], strict=False)]


async def halves(place: Town, *numbers: int, **changes: Any) -> list[Hosting]:
    """n0, which is told to serve 0-1, and others with room for all that serve 2-3; `changes` are of the last one."""
    first = await place.host(0, span=Span(0, 2))
    others = [await place.host(i, **(changes if i == numbers[-1] else {})) for i in numbers]
    for hosting in others:
        await hosting.move(Span(2, 4), "for this test", is_forced=True)
    wanted = {"n0": ["0-1"]} | {f"n{i}": ["2-3"] for i in numbers}
    await until(lambda: all(spans(hosting.member) == wanted for hosting in (first, *others)))
    return [first, *others]


def test_a_gap_that_one_member_cannot_load_is_filled_by_another(play: Play) -> None:
    """The one that fails is the first to see it, and has the lower id: its claim has precedence, each time."""

    async def scene(place: Town) -> None:
        first, failing, able = await halves(place, *sorted((1, 2), key=lambda i: key_of(i).node_id), gap_s=4.0)
        attempts = Failing(failing, ModelError("disk full"))
        place.faults.die(first.member.node)
        await until(lambda: spans(able.member).get(able.member.config.name) == ["0-1", "2-3"])
        assert attempts.asked == [Span(0, 2)]

    play(scene)


def test_who_fails_tries_again_after_pauses_that_grow_until_it_succeeds(play: Play) -> None:
    async def scene(place: Town) -> None:
        first, only = await halves(place, 1)
        attempts = Failing(only, ModelError("disk full"))
        place.faults.die(first.member.node)
        await until(lambda: len(attempts.at_s) == 4, 60)
        assert all(least_s <= s < least_s + 1.5 for least_s, s in zip([5, 10, 20], attempts.pauses_s, strict=True))
        attempts.is_over = True
        await until(lambda: spans(only.member) == {"n1": ["0-1", "2-3"]}, 60)
        assert place.said.count("layers could not be moved: disk full") == 4

    play(scene)


def test_nothing_is_loaded_on_a_device_that_is_lost(play: Play) -> None:
    async def scene(place: Town) -> None:
        first, only = await halves(place, 1)
        attempts = Failing(only, DeviceLost("an illegal memory access"))
        place.faults.die(first.member.node)
        await until(lambda: bool(attempts.at_s))
        await asyncio.sleep(30.0)
        assert len(attempts.at_s) == 1 and not only.member.claims

    play(scene)


def test_pauses_double_to_a_limit_and_begin_anew_after_a_success() -> None:
    backoff, now, pauses = Backoff(5.0), 0.0, []
    for _ in range(8):
        backoff.failed(now)
        pauses.append(next(pause for pause in range(1000) if backoff.is_over(now + pause)))
        now += pauses[-1]
    assert pauses == [5, 10, 20, 40, 80, 160, 300, 300]
    backoff.succeeded()
    assert backoff.is_over(now)
    backoff.failed(now)
    assert not backoff.is_over(now + 4.9) and backoff.is_over(now + 5.0)


def test_a_gap_lasts_by_its_own_layers_and_a_claim_only_postpones() -> None:
    gaps, low, high = LayerGaps(), Span(0, 2), Span(3, 5)
    assert gaps.first_lasting([low], [low], 0.0, 3.0) is None
    assert gaps.first_lasting([low], [low], 4.0, 3.0) is None, "claimed"
    assert gaps.first_lasting([low, high], [low], 4.5, 3.0) is None, "the other gap is new"
    assert gaps.first_lasting([low, high], [], 5.0, 3.0) == low
    assert gaps.first_lasting([low, high], [low], 7.5, 3.0) == high
    assert gaps.first_lasting([high], [], 8.0, 3.0) == high
    assert gaps.first_lasting([low, high], [high], 8.5, 3.0) is None, "served meanwhile"
