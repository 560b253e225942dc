"""What is on this disk of a model already, whichever way it came: a fetch from the hub, a pull from peers.

Both fill folders under `home`/models, each in a layout of its own; what makes them one model is their manifest.
"""

import asyncio
import hashlib
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path

from manyhands.checkpoint.config_fields import read_facts
from manyhands.checkpoint.folder import MANIFEST, read_entries
from manyhands.checkpoint.header import TensorEntry
from manyhands.checkpoint.manifest import BLOCK_BYTES, Manifest, check_small
from manyhands.checkpoint.partition import needed_tensors, whole_layers
from manyhands.core import ModelId, Span
from manyhands.errors import ModelError
from manyhands.weights.provider import OFFERED, Data, Lacking, ProviderError


def folders_of(model: ModelId, home: Path) -> list[Path]:
    """The folders under `home`/models that hold something of `model`."""
    return sorted(path.parent for path in (home / "models").glob(f"*/{MANIFEST}") if _hash(path) == model)


def find_complete(folders: Sequence[Path], span: Span | None, with_ends: bool) -> Path | None:
    """The first folder with all that a node needs that hosts `span` (None: all layers), None if there is none."""
    return next((folder for folder in folders if not _lacks(folder, span, with_ends)), None)


def layers_here(folders: Sequence[Path]) -> Span | None:
    """The longest run of layers that one folder holds whole, None if none does."""
    runs = [run for folder in folders for run in _runs(folder)]
    return max(runs, key=lambda run: (len(run), -run.start), default=None)


class DiskProvider:
    """A folder as a provider (provider.py): what one fetch brought, no other needs to bring again."""

    def __init__(self, folder: Path) -> None:
        self.node, self.name = f"disk {folder.name}", str(folder)
        self._folder = folder
        self._entries: dict[str, TensorEntry] | None = None

    async def read(self, model: ModelId, tensor: str, start: int, end: int) -> AsyncGenerator[Data, None]:
        entry = (await self._found()).get(tensor)
        if entry is None or end > len(entry):
            raise Lacking(tensor)
        for at in range(entry.start + start, entry.start + end, BLOCK_BYTES):
            yield await asyncio.to_thread(self._block, entry.file, at, min(BLOCK_BYTES, entry.start + end - at))

    async def file(self, model: ModelId, name: str) -> bytes | None:
        path = self._folder / name
        try:
            return await asyncio.to_thread(path.read_bytes) if name in OFFERED and path.is_file() else None
        except OSError as error:
            raise ProviderError("lost", str(error)) from error

    async def _found(self) -> dict[str, TensorEntry]:
        if self._entries is None:
            try:
                found = await asyncio.to_thread(read_entries, self._folder)
            except (OSError, ModelError) as error:
                raise ProviderError("lost", str(error)) from error
            self._entries = {entry.name: entry for entry in found}
        return self._entries

    def _block(self, file: str, at: int, length: int) -> bytes:
        try:
            with (self._folder / file).open("rb") as handle:
                handle.seek(at)
                block = handle.read(length)
        except OSError as error:
            raise ProviderError("lost", str(error)) from error
        if len(block) != length:
            raise ProviderError("lost", f"{self._folder / file} ends early")
        return block


def _lacks(folder: Path, span: Span | None, with_ends: bool) -> bool:
    """Whether anything needed is missing or a small file is damaged, be it only that the folder cannot be read."""
    try:
        manifest, num_layers = _described(folder)
        check_small(manifest, folder)
        needed = needed_tensors(manifest.names, num_layers, span, with_ends)
        return bool(set(needed) - _held(folder)) or not all((folder / name).exists() for name, _ in manifest.files)
    except (OSError, ModelError):
        return True


def _runs(folder: Path) -> list[Span]:
    try:
        manifest, num_layers = _described(folder)
        return whole_layers(manifest.names, _held(folder), num_layers)
    except (OSError, ModelError):
        return []


def _described(folder: Path) -> tuple[Manifest, int]:
    facts = read_facts(folder)
    return Manifest.decode((folder / MANIFEST).read_bytes()), facts.num_layers


def _held(folder: Path) -> set[str]:
    return {entry.name for entry in read_entries(folder)}


def _hash(path: Path) -> str:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return ""
