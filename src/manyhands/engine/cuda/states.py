"""Operations whose sessions keep a state, on a GPU: which kernels compute them (states.cu), and the memory of the states."""

from collections.abc import Iterator, Sequence
from typing import Final

from manyhands.engine import library
from manyhands.engine.cuda.device import CudaDevice, CudaMemory
from manyhands.engine.cuda.launch import Launch, LaunchPart, args, over_columns
from manyhands.engine.cuda.room import Held, Kept, Room
from manyhands.engine.states import DELTA_BY_CHANNEL, DELTA_SCAN, TILE
from manyhands.errors import ModelError

MOST_KEYS: Final = 256  # numbers of a key of linear attention (delta_256 in states.cu)
DELTA_THREADS: Final = 128
SESSIONS: Final = 64  # of a step that are computed at once; of more, some are computed after others


class DeviceStates:
    """StateMemory of a device."""

    def __init__(self, device: CudaDevice) -> None:
        self._device = device

    def made(self, num_bytes: int) -> CudaMemory:
        return self._device.allocate(num_bytes)

    def copy(self, target: CudaMemory, source: CudaMemory) -> None:
        self._device.copy(target.address, source.address, source.num_bytes)

    def address(self, block: CudaMemory) -> int:
        return block.address


def check(kind: int, numbers: Sequence[int]) -> None:
    """Raises ModelError for an operation that the kernels do not compute."""
    if kind == library.DELTA and numbers[10] == DELTA_SCAN:
        raise ModelError("a GPU does not compute selective scans")
    if kind == library.DELTA and numbers[8] > MOST_KEYS:
        raise ModelError(f"linear attention with keys of {numbers[8]} numbers: a GPU takes {MOST_KEYS} at most")


def convolve(room: Room, op: Held, kept: Kept, table: int, rows: int) -> Launch:
    """The launch of a convolution over `rows` rows. table: the device address of the step's array of Row (common.cu)."""
    source, target, taps, activation = op.numbers[:4]
    width = room.widths[source]
    given = args(
        room.register(source),
        out=room.register(target),
        tensors=(op.address(0), op.address(1)),
        n=(width, taps, activation, int(room.rounds), *kept),
        rows=table,
    )
    return over_columns("convolve", width, rows, given)


def decay(room: Room, op: Held, rows: int) -> Iterator[Launch]:
    """The launch of a decay, or of softplus alone, over `rows` rows."""
    source, target, form = op.numbers[:3]
    vectors, width = (op.address(0), op.address(1)), room.widths[source]
    bound = op.reals[:1] if form == 2 else ()
    given = args(room.register(source), out=room.register(target), tensors=vectors, n=(width,), reals=bound)
    yield over_columns("channel_decay" if form else "decay", width, rows, given)


def attend(room: Room, op: Held, kept: Kept, table: int, rows: int, narrow: int) -> Launch:
    """The launch of linear attention over `rows` rows. table: as for `convolve`; narrow: see Tiles.narrow_keys."""
    query, key, value, decays, strengths, target, heads, key_heads, width, value_width, form = op.numbers[:11]
    beside = [room.register(number) for number in (value, decays, strengths)]
    given = args(
        room.register(query),
        room.register(key),
        room.register(target),
        tensors=(op.address(0),),
        n=(heads, key_heads, width, value_width, form, *kept),
        rows=table,
        count=rows,
        parts=[LaunchPart(None, None, place.address, place.stride) for place in beside],
    )
    grid = heads * -(-value_width // TILE), min(rows, SESSIONS), 1
    kernel = "delta_by_channel" if form == DELTA_BY_CHANNEL else "delta"
    return Launch(f"{kernel}_{128 if width <= narrow else 256}", grid, given, DELTA_THREADS)
