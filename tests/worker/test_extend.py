"""Leases that grow on a hop: what is granted, to whom, and what is given back."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

from manyhands.config import WorkerConfig
from manyhands.errors import Busy, ContextOverflow
from manyhands.net.transport import Link
from manyhands.testing.clock import run_virtual
from manyhands.testing.tiny import make_tiny
from manyhands.wire.message import Close, Extend, Extended, Fault, Step
from manyhands.worker.leases import SHORT_S
from tests.worker.hop import AFTER, ORIGIN, Hop, hidden, hop, opening, session_id

U32 = (1 << 32) - 1


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("qwen3", tmp_path_factory.mktemp("extend") / "qwen3", seed=3)


def play(folder: Path, scenario: Callable[[Hop], Any], **config: Any) -> None:
    async def main() -> None:
        async with hop(folder, WorkerConfig(**config)) as one:
            await scenario(one)
            one.host.close(Close(session_id(1)), ORIGIN)
            one.host.close(Close(session_id(2)), ORIGIN)
            assert one.host.info.free_tokens == one.host.engine.cache_tokens and one.host.leases.leased_bytes == 0

    run_virtual(main())


def extend(one: Hop, number: int, capacity: int, epoch: int = 1, node: str = ORIGIN) -> list[int]:
    """What the origin has been told of the session's lease by now."""
    one.host.extend(Extend(session_id(number), epoch, capacity), cast(Any, node))
    return [told.capacity for told in one.origin.of(Extended, session_id(number))]


def came(one: Hop, number: int) -> int:
    """Rows of a session that the successor got."""
    return sum(step.count for step in one.after.of(Step, session_id(number)))


def test_a_lease_grows_as_far_as_there_is_room(folder: Path) -> None:
    """Two sessions share what there is; asking again for what is there changes nothing, and for less does not shrink it."""

    async def scenario(one: Hop) -> None:
        await one.open(1, capacity=64)
        await one.open(2, capacity=64)
        assert extend(one, 1, 128) == [128] and one.host.info.free_tokens == 128
        assert extend(one, 2, U32) == [192] and one.host.info.free_tokens == 0
        assert extend(one, 1, 129) == [128, 128] and extend(one, 1, 1) == [128, 128, 128]
        one.host.close(Close(session_id(2)), ORIGIN)
        assert one.host.info.free_tokens == 192 and extend(one, 1, 1000) == [128, 128, 128, 320]

    play(folder, scenario, cache_tokens=320)


def test_a_lease_is_no_larger_than_the_models_context(folder: Path) -> None:
    async def scenario(one: Hop) -> None:
        await one.open(1)
        assert extend(one, 1, U32) == [1024]
        with pytest.raises(ContextOverflow):
            one.host.reserve(opening(2, capacity=1025), cast(Link, one.origin))
        with pytest.raises(Busy, match="1024 positions on layers 2-3 has no room for 1025"):
            one.host.reserve(opening(1, capacity=1025, epoch=2), cast(Link, one.origin))

    play(folder, scenario)


@pytest.mark.parametrize(("epoch", "node", "number"), [(2, ORIGIN, 1), (0, ORIGIN, 1), (1, AFTER, 1), (1, ORIGIN, 9)])
def test_others_extend_nothing(folder: Path, epoch: int, node: str, number: int) -> None:
    """Another epoch, another node, a session that is not here: no answer, and no room taken."""

    async def scenario(one: Hop) -> None:
        await one.open(1)
        assert extend(one, number, 512, epoch, node) == [] and one.host.info.free_tokens == 65536 - 64

    play(folder, scenario)


def test_steps_fit_the_lease_as_it_is(folder: Path) -> None:
    """A step beyond it costs the predecessor its place; once the lease has grown the same step is computed."""

    async def scenario(one: Hop) -> None:
        for number in (1, 2):
            await one.open(number, capacity=64)
            one.step(number, 0, hidden(64))
        await one.until(lambda: came(one, 1) == 64 and came(one, 2) == 64)
        extend(one, 1, 65)
        for number in (1, 2):
            one.step(number, 64, hidden(1))
        await one.until(lambda: came(one, 1) == 65)
        (fault,) = one.origin.of(Fault)
        assert (fault.session, fault.code, fault.blame) == (session_id(2), "bad_request", 0)

    play(folder, scenario)


@pytest.mark.parametrize("capacity", [1, 64, 128, 320])
def test_a_new_place_may_ask_for_another_lease(folder: Path, capacity: int) -> None:
    """For more if there is room, else it is refused and the old place stays; for less, the lease stays."""

    async def scenario(one: Hop) -> None:
        await one.open(1)
        extend(one, 1, 128)
        one.step(1, 0, hidden(5))
        await one.until(lambda: came(one, 1) == 5)
        await one.open(2)
        if capacity == 320:
            with pytest.raises(Busy, match="256 positions on layers 2-3 has no room for 320"):
                await one.open(1, capacity=capacity, epoch=2)
            one.step(1, 5, hidden(1))
        else:
            await one.open(1, capacity=capacity, epoch=2)
            assert one.host.info.free_tokens == 320 - 64 - 128
            assert extend(one, 1, 128, epoch=2)[-1] == 128
            one.step(1, 5, hidden(1), epoch=2)
        await one.until(lambda: came(one, 1) == 6)
        assert not one.faults()

    play(folder, scenario, cache_tokens=320)


def test_new_sessions_wait_while_one_that_runs_lacks_room(folder: Path) -> None:
    """What becomes free is for those who ask again; once none has asked for two seconds new ones are admitted."""

    async def scenario(one: Hop) -> None:
        await one.open(1)
        await one.open(2)
        assert extend(one, 1, 512) == [256] and one.host.info.free_tokens == 0
        one.host.close(Close(session_id(2)), ORIGIN)
        assert one.host.info.free_tokens == 0
        with pytest.raises(Busy, match="cache for 0 more positions, 64 are asked for"):
            one.host.reserve(opening(2), cast(Link, one.origin))
        assert extend(one, 1, 300)[-1] == 300
        await asyncio.sleep(SHORT_S)
        assert one.host.info.free_tokens == 20

    play(folder, scenario, cache_tokens=320)


def test_parked_sessions_give_way_to_a_lease_that_grows(folder: Path) -> None:
    async def scenario(one: Hop) -> None:
        await one.open(1, capacity=128)
        one.step(1, 0, hidden(128))
        await one.until(lambda: came(one, 1) == 128)
        one.host.close(Close(session_id(1), parked_as=session_id(7), positions=128), ORIGIN)
        await one.open(2, capacity=64)
        assert one.host.parking.num_positions == 128
        assert extend(one, 2, 256) == [256] and one.host.parking.num_positions == 0

    play(folder, scenario, cache_tokens=256)
