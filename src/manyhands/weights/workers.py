"""Fetching tensors: for each provider a few workers that take jobs from the board, write and hash what arrives.

All disk work and hashing runs in the one thread that the caller gives, in order, so the event loop is never held up.
"""

import asyncio
import hashlib
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any, BinaryIO, Final

from manyhands.checkpoint.header import TensorEntry
from manyhands.checkpoint.manifest import BLOCK_BYTES, HashProgress
from manyhands.checkpoint.store import COMMIT_BYTES, Store, erase
from manyhands.core import ModelId
from manyhands.errors import first_of
from manyhands.weights.partial import save_partial
from manyhands.weights.provider import Data, Fault, Lacking, Provider, ProviderError
from manyhands.weights.schedule import DownloadSchedule, TensorJob, TensorPiece

logger = logging.getLogger(__name__)

JOBS_PER_PROVIDER: Final = 4  # tensors at a time: small ones would else cost a round trip each
TAKE_OVER_S: Final = 1.0  # how often an idle worker looks for a slow one

OnDisk = Callable[..., "asyncio.Future[Any]"]  # (function, *arguments): runs it in the disk's thread


@dataclass(frozen=True, slots=True)
class Blame:
    """Why a provider was dropped. `garbage`: wrong bytes; `stalled` and `lost` may be the network."""

    node: str
    name: str
    fault: Fault
    detail: str

    def __str__(self) -> str:
        return f"{self.name} ({self.node[:8]}) {self.fault}: {self.detail}"


class Blames:
    """Which providers were dropped, and why: the first reason, except that garbage outweighs the others."""

    def __init__(self, tell: Callable[[Blame], None]) -> None:
        self.all: list[Blame] = []
        self._tell = tell

    def __contains__(self, provider: Provider) -> bool:
        return any(blame.node == provider.node for blame in self.all)

    def add(self, provider: Provider, fault: Fault, detail: str) -> None:
        untrusted = {blame.node for blame in self.all if blame.fault == "garbage"}
        if provider.node in untrusted or (provider in self and fault != "garbage"):
            return
        self.all = [blame for blame in self.all if blame.node != provider.node]
        blame = Blame(provider.node, provider.name, fault, detail)
        logger.warning("peer=%s dropped from a fetch: %s", provider.node[:8], blame)
        self.all.append(blame)
        self._tell(blame)


