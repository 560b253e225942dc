"""A hop under a microscope: one SpanHost with links that only take notes, under the virtual clock."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from manyhands.config import WorkerConfig
from manyhands.core import ModelId, NodeAddr, NodeId, Precision, SamplingParams, SessionId, Span, SpanInfo
from manyhands.errors import LinkClosed
from manyhands.net.liveness import LinkEvidence
from manyhands.net.transport import Link
from manyhands.origin.sampler import Sampler
from manyhands.wire.message import PROTOCOL_VERSION, Fault, Hello, Message, Open, Step, Token
from manyhands.wire.signed import UNSIGNED
from manyhands.worker.execute import Device, SpanModel
from manyhands.worker.leases import CacheBudget, SpanLeases
from manyhands.worker.log import LogBudget
from manyhands.worker.owners import Owners
from manyhands.worker.parking import Parking
from manyhands.worker.runner import describe
from manyhands.worker.serve import SpanHost
from tests.worker.tensors import decode_tensor, encode_tensor

ORIGIN, BEFORE, AFTER, NODE = NodeId("0a" * 32), NodeId("0b" * 32), NodeId("0c" * 32), NodeId("0d" * 32)
TOKEN = Token("00" * 16)
MODEL = ModelId("ab" * 32)
NO_ENDS: frozenset[int] = frozenset()
M = TypeVar("M", bound=Message)


@dataclass(eq=False)
class Notes:
    """A Link that remembers what was sent over it."""

    peer: NodeId
    sent: list[Message] = field(default_factory=list)
    is_closed: bool = False

    @property
    def hello(self) -> Hello:
        return Hello(PROTOCOL_VERSION, "control", "notes", None, (), TOKEN)

    def line(self) -> LinkEvidence:
        return LinkEvidence(0)

    def send(self, message: Message) -> None:
        if self.is_closed:
            raise LinkClosed("closed by the test")
        self.sent.append(message)

    def of(self, kind: type[M], session: SessionId | None = None) -> list[M]:
        """The messages of a kind that were sent, those of one session if it is given."""
        return [m for m in self.sent if isinstance(m, kind) and session in (None, getattr(m, "session", None))]


def session_id(number: int) -> SessionId:
    return SessionId(number.to_bytes(16, "big"))


def hidden(count: int, seed: int = 0) -> Tensor:
    return torch.randn(count, 64, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)


def step(number: int, position: int, rows: Tensor | None, **changes: Any) -> Step:
    """Hidden rows at `position` for session `number` on hop 1."""
    count = 0 if rows is None else rows.shape[0]
    payload = None if rows is None else encode_tensor(rows)
    return Step(session_id(number), 1, 1, position, count, 0, 0, "hidden", None, payload)._replace(**changes)


def opening(number: int, capacity: int = 64, **changes: Any) -> Open:
    """An Open of session `number` for hop 1 of 3, layers 2-3."""
    plain = Open(
        session=session_id(number),
        epoch=1,
        hop=1,
        num_hops=3,
        model=MODEL,
        precision="bf16",
        span=Span(2, 4),
        capacity=capacity,
        prompt_length=1,
        path="ring",
        ends="origin",
        predecessor=BEFORE,
        successor=NodeAddr("mem", 1),
        sampling=None,
        credits=16,
        replay_from=0,
        replay_until=0,
        emit_from=0,
        origin=ORIGIN,
        to=NODE,
        token=TOKEN,
        serial=1,
        signature=UNSIGNED,
    )
    return replace(plain, **changes)


class Hop:
    """A host of layers 2-3 and its neighbours."""

    def __init__(self, folder: Path, device: Device, config: WorkerConfig, precision: Precision = "bf16") -> None:
        self.origin, self.before, self.after = Notes(ORIGIN), Notes(BEFORE), Notes(AFTER)
        self.loads = self.num_sent = 0
        info = SpanInfo(
            model=MODEL,
            model_name="test",
            span=Span(2, 4),
            num_layers=6,
            precision=precision,
            arithmetic="test",
            hidden_size=64,
            context_length=1024,
            has_ends=False,
            free_tokens=config.cache_tokens,
            max_sessions=config.max_sessions,
        )

        def load() -> SpanModel:
            self.loads += 1
            return SpanModel(folder, Span(2, 4), precision, False)

        def make_sampler(params: SamplingParams) -> Sampler:
            return Sampler(params, 264, NO_ENDS)

        self.logs = LogBudget(config.log_bytes)
        self.owners = Owners()
        facts = describe(folder, precision)
        sizes = facts.position_bytes[2:4], facts.state_bytes[2:4]
        leases = SpanLeases(CacheBudget(config.cache_bytes), Parking(self.logs), info.span, *sizes)
        self.host = SpanHost(info, load, device, config, make_sampler, self.logs, self.owners, leases)

    async def open(self, number: int, capacity: int = 64, after: Notes | None = None, **changes: Any) -> None:
        message = opening(number, capacity, **changes)
        reserved = self.host.reserve(message, cast(Link, self.origin))
        await self.host.open(reserved, cast(Link, after or self.after))

    def step(self, number: int, position: int, rows: Tensor | None, link: Notes | None = None, **changes: Any) -> None:
        """Let a step arrive, from the predecessor unless another link is given."""
        message = step(number, position, rows, **changes)
        place = self.host.find(message.session, message.hop, message.epoch)
        if place is not None:  # else it is late, and ignored
            self.host.step(place, message, cast(Link, link or self.before))

    def credit(self, number: int, steps: int) -> None:
        """Let the successor of session `number` have computed `steps` steps."""
        epoch = self.owners.epoch_of(session_id(number))
        place = self.host.find(session_id(number), 1, epoch)
        assert place is not None
        self.host.credit(place, steps, epoch)

    def faults(self) -> list[Fault]:
        return self.origin.of(Fault)

    def rows(self, number: int) -> Tensor:
        """All rows that the successor got for a session, joined; their positions must follow each other."""
        steps = self.after.of(Step, session_id(number))
        for one, two in pairwise(steps):
            assert two.position == one.position + one.count
        return torch.cat([decode_tensor(s.payload, s.count) for s in steps if s.payload is not None])

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait for a condition; virtual time moves by at most a few seconds."""
        for _ in range(5000):
            if condition():
                return
            await asyncio.sleep(0.001)
        raise AssertionError("it never came true")

    async def quiet(self) -> None:
        """Let everything happen that can happen."""
        for _ in range(50):
            await asyncio.sleep(0.001)


@asynccontextmanager
async def hop(folder: Path, config: WorkerConfig | None = None, shared: Device | None = None) -> AsyncIterator[Hop]:
    """A running host; its task ends with the block, and its device's thread, unless that is `shared` with another."""
    device = shared or Device.start(1)
    one = Hop(folder, device, config or WorkerConfig())
    task = asyncio.create_task(one.host.run())
    try:
        yield one
        if task.done():
            task.result()
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        if shared is None:
            device.close()
