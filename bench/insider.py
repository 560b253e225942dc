"""The attackers of bench.siege that hold a ticket: a member that floods steps, opens, records and control messages.

Each works on links of its own to every node and dials again when one is closed, at most ten times a second.
"""

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import Any

from bench.target import Target
from manyhands.cli.connect import tls_node
from manyhands.core import NodeAddr, SessionId, Span, SpanLoad
from manyhands.errors import ManyhandsError
from manyhands.net.transport import Link
from manyhands.origin.node import FullNode
from manyhands.swarm.gossip import NEWS
from manyhands.swarm.identity import NodeKey
from manyhands.swarm.news import News
from manyhands.swarm.record import Record
from manyhands.swarm.statement import sign
from manyhands.swarm.ticket import Ticket
from manyhands.wire.message import (
    Close,
    Credit,
    DirectoryUpdate,
    Fault,
    Lane,
    Open,
    Opened,
    Payload,
    Probe,
    Progress,
    Step,
)
from manyhands.wire.signed import DRAWN_BYTES, UNSIGNED, session_of
from manyhands.wire.weights_message import WeightRequest

FORGED = 512  # records that are signed beforehand: 64 keys, eight records each


def random_name() -> SessionId:
    return SessionId(random.randbytes(16))


def plain_rows(width: int, count: int) -> Payload:
    """Rows of 2**-6 in bf16, which a hop computes: zeros it would refuse."""
    return Payload("bf16", width, b"\x80\x3c" * (width * count))


class Insider:
    """A member's node of its own, and what it needs to address the others."""

    def __init__(self, siege: Target, node: FullNode, family: str) -> None:
        self.siege, self.node, self.family = siege, node, family
        self.targets = [NodeAddr.parse(address) for address in siege.addresses]

    def session(self) -> SessionId:
        """A new one of its own."""
        return session_of(self.node.transport.node, random.randbytes(DRAWN_BYTES))

    async def link(self, target: NodeAddr, lane: Lane) -> Link | None:
        """An open link to a node, or None, counted, where it takes none."""
        try:
            async with asyncio.timeout(10):
                return await self.node.pool.get(target, lane)
        except (ManyhandsError, OSError) as error:
            self.siege.count(self.family, type(error).__name__)
            await asyncio.sleep(0.1)
            return None

    async def rounds(self, pause_s: float, *lanes: Lane) -> AsyncIterator[list[Link]]:
        """Open links, one a lane, to each node that takes them and hosts a span: round after round until the siege is over."""
        while not self.siege.is_over:
            for target in self.targets:
                links = [link for lane in lanes if (link := await self.link(target, lane)) is not None]
                if len(links) == len(lanes) and links[0].hello.spans:
                    yield links
            await asyncio.sleep(pause_s)

    def send(self, link: Link, message: Any) -> bool:
        """Send one message; whether the link still took it. An attempt."""
        self.siege.count(self.family)
        try:
            link.send(message)
        except (ManyhandsError, ValueError, OSError) as error:
            self.siege.count(self.family, type(error).__name__)
            return False
        return True

    def open(self, link: Link, session: SessionId, epoch: int = 1, **changes: Any) -> Open:
        """A rightly signed Open of this member's own for a span of the node at `link`."""
        info = link.hello.spans[0]
        asked = Open(
            session=session,
            epoch=epoch,
            hop=0,
            num_hops=1,
            model=info.model,
            precision=info.precision,
            span=info.span,
            capacity=512,
            prompt_length=1,
            path="ring",
            ends="origin",
            predecessor=self.node.transport.node,
            successor=None,
            sampling=None,
            credits=16,
            replay_from=0,
            replay_until=0,
            emit_from=0,
            origin=self.node.transport.node,
            to=link.peer,
            token=link.hello.token,
            serial=1,
            signature=UNSIGNED,
        )
        return self.node.signer.sign(replace(asked, **changes))


async def stay_silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """A listener that accepts, reads and never answers."""
    with contextlib.suppress(OSError):
        while await reader.read(1 << 12):
            pass
    writer.close()


@asynccontextmanager
async def insider(siege: Target, family: str) -> AsyncIterator[Insider]:
    async with tls_node(Ticket.parse(siege.ticket), None) as node:
        await node.listen(NodeAddr("127.0.0.1", 0))
        yield Insider(siege, node, family)


async def step_flood(siege: Target) -> None:
    """Sessions of its own, and far more steps than were granted, large and small."""
    async with insider(siege, "step_flood") as me:
        async for control, data in me.rounds(0.5, "control", "data"):
            session = me.session()
            me.send(control, me.open(control, session))
            await asyncio.sleep(0.05)
            width = control.hello.spans[0].hidden_size
            for rows in (256, 1):
                payload = plain_rows(width, rows)
                for number in range(64):
                    if not me.send(data, Step(session, 1, 0, 0, rows, 0, 0, "hidden", None, payload)):
                        break
                    if number % 8 == 0:
                        await asyncio.sleep(0.01)
            me.send(control, Close(session))


