"""Weights from peers: exactly the tensors of a span, from several nodes at once, every byte proven by the ModelId.

The ModelId is the hash of the manifest, and the manifest holds a hash of each tensor, of tokenizer and chat template, and
of config.json as far as it bears on arithmetic. So all of it may come from any node. config.json is written without the keys
that the manifest leaves out.

The folder is one sparse file of the whole model with a journal (store.py), so spans can be added to it, and a kill costs
no more than the tensors under way. Wrong bytes never count as present.
"""

import asyncio
import contextlib
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

from huggingface_hub.utils import WeakFileLock

from manyhands.checkpoint.config_fields import parse_config
from manyhands.checkpoint.dtypes import alignment, stored_bytes
from manyhands.checkpoint.folder import MANIFEST, SINGLE
from manyhands.checkpoint.header import LENGTH_BYTES, TensorEntry
from manyhands.checkpoint.manifest import VOLATILE, HashProgress, Manifest, Silent, TensorDigest, config_digest
from manyhands.checkpoint.partition import ModelFacts, needed_tensors
from manyhands.checkpoint.store import Store, begins_with, check_free, disk_errors
from manyhands.core import ModelId, Span
from manyhands.errors import ModelError, ShardUnavailable
from manyhands.files import write_atomic
from manyhands.weights.asking import first_answer
from manyhands.weights.partial import restore_partial
from manyhands.weights.provider import Provider, ProviderError
from manyhands.weights.schedule import DownloadSchedule
from manyhands.weights.shelf import call_it
from manyhands.weights.workers import Blame, Blames, DownloadWorkers

T = TypeVar("T")

MAX_MODEL_BYTES: Final = 16 << 40  # the largest file that ext4 holds
# A small file is asked of one more provider for each NEXT_S that it takes, of MAX_ASKED at once. 8 Mbit/s bring 30 MB in that;
# 64 MiB of wrong bytes, sent as slowly as is borne, take 20 minutes.
NEXT_S: Final = 30.0
MAX_ASKED: Final = 4
# Providers that tensors are asked of at once; others when none of these can do more. A member can make records of thousands of
# nodes, each of which would be dialled.
MAX_WORKING: Final = 64
LOCK_S: Final = 1.0  # how long one attempt waits for another pull of the same folder


@dataclass(frozen=True, slots=True)
class Need:
    """What to fetch: the layers of `span` (None: all), the ends, and the FILES beside them if asked for.

    `name`: what people call the model.
    """

    model: ModelId
    span: Span | None
    with_ends: bool = False
    with_files: bool = False
    name: str = ""

    @property
    def title(self) -> str:
        """What is being fetched, for people."""
        what = "" if self.span is None else f", layers {self.span}"
        return f"{self.name or self.model[:12]}{what}"


@dataclass(frozen=True, slots=True)
class Pulled:
    """The folder holds what was needed. `received`: bytes of tensors by node, wrong ones too."""

    folder: Path
    manifest: Manifest
    blamed: tuple[Blame, ...]
    received: dict[str, int]


def layout(manifest: Manifest) -> tuple[bytes, dict[str, TensorEntry], int]:
    """Header, places and size of the one file that holds the whole model. Raises ModelError for impossible sizes."""
    places: dict[str, dict[str, object]] = {}
    at = 0
    for tensor in sorted(manifest.tensors, key=lambda tensor: (-alignment(tensor.dtype), tensor.name)):
        size = _size(tensor)
        if at + size > MAX_MODEL_BYTES or tensor.name == "__metadata__":
            raise _impossible(tensor)
        places[tensor.name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [at, at + size]}
        at += size
    raw = json.dumps({"__metadata__": {"format": "pt"}, **places}, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % LENGTH_BYTES)
    base = LENGTH_BYTES + len(raw)
    entries = {t.name: _entry(t, places[t.name]["data_offsets"], base) for t in manifest.tensors}
    return len(raw).to_bytes(LENGTH_BYTES, "little") + raw, entries, base + at


def _size(tensor: TensorDigest) -> int:
    try:
        return stored_bytes(tensor.dtype, tensor.shape)
    except ModelError as error:
        raise _impossible(tensor) from error


def _impossible(tensor: TensorDigest) -> ModelError:
    return ModelError(f"tensor {tensor.name!r:.80} of {tensor.dtype} {list(tensor.shape)} cannot be stored")


def _check_empty(entries: Sequence[TensorEntry], hashes: Mapping[str, str]) -> None:
    """No bytes make a wrong hash of an empty tensor right, from any source. Raises ModelError."""
    for entry in entries:
        if not len(entry) and hashes[entry.name] != sha256(b""):
            raise ModelError(f"tensor {entry.name!r:.80} is empty, and its hash in the {MANIFEST} is of something else")


