"""From a model's name to a folder that holds what a node needs of it, and not much more.

A local folder is itself; "tales" ships with the package; a short name's file is fetched whole (pinned.py); anything else
is a hub id. From the hub only the byte ranges
of the needed tensors are read, each checked against the model's manifest. Where no manifest is known, all weights are
read once to make it, and still only the needed ones are kept. A fetch may be killed at any time and resumed, and
another one may add other layers to the same folder. Blocking: call it from a thread.

Why this is not download.py. A download has the ModelId, and so every tensor's hash: any provider may give any of
them, several at once, into one file of the whole model; the hub is then a provider like the others (hub_provider.py). A fetch
begins with a name. Its ModelId is the hash of a manifest that mostly does not exist yet and takes all bytes in the order of
the hub's files, whose own hashes prove them; there is one source, and its files keep their names and shards, which other
programs read. Both write through checkpoint/store.py and read the hub through hub.py.
"""

import hashlib
from collections.abc import Collection, Generator, Iterable, Iterator, Sequence
from contextlib import closing
from itertools import chain, pairwise
from pathlib import Path
from typing import BinaryIO, Final

from huggingface_hub.utils import WeakFileLock

from manyhands.checkpoint.folder import INDEX, MANIFEST, SINGLE, SMALL_SUFFIXES, parse_index, read_config
from manyhands.checkpoint.header import TensorEntry, read_header
from manyhands.checkpoint.manifest import HashProgress, Manifest, TensorDigest, check_small, config_digest, hash_files
from manyhands.checkpoint.partition import needed_tensors
from manyhands.checkpoint.store import Sink, Store, begins_with, check_free, disk_errors, erase
from manyhands.core import Span
from manyhands.errors import Damaged, ModelError
from manyhands.files import write_atomic
from manyhands.weights.catalogue import SHORT_NAMES
from manyhands.weights.fetched import find_local, hub_folder, lacking_tensors, num_layers
from manyhands.weights.here import folder_named
from manyhands.weights.hub import (
    HubFile,
    HubModel,
    HubUnreachable,
    HubWeightsFile,
    RangeIgnored,
    find_model,
    read_range,
    read_remote_header,
    read_whole,
)
from manyhands.weights.hub_gguf import HubGguf, read_hub_gguf
from manyhands.weights.names import parse_hub_id
from manyhands.weights.pinned import fetch_pinned
from manyhands.weights.selection import listed, meant_file, models_of

SMALL_BYTES: Final = 256 << 20  # of one such file; the largest tokenizers have some 30 MB
SMALL_IN_ALL: Final = 1 << 30
MAX_SMALL_FILES: Final = 1 << 10
_ELSE: Final = "download what you need of it to a folder, and name that"
PICKLES: Final = (".bin", ".pt", ".pth")


def resolve_model(name: str, span: Span | None, with_ends: bool, home: Path, progress: HashProgress) -> Path:
    """The folder of model `name` with the layers of `span` (None: all) and, if asked, the ends.

    Raises ModelError (unknown, refused, corrupt, pickle weights only), CutError (span outside the model), DiskFull.
    """
    bring_short(name, home, progress)
    if (here := folder_named(name, home)) is not None:
        return here
    id = parse_hub_id(name)
    local = find_local(home, id, span, with_ends)
    try:
        model = find_model(id.repo, id.revision, is_vital=local is None)
    except HubUnreachable:
        if local is None:
            raise
        return local
    file = None if id.file is None else meant_file(model.names, id.file, f"{id.repo}@{model.commit[:8]}")
    return _Fetch(model, file, home, progress).run(span, with_ends)


def bring_short(name: str, home: Path, progress: HashProgress) -> None:
    """Fetch the file of a short name that is not here yet; nothing for any other name. Raises as fetch_pinned."""
    if (short := SHORT_NAMES.get(name)) is not None:
        fetch_pinned(short, home, progress)


