"""Nodes on a device of torch (torch-cpu here): what an answer over them is, their repair, and with whom they share a route."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import numpy as np
import pytest

from manyhands.config import RequestConfig
from manyhands.core import NodeAddr, Span
from manyhands.engine import library
from manyhands.errors import ManyhandsError, ShardUnavailable
from manyhands.net.memory import MemoryNetwork
from manyhands.origin import Answer, Origin, OriginModel
from manyhands.origin.node import FullNode
from manyhands.testing.clock import run_virtual
from manyhands.testing.faults import Faults
from manyhands.testing.swarm import memory_node
from manyhands.testing.tiny import make_tiny
from manyhands.worker.execute import Device
from tests.origin.scenes import GREEDY, HOT, NEW, PROMPT
from tests.worker.pipeline import Loader, forced

NATIVE, TORCH = library.supported()[0], "torch-cpu"
MIXED = RequestConfig(mix_classes=True, patience_s=2.0)
APART = RequestConfig(patience_s=2.0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("qwen3", tmp_path_factory.mktemp("routes") / "qwen3", layers=6, seed=21)


class Swarm:
    """An origin and its nodes; `faults` kill them."""

    def __init__(self, origin: Origin, hops: list[FullNode], faults: Faults) -> None:
        self.origin, self.hops, self.faults = origin, hops, faults

    async def ask(self, params: object = GREEDY, **options: object) -> Answer:
        answer = self.origin.answer(self.origin.request_ids(PROMPT, params))  # type: ignore[arg-type]
        async for _ in self.origin.stream(answer, **options):  # type: ignore[arg-type]
            pass
        return answer


@asynccontextmanager
async def swarm_of(
    folder: Path, nodes: Sequence[tuple[str, str, bool]], request: RequestConfig, home: str = NATIVE
) -> AsyncIterator[Swarm]:
    """Nodes (layers, back end, whether a spare) and an origin on `home`, in fp32."""
    faults = Faults()
    async with AsyncExitStack() as stack:
        network, hops, addrs = MemoryNetwork(), [], []

        def device() -> Device:
            made = Device.start(1)
            stack.callback(made.close)
            return made

        for index, (layers, engine, is_spare) in enumerate(nodes):
            node = await stack.enter_async_context(memory_node(network, f"n{index}", faults.wrap))
            with forced(engine):
                await node.worker.host(
                    folder, Span.parse(layers), "fp32", device(), model_name="test", is_spare=is_spare
                )
            hops.append(node)
            addrs.append(await node.listen(NodeAddr("mem", 0)))
        own = await stack.enter_async_context(memory_node(network, "origin", faults.wrap, request=request))
        with forced(home):
            model = OriginModel(folder, "fp32", "origin", 1)
        yield Swarm(Origin(own, model, device(), addrs), hops, faults)


def check_likely(folder: Path, answer: Answer) -> None:
    """Greedy tokens of class E2: each as likely as the likeliest, up to rounding, after those before it."""
    ids = [*PROMPT, *answer.token_ids]
    logits = Loader(folder, "fp32", NATIVE).cut(0, 6).run(ids, [len(ids)])[len(PROMPT) - 1 : -1]
    drawn = logits[np.arange(len(logits)), answer.token_ids]
    assert len(answer.token_ids) == NEW and float((logits.max(1) - drawn).max()) < 1e-3


THREE = [("0-1", TORCH, False), ("2-3", TORCH, False), ("4-5", TORCH, False)]


def test_three_nodes_on_torch_answer_in_class_e2_also_after_a_repair(folder: Path) -> None:
    """Drafts, sampling, several requests at once; then a hop dies while it decodes, and a spare on torch takes its place."""

    async def main() -> None:
        async with swarm_of(folder, [*THREE, ("0-5", TORCH, True)], APART, TORCH) as swarm:
            for answer in await asyncio.gather(swarm.ask(), swarm.ask(HOT), swarm.ask()):
                assert answer.exactness == "E2" and len(answer.token_ids) == NEW
            assert all("torch-" in offer.info.arithmetic for offer in answer.route)
            check_likely(folder, answer)
            victim = swarm.hops[1]
            swarm.faults.at("decode", victim, lambda: swarm.faults.die(victim), 5)
            repaired = await swarm.ask()
            assert repaired.exactness == "E2" and len(repaired.repairs) == 1
            check_likely(folder, repaired)

    run_virtual(main())


def test_a_request_that_is_cancelled_frees_its_caches(folder: Path) -> None:
    async def main() -> None:
        async with swarm_of(folder, THREE, APART) as swarm:
            answer = swarm.origin.answer(swarm.origin.request_ids(PROMPT, GREEDY))
            stream = swarm.origin.stream(answer)
            async for _ in stream:
                break
            await stream.aclose()
            for _ in range(100):
                if not any(host.num_sessions for node in swarm.hops for host in node.hosts):
                    break
                await asyncio.sleep(0.01)
            assert all(h.info.free_tokens == h._config.cache_tokens for node in swarm.hops for h in node.hosts)

    run_virtual(main())


def test_exact_nodes_and_nodes_on_torch_share_no_route_unless_they_may(folder: Path) -> None:
    nodes = [("0-2", NATIVE, False), ("3-5", TORCH, False)]

    async def main(request: RequestConfig) -> Answer:
        async with swarm_of(folder, nodes, request) as swarm:
            return await swarm.ask()

    with pytest.raises(ShardUnavailable, match=r"do not hold layers 3-5 .* layers 0-2, .*--mix-classes"):
        run_virtual(main(APART))
    answer = run_virtual(main(MIXED))
    assert answer.exactness == "E2"
    check_likely(folder, answer)


def test_an_exact_answer_is_repaired_by_exact_nodes_alone(folder: Path) -> None:
    """A spare on torch does not take over from a node of an exact class, unless it may; then the answer falls to E2."""
    nodes = [("0-2", NATIVE, False), ("3-5", NATIVE, False), ("0-5", TORCH, True)]

    async def main(request: RequestConfig, extra: list[tuple[str, str, bool]]) -> Answer:
        async with swarm_of(folder, [*nodes, *extra], request) as swarm:
            victim = swarm.hops[1]
            swarm.faults.at("decode", victim, lambda: swarm.faults.die(victim), 5)
            return await swarm.ask()

    with pytest.raises(ManyhandsError, match="3-5"):
        run_virtual(main(APART, []))
    exact = run_virtual(main(APART, [("2-5", NATIVE, True)]))
    assert exact.exactness == "E0" and len(exact.repairs) == 1
    mixed = run_virtual(main(MIXED, []))
    assert mixed.exactness == "E2" and len(mixed.repairs) == 1
    check_likely(folder, mixed)
