"""Spans and ends of a model on a GPU: what a node runs with `--device cuda[:N]`, in the class of the native engine."""

from collections.abc import Sequence
from functools import partial
from typing import Final

import numpy as np
from numpy.typing import NDArray

from manyhands.core import Precision, Span
from manyhands.engine import golden
from manyhands.engine.cache import BlockCache
from manyhands.engine.compile import compile_layers
from manyhands.engine.compiled import Compiled
from manyhands.engine.cpu import CpuEnds
from manyhands.engine.cuda.device import CudaDevice, CudaMemory
from manyhands.engine.cuda.plan import CudaLayers, CudaPlan, Positions
from manyhands.engine.cuda.states import DeviceStates
from manyhands.engine.library import BLOCK, Array, Team
from manyhands.engine.packing import PLAIN, Packer
from manyhands.engine.parts import PlansOfParts
from manyhands.engine.span import Piece
from manyhands.engine.states import States, session_bytes
from manyhands.engine.weights import Read
from manyhands.errors import CutError, ModelError
from manyhands.program.ops import Program

# Of what is free on the GPU once layers are there, what sessions' caches may take. The rest is for ends and a drafter that are
# loaded later, for recorded steps, and for blocks that are not full: a lease of one position has a block.
CACHE_SHARE: Final = 0.75
_ADDRESS: Final = np.dtype(np.int64)


