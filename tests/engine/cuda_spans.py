"""Spans on a GPU that is not there (cuda_host.py), beside the same on the CPU, and rows for them."""

import numpy as np
from numpy.typing import NDArray

from manyhands.core import Precision, Span
from manyhands.engine import golden_models
from manyhands.engine.cpu import CpuSpan
from manyhands.engine.cuda.span import CudaSpan
from manyhands.engine.golden_cases import reals, stored
from manyhands.engine.library import Team
from manyhands.program.families import build_program
from manyhands.program.ops import Program
from tests.engine.cuda_host import HostDevice

Bytes = NDArray[np.uint8]


def program(family: str = "llama", **changed: object) -> Program:
    return build_program({**golden_models.configs()[family], "max_position_embeddings": 1024, **changed})


def spans(device: HostDevice, made: Program, precision: Precision = "bf16") -> tuple[CudaSpan, CpuSpan]:
    """All layers, on the device and on the CPU."""
    read, whole = golden_models.tensors(made, precision).__getitem__, Span(0, len(made.layers))
    return CudaSpan(made, whole, read, precision, device), CpuSpan(made, whole, read, precision, Team(1))


def rows_of(made: Program, count: int, seed: int = 3, kind: str = "bf16") -> Bytes:
    drawn = stored(reals(seed, count, made.hidden, around=0), kind)
    return np.ascontiguousarray(drawn).view(np.uint8).reshape(count, -1)
