"""What a model is: every tensor's name, type, shape and hash, and the config that gives them meaning.

`Manifest.id` is the ModelId. It does not depend on how the tensors lie in files, so a sharded checkpoint, a single file
and a part cut out by `split` all have the same one. A folder that holds only some of the tensors carries the whole
manifest as `manyhands.json`; its own tensors are checked against it.
"""

import hashlib
import json
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol, Self

from manyhands.config import home_from_env
from manyhands.core import ModelId, Span
from manyhands.errors import ModelError
from manyhands.model.folder import INDEX, JOURNAL, MANIFEST, parse_config, read_config, read_entries, write_atomic
from manyhands.model.header import DTYPE_BITS, TensorEntry
from manyhands.model.partition import ends_tensors, span_tensors

logger = logging.getLogger(__name__)

BLOCK_BYTES: Final = 8 << 20
# Say who wrote the file, or how to run it; the numbers do not depend on them.
VOLATILE: Final = frozenset({"_name_or_path", "_commit_hash", "transformers_version", "torch_dtype", "dtype"}) | {
    "_attn_implementation",
    "_attn_implementation_autoset",
    "use_cache",
}


_WATCHED: Final = ("config.json", INDEX, MANIFEST, JOURNAL)

Stamp = list[list[object]]  # [file, size, mtime_ns] of everything that a manifest depends on


class Progress(Protocol):
    """Who is told how far a long read or download is. Amounts are bytes."""

    def start(self, name: str, total: int) -> None: ...
    def advance(self, amount: int) -> None: ...
    def done(self) -> None: ...


class Silent:
    """Progress that nobody watches."""

    def start(self, name: str, total: int) -> None:
        pass

    def advance(self, amount: int) -> None:
        pass

    def done(self) -> None:
        pass


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
    """A whole model, tensors sorted by name. Raises ModelError if a name occurs twice."""

    config_sha256: str
    tensors: tuple[TensorDigest, ...]

    def __post_init__(self) -> None:
        names = [tensor.name for tensor in self.tensors]
        if names != sorted(set(names)):
            raise ModelError("a manifest lists its tensors by name, each once")

    @classmethod
    def of(cls, config_sha256: str, tensors: Iterable[TensorDigest]) -> Self:
        return cls(config_sha256, tuple(sorted(tensors)))

    @property
    def id(self) -> ModelId:
        return ModelId(_sha256(self.encode()))

    def digest(self, span: Span) -> str:
        """SHA-256 (hex) of the span's tensors: equal for two nodes iff they serve the same weights there."""
        return self._digest(span_tensors(self.names, span))

    def ends_digest(self) -> str:
        """SHA-256 (hex) of embedding, final norm and head."""
        return self._digest(ends_tensors(self.names))

    @property
    def names(self) -> list[str]:
        return [tensor.name for tensor in self.tensors]

    def encode(self) -> bytes:
        """The canonical bytes, which are also the content of manyhands.json."""
        rows = [tensor.row() for tensor in self.tensors]
        return _canonical({"manyhands": 1, "config": self.config_sha256, "tensors": rows})

    @classmethod
    def decode(cls, raw: bytes, where: str = MANIFEST) -> Self:
        """The inverse of encode; `where` names the source in errors. Raises ModelError for anything else."""
        try:
            body = json.loads(raw)
            if body["manyhands"] != 1:
                raise ValueError(f"version {body['manyhands']}, this program reads 1")
            return cls(_hex(body["config"]), tuple(_decode_row(row) for row in body["tensors"]))
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise ModelError(f"{where} is not a manifest: {error}") from error

    def _digest(self, names: Iterable[str]) -> str:
        wanted = set(names)
        return _sha256(_canonical([tensor.row() for tensor in self.tensors if tensor.name in wanted]))


def _decode_row(row: Any) -> TensorDigest:
    name, dtype, shape, sha256 = row
    if not isinstance(name, str) or dtype not in DTYPE_BITS or any(type(n) is not int or n < 0 for n in shape):
        raise ValueError(f"bad entry {str(row)[:80]}")
    return TensorDigest(name, dtype, tuple(shape), _hex(sha256))


def _hex(text: str) -> str:
    if len(bytes.fromhex(text)) != 32:
        raise ValueError("a hash is not 32 bytes")
    return text


def config_digest(raw: bytes, where: str = "config.json") -> str:
    """SHA-256 (hex) of what in config.json bears on arithmetic. Raises ModelError if it is not a JSON object."""
    return _sha256(_canonical(_stable(parse_config(raw, where))))