async def park_flood(siege: Target) -> None:
    """Sessions that are parked by the hundred, more positions than they have, and names that others may have parked under."""
    async with insider(siege, "park_flood") as me:
        async for control, data in me.rounds(0.2, "control", "data"):
            width = control.hello.spans[0].hidden_size
            for _ in range(8):
                session = me.session()
                guess: dict[str, Any] = {"resume": random_name(), "resume_until": 256, "adoption": random_name()}
                if not me.send(control, me.open(control, session, **guess)):
                    break
                me.send(data, Step(session, 1, 0, 0, 32, 0, 0, "hidden", None, plain_rows(width, 32)))
                await asyncio.sleep(0.05)
                me.send(control, Close(session, random_name(), random.choice((32, 1 << 20))))


@asynccontextmanager
async def silent_port() -> AsyncIterator[int]:
    """A port of 127.0.0.1 whose listener never answers."""
    async with await asyncio.start_server(stay_silent, "127.0.0.1", 0) as server:
        yield server.sockets[0].getsockname()[1]


async def open_flood(siege: Target) -> None:
    """Opens with rising epochs whose successors do not answer, and sessions that are never closed."""
    async with insider(siege, "open_flood") as me, silent_port() as port:
        successor = NodeAddr("127.0.0.1", port)
        async for (control,) in me.rounds(0.1, "control"):
            session = me.session()
            for epoch in range(1, 40):
                if not me.send(control, me.open(control, session, epoch, hop=0, num_hops=2, successor=successor)):
                    break
            await asyncio.sleep(0.1)


async def forged_records(siege: Target) -> None:
    """Records of made-up nodes that claim every layer, at speeds that no node has, at an address that is silent."""
    async with insider(siege, "forged_records") as me, silent_port() as port:
        statements: list[bytes] = []
        async for (control,) in me.rounds(2, "control"):
            if not statements or random.random() < 0.01:
                statements = await asyncio.to_thread(made_up, control, port)
            for start in range(0, len(statements), 32):
                news = News(statements=statements[start : start + 32])
                me.send(control, DirectoryUpdate(news.encode(NEWS)))
                await asyncio.sleep(0.02)


def made_up(link: Link, port: int) -> list[bytes]:
    """Statements of 64 new keys about every part of the model that the node at `link` serves."""
    info = link.hello.spans[0]
    out = []
    for number in range(64):
        key = NodeKey.generate()
        for part in range(FORGED // 64):
            span = Span(part % info.num_layers, info.num_layers)
            record = Record(
                node=key.node_id,
                name=f"made-up-{number}",
                sequence=int(time.time()) + part,
                issued_at=time.time(),
                lifetime_s=120,
                addresses=(NodeAddr("127.0.0.1", port, key.node_id),),
                relay=None,
                scope="lan",
                info=replace(info, span=span, free_tokens=1 << 20, max_sessions=1 << 10),
                load=SpanLoad(0, 0, 1e-7, 1e-9),
                memory_bytes=1 << 40,
                cores=64,
                device="cpu",
            )
            out.append(sign(record, key))
    return out


async def forged_control(siege: Target) -> None:
    """Messages about sessions that are not its own, and texts that would forge log lines."""
    text = "\x1b[2J\x1b]0;owned\x07\nmanyhands: error: all is lost\r" + "A" * 4000
    async with insider(siege, "forged_control") as me:
        async for control, data in me.rounds(0.2, "control", "data"):
            session = me.session()
            for message in (
                Close(session),
                Probe(session, 1),
                Fault(session, 1, 0, "shard_failed", text, 1),
                Opened(session, 1, 0, text[:200], True),
                Progress(session, 1, 0, 1 << 40, 1 << 40, 1 << 40),
                WeightRequest(1, control.hello.spans[0].model, "tensor", "lm_head.weight", 1 << 40, 1 << 20),
            ):
                me.send(control, message)
            me.send(data, Credit(session, 1, 0, (1 << 32) - 1))


async def many_links(siege: Target) -> None:
    """Members that come, open both lanes to every node, read nothing and go."""
    while not siege.is_over:
        async with AsyncExitStack() as stack:
            for _ in range(4):
                me = await stack.enter_async_context(insider(siege, "many_links"))
                for target in me.targets:
                    siege.count("many_links")
                    if await me.link(target, "control") is not None:
                        siege.count("many_links", "open")
                if siege.is_over:
                    break
            await asyncio.sleep(2)


FAMILIES: list[Callable[[Target], Coroutine[Any, Any, None]]] = [
    step_flood,
    park_flood,
    open_flood,
    forged_records,
    forged_control,
    many_links,
]
