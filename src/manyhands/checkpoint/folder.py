"""A model folder: config.json, safetensors files or those of a GGUF model, perhaps an index, a manifest, a journal of arrivals.

Knows names and places, not what the numbers are. Folders are untrusted: every file name in them is checked.
"""

import json
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Final

from manyhands.checkpoint.dtypes import GGUF_SUFFIX as SUFFIX
from manyhands.checkpoint.header import TensorEntry, check_tensor_name, check_values, read_header
from manyhands.checkpoint.part_names import first_part, parts_beside
from manyhands.checkpoint.plain_file import MAX_TABLE_BYTES, read_if_there, read_small
from manyhands.checkpoint.text_part import text_name
from manyhands.errors import ModelError

MANIFEST: Final = "manyhands.json"
JOURNAL: Final = ".ranges.json"  # of a folder that `fetch` fills: which tensors have arrived
MAX_CONFIG_BYTES: Final = 4 << 20  # the largest config.json that is known has 0.2 MB
INDEX: Final = "model.safetensors.index.json"
SINGLE: Final = "model.safetensors"
RANKED: Final = ("tekken.json", "tiktoken.model")  # tokenizers where there is no TOKENIZER (ranked_tokenizer.py)
TOKENIZER: Final = "tokenizer.json"
# What tokenizers, chat templates and stop ids are read from: a part of what a model is.
FILES: Final = frozenset(
    {
        "added_tokens.json",
        "chat_template.jinja",
        "chat_template.json",
        "generation_config.json",
        "merges.txt",
        "special_tokens_map.json",
        "spiece.model",
        *RANKED,
        TOKENIZER,
        "tokenizer.model",
        "tokenizer_config.json",
        "vocab.json",
        "vocab.txt",
    }
)
MAX_FILES: Final = 1 << 14  # of weights, each of which is looked for; the largest models of the hub have some hundreds
_MAX_PATH: Final = 255  # bytes of a file's path in its folder: what file systems allow of one name
SMALL_SUFFIXES: Final = (".json", ".jinja", ".model", ".txt", ".tiktoken")  # config, tokenizer, chat template


def read_config(folder: Path) -> bytes:
    """The bytes of the folder's config.json. Raises ModelError if there is none, or one that is too long."""
    path = folder / "config.json"
    try:
        return read_small(path, MAX_CONFIG_BYTES)
    except OSError as error:
        _refuse_adapter(folder)
        _refuse_several(folder)
        raise ModelError(f"{folder} has no readable config.json: it is not a model folder") from error


def _refuse_several(folder: Path) -> None:
    names = sorted({first_part(path.name) for path in folder.glob(f"*{SUFFIX}")})
    if len(names) > 1:
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        raise ModelError(f"{folder} holds {len(names)} GGUF models: name one of {', '.join(names[:3])}{more}")


def _refuse_adapter(folder: Path) -> None:
    if (folder / "adapter_config.json").exists():
        raise ModelError(
            f"{folder} holds an adapter (LoRA) and no model: merge it into its base model, and serve the result"
        )


def read_entries(folder: Path) -> list[TensorEntry]:
    """Every tensor that `folder` holds, in no particular order; `entry.file` is relative to it.

    A folder with manyhands.json may lack files, and where `fetch` filled it, only arrived tensors count. Raises
    ModelError for missing, truncated or malformed files and for folders with pickle weights only.
    """
    is_partial = (folder / MANIFEST).exists()
    files = _weight_files(folder)
    present = [file for file in files if (folder / file).exists()]
    if not is_partial and len(present) < len(files):
        absent = next(file for file in files if file not in present)
        raise ModelError(f"{folder} lacks {absent}, which {INDEX} names: the download is incomplete")
    arrived = _arrived(folder)
    entries = _read_weights(folder, present)
    if arrived is not None:
        entries = [entry for entry in entries if entry.name in arrived.get(entry.file, ())]
    _refuse_doubles(entries, folder)
    if not is_partial:
        _check_index(entries, folder)
    return entries


def _read_weights(folder: Path, files: Sequence[str]) -> list[TensorEntry]:
    if not files or not files[0].endswith(SUFFIX):
        return [entry for file in files for entry in read_header(folder / file)]
    try:
        stats = [(folder / file).stat() for file in files]
    except OSError as error:
        raise ModelError(f"{folder / files[0]} cannot be read: {error.strerror or error}") from error
    return list(_gguf_entries(folder / files[0], tuple((stat.st_size, stat.st_mtime_ns) for stat in stats)))


