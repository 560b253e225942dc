"""The hidden states of one device step on one span: put in segment by segment, computed together, taken out as payloads."""

import torch
from torch import Tensor

from manyhands.core import Span
from manyhands.errors import ProtocolError
from manyhands.model.cache import StepPlan
from manyhands.model.shard import Shard
from manyhands.model.stack import FewRows
from manyhands.wire.message import Payload
from manyhands.wire.tensor import decode_tensor, encode_tensor
from manyhands.worker.bounds import RowBounds, check, norms


class TensorRows:
    """Any rows, on any span."""

    def __init__(self, shard: Shard, span: Span) -> None:
        self._shard, self._span = shard, span
        self._given: list[Tensor] = []
        self._out_ND: Tensor | None = None

    def put(self, payload: Payload, count: int, bounds: RowBounds | None, name: str) -> None:
        """Add `count` rows that came as `payload` and pass `bounds`. Adds nothing if it raises ProtocolError or Corruption."""
        hidden_TD = decode_tensor(payload, count)
        if (hidden_TD.shape[1], hidden_TD.dtype) != (self._shard.hidden_size, self._shard.dtype):
            raise ProtocolError(f"rows of {payload.width} in {payload.dtype} are not this span's")
        judge = norms if bounds is None else bounds.admit
        judge(hidden_TD, name)
        self.add(hidden_TD)

    def add(self, hidden_TD: Tensor) -> None:
        self._given.append(hidden_TD)

    def run(self, plan: StepPlan) -> None:
        given_ND = self._given[0] if len(self._given) == 1 else torch.cat(self._given)
        self._out_ND = self._shard.forward(given_ND, plan, self._span)

    def tensor(self, row: int, count: int) -> Tensor:
        """Rows [row, row + count) of what came out."""
        assert self._out_ND is not None, "rows are taken out after run"
        return self._out_ND if count == len(self._out_ND) else self._out_ND[row : row + count]

    def take(self, row: int, count: int) -> Payload:
        return encode_tensor(self.tensor(row, count))


class ByteRows:
    """Few rows of bf16 on a span that takes them as bytes: what TensorRows does, with the same bits."""

    def __init__(self, shard: Shard, span: Span, few: FewRows) -> None:
        self._shard, self._span, self._few, self._num_rows = shard, span, few, 0

    def put(self, payload: Payload, count: int, bounds: RowBounds | None, name: str) -> None:
        num_bytes, row_bytes = len(payload.data), self._few.row_bytes
        if (payload.dtype, 2 * payload.width, num_bytes) != ("bf16", row_bytes, count * row_bytes):
            raise ProtocolError(f"{num_bytes} bytes of {payload.dtype} are not {count} rows of this span")
        least, most = self._few.put(self._num_rows, payload.data)
        if bounds is None:
            check(most, name)
        else:
            bounds.admit_norms(least, most, count, name)
        self._num_rows += count

    def run(self, plan: StepPlan) -> None:
        self._shard.forward_few(plan, self._span)

    def take(self, row: int, count: int) -> Payload:
        return Payload("bf16", self._few.row_bytes // 2, self._few.take(row, count))
