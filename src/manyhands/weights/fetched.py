"""Folders that fetches from the hub have written: where they are, and what of a model they lack."""

from pathlib import Path
from typing import Final

from manyhands.checkpoint.config_fields import read_facts
from manyhands.checkpoint.folder import MANIFEST
from manyhands.checkpoint.manifest import Manifest, check_small
from manyhands.checkpoint.partition import needed_tensors
from manyhands.checkpoint.store import Store
from manyhands.core import Span
from manyhands.errors import ModelError
from manyhands.weights.names import HubId
from manyhands.weights.selection import is_meant

BETWEEN: Final = "+"  # in a folder's name, for the slash in a file's; no name of a file that is fetched has it


def hub_folder(home: Path, repo: str, commit: str, file: str | None = None) -> Path:
    """Where fetches of a repository at a commit go, or of one GGUF file of it."""
    behind = f"--{file.replace('/', BETWEEN)}" if file else ""
    return home / "models" / f"{repo.replace('/', '--')}@{commit}{behind}"


def _parts(folder: Path) -> tuple[str, str]:
    """Commit and file that a folder is of; "" without a file."""
    commit, _, file = folder.name.partition("@")[2].partition("--")
    return commit, file.replace(BETWEEN, "/")


def _is_of(file: str, wanted: str | None) -> bool:
    return is_meant(file, wanted) if wanted and file else file == (wanted or "")


def fetched_folders(home: Path, id: HubId) -> list[Path]:
    """Folders of earlier fetches of this repository, or of this file of it, at any commit; the newest first."""
    found = (home / "models").glob(f"{id.repo.replace('/', '--')}@*")
    ours = [path for path in found if _is_of(_parts(path)[1], id.file)]
    return sorted(ours, key=lambda path: path.stat().st_mtime, reverse=True)


def find_local(home: Path, id: HubId, span: Span | None, with_ends: bool) -> Path | None:
    """A folder fetched earlier that was asked for by this revision and holds all that is needed now; the newest one."""
    for folder in fetched_folders(home, id):
        store = Store(folder)
        is_asked = id.revision in store.revisions or _parts(folder)[0] == id.revision
        if is_asked and _is_complete(folder, store, span, with_ends):
            return folder
    return None


def _is_complete(folder: Path, store: Store, span: Span | None, with_ends: bool) -> bool:
    try:
        if not (folder / MANIFEST).exists() or lacking_tensors(folder, store, span, with_ends):
            return False
        check_small(Manifest.decode((folder / MANIFEST).read_bytes()), folder)
        return True
    except ModelError:  # a file is damaged or gone: the hub has it
        return False


def lacking_tensors(folder: Path, store: Store, span: Span | None, with_ends: bool) -> list[str]:
    """Names of the tensors that are needed and not in `folder`, which has a manifest."""
    manifest = Manifest.decode((folder / MANIFEST).read_bytes(), str(folder / MANIFEST))
    held = {name for names in store.held.values() for name in names}
    return [name for name in needed_tensors(manifest.names, num_layers(folder), span, with_ends) if name not in held]


def num_layers(folder: Path) -> int:
    """As config.json in `folder` says. Raises ModelError."""
    return read_facts(folder).num_layers
