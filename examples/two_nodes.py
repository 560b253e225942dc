"""Two real node processes on this machine, TLS between them, and this process as the origin that asks them.

python examples/two_nodes.py                     a tiny random model (its text is noise)
python examples/two_nodes.py FOLDER "a prompt"   any checkpoint folder
"""

import asyncio
import sys
import tempfile
from pathlib import Path

from manyhands.checkpoint.config_fields import read_facts
from manyhands.core import SamplingParams, even_cut
from manyhands.local import NodeOptions, node_processes
from manyhands.net.tls import TlsTransport
from manyhands.origin import Origin, OriginModel
from manyhands.origin.node import FullNode
from manyhands.swarm.identity import NodeKey
from manyhands.swarm.ticket import Ticket
from manyhands.testing.tiny import make_tiny
from manyhands.worker.execute import Device


async def ask(folder: Path, prompt: str) -> None:
    ticket, key = Ticket.new("example"), NodeKey.generate()
    spans = even_cut(read_facts(folder).num_layers, 2)
    device = Device.start(1)
    try:
        async with (
            node_processes(spans, NodeOptions(str(folder), threads=1), ticket) as running,
            FullNode(
                lambda hello: TlsTransport(key.private_key, ticket.secret, hello), key.private_key, name="me"
            ) as node,
        ):
            model = await device.run(lambda: OriginModel(folder, "bf16"))
            origin = Origin(node, model, device, [process.address for process in running])
            answer = await origin.complete(origin.request(prompt, SamplingParams(max_tokens=16)))
            for offer in answer.route:
                print(f"layers {offer.info.span} on {offer.name} at {offer.addr}")
            for (peer, lane), health in node.pool.health().items():
                print(f"link to {peer[:8]} ({lane}): {health.bytes_sent} bytes out, {health.bytes_received} in")
            print(repr(answer.text))
    finally:
        device.close()


def main() -> None:
    prompt = sys.argv[2] if len(sys.argv) > 2 else "Once upon a time"
    with tempfile.TemporaryDirectory() as made:
        folder = Path(sys.argv[1]) if len(sys.argv) > 1 else make_tiny("llama", Path(made) / "tiny")
        asyncio.run(ask(folder, prompt))


if __name__ == "__main__":
    main()
