"""How fast this machine computes with each kind of weights, and what follows for a model at each precision.

A decode step reads every weight that it needs once. What is measured is a product of one row with a matrix larger than any
cache, for each type in which the engine holds matrices, and a product so small that only its fixed cost is left; with one
thread and with all. Kept for a day in $MANYHANDS_HOME/measured.json. Blocking: a second at the first use.
"""

import contextlib
import hashlib
import json
import platform
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from manyhands.core import PRECISIONS, Precision, weight_precision
from manyhands.place.measure import MAX_AGE_S, Overheads, measured_overheads, read_measured
from manyhands.resources import num_cores

if TYPE_CHECKING:
    from manyhands.checkpoint.dtypes import Described
    from manyhands.program.ops import Experts, Program, Weight

WIDTH: Final = 4096  # inputs and outputs of the large matrix; a few of them lie one behind the other
LARGE_BYTES: Final = 96 << 20
SMALL_WIDTH: Final = 64
SMALL_COUNT: Final = 64
RUNS: Final = 5
_VERSION: Final = 1


@dataclass(frozen=True, slots=True)
class Kernels:
    """On some number of threads: seconds a byte of each type of weights, and seconds that any product takes beside them."""

    byte_s: Mapping[str, float]
    product_s: float


@dataclass(frozen=True, slots=True)
class Predicted:
    """A model held here at one precision, whole: bytes read for a token, and tokens a second of one stream."""

    precision: Precision
    token_bytes: int
    tokens_per_s: float


def predict(
    config: Mapping[str, Any],
    tensors: "Sequence[Described]",
    kernels_of: "Callable[[Collection[str]], Sequence[Kernels]]",
    overhead_s: float,
) -> dict[Precision, Predicted]:
    """For each precision in which the native engine computes this model; empty where it has no Program.

    tensors: those of the model, as they are stored. kernels_of: what is measured of types of weights, for some numbers of
    threads; the fastest counts. overhead_s: what a token takes beside its products.
    """
    from manyhands.checkpoint.folded import folded
    from manyhands.engine.compile import ROW_TYPES
    from manyhands.errors import ModelError
    from manyhands.program.families import build_program

    try:
        program, stored = build_program(config), {tensor.name: tensor.dtype for tensor in folded(tensors, config)}
    except ModelError:
        return {}
    sizes = {each: _read_bytes(program, stored, each) for each in PRECISIONS if each in ROW_TYPES}
    kernels = kernels_of({name for read in sizes.values() for name, _ in read})
    return {precision: _predicted(precision, read, kernels, overhead_s) for precision, read in sizes.items()}


def as_measured(
    predicted: Mapping[Precision, Predicted], precision: Precision, tokens_per_s: float
) -> dict[Precision, Predicted]:
    """The same, where the model itself was measured at one precision: all speeds by the factor that brings that one there."""
    known = predicted.get(weight_precision(precision))
    factor = tokens_per_s / known.tokens_per_s if known else 1.0
    return {name: replace(each, tokens_per_s=factor * each.tokens_per_s) for name, each in predicted.items()}


def _predicted(
    precision: Precision, read: Sequence[tuple[str, int]], kernels: Sequence[Kernels], overhead_s: float
) -> Predicted:
    each = (sum(of.byte_s[name] * size + of.product_s for name, size in read) for of in kernels)
    return Predicted(precision, sum(size for _, size in read), 1 / (min(each) + overhead_s))


def _read_bytes(program: "Program", stored: Mapping[str, str], precision: Precision) -> list[tuple[str, int]]:
    """Type and packed bytes of each matrix that a token is multiplied with: of experts those that it is routed to."""
    from manyhands.engine.weights import ends_precision
    from manyhands.program.ops import Collapse, ExpertRouting, Experts, GroupedProduct, LatentAttention, Product
    from manyhands.program.tensors import wide_weights

    found: list[tuple[str, int]] = []
    for layer in program.layers:
        wide, routed = wide_weights(layer), 1
        for op in layer.ops:
            if isinstance(op, ExpertRouting):
                routed = op.top_k
            weights = [part.weight for part in op.parts] if isinstance(op, Product) else []
            weights += _of_experts(op) * routed if isinstance(op, Experts) else []
            weights += [op.weight] if isinstance(op, GroupedProduct) and not op.is_shared else []
            exact = [op.mix] if isinstance(op, Collapse) else []
            exact += [op.weight] if isinstance(op, GroupedProduct) and op.is_shared else []
            found += [_packed(weight, stored, "fp32") for weight in exact]
            if isinstance(op, LatentAttention):
                weights += [op.key_weight, op.value_weight] * (op.heads if op.key_weight.stacked else 1)
            found += [_packed(weight, stored, "bf16" if weight.name in wide else precision) for weight in weights]
    head = program.head.product.parts[0].weight
    return [*found, _packed(head, stored, ends_precision(precision))]


