"""Which engine computes a model on this machine, decided in one place: the native one (engine/cpu.py), or torch (model/).

The native engine serves models whose config.json yields a Program, in bf16 and fp32, and alone serves small weights (w8,
w4). torch serves the other families, and everything else on CPUs with AMX tiles, where the engine has not run yet.
MANYHANDS_ENGINE names a back end that must be used, or "torch"; what it names is never replaced by another.
"""

import hashlib
import logging
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from manyhands.checkpoint.config_fields import parse_config
from manyhands.checkpoint.folder import read_config
from manyhands.checkpoint.gguf_model import METHOD
from manyhands.checkpoint.manifest import Manifest
from manyhands.checkpoint.quantised import read_quantised
from manyhands.checkpoint.verify import verifying
from manyhands.config import home_from_env
from manyhands.core import SMALL_WEIGHTS, Precision, Span, caches_codes, weight_precision
from manyhands.engine import golden
from manyhands.engine.compile import ROW_TYPES
from manyhands.engine.cpu import CpuEnds, CpuSpan
from manyhands.engine.library import FORCED, TORCH, Team
from manyhands.engine.mapped import MappedTensors
from manyhands.engine.packing import PLAIN, Keeping, Packer
from manyhands.engine.quantised import reader
from manyhands.engine.span import EndsRunner, SpanRunner
from manyhands.engine.weights import Read
from manyhands.errors import ModelError
from manyhands.program.families import build_program
from manyhands.program.ops import LatentAttention, Program
from manyhands.weights.packed import PackedShelf

logger = logging.getLogger(__name__)

_CPUINFO: Final = Path("/proc/cpuinfo")


@dataclass(frozen=True, slots=True)
class Facts:
    """What is known of a model before its weights are read. `arithmetic`: the class of what computes it here; `back_end`:
    its name."""

    num_layers: int
    hidden_size: int
    vocab_size: int
    context_length: int
    arithmetic: str
    back_end: str


def native_program(
    config: bytes | Mapping[str, Any], precision: Precision, where: str = "config.json"
) -> Program | None:
    """The Program that the native engine runs of this config.json; None: torch computes the model.

    Raises ModelError where MANYHANDS_ENGINE names a back end that cannot; and for a config that nothing computes.
    """
    parsed = parse_config(config, where) if isinstance(config, bytes) else config
    if is_quantised(parsed):
        _check_quantised(precision)
        return _with_caches(build_program(parsed, where), precision)
    if not serves_natively(precision):
        return None
    try:
        return _with_caches(build_program(parsed, where), precision)
    except ModelError:
        if os.environ.get(FORCED) or _is_native(precision):
            raise
        return None


def _is_native(precision: Precision) -> bool:
    """Whether the native engine alone computes at a precision."""
    return weight_precision(precision) in SMALL_WEIGHTS or caches_codes(precision)


def _with_caches(program: Program, precision: Precision) -> Program:
    """The program, if its caches can hold what the precision says. Raises ModelError."""
    if caches_codes(precision) and any(isinstance(layer.attention, LatentAttention) for layer in program.layers):
        raise ModelError(
            f"{program.family} caches latents, which keys and values are made of: they are not held in 8 bits; leave "
            "--cache-dtype out"
        )
    return program


def is_gguf(config: Mapping[str, Any]) -> bool:
    """Whether this is the config of a GGUF file: only the native engine reads its tensors."""
    stored = config.get("quantization_config")
    return isinstance(stored, dict) and stored.get("quant_method") == METHOD


def is_quantised(config: Mapping[str, Any]) -> bool:
    """Whether matrices are stored in blocks or groups, which only the native engine reads.

    Raises ModelError for what it does not.
    """
    return is_gguf(config) or read_quantised(config) is not None


def _check_quantised(precision: Precision) -> None:
    if weight_precision(precision) not in ROW_TYPES:
        raise ModelError(
            f"quantised files are computed in {', '.join(ROW_TYPES)}, not in {precision}: give --dtype bf16"
        )
    if os.environ.get(FORCED) == TORCH:
        raise ModelError(f"{FORCED}={TORCH} reads no quantised files: leave it out")


def serves_natively(precision: Precision) -> bool:
    """Whether the native engine serves this precision here, for models that have a Program.

    Raises ModelError where MANYHANDS_ENGINE names a back end that cannot.
    """
    named = os.environ.get(FORCED)
    if _is_native(precision):
        if named == TORCH:
            raise ModelError(f"{FORCED}={TORCH} computes in bf16 and fp32, not in {precision}: leave it out")
        golden.choose()
        return True
    if named == TORCH:
        return False
    if not named:
        return precision in ROW_TYPES and not has_tiles() and _has_back_end()
    golden.choose()
    if precision not in ROW_TYPES:
        raise ModelError(f"{FORCED}={named} computes in {' and '.join(ROW_TYPES)}, not in {precision}: leave it out")
    return True


@cache
def has_tiles() -> bool:
    """Whether this CPU has AMX tiles for bf16 that the torch path uses."""
    try:
        flags = next((line for line in _CPUINFO.read_text().splitlines() if line.startswith("flags")), "")
    except OSError:
        return False
    if "amx_bf16" not in flags.split() or find_spec("torch") is None:
        return False
    from manyhands.model import tiles

    return tiles.available()


