"""Which sessions a span computes together, over live routes and in virtual time: sessions out of phase, standbys."""

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace

import pytest

from manyhands.origin.draft import NoDrafter
from manyhands.testing.tiny import make_tiny
from manyhands.wire.timings import HopTiming, read_timings
from manyhands.worker.batch import WINDOW_ROWS
from manyhands.worker.engine import Engine
from manyhands.worker.execute import Result
from manyhands.worker.session import HopSession, Taken
from tests.kill import NEW, REQUEST, Bench, kept_models

STEP_S, WAY_S = 1.0, 0.1  # of a device step, and from the origin to the hop: a step that is due is worth waiting for


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    with kept_models() as models:
        yield Bench(make_tiny("llama", tmp_path_factory.mktemp("shared") / "tiny", seed=21), models)


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[list[Taken]]:
    """The decode steps of all devices, as they begin; engines measure them in virtual time."""
    seen: list[list[Taken]] = []
    plain = Engine._compute

    def noting(self: Engine, batch: list[Taken]) -> None:
        if all(taken.work.count == 1 or taken.session.is_standby for taken in batch):
            seen.append(batch)
        plain(self, batch)

    clock = SimpleNamespace(monotonic=lambda: asyncio.get_running_loop().time())
    monkeypatch.setattr("manyhands.worker.engine.time", clock)
    monkeypatch.setattr(Engine, "_compute", noting)
    return seen


def test_streams_out_of_phase_share_the_steps_of_a_live_hop(bench: Bench, steps: list[list[Taken]]) -> None:
    """One is held until the other's next row has come: together they take as long as one, not twice as long."""

    async def main() -> None:
        async with bench.scene("0-5", spares=()) as scene:
            (hop,), origin = scene.hops, scene.swarm.origin.node
            scene.faults.slow(hop, STEP_S)
            scene.faults.delay(origin, hop, "data", WAY_S)

            async def later() -> list[int]:
                await asyncio.sleep(5.5 * STEP_S)  # in the middle of a step of the first
                return await scene.ask("hot", 1, drafter=NoDrafter())

            second = asyncio.create_task(later())
            assert await scene.ask(drafter=NoDrafter()) == bench.wanted["greedy", 0]
            assert await second == bench.wanted["hot", 1]

    bench.play(main)
    shared = sum(len(batch) == 2 for batch in steps)
    assert shared > NEW / 2 and len(steps) < 1.5 * NEW, f"{shared} of {len(steps)} steps"


def test_a_hop_says_how_many_rows_and_streams_share_its_steps(
    bench: Bench, steps: list[list[Taken]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """To each stream, of the steps that it is in; with a part of a prompt in the step, of no windows."""
    said: list[tuple[HopTiming, int]] = []
    plain = HopSession.deliver

    def noting(self: HopSession, taken: Taken, result: Result, timing: bytes) -> bool:
        said.append((read_timings(timing)[0], taken.work.count))
        return plain(self, taken, result, timing)

    monkeypatch.setattr(HopSession, "deliver", noting)

    async def main() -> None:
        async with bench.scene("0-5", spares=()) as scene:
            scene.faults.slow(scene.hops[0], STEP_S)
            scene.faults.delay(scene.swarm.origin.node, scene.hops[0], "data", WAY_S)
            asks = [scene.ask(kind, number, drafter=NoDrafter()) for number, kind in enumerate(("greedy", "hot"))]
            assert await asyncio.gather(*asks) == [bench.wanted["greedy", 0], bench.wanted["hot", 1]]

    bench.play(main)
    assert {(t.rows, t.windows, t.streams) for t, count in said if count == 1} >= {(2, 2, 2)}
    assert all(t.rows >= count and t.windows <= t.rows and t.streams <= 2 for t, count in said)
    assert all(t.windows == 0 for t, count in said if count > WINDOW_ROWS)


def test_a_standby_computes_only_when_no_live_session_waits(bench: Bench, steps: list[list[Taken]]) -> None:
    """One node is a hop of one request, and stands by for another's hops."""

    async def main() -> None:
        async with bench.scene("0-2,3-5", request=replace(REQUEST, standby=True)) as scene:
            offers = await scene.swarm.origin.node.requests.survey(scene.swarm.addrs)
            scene.faults.slow(scene.hops[2], 0.05)
            for hop in scene.hops[:2]:
                scene.faults.slow(hop, 0.02)
            followed = scene.ask("greedy", 0, route=offers[:2], drafter=NoDrafter())
            own = scene.ask("hot", 1, route=offers[2:], drafter=NoDrafter())
            assert [*await asyncio.gather(followed, own)] == [bench.wanted["greedy", 0], bench.wanted["hot", 1]]

    bench.play(main)
    kinds = [{taken.session.is_standby for taken in batch} for batch in steps]
    assert {True} in kinds and {False} in kinds, "both were computed"
    assert {True, False} not in kinds
