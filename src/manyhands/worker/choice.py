"""Which engine computes a model in this process: the one place that decides, before any weights are read.

The native engine (engine/cpu.py) on this CPU, unless `--device` or MANYHANDS_ENGINE names an NVIDIA GPU (engine/cuda), which
computes the same bits, or a device of torch (engine/devices.py). Each runs the Program of a config.json; a family without one
is refused. What MANYHANDS_ENGINE names is never replaced by another.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any, Final

from manyhands.checkpoint.config_fields import parse_config
from manyhands.checkpoint.dtypes import GGUF_METHOD
from manyhands.checkpoint.quantised import read_quantised
from manyhands.core import Precision, caches_codes, weight_precision
from manyhands.engine import golden
from manyhands.engine.cache import bytes_per_position
from manyhands.engine.cache import state_bytes as layer_state_bytes
from manyhands.engine.compile import ROW_TYPES
from manyhands.engine.devices import named_device, torch_device
from manyhands.errors import ModelError
from manyhands.program.families import build_program
from manyhands.program.ops import CompressedAttention, LatentAttention, Program
from manyhands.refusals import installing

ITEM_BYTES: Final[Mapping[Precision, int]] = {"bf16": 2, "fp16": 2, "fp32": 4, "w8": 2, "w4": 2}  # of a number of a row
TORCH_PRECISIONS: Final[tuple[Precision, ...]] = ("bf16", "fp32")


def program_of(config: bytes | Mapping[str, Any], precision: Precision, where: str = "config.json") -> Program:
    """The Program that computes the model of this config.json here.

    Raises ModelError for a family without a Program, for a precision that what computes here lacks, and where
    MANYHANDS_ENGINE names what cannot.
    """
    parsed = parse_config(config, where) if isinstance(config, bytes) else config
    quantised = is_quantised(parsed)
    if (device := named_device()) is not None:
        _check_device(device, precision)
    if torch_device() is None:
        golden.choose(precision)
        _check_native(precision, quantised=quantised)
    program = build_program(parsed, where)
    if torch_device() is not None and program.has_states:
        raise ModelError(
            f"{program.family} has convolutions or linear attention, which {device} does not compute: leave --device out"
            + ("" if program.has_scans or program.has_biases else ", or give --device cuda")
        )
    if device is not None and (program.chooses_entries if torch_device() is not None else program.has_index):
        raise ModelError(
            f"{program.family} has an indexer that chooses positions, which {device} does not compute: leave --device out"
        )
    if device is not None and torch_device() is None and program.has_entries:
        raise ModelError(
            f"{program.family} has residual streams and compressed positions, which {device} does not compute: leave --device "
            "out"
        )
    if device is not None and torch_device() is None and program.has_scans:
        raise ModelError(f"{program.family} has selective scans, which {device} does not compute: leave --device out")
    if device is not None and torch_device() is None and program.has_streams:
        raise ModelError(
            f"{program.family} has streams beside each other in a row, which {device} does not compute: leave --device out"
        )
    if device is not None and torch_device() is None and program.has_biases:
        raise ModelError(
            f"{program.family} adds to scores by distance, which {device} does not compute: leave --device out"
        )
    if caches_codes(precision) and any(
        isinstance(layer.attention, LatentAttention | CompressedAttention) for layer in program.layers
    ):
        raise ModelError(
            f"{program.family} caches latents, which keys and values are made of: they are not held in 8 bits; leave "
            "--cache-dtype out"
        )
    if caches_codes(precision) and program.chooses_entries:
        raise ModelError(f"{program.family} has an indexer: its caches are not held in 8 bits; leave --cache-dtype out")
    return program


def position_bytes(program: Program, precision: Precision) -> tuple[int, ...]:
    """Bytes that each layer caches for one position of a session, as what computes here holds them."""
    item = ITEM_BYTES[weight_precision(precision)]
    if torch_device() is not None:
        return tuple(sum(layer.cache_widths) * item for layer in program.layers)
    has_codes = caches_codes(precision)
    return tuple(bytes_per_position(layer, item, has_codes=has_codes) for layer in program.layers)


def state_bytes(program: Program, precision: Precision) -> tuple[int, ...]:
    """Bytes that each layer caches for a session at most, whatever its length."""
    if torch_device() is not None:  # it computes no states, and keeps of every position what entries are made of
        return (0,) * len(program.layers)
    item = ITEM_BYTES[weight_precision(precision)]
    return tuple(layer_state_bytes(layer, item) for layer in program.layers)


def _check_device(device: str, precision: Precision) -> None:
    if torch_device() is None:
        if caches_codes(precision):
            raise ModelError(f"{device} holds no caches of 8 bit: leave --cache-dtype out, or --device")
    elif precision not in TORCH_PRECISIONS:
        raise ModelError(
            f"{device} computes in {' and '.join(TORCH_PRECISIONS)}, not in {precision}: give --dtype bf16 (matrices that "
            "are stored quantised are held as bf16 then), or leave --device out"
        )


def _check_native(precision: Precision, *, quantised: bool) -> None:
    if weight_precision(precision) in ROW_TYPES:
        return
    if quantised:
        raise ModelError(
            f"quantised files are computed in {', '.join(ROW_TYPES)}, not in {precision}: give --dtype bf16"
        )
    raise ModelError(
        f"this machine computes in {', '.join(ROW_TYPES)}, not in {precision}: give --dtype bf16, which holds matrices of "
        "16 bits as they are stored"
    )


def is_gguf(config: Mapping[str, Any]) -> bool:
    """Whether this is the config of a GGUF file."""
    stored = config.get("quantization_config")
    return isinstance(stored, dict) and stored.get("quant_method") == GGUF_METHOD


def is_quantised(config: Mapping[str, Any]) -> bool:
    """Whether matrices are stored in blocks or groups. Raises ModelError for those that are not read."""
    return is_gguf(config) or read_quantised(config) is not None


@contextmanager
def needing(what: str, packages: str, extra: str) -> Iterator[None]:
    """Within, `packages` are imported, which an extra installs. Raises ModelError where one of them is not installed."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name is not None and error.name.startswith("manyhands"):
            raise
        raise ModelError(f"{what} needs {packages} ({error}): {installing(extra)}") from error


def device_part(device: str) -> ModuleType:
    """The module that runs Programs in torch. Raises ModelError where torch is not installed, or lacks the device."""
    # OpenMP reads them when torch loads. Idle compute threads sleep, so that nodes which share a machine do not fight (two
    # nodes with two threads each on two cores: 14.5 -> 29 steps/s each), but after a pause that is longer than those within a
    # layer (0.3 ms): to wake one takes 70 to 90 us.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("GOMP_SPINCOUNT", "20000")
    with needing(f"--device {device}", "torch", "torch"):
        from manyhands.worker import torch_program
    torch_program.open_device(device)
    return torch_program
