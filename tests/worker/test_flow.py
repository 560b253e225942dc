"""manyhands.worker.serve over time: credits, lost links, eviction."""

import asyncio
from pathlib import Path
from typing import cast

import pytest
import torch

from manyhands.net.transport import Link
from manyhands.testing.faulty_device import SlowDevice
from manyhands.wire.message import Close, Credit, Fault, Step
from manyhands.worker.eviction import LOOK_S
from manyhands.worker.execute import Device
from tests.worker.hop import AFTER, ORIGIN, Hop, Notes, hidden, opening, session_id
from tests.worker.test_serve import computed, folder, play

__all__ = ["folder"]  # a fixture


async def send_all_it_may(one: Hop, granted: int) -> None:
    """One-row steps of session 1 as long as this hop gives credits."""
    while (sent := one.num_sent) < granted + sum(c.steps for c in one.before.of(Credit, session_id(1))):
        one.num_sent += 1
        one.step(1, sent, hidden(1, seed=sent))
        await one.quiet()


@pytest.mark.parametrize("granted", [1, 3, 16])
def test_a_successor_without_credits_pauses_its_upstream(folder: Path, granted: int) -> None:
    """At most `granted` steps are on the way; one more is computed and held, the rest waits uncomputed."""

    async def scenario(one: Hop) -> None:
        await one.open(1, credits=granted)
        await one.open(2, credits=granted)
        await send_all_it_may(one, granted)
        one.step(2, 0, hidden(7))
        await one.quiet()
        assert len(one.after.of(Step, session_id(1))) == granted
        assert one.host.engine.rows_run == granted + 1 + 7, "and no other session is paused"
        one.credit(1, 1)
        await one.quiet()
        assert len(one.after.of(Step, session_id(1))) == granted + 1
        one.credit(1, 50)
        while len(one.after.of(Step, session_id(1))) < 2 * granted + 1:
            await send_all_it_may(one, granted)
            await one.quiet()
        await one.quiet()
        assert len(one.after.of(Step, session_id(1))) == 2 * granted + 1, (
            "whatever it says, its credits are all it gets"
        )

    play(folder, scenario)


@pytest.mark.parametrize("granted", [1, 2, 4, 7, 16])
def test_credits_come_back_before_all_are_used_up(folder: Path, granted: int) -> None:
    """A sender that keeps to its credits never waits for ever. (With fewer than 8 it did.)"""

    async def scenario(one: Hop) -> None:
        await one.open(1, credits=granted)
        left, position = granted, 0
        for _ in range(3):
            one.credit(1, granted)
            while left:
                one.step(1, position, hidden(1))
                left, position = left - 1, position + 1
            await computed(one, 1, position)
            left = granted + sum(c.steps for c in one.before.of(Credit)) - position
            assert left > 0

    play(folder, scenario)


def test_a_lost_origin_frees_its_sessions(folder: Path) -> None:
    async def scenario(one: Hop) -> None:
        await one.open(1)
        one.host.drop_origin(cast(Link, Notes(ORIGIN)))
        assert one.host.num_sessions == 1
        one.host.drop_origin(cast(Link, one.origin))
        assert one.host.num_sessions == 0
        one.step(1, 0, hidden(1))  # late, and ignored
        await one.quiet()
        assert not one.after.sent and not one.faults()

    play(folder, scenario)


def test_a_lost_successor_is_reported_and_blamed(folder: Path) -> None:
    """Only the sessions that send over that link; they stay, for their origins may repair the route."""

    async def scenario(one: Hop) -> None:
        other = Notes(AFTER)
        await one.open(1, after=other)
        await one.open(2)
        one.host.drop_successor(cast(Link, other))
        (fault,) = one.origin.of(Fault)
        assert (fault.session, fault.code, fault.blame) == (session_id(1), "link_closed", 2)
        assert one.host.num_sessions == 2
        one.step(2, 0, hidden(1))
        await computed(one, 2, 1)

    play(folder, scenario)


def test_links_that_are_gone_break_nothing(folder: Path) -> None:
    """Results and faults for a closed link are dropped; its loss is handled where links are watched."""

    async def scenario(one: Hop) -> None:
        await one.open(1)
        await one.open(2)
        one.after.is_closed = one.origin.is_closed = True
        one.step(1, 0, hidden(1))
        one.step(2, 7, hidden(1))
        place = one.host.find(session_id(2), 1, 1)
        await one.until(lambda: place is not None and place._is_spoiled)
        one.after.is_closed = False
        one.step(1, 1, hidden(1))
        await computed(one, 1, 1)

    play(folder, scenario)


