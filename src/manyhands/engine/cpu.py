"""The native engine: spans and ends of a Program on this machine's CPU, with the bits that every other CPU has.

Rows are bytes in the storage dtype (bf16 or fp32): what comes over the wire goes in, what comes out goes over the wire.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from manyhands.core import Precision, Span
from manyhands.engine import golden, library
from manyhands.engine.cache import SessionCache
from manyhands.engine.compile import ROW_TYPES, head_plan, span_plan
from manyhands.engine.library import Array, Team
from manyhands.engine.memory import Memory
from manyhands.engine.weights import Read, as_bf16, find, held, matrix, take
from manyhands.program.ops import Program


@dataclass(frozen=True, slots=True)
class Piece:
    """`count` rows of a step: positions [start, start + count) of one session. A step's pieces lie one after another.

    A start before what was cached rolls back: later positions are written again before they are read.
    """

    cache: SessionCache
    start: int
    count: int


class CpuSpan:
    """Layers [span.start, span.end) of a program. One step at a time; the team may be shared by spans that take turns.

    Raises ModelError where a weight is missing or has another shape, and for operations that the engine lacks.
    """

    def __init__(
        self, program: Program, span: Span, read: Read, precision: Precision, team: Team, back_end: str | None = None
    ) -> None:
        self.back_end = back_end or golden.choose()
        self._team = team
        layers = program.layers[span.start : span.end]
        self._plan = span_plan(program, layers, read, precision, self.back_end)

    @property
    def block_bytes(self) -> int:
        """Bytes of cache that 64 positions of a session take."""
        return self._plan.block_bytes

    def new_cache(self) -> SessionCache:
        """An empty cache for one session; it grows with the positions stepped."""
        return SessionCache(self._plan)

    def step(self, rows: bytes | Array, pieces: Sequence[Piece], threads: int) -> NDArray[np.uint8]:
        """Row bytes of all pieces -> row bytes [rows, bytes of a row]. Raises ContextOverflow, ModelError."""
        segments, row = [], 0
        for piece in pieces:
            segments.append(piece.cache.segment(piece.start, row, piece.count))
            row += piece.count
        return self._plan.run(self._team, threads, segments, rows, row)


class CpuEnds:
    """Embedding and head of a program; a tied head is held once. One call at a time."""

    def __init__(
        self, program: Program, read: Read, precision: Precision, team: Team, back_end: str | None = None
    ) -> None:
        self.back_end = back_end or golden.choose()
        self._team, self._row_type = team, ROW_TYPES[precision]
        weight, tied = program.embed.weight, program.embed.weight == program.head.product.parts[0].weight
        self._shape = weight.shape[0], weight.shape[1]
        self._table = matrix(find(weight, read), precision, Memory()) if tied else held(take(weight, read), precision)
        scale = np.array([program.embed.scale], np.float32)
        if program.embed.round_scale and precision == "bf16":
            scale = (as_bf16(scale).astype(np.uint32) << 16).view(np.float32)
        self._scale = float(scale[0])
        self._head = head_plan(program, read, precision, self.back_end, self._table if tied else None)

    def embed(self, ids: Sequence[int]) -> NDArray[np.uint8]:
        """Row bytes [T, bytes of a row] of token ids. Raises ModelError for an id that the model does not have."""
        table = self._table
        return library.embed(self.back_end, table.array, table.type, self._shape, ids, self._scale, self._row_type)

    def logits(self, rows: bytes | Array, count: int, threads: int) -> NDArray[np.float32]:
        """Logits [count, vocab] in fp32 of rows that left the last layer."""
        segments = [library.Segment(None, 0, 0, 0, 0, count)]
        return self._head.run(self._team, threads, segments, rows, count).view(np.float32)
