"""Spans and ends of a model on a GPU: what a node runs with `--device cuda[:N]`, in the class of the native engine."""

from collections.abc import Sequence
from functools import partial
from typing import Final

import numpy as np
from numpy.typing import NDArray

from manyhands.core import Precision, Span
from manyhands.engine import golden
from manyhands.engine.compile import Compiled, compile_layers
from manyhands.engine.cpu import CpuEnds
from manyhands.engine.cuda.device import CudaDevice
from manyhands.engine.cuda.plan import CudaLayers, CudaPlan, Positions
from manyhands.engine.library import BLOCK, Array, Team
from manyhands.engine.packing import PLAIN, Packer
from manyhands.engine.parts import PlansOfParts
from manyhands.engine.span import Piece
from manyhands.engine.weights import Read
from manyhands.errors import CutError, ModelError
from manyhands.program.ops import Program

FIRST_BLOCKS: Final = 4  # of a cache that begins without memory: 256 positions


class CudaCache:
    """What a session keeps of a plan's layers, on the device: blocks of 64 positions, all layers of a block together.

    It has memory for FIRST_BLOCKS at first, or for `capacity` if that is less; it grows by half, at least to what is asked for
    and at most to `capacity` (0: as asked). While it grows it is there twice. To roll back is to step from an earlier position.
    """

    def __init__(self, device: CudaDevice, plan: CudaPlan, capacity: int = 0) -> None:
        self.plan = plan
        self.length = 0
        self._device, self._most = device, -(-capacity // BLOCK)
        self.blocks = min(self._most, FIRST_BLOCKS)
        self._memory = device.allocate(self.blocks * plan.block_bytes)

    @property
    def positions(self) -> int:
        """For which there is memory."""
        return self.blocks * BLOCK

    @property
    def num_bytes(self) -> int:
        return self._memory.num_bytes

    @property
    def address(self) -> int:
        return self._memory.address

    def reserve(self, positions: int) -> None:
        """Memory for the first `positions` positions; what was cached stays. Raises ModelError where there is none."""
        needed = -(-positions // BLOCK)
        if needed <= self.blocks:
            return
        wanted = max(FIRST_BLOCKS, self.blocks * 3 // 2)
        blocks = max(needed, min(wanted, self._most) if self._most else wanted)
        grown = self._device.allocate(blocks * self.plan.block_bytes)
        if self.blocks:
            self._device.copy(grown.address, self.address, self.num_bytes)
        self._memory, self.blocks = grown, blocks

    def fork(self, positions: int, capacity: int) -> "CudaCache":
        """A cache with a copy of the first `positions` positions of this one. Raises ModelError where there is no room."""
        fork = CudaCache(self._device, self.plan, capacity)
        fork.reserve(positions)
        if positions:
            self._device.copy(fork.address, self.address, -(-positions // BLOCK) * self.plan.block_bytes)
        fork.length = positions
        return fork


class CudaSpan:
    """Layers [span.start, span.end) of a program on a device: a SpanRunner. `threads` of a step is not used.

    Raises CutError for layers that the program does not have; ModelError where a weight is missing or has another shape, for
    operations and weights that the kernels lack, and where the device has no room.
    """

    shares_blocks = False

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
    def cache_room(self) -> int | None:
        return self._device.free_bytes() // 2  # a cache that grows is there twice

    def new_cache(self, capacity: int = 0, span: Span | None = None) -> CudaCache:
        """An empty cache for one session on `span`, within this one's (default: all)."""
        return CudaCache(self._device, self._parts[span or self.span], capacity)

    def fork(self, source: CudaCache, positions: int, capacity: int) -> CudaCache:
        return source.fork(positions, capacity)

    def step(self, rows: bytes | Array, pieces: Sequence[Piece], threads: int) -> NDArray[np.uint8]:
        """Row bytes of all pieces -> row bytes [rows, bytes of a row]. Raises ContextOverflow, ModelError."""
        plan: CudaPlan = pieces[0].cache.plan
        if any(piece.cache.plan is not plan for piece in pieces):
            raise ModelError("pieces of one step are on different layers")
        plan.check_positions(max(piece.start + piece.count for piece in pieces))
        for piece in pieces:
            piece.cache.reserve(piece.start + piece.count)
        given = [Positions(piece.cache.address, piece.start, piece.count) for piece in pieces]
        out = plan.run(given, rows, sum(piece.count for piece in pieces))
        for piece in pieces:
            piece.cache.length = piece.start + piece.count
        return out

    def is_ready(self, num_rows: int, end: int) -> bool:
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
