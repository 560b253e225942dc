"""Layers run by themselves: the same rows as in a request, whatever the cut; nothing is left open."""

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from manyhands.config import RequestConfig
from manyhands.core import NodeId, SamplingParams, Span
from manyhands.errors import BadRequest, PipelineStalled, ProtocolError, ShardUnavailable
from manyhands.net.transport import Link
from manyhands.origin.layers import STALL_ROWS, LayerRows, run_layers
from manyhands.origin.session import Session
from manyhands.testing.clock import run_virtual
from manyhands.testing.faulty_device import SlowDevice
from manyhands.testing.swarm import MemorySwarm, memory_swarm
from manyhands.testing.tiny import make_tiny
from manyhands.wire.message import Step
from manyhands.worker.execute import Device
from tests.waiting import until

IDS = (65, 66, 67, 68, 69)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("qwen3", tmp_path_factory.mktemp("m") / "m", layers=6, seed=3)


def played(folder: Path, cut: str, scene: Callable[[MemorySwarm], Coroutine[Any, Any, Any]], **options: Any) -> Any:
    async def main() -> Any:
        async with memory_swarm(folder, cut, **options) as swarm:
            made = await scene(swarm)
            hosts = [host for hop in swarm.hops for host in hop.hosts]
            await until(lambda: not swarm.origin.node.sessions and not any(host.num_sessions for host in hosts))
            return made

    return asyncio.run(main())


def test_the_rows_do_not_depend_on_the_cut_and_lead_to_the_next_token(folder: Path) -> None:
    async def scene(swarm: MemorySwarm) -> tuple[LayerRows, int]:
        made = await run_layers(swarm.origin, IDS, Span(0, 6), (0, 1, 3, 5), num_logits=2)
        params = SamplingParams(max_tokens=1, temperature=0.0, repetition_penalty=1.0)
        answer = await swarm.origin.complete(swarm.origin.request_ids(IDS, params))
        return made, answer.token_ids[0]

    config = RequestConfig(prefill_chunk=2)  # more steps than one
    made = [played(folder, cut, scene, request=config) for cut in ("0-5", "0-2,3-5", "0-0,1-4,5-5")]
    for layers, token in made:
        assert sorted(layers.states) == [0, 1, 3, 5, 6] and layers.logits.shape[0] == 2
        assert int(layers.logits[-1].argmax()) == token
        for boundary, rows in layers.states.items():
            assert rows.shape[0] == len(IDS) and np.array_equal(rows, made[0][0].states[boundary])
        assert np.array_equal(layers.logits, made[0][0].logits)
    assert [str(hop.info.span) for hop in made[1][0].hops] == ["0", "1-2", "3-4", "5"]


def test_one_span_takes_and_gives_hidden_states(folder: Path) -> None:
    async def scene(swarm: MemorySwarm) -> None:
        origin = swarm.origin
        whole = await run_layers(origin, IDS, Span(0, 6), (3, 5))
        part = await run_layers(origin, whole.states[3], Span(3, 5))
        assert np.array_equal(part.states[5], whole.states[5]) and part.logits is None
        there = swarm.hops[1].transport.node
        again = await run_layers(origin, whole.states[3], Span(3, 5), node=there)
        assert np.array_equal(again.states[5], whole.states[5]) and {hop.node for hop in again.hops} == {there}
        with pytest.raises(ShardUnavailable, match="does not hold layers"):
            await run_layers(origin, IDS, Span(0, 5), node=there)
        with pytest.raises(ShardUnavailable):
            await run_layers(origin, IDS, Span(0, 5), node=NodeId("00" * 32))

    played(folder, "0-2,3-5", scene)


@pytest.mark.parametrize(("row_s", "rows"), [(59.0, 2), (8.0, 14), (3.0, None)])
def test_rows_that_come_just_in_time_one_by_one_do_not_go_on_for_ever(
    folder: Path, row_s: float, rows: int | None
) -> None:
    """They are given up once they have taken 60 s and 60 s more for each 16; `rows`: how many had come about then."""
    given = tuple(range(60, 160))

    async def main() -> None:
        async with memory_swarm(folder, "0-2,3-5", request=RequestConfig(prefill_chunk=1)) as swarm:
            engine = swarm.hops[1].hosts[0].engine
            engine.device = cast(Device, SlowDevice(engine.device, row_s))
            clock = asyncio.get_running_loop().time
            began = clock()
            if rows is None:
                assert len((await run_layers(swarm.origin, given, Span(0, 6))).states[6]) == len(given)
            else:
                with pytest.raises(PipelineStalled):
                    await run_layers(swarm.origin, given, Span(0, 6))
                assert clock() - began < 60 * (1 + rows / STALL_ROWS)

    run_virtual(main())


def test_more_rows_than_were_sent_are_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene(swarm: MemorySwarm) -> None:
        on_step = Session.on_step

        def doubled(session: Session, step: Step, link: Link) -> None:
            if step.payload is not None:
                payload = step.payload._replace(data=bytes(step.payload.data) * 2)
                step = step._replace(count=2 * step.count, payload=payload)
            on_step(session, step, link)

        monkeypatch.setattr(Session, "on_step", doubled)
        with pytest.raises(ProtocolError, match="10 rows came back, 5 were sent"):
            await run_layers(swarm.origin, IDS, Span(0, 6))

    played(folder, "0-5", scene)


def test_what_cannot_be_is_refused_before_anything_is_opened(folder: Path) -> None:
    async def scene(swarm: MemorySwarm) -> None:
        origin = swarm.origin
        rows = (await run_layers(origin, IDS, Span(0, 2))).states[2]
        broken = rows.copy()
        broken[1] = 0xFF  # NaN
        cases: list[tuple[Any, Span, dict[str, Any], str]] = [
            (IDS, Span(0, 7), {}, "0-5"),
            (IDS, Span(1, 6), {}, "enter layer 0"),
            (IDS, Span(0, 3), {"at": (4,)}, "at is"),
            (IDS, Span(0, 3), {"num_logits": 1}, "after the last layer"),
            (IDS, Span(0, 6), {"num_logits": 6}, "there are 5"),
            ((), Span(0, 6), {}, "one or more"),
            ((1 << 20,), Span(0, 6), {}, "one or more"),
            (broken, Span(2, 6), {}, "not finite"),
            (rows[:, :-2], Span(2, 6), {}, "rows of"),
            (rows[:0], Span(2, 6), {}, "one or more"),
        ]
        for given, span, options, said in cases:
            with pytest.raises(BadRequest, match=said):
                await run_layers(origin, given, span, **options)

    played(folder, "0-2,3-5", scene)
