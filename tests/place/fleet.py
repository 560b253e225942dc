"""Machines and models for the tests of place, with round numbers."""

from typing import Any

from manyhands.place.machines import Fleet, Machine
from manyhands.place.plan import Task
from manyhands.place.shape import PROCESS_BYTES, ModelShape

MB = 1_000_000


def shape(layers: int = 24, layer_mb: int = 100, ends_mb: int = 0, cache_bytes: int = 0) -> ModelShape:
    return ModelShape("m", "bf16", (layer_mb * MB,) * layers, ends_mb * MB, (cache_bytes,) * layers, 2048, 4096)


def machine(name: str, layers: float, layer_ms: float = 1.0, rtt_ms: float = 0.0, **more: Any) -> Machine:
    """With room for so many layers of 100 MB."""
    memory = PROCESS_BYTES + round(layers * 100 * MB)
    return Machine(
        name,
        memory,
        layer_ms / 1e3,
        rtt_s=rtt_ms / 1e3,
        **{"overhead_s": 0.0, "begin_s": 0.0, "open_s": 0.0, "new_s": 0.0, **more},
    )


def task(*machines: Machine, layers: int = 24, **more: Any) -> Task:
    return Task(shape(layers), Fleet(machines, machines[0].name), **{"tokens": 128, **more})
