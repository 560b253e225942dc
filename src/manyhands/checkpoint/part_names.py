"""Names of the files of a GGUF model: one, or several that llama.cpp's gguf-split numbers, NAME-00002-of-00005.gguf."""

import re
from pathlib import Path
from typing import Final

from manyhands.checkpoint.dtypes import GGUF_SUFFIX
from manyhands.errors import ModelError

MAX_PARTS: Final = 1 << 12  # each tensor by itself: 1,148 are known
_PART: Final = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf", re.DOTALL)


def all_parts(file: str) -> list[str]:
    """The files of the model that `file` is of, in order; only itself if it is not numbered. Raises ModelError."""
    if (match := _PART.fullmatch(file)) is None:
        return [file]
    number, count = int(match[2]), int(match[3])
    if not 1 <= number <= count <= MAX_PARTS:
        raise ModelError(
            f"{file} refused: by its name it is part {number} of {count}; parts are numbered from 1 to {MAX_PARTS} at most"
        )
    return [f"{match[1]}-{part:05d}-of-{match[3]}.gguf" for part in range(1, count + 1)]


def first_part(file: str) -> str:
    """The first file of the model that `file` is of; the text itself if it is no name of a part."""
    match = _PART.fullmatch(file)
    return file if match is None else f"{match[1]}-00001-of-{match[3]}.gguf"


def model_name(file: str) -> str:
    """The name of a model's file without its suffix and the number of its part."""
    match = _PART.fullmatch(file)
    return file.removesuffix(GGUF_SUFFIX) if match is None else match[1]


def parts_beside(path: Path) -> list[Path]:
    """All files of the model that the file at `path` is of. Raises ModelError naming the first that is not there."""
    found = [path.with_name(name) for name in all_parts(path.name)]
    for part in found:
        if len(found) > 1 and not part.is_file():
            raise ModelError(
                f"{part} is missing: fetch it, all {len(found)} parts of {model_name(path.name)} are needed"
            )
    return found


def only_model(folder: Path) -> Path | None:
    """The first file there of the GGUF model in `folder`, if there is one and no second."""
    files = sorted(folder.glob(f"*{GGUF_SUFFIX}"))
    return files[0] if len({first_part(file.name) for file in files}) == 1 else None
