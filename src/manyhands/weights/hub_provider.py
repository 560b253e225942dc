"""The hub, asked as if it were a peer: the provider of last resort of a pull (download.py), for what no peer has."""

from collections.abc import AsyncGenerator, Callable
from threading import Lock
from typing import Final, TypeVar

from manyhands.aside import aside
from manyhands.checkpoint.folder import INDEX, SINGLE, parse_index
from manyhands.checkpoint.header import TensorEntry
from manyhands.core import ModelId
from manyhands.errors import ModelError
from manyhands.weights.hub import (
    HubModel,
    RangeIgnored,
    find_model,
    read_range,
    read_remote_header,
    read_whole,
)
from manyhands.weights.hub_gguf import read_hub_gguf
from manyhands.weights.names import parse_hub_id
from manyhands.weights.provider import MAX_FILE_BYTES, OFFERED, Data, Lacking, ProviderError
from manyhands.weights.selection import meant_file

T = TypeVar("T")

READ_BYTES: Final = 8 << 20  # of one request: its round trip is then a small part of it


class HubProvider:
    """Provider `node` "hub". Asks nothing before it is needed. Raises ModelError if `name` is no hub id."""

    node = "hub"

    def __init__(self, name: str) -> None:
        self.name = name
        self._id = parse_hub_id(name)
        self._lock = Lock()
        self._model: HubModel | None = None
        self._places: dict[str, str] | None = None
        self._made: dict[str, bytes] = {}  # the small files of a GGUF model
        self._entries: dict[str, dict[str, TensorEntry]] = {}  # by file, or of a GGUF model together

    async def read(self, model: ModelId, tensor: str, start: int, end: int) -> AsyncGenerator[Data, None]:
        entry = await _ask(lambda: self._find(tensor))
        if end > len(entry):
            raise Lacking(f"{tensor} has another size at {self.name}")
        for at in range(start, end, READ_BYTES):
            low, high = entry.start + at, entry.start + min(at + READ_BYTES, end)
            yield await _ask(lambda low=low, high=high: self._range(entry.file, low, high))  # type: ignore[misc]

    async def file(self, model: ModelId, name: str) -> bytes | None:
        return await _ask(lambda: self._whole(name))

    def _range(self, file: str, start: int, end: int) -> bytes:
        return b"".join(read_range(self._repository(), file, start, end))

    def _whole(self, name: str) -> bytes | None:
        repository = self._repository()
        if self._id.file is not None:
            return self._made.get(name)
        if name not in OFFERED or name not in repository.names:
            return None
        return read_whole(repository, repository.describe(name), MAX_FILE_BYTES)

    def _repository(self) -> HubModel:
        """What the files lie in; of a GGUF model its headers are read with the first question."""
        with self._lock:
            if self._model is None:
                found = find_model(self._id.repo, self._id.revision)
                if self._id.file is not None:
                    gguf = read_hub_gguf(found, meant_file(found.names, self._id.file, self.name))
                    found, self._made = gguf.model, gguf.small_files
                    self._entries[self._id.file] = {entry.name: entry for entry in gguf.entries}
                self._model = found
            return self._model

    def _find(self, tensor: str) -> TensorEntry:
        """Where a tensor lies; reads the index and the header of its file once. Raises Lacking."""
        repository = self._repository()
        with self._lock:
            if self._id.file is None and self._places is None and INDEX in repository.names:
                raw = read_whole(repository, repository.describe(INDEX), MAX_FILE_BYTES)
                self._places = parse_index(raw, f"{self.name}: {INDEX}")
            file = self._id.file or (SINGLE if self._places is None else self._places.get(tensor, ""))
            if file not in self._entries:
                if file not in repository.names:
                    raise Lacking(f"{self.name} has no file with {tensor}")
                entries = read_remote_header(repository, file).entries
                self._entries[file] = {entry.name: entry for entry in entries}
        if tensor not in self._entries[file]:
            raise Lacking(f"{self.name} has no tensor {tensor}")
        return self._entries[file][tensor]


async def _ask(question: Callable[[], T]) -> T:
    """Run aside; hub.py has the deadlines and retries. Raises Lacking, ProviderError."""
    try:
        return await aside(question)
    except RangeIgnored as error:
        raise ProviderError("lost", "the hub sends whole files only") from error
    except ModelError as error:
        raise ProviderError("lost", str(error)) from error