def test_an_error_of_the_device_ends_the_sessions_of_that_step_alone(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Out of memory in one step: its sessions hear of it, the host serves the next. (It stopped the node.)"""

    async def scenario(one: Hop) -> None:
        await one.open(1)
        model = await one.host.engine.ensure_loaded()
        forward = model.runner.step

        def fail(*_: object) -> None:
            raise MemoryError("no room for the step")

        monkeypatch.setattr(model.runner, "step", fail)
        one.step(1, 0, hidden(1))
        await one.until(lambda: len(one.faults()) == 1)
        monkeypatch.setattr(model.runner, "step", forward)
        await one.open(2)
        one.step(2, 0, hidden(1))
        await computed(one, 2, 1)
        assert one.faults()[0].code == "internal"

    play(folder, scenario)


# -- eviction ---------------------------------------------------------------------------------------------------------


def test_an_idle_span_is_evicted_and_comes_back_with_the_same_bits(folder: Path) -> None:
    """After `evict_after_s` without sessions the model leaves memory; the next Open loads it again."""

    async def scenario(one: Hop) -> None:
        await one.open(1)
        one.step(1, 0, hidden(9))
        await computed(one, 1, 1)
        one.host.close(Close(session_id(1)), ORIGIN)
        assert one.host.is_loaded
        await asyncio.sleep(99)
        assert one.host.is_loaded
        await asyncio.sleep(2)
        assert not one.host.is_loaded and one.loads == 1
        await one.open(2)
        assert one.host.is_loaded and one.loads == 2
        one.step(2, 0, hidden(9))
        await computed(one, 2, 1)
        assert torch.equal(one.rows(1), one.rows(2))

    play(folder, scenario, evict_after_s=100.0)


def test_a_load_goes_on_for_the_next_opener_and_is_evicted_if_none_comes(folder: Path) -> None:
    """An origin gives up while layers are loaded, again and again: each Open began the load anew, behind the last."""

    async def scenario(one: Hop) -> None:
        one.host.engine.device = cast(Device, SlowDevice(one.host.engine.device, 12.0))
        for number in (1, 2):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(5.0):
                    await one.open(number)
            one.host.close(Close(session_id(number)), ORIGIN)
        async with asyncio.timeout(2.5):
            await one.open(3)
        assert one.loads == 1 and one.host.is_loaded
        one.host.close(Close(session_id(3)), ORIGIN)
        await asyncio.sleep(101)
        assert not one.host.is_loaded
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(5.0):
                await one.open(4)
        one.host.close(Close(session_id(4)), ORIGIN)
        await asyncio.sleep(10)
        assert one.host.is_loaded and one.loads == 2
        await asyncio.sleep(101)
        assert not one.host.is_loaded

    play(folder, scenario, evict_after_s=100.0)


def test_an_open_is_answered_though_a_step_of_an_earlier_epoch_fails(folder: Path) -> None:
    """The failure ends the session, with its Open that still waits for the successor. (That was dropped without a word.)"""

    async def scenario(one: Hop) -> None:
        await one.open(1)
        model = one.host.engine.model
        assert model is not None
        model.run = lambda works: [RuntimeError("out of memory")] * len(works)  # type: ignore[method-assign]
        one.step(1, 0, hidden(3))
        one.host.reserve(opening(1, epoch=2), cast(Link, one.origin))
        await one.until(lambda: len(one.faults()) == 2)
        assert {(f.epoch, f.blame) for f in one.faults()} == {(1, None), (2, None)}
        assert one.host.num_sessions == 0 and one.host.info.free_tokens == 16384

    play(folder, scenario, cache_tokens=16384)


def test_a_span_with_a_session_is_never_evicted(folder: Path) -> None:
    """However long its reader thinks, and also if it was opened just before the time was up. (It was evicted.)"""

    async def scenario(one: Hop) -> None:
        await one.host.engine.ensure_loaded()
        one.host._changed.set()  # as any message would
        await asyncio.sleep(90)
        await one.open(1)
        await asyncio.sleep(1000)
        assert one.host.is_loaded
        one.step(1, 0, hidden(2))
        await computed(one, 1, 1)
        assert not one.faults() and one.loads == 1

    play(folder, scenario, evict_after_s=100.0)


def test_an_idle_span_leaves_while_memory_is_short(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """HN-13, with the next look; not under a session, and not while there is enough. The next Open loads it again."""
    left = 3000
    monkeypatch.setattr("manyhands.worker.eviction.available_memory", lambda: left)

    async def scenario(one: Hop) -> None:
        nonlocal left
        await one.open(1)
        left = 999
        await asyncio.sleep(100)
        assert one.host.is_loaded, "a session uses it"
        left = 1000
        one.host.close(Close(session_id(1)), ORIGIN)
        await asyncio.sleep(1000)
        assert one.host.is_loaded, "there is enough"
        left = 999
        await asyncio.sleep(2 * LOOK_S)
        assert not one.host.is_loaded
        left = 3000
        await one.open(2)
        assert one.host.is_loaded and one.loads == 2

    play(folder, scenario, evict_below_bytes=1000)


def test_zero_means_never(folder: Path) -> None:
    async def scenario(one: Hop) -> None:
        await one.open(1)
        one.host.close(Close(session_id(1)), ORIGIN)
        await asyncio.sleep(10_000)
        assert one.host.is_loaded

    play(folder, scenario, evict_after_s=0.0)
