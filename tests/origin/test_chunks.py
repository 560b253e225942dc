"""A prompt's chunks keep all hops at work, and what a row takes is learnt from them (route/chunks.py, returns.py)."""

import asyncio
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from manyhands.config import RequestConfig, WorkerConfig
from manyhands.core import EndsAt, PathKind, SamplingParams
from manyhands.origin.loop import Generation
from manyhands.origin.returns import Returns
from manyhands.origin.route import Hop
from manyhands.origin.session import Session
from manyhands.testing.faults import Faults
from manyhands.testing.faulty_device import SlowDevice
from manyhands.testing.swarm import memory_swarm
from manyhands.wire.message import Step
from manyhands.wire.timings import HopTiming, written
from manyhands.worker.execute import Device
from tests.origin.scenes import expected, play, swarm_of
from tests.worker.pipeline import random_ids

HOPS = ("0-1,2-3,4-5", "0-0,1-1,2-2,3-3,4-4,5-5")
ROW_S = 0.001


class CountedDevice(SlowDevice):
    """Notes when it computes: (begin, end) of every step of more than one row."""

    def __init__(self, plain: Device, row_s: float) -> None:
        super().__init__(plain, 0.0, row_s)
        self.steps: list[tuple[float, float]] = []

    def run(self, function):  # type: ignore[no-untyped-def]
        loop = asyncio.get_running_loop()
        began, done = loop.time(), super().run(function)
        done.add_done_callback(lambda _: self.steps.append((began, loop.time())))
        return done


def prefill(folder: Path, cut: str, num_rows: int, chunk: int = 256) -> tuple[float, int]:
    """(virtual seconds to the first token, hops at work at once) with hops of ROW_S a row of their whole span."""

    async def main() -> tuple[float, int]:
        prompt, loop = random_ids(num_rows, seed=3), asyncio.get_running_loop()
        config = RequestConfig(prefill_chunk=chunk)
        worker = WorkerConfig(prefill_rows=num_rows)
        async with memory_swarm(folder, cut, request=config, worker=worker) as swarm:
            devices = []
            for node in swarm.hops:
                engine = node.hosts[0].engine
                devices.append(CountedDevice(engine.device, ROW_S))
                engine.device = cast(Device, devices[-1])
            began = loop.time()
            await swarm.origin.complete(swarm.origin.request_ids(prompt, SamplingParams(max_tokens=1)))
            return loop.time() - began, _at_once([s for device in devices for s in device.steps if s[1] > s[0]])

    return play(main)


def _at_once(steps: Sequence[tuple[float, float]]) -> int:
    return max(sum(begin <= at < end for begin, end in steps) for at, _ in steps)


