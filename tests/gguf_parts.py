"""A GGUF file in parts, as llama.cpp's gguf-split makes them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from manyhands.checkpoint.gguf import Gguf
from manyhands.checkpoint.gguf_parts import read_gguf
from manyhands.testing.gguf import Written, write_gguf


def split_gguf(file: Path, folder: Path, cuts: Sequence[int]) -> list[Path]:
    """Parts in `folder` of the file; each but the last ends before the tensor of this number in `cuts`."""
    folder.mkdir(parents=True, exist_ok=True)
    found = read_gguf(file)
    ends = [*cuts, len(found.tensors)]
    paths = [folder / f"{file.stem}-{number:05d}-of-{len(ends):05d}.gguf" for number in range(1, len(ends) + 1)]
    for number, path in enumerate(paths):
        start = ends[number - 1] if number else 0
        facts = dict(found.facts) if number == 0 else {}
        write_gguf(
            path, facts | numbers(number, len(ends), len(found.tensors)), written(file, found, start, ends[number])
        )
    return paths


def numbers(number: int, count: int, total: int) -> dict[str, Any]:
    """What part `number` (from 0) says of itself."""
    return {"split.no": np.uint16(number), "split.count": np.uint16(count), "split.tensors.count": np.int32(total)}


def written(file: Path, found: Gguf, start: int, end: int) -> list[Written]:
    """Some tensors of a file, to be written again."""
    raw = np.fromfile(file, np.uint8)
    return [(one.name, one.dtype, one.shape, raw[one.start : one.end]) for one in found.tensors[start:end]]
