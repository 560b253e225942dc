"""How large a model is: bytes of its layers, its ends, its cache, from config and file headers. No weights are read.

Knows nothing of machines. Model's packages are imported inside the functions, so that place loads without them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from manyhands.core import ModelId, Precision, Span, weight_precision
from manyhands.errors import ModelError

# Of activations and cache.
_CONFIG_BYTES: Final = 16 << 20
# Interpreter and libraries of a node, resident (tests/place/test_resident.py): 470 MB of `up`, 500 with its API, where torch
# computes (processes on one machine share 120 MB of it); with the native engine 130.
PROCESS_BYTES: Final = 480_000_000
NATIVE_PROCESS_BYTES: Final = 130_000_000
GPU_PROCESS_BYTES: Final = 300_000_000  # on the GPU: registers, and kernels


@dataclass(frozen=True, slots=True)
class ModelShape:
    """How large a model is at one precision, in this machine's memory. Bytes: each layer's weights, the ends' weights (both
    as they are packed here), what each layer caches for one position, one position on the wire. `context`: positions that a
    session may have. `process_bytes`: what a process takes beside the model. `state_bytes`: what each layer
    caches for a session whatever its length (none given: nothing)."""

    name: str
    precision: Precision
    layer_bytes: tuple[int, ...]
    ends_bytes: int
    cache_bytes: tuple[int, ...]
    hidden_bytes: int
    context: int
    process_bytes: int = PROCESS_BYTES
    state_bytes: tuple[int, ...] = ()

    @property
    def num_layers(self) -> int:
        return len(self.layer_bytes)

    def span_bytes(self, span: Span, tokens: int) -> int:
        """Weights of `span` and its cache for a session of `tokens` positions (0: for none)."""
        return sum(self.layer_bytes[span.start : span.end]) + sum(self.cached(tokens)[span.start : span.end])

    def most_bytes(self, num_layers: int, tokens: int) -> int:
        """As span_bytes, of the largest `num_layers` layers: no span of so many takes more."""
        sizes = self.layer_bytes, self.cached(tokens)
        return sum(sum(sorted(each)[-num_layers:]) for each in sizes) if num_layers else 0

    def cached(self, tokens: int) -> list[int]:
        """What each layer caches for a session of `tokens` positions (0: for none)."""
        states = self.state_bytes if tokens and self.state_bytes else (0,) * self.num_layers
        return [tokens * position + state for position, state in zip(self.cache_bytes, states, strict=True)]


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What can be known of a model before it is loaded. `config`: its config.json; `folder` holds it whole, if one does.

    `model`: its id, where that costs no reading of weights: a manifest lies in the repository, or came with an earlier fetch.
    `tensors`: all of them, where it was looked up (Described).
    """

    shape: ModelShape
    config: bytes
    folder: Path | None
    model: ModelId | None = None
    tensors: Sequence[Any] = ()


def look_up(model: str, precision: Precision, home: Path) -> Checkpoint:
    """A folder, "tales" or a hub model, from its config and the headers of its files alone.

    Blocking; asks the hub for a few hundred kilobytes where the model is not here. Raises ModelError.
    """
    from manyhands.checkpoint.config_fields import parse_config
    from manyhands.checkpoint.folder import read_config
    from manyhands.checkpoint.manifest import described_tensors

    folder = _local_folder(model, home)
    if folder is None:
        raw, tensors, found = _from_hub(model, home)
        shape = shape_of(model, parse_config(raw, f"{model}: config.json"), tensors, precision)
        return Checkpoint(shape, raw, None, found, tensors)
    raw, tensors = read_config(folder), described_tensors(folder)
    shape = shape_of(model, parse_config(raw, str(folder / "config.json")), tensors, precision)
    return Checkpoint(shape, raw, folder if _is_whole(folder, tensors) else None, tensors=tensors)


def all_bytes(checkpoint: Checkpoint, precision: Precision) -> int:
    """Bytes of the whole model's weights held here at a precision. Raises ModelError."""
    from manyhands.checkpoint.config_fields import parse_config

    shape = shape_of(checkpoint.shape.name, parse_config(checkpoint.config), checkpoint.tensors, precision)
    return sum(shape.layer_bytes) + shape.ends_bytes


def stored_precision(model: str, home: Path) -> Precision:
    """The precision that holds a model as it is stored: w4 or w8 for a file with blocks or groups, bf16 for all else.

    Blocking; asks the hub for the config, or the header of a GGUF file, that is not here. Raises ModelError.
    """
    from manyhands.checkpoint.dtypes import BLOCKS, GRIDS
    from manyhands.checkpoint.manifest import described_tensors
    from manyhands.checkpoint.quantised import read_quantised
    from manyhands.weights.names import gguf_file, is_here, is_hub_gguf

    if gguf_file(model) is None and (is_here(model) or not is_hub_gguf(model)):
        how = read_quantised(_config(model, home))
        return "bf16" if how is None else "w8" if how.bits == 8 or how.is_partial else "w4"
    folder = _local_folder(model, home)
    types = {tensor.dtype for tensor in (_from_hub(model, home)[1] if folder is None else described_tensors(folder))}
    if not types & BLOCKS.keys():
        return "bf16"
    fours = {*"Q4_0 Q4_1 Q4_K MXFP4 IQ4_NL IQ4_XS Q3_K Q2_K TQ1_0 TQ2_0 Q1_0 Q2_0 PQ2_0".split(), *GRIDS}
    return "w4" if types & fours else "w8"


