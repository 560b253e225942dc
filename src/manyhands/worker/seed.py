"""Giving weights to other nodes: answers Wants from the folders that this node hosts, and from nothing else.

What may be had is listed when a folder is added: tensors by name with their places, and files of a fixed list. A Want
selects an item of that list, never a path. A peer's Wants are answered one after the other, each read in one thread
that all share and sent before the next is read; so a peer costs a chunk of memory, and nobody holds up the event loop.
"""

import asyncio
import logging
import os
from collections import deque
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from manyhands.core import ModelId, NodeId
from manyhands.errors import BadRequest, LinkClosed, ManyhandsError, ModelError
from manyhands.model.folder import FILES, MANIFEST, read_entries
from manyhands.model.manifest import build_manifest
from manyhands.model.wants import MAX_FILE_BYTES
from manyhands.net.transport import Link
from manyhands.wire.message import Chunk, Lack, Want

logger = logging.getLogger(__name__)

MAX_WAITING: Final = 64  # Wants of one peer; an honest one has 16 under way for each model that it fetches
SEND_S: Final = 30.0  # for one chunk to leave: a peer that reads slower than 35 KB/s loses its link


@dataclass(frozen=True, slots=True)
class Place:
    """Bytes [start, end) of a file, or of `raw`, which is kept in memory."""

    path: Path | None
    start: int
    end: int
    raw: bytes = b""


@dataclass(frozen=True, slots=True)
class Shelf:
    """What can be had of one model."""

    tensors: dict[str, Place]
    files: dict[str, Place]


@dataclass(slots=True)
class Pace:
    """A cap on bytes per second, with one second of burst. Pure: time is an argument."""

    bytes_per_s: float | None
    _free_at: float = field(default=float("-inf"))

    def wait(self, num_bytes: int, now: float) -> float:
        """Seconds to wait before sending; takes the bytes into account at once."""
        if self.bytes_per_s is None:
            return 0.0
        self._free_at = max(self._free_at, now - 1.0) + num_bytes / self.bytes_per_s
        return max(0.0, self._free_at - now)


class Seed:
    """`start` runs a task of the node. Opt-in: without a folder added it answers Lack to everything."""

    def __init__(self, start: Callable[[Coroutine[Any, Any, None]], object], bytes_per_s: float | None = None) -> None:
        self.pace = Pace(bytes_per_s)
        self.sent: dict[NodeId, int] = {}  # bytes of weights by peer
        self._start = start
        self._shelves: dict[ModelId, Shelf] = {}
        self._waiting: dict[NodeId, deque[tuple[Want, Link]]] = {}
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="seed")

    def __repr__(self) -> str:
        return f"<Seed models={len(self._shelves)} peers={len(self._waiting)} sent={sum(self.sent.values())}>"

    async def add(self, folder: Path) -> ModelId:
        """Offer what `folder` holds now; again after more has arrived there. Raises ModelError."""
        model, shelf = await asyncio.get_running_loop().run_in_executor(self._reader, read_shelf, folder)
        self._shelves[model] = shelf
        return model

    def remove(self, model: ModelId) -> None:
        """Offer nothing of `model` any more. Harmless when repeated."""
        self._shelves.pop(model, None)

    def close(self) -> None:
        self._reader.shutdown(wait=False)

    def on_want(self, want: Want, link: Link) -> None:
        """Queue a request of `link`'s peer; one with too many loses the link."""
        waiting = self._waiting.get(link.peer)
        if waiting is None:
            waiting = self._waiting[link.peer] = deque()
            self._start(self._serve(link.peer, waiting))
        if len(waiting) >= MAX_WAITING:
            link.abort(f"more than {MAX_WAITING} requests for weights wait")
            return
        waiting.append((want, link))

    async def _serve(self, peer: NodeId, waiting: deque[tuple[Want, Link]]) -> None:
        """Answer until nothing waits."""
        try:
            while waiting:
                want, link = waiting.popleft()
                if not link.is_closed:
                    await self._answer(want, link)
        finally:
            del self._waiting[peer]

    async def _answer(self, want: Want, link: Link) -> None:
        loop = asyncio.get_running_loop()
        try:
            data = await loop.run_in_executor(self._reader, read_want, self._shelves.get(want.model), want)
            await asyncio.sleep(self.pace.wait(len(data), loop.time()))
            link.send(Chunk(want.request, want.offset, data))
            self.sent[link.peer] = self.sent.get(link.peer, 0) + len(data)
            async with asyncio.timeout(SEND_S):
                await link.drain()
        except LinkClosed:
            return
        except TimeoutError:
            link.abort(f"a chunk of weights did not leave within {SEND_S:g} s")
        except ManyhandsError as error:
            await self._refuse(want, link, error)

    async def _refuse(self, want: Want, link: Link, error: ManyhandsError) -> None:
        logger.debug("peer=%s wants %s %s in vain: %s", link.peer[:8], want.part, want.name, error)
        try:
            link.send(Lack(want.request, error.code))
            async with asyncio.timeout(SEND_S):
                await link.drain()
        except (LinkClosed, TimeoutError) as gone:
            link.abort(str(gone))


def read_want(shelf: Shelf | None, want: Want) -> bytes:
    """The bytes asked for. Raises ModelError (not here), BadRequest (no such bytes)."""
    places = {} if shelf is None else shelf.tensors if want.part == "tensor" else shelf.files
    place = places.get(want.name)
    if place is None:
        raise ModelError(f"{want.part} {want.name!r:.80} of model {want.model[:16]} is not here")
    size = place.end - place.start
    is_beyond = want.offset > size or (want.part == "tensor" and want.offset + want.length > size)
    if is_beyond or not want.length:
        raise BadRequest(f"{want.length} bytes at {want.offset} of {want.name}: it has {size} bytes")
    start, length = place.start + want.offset, min(want.length, size - want.offset)
    return place.raw[start : start + length] if place.path is None else _read(place.path, start, length)


def _read(path: Path, start: int, length: int) -> bytes:
    """Raises ModelError if the file ends early, is a link or cannot be read."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | getattr(os, "O_NOFOLLOW", 0))
        try:
            data = os.pread(handle, length, start)
        finally:
            os.close(handle)
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}") from error
    if len(data) != length:
        raise ModelError(f"{path} ended early: it was changed while it is offered")
    return data


def read_shelf(folder: Path) -> tuple[ModelId, Shelf]:
    """What `folder` can give, read and hashed; files that lie elsewhere (links) are left out. Raises ModelError."""
    folder = folder.resolve()
    manifest = build_manifest(folder)
    known = set(manifest.names)
    tensors = {
        entry.name: Place(folder / entry.file, entry.start, entry.end)
        for entry in read_entries(folder)
        if entry.name in known and _is_inside(folder / entry.file, folder)
    }
    small = [name for name in sorted(FILES | {"config.json"}) if _is_inside(folder / name, folder)]
    sizes = {name: (folder / name).stat().st_size for name in small}
    files = {name: Place(folder / name, 0, size) for name, size in sizes.items() if size <= MAX_FILE_BYTES}
    files[MANIFEST] = _in_memory(manifest.encode())
    return manifest.id, Shelf(tensors, files)


def _in_memory(raw: bytes) -> Place:
    return Place(None, 0, len(raw), raw)


def _is_inside(path: Path, folder: Path) -> bool:
    """Whether `path` is a file that really lies in `folder`."""
    is_inside = path.is_file() and path.resolve() == path
    if path.exists() and not is_inside:
        logger.warning("%s is not offered to peers: it lies outside its folder", path)
    return is_inside
