"""Which tensors of the checkpoint a Program needs, by name and stored shape."""

import re
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Final

from manyhands.checkpoint.gguf_scales import SCALE
from manyhands.checkpoint.partition import layer_of
from manyhands.errors import ModelError
from manyhands.program.ops import (
    EXPERT,
    AttendStreams,
    Attention,
    Blend,
    ChannelDecay,
    Collapse,
    Compress,
    CompressedAttention,
    Convolution,
    Decay,
    EntryIndex,
    ExpertRouting,
    Experts,
    GroupedProduct,
    Index,
    LatentAttention,
    Layer,
    LinearAttention,
    Mix,
    Multiply,
    Ngrams,
    Norm,
    Op,
    Pool,
    PositionEmbedding,
    Product,
    Program,
    Rotary,
    Rows,
    ScaleHeads,
    SelectiveScan,
    SoftCap,
    Softplus,
    Weight,
    Xielu,
)

# Of GGUF files, without meaning where they are not read: of an indexer, where all positions are chosen; keys and values of
# latents in one tensor, beside the two that newer files have.
_SPARE: Final = (".indexer.", ".kv_b_proj.")
_NUMBER: Final = re.compile(r"\d+")


def op_weights(op: Op) -> Iterator[Weight]:
    """Every weight that an operation names; those of experts once, with EXPERT in the name or stacked."""
    match op:
        case Norm():
            yield from (*op.weight, *op.bias)
        case Product():
            for part in op.parts:
                yield part.weight
                if part.bias is not None:
                    yield part.bias
        case Experts():
            named = (op.gate, op.gate_bias, op.up, op.up_bias, op.down, op.down_bias, op.norm)
            yield from (weight for weight in named if weight is not None)
        case LatentAttention():
            yield from (weight for weight in (op.key_weight, op.value_weight, op.sinks) if weight is not None)
        case Attention(sinks=Weight() as sinks) | CompressedAttention(sinks=sinks):
            yield sinks
        case GroupedProduct():
            yield op.weight
        case Compress() | Pool():
            yield op.bias
        case Collapse():
            yield from (op.mix, op.base, op.scale)
        case Convolution():
            yield from (weight for weight in (op.weight, op.bias) if isinstance(weight, Weight))
        case PositionEmbedding():
            yield op.table
        case Ngrams():
            yield from (op.table, *op.stored)
        case Decay() | ChannelDecay():
            yield from (op.rate, op.bias)
        case Softplus(bias=Weight() as bias):
            yield bias
        case Xielu():
            yield from op.numbers
        case Blend():
            yield op.gate
        case AttendStreams():
            yield from op.weights
        case LinearAttention(skip=Weight() as skip):
            yield skip
        case SelectiveScan():
            yield from (op.rate, op.skip)
        case ExpertRouting():
            yield from (weight for weight in (op.correction, op.factors, op.table) if weight is not None)
        case Multiply(by=Weight() as weight) | Rotary(exponents=Weight() as weight):
            yield weight
        case ScaleHeads():
            yield from (op.scales, op.biases)
        case _:
            pass


def layer_tensors(layer: Layer) -> dict[str, tuple[int, ...]]:
    """The checkpoint's tensors that a layer needs: stored name -> stored shape."""
    out: dict[str, tuple[int, ...]] = {}
    for op in layer.ops:
        experts = op.experts if isinstance(op, Experts) else op.parts if isinstance(op, Ngrams) else 1
        for weight in op_weights(op):
            copies = experts if EXPERT in weight.name else 1
            out.update((weight.stored_name(expert), weight.shape) for expert in range(copies))
    return out


def whole_tensors(program: Program) -> dict[str, Sequence[int]]:
    """The names of tensors that hold whole numbers, and numbers that they may hold, again and again."""
    out: dict[str, Sequence[int]] = {}
    for op in (op for layer in program.layers for op in layer.ops):
        if isinstance(op, ExpertRouting) and op.table is not None:
            out[op.table.name] = range(op.experts)
        elif isinstance(op, Ngrams):
            out |= {weight.name: numbers for weight, numbers in zip(op.stored, op.numbers, strict=True)}
    return out


def wide_weights(layer: Layer) -> frozenset[str]:
    """Names (with EXPERT) of matrices that are not rounded to small weights: of routers, of latent attention, of what weighs
    the heads of an index, of what entries are made of, of the numbers of a mix and what they are made of, and embeddings of
    positions."""
    routers = {op.source for op in layer.ops if isinstance(op, ExpertRouting)}
    routers |= {op.by for op in layer.ops if isinstance(op, Mix) and op.by is not None}
    routers |= {op.target for op in layer.ops if isinstance(op, SoftCap)}
    parts = (part for op in layer.ops if isinstance(op, Product) for part in op.parts)
    latent = [op for op in layer.ops if isinstance(op, LatentAttention)]
    attending = [op for op in layer.ops if isinstance(op, LatentAttention | CompressedAttention)]
    routers |= {op.index.weight for op in attending if isinstance(op.index, Index | EntryIndex)}
    routers |= {name for op in layer.compressed for name in (op.values, op.gates)}
    routers |= {op.gates for op in layer.recurrent if isinstance(op, Pool)}
    names = [part.weight.name for part in parts if part.target in routers]
    names += [op.table.name for op in layer.ops if isinstance(op, PositionEmbedding)]
    return frozenset([*names, *(weight.name for op in latent for weight in op_weights(op))])


