"""What the name of a model may be: a short name, a folder, a GGUF file, or a hub id. Looks at the disk, at nothing in it.

Of a GGUF model in several files any of them is its name, as their folder is where it holds no other model; what the user
sees is the same for all of them.

Short names are "tales", which comes with the package, and those of catalogue.py, whose file lies in $MANYHANDS_HOME once it
was fetched. A folder or file of the same name must be written as a path: ./smollm2.
"""

import re
from pathlib import Path
from typing import Final, NamedTuple

from manyhands.checkpoint.dtypes import GGUF_SUFFIX as SUFFIX
from manyhands.checkpoint.part_names import all_parts, first_part, model_name, only_model
from manyhands.config import home_from_env
from manyhands.errors import ModelError
from manyhands.files import expanded
from manyhands.plain import short_line
from manyhands.weights.catalogue import SHORT_NAMES, ShortName

_HUB_ID: Final = re.compile(
    r"(?:hf:)?([\w-][\w.-]{0,95}/[\w-][\w.-]{0,95})(?:@([\w.-][\w./-]{0,200}))?"
    r"(?::((?:[\w-][\w.-]{0,95}/){0,4}[\w-][\w.-]{0,200}\.gguf|[\w-]{2,32}))?"
)


class HubId(NamedTuple):
    """A model on the hub: a repository at a branch, tag or commit, or one GGUF file of it: the first of its parts, or the
    quantisation that stands in its name (selection.py)."""

    repo: str
    revision: str
    file: str | None


def short_path(model: ShortName, home: Path) -> Path:
    """Where the file of a short name is kept."""
    return home / "models" / model.name / model.file


def gguf_file(name: str, home: Path | None = None) -> Path | None:
    """The GGUF file here that `name` is, or that lies in the folder that it is, of a model in several files one of them.

    `home`: where those of short names lie ($MANYHANDS_HOME).
    """
    if (short := SHORT_NAMES.get(name)) is not None:
        path = short_path(short, home or home_from_env())
        return path if path.is_file() else None
    path = expanded(name)
    if name.endswith(SUFFIX) and path.is_file():
        return path
    folder = model_folder(name)
    return None if folder is None or (folder / "config.json").exists() else only_model(folder)


def model_folder(name: str) -> Path | None:
    """The checkpoint folder here that `name` is, if it is one; no short name is."""
    path = expanded(name)
    return path if name not in ("", "tales", *SHORT_NAMES) and path.is_dir() else None


def is_here(name: str) -> bool:
    """Whether no hub is needed for this model."""
    return name == "tales" or model_folder(name) is not None or gguf_file(name) is not None


def label(name: str) -> str:
    """What a model is called in records and in the API: `own_name` as a line of at most 255 bytes, as records have room for."""
    return short_line(own_name(name))


def own_name(name: str) -> str:
    """A folder or file by its own name, else what the user typed: up to 4 KiB for a hub id, and any characters of a path."""
    if name not in SHORT_NAMES and (file := gguf_file(name)) is not None:
        return model_name(file.name)
    folder = model_folder(name)
    return first_part(name) if folder is None else folder.resolve().name


def parse_hub_id(name: str) -> HubId:
    """What "[hf:]org/name[@revision][:[folder/]file.gguf]" or "...:Q4_K_M" names, or where a short name's file lies on the hub.

    Raises ModelError for anything else.
    """
    if (short := SHORT_NAMES.get(name)) is not None:
        return HubId(short.repo, short.commit, short.file)
    match = _HUB_ID.fullmatch(name)
    if match is None or ".." in name or (name.endswith(SUFFIX) and match[3] is None):
        _check_path(name)
        import difflib

        short_names = ("tales", *SHORT_NAMES)
        close = difflib.get_close_matches(name.lower(), short_names, 1, 0.7)
        raise ModelError(
            f"model {name!r} is no folder or GGUF file here, no short name ({', '.join(short_names)}) and no "
            "hub id like org/name[@revision], hf:org/name:file.gguf or hf:org/name:Q4_K_M"
            f"{f'; did you mean {close[0]}?' if close else ''}"
        )
    return HubId(match[1], match[2] or "main", match[3] and all_parts(match[3])[0])


def _check_path(name: str) -> None:
    """Raise ModelError for a path, and say no more than what is wrong with it."""
    path = expanded(name)
    if path.is_file():
        raise ModelError(f"model {name!r} is a file, and no GGUF file: name the folder of the checkpoint that it is of")
    if name.startswith(("/", "./", "../", "~")) or (name.endswith(SUFFIX) and not name.startswith("hf:")):
        where = "" if path.is_absolute() else f" in {Path.cwd()}"
        raise ModelError(f"there is no {name!r}{where}: name a checkpoint folder or a GGUF file that is there")


def is_hub_gguf(name: str) -> bool:
    """Whether this is a GGUF model of the hub. Raises ModelError if it is no hub id."""
    return parse_hub_id(name).file is not None


def check_name(name: str) -> str:
    """`name`, if it can be that of a model: the disk is looked at, no hub is asked. Raises ModelError."""
    if not is_here(name):
        parse_hub_id(name)
    return name