def drop_damaged(manifest: Manifest, folder: Path) -> None:
    """Remove config.json and tokenizer files that are not as `manifest` has them, so that they are fetched again."""
    try:
        check_small(manifest, folder)
    except Damaged as damage:
        for name in damage.names:
            (folder / name).unlink(missing_ok=True)


class _Fetch:
    """One download into one folder."""

    def __init__(self, model: HubModel, file: str | None, home: Path, progress: HashProgress) -> None:
        self.model, self.file = model, file
        self.gguf: HubGguf | None = None
        self.folder = hub_folder(home, model.repo, model.commit, file)
        self.progress = progress

    def run(self, span: Span | None, with_ends: bool) -> Path:
        with disk_errors(self.folder.parent, sum(file.size for file in self.model.sizes.values())):
            self.folder.mkdir(parents=True, exist_ok=True)
            with WeakFileLock(self.folder / ".lock"):
                self.store = Store(self.folder)
                self._fetch_small()
                if not (self.folder / MANIFEST).exists():
                    self._learn(span, with_ends)
                self._fetch_needed(span, with_ends)
                self.store.revisions.add(self.model.revision)
                self.store.commit()
        return self.folder

    def _fetch_small(self) -> None:
        """Config, tokenizer, index, and the manifest if the repository has one; what is here already and right stays.

        Of a GGUF model: what its headers say of them.
        """
        if (self.folder / MANIFEST).exists():
            drop_damaged(
                Manifest.decode((self.folder / MANIFEST).read_bytes(), str(self.folder / MANIFEST)), self.folder
            )
        if self.file is not None:
            self.gguf = read_hub_gguf(self.model, self.file)
            self.model = self.gguf.model
            for name, raw in self.gguf.small_files.items():
                if not (self.folder / name).exists():
                    write_atomic(self.folder / name, raw)
            return
        for file in self._small_files():
            raw = read_whole(self.model, file, SMALL_BYTES)
            if file.sha256 is not None and hashlib.sha256(raw).hexdigest() != file.sha256:
                raise ModelError(f"{self.model.repo}: {file.name} arrived corrupt; try again")
            write_atomic(self.folder / file.name, raw)

    def _small_files(self) -> list[HubFile]:
        """Those that are not here. Raises ModelError for more than any model has."""
        small = [name for name in sorted(self.model.names) if name.endswith(SMALL_SUFFIXES)]
        lacking = [name for name in small if "/" not in name and name[0] != "." and not (self.folder / name).exists()]
        if len(lacking) > MAX_SMALL_FILES:
            raise ModelError(
                f"{self.model.repo} has {len(lacking)} small files; at most {MAX_SMALL_FILES} are fetched: {_ELSE}"
            )
        found = [self.model.describe(name) for name in lacking]
        if (total := sum(file.size for file in found)) > SMALL_IN_ALL:
            raise ModelError(
                f"{self.model.repo} has small files of {total} bytes; at most {SMALL_IN_ALL} are fetched: {_ELSE}"
            )
        check_free(self.folder, total)
        return found

    def _fetch_needed(self, span: Span | None, with_ends: bool) -> None:
        """Bring the tensors that are needed and not here, by ranges, each checked against the manifest."""
        manifest = Manifest.decode((self.folder / MANIFEST).read_bytes(), str(self.folder / MANIFEST))
        check_small(manifest, self.folder)
        for file in list(self.store.held):
            self.store.settle(file, self._entries_of(file))
        missing = set(lacking_tensors(self.folder, self.store, span, with_ends))
        known = {tensor.name: tensor for tensor in manifest.tensors}
        shards = self._shards(missing)
        wanted = {shard.name: [entry for entry in shard.entries if entry.name in missing] for shard in shards}
        if lost := missing - {entry.name for entries in wanted.values() for entry in entries}:
            raise ModelError(f"{self.model.repo}: tensor {min(lost)} is in {MANIFEST} but not in the weights")
        shards = [
            shard for shard in shards if wanted[shard.name] or not begins_with(self.folder / shard.name, shard.header)
        ]
        if not shards:
            return
        total = sum(len(entry) for entries in wanted.values() for entry in entries)
        check_free(self.folder, total)
        with disk_errors(self.folder, total):
            self.progress.start(f"fetching {self.model.repo}", total)
            for shard in shards:
                self._fill(shard, wanted[shard.name], known)
            self.progress.done()

    def _fill(self, shard: HubWeightsFile, entries: Sequence[TensorEntry], known: dict[str, TensorDigest]) -> None:
        with self.store.filling(shard.name, shard.size, shard.header) as handle:
            try:
                wrong = [pair for run in runs(entries) for pair in self._read_run(handle, run, known, False)]
            except RangeIgnored:
                left = [entry for entry in entries if not self.store.has(shard.name, entry.name)]
                wrong = self._read_run(handle, left, known, True)
            for entry, _ in wrong:  # once more, alone
                for _, got in self._read_run(handle, [entry], known, True):
                    raise _mismatch(self.model.repo, entry, known[entry.name].sha256, got)

    def _read_run(
        self, handle: BinaryIO, run: Sequence[TensorEntry], known: dict[str, TensorDigest], may_skip: bool
    ) -> list[tuple[TensorEntry, str]]:
        """Read from the first to the last of `run`, mark what is right; erase and return what is not, with its hash."""
        wrong = []
        stretch = read_range(self.model, run[0].file, run[0].start, run[-1].end, may_skip=may_skip)
        for entry, digest in self._pour(stretch, run[0].start, Sink(handle, run, {entry.name for entry in run})):
            if digest == known[entry.name]:
                self.store.mark(handle, entry)
            else:
                erase(handle, entry)
                wrong.append((entry, digest.sha256))
        return wrong

    def _pour(
        self, blocks: Generator[bytes, None, None], at: int, sink: Sink
    ) -> Iterator[tuple[TensorEntry, TensorDigest]]:
        with closing(blocks):
            for block in blocks:
                yield from sink.feed(at, block)
                at += len(block)
                self.progress.advance(len(block))
        yield from sink.feed(at, b"")  # tensors without elements need no bytes

    def _learn(self, span: Span | None, with_ends: bool) -> None:
        """Read all weights once, keep what is needed, and write the manifest that was missing."""
        shards = self._shards(None)
        names = [entry.name for shard in shards for entry in shard.entries]
        wanted = set(needed_tensors(names, num_layers(self.folder), span, with_ends))
        entries = [entry for shard in shards if shard.name not in self.store.hashes for entry in shard.entries]
        needed = sum(len(entry) for entry in entries if entry.name in wanted)
        check_free(self.folder, needed)
        with disk_errors(self.folder, needed):
            name = f"reading all of {self.model.repo} once: it has no {MANIFEST}"
            left = [shard for shard in shards if shard.name not in self.store.hashes]
            self.progress.start(name, sum(shard.size - len(shard.header) for shard in left))
            for shard in shards:
                if shard.name not in self.store.hashes and not self._learn_shard(shard, wanted):
                    self._learn_shard(shard, wanted, is_last=True)
            self.progress.done()
        digests = [digest for rows in self.store.hashes.values() for digest in rows]
        manifest = Manifest.of(config_digest(read_config(self.folder)), digests, hash_files(self.folder))
        write_atomic(self.folder / MANIFEST, manifest.encode())
        self.store.hashes.clear()

    def _learn_shard(self, shard: HubWeightsFile, wanted: set[str], is_last: bool = False) -> bool:
        """Stream one file; False if its bytes are not those that the hub's hash names, which raises if `is_last`."""
        whole, start = hashlib.sha256(shard.header), len(shard.header)
        with self.store.filling(shard.name, shard.size, shard.header) as handle:
            stream = read_range(self.model, shard.name, start, shard.size, may_skip=True)
            sink = Sink(handle, shard.entries, wanted)
            read = chain(sink.feed(0, shard.header), self._pour(_hashed(stream, whole), start, sink))
            digests = [digest for _, digest in read]  # a header may hold tensors, too
            kept = [entry for entry in shard.entries if entry.name in wanted]
            if shard.sha256 is not None and whole.hexdigest() != shard.sha256:
                for entry in kept:
                    erase(handle, entry)
                if is_last:
                    raise _corrupt(self.model.repo, shard, whole.hexdigest())
                return False
            for entry in kept:
                self.store.mark(handle, entry)
            self.store.hashes[shard.name] = digests
        return True

    def _shards(self, names: Collection[str] | None) -> list[HubWeightsFile]:
        """The weights files with these tensors, or all; all of a GGUF model, whose headers are of use together only."""
        if self.gguf is not None:
            return self.gguf.files
        if names is not None and not names:
            return []
        places = self._places()
        if places is None:
            files = {SINGLE}
        else:
            files = set(places.values()) if names is None else {_place(places, name) for name in names}
        return [read_remote_header(self.model, file) for file in sorted(files)]

    def _entries_of(self, file: str) -> dict[str, TensorEntry]:
        """The tensors of a file by name; none if it is gone or its header is damaged. The headers of GGUF are the hub's."""
        if self.gguf is not None:
            return {entry.name: entry for shard in self.gguf.files if shard.name == file for entry in shard.entries}
        try:
            return {entry.name: entry for entry in read_header(self.folder / file)}
        except ModelError:
            return {}

    def _places(self) -> dict[str, str] | None:
        """Tensor to file by the index; None for a single file. Raises ModelError if there are no weights."""
        if (self.folder / INDEX).exists():
            return parse_index((self.folder / INDEX).read_bytes(), f"{self.model.repo}: {INDEX}")
        if SINGLE in self.model.names:
            return None
        if any(name.endswith(PICKLES) for name in self.model.names):
            raise ModelError(f"{self.model.repo} refused: pickle weights; convert to safetensors")
        there = models_of(self.model.names)
        files = f"; of its GGUF files name one (hf:{self.model.repo}:Q4_K_M): {listed(there)}" if there else ""
        raise ModelError(f"{self.model.repo} holds no weights: neither {SINGLE} nor {INDEX}{files}")


