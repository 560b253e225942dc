"""A member whose loads fail: it keeps what it serves, leaves the layers to others, and tries again later. In virtual time."""

import asyncio
import errno
import math
from pathlib import Path
from typing import Any

import pytest

from manyhands.checkpoint.manifest import Silent
from manyhands.core import Span
from manyhands.errors import Conflict, DeviceLost, ModelError, ShardUnavailable
from manyhands.member.backoff import Backoff
from manyhands.member.gaps import LayerGaps
from manyhands.member.hosting import Hosting
from manyhands.member.taken import TakenSpans
from manyhands.member.weights import weights_of
from manyhands.worker.serve import SpanHost
from tests.member.members import Play, Town, room_for, spans
from tests.member.requests import until
from tests.swarm.records import key_of
from tests.waiting import EndlessLoad


class Failing:
    """In place of the worker's `host`: fails with `error`, at most so often, and notes when it was asked for which layers."""

    def __init__(self, hosting: Hosting, error: Exception, most: int = 1000) -> None:
        self.error, self.asked, self.at_s, self.most = error, list[Span](), list[float](), most
        self._host = hosting.member.node.worker.host
        hosting.member.node.worker.host = self  # type: ignore[method-assign]

    async def __call__(self, folder: Any, span: Span, *rest: Any, **options: Any) -> Any:
        self.asked.append(span)
        self.at_s.append(asyncio.get_running_loop().time())
        if len(self.asked) > self.most:
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


async def order(hosting: Hosting, layers: Span) -> str:
    """What a member answers to an order of its own operator."""
    link = await hosting.member.node.pool.get(hosting.member.addresses[0], "control")
    model, precision = hosting.kind.model, hosting.kind.precision
    return await hosting.member.node.orders.ask(link, model, precision, layers, is_forced=False)


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
        attempts.most = 0
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
        with pytest.raises(Conflict, match="the device of n1 computes no more: start it anew"):
            await order(only, Span(0, 4))

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


# -- what the machine refuses -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (
            OSError(errno.EROFS, "Read-only file system", "/models/x"),
            "/models/x: Read-only file system; name another place",
        ),
        (MemoryError(), "no memory: this process may have"),
        (ExceptionGroup("", [OSError(errno.EIO, "Input/output error", "/models/x")]), "/models/x: Input/output error"),
    ],
)
def test_what_the_machine_refuses_ends_no_node(play: Play, error: Exception, line: str) -> None:
    """Neither where a gap is filled nor where an operator moves it: one line says why, and it serves what it served."""

    async def scene(place: Town) -> None:
        first, only = await halves(place, 1)
        attempts = Failing(only, error, 2)
        assert await order(only, Span(1, 4)) == "moves to layers 1-3"
        await until(lambda: len(attempts.asked) == 1)
        assert spans(first.member)["n1"] == ["2-3"]
        place.faults.die(first.member.node)
        await until(lambda: spans(only.member) == {"n1": ["0-1", "2-3"]}, 60)
        said = [said for said in place.said if said.startswith(f"layers could not be moved: {line}")]
        assert len(said) == 2 and len(attempts.asked) == 3

    play(scene)


