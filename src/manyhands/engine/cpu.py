"""The native engine: spans and ends of a Program on this machine's CPU, with the bits that every other CPU has.

Rows are bytes in the storage dtype (bf16 or fp32): what comes over the wire goes in, what comes out goes over the wire.
"""

from collections.abc import Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from manyhands.core import SMALL_WEIGHTS, Precision, Span, weight_precision
from manyhands.engine import golden, library
from manyhands.engine.cache import SessionCache
from manyhands.engine.compile import ROW_TYPES, compile_head, compile_layers
from manyhands.engine.compiled import Compiled
from manyhands.engine.file_table import FileTable
from manyhands.engine.layout import Segment
from manyhands.engine.library import BLOCK, Array, Plan, Team
from manyhands.engine.memory import Memory
from manyhands.engine.packing import PLAIN, Packer
from manyhands.engine.parts import PlansOfParts
from manyhands.engine.span import Piece
from manyhands.engine.states import session_bytes
from manyhands.engine.weights import Read, Stored, as_bf16, ends_precision, find, held, matrix, take
from manyhands.errors import CutError, ModelError
from manyhands.program.ops import Embed, Program, Weight

__all__ = ["CpuEnds", "CpuSpan", "Piece"]

KEPT_ROOMS = 3  # plans of a span that keep their memory for rows: those that ran last
KEPT_PARTS = 4  # plans of parts that no session is on: one takes 0.2 ms a layer to make and 5 KB a layer


