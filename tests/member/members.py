"""Members of a swarm in one process, over memory links, under the virtual clock."""

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

from manyhands.checkpoint.manifest import Silent
from manyhands.config import WorkerConfig
from manyhands.core import EndsAt, NodeAddr, Precision, Span
from manyhands.member.config import MemberConfig
from manyhands.member.hosting import Hosting
from manyhands.member.member import Member
from manyhands.member.weights import Weights, weights_of
from manyhands.net.memory import MemoryNetwork
from manyhands.net.transport import Transport
from manyhands.origin import Origin, OriginModel
from manyhands.place.shape import PROCESS_BYTES
from manyhands.swarm.identity import NodeKey
from manyhands.swarm.ticket import Ticket
from manyhands.testing.clock import run_virtual
from manyhands.testing.faults import Faults
from manyhands.wire.message import Hello, Lane
from manyhands.worker.execute import Device
from tests.swarm.records import NOW, key_of

TOKENS = 256
Wrap = Callable[[Transport], Transport]


@dataclass
class Town:
    """A network and the members on it, each entered with `open`. The first one founds the swarm."""

    folder: Path
    home: Path
    stack: AsyncExitStack
    network: MemoryNetwork = field(default_factory=MemoryNetwork)
    faults: Faults = field(default_factory=Faults)
    ticket: Ticket = field(default_factory=lambda: Ticket(bytes(32), "town"))
    said: list[str] = field(default_factory=list)
    slept_s: float = 0.0  # for which the machine of all was suspended
    wrap: Wrap = lambda transport: transport
    clock_off_s: dict[int, float] = field(default_factory=dict)  # of members' wall clocks; may change while they run
    precision: Precision = "bf16"

    def transport(self, key: NodeKey, hello: Callable[[Lane], Hello]) -> Transport:
        """A member's way in and out."""
        return self.network.transport(key.node_id, hello)

    def member(self, index: int, worker: WorkerConfig | None = None, **changes: Any) -> Member:
        """Member number `index`, not entered yet; `changes` are of its MemberConfig."""
        config = MemberConfig(f"n{index}", NodeAddr("127.0.0.1", 0), PROCESS_BYTES + (1 << 30), tokens=TOKENS)
        loop, key = asyncio.get_running_loop(), key_of(index)
        return Member(
            key,
            self.ticket,
            replace(config, **changes),
            lambda hello, book: self.wrap(self.faults.wrap(self.transport(key, hello))),
            worker=worker,
            clock=lambda: 5.0 + index + loop.time(),
            suspended=lambda: self.slept_s,
            unix_clock=lambda: NOW + self.clock_off_s.get(index, 0.0) + loop.time(),
            rng=random.Random(index),
        )

    async def open(self, index: int, **changes: Any) -> Member:
        """A member that has met the others."""
        member = await self.stack.enter_async_context(self.member(index, **changes))
        await member.meet()
        for addr in member.addresses[:1]:
            self.ticket = self.ticket.with_address(addr)
        return member

    async def host(self, index: int, **changes: Any) -> Hosting:
        """A member that has met the others and serves what it chose."""
        return await self.hosting(await self.open(index, **changes))

    async def hosting(self, member: Member, *, with_ends: bool = False) -> Hosting:
        device = Device.start(1)
        self.stack.callback(device.close)
        weights = await weights_of(str(self.folder), self.precision, member.records(), self.home, Silent())
        hosting = Hosting(member, weights, device, self.home, Silent(), self.said.append, with_ends=with_ends)
        await hosting.start()
        member.start_until_leaving(hosting.balancer.keep())
        return hosting

    def origin(self, member: Member, ends_at: EndsAt = "origin") -> Origin:
        device = Device.start(1)
        self.stack.callback(device.close)
        return Origin(member.node, OriginModel(self.folder, self.precision, ends_at), device, (), member.directory)


Play = Callable[[Callable[[Town], Any]], Any]  # of the fixture `play`


@asynccontextmanager
async def town(folder: Path, home: Path, precision: Precision = "bf16") -> AsyncIterator[Town]:
    """A Town without members. All of them state the same time of a layer: the machine's own pace, which other work on it
    disturbs, decides nothing.
    """
    async with AsyncExitStack() as stack:
        stack.enter_context(patch("manyhands.member.hosting.decode_layer_s", lambda model, span, positions: 0.001))
        yield Town(folder, home, stack, precision=precision)


def player(folder: Path, home: Path, limit_s: float | None = None) -> Play:
    """Plays scenes in virtual time, of `limit_s` at most, each with a Town without members of the model in `folder`."""

    def play(scene: Callable[[Town], Any]) -> Any:
        async def main() -> Any:
            async with asyncio.timeout(limit_s), town(folder, home) as place:
                return await scene(place)

        return run_virtual(main())

    return play


def room_for(weights: Weights, num_layers: int) -> int:
    """A budget that holds so many layers and not one more."""
    return weights.shape.process_bytes + weights.shape.span_bytes(Span(0, num_layers), TOKENS)


def spans(member: Member) -> dict[str, list[str]]:
    """Who serves what, as `member` sees it."""
    found: dict[str, list[str]] = {}
    for record in member.records():
        if record.info is not None and record.info.max_sessions:
            found.setdefault(record.name, []).append(str(record.info.span))
    return {name: sorted(held) for name, held in found.items()}