def test_what_fails_in_a_look_at_what_was_taken_ends_no_node(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene(place: Town) -> None:
        await halves(place, 1)
        with monkeypatch.context() as broken:
            broken.setattr(TakenSpans, "review", lambda self: (_ for _ in ()).throw(ModelError("no such layers")))
            await until(lambda: "layers could not be moved: no such layers" in place.said)
        await asyncio.sleep(1.0)

    play(scene)


# -- moves ------------------------------------------------------------------------------------------------------------


def test_a_span_that_goes_by_itself_during_a_move_ends_no_node(play: Play) -> None:
    """Its device is lost, or it was loaded on demand and is not used any more: the worker has forgotten it already."""

    async def scene(place: Town) -> None:
        _, mover = await halves(place, 1)
        worker, (old,) = mover.member.node.worker, mover.hosts
        host = worker.host

        async def slow(*args: Any, **options: Any) -> Any:
            old.engine.lose(DeviceLost("an illegal memory access"))
            await asyncio.sleep(1.0)
            assert old not in worker.hosts
            return await host(*args, **options)

        worker.host = slow  # type: ignore[method-assign]
        await mover.move(Span(0, 4), "for this test")
        await until(lambda: spans(mover.member)["n1"] == ["0-3"])

    play(scene)


def test_who_leaves_waits_for_every_span_although_one_goes_by_itself(
    play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scene(place: Town) -> None:
        first, only = await halves(place, 1)
        place.faults.die(first.member.node)
        await until(lambda: spans(only.member) == {"n1": ["0-1", "2-3"]})
        worker, waited = only.member.node.worker, []

        async def gone(host: SpanHost) -> None:
            waited.append(host)
            worker.drop(host)

        hosts = list(worker.hosts)
        monkeypatch.setattr(SpanHost, "emptied", gone)
        await worker.drain()
        assert waited == hosts and len(hosts) == 2

    play(scene)


def test_a_member_may_leave_while_it_loads(play: Play) -> None:
    """What it says of its claim comes after its last word to the others: nothing is said any more, and nothing fails."""

    async def scene(place: Town) -> None:
        await place.host(0, span=Span(0, 4))
        leaver = place.member(1)
        async with leaver:
            await leaver.meet()
            hosting = await place.hosting(leaver)
            loading = asyncio.Event()

            async def endless(*_: Any, **__: Any) -> Any:
                loading.set()
                await asyncio.Event().wait()

            leaver.node.worker.host = endless  # type: ignore[method-assign]
            leaver.node.start(hosting.move(Span(0, 2), "for this test"))
            await loading.wait()
            await leaver.leave()

    play(scene)


@pytest.mark.parametrize("why", ["fills a gap", "is told to move"])
def test_a_member_that_leaves_ends_its_load(play: Play, monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    """Also while its device computes it, which live sessions wait for; and nothing is served that was loaded since."""

    async def scene(place: Town) -> None:
        first, leaver = await halves(place, 1)
        worker, load = leaver.member.node.worker, EndlessLoad()
        monkeypatch.setattr("manyhands.worker.worker.SpanModel", load)
        if why == "fills a gap":
            place.faults.die(first.member.node)
        else:
            await order(leaver, Span(0, 4))
        await load.begun.wait()
        await leaver.member.leave()
        await worker.hosts[0].engine.device.run(lambda: None)
        await asyncio.sleep(1.0)
        assert load.ended.is_set() and not leaver.is_moving and not leaver.member.claims
        assert [str(host.info.span) for host in worker.hosts] == ["2-3"]

    play(scene)


async def in_place_of_each_other(place: Town) -> Hosting:
    """n1, which serves 0-1 and has room for no third layer, beside n0 with all."""
    weights = await weights_of(str(place.folder), "bf16", (), place.home, Silent())
    first = await place.host(0, span=Span(0, 4))
    mover = await place.host(1, memory_bytes=room_for(weights, 2))
    await until(lambda: spans(mover.member) == {"n0": ["0-3"], "n1": ["0-1"]} == spans(first.member))
    return mover


def test_what_cannot_be_fetched_costs_no_span(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene(place: Town) -> None:
        mover = await in_place_of_each_other(place)
        (old,) = mover.hosts

        async def fetch(span: Span) -> Path:
            raise ShardUnavailable(f"no node has layers {span}")

        monkeypatch.setattr(mover, "fetch", fetch)
        with pytest.raises(ShardUnavailable, match="no node has layers 2-3"):
            await mover.move(Span(2, 4), "for this test")
        assert mover.hosts == [old]

    play(scene)


@pytest.mark.parametrize("most", [1, 3])
def test_what_a_failed_move_dropped_is_loaded_again(play: Play, most: int) -> None:
    """At once, or later where that fails too."""

    async def scene(place: Town) -> None:
        mover = await in_place_of_each_other(place)
        attempts = Failing(mover, ModelError("no memory on the device"), most)
        with pytest.raises(ModelError, match="no memory on the device"):
            await mover.move(Span(2, 4), "for this test")
        await until(lambda: spans(mover.member).get("n1") == ["0-1"], 60)
        assert attempts.asked == [Span(2, 4)] + [Span(0, 2)] * most and not mover.member.claims

    play(scene)


def test_a_span_that_is_loaded_and_fails_then_does_not_serve(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its first step fails, or the folder cannot be read for others: the move failed, and nothing is left of it."""

    async def scene(place: Town) -> None:
        _, mover = await halves(place, 1)
        old = list(mover.member.node.hosts)

        async def unreadable(folder: Path) -> None:
            raise ModelError("the folder cannot be read")

        monkeypatch.setattr(mover.member.node.seed, "add", unreadable)
        with pytest.raises(ModelError, match="the folder cannot be read"):
            await mover.move(Span(0, 4), "for this test")
        assert mover.member.node.hosts == old

    play(scene)


def test_what_is_being_drained_takes_memory_still(play: Play) -> None:
    """With room for three layers, two of which wait for their last session, one is loaded and not two."""

    async def scene(place: Town) -> None:
        weights = await weights_of(str(place.folder), "bf16", (), place.home, Silent())
        hosting = await place.host(0, memory_bytes=room_for(weights, 3))
        await hosting.move(Span(2, 4), "for this test", is_forced=True)
        hosting.hosts[0].drain(math.inf)
        filling = await hosting.fill(Span(0, 2))
        assert filling is not None and filling.info.span == Span(0, 1)
        await hosting.move(Span(0, 3), "for this test", is_forced=True)
        assert hosting.held == [Span(0, 1)], "not now: there would be five in memory"
        assert place.said[-1].startswith("not moving to layers 0-2 now: ")

    play(scene)


def test_switching_off_and_on_again_resumes_no_span_that_is_drained_for_a_move(play: Play) -> None:
    async def scene(place: Town) -> None:
        hosting = await place.host(0, span=Span(0, 2))
        hosting.hosts[0].drain()
        kept = await hosting.fill(Span(2, 4))
        for on in (False, False, True):
            hosting.member.switch(on=on)
        assert hosting.hosts == [kept]

    play(scene)
