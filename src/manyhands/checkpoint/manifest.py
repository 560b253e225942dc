"""What a model is: every tensor's name, type, shape and hash, the config that gives them meaning, and the tokenizer.

`Manifest.id` is the ModelId. It does not depend on how the tensors lie in files, so a sharded checkpoint, a single file
and a part cut out by `split` all have the same one. The small files that turn text into ids and back (folder.py: FILES)
belong to it byte for byte: with another tokenizer or chat template the same prompt has another answer. A folder that holds
only some of this carries the whole manifest as `manyhands.json`; what it holds is checked against it.
"""

import hashlib
import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol, Self

from manyhands.checkpoint.config_fields import parse_config
from manyhands.checkpoint.dtypes import is_known
from manyhands.checkpoint.folder import FILES, INDEX, JOURNAL, MANIFEST, RANKED, TOKENIZER, read_config, read_entries
from manyhands.checkpoint.header import TensorEntry, are_sizes, check_tensor_name, check_values
from manyhands.checkpoint.partition import span_tensors
from manyhands.checkpoint.plain_file import MAX_SMALL_BYTES, MAX_TABLE_BYTES, read_if_there, read_small
from manyhands.config import home_from_env
from manyhands.core import ModelId, Span
from manyhands.errors import Damaged, ModelError
from manyhands.files import write_atomic

logger = logging.getLogger(__name__)

VERSION: Final = 2  # 1 did not cover the FILES
BLOCK_BYTES: Final = 8 << 20
# Say what wrote the file, or how to run it; the numbers do not depend on them.
VOLATILE: Final = frozenset({"_name_or_path", "_commit_hash", "transformers_version", "torch_dtype", "dtype"}) | {
    "_attn_implementation",
    "_attn_implementation_autoset",
    "use_cache",
}


REMEDY: Final = "copy or fetch the file again; if it was changed on purpose, `touch` it, and it is another model"

_WATCHED: Final = ("config.json", INDEX, MANIFEST, JOURNAL, *sorted(FILES))

Stamp = list[list[object]]  # [file, size, mtime_ns] of everything that a manifest depends on


class HashProgress(Protocol):
    """Who is told how far a long read or download is. Amounts are bytes."""

    def start(self, name: str, total: int) -> None: ...
    def advance(self, amount: int) -> None: ...
    def done(self) -> None: ...


class Silent:
    """Reports no progress."""

    def start(self, name: str, total: int) -> None:
        pass

    def advance(self, amount: int) -> None:
        pass

    def done(self) -> None:
        pass


class CheckedProgress:
    """Calls `check()` before each report to `progress`. An exception of `check` ends the work that reports."""

    def __init__(self, check: Callable[[], None], progress: HashProgress) -> None:
        self._check, self._progress = check, progress

    def start(self, name: str, total: int) -> None:
        self._check()
        self._progress.start(name, total)

    def advance(self, amount: int) -> None:
        self._check()
        self._progress.advance(amount)

    def done(self) -> None:
        self._check()
        self._progress.done()


@dataclass(frozen=True, slots=True, order=True)
class TensorDigest:
    """A tensor's identity: `sha256` is of its little-endian bytes, in hex."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    sha256: str

    def row(self) -> list[object]:
        return [self.name, self.dtype, list(self.shape), self.sha256]


@dataclass(frozen=True, slots=True)
class Manifest:
    """A whole model, tensors sorted by name. Raises ModelError if a name occurs twice.

    `files`: those of FILES that it has, with the SHA-256 (hex) of their bytes, sorted by name.
    """

    config_sha256: str
    tensors: tuple[TensorDigest, ...]
    files: tuple[tuple[str, str], ...]

    def __post_init__(self) -> None:
        names = [tensor.name for tensor in self.tensors]
        if names != sorted(set(names)):
            raise ModelError("a manifest lists its tensors by name, each once")

    @classmethod
    def of(cls, config_sha256: str, tensors: Iterable[TensorDigest], files: Mapping[str, str]) -> Self:
        return cls(config_sha256, tuple(sorted(tensors)), tuple(sorted(files.items())))

    @property
    def id(self) -> ModelId:
        return ModelId(_sha256(self.encode()))

    def digest(self, span: Span) -> str:
        """SHA-256 (hex) of the span's tensors: equal for two nodes iff they serve the same weights there."""
        return self._digest(span_tensors(self.names, span))

    @property
    def names(self) -> list[str]:
        return [tensor.name for tensor in self.tensors]

    def unlike(self, other: Self) -> str:
        """What differs first: a file, or a tensor; "" if nothing does."""
        if self.config_sha256 != other.config_sha256:
            return "config.json"
        if files := set(self.files) ^ set(other.files):
            return min(files)[0]
        tensors = set(self.tensors) ^ set(other.tensors)
        return f"tensor {min(tensors).name}" if tensors else ""

    def encode(self) -> bytes:
        """The canonical bytes, which are also the content of manyhands.json."""
        rows = [tensor.row() for tensor in self.tensors]
        body = {"manyhands": VERSION, "config": self.config_sha256, "files": dict(self.files), "tensors": rows}
        return _canonical(body)

    @classmethod
    def decode(cls, raw: bytes, where: str = MANIFEST) -> Self:
        """The inverse of encode; `where` names the source in errors. Raises ModelError for anything else."""
        check_values(raw, where)
        try:
            body = json.loads(raw)
            if body["manyhands"] != VERSION:
                raise ValueError(f"version {body['manyhands']!a:.20}, read is {VERSION}; make it anew: remove it")
            tensors = tuple(_decode_row(row) for row in body["tensors"])
            return cls(_hex(body["config"]), tensors, _decode_files(body["files"]))
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise ModelError(f"{where} is not a manifest: {error}") from error

    def _digest(self, names: Iterable[str]) -> str:
        wanted = set(names)
        return _sha256(_canonical([tensor.row() for tensor in self.tensors if tensor.name in wanted]))


