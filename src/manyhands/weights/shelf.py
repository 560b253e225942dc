"""The models that lie on this machine: what `manyhands list` shows and `manyhands rm` removes. Blocking.

Five kinds: "tales"; the file of a short name (pinned.py); folders fetched from the hub (fetch.py) and from members of a swarm
(download.py), which may hold some layers only; and GGUF files elsewhere that were served from where they lie. A process that
serves a folder holds a lock on it (`in_use`), so that it is not removed under it.
"""

import contextlib
import fcntl
import hashlib
import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from stat import S_ISREG
from typing import Final, Literal

from manyhands.checkpoint.config_fields import read_facts
from manyhands.checkpoint.dtypes import GGUF_SUFFIX as SUFFIX
from manyhands.checkpoint.folder import MANIFEST, read_entries
from manyhands.checkpoint.gguf_folder import FILES as LINKS
from manyhands.checkpoint.gguf_folder import gguf_folder
from manyhands.checkpoint.manifest import read_manifest
from manyhands.checkpoint.part_names import first_part, model_name
from manyhands.checkpoint.partition import whole_layers
from manyhands.core import ModelId, Span
from manyhands.errors import BadRequest, ManyhandsError, ModelError, NotFound
from manyhands.files import lock, write_atomic
from manyhands.weights.catalogue import SHORT_NAMES, ShortName
from manyhands.weights.fetched import BETWEEN
from manyhands.weights.here import folder_named
from manyhands.weights.names import short_path
from manyhands.weights.packed import packed_folder

Kind = Literal["bundled", "short name", "hub", "swarm", "file"]
NAME: Final = ".name"  # in a folder that members of a swarm filled: what they call the model
MAX_NAME_CHARS: Final = 200


@dataclass(frozen=True, slots=True)
class Shelved:
    """A model here. `size`: bytes on the disk; `layers`: the runs that lie here whole, of `num_layers` (0: it cannot be read).

    `folders`: what `remove` removes; of a file elsewhere only what was made of its header.
    """

    name: str
    kind: Kind
    where: Path
    size: int
    layers: tuple[Span, ...]
    num_layers: int
    folders: tuple[Path, ...]

    @property
    def is_whole(self) -> bool:
        return self.num_layers > 0 and self.layers == (Span(0, self.num_layers),)


def on_shelf(home: Path) -> list[Shelved]:
    """Every model that lies here, "tales" first, then by name. What cannot be read is listed without layers."""
    found = [_shelved(name, "hub", folder) for folder, name in _hub_folders(home)]
    found += [_shelved(_swarm_name(folder), "swarm", folder) for folder in _swarm_folders(home)]
    found += [_short(short, home) for short in SHORT_NAMES.values() if _short_folder(short, home).is_dir()]
    found += _linked(home)
    with contextlib.suppress(ModelError):  # an installation without it
        found += [_shelved("tales", "bundled", folder) for folder in (folder_named("tales", home),) if folder]
    return sorted(found, key=lambda each: (each.kind != "bundled", each.name, str(each.where)))


def find(name: str, home: Path) -> list[Shelved]:
    """Those called `name`: by their name, a hub id without its commit, or where they lie. Raises NotFound."""
    found = [e for e in on_shelf(home) if name in (e.name, e.name.partition("@")[0], str(e.where), e.where.name)]
    if not found:
        raise NotFound(f"no model {name!r:.120} lies here: `manyhands list` shows those that do")
    return found


def remove(shelved: Shelved) -> None:
    """Remove it from the disk. Raises BadRequest for what is not ours to remove, or is being served."""
    if shelved.kind == "bundled":
        raise BadRequest(f"{shelved.name} comes with manyhands: it goes with the package")
    with contextlib.ExitStack() as stack:
        for folder in shelved.folders:
            stack.enter_context(_alone(folder, shelved.name))
        for folder in shelved.folders:
            try:
                _forget_packed(folder)
                shutil.rmtree(folder)
            except OSError as error:
                raise BadRequest(f"{folder} cannot be removed: {error.strerror}") from error


def _forget_packed(folder: Path) -> None:
    """Remove what was packed of the model in a folder that was fetched."""
    manifest = folder / MANIFEST
    if folder.parent.name == "models" and manifest.is_file():
        model = ModelId(hashlib.sha256(manifest.read_bytes()).hexdigest())
        shutil.rmtree(packed_folder(folder.parent.parent, model), ignore_errors=True)


