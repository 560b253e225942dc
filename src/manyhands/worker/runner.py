"""What computes a model in this process, made and described: spans and ends by the engine that choice.py names."""

import hashlib
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from manyhands.checkpoint.config_fields import parse_config
from manyhands.checkpoint.folder import read_config
from manyhands.checkpoint.header import TensorEntry
from manyhands.checkpoint.manifest import Manifest, described_tensors
from manyhands.checkpoint.quantised import read_quantised
from manyhands.checkpoint.verify import verifying
from manyhands.config import home_from_env
from manyhands.core import SMALL_WEIGHTS, Precision, Span, weight_precision
from manyhands.engine import golden
from manyhands.engine.cpu import CpuEnds, CpuSpan
from manyhands.engine.devices import gpu, torch_device
from manyhands.engine.library import Team, forced
from manyhands.engine.mapped import MappedTensors
from manyhands.engine.packing import PLAIN, Keeping, Packer
from manyhands.engine.quantised import reader
from manyhands.engine.span import EndsRunner, SpanRunner
from manyhands.engine.weights import STRETCH, Read, Stored, find
from manyhands.program.ops import Program
from manyhands.program.tensors import check_all_read, with_own_head, with_stacked_experts, without_corrections
from manyhands.weights.packed import PackedShelf
from manyhands.worker.choice import device_part, is_gguf, is_quantised, position_bytes, program_of, state_bytes
from manyhands.worker.gpu import open_gpu
from manyhands.worker.loading import UNSEEN, LoadBar, Loading, WatchedPacker

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Facts:
    """What is known of a model before its weights are read. `arithmetic`: the class of what computes it here; `back_end`:
    its name; `position_bytes`: what each layer caches for a position, `state_bytes`: for a session whatever its length."""

    num_layers: int
    hidden_size: int
    vocab_size: int
    context_length: int
    arithmetic: str
    back_end: str
    position_bytes: tuple[int, ...]
    state_bytes: tuple[int, ...]


def program_class(program: Program, precision: Precision) -> str:
    """The arithmetic class of a Program here. Of the native engine: precision, and a hash of its golden digests and of the
    Program. Raises ModelError for a device of torch that is missing."""
    if (device := torch_device()) is not None:
        named: str = device_part(device).arithmetic_class(program, precision, device)
        return named
    whole = f"{golden.arithmetic(precision)} {program!r}"
    return f"{precision}/{hashlib.sha256(whole.encode()).hexdigest()[:16]}"


def arithmetic_class(config: bytes, precision: Precision) -> str:
    """The class of what computes the model of this config.json here. Raises ModelError."""
    return program_class(program_of(config, precision), precision)


def back_end(precision: Precision = "bf16") -> str:
    """What computes Programs here: a back end of the native engine, a GPU, or a device of torch. Raises ModelError."""
    if (number := gpu()) is not None:
        return f"cuda:{number}"
    return torch_device() or golden.choose(precision)


def device_name() -> str:
    """What records call the device of this process: "cpu avx2", "cuda:0 NVIDIA H200". Raises ModelError."""
    if (number := gpu()) is not None:
        return f"cuda:{number} {open_gpu(number).what}"[:64]
    if (device := torch_device()) is None:
        return f"cpu {golden.choose()}"
    named: str = device_part(device).describe_device(device)
    return f"{device} {named}"[:64]


def precision_note(config: bytes | Mapping[str, Any], precision: Precision) -> str:
    """What a user should know of how a model is computed here: slowly, or with weights rounded; "" if neither."""
    parsed, device = parse_config(config) if isinstance(config, bytes) else config, torch_device()
    notes = []
    if device is not None:
        notes.append(
            f"{device} computes in torch: answers are of class E2, equal up to rounding"
            + ("" if device == "torch-cpu" else "; it has not been tried on such a device: please report how it goes")
        )
    elif gpu() is None and forced() is None and golden.choose(precision) == "scalar":
        notes.append("this CPU has neither AVX2 with FMA nor NEON: plain C computes, many times slower")
    if weight_precision(precision) == "bf16" and is_quantised(parsed):
        notes.append(
            "matrices of this model that are stored quantised are rounded to bf16, 8 bits of each number; --dtype w4 "
            "and w8 hold them as they are stored, fp32 exactly too, in twice the memory"
        )
    return "; ".join(notes)


def describe(folder: Path, precision: Precision) -> Facts:
    """What is known of the model in `folder`, and that it may be served. May take seconds. Raises ModelError."""
    program = program_of(read_config(folder), precision, str(folder / "config.json"))
    sizes = len(program.layers), program.hidden, program.vocab, program.context
    cached = position_bytes(program, precision), state_bytes(program, precision)
    return Facts(*sizes, program_class(program, precision), back_end(precision), *cached)


def load_span(
    folder: Path,
    span: Span,
    precision: Precision,
    num_threads: int,
    manifest: Manifest | None = None,
    loading: Loading = UNSEEN,
) -> SpanRunner:
    """Layers of the checkpoint in `folder`, for at most `num_threads` threads; with a `manifest`, proven to be that model's.
    `loading` is told how far it is.

    Raises ModelError (Damaged if they are not), CutError.
    """
    config, where = read_config(folder), str(folder / "config.json")
    program = program_of(config, precision, where)
    shapes = _shapes(folder, manifest)
    program = without_corrections(with_stacked_experts(program, shapes), shapes)
    if is_gguf(parse_config(config, where)):
        check_all_read(with_own_head(program, shapes), shapes, str(folder))
    with _reading(folder, precision, manifest, lambda entries: loading.layers(span, entries)) as (read, packer, bar):
        return span_of(program, span, read, precision, num_threads, WatchedPacker(packer, bar))