def _kept_manifest(path: Path, model: ModelId) -> Manifest | None:
    raw = path.read_bytes() if path.exists() else b""
    return Manifest.decode(raw) if sha256(raw) == model else None


def _entry(tensor: TensorDigest, offsets: Any, base: int) -> TensorEntry:
    return TensorEntry(tensor.name, SINGLE, tensor.dtype, tensor.shape, base + offsets[0], base + offsets[1])


def proven_config(raw: bytes) -> bytes:
    """config.json without the keys that the manifest does not cover. Raises ModelError."""
    parse_config(raw)
    stable = json.loads(raw, object_pairs_hook=lambda pairs: {k: v for k, v in pairs if k not in VOLATILE})
    return json.dumps(stable, indent=2, sort_keys=True).encode()


def sha256(raw: bytes) -> str:
    return hashlib.sha256(raw).hexdigest()


async def pull(
    need: Need,
    providers: Sequence[Provider],
    home: Path,
    *,
    here: Sequence[Provider] = (),
    hub: Provider | None = None,
    progress: HashProgress | None = None,
    on_blame: Callable[[Blame], None] | None = None,
) -> Pulled:
    """Fetch into `home`/models/<ModelId> what is needed and not there yet.

    `here` is asked first (other folders of this disk), then `providers`, and `hub` only for what they lack.

    A provider that sends wrong bytes, stalls or goes away is dropped: others do its work, and `on_blame` is told at once.
    May be cancelled, killed and called again. One pull of a folder at a time; others wait. Deadline: the caller's.
    Raises ShardUnavailable if no provider has something, CutError (span outside the model), ModelError, DiskFull.
    """
    folder = home / "models" / need.model
    disk = ThreadPoolExecutor(1, thread_name_prefix="pull")
    work = _Pull(need, folder, disk, progress or Silent(), on_blame or (lambda blame: None))
    try:
        with disk_errors(home, 0):
            try:
                await work.open()
                return await work.run(list(here), list(providers), hub)
            finally:
                await work.on_disk(work.stack.close)
    finally:
        disk.shutdown()


