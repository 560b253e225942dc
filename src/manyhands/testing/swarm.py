"""A swarm in one process over memory links: several nodes, each with its own span, device thread and links.

async with memory_swarm(folder, "0-2,3-5") as swarm:
    answer = await swarm.origin.complete(swarm.origin.request("Once upon a time", SamplingParams(max_tokens=20)))
"""

import hashlib
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from manyhands.checkpoint.config_fields import read_facts
from manyhands.config import RequestConfig, WorkerConfig
from manyhands.core import EndsAt, NodeAddr, NodeId, Precision, Span, parse_cut
from manyhands.net.memory import MemoryNetwork
from manyhands.net.transport import Transport
from manyhands.origin import Origin, OriginModel
from manyhands.origin.node import FullNode
from manyhands.wire.message import Hello, Lane
from manyhands.worker.execute import Device

Wrap = Callable[[Transport], Transport]


@dataclass(slots=True)
class MemorySwarm:
    """`origin` asks `hops`, which listen at `addrs`: those of the cut in order, then the spares."""

    network: MemoryNetwork
    origin: Origin
    hops: list[FullNode]
    addrs: list[NodeAddr]


@cache
def node_key(name: str) -> Ed25519PrivateKey:
    """The key of the node called `name`, the same on every run."""
    return Ed25519PrivateKey.from_private_bytes(hashlib.sha256(name.encode()).digest())


def node_id(name: str) -> NodeId:
    """The NodeId of the node called `name`."""
    return NodeId(node_key(name).public_key().public_bytes_raw().hex())


def memory_node(network: MemoryNetwork, name: str, wrap: Wrap | None = None, **options: object) -> FullNode:
    """A node on `network`; `wrap` may put an emulated WAN around its transport."""

    def make(hello: Callable[[Lane], Hello]) -> Transport:
        transport: Transport = network.transport(node_id(name), hello)
        return wrap(transport) if wrap else transport

    return FullNode(make, node_key(name), name=name, **options)  # type: ignore[arg-type]


@asynccontextmanager
async def memory_swarm(
    folder: Path,
    cut: str,
    *,
    precision: Precision = "bf16",
    ends: EndsAt = "origin",
    threads: int = 1,
    worker: WorkerConfig | None = None,
    request: RequestConfig | None = None,
    wrap: Wrap | None = None,
    spares: Sequence[str] = (),
) -> AsyncIterator[MemorySwarm]:
    """Nodes n0, n1, ... serving the spans of `cut` ("0-2,3-5") and, as spares, those of `spares`, and an origin.

    Closed on leaving, threads too.
    """
    serving = parse_cut(cut, read_facts(folder).num_layers)
    spans = serving + [Span.parse(spare) for spare in spares]
    async with AsyncExitStack() as stack:
        network = MemoryNetwork()
        hops: list[FullNode] = []
        addrs: list[NodeAddr] = []
        for index, span in enumerate(spans):
            node = await stack.enter_async_context(memory_node(network, f"n{index}", wrap, worker=worker))
            await node.worker.host(
                folder,
                span,
                precision,
                _device(stack, threads),
                model_name="test",
                has_ends=ends == "edges",
                is_spare=index >= len(serving),
            )
            hops.append(node)
            addrs.append(await node.listen(NodeAddr("mem", 0)))
        home = await stack.enter_async_context(memory_node(network, "origin", wrap, request=request))
        model = OriginModel(folder, precision, ends, threads)
        yield MemorySwarm(network, Origin(home, model, _device(stack, threads), addrs), hops, addrs)


def _device(stack: AsyncExitStack, threads: int) -> Device:
    device = Device.start(threads)
    stack.callback(device.close)
    return device
