"""One end of a line for test_liveness.py: `listen HOST` or `dial HOST PORT`. Prints a line when links are open or end."""

import asyncio
import sys
import time

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from manyhands.core import NodeAddr
from manyhands.net.pool import LinkPool
from manyhands.net.tls import TlsTransport
from manyhands.net.transport import Link
from manyhands.net.watch import Watch, read
from tests.net.links import says


def say(what: object) -> None:
    sys.stdout.write(f"{what}\n")
    sys.stdout.flush()


async def main(role: str, host: str, port: str = "0") -> None:
    watch = Watch(lambda: pool.in_use())
    num_open = 0
    async with asyncio.TaskGroup() as tasks:

        async def follow(link: Link) -> None:
            reason = await read(link, lambda message: None)
            say(f"ended {link.lane} {time.monotonic()} {reason}")

        def begin(link: Link) -> None:
            nonlocal num_open
            num_open += 1
            tasks.create_task(follow(link))
            if watch.add(link):
                tasks.create_task(watch.run())
            if num_open == 2:
                say("open")

        transport = TlsTransport(Ed25519PrivateKey.generate(), bytes(32), says(role))
        pool = LinkPool(transport, begin)
        if role == "listen":
            say((await transport.listen(NodeAddr(host, 0))).port)
            await pool.accept()
        for lane in ("control", "data"):
            await pool.get(NodeAddr(host, int(port)), lane)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
