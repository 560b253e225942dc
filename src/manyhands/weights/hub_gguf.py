"""A GGUF model on the hub, in one file or several: what its headers say. Blocking."""

from dataclasses import dataclass

from manyhands.checkpoint.gguf import Gguf, GgufTensor, parse_gguf
from manyhands.checkpoint.gguf_folder import small_files
from manyhands.checkpoint.gguf_model import tensor_entries
from manyhands.checkpoint.gguf_parts import join_headers
from manyhands.checkpoint.header import TensorEntry
from manyhands.checkpoint.part_names import all_parts
from manyhands.errors import ModelError
from manyhands.weights.hub import HubFile, HubModel, HubWeightsFile, read_start


@dataclass(frozen=True, slots=True)
class HubGguf:
    """`model`: the folder of the repository that its `files` lie in; `small_files`: config.json and the tokenizer's files."""

    model: HubModel
    files: list[HubWeightsFile]
    small_files: dict[str, bytes]

    @property
    def entries(self) -> list[TensorEntry]:
        return [entry for file in self.files for entry in file.entries]


def read_hub_gguf(repository: HubModel, file: str) -> HubGguf:
    """The headers of the model that `file` of a repository is, or is a part of. Raises ModelError."""
    folder, _, name = file.rpartition("/")
    model = repository.within(folder)
    described, headers = _describe_all(model, name), dict[str, bytes]()

    def read(number: int, file: HubFile) -> Gguf:
        headers[file.name], part = _read_header(model, file, number)
        return part

    def tensor_bytes(tensor: GgufTensor) -> bytes:
        return read_start(model, model.describe(tensor.file), tensor.start, tensor.end)

    whole = join_headers((read(number, file) for number, file in enumerate(described)), len(described))
    small, entries = small_files(whole, tensor_bytes), _by_file(whole)
    files = [
        HubWeightsFile(file.name, file.size, file.sha256, headers[file.name], entries.get(file.name, []))
        for file in described
    ]
    return HubGguf(model, files, small)


def _describe_all(model: HubModel, name: str) -> list[HubFile]:
    """The files of the model that a file is of. Raises ModelError if one is not there."""
    names = all_parts(name)
    if absent := [part for part in names if part not in model.names]:
        more = f": the {len(names)} parts of {name} are needed, take a model of which all are there"
        where = f"{model.repo}@{model.commit[:8]} has no file {model.folder}{absent[0]}"
        raise ModelError(f"{where}{more if len(names) > 1 else ''}")
    return [model.describe(part) for part in names]


def _by_file(whole: Gguf) -> dict[str, list[TensorEntry]]:
    entries: dict[str, list[TensorEntry]] = {}
    for entry in tensor_entries(whole):
        entries.setdefault(entry.file, []).append(entry)
    return entries


def _read_header(model: HubModel, file: HubFile, number: int) -> tuple[bytes, Gguf]:
    """The first bytes of a file, up to its data, and the header that they are."""
    raw = bytearray()

    def read(start: int, end: int) -> bytes:
        raw[start:] = found = read_start(model, file, start, end)
        return found

    part = parse_gguf(read, file.name, file.size, number)
    return bytes(raw[: part.data_start]), part
