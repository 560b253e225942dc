"""Operations of layers on a GPU: what compile.py made, with its weights on the device, as kernels over registers there."""

from collections.abc import Callable, Iterator, Sequence
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from manyhands.engine import library
from manyhands.engine.compiled import Compiled, Emitted, Registers
from manyhands.engine.cuda.device import CudaDevice, CudaMemory
from manyhands.engine.cuda.launch import THREADS, Launch, args
from manyhands.engine.cuda.operations import FAST, Tiles, check, launches, most_rows
from manyhands.engine.cuda.room import Held, Room
from manyhands.engine.layout import NUMBERS, STATE_BLOCK, TENSORS
from manyhands.engine.library import Array
from manyhands.engine.states import Begun
from manyhands.errors import ContextOverflow, ModelError

MOST_ROWS: Final = 512  # that go through the operations at once
ROOM_BYTES: Final = 1 << 27  # of registers, where they do not need more for LEAST_ROWS
LEAST_ROWS: Final = 16
# Columns of a Table: the fields of Row in common.cu, of 8 bytes each.
_BLOCKS, _POSITION, _LEFT, _BEFORE, _NOW, _KEPT, _ORIGIN, _BEHIND = range(8)
_FIELDS: Final = 8
ROW_BYTES: Final = 8 * _FIELDS
RECORDED: Final = 32  # numbers of rows whose steps are recorded


Shared = dict[int, tuple[Array, CudaMemory]]  # by the array's id, which stays its own as long as the array is here
Table = NDArray[np.int64]  # [rows, _FIELDS]


def hold(device: CudaDevice, ops: Sequence[Emitted], shared: Shared | None = None) -> list[Held]:
    """Operations with their tensors on the device. `shared`: angles' frequencies, which layers have in common, of operations
    before; those of these are added. Raises ModelError for what the kernels lack."""
    common = {} if shared is None else shared

    def upload(array: Array) -> CudaMemory:
        memory = device.allocate(array.nbytes)
        device.upload(memory, array)
        return memory

    def place(kind: int, array: Array) -> CudaMemory:
        if kind != library.ROTARY:
            return upload(array)
        if id(array) not in common:
            common[id(array)] = array, upload(array)
        return common[id(array)][1]

    found = []
    for kind, numbers, reals, tensors in ops:
        whole = (*numbers, *[0] * (NUMBERS - len(numbers)))
        check(kind, whole)
        there = [place(kind, array) if isinstance(array, np.ndarray) else None for array in tensors]
        found.append(Held(kind, whole, tuple(reals), (*there, *[None] * (TENSORS - len(there)))))
    return found