def _decode_row(row: Any) -> TensorDigest:
    name, dtype, shape, sha256 = row
    if not is_known(dtype) or not are_sizes(shape):
        raise ValueError(f"bad entry {row!a:.80}")
    check_tensor_name(name, MANIFEST)
    return TensorDigest(name, dtype, tuple(shape), _hex(sha256))


def _hex(text: str) -> str:
    if len(bytes.fromhex(text)) != 32:
        raise ValueError("a hash is not 32 bytes")
    return text


def _decode_files(body: Any) -> tuple[tuple[str, str], ...]:
    if not isinstance(body, dict) or not body.keys() <= FILES:
        raise ValueError(f"bad list of files {body!a:.80}")
    return tuple((name, _hex(body[name])) for name in sorted(body))


def config_digest(raw: bytes, where: str = "config.json") -> str:
    """SHA-256 (hex) of what in config.json bears on arithmetic. Raises ModelError if it is not a JSON object."""
    return _sha256(_canonical(_stable(parse_config(raw, where))))


def hash_files(folder: Path) -> dict[str, str]:
    """Those of FILES that lie in `folder`, with the SHA-256 (hex) of their bytes; those of RANKED only where they are read.
    Raises ModelError."""
    there = [name for name in sorted(FILES) if (folder / name).is_file()]
    if TOKENIZER in there:
        there = [name for name in there if name not in RANKED]
    try:
        return {name: _sha256(read_small(folder / name, MAX_SMALL_BYTES)) for name in there}
    except OSError as error:
        raise ModelError(f"{folder}: a file of the tokenizer cannot be read: {error}") from error


def _stable(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _stable(inner) for key, inner in value.items() if key not in VOLATILE}
    return [_stable(inner) for inner in value] if isinstance(value, list) else value