def _config(model: str, home: Path) -> dict[str, Any]:
    """The parsed config.json of a folder or hub model."""
    from manyhands.checkpoint.config_fields import parse_config
    from manyhands.checkpoint.folder import read_config
    from manyhands.weights.fetched import fetched_folders
    from manyhands.weights.names import parse_hub_id

    folder = _local_folder(model, home)
    for here in [folder] if folder else fetched_folders(home, parse_hub_id(model))[:1]:
        return parse_config(read_config(here), str(here / "config.json"))
    from manyhands.weights.hub import find_model, read_whole

    found = find_model(*parse_hub_id(model)[:2])
    raw = read_whole(found, found.describe("config.json"), _CONFIG_BYTES)
    return parse_config(raw, f"{model}: config.json")


def _local_folder(model: str, home: Path) -> Path | None:
    """The folder of a model that needs no hub: "tales", a folder's own path, or a GGUF file."""
    from manyhands.weights.here import folder_named
    from manyhands.weights.names import is_here

    return folder_named(model, home) if is_here(model) else None


def _is_whole(folder: Path, tensors: Sequence[Any]) -> bool:
    from manyhands.checkpoint.folder import read_entries

    return {tensor.name for tensor in tensors} <= {entry.name for entry in read_entries(folder)}


def shape_of(model: str, config: Mapping[str, Any], tensors: Sequence[Any], precision: Precision) -> ModelShape:
    """From a parsed config.json and the tensors' names, dtypes and shapes. Raises ModelError."""
    from manyhands.checkpoint.folded import folded
    from manyhands.checkpoint.partition import ModelFacts, ends_bytes, layer_bytes
    from manyhands.engine.devices import gpu, torch_device
    from manyhands.program.tensors import wide_weights
    from manyhands.worker.choice import ITEM_BYTES, position_bytes, program_of, state_bytes

    facts, tensors, weights = ModelFacts.from_config(config), folded(tensors, config), weight_precision(precision)
    program, is_torch = program_of(config, precision, model), torch_device() is not None
    wide = frozenset[str]().union(*map(wide_weights, program.layers))
    layers = layer_bytes(tensors, facts.num_layers, weights, wide)
    if 0 in layers:
        raise ModelError(f"{model}: no tensors of layer {layers.index(0)}: the checkpoint lacks it")
    cache, hidden = position_bytes(program, precision), program.hidden * ITEM_BYTES[weights]
    ends = ends_bytes(tensors, weights, wide)
    process_bytes = PROCESS_BYTES if is_torch else NATIVE_PROCESS_BYTES if gpu() is None else GPU_PROCESS_BYTES
    sizes = (tuple(layers), ends, cache, hidden, program.context)
    return ModelShape(model, precision, *sizes, process_bytes, state_bytes(program, precision))


def _from_hub(model: str, home: Path) -> tuple[bytes, Sequence[Any], ModelId | None]:
    """config.json, tensors, and the id where there is a manifest; from an earlier fetch if it is there."""
    from manyhands.checkpoint.folder import INDEX, MANIFEST, SINGLE, parse_index
    from manyhands.checkpoint.manifest import Manifest
    from manyhands.weights.fetched import fetched_folders, hub_folder
    from manyhands.weights.hub import HubUnreachable, find_model, read_remote_header, read_whole
    from manyhands.weights.hub_gguf import read_hub_gguf
    from manyhands.weights.names import parse_hub_id
    from manyhands.weights.selection import meant_file

    id = parse_hub_id(model)
    repo, revision, file = id
    here = [folder for folder in fetched_folders(home, id) if (folder / MANIFEST).exists()]
    try:
        found = find_model(repo, revision, is_vital=not here)
    except HubUnreachable:
        if not here:
            raise
        return _fetched(here[0])
    file = file and meant_file(found.names, file, f"{repo}@{found.commit[:8]}")
    if (folder := hub_folder(home, repo, found.commit, file)) in here:
        return _fetched(folder)
    if file is not None:
        gguf = read_hub_gguf(found, file)
        return gguf.small_files["config.json"], gguf.entries, None
    config = read_whole(found, found.describe("config.json"), _CONFIG_BYTES)
    if MANIFEST in found.names:
        manifest = Manifest.decode(
            read_whole(found, found.describe(MANIFEST), 4 * _CONFIG_BYTES), f"{repo}: {MANIFEST}"
        )
        return config, manifest.tensors, manifest.id
    files = {SINGLE}
    if INDEX in found.names:
        files = set(parse_index(read_whole(found, found.describe(INDEX), 4 * _CONFIG_BYTES)).values())
    elif SINGLE not in found.names:
        raise ModelError(f"{repo} holds no weights: neither {SINGLE} nor {INDEX}")
    return config, [entry for file in sorted(files) for entry in read_remote_header(found, file).entries], None


def _fetched(folder: Path) -> tuple[bytes, Sequence[Any], ModelId | None]:
    from manyhands.checkpoint.folder import MANIFEST, read_config
    from manyhands.checkpoint.manifest import Manifest

    manifest = Manifest.decode((folder / MANIFEST).read_bytes(), str(folder / MANIFEST))
    return read_config(folder), manifest.tensors, manifest.id
