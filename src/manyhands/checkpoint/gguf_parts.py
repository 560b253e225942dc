"""The headers of the files of one GGUF model, joined to one: of a single file, or of the parts that gguf-split makes.

The first part has the metadata, the others their numbers alone (split.no, split.count, split.tensors.count) and tensors. No
file is read behind its header. https://github.com/ggml-org/llama.cpp/blob/master/tools/gguf-split/gguf-split.cpp
"""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from manyhands.checkpoint.gguf import MAX_HEADER_BYTES, MAX_TENSORS, Gguf, GgufTensor, parse_gguf
from manyhands.checkpoint.part_names import parts_beside
from manyhands.checkpoint.plain_file import file_size
from manyhands.errors import ModelError

_TOTAL: Final = "split.tensors.count"
_AGAIN: Final = "fetch all parts again from one place, under the names that they have there"


def read_gguf(path: Path) -> Gguf:
    """The model that the file at `path` is, or is a part of. Raises ModelError in one line."""
    paths = parts_beside(path)
    return join_headers((_read_header(part, number) for number, part in enumerate(paths)), len(paths))


def read_tensor(folder: Path, tensor: GgufTensor) -> bytes:
    """The bytes of a tensor of a model in `folder`; fewer if its file ends before. Raises OSError."""
    return _read_range(folder / tensor.file, tensor.start, tensor.end)


def _read_header(path: Path, number: int) -> Gguf:
    try:
        size = file_size(path)
        return parse_gguf(lambda start, end: _read_range(path, start, end), path.name, size, number)
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror or error}") from error


def _read_range(path: Path, start: int, end: int) -> bytes:
    with path.open("rb") as handle:
        handle.seek(start)
        return handle.read(end - start)


def join_headers(headers: Iterable[Gguf], count: int) -> Gguf:
    """One model of the headers of its `count` files, in order: each is checked before the next is read. Raises ModelError.

    Metadata and `data_start` are those of the first.
    """
    whole: Gguf | None = None
    tensors: dict[str, GgufTensor] = {}
    length = 0
    for number, part in enumerate(headers):
        whole = whole or part
        if count == 1:
            _check_alone(part)
        else:
            _check_part(part, number, count, whole)
        _add_tensors(part, tensors)
        length += part.data_start
        if len(tensors) > MAX_TENSORS or length > MAX_HEADER_BYTES:
            limits = f"{MAX_TENSORS} tensors and {MAX_HEADER_BYTES} bytes of headers"
            raise ModelError(f"{part.file} refused: with it the parts of the model have more than {limits}")
    assert whole is not None, "a model has a file"
    if count > 1 and len(tensors) != (total := whole.one(_TOTAL)):
        what = f"its {_TOTAL} is {total!r:.40}, and its {count} parts have {len(tensors)} tensors"
        raise ModelError(f"{whole.file} refused: {what}; {_AGAIN}")
    return replace(whole, tensors=tuple(tensors.values()))


def _add_tensors(part: Gguf, tensors: dict[str, GgufTensor]) -> None:
    for tensor in part.tensors:
        if tensors.setdefault(tensor.name, tensor) is not tensor:
            other = tensors[tensor.name].file
            raise ModelError(f"{part.file} refused: tensor {tensor.name[:80]!a} is in {other} too; {_AGAIN}")


def _check_alone(file: Gguf) -> None:
    if (said := file.one("split.count", 1)) not in (0, 1):  # 0 is left by gguf-split --merge
        what = f"its split.count is {said!r:.40}, by its name it is a model by itself"
        raise ModelError(f"{file.file} refused: {what}; name the parts as gguf-split does, NAME-00001-of-00003.gguf")


def _check_part(part: Gguf, number: int, count: int, first: Gguf) -> None:
    """Raise ModelError unless `part` says that it is this one of `count`, of the model of `first`."""
    total = first.one(_TOTAL)
    for key, wanted in (("split.count", count), ("split.no", number), (_TOTAL, total)):
        value = part.one(key)
        if type(value) is not int or value != wanted:
            known = "" if part is first else f", {first.file} has {total!r:.40}"
            what = known if key == _TOTAL else f", by its name it is {wanted}"
            raise ModelError(f"{part.file} refused: its {key} is {value!r:.40}{what}; {_AGAIN}")
    for key, value in part.facts.items():
        if not key.startswith("split.") and not _are_same(value, first.facts.get(key)):
            what = f"its key {key[:80]!a} differs from that of {first.file}, it is a part of another model"
            raise ModelError(f"{part.file} refused: {what}; {_AGAIN}")


def _are_same(one: Any, other: Any) -> bool:
    if isinstance(one, np.ndarray) or isinstance(other, np.ndarray):
        return np.array_equal(one, other)
    return type(one) is type(other) and bool(one == other)