def _stable(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _stable(inner) for key, inner in value.items() if key not in VOLATILE}
    return [_stable(inner) for inner in value] if isinstance(value, list) else value


def _canonical(value: Any) -> bytes:
    """Equal values, equal bytes."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()


def _sha256(raw: bytes) -> str:
    return hashlib.sha256(raw).hexdigest()


def build_manifest(folder: Path, progress: Progress | None = None, home: Path | None = None) -> Manifest:
    """The manifest of the model that `folder` holds, whole or in part.

    Every tensor present is read and hashed, unless the same files (by path, size and mtime) were hashed before; that
    is remembered in `home`/manifests ($MANYHANDS_HOME by default). If the folder carries a manifest of its own
    (manyhands.json), that one is returned once config and tensors agree with it. Raises ModelError naming the file or
    tensor at fault.
    """
    folder = folder.resolve()
    entries = read_entries(folder)
    stamp = _stamp(folder, entries)
    cache = (home or home_from_env()) / "manifests" / f"{hashlib.sha256(str(folder).encode()).hexdigest()}.json"
    known = _read_cache(cache, stamp)
    if known is not None:
        return known
    manifest = _hash_folder(folder, entries, progress or Silent())
    if _stamp(folder, entries) == stamp:  # nobody wrote meanwhile
        _write_cache(cache, stamp, manifest)
    return manifest


def _hash_folder(folder: Path, entries: Sequence[TensorEntry], progress: Progress) -> Manifest:
    config = config_digest(read_config(folder), str(folder / "config.json"))
    progress.start(f"hashing {folder.name}", sum(len(entry) for entry in entries))
    held = [hash_tensor(folder, entry, progress) for entry in entries]
    progress.done()
    if not (folder / MANIFEST).exists():
        return Manifest.of(config, held)
    whole = Manifest.decode((folder / MANIFEST).read_bytes(), str(folder / MANIFEST))
    check_part(whole, config, held, folder)
    return whole


def check_part(whole: Manifest, config: str, held: Sequence[TensorDigest], folder: Path) -> None:
    """Raise ModelError unless the config and all `held` tensors of `folder` are those of `whole`."""
    if whole.config_sha256 != config:
        raise ModelError(f"{folder}/config.json is not the one that {MANIFEST} was made with")
    known = {tensor.name: tensor for tensor in whole.tensors}
    for tensor in held:
        expected = known.get(tensor.name)
        if expected is None:
            raise ModelError(f"{folder}: tensor {tensor.name} is unknown to {MANIFEST}")
        if tensor != expected:
            got, want = tensor.sha256[:16], expected.sha256[:16]
            raise ModelError(f"{folder}: tensor {tensor.name} is corrupt: SHA-256 {got}..., {MANIFEST} says {want}...")


def hash_tensor(folder: Path, entry: TensorEntry, progress: Progress) -> TensorDigest:
    """Read one tensor's bytes and hash them. Raises ModelError if the file ends early."""
    digest = hashlib.sha256()
    with (folder / entry.file).open("rb") as handle:
        handle.seek(entry.start)
        left = len(entry)
        while left:
            block = handle.read(min(left, BLOCK_BYTES))
            if not block:
                raise ModelError(f"{folder / entry.file} ends inside tensor {entry.name}")
            digest.update(block)
            progress.advance(len(block))
            left -= len(block)
    return TensorDigest(entry.name, entry.dtype, entry.shape, digest.hexdigest())


def _stamp(folder: Path, entries: Sequence[TensorEntry]) -> Stamp:
    files = sorted({entry.file for entry in entries} | {file for file in _WATCHED if (folder / file).exists()})
    stats = [(file, (folder / file).stat()) for file in files]
    return [[file, stat.st_size, stat.st_mtime_ns] for file, stat in stats]


def _read_cache(path: Path, stamp: Stamp) -> Manifest | None:
    try:
        body = json.loads(path.read_bytes())
        if body["stamp"] != stamp:
            return None
        return Manifest.decode(body["manifest"].encode(), str(path))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, ModelError):
        return None  # a cache that cannot be read is no cache


def _write_cache(path: Path, stamp: Stamp, manifest: Manifest) -> None:
    try:
        write_atomic(path, json.dumps({"stamp": stamp, "manifest": manifest.encode().decode()}).encode())
    except OSError as error:
        logger.warning("hashes are not remembered, the next start computes them again: %s", error)