class CudaCache(BlockCache[CudaMemory]):
    """Blocks on the device, all layers of a block together, each an allocation of its own out of the device's pool.

    Where they lie is told by a table on the device, whose address and a position are a row of a step: so the step's data are
    of one size however long its sessions are, as recorded steps need it. The table is uploaded anew, which waits, when blocks
    came or were exchanged: once in 64 tokens of an answer, some microseconds. The addresses of states are in the rows
    themselves. `capacity` positions are expected (0: unknown); `mark`: see States.
    """

    def __init__(
        self,
        device: CudaDevice,
        plan: CudaPlan,
        capacity: int = 0,
        mark: int = 0,
        states: States[CudaMemory] | None = None,
    ) -> None:
        super().__init__(plan.block_bytes)
        self.plan = plan
        self._states = states or (States(plan, DeviceStates(device), mark) if plan.state_bytes else None)
        self._device, self._expected = device, -(-capacity // BLOCK)
        self._table: CudaMemory | None = None
        self._is_listed = False  # the table says where all blocks lie

    @property
    def num_bytes(self) -> int:
        return super().num_bytes + (0 if self._states is None else self._states.num_bytes)

    @property
    def address(self) -> int:
        """The address of the table of blocks, which `reserve` has made; 0 where no layer caches positions."""
        assert self._table is not None or not self._block_bytes, "a step's positions are reserved first"
        return 0 if self._table is None else self._table.address

    def reachable(self, position: int) -> int:
        return position if self._states is None else self._states.reachable(position)

    def begin(self, start: int, count: int) -> Positions:
        """`count` rows of a step as the positions from `start` on. Makes the blocks that they need.

        Raises StateGone where there is no going back to `start`, ModelError where there is no room for all.
        """
        if self._states is not None:
            self._states.check(start)
        self.reserve(start, start + count)
        states = None if self._states is None else self._states.begin(start, start + count)
        return Positions(self.address, start, count, states)

    def done(self, end: int) -> None:
        """A step has computed up to position `end`."""
        self.length = end
        if self._states is not None:
            self._states.done(end)

    def reserve(self, start: int, end: int) -> None:
        super().reserve(start, end)
        if not self._is_listed and self._block_bytes:
            table = np.array([block.address for block in self._blocks], _ADDRESS)
            if self._table is None or table.nbytes > self._table.num_bytes:
                room = max(len(table) * 3 // 2, self._expected)
                self._table = self._device.allocate(room * _ADDRESS.itemsize)
            self._device.upload(self._table, table)
            self._is_listed = True

    def _list(self, first: int) -> None:
        self._is_listed = False

    def _empty(self, capacity: int, positions: int, mark: int) -> "CudaCache":
        states = None if self._states is None else self._states.fork(positions, mark)
        return CudaCache(self._device, self.plan, capacity, mark, states)

    def _made(self) -> CudaMemory:
        return self._device.allocate(self._block_bytes) if self._block_bytes else _NOTHING

    def _copied(self, block: CudaMemory) -> CudaMemory:
        copy = self._made()
        if self._block_bytes:
            self._device.copy(copy.address, block.address, self._block_bytes)
        return copy


class _Nothing:
    """The block of a plan that caches no positions."""

    address = num_bytes = 0


_NOTHING: Final = _Nothing()


class CudaSpan:
    """Layers [span.start, span.end) of a program on a device: a SpanRunner. `threads` of a step is not used.

    Raises CutError for layers that the program does not have; ModelError where a weight is missing or has another shape, for
    operations and weights that the kernels lack, and where the device has no room.
    """

    shares_blocks = True

    def __init__(
        self, program: Program, span: Span, read: Read, precision: Precision, device: CudaDevice, packer: Packer = PLAIN
    ) -> None:
        self.num_layers = len(program.layers)
        if span.end > self.num_layers:
            raise CutError(f"layers {span} are out of range: the model has layers 0-{self.num_layers - 1}")
        self.span, self.back_end, self._device = span, device.name, device
        self.hidden_size, self.vocab_size = program.hidden, program.vocab
        layers, packs = program.layers[span.start : span.end], golden.choose(precision)
        held = CudaLayers(device)
        shape = compile_layers(program, layers, read, precision, packs, packer, held.take)
        self._plan = held.plan(shape)
        self._parts = PlansOfParts(span, self._plan, partial(held.plan, shape))

    @property
    def bytes_per_token(self) -> int:
        return -(-self._plan.block_bytes // BLOCK)

    @property
    def session_bytes(self) -> int:
        return session_bytes(self._plan.state_bytes, self._plan.now_bytes)

    @property
    def cache_room(self) -> int | None:
        return int(self._device.free_bytes() * CACHE_SHARE)

    def new_cache(self, capacity: int = 0, span: Span | None = None, mark: int = 0) -> CudaCache:
        """An empty cache for one session on `span`, within this one's (default: all)."""
        return CudaCache(self._device, self._parts[span or self.span], capacity, mark)

    def fork(self, source: CudaCache, positions: int, capacity: int, mark: int = 0) -> CudaCache:
        return source.fork(positions, capacity, mark)

    def step(self, rows: bytes | Array, pieces: Sequence[Piece], threads: int) -> NDArray[np.uint8]:
        """Row bytes of all pieces -> row bytes [rows, bytes of a row]. Raises ContextOverflow, ModelError, StateGone."""
        plan: CudaPlan = pieces[0].cache.plan
        if any(piece.cache.plan is not plan for piece in pieces):
            raise ModelError("pieces of one step are on different layers")
        if len({id(piece.cache) for piece in pieces}) < len(pieces):
            raise ModelError("two pieces of one session are in one step: ask for one after the other")
        plan.check_positions(max(piece.start + piece.count for piece in pieces))
        given = [piece.cache.begin(piece.start, piece.count) for piece in pieces]
        out = plan.run(given, rows, sum(piece.count for piece in pieces))
        for piece in pieces:
            piece.cache.done(piece.start + piece.count)
        return out

    def is_ready(self, num_rows: int) -> bool:
        return self._plan.is_recorded(num_rows)


class CudaEnds(CpuEnds):
    """Embedding and head of a program, or one of them: an EndsRunner whose head is on the device. The embedding's table stays
    in the host's memory: a row of it is read for each token."""

    def __init__(
        self,
        program: Program,
        read: Read,
        precision: Precision,
        team: Team,
        device: CudaDevice,
        *,
        embed: bool = True,
        head: bool = True,
        packer: Packer = PLAIN,
    ) -> None:
        self._device = device
        self._on_device: CudaPlan | None = None
        super().__init__(program, read, precision, team, embed=embed, head=head, packer=packer)
        self.back_end = device.name

    def _take_head(self, compiled: Compiled) -> None:
        held = CudaLayers(self._device)
        held.take(compiled)
        self._on_device = held.plan(compiled)

    def logits(self, rows: bytes | Array, count: int, threads: int) -> NDArray[np.float32]:
        """Logits [count, vocab] in fp32 of rows that left the last layer."""
        assert self._on_device is not None, "these ends have no head"
        return self._on_device.run([Positions(0, 0, count)], rows, count).view(np.float32)