def ends_tensors(program: Program, *, embed: bool, head: bool) -> dict[str, tuple[int, ...]]:
    """The checkpoint's tensors of the wanted ends: stored name -> stored shape."""
    out: dict[str, tuple[int, ...]] = {}
    if embed:
        for table in (program.embed, program.embed.beside):
            if table is not None:
                out[table.weight.name] = table.weight.shape
    if head:
        for op in program.head.ops:
            out.update((weight.name, weight.shape) for weight in op_weights(op))
    return out


def check_all_read(program: Program, names: Iterable[str], where: str) -> None:
    """Raise ModelError for a tensor of a GGUF file that the Program reads in no layer: what the file's metadata leave out may
    change the arithmetic. Of some layers tensors may be spare, as keys are of layers that share those of others."""
    weights = [weight for layer in program.layers for op in layer.ops for weight in op_weights(op)]
    read = [*(weight.stored_name(0) for weight in weights), *whole_tensors(program)]
    known = {_NUMBER.sub("#", name) for name in (*read, *ends_tensors(program, embed=True, head=True))}
    for name in names:
        kinds = {_NUMBER.sub("#", each) for each in (name, name.removesuffix(SCALE))}
        is_known = bool(kinds & known) and (layer_of(name) or 0) < len(program.layers)
        if not is_known and not any(part in name for part in _SPARE):
            what = f"{program.family} as its metadata describe it, and may change the model's arithmetic"
            raise ModelError(f"{where}: the file's tensor {name} is not read by {what}")


def with_own_head(program: Program, names: Iterable[str]) -> Program:
    """The Program for a checkpoint with tensors of these names: where it has a head, that is used, also if the config says
    that head and embedding are one. transformers does so if they differ; where they are equal it changes no bit."""
    own = program.head.own
    module = "" if own is None else own.name.removesuffix("weight")
    is_stored = any(name.startswith(module) and name != f"{module}bias" for name in names)
    if own is None or not is_stored:
        return program
    product = program.head.product
    product = replace(product, parts=(replace(product.parts[0], weight=own),))
    return replace(program, head=replace(program.head, product=product, own=None))


def without_corrections(program: Program, names: Container[str]) -> Program:
    """The Program for a checkpoint with tensors of these names: without the corrections of ranks that it lacks, in families
    whose checkpoints may lack them (transformers counts them as zeros)."""

    def stored(op: Op) -> Op:
        if not isinstance(op, ExpertRouting) or not op.may_lack_correction or op.correction is None:
            return op
        return op if op.correction.name in names else replace(op, correction=None)

    layers = tuple(replace(layer, ops=tuple(map(stored, layer.ops))) for layer in program.layers)
    return replace(program, layers=layers)


def with_stacked_experts(program: Program, shapes: Mapping[str, tuple[int, ...]]) -> Program:
    """The Program for a checkpoint with tensors of these names and shapes: where experts of a layer are stacked, gates above
    ups ("experts.gate_up_proj", as Qwen3.5's; transposed, as Qwen3-VL's), they are read from there; all else as it is."""
    layers = tuple(replace(layer, ops=tuple(_stacked(op, shapes) for op in layer.ops)) for layer in program.layers)
    return replace(program, layers=layers)


def _stacked(op: Op, shapes: Mapping[str, tuple[int, ...]]) -> Op:
    if not isinstance(op, Experts) or op.gate is None or not op.gate.name.endswith(f".{EXPERT}.gate_proj.weight"):
        return op
    path = op.gate.name.removesuffix(f".{EXPERT}.gate_proj.weight")
    if f"{path}.gate_up_proj" not in shapes:
        return op
    inner, hidden, outputs = op.gate.outputs, op.gate.inputs, op.down.outputs
    both, down = (op.experts, 2 * inner, hidden), (op.experts, outputs, inner)
    # A square tensor does not tell; not both can be square.
    is_turned = any(
        shape != _turned(shape) == tuple(shapes.get(f"{path}.{name}", ()))
        for name, shape in (("gate_up_proj", both), ("down_proj", down))
    )
    gates = _stack(f"{path}.gate_up_proj", both, is_turned)
    return replace(
        op,
        gate=replace(gates, rows=Rows(0, inner)),
        up=replace(gates, rows=Rows(inner, inner)),
        down=_stack(f"{path}.down_proj", down, is_turned),
    )


def _turned(shape: tuple[int, int, int]) -> tuple[int, int, int]:
    return shape[0], shape[2], shape[1]


def _stack(name: str, shape: tuple[int, int, int], is_turned: bool) -> Weight:
    return Weight(name, _turned(shape) if is_turned else shape, transposed=is_turned, stacked=True)