@pytest.mark.parametrize("cut", HOPS)
def test_chunks_of_a_prompt_are_computed_on_all_hops_at_once(
    folder: Path, cut: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """k chunks over n hops take (n + k - 1) / (n * k) of the time of one chunk that passes from hop to hop."""
    monkeypatch.setattr("manyhands.origin.route.chunk_rows", lambda num_rows, stages, credits, most: most)
    monkeypatch.setattr("manyhands.worker.batch.FEWEST_ROWS", 320)  # else one chunk goes in several device steps
    num_hops, num_rows, chunk = cut.count(",") + 1, 320, 32
    one, at_once = prefill(folder, cut, num_rows, num_rows)
    assert one == pytest.approx(num_hops * num_rows * ROW_S, rel=0.01) and at_once == 1
    several, at_once = prefill(folder, cut, num_rows, chunk)
    k = num_rows // chunk
    assert several / one == pytest.approx((num_hops + k - 1) / (num_hops * k), rel=0.05)
    assert at_once == num_hops


def test_a_short_prompt_is_cut_too(folder: Path) -> None:
    """256 rows fit one step of the usual size; over six hops they go in small ones, as hops usually are."""
    took, at_once = prefill(folder, HOPS[1], 256)
    assert at_once == 6 and took < 0.35 * 6 * 256 * ROW_S


@pytest.mark.parametrize("ends", ["origin", "edges"])
@pytest.mark.parametrize("path", ["ring", "star"])
@pytest.mark.parametrize("dies", [False, True], ids=["", "a hop dies"])
def test_a_long_prompt_takes_two_steps_of_memory_for_each_credit_at_the_origin(
    folder: Path, path: PathKind, ends: EndsAt, dies: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long it is: rows are embedded as there is room for them. 4-byte ids become rows of kilobytes."""
    prompt, params = random_ids(400, seed=4), SamplingParams(max_tokens=3)
    config, waiting, flushed = RequestConfig(credits=2, prefill_chunk=10), list[int](), Hop.flush

    def flush(hop: Hop) -> int:
        waiting.append(len(hop.outbox))
        return flushed(hop)

    monkeypatch.setattr(Hop, "flush", flush)

    async def main() -> None:
        faults = Faults()
        options: dict[str, Any] = {"request": config, "ends": ends, "spares": ["0-5"], "wrap": faults.wrap}
        async with swarm_of(folder, HOPS[0], **options) as swarm:
            if dies:
                faults.at("prefill", swarm.hops[1], lambda: faults.die(swarm.hops[1]), skip=9)
            answer = await swarm.origin.complete(swarm.origin.request_ids(prompt, params), path=path)
            assert answer.token_ids == expected(folder, prompt, params) and bool(answer.repairs) == dies

    play(main)
    assert len(waiting) > 40 and max(waiting) <= config.credits


@pytest.mark.parametrize("credits", [1, 4])
def test_a_hop_that_recomputes_sooner_than_the_prompt_is_sent_again_is_believed(folder: Path, credits: int) -> None:
    """The first hop and the last are lost at once. The last has its rows from the log of the one between, and is done while
    most of the prompt waits for the new first one, which is slow."""
    prompt, params = random_ids(200, seed=3), SamplingParams(max_tokens=4)
    config = RequestConfig(credits=credits, prefill_chunk=4)

    async def main() -> None:
        faults = Faults()
        options: dict[str, Any] = {"request": config, "spares": ["0-1", "4-5"], "wrap": faults.wrap}
        async with swarm_of(folder, HOPS[0], **options) as swarm:
            for number, node in enumerate(swarm.hops):
                engine = node.hosts[0].engine
                engine.device = cast(Device, SlowDevice(engine.device, 0.0, 0.05 if number == 3 else 0.002))
            sessions = list[Session]()

            def lose() -> None:
                sessions.extend(swarm.origin.node.sessions.values())
                for hop in (0, 2):
                    sessions[0].lose(hop, "gone, says the test")

            faults.at("prefill", swarm.hops[1], lose, skip=35)
            answer = await swarm.origin.complete(swarm.origin.request_ids(prompt, params), draft="off")
            assert answer.token_ids == expected(folder, prompt, params)
            assert not sessions[0].untrusted_nodes and len(answer.repairs) == 1

    play(main)


def test_standbys_are_fed_once_results_of_the_new_route_came(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not while a prompt that is sent again waits for room: the log of the hop that is to feed may not reach so far."""
    prompt, params = random_ids(200, seed=3), SamplingParams(max_tokens=8)
    config, fed = RequestConfig(credits=1, prefill_chunk=4, standby=True), list[bool]()
    feed_standbys = Generation._feed_standbys

    async def noting(self: Generation) -> None:
        fed.append(self._session.returns._came_until is not None)
        await feed_standbys(self)

    monkeypatch.setattr(Generation, "_feed_standbys", noting)

    async def main() -> None:
        faults = Faults()
        options: dict[str, Any] = {"request": config, "spares": ["0-5", "0-5"], "wrap": faults.wrap}
        async with swarm_of(folder, HOPS[0], **options) as swarm:
            faults.at("decode", swarm.hops[0], lambda: faults.die(swarm.hops[0]), skip=1)
            answer = await swarm.origin.complete(swarm.origin.request_ids(prompt, params), draft="off")
            assert answer.token_ids == expected(folder, prompt, params) and answer.repairs

    play(main)
    assert len(fed) > 4 and all(fed)


def came(returns: Returns, end: int, *compute_us: int) -> None:
    timings = b"".join(written(0, us) for us in compute_us)
    returns.came(Step(b"s" * 16, 1, 255, end, 0, 0, 0, "hidden", None, None, timings), 2)  # type: ignore[arg-type]


def test_what_a_row_takes_is_learnt_from_the_prompts_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the piece that took least: others had company. After a repair the first began at an unknown position."""
    monkeypatch.setattr("manyhands.origin.returns.time", SimpleNamespace(monotonic=count(0.0, 0.1).__next__))
    returns = Returns()
    returns.sent(40, 32)
    came(returns, 72, 6400, 6400)
    assert returns.row_s == pytest.approx((2e-4, 2e-4)), "a short prompt is one piece"
    returns.sent(72, 32)
    came(returns, 104, 3200, 6400)
    came(returns, 136, 6400, 3200)
    came(returns, 137, 10, 10)  # one row: a step's own time, not a row's
    came(returns, 200, 1)  # a hop that says nothing
    assert returns.row_s == pytest.approx((1e-4, 1e-4))
    returns.renew()
    returns.sent(200, 32)
    came(returns, 232, 1, 1)
    assert returns.row_s == ()
    came(returns, 264, 3200, 6400)
    assert returns.row_s == pytest.approx((1e-4, 2e-4))


def test_timings_longer_than_the_step_was_away_are_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hop passes on the timings of those before it: it could state that they are slow, and requests would avoid them."""
    now = 100.0
    monkeypatch.setattr("manyhands.origin.returns.time", SimpleNamespace(monotonic=lambda: now))
    returns = Returns()
    for at, stated_us, is_taken in ((1, 90_000, True), (2, 150_000, False), (3, 4_000_000_000, False)):
        before = returns.timings
        returns.sent(at - 1, 1)
        now += 0.1
        timings = (HopTiming(0, stated_us), HopTiming(5_000, 2_000))
        travels = b"".join(written(*timing) for timing in timings)
        step = Step(b"s" * 16, 1, 255, at - 1, 1, 0, 0, "hidden", None, None, travels)  # type: ignore[arg-type]
        returns.came(step, 2)
        assert returns.timings == (timings if is_taken else before)
    assert len(returns.results) == 3, "the rows themselves count"


def test_many_short_prompts_at_once_teach_what_a_row_takes(folder: Path) -> None:
    """None has as many rows as tell it by itself; their steps have, and become as large as may be."""

    async def main() -> None:
        async with swarm_of(folder, "0-5") as swarm:
            (host,) = swarm.hops[0].hosts
            host.engine.device = cast(Device, SlowDevice(host.engine.device, 0.01))
            params = SamplingParams(max_tokens=1, ignore_eos=True)
            requests = [swarm.origin.request_ids(random_ids(30, seed=number), params) for number in range(12)]
            await asyncio.gather(*(swarm.origin.complete(request) for request in requests))
            assert host.engine._prompts.limit > host.engine._config.prefill_rows

    play(main)