class Workspace:
    """Where steps of plans that take turns have their rows, on the device and on the way to it. It does not grow: a node has
    one for its layers, whatever parts of them sessions are on.

    row_bytes: of a row's registers; in_bytes, out_bytes: of a row that enters and leaves.
    """

    def __init__(self, device: CudaDevice, row_bytes: int, in_bytes: int, out_bytes: int) -> None:
        most = max(LEAST_ROWS, min(MOST_ROWS, ROOM_BYTES // row_bytes // LEAST_ROWS * LEAST_ROWS))
        self.most_rows, self.in_bytes, self.out_bytes = most, in_bytes, out_bytes
        self.registers = device.allocate(most * row_bytes)
        self.given = device.staging(most * (ROW_BYTES + in_bytes))
        self.found = device.staging(most * out_bytes)
        self.given_there = device.allocate(self.given.nbytes)
        self.found_there = device.allocate(self.found.nbytes)


class CudaLayers:
    """Layers, or a head, whose weights are on the device: those that it took, one after the other. Any stretch of them becomes
    a plan."""

    def __init__(self, device: CudaDevice) -> None:
        self._device = device
        self._ops: list[Held] = []
        self._shared: Shared = {}
        self._workspace: Workspace | None = None  # that of all layers does for any part

    def take(self, compiled: Compiled) -> None:
        """Copy the weights of these layers to the device. Raises ModelError for what the native engine would refuse too, and
        for what these kernels lack."""
        compiled.plan("scalar")  # checks every operation against its registers and tensors
        self._ops += hold(self._device, compiled.ops, self._shared)

    def plan(self, shape: Compiled, first: int = 0, end: int | None = None) -> "CudaPlan":
        """Layers [first, end) of these, counted from 0 (default: all). `shape`: of all that were taken, without weights."""
        some, places = shape.stretch(first, end)
        plan = CudaPlan(
            self._device, shape.registers, self._ops[some], places, shape.out, shape.out_type, self._workspace
        )
        self._workspace = self._workspace or plan.workspace
        return plan


class Positions(NamedTuple):
    """Rows of a step that are the positions from `start` on of one session. blocks: where the addresses of its blocks lie on
    the device; 0 for ends, which cache nothing. states: where its states lie, if it has some."""

    blocks: int
    start: int
    count: int  # type: ignore[assignment]  # hides tuple's own
    states: Begun | None = None


class CudaPlan:
    """Operations over registers on a device. One step at a time. Register 0 takes the rows, `out` gives them."""

    def __init__(
        self,
        device: CudaDevice,
        registers: Registers,
        ops: Sequence[Held],
        places: Sequence[int],
        out: int,
        out_type: str,
        workspace: Workspace | None = None,
        tiles: Tiles = FAST,
    ) -> None:
        """workspace: of other plans whose rows enter and leave alike; None: one of its own. Raises ModelError where no row
        fits it."""
        self._device, self._ops, self._positions, self._tiles = device, ops, registers.context, tiles
        self._widths, self._out = registers.widths, out
        self._types = library.TYPES[registers.row_type], library.TYPES[out_type]
        room = self._room = Room(registers.row_type == "bf16", registers.widths, places, ops)
        self.block_bytes, self.state_bytes, self.now_bytes = room.block_bytes, room.state_bytes, room.now_bytes
        each = [
            self._widths[number] * (2 if kind == library.TYPES["bf16"] else 4)
            for number, kind in zip((0, out), self._types, strict=True)
        ]
        work = self.workspace = workspace or Workspace(device, room.row_bytes, *each)
        self.most_rows = min(work.most_rows, work.registers.num_bytes // room.row_bytes, most_rows(ops))
        if not self.most_rows:
            raise ModelError(
                f"a row takes {room.row_bytes} bytes of the {work.registers.num_bytes} that all layers have"
            )
        room.lie(work.registers.address, self.most_rows)
        self._recorded: dict[int, Callable[[], None] | None] = {}

    def is_recorded(self, count: int) -> bool:
        """Whether steps of so many rows are ready to be asked for as one."""
        return self._recorded.get(count) is not None

    def check_positions(self, end: int) -> None:
        """Raises ContextOverflow where `end` is beyond the positions that the model has."""
        if end > self._positions:
            raise ContextOverflow(f"position {end - 1} is beyond the {self._positions} that the model was built for")

    def run(self, pieces: Sequence[Positions], rows: Array | bytes, count: int) -> NDArray[np.uint8]:
        """`count` rows -> `count` rows [count, bytes of a row]. Raises ContextOverflow, ModelError; then caches may hold some
        of the step's positions, which the next step writes again."""
        work = self.workspace
        given = np.frombuffer(rows, np.uint8) if isinstance(rows, bytes) else rows.reshape(-1).view(np.uint8)
        if given.nbytes != count * work.in_bytes or sum(piece.count for piece in pieces) != count:
            raise ModelError(f"{given.nbytes} bytes are not {count} rows of {work.in_bytes}")
        self.check_positions(max(piece.start + piece.count for piece in pieces))
        table, out = np.concatenate([_table(piece) for piece in pieces]), np.empty((count, work.out_bytes), np.uint8)
        for first in range(0, count, self.most_rows):
            some = min(count - first, self.most_rows)
            told, rows_at = _cut(table, first, some).view(np.uint8).reshape(-1), some * ROW_BYTES
            work.given[:rows_at] = told
            work.given[rows_at : rows_at + some * work.in_bytes] = given[
                first * work.in_bytes : (first + some) * work.in_bytes
            ]
            self._step(some)
            out[first : first + some] = work.found[: some * work.out_bytes].reshape(some, -1)
        return out

    def _step(self, count: int) -> None:
        """Recorded when it is asked for the second time: a long prompt's last chunk may be the only one of its size."""
        recorded = self._recorded.get(count)
        if recorded is None and count in self._recorded:
            recorded = self._recorded[count] = self._device.record(lambda: self._ask(count))
        if recorded is not None:
            recorded()
        else:
            self._ask(count)
            if len(self._recorded) < RECORDED:
                self._recorded[count] = None
        self._device.wait()

    def _ask(self, count: int) -> None:
        work = self.workspace
        self._device.send(work.given_there.address, work.given[: count * (ROW_BYTES + work.in_bytes)])
        self._device.launch(self._launches(count))
        self._device.fetch(work.found[: count * work.out_bytes], work.found_there.address)

    def _launches(self, count: int) -> Iterator[Launch]:
        work, width, out_width = self.workspace, self._widths[0], self._widths[self._out]
        table = work.given_there.address
        entering, leaving = table + count * ROW_BYTES, work.found_there.address
        first = args(out=self._room.register(0), tensors=(entering,), n=(width, self._types[0]))
        yield Launch("widen", (-(-width // THREADS), count, 1), first)
        yield from launches(self._room, self._ops, table, count, self._tiles)
        last = args(self._room.register(self._out), tensors=(leaving,), n=(out_width, self._types[1]))
        yield Launch("narrow", (-(-out_width // THREADS), count, 1), last)


def _table(piece: Positions) -> Table:
    """The rows of one session: [piece.count, _FIELDS]."""
    found, order = np.zeros((piece.count, _FIELDS), np.int64), np.arange(piece.count)
    found[:, _BLOCKS], found[:, _POSITION] = piece.blocks, order + piece.start
    found[:, _LEFT], found[:, _BEFORE] = order[::-1], order
    if (states := piece.states) is not None:
        found[:, _NOW], found[:, _KEPT] = states.now, states.table[found[:, _POSITION] // STATE_BLOCK]
        if states.origin >= 0:
            found[:, _ORIGIN] = states.table[states.origin // STATE_BLOCK]
            found[:, _BEHIND] = piece.start - states.origin
    return found


def _cut(table: Table, first: int, count: int) -> Table:
    """`count` rows of a table as a step of their own. A session that began in an earlier row goes on from the state behind its
    last position (_NOW), which the step before left there."""
    found, order = table[first : first + count], np.arange(count)
    if count < len(table):
        found[found[:, _BEFORE] > order, _ORIGIN : _BEHIND + 1] = 0
        found[:, _BEFORE] = np.minimum(found[:, _BEFORE], order)
        found[:, _LEFT] = np.minimum(found[:, _LEFT], order[::-1])
    return found