def _canonical(value: Any) -> bytes:
    """Equal values, equal bytes."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()


def _sha256(raw: bytes) -> str:
    return hashlib.sha256(raw).hexdigest()


def build_manifest(
    folder: Path, progress: HashProgress | None = None, home: Path | None = None, *, called: str = ""
) -> Manifest:
    """The manifest of the model that `folder` holds, whole or in part. `called`: its name for people.

    config.json and the tokenizer's files are hashed each time. Tensors are read and hashed unless weights files of the same
    path, size and mtime were hashed before; that is remembered in `home`/manifests ($MANYHANDS_HOME by default) and says
    what the folder claims to hold: what is used of it is proven when it is loaded (verify.py) or given away
    (weights/seed.py). If the folder carries a manifest of its own (manyhands.json), that one is returned once config,
    tensors and files agree with it. Raises ModelError naming the file or tensor at fault, Damaged where it is known.
    """
    folder = folder.resolve()
    entries = read_entries(folder)
    stamp = _stamp(folder, entries)
    cache = (home or home_from_env()) / "manifests" / f"{hashlib.sha256(str(folder).encode()).hexdigest()}.json"
    known = _read_cache(cache, stamp)
    if known is not None:
        check_small(known, folder)
        return known
    manifest = _hash_folder(folder, entries, progress or Silent(), called)
    if _stamp(folder, entries) == stamp:  # not written to meanwhile
        _write_cache(cache, stamp, manifest)
    return manifest


def _hash_folder(folder: Path, entries: Sequence[TensorEntry], progress: HashProgress, called: str) -> Manifest:
    config = config_digest(read_config(folder), str(folder / "config.json"))
    whole = read_manifest(folder)
    if whole is not None:
        check_small(whole, folder)
    progress.start(f"reading {called or folder.name}", sum(len(entry) for entry in entries))
    held = [hash_tensor(folder, entry, progress) for entry in entries]
    progress.done()
    if whole is None:
        return Manifest.of(config, held, hash_files(folder))
    check_part(whole, held, folder)
    return whole


def described_tensors(folder: Path) -> Sequence[TensorDigest] | Sequence[TensorEntry]:
    """Of the whole model, also where the folder holds a part of it. Raises ModelError."""
    whole = read_manifest(folder)
    return read_entries(folder) if whole is None else whole.tensors


def read_manifest(folder: Path) -> Manifest | None:
    """The manifest that lies in `folder`, None if there is none. Raises ModelError."""
    path = folder / MANIFEST
    raw = read_if_there(path, MAX_TABLE_BYTES)
    return None if raw is None else Manifest.decode(raw, str(path))


def check_small(whole: Manifest, folder: Path) -> None:
    """Raise Damaged unless config.json and all FILES in `folder` are those of `whole`; some may be absent."""
    try:
        config = config_digest(read_config(folder), str(folder / "config.json"))
    except ModelError as error:
        raise Damaged(str(error), str(folder), ("config.json",)) from error
    there = {"config.json": config, **hash_files(folder)}
    known = {"config.json": whole.config_sha256, **dict(whole.files)}
    if wrong := [name for name in there if there[name] != known.get(name)]:
        what = f"{folder / wrong[0]} is not the one that the model's manifest was made with: {REMEDY}"
        raise Damaged(what, str(folder), tuple(wrong))


def check_part(whole: Manifest, held: Sequence[TensorDigest], folder: Path) -> None:
    """Raise Damaged unless all `held` tensors of `folder` are those of `whole`."""
    known = {tensor.name: tensor for tensor in whole.tensors}
    wrong = [tensor for tensor in held if tensor != known.get(tensor.name)]
    if not wrong:
        return
    first = wrong[0]
    expected = known.get(first.name)
    reason = f"is unknown to its {MANIFEST}" if expected is None else _difference(first, expected)
    more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
    message = f"{folder}: tensor {first.name}{more} {reason}: {REMEDY}"
    raise Damaged(message, str(folder), tuple(tensor.name for tensor in wrong))


def _difference(got: TensorDigest, want: TensorDigest) -> str:
    if (got.dtype, got.shape) != (want.dtype, want.shape):
        return f"is {got.dtype} {list(got.shape)}, the model's manifest says {want.dtype} {list(want.shape)}"
    return f"is damaged: SHA-256 {got.sha256[:16]}..., the model's manifest says {want.sha256[:16]}..."


def hash_tensor(folder: Path, entry: TensorEntry, progress: HashProgress) -> TensorDigest:
    """Read one tensor's bytes and hash them. Raises ModelError if the file ends early."""
    digest = hashlib.sha256()
    for block in tensor_blocks(folder, entry, progress):
        digest.update(block)
    return TensorDigest(entry.name, entry.dtype, entry.shape, digest.hexdigest())


def tensor_blocks(folder: Path, entry: TensorEntry, progress: HashProgress) -> Iterator[bytes]:
    """A tensor's bytes, BLOCK_BYTES at a time. Raises ModelError if the file ends early."""
    with (folder / entry.file).open("rb") as handle:
        handle.seek(entry.start)
        left = len(entry)
        while left:
            block = handle.read(min(left, BLOCK_BYTES))
            if not block:
                raise ModelError(f"{folder / entry.file} ends inside tensor {entry.name}")
            yield block
            progress.advance(len(block))
            left -= len(block)


def _stamp(folder: Path, entries: Sequence[TensorEntry]) -> Stamp:
    files = sorted({entry.file for entry in entries} | {file for file in _WATCHED if (folder / file).exists()})
    stats = [(file, (folder / file).stat()) for file in files]
    return [[file, stat.st_size, stat.st_mtime_ns] for file, stat in stats]


def _read_cache(path: Path, stamp: Stamp) -> Manifest | None:
    try:
        body = json.loads(path.read_bytes())
        if body["stamp"] != stamp:
            return None
        manifest = Manifest.decode(body["manifest"].encode(), str(path))
        return manifest if manifest.id == body["id"] else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, ModelError):
        return None  # a cache that cannot be read is no cache


def _write_cache(path: Path, stamp: Stamp, manifest: Manifest) -> None:
    try:
        write_atomic(
            path, json.dumps({"stamp": stamp, "id": manifest.id, "manifest": manifest.encode().decode()}).encode()
        )
    except OSError as error:
        why = error.strerror or error
        logger.warning("hashes are not remembered (%s: %s): the next start computes them again", path.parent, why)
