"""Asking other nodes for parts of a model, over the bulk lane: several requests under way, answers as they come.

Trusts no answer: one without a request is ignored, one that does not fit its request is the peer's fault. Whether
the bytes are the right ones is for download.py to check, which has the hashes.
"""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass
from itertools import count
from typing import Final, Literal, Protocol

from manyhands.checkpoint.folder import FILES, MANIFEST
from manyhands.core import ModelId, NodeId
from manyhands.errors import LinkClosed, ProtocolError
from manyhands.net.transport import Link
from manyhands.node import Node
from manyhands.wire.weights_message import MAX_CHUNK_BYTES, Part, WeightRequest, WeightsChunk, WeightsNotFound

OFFERED: Final = FILES | {"config.json", MANIFEST}
MAX_FILE_BYTES: Final = 96 << 20  # of one; the largest tokenizers have 30 MB, the largest manifest 74 MB (Kimi K3)

CHUNK_BYTES: Final = 512 << 10  # asked for at a time: 42 ms at 100 Mbit/s
WINDOW: Final = 4  # requests of one read under way; four reads a peer make 8 MiB: 100 ms at 600 Mbit/s
STALL_S: Final = 20.0  # without any answer: slower than a chunk in this time, 26 KB/s, is not worth waiting for

Fault = Literal["garbage", "stalled", "lost"]
Data = bytes | bytearray | memoryview


class ProviderError(Exception):
    """A provider is of no more use: it sent wrong bytes (garbage), does not answer (stalled), or cannot be reached (lost)."""

    def __init__(self, fault: Fault, detail: str) -> None:
        super().__init__(detail)
        self.fault: Fault = fault


class Lacking(Exception):
    """A provider does not have what was asked for, and said so."""


class Provider(Protocol):
    """Who can be asked for parts of models. `node` is its id, `name` is for people."""

    @property
    def node(self) -> str: ...
    @property
    def name(self) -> str: ...

    def read(self, model: ModelId, tensor: str, start: int, end: int) -> AsyncGenerator[Data, None]:
        """Bytes [start, end) of a tensor, in order and exactly as many. Raises Lacking, ProviderError. Own deadlines."""

    async def file(self, model: ModelId, name: str) -> bytes | None:
        """A file of OFFERED, None if it has none. Raises ProviderError. Own deadlines."""


@dataclass(frozen=True, slots=True)
class _Asked:
    want: WeightRequest
    link: Link
    answer: "asyncio.Future[WeightsChunk | WeightsNotFound | str]"  # str: why the link is gone


class WeightClient:
    """The requests for weights that a node has under way."""

    def __init__(self) -> None:
        self._numbers = count()
        self._asked: dict[int, _Asked] = {}

    def __repr__(self) -> str:
        return f"<WeightClient under_way={len(self._asked)}>"

    def register(self, node: Node) -> None:
        """Take the answers as they arrive on bulk links."""
        node.handle(WeightsChunk, self.on_answer)
        node.handle(WeightsNotFound, self.on_answer)
        node.observe_links(lost=self.on_lost)

    def ask(self, link: Link, model: ModelId, part: Part, name: str, offset: int, length: int) -> "_Asked":
        """Send a request. Cancel the answer to forget it. Raises LinkClosed."""
        want = WeightRequest(next(self._numbers) % (1 << 32), model, part, name, offset, length)
        link.send(want)
        asked = _Asked(want, link, asyncio.get_running_loop().create_future())
        self._asked[want.request] = asked
        asked.answer.add_done_callback(lambda _: self._asked.pop(want.request, None))
        return asked

    def on_answer(self, answer: WeightsChunk | WeightsNotFound, link: Link) -> bool:
        asked = self._asked.get(answer.request)
        if asked is not None and asked.link is link and not asked.answer.done():
            asked.answer.set_result(answer)
        return True

    def on_lost(self, link: Link, reason: str) -> None:
        for asked in list(self._asked.values()):
            if asked.link is link and not asked.answer.done():
                asked.answer.set_result(reason)


class PeerProvider:
    """A node as a provider. `dial` gives the bulk link to it, as LinkPool.get does."""

    def __init__(self, node: NodeId, name: str, wants: WeightClient, dial: Callable[[], Awaitable[Link]]) -> None:
        self.node: str = node
        self.name = name
        self._wants = wants
        self._dial = dial
        self._num_answers = 0

    def __repr__(self) -> str:
        return f"<PeerProvider {self.name} {self.node[:8]}>"

    async def read(self, model: ModelId, tensor: str, start: int, end: int) -> AsyncGenerator[Data, None]:
        link = await self._link()
        under_way: deque[_Asked] = deque()
        at = start
        try:
            while under_way or at < end:
                while at < end and len(under_way) < WINDOW:
                    length = min(CHUNK_BYTES, end - at)
                    under_way.append(self._ask(link, model, "tensor", tensor, at, length))
                    at += length
                yield await self._answer(under_way[0])
                under_way.popleft()
        finally:
            for asked in under_way:
                asked.answer.cancel()

    async def file(self, model: ModelId, name: str) -> bytes | None:
        link = await self._link()
        whole = bytearray()
        while len(whole) <= MAX_FILE_BYTES:
            asked = self._ask(link, model, "file", name, len(whole), MAX_CHUNK_BYTES)
            try:
                data = await self._answer(asked)
            except Lacking:
                return None
            finally:
                asked.answer.cancel()
            whole += data
            if len(data) < MAX_CHUNK_BYTES:
                return bytes(whole)
        raise ProviderError("garbage", f"{name} does not end within {MAX_FILE_BYTES} bytes")

    async def _link(self) -> Link:
        try:
            async with asyncio.timeout(STALL_S):
                return await self._dial()
        except TimeoutError as error:
            raise ProviderError("lost", f"no connection within {STALL_S:g} s") from error
        except LinkClosed as error:
            raise ProviderError("lost", str(error)) from error

    def _ask(self, link: Link, model: ModelId, part: Part, name: str, offset: int, length: int) -> _Asked:
        try:
            return self._wants.ask(link, model, part, name, offset, length)
        except (LinkClosed, ProtocolError) as error:
            raise ProviderError("lost", str(error)) from error

    async def _answer(self, asked: _Asked) -> Data:
        """The data asked for. Deadline: STALL_S without any answer of this peer. Raises Lacking, ProviderError."""
        while not asked.answer.done():
            before = self._num_answers
            await asyncio.wait([asked.answer], timeout=STALL_S)
            if not asked.answer.done() and self._num_answers == before:
                raise ProviderError("stalled", f"no answer about {asked.want.name} for {STALL_S:g} s")
        self._num_answers += 1
        return _data(asked.want, asked.answer.result())


def _data(want: WeightRequest, answer: WeightsChunk | WeightsNotFound | str) -> Data:
    """The data of an answer. Raises Lacking, ProviderError."""
    if isinstance(answer, str):
        raise ProviderError("lost", answer)
    if isinstance(answer, WeightsNotFound):
        raise Lacking(answer.code)
    num_bytes = len(answer.data)
    is_short = num_bytes < want.length and want.part == "tensor"
    if answer.offset != want.offset or is_short or num_bytes > want.length:
        got = f"{num_bytes} bytes at {answer.offset}"
        raise ProviderError("garbage", f"{want.name}: asked for {want.length} bytes at {want.offset}, got {got}")
    return answer.data
