"""Which GGUF file of a repository is meant: by its own name, or by its quantisation (hf:org/name:Q4_K_M). Pure."""

import re
from collections.abc import Iterable
from typing import Final

from manyhands.checkpoint.dtypes import GGUF_SUFFIX
from manyhands.checkpoint.part_names import first_part, model_name
from manyhands.errors import ModelError

SHOWN: Final = 12  # models that an error lists
_BESIDE: Final = re.compile(r"mmproj|imatrix", re.IGNORECASE)  # files of vision, and what a quantiser has counted


def models_of(names: Iterable[str]) -> list[str]:
    """The GGUF models among the files of a repository, each by its first file."""
    files = (name for name in names if name.endswith(GGUF_SUFFIX) and not _BESIDE.search(name))
    return sorted({first_part(name) for name in files})


def is_meant(file: str, wanted: str) -> bool:
    """Whether `wanted` names this file, or stands in its name (or its folder's) as a word, whatever the case: Q4_K is none of
    Q4_K_M."""
    if wanted.endswith(GGUF_SUFFIX):
        return file == wanted
    return re.search(rf"(?:^|[-._/]){re.escape(wanted)}(?:$|[-./])", model_name(file), re.IGNORECASE) is not None


def meant_file(names: Iterable[str], wanted: str, where: str) -> str:
    """The first file of the model that `wanted` means in a repository with files of these names; a file's own name as it is.

    Raises ModelError where there is none, or more than one: by `where` (org/name@commit).
    """
    if wanted.endswith(GGUF_SUFFIX):
        return wanted
    there = models_of(names)
    found = [file for file in there if is_meant(file, wanted)]
    if not found:
        raise ModelError(f"{where} has no GGUF model {wanted}; {listed(there)}")
    if len(found) > 1:
        raise ModelError(f"{where} has {len(found)} GGUF models {wanted}: name the file; {listed(found)}")
    return found[0]


def listed(models: Iterable[str]) -> str:
    """The models that there are, for an error."""
    names = list(models)
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return f"there are {', '.join(names[:SHOWN])}{more}" if names else "it has no GGUF file"
