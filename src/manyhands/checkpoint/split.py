"""Cut a model into folders that can each be carried to a machine and served there alone.

A part holds config, tokenizer, the tensors of its span and the manifest of the whole model, so all parts have the
ModelId of the model they came from. The first part also has the embedding; the last has final norm and head.
"""

import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from manyhands.checkpoint.config_fields import read_facts
from manyhands.checkpoint.dtypes import alignment
from manyhands.checkpoint.folder import INDEX, JOURNAL, MANIFEST, SINGLE, SMALL_SUFFIXES, read_entries
from manyhands.checkpoint.header import LENGTH_BYTES, TensorEntry
from manyhands.checkpoint.manifest import HashProgress, Manifest, Silent, build_manifest, tensor_blocks
from manyhands.checkpoint.partition import ends_tensors, span_tensors
from manyhands.checkpoint.store import check_free, disk_errors
from manyhands.core import Span, check_cover
from manyhands.errors import BadRequest, ModelError


def split_model(folder: Path, cut: Sequence[Span], out: Path, progress: HashProgress | None = None) -> list[Path]:
    """Write one folder a span into the new folder `out`: 00-first-0-3, 01-inner-4-7, 02-last-8-11.

    `out` appears complete or not at all. Raises BadRequest if it exists, CutError if `cut` does not cover the model,
    ModelError if `folder` lacks a tensor, DiskFull.
    """
    if out.exists():
        raise BadRequest(f"{out} exists already; name a folder that does not")
    check_cover(cut, read_facts(folder).num_layers)
    manifest = build_manifest(folder, progress)
    held = {entry.name: entry for entry in read_entries(folder)}
    if absent := sorted(set(manifest.names) - held.keys()):
        raise ModelError(f"{folder} holds a part of its model only (no {absent[0]}); split needs all of it")
    parts = {name: [held[tensor] for tensor in names] for name, names in plan(manifest, cut).items()}
    draft = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    try:
        _write(folder, draft, parts, manifest, progress or Silent())
        draft.replace(out)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return [out / name for name in parts]


def plan(manifest: Manifest, cut: Sequence[Span]) -> dict[str, list[str]]:
    """Folder name to tensor names, in the order of the cut. A single part is called "whole"."""
    parts = {}
    for index, span in enumerate(cut):
        is_first, is_last = index == 0, index == len(cut) - 1
        place = "whole" if is_first and is_last else "first" if is_first else "last" if is_last else "inner"
        names = span_tensors(manifest.names, span)
        if is_first or is_last:
            names = names + ends_tensors(manifest.names, embed=is_first, head=is_last)
        parts[f"{index:02d}-{place}-{span}"] = names
    return parts


def _write(
    folder: Path, draft: Path, parts: dict[str, list[TensorEntry]], manifest: Manifest, to: HashProgress
) -> None:
    total = sum(len(entry) for entries in parts.values() for entry in entries)
    draft.parent.mkdir(parents=True, exist_ok=True)
    check_free(draft.parent, total)
    with disk_errors(draft.parent, total):
        to.start(f"splitting {folder.name}", total)
        for name, entries in parts.items():
            (draft / name).mkdir(parents=True)
            _copy_small(folder, draft / name)
            (draft / name / MANIFEST).write_bytes(manifest.encode())
            write_safetensors(draft / name / SINGLE, folder, entries, to)
        to.done()


def _copy_small(folder: Path, part: Path) -> None:
    for path in sorted(folder.iterdir()):
        is_ours = path.name in (INDEX, MANIFEST, JOURNAL)
        if path.is_file() and path.suffix in SMALL_SUFFIXES and not is_ours and not path.name.startswith("."):
            shutil.copyfile(path, part / path.name)


def write_safetensors(path: Path, folder: Path, entries: Sequence[TensorEntry], progress: HashProgress) -> None:
    """Copy `entries` from the files of `folder` into one new safetensors file, block by block."""
    ordered = sorted(entries, key=lambda entry: (-alignment(entry.dtype), entry.name))  # keeps each dtype aligned
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for entry in ordered:
        offsets = [at, at + len(entry)]
        header[entry.name] = {"dtype": entry.dtype, "shape": list(entry.shape), "data_offsets": offsets}
        at = offsets[1]
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % LENGTH_BYTES)
    with path.open("wb") as target:
        target.write(len(raw).to_bytes(LENGTH_BYTES, "little") + raw)
        for entry in ordered:
            for block in tensor_blocks(folder, entry, progress):
                target.write(block)
        target.flush()
        os.fsync(target.fileno())