def _of_experts(op: "Experts") -> "list[Weight]":
    return [weight for weight in (op.gate, op.up, op.down) if weight is not None]


def _packed(weight: "Weight", stored: Mapping[str, str], precision: Precision) -> tuple[str, int]:
    from manyhands.engine.quants import packed_bytes
    from manyhands.engine.weights import kept_type

    plain = {"BF16": "bf16", "F16": "f16", "F32": "f32"}
    dtype = stored.get(weight.stored_name(0), "BF16")
    kept = kept_type(plain.get(dtype, dtype), precision)
    return kept, packed_bytes(kept, weight.outputs, weight.inputs)


def predict_here(config: Mapping[str, Any], tensors: "Sequence[Described]", home: Path) -> dict[Precision, Predicted]:
    """By what is measured of this machine; what a hop and the origin add counts as the last rehearsal found it, if there was
    one of late (cli/rehearsal.py)."""
    overheads = measured_overheads(home, time.time(), Overheads)
    overhead_s = overheads.hop_s + overheads.origin_s
    return predict(config, tensors, lambda types: measured_kernels(types, home, time.time()), overhead_s)


def measured_kernels(types: Collection[str], home: Path, now_s: float) -> tuple[Kernels, ...]:
    """With one thread and with all: `types` as measured within MAX_AGE_S on this machine with this engine, or now."""
    from manyhands.files import write_atomic

    path, key = home / "measured.json", _key()
    known = read_measured(path)
    before = _kernels_of(known.get(key), now_s)
    missing = set(types) - before[0].byte_s.keys() if before else set(types)
    if before and not missing:
        return before
    made = tuple(measure_kernels(threads, sorted(missing)) for threads in sorted({1, num_cores()}))
    if before:
        made = tuple(Kernels({**a.byte_s, **b.byte_s}, b.product_s) for a, b in zip(before, made, strict=True))
    entry = {"at": now_s, "kernels": [{"byte_s": dict(each.byte_s), "product_s": each.product_s} for each in made]}
    with contextlib.suppress(OSError):  # only to save time
        write_atomic(path, json.dumps({**known, key: entry}, indent=1).encode())
    return made


def _key() -> str:
    from manyhands.engine import golden

    facts = [
        "kernels",
        _VERSION,
        platform.node(),
        platform.machine(),
        num_cores(),
        golden.choose(),
        golden.arithmetic(),
    ]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:32]


def _kernels_of(entry: object, now_s: float) -> tuple[Kernels, ...] | None:
    try:
        assert isinstance(entry, dict)
        assert 0 <= now_s - float(entry["at"]) < MAX_AGE_S
        found = tuple(
            Kernels({str(name): float(value) for name, value in each["byte_s"].items()}, float(each["product_s"]))
            for each in entry["kernels"]
        )
        assert len(found) == len({1, num_cores()})
        assert all(each.byte_s.keys() == found[0].byte_s.keys() for each in found)
        assert all(0 < value < 1 for each in found for value in (*each.byte_s.values(), each.product_s))
        return found
    except (AssertionError, AttributeError, KeyError, TypeError, ValueError):
        return None


def measure_kernels(threads: int, types: Collection[str], clock: Callable[[], float] = time.perf_counter) -> Kernels:
    """Products of one row, with `threads` threads."""
    product_s = _seconds(threads, "bf16", SMALL_WIDTH, SMALL_COUNT, clock) / SMALL_COUNT
    byte_s = {}
    for name in types:
        count = max(2, LARGE_BYTES // _size(name, WIDTH))
        byte_s[name] = _seconds(threads, name, WIDTH, count, clock) / count / _size(name, WIDTH)
    return Kernels(byte_s, product_s)


def _size(name: str, width: int) -> int:
    from manyhands.engine.quants import packed_bytes

    return packed_bytes(name, width, width)


def _seconds(threads: int, name: str, width: int, count: int, clock: Callable[[], float]) -> float:
    """The least of some runs of `count` products of a row, one behind the other: others only make them slower."""
    import numpy as np

    from manyhands.engine import golden, library
    from manyhands.engine.layout import Segment
    from manyhands.engine.memory import Memory

    memory, team = Memory(), library.Team(threads)
    plan = library.Plan(golden.choose(), "bf16", [width, width], 1, "f32", 1)
    for _ in range(count):
        packed = memory.array(_size(name, width), np.uint8)
        packed[:] = 1  # pages of their own, and numbers that are no zeros
        plan.add(library.PRODUCT, (0, 1, library.TYPES[name], 0), (), (packed, None))
    row, times = np.full((1, 2 * width), 63, np.uint8), []
    for _ in range(RUNS):
        began = clock()
        plan.run(team, threads, [Segment(None, 0, 0, 0, 1)], row, 1)
        times.append(clock() - began)
    team.close()
    return min(times)