@lru_cache(maxsize=8)
def _gguf_entries(path: Path, stamps: tuple[tuple[int, int], ...]) -> tuple[TensorEntry, ...]:
    """Kept because a header is read in a tenth of a second: it holds the vocabulary too, which is not kept."""
    from manyhands.checkpoint.gguf_model import tensor_entries
    from manyhands.checkpoint.gguf_parts import read_gguf

    return tuple(tensor_entries(read_gguf(path)))


def parse_index(raw: bytes, where: str = INDEX) -> dict[str, str]:
    """Tensor name to file name, of the text part. Raises ModelError if malformed, or if a file name could leave the folder."""
    check_values(raw, where)
    try:
        places = {name: str(file) for name, file in json.loads(raw)["weight_map"].items()}
        files = set(places.values())
        if len(files) > MAX_FILES:
            raise ModelError(f"{where} refused: it names {len(files)} files of weights; at most {MAX_FILES} are read")
        for file in files:
            check_file_name(file)
        pairs = [(text_name(check_tensor_name(name, where)), file) for name, file in places.items()]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ModelError(f"{where} is corrupt: {error}") from error
    found: dict[str, str] = {}
    for name, file in pairs:
        if name is not None and found.setdefault(name, file) != file:
            raise ModelError(f"{where}: the text part's tensor {name} is in {found[name]} and in {file}")
    return found


def check_file_name(name: str) -> str:
    """`name` itself if it is a plain relative path; raises ModelError if it could leave its folder, or no file can have it."""
    parts = name.split("/")
    is_plain = name.isprintable() and len(name.encode(errors="replace")) <= _MAX_PATH
    if not is_plain or any(part in ("", ".", "..") for part in parts) or any(c in name for c in "\\:"):
        what = f"not a plain relative path of at most {_MAX_PATH} bytes"
        raise ModelError(f"file name {name[:80]!a} is refused: it is {what}")
    return name


def _read_index(folder: Path) -> dict[str, str]:
    try:
        return parse_index(read_small(folder / INDEX, MAX_TABLE_BYTES))
    except OSError as error:
        raise ModelError(f"{folder / INDEX} cannot be read: {error.strerror or error}") from error


def _weight_files(folder: Path) -> list[str]:
    if (folder / INDEX).exists():
        return sorted(set(_read_index(folder).values()))
    if (folder / SINGLE).exists():
        return [SINGLE]
    if not folder.is_dir():
        raise ModelError(f"{folder} is not a folder")
    if files := sorted(folder.glob(f"*{SUFFIX}")):
        return [path.name for path in parts_beside(files[0])]
    if any(folder.glob("*.bin")) or any(folder.glob("*.pt")) or any(folder.glob("*.pth")):
        raise ModelError(f"{folder} refused: pickle weights; convert to safetensors")
    _refuse_adapter(folder)
    raise ModelError(f"{folder} holds no weights: neither {SINGLE} nor {INDEX}, nor a GGUF file")


def _arrived(folder: Path) -> dict[str, set[str]] | None:
    """Tensors by file that the journal of `fetch` vouches for; None if the folder was not fetched."""
    if (raw := read_if_there(folder / JOURNAL, MAX_TABLE_BYTES)) is None:
        return None
    try:
        return {file: set(names) for file, names in json.loads(raw)["tensors"].items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ModelError(f"{folder / JOURNAL} is corrupt: remove {folder} and fetch again") from error


def _refuse_doubles(entries: Sequence[TensorEntry], folder: Path) -> None:
    seen: dict[str, str] = {}
    for entry in entries:
        if entry.name in seen:
            raise ModelError(f"{folder}: tensor {entry.name} is in {seen[entry.name]} and in {entry.file}")
        seen[entry.name] = entry.file


def _check_index(entries: Sequence[TensorEntry], folder: Path) -> None:
    if not (folder / INDEX).exists():
        return
    places = {entry.name: entry.file for entry in entries}
    for name, file in _read_index(folder).items():
        if places.get(name) != file:
            raise ModelError(f"{folder / file} lacks tensor {name}, which {INDEX} puts there")
