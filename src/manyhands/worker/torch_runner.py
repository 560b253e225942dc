"""Spans and ends computed by `model/` (model/shard.py, model/ends.py), behind the interface of engine/span.py.

On CPUs with AMX tiles, in bf16 and fp32, until the native engine has been measured there. Imported by choice.py alone.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from manyhands.checkpoint.manifest import Manifest
from manyhands.core import Precision, Span
from manyhands.engine.span import Piece, Rows
from manyhands.model import threads
from manyhands.model.cache import ShardCache, ShardSegment, StepPlan
from manyhands.model.ends import Ends
from manyhands.model.load import context_length, read_config
from manyhands.model.prove import proven_class
from manyhands.model.shard import Shard
from manyhands.model.stack import FEW_ROWS
from manyhands.worker.runner import Facts
from manyhands.worker.thread import Scope, current_scope

BACK_END: Final = "torch"


def describe(folder: Path, precision: Precision, home: Path) -> Facts:
    """As runner.describe."""
    config = read_config(folder)
    return Facts(
        int(config.num_hidden_layers),
        int(config.hidden_size),
        int(config.vocab_size),
        context_length(config),
        proven_class(precision, home),
        BACK_END,
    )


def _inference(num_threads: int | None) -> AbstractContextManager[object]:
    """Inference mode with so many compute threads (None: as many as there are).

    A thread that computes for good enters it once: to enter at every step costs a hop 20 us.
    """
    scope = current_scope()
    if scope is None:
        stack = ExitStack()
        stack.enter_context(threads.given(num_threads or threads.available()))
        stack.enter_context(torch.inference_mode())
        return stack
    if not scope.is_entered:
        _enter(scope)
    if num_threads is not None and num_threads != threads.available():
        threads.give(num_threads)
    return nullcontext()


def _enter(scope: Scope) -> None:
    scope.stack.enter_context(threads.given(scope.num_threads))
    scope.stack.enter_context(torch.inference_mode())
    scope.is_entered = True


class ShardSpan:
    """A SpanRunner over a Shard."""

    back_end = BACK_END

    def __init__(self, folder: Path, span: Span, precision: Precision, manifest: Manifest | None) -> None:
        with _inference(None):
            self.shard = Shard(folder, span, precision, manifest=manifest)
        config = self.shard.config
        self.num_layers, self.hidden_size = int(config.num_hidden_layers), self.shard.hidden_size
        self.vocab_size = int(config.vocab_size)
        self._row_bytes = self.hidden_size * self.shard.dtype.itemsize

    @property
    def bytes_per_token(self) -> int:
        return self.shard.bytes_per_token()

    @property
    def cache_room(self) -> int | None:
        return None

    def new_cache(self, capacity: int, span: Span | None = None) -> ShardCache:
        return self.shard.new_cache(capacity, span)

    def copy(self, source: ShardCache, target: ShardCache, start: int, end: int) -> None:
        with _inference(None):
            for held, copied in ((source.keys, target.keys), (source.values, target.values)):
                for layer, rows in held.items():
                    copied[layer][:, :, start:end] = rows[:, :, start:end]
        target.length = end

    def step(self, rows: bytes, pieces: Sequence[Piece], threads: int) -> Rows:
        segments, row = [], 0
        for piece in pieces:
            segments.append(ShardSegment(piece.cache, piece.start, row, piece.count))
            row += piece.count
        plan, span = StepPlan(segments), pieces[0].cache.span
        with _inference(threads):
            few = self.shard.few(span) if row <= FEW_ROWS else None
            if few is not None:
                few.put(0, rows)
                self.shard.forward_few(plan, span)
                return np.frombuffer(few.take(0, row), np.uint8).reshape(row, self._row_bytes)
            given_ND = torch.frombuffer(bytearray(rows), dtype=self.shard.dtype).view(row, self.hidden_size)
            return _bytes(self.shard.forward(given_ND, plan, span))

    def is_ready(self, num_rows: int, end: int) -> bool:
        return self.shard.is_ready(end)


class ShardEnds:
    """An EndsRunner over Ends."""

    back_end = BACK_END

    def __init__(
        self, folder: Path, precision: Precision, manifest: Manifest | None, *, embed: bool, head: bool
    ) -> None:
        with _inference(None):
            self.ends = Ends(folder, precision, embed=embed, head=head, manifest=manifest)
        self.hidden_size, self.vocab_size = int(self.ends.config.hidden_size), self.ends.vocab_size

    def embed(self, ids: Sequence[int]) -> Rows:
        with _inference(None):
            return _bytes(self.ends.embed(torch.tensor(ids)))

    def logits(self, rows: bytes | Rows, count: int, threads: int) -> NDArray[np.float32]:
        with _inference(threads):
            hidden_TD = torch.frombuffer(bytearray(rows), dtype=self.ends.dtype).view(count, self.hidden_size)
            found: NDArray[np.float32] = self.ends.logits(hidden_TD).float().numpy()
            return found


def _bytes(tensor_TD: Tensor) -> Rows:
    found: Rows = tensor_TD.contiguous().view(torch.uint8).numpy()
    return found
