"""Providers for the tests of pulls: a folder read in pieces, with whatever an attacker does to them."""

import asyncio
import hashlib
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

from manyhands.checkpoint.folder import MANIFEST
from manyhands.core import ModelId
from manyhands.errors import ModelError
from manyhands.weights.provider import Data, Lacking, ProviderError
from manyhands.weights.seed import read_shared_model, read_want
from manyhands.wire.weights_message import MAX_CHUNK_BYTES, WeightRequest

Twist = Callable[[str, int, bytes], Awaitable[bytes]]  # tensor or file name, offset, true bytes -> what is sent


async def honest(name: str, at: int, data: bytes) -> bytes:
    return data


async def lie(name: str, at: int, data: bytes) -> bytes:
    """One bit of every piece of a tensor is wrong."""
    return data if name.endswith(".json") else bytes([data[0] ^ 1]) + data[1:]


async def stall(name: str, at: int, data: bytes) -> bytes:
    await asyncio.sleep(20)
    raise ProviderError("stalled", "no answer")


async def vanish(name: str, at: int, data: bytes) -> bytes:
    raise ProviderError("lost", "closed by the peer")


async def lack(name: str, at: int, data: bytes) -> bytes:
    raise Lacking(name)


def after(num_pieces: int, then: Twist, before: Twist = honest) -> Twist:
    """`before` for some pieces of tensors, then `then`."""
    seen = 0

    async def twist(name: str, at: int, data: bytes) -> bytes:
        nonlocal seen
        seen += not name.endswith(".json")
        return await (then if seen > num_pieces else before)(name, at, data)

    return twist


def slow(seconds: float) -> Twist:
    async def twist(name: str, at: int, data: bytes) -> bytes:
        await asyncio.sleep(seconds)
        return data

    return twist


@dataclass(eq=False)
class FromDisk:
    """What `folder` has, in pieces of `piece` bytes, each passed through `twist`."""

    name: str
    folder: Path
    twist: Twist = honest
    piece: int = 1500
    asked: list[str] = field(default_factory=list)

    @property
    def node(self) -> str:
        return hashlib.sha256(self.name.encode()).hexdigest()

    def __post_init__(self) -> None:
        self.model, self.store = read_shared_model(self.folder)

    async def read(self, model: ModelId, tensor: str, start: int, end: int) -> AsyncGenerator[Data, None]:
        self.asked.append(tensor)
        for at in range(start, end, self.piece):
            want = WeightRequest(0, model, "tensor", tensor, at, min(self.piece, end - at))
            try:
                data = read_want(self.store, want)
            except ModelError as error:
                raise Lacking(str(error)) from error
            yield await self.twist(tensor, at, data)

    async def file(self, model: ModelId, name: str) -> bytes | None:
        try:
            data = read_want(self.store, WeightRequest(0, model, "file", name, 0, MAX_CHUNK_BYTES))
        except ModelError:
            return None
        try:
            return data if name == MANIFEST else await self.twist(name, 0, data)
        except Lacking:
            return None