def span_of(
    program: Program, span: Span, read: Read, precision: Precision, num_threads: int, packer: Packer = PLAIN
) -> SpanRunner:
    """Layers of a Program whose tensors `read` gives. Raises ModelError, CutError."""
    if (number := gpu()) is not None:
        from manyhands.engine.cuda.span import CudaSpan

        return CudaSpan(program, span, read, precision, open_gpu(number), packer)
    if (device := torch_device()) is not None:
        runner: SpanRunner = device_part(device).DeviceSpan(program, span, read, precision, device)
        return runner
    return CpuSpan(program, span, read, precision, Team(num_threads), packer=packer)


@contextmanager
def _reading(
    folder: Path, precision: Precision, manifest: Manifest | None, begin: Callable[[Iterable[TensorEntry]], LoadBar]
) -> Iterator[tuple[Read, Packer, LoadBar]]:
    """Within, the tensors of a checkpoint are read; on leaving they are proven, as `verifying`, and what was packed is kept.

    Kept is what takes long to pack: small weights, unless they are the blocks of a GGUF file. `begin` is given the tensors that
    lie there, and makes the bar that counts what is read of them.
    """
    precision = weight_precision(precision)
    began, config = time.perf_counter(), parse_config(read_config(folder), str(folder / "config.json"))
    keeping = None
    if manifest is not None and precision in SMALL_WEIGHTS and not is_gguf(config):
        keeping = Keeping(PackedShelf(home_from_env(), manifest.id), precision)
    with verifying(folder, manifest) as use:

        def used(entry: TensorEntry, raw: NDArray[np.uint8]) -> None:
            use(entry, raw)
            bar.read(len(entry))

        with MappedTensors(folder, used) as tensors:
            small, bar = precision in SMALL_WEIGHTS, begin(tensors.entries)
            yield reader(tensors, read_quantised(config), needs_blocks=small), keeping or PLAIN, bar
            bar.end()
    if keeping is not None:
        taken = keeping.num_found, keeping.num_made, time.perf_counter() - began
        logger.info(
            "folder=%s precision=%s matrices=%d packed before, %d packed now, in %.1f s", folder, precision, *taken
        )
        keeping.keep()


def load_ends(
    folder: Path,
    precision: Precision,
    num_threads: int,
    manifest: Manifest | None = None,
    *,
    embed: bool = True,
    head: bool = True,
    loading: Loading = UNSEEN,
    beside: Path | None = None,
) -> EndsRunner:
    """The ends of the checkpoint in `folder`, as `load_span`. What it lacks is read from the checkpoint `beside`, unproven."""
    program = program_of(read_config(folder), precision, str(folder / "config.json"))
    own = program
    if head and program.head.own is not None:
        own = with_own_head(program, _shapes(folder, manifest))
    with _reading(folder, precision, manifest, lambda entries: loading.ends(entries, embed=embed, head=head)) as (
        read,
        packer,
        _,
    ):
        if own != program and not (embed and _is_copy(own, read)):
            program = own
        if beside is None:
            return ends_of(program, read, precision, num_threads, packer, embed=embed, head=head)
        with MappedTensors(beside, lambda *_: None) as others:
            either = _either(read, others.read)
            return ends_of(program, either, precision, num_threads, packer, embed=embed, head=head)


def _either(read: Read, other: Read) -> Read:
    def found(name: str) -> Stored:
        try:
            return read(name)
        except KeyError:
            return other(name)

    return found


def _shapes(folder: Path, manifest: Manifest | None) -> dict[str, tuple[int, ...]]:
    """The shapes of a checkpoint's tensors, by name."""
    found = described_tensors(folder) if manifest is None else manifest.tensors
    return {tensor.name: tuple(tensor.shape) for tensor in found}


def _is_copy(program: Program, read: Read) -> bool:
    """Whether the head is stored as the embedding is, as Qwen3-0.6B's: it is held once then, with the same bits."""
    (table, _), (head, _) = find(program.embed.weight, read), find(program.head.product.parts[0].weight, read)
    if table.type != head.type or head.order is not None:
        return False
    step = max(1, STRETCH // program.hidden)
    parts = (slice(at, at + step) for at in range(0, program.vocab, step))
    return all(np.array_equal(table.array[part], head.array[part]) for part in parts)


def ends_of(
    program: Program,
    read: Read,
    precision: Precision,
    num_threads: int,
    packer: Packer = PLAIN,
    *,
    embed: bool = True,
    head: bool = True,
) -> EndsRunner:
    """The ends of a Program, as `span_of`."""
    if (number := gpu()) is not None:
        from manyhands.engine.cuda.span import CudaEnds

        team = Team(num_threads)
        return CudaEnds(program, read, precision, team, open_gpu(number), embed=embed, head=head, packer=packer)
    if (device := torch_device()) is not None:
        ends: EndsRunner = device_part(device).DeviceEnds(program, read, precision, device, embed=embed, head=head)
        return ends
    return CpuEnds(program, read, precision, Team(num_threads), embed=embed, head=head, packer=packer)