class _Pull:
    """One pull into one folder. What touches the disk, or takes long with many tensors, runs in `disk`, in order."""

    def __init__(
        self,
        need: Need,
        folder: Path,
        disk: ThreadPoolExecutor,
        progress: HashProgress,
        on_blame: Callable[[Blame], None],
    ) -> None:
        self.need = need
        self.folder = folder
        self.stack = ExitStack()
        self.blames = Blames(on_blame)
        self.received: dict[str, int] = {}
        self._disk = disk
        self._progress = progress

    def on_disk(self, do: Callable[..., T], *args: Any) -> "asyncio.Future[T]":
        return asyncio.get_running_loop().run_in_executor(self._disk, do, *args)

    async def open(self) -> None:
        while not await self.on_disk(self._lock):
            pass
        await self.on_disk(call_it, self.folder, self.need.name)
        self.store = await self.on_disk(Store, self.folder)

    def _lock(self) -> bool:
        self.folder.mkdir(parents=True, exist_ok=True)
        try:
            self.stack.enter_context(WeakFileLock(self.folder / ".lock", timeout=LOCK_S))
        except TimeoutError:
            return False
        return True

    async def run(self, here: list[Provider], providers: list[Provider], hub: Provider | None) -> Pulled:
        self._providers = providers
        last = [] if hub is None else [hub]
        tiers = [here, providers, last]
        manifest = await self._manifest(tiers)
        config = await self._config(tiers, manifest)
        if self.need.with_files:
            await self._files(tiers, manifest)
        await self._tensors(manifest, ModelFacts.from_config(parse_config(config)).num_layers, tiers)
        return Pulled(self.folder, manifest, tuple(self.blames.all), self.received)

    # -- small files --------------------------------------------------------------------------------------------------

    async def _manifest(self, tiers: Sequence[Sequence[Provider]]) -> Manifest:
        path = self.folder / MANIFEST
        if (kept := await self.on_disk(_kept_manifest, path, self.need.model)) is not None:
            return kept

        def check(raw: bytes) -> bytes:
            if sha256(raw) != self.need.model:
                raise ModelError(f"its {MANIFEST} has the hash {sha256(raw)[:16]}..., not {self.need.model[:16]}...")
            return raw

        raw = await self._first(MANIFEST, tiers, check)
        manifest = await self.on_disk(Manifest.decode, raw)
        await self.on_disk(write_atomic, path, raw)
        return manifest

    async def _config(self, tiers: Sequence[Sequence[Provider]], manifest: Manifest) -> bytes:
        path = self.folder / "config.json"
        with contextlib.suppress(ModelError, FileNotFoundError):
            if config_digest(raw := path.read_bytes()) == manifest.config_sha256:
                return raw

        def check(raw: bytes) -> bytes:
            if config_digest(raw) != manifest.config_sha256:
                raise ModelError("its config.json is not the one of the manifest")
            return proven_config(raw)

        raw = await self._first("config.json", tiers, check)
        await self.on_disk(write_atomic, path, raw)
        return raw

    async def _files(self, tiers: Sequence[Sequence[Provider]], manifest: Manifest) -> None:
        """Tokenizer and the like."""
        for name, wanted in manifest.files:
            path = self.folder / name
            if path.exists() and sha256(path.read_bytes()) == wanted:
                continue

            def check(raw: bytes, name: str = name, wanted: str = wanted) -> bytes:
                if sha256(raw) != wanted:
                    raise ModelError(f"its {name} is not the one of the manifest")
                return raw

            raw = await self._first(name, tiers, check)
            await self.on_disk(write_atomic, path, raw)

    async def _first(self, name: str, tiers: Sequence[Sequence[Provider]], check: Callable[[bytes], bytes]) -> bytes:
        """The file from the first provider whose bytes pass. Raises ShardUnavailable if there is none."""

        async def ask(provider: Provider) -> bytes | None:
            if (raw := await self._try(provider, name)) is not None:
                try:
                    return await self.on_disk(check, raw)
                except ModelError as error:
                    self.blames.add(provider, "garbage", str(error))
            return None

        for tier in tiers:
            if (found := await first_answer(tier, ask, NEXT_S, MAX_ASKED)) is not None:
                return found
        raise self._unavailable(name)

    async def _try(self, provider: Provider, name: str) -> bytes | None:
        try:
            return await provider.file(self.need.model, name) if provider not in self.blames else None
        except ProviderError as error:
            self.blames.add(provider, error.fault, str(error))
            return None

    def _unavailable(self, name: str) -> ShardUnavailable:
        blames = "; ".join(map(str, self.blames.all[:3]))
        return ShardUnavailable(
            f"no provider has {name} of model {self.need.model[:16]}...: {len(self.live)} peers were asked and lack it"
            f"{f', dropped: {blames}' if blames else ''}. Name a hub id, or let a node that has it join"
        )

    @property
    def live(self) -> list[Provider]:
        return [provider for provider in self._providers if provider not in self.blames]

    # -- tensors ------------------------------------------------------------------------------------------------------

    async def _tensors(self, manifest: Manifest, num_layers: int, tiers: Sequence[Sequence[Provider]]) -> None:
        header, missing, size = await self.on_disk(self._missing, manifest, num_layers)
        if not missing and await self.on_disk(begins_with, self.folder / SINGLE, header):
            return
        total = sum(map(len, missing))
        check_free(self.folder, total)
        board, hashes = DownloadSchedule(missing), {tensor.name: tensor.sha256 for tensor in manifest.tensors}
        _check_empty(missing, hashes)
        with disk_errors(self.folder, total):
            filling = self.store.filling(SINGLE, size, header)
            handle = await self.on_disk(self.stack.enter_context, filling)
            await self.on_disk(restore_partial, self.folder, handle, board.waiting)
            left = total - sum(job.done for job in board.waiting)
            self._progress.start(f"fetching {self.need.title}, from the swarm", left)
            args = (self.need.model, board, hashes, self.store, handle, self.on_disk, self.blames, self._progress)
            crew = DownloadWorkers(*args, self.received)
            try:
                for some in (tier[at : at + MAX_WORKING] for tier in tiers for at in range(0, len(tier), MAX_WORKING)):
                    if board.waiting and (able := [provider for provider in some if provider not in self.blames]):
                        await crew.work(able)
            finally:
                await crew.save()
            if board.waiting:
                raise self._unavailable(f"tensor {next(reversed(board.waiting)).entry.name}")
            self._progress.done()

    def _missing(self, manifest: Manifest, num_layers: int) -> tuple[bytes, list[TensorEntry], int]:
        """What is needed and not there yet; and the header and the size of the file. Raises CutError, ModelError."""
        header, entries, size = layout(manifest)
        needed = needed_tensors(manifest.names, num_layers, self.need.span, self.need.with_ends)
        self.store.settle(SINGLE, entries)
        return header, [entries[name] for name in needed if not self.store.has(SINGLE, name)], size
