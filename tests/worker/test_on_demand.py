"""Layers that a node loads when a session is opened there (--can-load): what that costs others, and what a failure leaves."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import pytest

from manyhands.config import RequestConfig, WorkerConfig
from manyhands.core import EndsAt, SamplingParams, Span
from manyhands.errors import DeviceLost, ModelError, ShardUnavailable
from manyhands.net.transport import Link
from manyhands.origin.sampling import sampling
from manyhands.testing.swarm import MemorySwarm, memory_swarm
from manyhands.testing.tiny import make_tiny
from manyhands.wire.message import Close
from manyhands.worker.execute import Device, SpanModel
from manyhands.worker.worker import Worker
from tests.origin.scenes import GREEDY, PROMPT, expected, ids_of, play
from tests.waiting import GUARD_S, EndlessLoad
from tests.worker.hop import ORIGIN, Notes, opening, session_id


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("qwen3", tmp_path_factory.mktemp("demand") / "qwen3", seed=3)


@asynccontextmanager
async def on_demand(folder: Path, ends: EndsAt = "origin", **config: Any) -> AsyncIterator[tuple[MemorySwarm, Worker]]:
    """A node that holds nothing and would load everything, and an origin that asks it."""
    request = RequestConfig(patience_s=2.0)
    async with memory_swarm(folder, "0-5", ends=ends, request=request, worker=WorkerConfig(**config)) as swarm:
        worker = swarm.hops[0].worker
        (host,) = worker.hosts
        worker.drop(host)
        await worker.offer_to_load(
            folder,
            Span(0, 6),
            "bf16",
            host.engine.device,
            model_name="test",
            max_layers=6,
            has_ends=ends == "edges",
        )
        yield swarm, worker


def test_a_tokenizer_is_read_with_the_layers_beside_the_loop(folder: Path) -> None:
    """And for no Open that is refused."""

    async def main() -> None:
        async with on_demand(folder, "edges", cache_tokens=128) as (swarm, worker):
            read: list[tuple[bool, bool]] = []

            def noted(folder: Path, has_head: bool) -> Callable[[SamplingParams], Any]:
                read.append((threading.current_thread() is threading.main_thread(), has_head))
                return sampling(folder, has_head)

            worker._sampling = noted
            with pytest.raises(ShardUnavailable, match="lower max_tokens"):
                await ids_of(swarm, PROMPT, SamplingParams(max_tokens=200))
            assert read == [] and worker.hosts == []
            for _ in range(2):
                assert await ids_of(swarm, PROMPT, GREEDY) == expected(folder, PROMPT, GREEDY)
            assert read == [(False, True)]

    play(main)


@pytest.mark.parametrize("waits", [True, False])
def test_a_load_that_fails_leaves_nothing_behind(folder: Path, monkeypatch: pytest.MonkeyPatch, waits: bool) -> None:
    """Whether its origin waited for it or not: the layers can be loaded again at once, and are not said to be held."""

    async def main() -> None:
        async with on_demand(folder) as (swarm, worker):
            begun, may_fail = threading.Event(), threading.Event()

            def broken(*_: Any) -> SpanModel:
                begun.set()
                may_fail.wait(GUARD_S)
                raise ModelError("the disk is gone")

            with monkeypatch.context() as patch:
                patch.setattr("manyhands.worker.worker.SpanModel", broken)
                asked = asyncio.ensure_future(ids_of(swarm, PROMPT, GREEDY))
                while not begun.is_set():  # noqa: ASYNC110 - set by a thread, for which the clock stands still
                    await asyncio.sleep(0)
                (host,) = worker.hosts
                if not waits:
                    asked.cancel()
                    while not host.is_empty:  # noqa: ASYNC110
                        await asyncio.sleep(0)
                may_fail.set()
                with pytest.raises(ModelError if waits else asyncio.CancelledError):
                    await asked
                await asyncio.sleep(0.1)
            assert worker.hosts == [] and [info.is_loaded for info in worker.spans] == [False]
            assert await ids_of(swarm, PROMPT, GREEDY) == expected(folder, PROMPT, GREEDY)

    play(main)


def test_a_node_that_leaves_loads_nothing_more(folder: Path) -> None:
    async def main() -> None:
        async with on_demand(folder) as (swarm, worker):
            await worker.drain()
            with pytest.raises(ShardUnavailable, match="is leaving and loads nothing more"):
                await ids_of(swarm, PROMPT, GREEDY)
            assert worker.hosts == []

    play(main)


def test_a_node_that_leaves_ends_the_load_that_a_session_waits_for(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It neither waits for the load nor serves what it loaded; the origin is told at once and looks elsewhere."""

    async def main() -> None:
        async with on_demand(folder) as (swarm, worker):
            load = EndlessLoad()
            monkeypatch.setattr("manyhands.worker.worker.SpanModel", load)
            asked = asyncio.ensure_future(ids_of(swarm, PROMPT, GREEDY))
            while not load.begun.is_set():  # noqa: ASYNC110 - set by a thread, for which the clock stands still
                await asyncio.sleep(0)
            await worker.drain()
            with pytest.raises(ShardUnavailable, match="layers 0-5 are not loaded here any more"):
                await asked
            await worker._loadable[0].known.device.run(lambda: None)
            assert load.ended.is_set() and worker.hosts == []

    play(main)


def test_a_node_that_leaves_waits_for_all_its_spans_also_if_one_is_gone_meanwhile(folder: Path) -> None:
    """The device of the first fails; the session on the second goes on."""

    async def main() -> None:
        async with memory_swarm(folder, "0-2,3-5") as swarm:
            worker, device = swarm.hops[0].worker, Device.start(1)
            first = worker.hosts[0]
            second = await worker.host(folder, Span(2, 4), "bf16", device, model_name="test")
            origin, model = cast(Link, Notes(ORIGIN)), first.info.model
            first.reserve(opening(1, span=first.info.span, model=model), origin)
            second.reserve(opening(2, model=model), origin)
            leaving = asyncio.ensure_future(worker.drain())
            await asyncio.sleep(0.1)
            first.engine.lose(DeviceLost("it fell off the bus"))
            await asyncio.sleep(0.1)
            assert worker.hosts == [second] and not leaving.done()
            second.close(Close(session_id(2)), ORIGIN)
            await leaving
            device.close()

    play(main)
