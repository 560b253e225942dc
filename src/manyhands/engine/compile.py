"""Program -> Plan: registers by number, weights packed, one native operation after the other."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, singledispatchmethod

import numpy as np

from manyhands.core import SMALL_WEIGHTS, Precision, caches_codes, weight_precision
from manyhands.engine import library
from manyhands.engine.compile_experts import add_experts, gate_function, gate_numbers
from manyhands.engine.compile_rows import add_row
from manyhands.engine.compiled import Compiled, Emitted, Registers
from manyhands.engine.compressed import add_compressed
from manyhands.engine.filed import Given
from manyhands.engine.latents import add_latent, attended
from manyhands.engine.library import ACTIVATIONS, TYPES, Array
from manyhands.engine.memory import Memory
from manyhands.engine.packing import PLAIN, Make, Packer
from manyhands.engine.states import DELTA_SCAN, delta_form
from manyhands.engine.weights import (
    Found,
    Read,
    Stored,
    as_fp32,
    as_numbers,
    decay_rates,
    ends_precision,
    find,
    kernel,
    matrices,
    matrix,
    rope_rates,
    take,
    vector,
)
from manyhands.errors import ModelError
from manyhands.program.ops import (
    RESIDUAL,
    Add,
    Attention,
    Blend,
    ChannelDecay,
    Collapse,
    Compress,
    CompressedAttention,
    Convolution,
    Decay,
    ExpertRouting,
    Experts,
    Gate,
    GroupedProduct,
    Head,
    LatentAttention,
    Layer,
    LinearAttention,
    Multiply,
    Norm,
    Op,
    Part,
    Pool,
    Product,
    Program,
    Rotary,
    RowOp,
    ScaleByPosition,
    ScaleHeads,
    SelectiveScan,
    Softplus,
    Spread,
    Weight,
    Xielu,
)
from manyhands.program.tensors import wide_weights

ROW_TYPES: dict[Precision, str] = {"bf16": "bf16", "fp32": "f32", "w8": "bf16", "w4": "bf16"}
MOST_REGISTERS = 64
MOST_ROWS = 1 << 16  # of a call (MAX_ROWS in native/plan.h)


def compile_layers(
    program: Program,
    layers: Sequence[Layer],
    read: Read,
    precision: Precision,
    back_end: str,
    packer: Packer = PLAIN,
    take: Callable[[Compiled], None] | None = None,
) -> Compiled:
    """Layers from hidden states to hidden states. `take` is given each as soon as it is compiled; it alone has the weights
    then, what is returned lacks them. Raises ModelError for what the engine cannot compute."""
    compiler = _Compiler(program, read, precision, back_end, packer)
    for layer in layers:
        packer.begin(repr(layer))
        compiler.begin_layer(layer)
        for op in layer.ops:
            compiler.add(op)
        if take is not None:
            first = compiler.layers[-1]
            take(compiler.compiled([first, len(compiler.ops)]))
            compiler.ops[first:] = [(*op[:3], ()) for op in compiler.ops[first:]]
    return compiler.compiled([*compiler.layers, len(compiler.ops)])


def compile_head(
    program: Program,
    read: Read,
    precision: Precision,
    back_end: str,
    table: Stored | None = None,
    packer: Packer = PLAIN,
) -> Compiled:
    """Final norm and head, from hidden states to logits in fp32. table: the packed weight of a tied head."""
    head: Head = program.head
    packer.begin(f"head {head!r}")
    compiler = _Compiler(program, read, ends_precision(precision), back_end, packer)
    for op in head.ops:
        compiler.table = table if op is head.product else None
        compiler.add(op)
    logits = compiler.bound["logits"]
    if head.scale != 1.0 or head.soft_cap is not None:
        compiler.emit(library.SOFTEN, (logits,), (head.scale, head.soft_cap or 0.0))
    registers = replace(compiler.registers(), context=MOST_ROWS)  # rows of many sessions, none at a position of its own
    return Compiled(registers, compiler.ops, [0, len(compiler.ops)], logits, "f32")


class _Compiler:
    """Operations so far, with the widths of the registers that they use."""

    def __init__(self, program: Program, read: Read, precision: Precision, back_end: str, packer: Packer) -> None:
        self.has_codes, precision = caches_codes(precision), weight_precision(precision)
        if precision not in ROW_TYPES:
            raise ModelError(f"the native engine computes in {' and '.join(ROW_TYPES)}, not in {precision}")
        self.family = program.family
        self._program, self.read, self.precision, self._back_end = program, read, precision, back_end
        self._memory, self._packer = Memory(), packer
        self.table: Stored | None = None  # the packed weight of the next product, if there is one already
        self._rates = cache(lambda rope, exponents: rope_rates(program.ropes[rope], exponents, read))
        self.ops: list[Emitted] = []
        self.layers: list[int] = []  # their first operations
        self._widths, self._numbers = [program.hidden], {(RESIDUAL, program.hidden, False): 0}
        self.bound = {RESIDUAL: 0}  # by name: the register that holds it now
        self._wide: frozenset[str] = frozenset()  # tensors of the layer that are not rounded to small weights
        self._last: Add | Blend | Spread | None = None  # the layer's last addition to the residual stream

    def begin_layer(self, layer: Layer) -> None:
        """Only the residual stream goes from a layer to the next."""
        self.bound, self._wide = {RESIDUAL: 0}, wide_weights(layer)
        added = (op for op in reversed(layer.ops) if isinstance(op, Add | Blend | Spread) and op.target == RESIDUAL)
        self._last = next(added, None)
        self.layers.append(len(self.ops))

    def compiled(self, starts: Sequence[int]) -> Compiled:
        """Layers that begin with these operations, the last of which is the end of all; so far."""
        registers = self.registers()
        ops = self.ops[starts[0] : starts[-1]]
        return Compiled(registers, ops, [start - starts[0] for start in starts], 0, registers.row_type)

    def registers(self) -> Registers:
        if len(self._widths) > MOST_REGISTERS:
            raise ModelError(f"{self.family} needs {len(self._widths)} registers, of {MOST_REGISTERS}")
        return Registers(ROW_TYPES[self.precision], tuple(self._widths), self._program.context)

    def emit(
        self, kind: int, numbers: Sequence[int], reals: Sequence[float] = (), tensors: Sequence[Given] = ()
    ) -> None:
        self.ops.append((kind, numbers, reals, tensors))

    def source(self, name: str) -> int:
        return self.bound[name]

    def width(self, name: str) -> int:
        return self._widths[self.bound[name]]

    def target(self, name: str, width: int, apart: Sequence[int] = ()) -> int:
        """The register that `name` will be in, none of those `apart`."""
        for variant in (False, True):
            key = (name, width, variant)
            if self._numbers.get(key, -1) not in apart:
                break
        if key not in self._numbers:
            self._numbers[key] = len(self._widths)
            self._widths.append(width)
        self.bound[name] = self._numbers[key]
        return self._numbers[key]

    @singledispatchmethod
    def add(self, op: Op) -> None:
        raise ModelError(f"{self.family} needs {type(op).__name__}, which the native engine cannot compute yet")

    @add.register
    def _(self, op: Norm) -> None:
        source, width = self.source(op.source), self.width(op.source)
        vectors = vector(op.weight, self.read), vector(op.bias, self.read)
        numbers = (source, self.target(op.target, width), op.groups, int(op.kind == "layer"))
        self.emit(library.NORM, numbers, (op.eps, op.offset), vectors)

    @add.register
    def _(self, op: Product) -> None:
        source, order = self.source(op.source), None
        for part in op.parts:
            order = self._part(source, part, order)

    def _part(self, source: int, part: Part, before: Array | None) -> Array | None:
        """before: the order that the inputs were put in for parts before, or None; what it is now."""

        def make() -> Stored:
            found = find(part.weight, self.read)
            return matrix(found, self._kept(part.weight), self._memory, self._back_end, may_order=True)

        weight = self.table or self._pack(make)
        bias = vector([part.bias] if part.bias else [], self.read)
        if weight.order is not None:
            width = len(weight.order)
            if before is None or not np.array_equal(before, weight.order):
                self.emit(
                    library.COPY, (source, self.target(" ordered", width), 0, 0, width, 1, 0, 0), (), (weight.order,)
                )
            source = self.source(" ordered")
        target = self.target(part.target, part.weight.outputs, [source])
        numbers = (source, target, TYPES[weight.type], ACTIVATIONS.index(part.activation))
        self.emit(library.PRODUCT, numbers, (), (weight.array, bias))
        return before if weight.order is None else weight.order

    def _pack(self, make: Make) -> Stored:
        return self._packer.take(make, self._memory)

    def _kept(self, weight: Weight) -> Precision:
        return "bf16" if weight.name in self._wide and self.precision in SMALL_WEIGHTS else self.precision

    @add.register
    def _(self, op: Rotary) -> None:
        rope, rates = self._program.ropes[op.rope], self._rates(*op.table)
        back = (op.back,) if op.back else ()
        numbers = self.source(op.target), op.heads, op.width, op.offset, len(rates), int(op.pairs), *back
        self.emit(library.ROTARY, numbers, (rope.factor,), (rates,))

    @add.register
    def _(self, op: Attention) -> None:
        sources = [self.source(name) for name in (op.query, op.key, op.value)]
        biases = () if op.biases is None else (0, self.source(op.biases))
        target = self.target(op.target, op.heads * op.value_width, [*sources, *biases])
        chosen, window = attended(self, op)
        shape = (op.heads, op.kv_heads, op.width, op.value_width, window, 0, int(self.has_codes), *chosen, *biases)
        sinks = vector([op.sinks] if op.sinks else [], self.read)
        vectors = (sinks, np.array(op.slopes, np.float32)) if op.slopes else (sinks,)
        self.emit(library.ATTENTION, (*sources, target, *shape), (op.scale, op.soft_cap or 0.0), vectors)

    @add.register
    def _(self, op: LatentAttention) -> None:
        add_latent(self, op)

    def by_head(self, weight: Weight, heads: int, turned: bool) -> Stored:
        """A weight's rows of each head, packed, or those rows as columns."""

        def make() -> Stored:
            whole = None if weight.stacked else as_numbers(take(weight, self.read))

            def part(head: int) -> Found:
                stored = whole or as_numbers(take(weight, self.read, head))
                array = stored.array.reshape(heads, -1, stored.array.shape[1])[head] if whole else stored.array
                return Stored(stored.type, array.T if turned else array), None

            return matrices(heads, part, self._kept(weight), self._memory, self._back_end)

        return self._pack(make)

    @add.register
    def _(self, op: Convolution) -> None:
        source = self.source(op.source)
        taps = kernel(op, self.read)
        bias = vector([op.bias] if op.bias else [], self.read)
        target = self.target(op.target, self.width(op.source), [source])
        self.emit(library.CONVOLVE, (source, target, op.length, ACTIVATIONS.index(op.activation)), (), (taps, bias))

    @add.register
    def _(self, op: Decay | ChannelDecay | Softplus) -> None:
        width = self.width(op.source)
        rates = None if isinstance(op, Softplus) else decay_rates(op, width, self.read)
        bias = np.zeros(width, np.float32) if op.bias is None else vector([op.bias], self.read)
        bound = op.bound if isinstance(op, ChannelDecay) else None
        form = 2 if bound is not None else int(isinstance(op, ChannelDecay))
        numbers = (self.source(op.source), self.target(op.target, width), form)
        self.emit(library.DECAY, numbers, () if bound is None else (bound,), (rates, bias))

    @add.register
    def _(self, op: LinearAttention) -> None:
        sources = [self.source(name) for name in (op.query, op.key, op.value, op.decay, op.strength)]
        target = self.target(op.target, op.heads * op.value_width, sources)
        keys, times = op.key_heads * op.width, op.kept_key_heads // op.key_heads
        for i in range(2 if times > 1 else 0):  # queries and keys again and again, one for each head
            once, sources[i] = sources[i], self.target(f" {i} of heads", times * keys)
            self.emit(library.COPY, (once, sources[i], 0, 0, keys, times, 0, keys))
        shape = (op.heads, op.kept_key_heads, op.width, op.value_width, delta_form(op.is_sum, op.by_channel))
        self.emit(library.DELTA, (*sources, target, *shape), (), (vector([op.skip] if op.skip else [], self.read),))

    @add.register
    def _(self, op: SelectiveScan) -> None:
        sources = [self.source(name) for name in (op.query, op.key, op.value, op.step)]
        target = self.target(op.target, op.columns, sources)
        stored = as_fp32(take(op.rate, self.read)).astype(np.float64)
        found = -library.double("exp", stored.reshape(-1)).reshape(stored.shape) if op.is_log else stored
        rates = np.ascontiguousarray(found.T, np.float32)
        shape = (1, 1, op.width, op.columns, DELTA_SCAN)
        self.emit(library.DELTA, (*sources, sources[3], target, *shape), (), (vector([op.skip], self.read), rates))

    @add.register
    def _(self, op: Gate) -> None:
        gate, up, gating = self.source(op.gate), self.source(op.up), op.gating
        numbers = (gate, up, self.target(op.target, self.width(op.gate)), gate_function(gating))
        self.emit(library.GATE, numbers, gate_numbers(gating))

    @add.register
    def _(self, op: ExpertRouting | Experts) -> None:
        add_experts(op, self)

    def stack(self, count: int, weight: Weight) -> Stored:
        """The matrices of all experts, packed, one behind the other."""

        def part(expert: int) -> Found:
            return find(weight, self.read, expert)

        return self._pack(lambda: matrices(count, part, self.precision, self._memory, self._back_end))

    @add.register
    def _(self, op: Collapse | Spread | GroupedProduct | Compress | CompressedAttention | Pool) -> None:
        add_compressed(op, self)

    def exact(self, weight: Weight) -> Stored:
        """A matrix packed as it is stored."""
        return self._pack(lambda: matrix(find(weight, self.read), "fp32", self._memory, self._back_end))

    def rounds(self, op: Op) -> bool:
        """Whether what `op` leaves in "x" is rounded: with small weights or codes once a layer, at its end, where cuts are."""
        return op is self._last or not (self.has_codes or self.precision in SMALL_WEIGHTS)

    @add.register
    def _(self, op: Multiply | ScaleByPosition | ScaleHeads | Xielu | RowOp) -> None:
        add_row(op, self)

    @add.register
    def _(self, op: Add) -> None:
        """Rounded after the last term."""
        is_rounded, target = self.rounds(op), self.source(op.target)
        for term in op.terms:
            ends = is_rounded and target == 0 and term is op.terms[-1]
            self.emit(library.ADD, (self.source(term.source), int(ends), target), (term.scale,))
