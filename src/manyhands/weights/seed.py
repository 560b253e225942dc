"""Giving weights to other nodes: answers Wants from the folders that this node hosts, and from nothing else.

What may be had is listed when a folder is added: tensors by name with their places, and files of a fixed list. A WeightRequest
selects an item of that list, never a path. A peer's Wants are answered one after the other, each read in one thread
that all share and sent before the next is read; so a peer costs a chunk of memory, and none holds up the event loop.
Every byte is proven by the manifest as it is read (weights/blocks.py): damage on this disk does not spread.
"""

import asyncio
import logging
import math
from collections import deque
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from manyhands.checkpoint.folder import MANIFEST, read_config, read_entries
from manyhands.checkpoint.gguf_folder import linked_file
from manyhands.checkpoint.manifest import build_manifest, config_digest
from manyhands.config import home_from_env
from manyhands.core import ModelId, NodeId
from manyhands.errors import BadRequest, Damaged, LinkClosed, ManyhandsError, ModelError
from manyhands.net.transport import Link
from manyhands.node import Node
from manyhands.weights.blocks import ProvenStretch
from manyhands.weights.provider import MAX_FILE_BYTES
from manyhands.wire.weights_message import WeightRequest, WeightsChunk, WeightsNotFound

logger = logging.getLogger(__name__)

MAX_WAITING: Final = 64  # Wants of one peer; an honest one has 16 under way for each model that it fetches
# What is read and hashed for requests of single bytes (5 times what they ask for, or more), of all peers together. Honest ones
# ask for whole blocks, or for a tensor's end.
MAX_WASTE: Final = 5
WASTE_BPS: Final = 32 << 20
SEND_S: Final = 30.0  # for one chunk to leave: a peer that reads slower than 35 KB/s loses its link


class MemoryFile:
    """A small file in memory: read as a ProvenStretch is."""

    def __init__(self, raw: bytes) -> None:
        self._raw = raw

    def __len__(self) -> int:
        return len(self._raw)

    def reads(self, offset: int, length: int) -> int:
        return min(length, len(self._raw) - offset)

    def read(self, offset: int, length: int) -> bytes:
        return self._raw[offset : offset + length]


@dataclass(frozen=True, slots=True)
class SharedModel:
    """What can be had of one model."""

    tensors: dict[str, ProvenStretch]
    files: dict[str, ProvenStretch | MemoryFile]


class WeightServer:
    """`start` runs a task of the node. Opt-in: without a folder added it answers WeightsNotFound to everything."""

    def __init__(self, start: Callable[[Coroutine[Any, Any, None]], object]) -> None:
        self.num_sent = 0  # bytes of weights
        self._start = start
        self._models: dict[ModelId, SharedModel] = {}
        self._waiting: dict[NodeId, deque[tuple[WeightRequest, Link]]] = {}
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="seed")
        self._rests_until = -math.inf  # by the loop's clock: who asks for single bytes waits
        self._told = set[str]()  # names of what is damaged, each said once

    def __repr__(self) -> str:
        return f"<WeightServer models={len(self._models)} peers={len(self._waiting)} sent={self.num_sent}>"

    async def add(self, folder: Path) -> ModelId:
        """Offer what `folder` holds now; again after more has arrived there. Raises ModelError."""
        model, shared = await asyncio.get_running_loop().run_in_executor(self._reader, read_shared_model, folder)
        self._models[model] = shared
        return model

    def remove(self, model: ModelId) -> None:
        """Offer nothing of `model` any more. Harmless when repeated."""
        self._models.pop(model, None)

    def close(self) -> None:
        self._reader.shutdown(wait=False)

    def register(self, node: Node) -> None:
        """Take requests as they arrive on bulk links."""
        node.handle(WeightRequest, self._on_request)

    def _on_request(self, want: WeightRequest, link: Link) -> bool:
        self.on_want(want, link)
        return True

    def on_want(self, want: WeightRequest, link: Link) -> None:
        """Queue a request of `link`'s peer; one with too many loses the link."""
        waiting = self._waiting.get(link.peer)
        if waiting is None:
            waiting = self._waiting[link.peer] = deque()
            self._start(self._serve(link.peer, waiting))
        if len(waiting) >= MAX_WAITING:
            link.abort(f"more than {MAX_WAITING} requests for weights wait")
            return
        waiting.append((want, link))

    async def _serve(self, peer: NodeId, waiting: deque[tuple[WeightRequest, Link]]) -> None:
        """Answer until nothing waits."""
        try:
            while waiting:
                want, link = waiting.popleft()
                if not link.is_closed:
                    await self._answer(want, link)
        finally:
            del self._waiting[peer]

    async def _answer(self, want: WeightRequest, link: Link) -> None:
        try:
            data = await asyncio.get_running_loop().run_in_executor(
                self._reader, read_want, self._models.get(want.model), want
            )
            link.send(WeightsChunk(want.request, want.offset, data))
            self.num_sent += len(data)
            async with asyncio.timeout(SEND_S):
                await link.drain()
            await self._rest(want, len(data))
        except LinkClosed:
            return
        except TimeoutError:
            link.abort(f"a chunk of weights did not leave within {SEND_S:g} s")
        except ManyhandsError as error:
            await self._refuse(want, link, error)

    async def _rest(self, want: WeightRequest, num_sent: int) -> None:
        """Wait before the next answer to this peer where much was read for little: all that do so share WASTE_BPS."""
        shared = self._models.get(want.model)
        place = None if shared is None else (shared.tensors if want.part == "tensor" else shared.files).get(want.name)
        if place is not None and (num_read := place.reads(want.offset, want.length)) >= MAX_WASTE * num_sent:
            now = asyncio.get_running_loop().time()
            self._rests_until = max(self._rests_until, now) + num_read / WASTE_BPS
            await asyncio.sleep(self._rests_until - now)

    async def _refuse(self, want: WeightRequest, link: Link, error: ManyhandsError) -> None:
        is_news = isinstance(error, Damaged) and want.name not in self._told
        self._told |= {want.name} if is_news else set()
        level = logging.WARNING if is_news else logging.DEBUG
        logger.log(level, "peer=%s wants %s %.80s in vain: %s", link.peer[:8], want.part, want.name, error)
        try:
            link.send(WeightsNotFound(want.request, error.code))
            async with asyncio.timeout(SEND_S):
                await link.drain()
        except (LinkClosed, TimeoutError) as gone:
            link.abort(str(gone))