class CpuSpan:
    """Layers [span.start, span.end) of a program: a SpanRunner. The team may be shared by spans that take turns.

    Raises CutError for layers that the program does not have; ModelError where a weight is missing or has another shape, and
    for operations that the engine lacks.
    """

    shares_blocks = True

    def __init__(
        self,
        program: Program,
        span: Span,
        read: Read,
        precision: Precision,
        team: Team,
        back_end: str | None = None,
        packer: Packer = PLAIN,
    ) -> None:
        self.num_layers = len(program.layers)
        if span.end > self.num_layers:
            raise CutError(f"layers {span} are out of range: the model has layers 0-{self.num_layers - 1}")
        self.span, self.back_end = span, back_end or golden.choose(precision)
        self.hidden_size, self.vocab_size = program.hidden, program.vocab
        self._team = team
        layers = program.layers[span.start : span.end]
        self._layers = compile_layers(program, layers, read, precision, self.back_end, packer)
        self._plan = self._layers.plan(self.back_end)
        self._ran: list[Plan] = []  # those that have memory for rows, the last that ran first
        self._parts = PlansOfParts(span, self._plan, partial(self._layers.plan, self.back_end), KEPT_PARTS)

    @property
    def block_bytes(self) -> int:
        """Bytes of cache that 64 positions of a session take."""
        return self._plan.block_bytes

    @property
    def bytes_per_token(self) -> int:
        return -(-self.block_bytes // BLOCK)

    @property
    def cache_room(self) -> int | None:
        return None

    @property
    def session_bytes(self) -> int:
        return session_bytes(self._plan.state_bytes, self._plan.now_bytes)

    def new_cache(self, capacity: int = 0, span: Span | None = None, mark: int = 0) -> SessionCache:
        """An empty cache for one session on `span`, within this one's (default: all); it grows beyond `capacity`."""
        return SessionCache(self._parts[span or self.span], capacity, mark)

    def fork(self, source: SessionCache, positions: int, capacity: int, mark: int = 0) -> SessionCache:
        return source.fork(positions, capacity, mark)

    def step(self, rows: bytes | Array, pieces: Sequence[Piece], threads: int) -> NDArray[np.uint8]:
        """Row bytes of all pieces -> row bytes [rows, bytes of a row]. Raises ContextOverflow, ModelError, StateGone."""
        segments, row, plan = [], 0, pieces[0].cache.plan
        for piece in pieces:
            if piece.cache.plan is not plan:
                raise ModelError("pieces of one step are on different layers")
            segments.append(piece.cache.segment(piece.start, row, piece.count))
            row += piece.count
        if not self._ran or self._ran[0] is not plan:
            self._runs(plan)
        out: NDArray[np.uint8] = plan.run(self._team, threads, segments, rows, row)
        for piece in pieces:
            piece.cache.done(piece.start + piece.count)
        return out

    def _runs(self, plan: Plan) -> None:
        """Release the memory of all plans but the last KEPT_ROOMS that ran: peers choose the parts, and each has a plan."""
        ran = [plan, *(each for each in self._ran if each is not plan)]
        for other in ran[KEPT_ROOMS:]:
            other.release()
        self._ran = ran[:KEPT_ROOMS]

    def is_ready(self, num_rows: int) -> bool:
        return True


class CpuEnds:
    """Embedding and head of a program, or one of them: an EndsRunner. A tied head is held once."""

    def __init__(
        self,
        program: Program,
        read: Read,
        precision: Precision,
        team: Team,
        back_end: str | None = None,
        *,
        embed: bool = True,
        head: bool = True,
        packer: Packer = PLAIN,
    ) -> None:
        self.back_end = self._native = back_end or golden.choose(precision)
        self.hidden_size, self.vocab_size, self.holds_numbers = program.hidden, program.vocab, program.holds_numbers
        precision = weight_precision(precision)
        self._team, self._row_type = team, ROW_TYPES[precision]
        self._embed, first, kept = program.embed, program.embed.weight, ends_precision(precision)
        tied = embed and head and first == program.head.product.parts[0].weight
        self._table = self._packed_table(first, read, kept, tied, packer) if embed else None
        beside = program.embed.beside if embed else None
        self._beside = None if beside is None else (FileTable(beside.weight, read, kept, self._native), beside)
        table = self._table if tied else None
        self._head: Plan | None = None
        if head:
            self._take_head(compile_head(program, read, precision, self._native, table, packer))

    def _scale_of(self, embed: Embed) -> float:
        scale = np.array([embed.scale], np.float32)
        if embed.round_scale and self._row_type == "bf16":
            scale = (as_bf16(scale).astype(np.uint32) << 16).view(np.float32)
        return float(scale[0])

    def _take_head(self, compiled: Compiled) -> None:
        self._head = compiled.plan(self._native)

    def _packed_table(self, weight: Weight, read: Read, kept: Precision, tied: bool, packer: Packer) -> Stored:
        """The embedding: as the head that it also is, or as small weights, packed; else row by row."""
        if not (tied or kept in SMALL_WEIGHTS):
            return held(take(weight, read), kept)
        memory = Memory()
        packer.begin(f"table {weight!r}")
        return packer.take(lambda: matrix(find(weight, read), kept, memory, self._native), memory)

    def embed(self, ids: Sequence[int]) -> NDArray[np.uint8]:
        """Row bytes [T, bytes of a row] of token ids. Raises ModelError for an id that the model does not have."""
        assert self._table is not None, "these ends have no embedding"
        first = self._looked_up(self._table, self._embed, ids, self._embed.weight.outputs)
        parts = [*[first] * self._embed.streams, *([self._digits(ids)] if self._embed.has_ids else [])]
        rows = first if len(parts) == 1 else np.concatenate(parts, 1)
        item = 2 if self._row_type == "bf16" else 4
        if rows.shape[1] == self.hidden_size * item:
            return rows
        whole = np.zeros((len(ids), self.hidden_size * item), np.uint8)
        whole[:, : rows.shape[1]] = rows
        if self._beside is None:
            return whole
        at, (table, embed) = self._embed.column * item, self._beside
        found = self._looked_up(table.rows(ids), embed, range(len(ids)), len(ids))
        whole[:, at : at + found.shape[1]] = found
        return whole

    def _looked_up(self, table: Stored, embed: Embed, ids: Sequence[int], num_rows: int) -> NDArray[np.uint8]:
        """Rows of a table that has `num_rows`."""
        shape = num_rows, embed.weight.inputs
        return library.embed(self._native, table.array, table.type, shape, ids, self._scale_of(embed), self._row_type)

    def _digits(self, ids: Sequence[int]) -> NDArray[np.uint8]:
        """The columns that hold the ids (ops.Embed)."""
        digits = (np.array(ids, np.int64)[:, None] >> np.array([0, 8, 16, 24]) & 255).astype(np.float32) / np.float32(
            256
        )
        return (as_bf16(digits) if self._row_type == "bf16" else digits).view(np.uint8)

    def logits(self, rows: bytes | Array, count: int, threads: int) -> NDArray[np.float32]:
        """Logits [count, vocab] in fp32 of rows that left the last layer."""
        assert self._head is not None, "these ends have no head"
        segments = [Segment(None, 0, 0, 0, count)]
        return self._head.run(self._team, threads, segments, rows, count).view(np.float32)
