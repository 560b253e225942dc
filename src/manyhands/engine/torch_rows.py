"""Operations of row_ops.py on rows of torch."""

from collections.abc import Callable

import torch
from torch import Tensor

from manyhands.engine.torch_functions import heads, soft_capped
from manyhands.program.ops import (
    RESIDUAL,
    AttendStreams,
    Blend,
    Constant,
    Copy,
    Mix,
    Rescale,
    RowOp,
    ScaleByPosition,
    SoftCap,
    Sparsify,
)

Registers = dict[str, Tensor]


def position_factors(op: ScaleByPosition, positions_N: Tensor) -> Tensor:
    """What rows at these positions are multiplied by [N]."""
    positions = (positions_N + op.offset).cpu()  # some devices have no double
    lengths = positions.double() / op.length
    if op.growth == "power":
        factors = (1.0 + lengths) ** op.beta
    else:
        grown = lengths.clamp_min(1.0) if op.growth == "lengths" else 1.0 + (positions // op.length).double()
        factors = 1.0 + op.beta * torch.log(grown)
    return factors.float().to(positions_N.device)


def head_factors(positions_N: Tensor, scales_H: Tensor, biases_H: Tensor) -> Tensor:
    """What heads of rows at these positions are multiplied by [N, H]."""
    logs, scales, biases = torch.log1p(positions_N.cpu().double()), scales_H.cpu().double(), biases_H.cpu().double()
    return (logs[:, None] * scales + biases).float().to(positions_N.device)


def run_row(op: RowOp, registers: Registers, rounded: Callable[[Tensor], Tensor]) -> None:
    """Does the operation."""
    match op:
        case Constant():
            registers[op.target] = registers[RESIDUAL].new_tensor(op.numbers).expand(len(registers[RESIDUAL]), -1)
        case Copy():
            _copy(op, registers, rounded)
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
        case SoftCap():
            registers[op.target] = soft_capped(registers[op.target], op.cap)


def attended_streams(op: AttendStreams, rows: Tensor, by: Tensor) -> Tensor:
    """The sum of streams of `rows` [T, all columns], each scored by its norm times `by` [width]; [T, width]."""
    streams = heads(rows[:, : op.streams * len(by)], op.streams)
    scores = (streams @ by) / (_mean_square(streams).squeeze(-1) + op.eps).sqrt()
    return (streams * scores.softmax(-1)[..., None]).sum(1)


def blend_numbers(op: Blend, gate: Tensor) -> tuple[Tensor, Tensor]:
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