def read_want(shared: SharedModel | None, want: WeightRequest) -> bytes:
    """The bytes asked for, proven. Raises ModelError (not here, or Damaged), BadRequest (no such bytes)."""
    places: Mapping[str, ProvenStretch | MemoryFile] = {}
    if shared is not None:
        places = shared.tensors if want.part == "tensor" else shared.files
    place = places.get(want.name)
    if place is None:
        raise ModelError(f"{want.part} {want.name!r:.80} of model {want.model[:16]} is not here")
    size = len(place)
    is_beyond = want.offset > size or (want.part == "tensor" and want.offset + want.length > size)
    if is_beyond or not want.length:
        raise BadRequest(f"{want.length} bytes at {want.offset} of {want.name}: it has {size} bytes")
    return place.read(want.offset, want.length)


def read_shared_model(folder: Path) -> tuple[ModelId, SharedModel]:
    """What `folder` can give; files that lie elsewhere (links) are left out. Raises ModelError.

    What it holds is proven when it is first asked for, and again, block by block, whenever it is read.
    """
    folder = folder.resolve()
    manifest = build_manifest(folder)
    known = {tensor.name: tensor for tensor in manifest.tensors}
    held = [entry for entry in read_entries(folder) if entry.name in known]
    places = {file: _place(folder / file) for file in {entry.file for entry in held}}
    tensors = {
        entry.name: ProvenStretch(place, entry.start, entry.end, entry.name, known[entry.name].sha256)
        for entry in held
        if (place := places[entry.file]) is not None
    }
    files: dict[str, ProvenStretch | MemoryFile] = {MANIFEST: MemoryFile(manifest.encode())}
    for name, sha256 in manifest.files:
        if _place(folder / name) is not None and (length := (folder / name).stat().st_size) <= MAX_FILE_BYTES:
            files[name] = ProvenStretch(folder / name, 0, length, name, sha256)
    if _place(folder / "config.json") is not None:
        raw = read_config(folder)
        if config_digest(raw) == manifest.config_sha256 and len(raw) <= MAX_FILE_BYTES:
            files["config.json"] = MemoryFile(raw)
    return manifest.id, SharedModel(tensors, files)


def _place(path: Path) -> Path | None:
    """Where the bytes of `path` really lie: there, or in a GGUF file that its owner named. None: they are not offered."""
    if path.is_file():
        place = path if path.resolve() == path else linked_file(path, home_from_env())
        if place is not None:
            return place
    if path.exists():
        logger.warning("%s is not offered to peers: it lies outside its folder", path)
    return None