@contextlib.contextmanager
def in_use(folder: Path) -> Iterator[None]:
    """While the block runs, `remove` refuses the model in `folder`: the folder itself is locked, nothing is written into it."""
    try:
        handle = os.open(folder, os.O_RDONLY)
    except OSError:
        yield
        return
    try:
        lock(handle, fcntl.LOCK_SH)
        yield
    finally:
        os.close(handle)


@contextlib.contextmanager
def _alone(folder: Path, name: str) -> Iterator[None]:
    try:
        handle = os.open(folder, os.O_RDONLY)
    except OSError as error:
        raise BadRequest(f"{folder} cannot be removed: {error.strerror}") from error
    try:
        lock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError:
        raise BadRequest(
            f"{name} is being served from {folder}: stop the node first (manyhands stop, or Ctrl-C)"
        ) from None
    finally:
        os.close(handle)


def call_it(folder: Path, name: str) -> None:
    """Remember what a swarm calls the model in `folder`."""
    if name and not (folder / NAME).exists():
        write_atomic(folder / NAME, name[:MAX_NAME_CHARS].encode())


# -- where they lie ---------------------------------------------------------------------------------------------------


def _hub_folders(home: Path) -> list[tuple[Path, str]]:
    """Folders of fetch.py (fetched.py: hub_folder) and the hub ids that they were fetched by."""
    found = []
    for folder in sorted((home / "models").glob("*--*@*")):
        repo, _, rest = folder.name.partition("@")
        commit, _, file = rest.partition("--")
        id = f"{repo.replace('--', '/', 1)}@{commit[:8]}"
        found.append((folder, f"hf:{id}:{file.replace(BETWEEN, '/')}" if file else id))
    return found


def _swarm_folders(home: Path) -> list[Path]:
    return [f for f in sorted((home / "models").iterdir()) if len(f.name) == 64] if (home / "models").is_dir() else []


def _swarm_name(folder: Path) -> str:
    try:
        return (folder / NAME).read_text(errors="replace")
    except OSError:
        return folder.name[:12]


def _short_folder(short: ShortName, home: Path) -> Path:
    return short_path(short, home).parent


def _short(short: ShortName, home: Path) -> Shelved:
    """The file of a short name, or what has come of it so far. A file that is damaged has no layers."""
    folder, path = _short_folder(short, home), short_path(short, home)
    if not path.is_file():
        return Shelved(short.name, "short name", folder, _size(folder), (), 0, (folder,))
    try:
        made = gguf_folder(path, home)
    except ModelError:  # a damaged file: `where` is the file itself
        return Shelved(short.name, "short name", path, _size(folder), (), 0, (folder,))
    read = _shelved(short.name, "short name", made)
    return Shelved(short.name, "short name", folder, _size(folder), read.layers, read.num_layers, (folder, made))


def _linked(home: Path) -> list[Shelved]:
    """GGUF models elsewhere on this disk, as far as their files are still there."""
    ours = {short_path(short, home).resolve() for short in SHORT_NAMES.values()}
    found = []
    for link in sorted((home / LINKS).glob(f"*/*{SUFFIX}")):
        parts = [part for part in link.parent.glob(f"*{SUFFIX}") if first_part(part.name) == link.name]
        if parts and all(part.is_file() for part in parts) and link.resolve() not in ours:
            read = _shelved(model_name(link.name), "file", link.parent)
            size = sum(part.stat().st_size for part in parts)
            found.append(Shelved(read.name, "file", link.readlink(), size, read.layers, read.num_layers, read.folders))
    return found


def _shelved(name: str, kind: Kind, folder: Path) -> Shelved:
    layers, num_layers = _layers(folder)
    return Shelved(name, kind, folder, _size(folder), tuple(layers), num_layers, (folder,))


def _layers(folder: Path) -> tuple[Sequence[Span], int]:
    """The runs of layers that lie there whole, and how many the model has; (), 0 where it cannot be read."""
    try:
        num_layers = read_facts(folder).num_layers
        held = {entry.name for entry in read_entries(folder)}
        whole = read_manifest(folder)
        names = sorted(held) if whole is None else whole.names
        return whole_layers(names, held, num_layers), num_layers
    except (ManyhandsError, OSError):
        return (), 0


def _size(folder: Path) -> int:
    """Bytes on the disk: files that are filled in part have holes."""
    total = 0
    for where, _, files in os.walk(folder):  # what goes away meanwhile counts for nothing
        for file in files:
            with contextlib.suppress(OSError):
                stat = (Path(where) / file).lstat()
                total += stat.st_blocks * 512 if S_ISREG(stat.st_mode) else 0
    return total