@cache
def _has_back_end() -> bool:
    """Whether a back end that is fast runs here; else torch serves, and why is logged once."""
    try:
        return golden.choose() != "scalar"
    except ModelError as error:
        logger.warning("the native engine is not used: %s", error)
        return False


@contextmanager
def needing_torch(what: str) -> Iterator[None]:
    """Within, torch and what goes with it are imported. Raises ModelError where one of them is not installed."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name is not None and error.name.startswith("manyhands"):
            raise
        raise ModelError(f"{what} needs the torch engine ({error}): pip install 'manyhands[torch]'") from error


def torch_part() -> ModuleType:
    """The module that computes with torch. Raises ModelError where torch or transformers is not installed."""
    with needing_torch("this model"):
        from manyhands.worker import torch_runner
    return torch_runner


def native_class(program: Program, precision: Precision) -> str:
    """The arithmetic class: precision, and a hash of the engine's golden digests and of the Program."""
    is_small, has_codes = weight_precision(precision) in SMALL_WEIGHTS, caches_codes(precision)
    whole = f"{golden.arithmetic(is_small=is_small, has_codes=has_codes)} {program!r}"
    return f"{precision}/{hashlib.sha256(whole.encode()).hexdigest()[:16]}"


def arithmetic_class(config: bytes, precision: Precision) -> str:
    """The class of what computes the model of this config.json here; not proven to keep rows apart. Raises ModelError."""
    program = native_program(config, precision)
    if program is not None:
        return native_class(program, precision)
    torch_part()
    from manyhands.model import arithmetic

    return arithmetic.arithmetic_class(precision)


def is_widened(config: bytes | Mapping[str, Any], precision: Precision) -> bool:
    """Whether weights in bf16 are held as fp32 here, in twice the memory: torch does so on CPUs without bf16 products."""
    if precision != "bf16" or native_program(config, precision) is not None:
        return False
    torch_part()
    from manyhands.model.linear import has_bf16_products

    return not has_bf16_products()


def precision_note(config: bytes | Mapping[str, Any], precision: Precision) -> str:
    """What a user should know of how weights are held here: rounded, or as fp32 for want of bf16 products; "" if neither."""
    parsed = parse_config(config) if isinstance(config, bytes) else config
    if weight_precision(precision) == "bf16" and is_quantised(parsed):
        return (
            "matrices of this model that are stored quantised are rounded to bf16, 8 bits of each number; --dtype w4 "
            "and w8 hold them as they are stored, fp32 exactly too, in twice the memory"
        )
    if not is_widened(parsed, precision):
        return ""
    return (
        "torch multiplies no bf16 on this CPU (that takes AVX-512): weights are packed as fp32, in twice the memory, and a "
        "token takes about 1.8 times as long; --dtype w8 takes a quarter of the bytes"
    )


def prepare(config: bytes, precision: Precision) -> None:
    """What takes a while once on a machine, done in advance: that back ends, or torch's kernels, keep rows apart."""
    if native_program(config, precision) is None:
        torch_part().proven_class(precision, home_from_env())


def describe(folder: Path, precision: Precision) -> Facts:
    """What is known of the model in `folder`, and that it may be served. May take seconds. Raises ModelError."""
    program = native_program(read_config(folder), precision, str(folder / "config.json"))
    if program is None:
        found: Facts = torch_part().describe(folder, precision, home_from_env())
        return found
    return Facts(
        len(program.layers),
        program.hidden,
        program.vocab,
        program.context,
        native_class(program, precision),
        golden.choose(),
    )


def load_span(
    folder: Path, span: Span, precision: Precision, num_threads: int, manifest: Manifest | None = None
) -> SpanRunner:
    """Layers of the checkpoint in `folder`, for at most `num_threads` threads; with a `manifest`, proven to be that model's.

    Raises ModelError (Damaged if they are not), CutError.
    """
    program = native_program(read_config(folder), precision, str(folder / "config.json"))
    if program is None:
        runner: SpanRunner = torch_part().ShardSpan(folder, span, precision, manifest)
        return runner
    with _reading(folder, precision, manifest) as (read, packer):
        return CpuSpan(program, span, read, precision, Team(num_threads), packer=packer)


@contextmanager
def _reading(folder: Path, precision: Precision, manifest: Manifest | None) -> Iterator[tuple[Read, Packer]]:
    """Within, the tensors of a checkpoint are read; on leaving they are proven, as `verifying`, and what was packed is kept.

    Kept is what takes long to pack: small weights, unless they are the blocks of a GGUF file.
    """
    precision = weight_precision(precision)
    began, config = time.perf_counter(), parse_config(read_config(folder), str(folder / "config.json"))
    keeping = None
    if manifest is not None and precision in SMALL_WEIGHTS and not is_gguf(config):
        keeping = Keeping(PackedShelf(home_from_env(), manifest.id), precision)
    with verifying(folder, manifest) as use, MappedTensors(folder, use) as tensors:
        small = precision in SMALL_WEIGHTS
        yield reader(tensors, read_quantised(config), needs_blocks=small), keeping or PLAIN
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
) -> EndsRunner:
    """The ends of the checkpoint in `folder`, as `load_span`."""
    program = native_program(read_config(folder), precision, str(folder / "config.json"))
    if program is None:
        ends: EndsRunner = torch_part().ShardEnds(folder, precision, manifest, embed=embed, head=head)
        return ends
    with _reading(folder, precision, manifest) as (read, packer):
        return CpuEnds(program, read, precision, Team(num_threads), embed=embed, head=head, packer=packer)
