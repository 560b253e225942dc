"""A GGUF file on this disk as a checkpoint folder: a link to the file, and beside it the small files made of its header.

Such folders lie in `home`/files, one for each file. They hold no weights: what is hashed, computed with and given to
peers are the bytes of the file itself. They are made anew when the file has changed.
"""

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Final

from manyhands.checkpoint.dtypes import GGUF_SUFFIX as SUFFIX
from manyhands.errors import ModelError
from manyhands.files import write_atomic

if TYPE_CHECKING:
    from manyhands.checkpoint.gguf import Gguf, ReadRange

FILES: Final = "files"  # the folder in `home`
_STAMP: Final = ".made.json"  # of what the small files were made, and by which version of this code
_VERSION: Final = 2


def small_files(gguf: "Gguf", read: "ReadRange") -> dict[str, bytes]:
    """config.json and the tokenizer's files of the model in a GGUF file. Raises ModelError."""
    from manyhands.checkpoint.gguf_model import config_json
    from manyhands.checkpoint.gguf_tokenizer import tokenizer_files

    return {"config.json": config_json(gguf, read), **tokenizer_files(gguf)}


def gguf_folder(file: Path, home: Path) -> Path:
    """The folder of a GGUF file. Raises ModelError if it cannot be served, or the folder cannot be written."""
    file = file.resolve()
    folder = home / FILES / hashlib.sha256(str(file).encode()).hexdigest()[:32]
    try:
        stat = file.stat()
        stamp = json.dumps({"version": _VERSION, "size": stat.st_size, "mtime_ns": stat.st_mtime_ns}).encode()
        if not _is_made(folder, file, stamp):
            _make(folder, file, stamp)
    except OSError as error:
        raise ModelError(f"{file} cannot be read into {folder}: {error.strerror or error}") from error
    return folder


def _is_made(folder: Path, file: Path, stamp: bytes) -> bool:
    link = folder / file.name
    return (
        link.is_symlink()
        and link.resolve() == file
        and (folder / _STAMP).is_file()
        and (folder / _STAMP).read_bytes() == stamp
    )


def _make(folder: Path, file: Path, stamp: bytes) -> None:
    from manyhands.checkpoint.gguf import read_gguf

    def read(start: int, end: int) -> bytes:
        with file.open("rb") as handle:
            handle.seek(start)
            return handle.read(end - start)

    made = small_files(read_gguf(file), read)
    folder.mkdir(parents=True, exist_ok=True)
    for name, raw in made.items():
        write_atomic(folder / name, raw)
    link = folder / file.name
    if not (link.is_symlink() and link.resolve() == file):
        draft = link.with_name(f".{link.name}.link")
        draft.unlink(missing_ok=True)
        draft.symlink_to(file)
        draft.replace(link)
    write_atomic(folder / _STAMP, stamp)


def linked_file(path: Path, home: Path) -> Path | None:
    """The file behind `path` if that is a link that `gguf_folder` made, else None."""
    made_here = path.parent.parent == (home / FILES).resolve()
    return path.resolve() if made_here and path.suffix == SUFFIX and path.is_symlink() else None
