"""Layers that a node loads when a session is opened there (--can-load): what that costs others, and what a failure leaves."""

import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from manyhands.config import RequestConfig, WorkerConfig
from manyhands.core import EndsAt, SamplingParams, Span
from manyhands.errors import ShardUnavailable
from manyhands.origin.sampling import sampling
from manyhands.testing.swarm import MemorySwarm, memory_swarm
from manyhands.testing.tiny import make_tiny
from manyhands.worker.worker import Worker
from tests.origin.scenes import GREEDY, PROMPT, expected, ids_of, play


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
