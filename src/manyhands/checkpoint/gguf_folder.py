"""A GGUF model on this disk as a checkpoint folder: a link to each of its files, and the small files made of their headers.

Such folders lie in `home`/files, one for each model. They hold no weights: what is hashed, computed with and given to
peers are the bytes of the files themselves. They are made anew when a file has changed.
"""

import hashlib
import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from manyhands.checkpoint.dtypes import GGUF_SUFFIX as SUFFIX
from manyhands.checkpoint.part_names import parts_beside
from manyhands.errors import ModelError
from manyhands.files import write_atomic

if TYPE_CHECKING:
    from manyhands.checkpoint.gguf import Gguf
    from manyhands.checkpoint.gguf_model import ReadTensor

FILES: Final = "files"  # the folder in `home`
_STAMP: Final = ".made.json"  # of what the small files were made, and by which version of this code
_VERSION: Final = 3


def small_files(gguf: "Gguf", read: "ReadTensor") -> dict[str, bytes]:
    """config.json and the tokenizer's files of a GGUF model. Raises ModelError."""
    from manyhands.checkpoint.gguf_model import config_json
    from manyhands.checkpoint.gguf_tokenizer import tokenizer_files

    return {"config.json": config_json(gguf, read), **tokenizer_files(gguf)}


def gguf_folder(file: Path, home: Path) -> Path:
    """The folder of the model that a GGUF file is, or is a part of. Raises ModelError if it cannot be served, or the folder
    cannot be written."""
    files = parts_beside(file.parent.resolve() / file.name)
    folder = home / FILES / hashlib.sha256(str(files[0]).encode()).hexdigest()[:32]
    try:
        stats = [path.stat() for path in files]
        sizes = [[stat.st_size, stat.st_mtime_ns] for stat in stats]
        stamp = json.dumps({"version": _VERSION, "files": sizes}).encode()
        if not _is_made(folder, files, stamp):
            _make(folder, files, stamp)
    except OSError as error:
        raise ModelError(f"{file} cannot be read into {folder}: {error.strerror or error}") from error
    return folder


def _is_made(folder: Path, files: Sequence[Path], stamp: bytes) -> bool:
    is_linked = all(_leads_to(folder / file.name, file) for file in files)
    return is_linked and (folder / _STAMP).is_file() and (folder / _STAMP).read_bytes() == stamp


def _leads_to(link: Path, file: Path) -> bool:
    return link.is_symlink() and link.readlink() == file


def _make(folder: Path, files: Sequence[Path], stamp: bytes) -> None:
    from manyhands.checkpoint.gguf_parts import read_gguf, read_tensor

    made = small_files(read_gguf(files[0]), partial(read_tensor, files[0].parent))
    folder.mkdir(parents=True, exist_ok=True)
    for name, raw in made.items():
        write_atomic(folder / name, raw)
    for file in files:
        link = folder / file.name
        if not _leads_to(link, file):
            draft = link.with_name(f".{link.name}.link")
            draft.unlink(missing_ok=True)
            draft.symlink_to(file)
            draft.replace(link)
    write_atomic(folder / _STAMP, stamp)


def linked_file(path: Path, home: Path) -> Path | None:
    """The file behind `path` if that is a link that `gguf_folder` made, else None."""
    made_here = path.parent.parent == (home / FILES).resolve()
    return path.resolve() if made_here and path.suffix == SUFFIX and path.is_symlink() else None
