"""Where a step's rows lie on the device: registers, angles of positions, rows inside experts, and how heads are cached."""

from collections.abc import Sequence
from typing import Final, NamedTuple

from manyhands.engine import library
from manyhands.engine.cuda.device import CudaMemory
from manyhands.engine.cuda.launch import Place
from manyhands.engine.library import BLOCK, SIDE
from manyhands.engine.states import DELTA_BY_CHANNEL, attention_states, convolution_states
from manyhands.errors import ModelError

DEPTH: Final = 32  # numbers of K in a step of a product
GROUP_WORDS: Final = 10  # of a group of a row (small.cu)
SMALL: Final = library.TYPES["w8"]  # the first of the types of small weights
MOST_WIDTH, MOST_VALUES = 1024, 512  # numbers of a key, and of a value, of one head (common.cu)


class Held(NamedTuple):
    """An operation as compile.py emits it (its numbers: engine/native/plan.c), filled up with zeros; its tensors are on the
    device."""

    kind: int
    numbers: tuple[int, ...]
    reals: tuple[float, ...]
    tensors: tuple[CudaMemory | None, ...]

    def address(self, place: int) -> int | None:
        """The address of a tensor, by its place among the operation's; None where the operation has none."""
        tensor = self.tensors[place]
        return None if tensor is None else tensor.address


class Angles(NamedTuple):
    """Angles that operations share: frequencies on the device, how many, and the factor."""

    frequencies: int
    turns: int
    factor: float


class Heads(NamedTuple):
    """How an attention's heads are cached: in blocks of 64 positions, as engine/native/kernels.h lays them out."""

    key_heads: int
    key_bytes: int
    value_bytes: int  # 0: values are the beginning of keys

    @property
    def head_bytes(self) -> int:
        return self.key_bytes + self.value_bytes

    @property
    def block_bytes(self) -> int:
        """Bytes of a block, all key heads together."""
        return self.key_heads * self.head_bytes


def heads_of(op: Held, item: int) -> Heads:
    """The heads of an attention whose cached numbers take `item` bytes. Raises ModelError for those that are too wide."""
    width, value_width, is_latent, has_codes = (op.numbers[place] for place in (6, 7, 9, 10))
    if width > MOST_WIDTH or value_width > MOST_VALUES:
        raise ModelError(
            f"keys of {width} numbers and values of {value_width}: a GPU takes {MOST_WIDTH} and {MOST_VALUES} at most"
        )
    if has_codes:
        raise ModelError("a GPU holds no caches of 8 bit: leave --cache-dtype out")
    keys = BLOCK // SIDE * -(-width // DEPTH) * DEPTH * SIDE * item
    values = 0 if is_latent else -(-value_width // SIDE) * BLOCK * SIDE * item
    return Heads(op.numbers[5], keys, values)


class Kept(NamedTuple):
    """Where an operation with states begins, in bytes: in a block of a session's states, and in the state behind its last
    position."""

    block: int
    now: int


class Room:
    """Places of a plan's rows; known once `lie` says where the memory is."""

    def __init__(self, rounds: bool, widths: Sequence[int], offsets: Sequence[int], ops: Sequence[Held]) -> None:
        self.rounds, self.widths, self._offsets = rounds, widths, offsets
        self._columns = max(offset + whole(width) for offset, width in zip(offsets, widths, strict=True))
        self.shared: dict[Angles, int] = {}  # the columns at which they begin
        self._angle_columns = self._routed = self._grouped = self.block_bytes = 0
        self.layers: dict[
            int, int
        ] = {}  # of attentions by their places: where they begin in a block of a session's cache
        self.states: dict[int, Kept] = {}  # of operations with states by their places
        self.state_bytes = self.now_bytes = 0  # of a block of states, and of the state behind the last position
        for place, op in enumerate(ops):
            if op.kind in (library.CONVOLVE, library.DELTA):
                self._add_states(place, op)
            elif op.kind == library.ROTARY:
                self._add_angles(angles_of(op))
            elif op.kind == library.PRODUCT and op.numbers[2] >= SMALL:
                self._grouped = max(self._grouped, groups_of(widths[op.numbers[0]]))
            elif op.kind == library.EXPERTS:
                inside = op.numbers[4] * groups_of(op.numbers[5]) if op.numbers[8] >= SMALL else 0
                each = op.numbers[4] if op.numbers[9] else 1  # rows times the weights of their routes
                outside = each * groups_of(widths[op.numbers[0]]) if op.numbers[6] >= SMALL else 0
                self._grouped = max(self._grouped, inside, outside)
                top_k, inner, hidden = op.numbers[4], whole(op.numbers[5]), whole(widths[op.numbers[2]])
                self._routed = max(self._routed, top_k * (2 * inner + hidden))
            elif op.kind == library.ATTENTION:
                self.layers[place] = self.block_bytes
                self.block_bytes += heads_of(op, 2 if rounds else 4).block_bytes

    def _add_states(self, place: int, op: Held) -> None:
        n, item = op.numbers, 2 if self.rounds else 4
        is_attention = op.kind == library.DELTA
        by_channel = n[10] == DELTA_BY_CHANNEL
        sizes = (
            attention_states(*n[6:10], by_channel=by_channel)
            if is_attention
            else convolution_states(self.widths[n[0]], n[2], item)
        )
        self.states[place] = Kept(self.state_bytes, self.now_bytes)
        self.state_bytes, self.now_bytes = self.state_bytes + sizes.block, self.now_bytes + sizes.now

    def _add_angles(self, angles: Angles) -> None:
        if angles not in self.shared:
            self.shared[angles] = self._angle_columns
            self._angle_columns += 2 * angles.turns

    @property
    def row_bytes(self) -> int:
        """Bytes that each row of a step takes."""
        return 4 * (self._columns + self._angle_columns + self._routed + self._grouped)

    def lie(self, address: int, rows: int) -> None:
        """The memory for so many rows begins at `address`."""
        self._address, self._rows = address, rows

    def _behind(self, columns: int, stride: int) -> Place:
        return Place(self._address + 4 * columns * self._rows, stride)

    def register(self, number: int) -> Place:
        return self._behind(self._offsets[number], whole(self.widths[number]))

    def angles(self, angles: Angles) -> Place:
        return self._behind(self._columns + self.shared[angles], 2 * angles.turns)

    def routed(self, columns: int, width: int) -> Place:
        """Rows inside experts, one for each row and route: `columns` are those of other such rows before them."""
        return self._behind(self._columns + self._angle_columns + columns, whole(width))

    @property
    def groups(self) -> int:
        """The address of rows in groups, for products with small weights."""
        return self._behind(self._columns + self._angle_columns + self._routed, 0).address


def groups_of(width: int) -> int:
    """The groups of a row of so many numbers (Group in small.cu), in words of four bytes."""
    return -(-width // DEPTH) * GROUP_WORDS


def whole(width: int) -> int:
    """A row's numbers, up to a panel's side."""
    return -(-width // SIDE) * SIDE


def angles_of(op: Held) -> Angles:
    """The angles of a rotary operation."""
    frequencies = op.address(0)
    assert frequencies is not None
    return Angles(frequencies, op.numbers[4], op.reals[0])