@dataclass(eq=False)
class DownloadWorkers:
    """Works off `board` into `handle`, a file that `store` is filling. `hashes`: tensor to SHA-256 (hex)."""

    model: ModelId
    board: DownloadSchedule
    hashes: Mapping[str, str]
    store: Store
    handle: BinaryIO
    on_disk: OnDisk
    blames: Blames
    progress: HashProgress
    received: dict[str, int] = field(default_factory=dict)  # bytes by node, wrong ones too
    _providers: dict[str, Provider] = field(default_factory=dict)
    _unsaved: int = 0  # bytes since the prefixes were written down

    async def work(self, providers: Sequence[Provider]) -> None:
        """Return when all is fetched, or when none of `providers` can do more. Raises OSError."""
        hired = {provider.node: provider for provider in providers}
        self._providers |= hired
        self._changed = asyncio.Event()
        self._over = asyncio.Event()
        try:
            async with asyncio.TaskGroup() as group:
                self._tasks = {
                    node: [group.create_task(self._worker(provider)) for _ in range(JOBS_PER_PROVIDER)]
                    for node, provider in hired.items()
                }
                every = [task for tasks in self._tasks.values() for task in tasks]
                self._num_active = len(every)
                for task in every:
                    task.add_done_callback(self._ended)
                self._signal()
                await self._over.wait()
                for task in every:
                    task.cancel()
        except BaseExceptionGroup as failed:
            if (error := first_of(failed, OSError)) is None:
                raise
            raise error from None

    def _signal(self) -> None:
        """Wake what waits for work, and `work` itself if there is nothing left to wait for."""
        self._changed.set()
        self._changed = asyncio.Event()
        if self.board.is_done or not self._num_active:
            self._over.set()

    def _ended(self, worker: "asyncio.Task[None]") -> None:
        """Also of one that was cancelled before it began: its provider may fail at once."""
        self._num_active -= 1
        self._signal()

    async def _worker(self, provider: Provider) -> None:
        try:
            while (job := await self._next(provider.node)) is not None:
                await self._fetch(job, provider)
        except ProviderError as error:
            self._drop(provider, error.fault, str(error))

    async def _next(self, node: str) -> TensorJob | None:
        while (job := self.board.take(node, _now())) is None:
            if self.board.is_hopeless(node):
                return None
            try:
                async with asyncio.timeout(TAKE_OVER_S):
                    await self._changed.wait()
            except TimeoutError:
                continue
        return job

    async def _fetch(self, job: TensorJob, provider: Provider) -> None:
        """One tensor, or the rest of one. Raises ProviderError."""
        turn, name = job.turn, job.entry.name
        try:
            async with aclosing(provider.read(self.model, name, job.done, len(job.entry))) as blocks:
                async for block in blocks:
                    if job.turn != turn:
                        return
                    await self._write(job, provider.node, block)
            if job.turn == turn:
                await self._check(job, provider)
        except Lacking:
            self.board.lack(provider.node, name)
        finally:
            self.board.give_back(job, turn)
            self._signal()

    async def _write(self, job: TensorJob, node: str, block: Data) -> None:
        job.is_writing = True
        written = self.on_disk(_put, self.handle, job.entry.start + job.done, block, job.sha256)
        await _then(written, lambda: self._note(job, node, block))
        if self._unsaved >= COMMIT_BYTES:
            await self.save()

    async def save(self) -> None:
        """Write down how far the unfinished tensors are. Raises OSError."""
        self._unsaved = 0
        prefixes = {job.entry.name: job.done for job in self.board.unfinished if job.done and not job.suspects}
        await self.on_disk(save_partial, self.store.folder, self.handle, prefixes)

    def _note(self, job: TensorJob, node: str, block: Data) -> None:
        job.is_writing = False
        job.add(node, block)
        self._unsaved += len(block)
        self.received[node] = self.received.get(node, 0) + len(block)
        self.progress.advance(len(block))

    async def _check(self, job: TensorJob, provider: Provider) -> None:
        """Mark a whole tensor if it is right. Raises ProviderError if it is wrong and only one can have done it."""
        job.is_writing = True
        got, entry = job.sha256.hexdigest(), job.entry
        if got == self.hashes[entry.name]:
            marked = self.on_disk(self._mark, job)
            await _then(marked, lambda: self._finish(job, marked.result()))
            return
        is_mixed = bool(job.givers - {provider.node})
        job.suspects = await self.on_disk(_fingerprints, self.handle, entry, job.pieces) if is_mixed else []
        await self.on_disk(erase, self.handle, entry)
        if not is_mixed:
            wanted = self.hashes[entry.name]
            raise ProviderError("garbage", f"tensor {entry.name} has SHA-256 {got[:16]}..., not {wanted[:16]}...")

    def _mark(self, job: TensorJob) -> list[TensorPiece]:
        """On disk: the tensor is whole and right. The pieces that were wrong before."""
        self.store.mark(self.handle, job.entry)
        return _differing(self.handle, job.entry, job.suspects)

    def _finish(self, job: TensorJob, wrong: Sequence[TensorPiece]) -> None:
        self.board.finish(job, _now())
        for piece in wrong:
            detail = f"tensor {job.entry.name}: wrong bytes {piece.start} to {piece.end}"
            if piece.node in self._providers:  # else it was the disk
                self._drop(self._providers[piece.node], "garbage", detail)

    def _drop(self, provider: Provider, fault: Fault, detail: str) -> None:
        self.board.drop(provider.node, is_untrusted=fault == "garbage")
        self.blames.add(provider, fault, detail)
        for task in self._tasks.get(provider.node, ()):
            if task is not asyncio.current_task():
                task.cancel()


def _now() -> float:
    return asyncio.get_running_loop().time()


async def _then(done: "asyncio.Future[Any]", note: Callable[[], None]) -> None:
    """Await what the disk does, and `note` that it has done it: it cannot be called off, so it counts also where the caller is
    cancelled. Raises what it raises."""
    try:
        await asyncio.shield(done)
    except asyncio.CancelledError:
        await asyncio.wait([done])
        if done.exception() is None:
            note()
        raise
    note()


def _put(handle: BinaryIO, at: int, block: Data, sha256: "hashlib._Hash") -> None:
    sha256.update(block)
    handle.seek(at)
    handle.write(block)


def _fingerprints(handle: BinaryIO, entry: TensorEntry, pieces: Sequence[TensorPiece]) -> list[TensorPiece]:
    """The pieces with the hashes of what the file holds there."""
    return [
        replace(piece, sha256=_hash(handle, entry.start + piece.start, entry.start + piece.end)) for piece in pieces
    ]


def _differing(handle: BinaryIO, entry: TensorEntry, suspects: Sequence[TensorPiece]) -> list[TensorPiece]:
    """Those of `suspects` that are not what the file, now right, holds there."""
    truth = _fingerprints(handle, entry, suspects)
    return [old for old, new in zip(suspects, truth, strict=True) if old.sha256 != new.sha256]


def _hash(handle: BinaryIO, start: int, end: int) -> str:
    sha256 = hashlib.sha256()
    handle.seek(start)
    while start < end and (block := handle.read(min(end - start, BLOCK_BYTES))):
        sha256.update(block)
        start += len(block)
    return sha256.hexdigest()