def runs(entries: Iterable[TensorEntry]) -> list[list[TensorEntry]]:
    """Group the tensors of one file, sorted by offset, into stretches without a gap: one request each. Several may be of the
    same bytes."""
    ordered = sorted(entries, key=lambda entry: (entry.start, entry.end))
    groups = [ordered[:1]] if ordered else []
    for before, entry in pairwise(ordered):
        if entry.start == before.end or (entry.start, entry.end) == (before.start, before.end):
            groups[-1].append(entry)
        else:
            groups.append([entry])
    return groups


def _hashed(blocks: Generator[bytes, None, None], sha256: "hashlib._Hash") -> Generator[bytes, None, None]:
    """Pass the blocks on and hash them on the way."""
    with closing(blocks):
        for block in blocks:
            sha256.update(block)
            yield block


def _place(places: dict[str, str], name: str) -> str:
    if name not in places:
        raise ModelError(f"tensor {name} is in {MANIFEST} but not in {INDEX}")
    return places[name]


def _mismatch(repo: str, entry: TensorEntry, expected: str, got: str) -> ModelError:
    where = f"{repo}: tensor {entry.name} in {entry.file}"
    return ModelError(f"{where} arrived wrong twice: SHA-256 expected {expected}, got {got}")


def _corrupt(repo: str, shard: HubWeightsFile, got: str) -> ModelError:
    return ModelError(f"{repo}: {shard.name} arrived wrong twice: SHA-256 expected {shard.sha256}, got {got}")
