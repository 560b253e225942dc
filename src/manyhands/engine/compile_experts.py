"""Experts as native operations (compile.py has the others)."""

from functools import singledispatch

import numpy as np

from manyhands.engine import library
from manyhands.engine.emitter import Emitter
from manyhands.engine.library import ACTIVATIONS, TYPES, Array
from manyhands.engine.weights import as_fp32, take, vector, whole_numbers
from manyhands.errors import ModelError
from manyhands.program.ops import FIRST_RANK, SCORES, ExpertRouting, Experts, Gating, Op, Weight


@singledispatch
def add_experts(op: Op, to: Emitter) -> None:
    """Emits the operations that `op` is."""
    raise AssertionError(f"no way to compile {type(op).__name__}")


@add_experts.register
def _(op: ExpertRouting, to: Emitter) -> None:
    """The choice of experts, by ranks or by ids. Those that every row takes come first."""
    source, ids = to.source(op.source), (0, 0) if op.table is None else (to.source(op.ids), 1)
    experts, top_k = op.experts + op.always, op.top_k + op.always
    shape = (experts, top_k, SCORES.index(op.score), int(op.normalise), op.groups, op.top_groups)
    table = () if op.table is None else (whole_numbers(op.table, to.read, op.experts),)
    target = to.target(" all routes" if op.always else op.target, 2 * top_k)
    tensors = (_correction(to, op), _factors(to, op), *table)
    to.emit(library.ROUTE, (source, target, *shape, *ids, int(op.is_by_best)), (op.scale, op.epsilon), tensors)
    if op.always:
        to.emit(library.COPY, (target, to.target(op.shares, op.always), 1, 0, 1, op.always, 2, 1))
        to.emit(library.COPY, (target, to.target(op.target, 2 * op.top_k), 2 * op.always, 0, 2 * op.top_k, 1, 0, 0))


def _correction(to: Emitter, op: ExpertRouting) -> Array | None:
    found = vector([op.correction] if op.correction else [], to.read)
    if not op.always:
        return found
    first = np.full(op.always, FIRST_RANK, np.float32)
    return np.concatenate([np.zeros(op.experts, np.float32) if found is None else found, first])


def _factors(to: Emitter, op: ExpertRouting) -> Array | None:
    found = vector([op.factors] if op.factors else [], to.read)
    return np.repeat(found, op.experts + op.always) if found is not None and len(found) == 1 else found


@add_experts.register
def _(op: Experts, to: Emitter) -> None:
    """All experts of a layer. Raises ModelError where gates and ups are held in two types."""
    source, routes = to.source(op.source), to.source(op.routes)
    target = to.target(op.target, op.down.outputs, [source, routes])
    gates = to.stack(op.experts, op.gate) if op.gate is not None else None
    ups, downs = (to.stack(op.experts, weight) for weight in (op.up, op.down))
    biases = [_biases(to, op, weight) for weight in (op.gate_bias, op.up_bias, op.down_bias)]
    if gates is not None and gates.type != ups.type:
        raise ModelError(f"{to.family}: the experts' gates and ups are stored in different types")
    gating, top_k = op.gating, to.width(op.routes) // 2
    numbers = (source, routes, target, op.experts, top_k, op.up.outputs, TYPES[ups.type])
    last = TYPES[downs.type], int(op.scales_source), op.identities
    shape = (*numbers, gate_function(gating), *last)
    scales = () if op.norm is None else (as_fp32(take(op.norm, to.read)) + np.float32(1.0),)
    tensors = (None if gates is None else gates.array, ups.array, downs.array, *biases, *scales)
    to.emit(library.EXPERTS, shape, (*gate_numbers(gating), op.norm_eps), tensors)


def _biases(to: Emitter, op: Experts, weight: Weight | None) -> Array | None:
    return None if weight is None else np.stack([as_fp32(take(weight, to.read, i)) for i in range(op.experts)])


def gate_function(gating: Gating) -> int:
    """The number of its function, as engine/native/kernels.h has them."""
    return library.SITU if gating.activation == "situ" else ACTIVATIONS.index(gating.activation)


def gate_numbers(gating: Gating) -> tuple[float, float, float]:
    """Alpha, limit (0: none, below 0: one of activated gates) and offset, as engine/native/plan.c has them."""
    limit = gating.limit or 0.0
    return gating.alpha, -limit if gating.limits_activated else limit, gating.up_offset
