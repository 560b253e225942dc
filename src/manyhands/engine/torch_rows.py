"""Operations of row_ops.py on rows of torch."""

from collections.abc import Callable

import torch
from torch import Tensor

from manyhands.engine.torch_functions import heads, soft_capped, xielu
from manyhands.engine.torch_memory import LayerRun
from manyhands.program.ops import (
    RESIDUAL,
    AttendStreams,
    Blend,
    Clip,
    Constant,
    Copy,
    Mix,
    PositionEmbedding,
    Rescale,
    RowOp,
    ScaleByPosition,
    ScaleHeads,
    SoftCap,
    Softplus,
    Sparsify,
    Xielu,
)

Registers = dict[str, Tensor]


def run_row(op: RowOp | ScaleByPosition | ScaleHeads | Softplus | Xielu, run: LayerRun) -> None:
    """Does the operation."""
    registers = run.registers
    match op:
        case Constant():
            registers[op.target] = registers[RESIDUAL].new_tensor(op.numbers).expand(len(registers[RESIDUAL]), -1)
        case Copy():
            _copy(op, registers, run.round)
        case Mix():
            _mix(op, registers)
        case Rescale():
            size = _mean_square(registers[op.like]).sqrt()
            own = _mean_square(registers[op.source]).clamp_min(op.least).sqrt()
            registers[op.target] = registers[op.source] * size / own
        case Sparsify():
            rows = registers[op.target]
            mean = rows.mean(-1, keepdim=True)
            registers[op.target] = torch.relu(rows - (mean + _mean_square(rows - mean).sqrt() * op.by))
        case Clip():
            registers[op.target] = registers[op.target].clamp(-op.limit, op.limit)
        case SoftCap():
            registers[op.target] = soft_capped(registers[op.target], op.cap)
        case _:
            _run_weighted(op, run)


def _run_weighted(op: RowOp | ScaleByPosition | ScaleHeads | Softplus | Xielu, run: LayerRun) -> None:
    """Those of positions, or of stored numbers."""
    registers = run.registers
    match op:
        case ScaleByPosition():
            registers[op.target] = registers[op.target] * _position_factors(op, run.positions_N)[:, None]
        case PositionEmbedding():
            registers[op.target] = run.weights[op.table, 0][run.positions_N + op.offset].float()
        case ScaleHeads():
            factors = _head_factors(run.positions_N, run.weights[op.scales, 0], run.weights[op.biases, 0])
            rows = heads(registers[op.target], factors.shape[1])
            registers[op.target] = (rows * factors[..., None]).flatten(-2)
        case AttendStreams():
            by = torch.stack([run.weights[weight, 0].flatten() for weight in op.weights]).prod(0)
            registers[op.target] = _attended_streams(op, registers[op.source], by)
        case Blend():
            kept, added = _blend_numbers(op, run.weights[op.gate, 0])
            source = registers[op.source] = registers[op.source] * added
            registers[op.target] = run.round(registers[op.target] * kept + source)
        case Softplus():
            rows = registers[op.source] + (0.0 if op.bias is None else run.weights[op.bias, 0])
            registers[op.target] = torch.nn.functional.softplus(rows)
        case Xielu():
            registers[op.target] = xielu(registers[op.target], *(run.weights[one, 0] for one in op.numbers))


def _position_factors(op: ScaleByPosition, positions_N: Tensor) -> Tensor:
    """What rows at these positions are multiplied by [N]."""
    positions = (positions_N + op.offset).cpu()  # some devices have no double
    lengths = positions.double() / op.length
    if op.growth == "power":
        factors = (1.0 + lengths) ** op.beta
    else:
        grown = lengths.clamp_min(1.0) if op.growth == "lengths" else 1.0 + (positions // op.length).double()
        factors = 1.0 + op.beta * torch.log(grown)
    return factors.float().to(positions_N.device)


def _head_factors(positions_N: Tensor, scales_H: Tensor, biases_H: Tensor) -> Tensor:
    """What heads of rows at these positions are multiplied by [N, H]."""
    logs, scales, biases = torch.log1p(positions_N.cpu().double()), scales_H.cpu().double(), biases_H.cpu().double()
    return (logs[:, None] * scales + biases).float().to(positions_N.device)


def _attended_streams(op: AttendStreams, rows: Tensor, by: Tensor) -> Tensor:
    """The sum of streams of `rows` [T, all columns], each scored by its norm times `by` [width]; [T, width]."""
    streams = heads(rows[:, : op.streams * len(by)], op.streams)
    scores = (streams @ by) / (_mean_square(streams).squeeze(-1) + op.eps).sqrt()
    return (streams * scores.softmax(-1)[..., None]).sum(1)


def _blend_numbers(op: Blend, gate: Tensor) -> tuple[Tensor, Tensor]:
    """What keeps of the target, and what is added of the source, column by column."""
    w = gate / op.temperature
    added = torch.sigmoid(w)
    return (torch.sigmoid(-w) * (1.0 + added)).clamp_min(op.least).sqrt(), added


def _mean_square(rows: Tensor) -> Tensor:
    return rows.square().mean(-1, keepdim=True)


def _copy(op: Copy, registers: Registers, rounded: Callable[[Tensor], Tensor]) -> None:
    columns = registers[op.source][:, op.start : op.start + op.count]
    if op.at is None:
        registers[op.target] = columns
        return
    whole = columns.new_zeros(len(columns), op.width) if op.width else registers[op.target].clone()
    whole[:, op.at : op.at + op.count] = rounded(columns) if op.target == RESIDUAL else columns
    registers[op.target] = whole


def _mix(op: Mix, registers: Registers) -> None:
    whole, end = registers[op.target].clone(), op.at + op.targets * op.width
    source = heads(registers[op.source][:, op.start : op.start + op.sources * op.width], op.sources)
    target = heads(whole[:, op.at : end], op.targets)
    if op.by is None:
        numbers = source.new_ones(len(source), op.targets, op.sources)
    else:
        numbers = heads(registers[op.by] + op.offset, op.targets)
    whole[:, op.at : end] = (target + torch.einsum("nba,naw->nbw", numbers, source)).flatten(1)
    registers[op.target] = whole
