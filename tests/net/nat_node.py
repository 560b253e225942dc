"""One process of test_nat.py: `python -m tests.net.nat_node '{"role": ..., ...}'`. Speaks JSON lines.

relay    {"listen"}                       says {"listening"}
hop      {"listen", "relay", "layers"}    waits at the relay for calls
origin   {"relay", "ask"}                 for each line on stdin: one request, says {"ids", "paths"}; for "move" also
                                          {"session"}, the paths of its hops at its third token, where it waits for direct
                                          links to all of them; its "paths" are those of its hops at the end
"""

import asyncio
import hashlib
import json
import sys
from collections.abc import Callable, Iterable
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from manyhands import tales
from manyhands.core import NodeAddr, NodeId, SamplingParams, Span
from manyhands.net.certificate import node_id_of
from manyhands.net.reach import ReachPolicy, reach_transport
from manyhands.net.relay.relay import RelayLimits
from manyhands.net.relay.tunnel import relayed
from manyhands.net.transport import Transport
from manyhands.origin import Answer, Origin, OriginModel
from manyhands.origin.node import FullNode
from manyhands.wire.message import Hello, Lane
from manyhands.worker.execute import Device

SECRET = bytes(32)
PARAMS = SamplingParams(max_tokens=12, ignore_eos=True)
PROMPT = "Once upon a time"


def key_of(name: str) -> Ed25519PrivateKey:
    return Ed25519PrivateKey.from_private_bytes(hashlib.sha256(name.encode()).digest())


def id_of(name: str) -> NodeId:
    return node_id_of(key_of(name).public_key())


def make_node(name: str, book: dict[str, list[str]]) -> FullNode:
    """A node with every way but iroh. `book` names addresses by node name."""
    known = {id_of(peer): [NodeAddr.parse(addr) for addr in addrs] for peer, addrs in book.items()}

    def addresses(node: NodeId) -> Iterable[NodeAddr]:
        return known.get(node, [])

    def make(hello: Callable[[Lane], Hello]) -> Transport:
        policy = ReachPolicy(better_s=0.5, max_better_s=1.0)
        return reach_transport(key_of(name), SECRET, hello, book=addresses, limits=RelayLimits(), policy=policy)

    return FullNode(make, key_of(name), name=name)


def say(**facts: Any) -> None:
    sys.stdout.write(json.dumps(facts) + "\n")
    sys.stdout.flush()


async def main(job: dict[str, Any]) -> None:
    device = Device.start(1)
    try:
        async with make_node(job["name"], job.get("book", {})) as node:
            if "layers" in job:
                folder = tales.model_path()
                await node.worker.host(folder, Span.parse(job["layers"]), "bf16", device, model_name="tales")
            if "listen" in job:
                say(listening=str(await node.listen(NodeAddr.parse(job["listen"]))))
            if job["role"] == "hop":
                say(waiting=str(await node.listen(relayed(NodeAddr.parse(job["relay"])))))
            if job["role"] == "origin":
                await ask(node, job, device)
            else:
                await asyncio.to_thread(sys.stdin.read)
    finally:
        device.close()


async def ask(node: FullNode, job: dict[str, Any], device: Device) -> None:
    relay = NodeAddr.parse(job["relay"])
    addrs = [relayed(relay, id_of(name)) for name in job["ask"]]
    model = await device.run(lambda: OriginModel(tales.model_path(), "bf16", "origin"))
    origin = Origin(node, model, device, addrs)
    names = {id_of(name): name for name in job["ask"]}
    while line := await asyncio.to_thread(sys.stdin.readline):
        answer = origin.answer(origin.request(PROMPT, PARAMS))
        async for _ in origin.stream(answer):
            if len(answer.token_ids) == 3 and line == "move\n":
                say(session=hop_paths(answer))
                while "relay" in pool_paths(node, names).values():  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
        say(ids=answer.token_ids, paths=hop_paths(answer) if line == "move\n" else pool_paths(node, names))


def pool_paths(node: FullNode, names: dict[NodeId, str]) -> dict[str, str]:
    """How the best links go."""
    return {f"{names[peer]} {lane}": health.path_kind for (peer, lane), health in node.pool.health().items()}


def hop_paths(answer: Answer) -> list[str]:
    """How the links of the request's hops go that it uses."""
    assert answer.session is not None
    links = [link for hop in answer.session.route.hops for link in hop.links]
    return [link.health.path_kind for link in links]


if __name__ == "__main__":
    asyncio.run(main(json.loads(sys.argv[1])))
