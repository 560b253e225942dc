"""The native library (native/*.c) by ctypes: back ends, packed weights, tables, plans, teams.

Arrays are numpy's, contiguous; bf16 travels as uint16. What is passed is checked in C (plan.c): an operation or a step that
would reach beyond an array is refused with a ModelError, and nothing was computed. This module imports no torch.
"""

import ctypes
from collections.abc import Sequence
from functools import cache
from math import lcm
from os import environ, register_at_fork
from pathlib import Path
from typing import Any, Final
from weakref import WeakSet

import numpy as np
from numpy.typing import NDArray

from manyhands.engine.devices import FORCED as FORCED
from manyhands.engine.devices import is_device
from manyhands.engine.filed import Files, Given, TableParts
from manyhands.engine.layout import NUMBERS, REALS, TENSORS, Segment, Tensor, difference
from manyhands.engine.layout import TYPES as TYPES
from manyhands.engine.layout import WIDE as WIDE
from manyhands.engine.signatures import SIGNATURES
from manyhands.errors import ContextOverflow, ModelError

Array = NDArray[Any]
VERSION: Final = 32  # of the interface: mh_version in native/plan.c
BACK_ENDS: Final = ("scalar", "avx2", "avx512", "neon", "amx")  # by the number that C gives them
PREFERENCE: Final = ("amx", "avx512", "avx2", "neon", "scalar")
PATH = Path(__file__).with_name("_native.so")
ACTIVATIONS: Final = ("none", "silu", "gelu", "gelu_tanh", "relu", "relu2", "sigmoid")
SITU: Final = len(ACTIVATIONS)  # of gates alone (Gating in program/expert_ops.py)
FUNCTIONS: Final = (*ACTIVATIONS, "exp", "tanh", "erf")
DOUBLES: Final = ("exp", "log", "sin", "cos", "pow")
BLOCK: Final = 64  # positions of a cache's block
SIDE: Final = 16  # columns of a panel; registers begin at multiples
_FAILED = {
    1: "there is no memory for a step's rows: give it fewer rows at once",
    2: "the operation is unknown",
    3: "an operation names a register that is not there",
    4: "an operation's shapes do not fit its registers",
    5: "a tensor has another size than its operation needs",
    6: "a session's rows or cache do not fit the step",
    7: "the rows do not fit the number of bytes",
    9: "a plan that has run takes no more operations",
}
_POSITION = 8


@cache
def load() -> ctypes.CDLL:
    """The library. Raises ModelError where it was not built, is of another version or lays out its structs differently."""
    path, remedy = PATH, "install manyhands again, with a C compiler or ziglang at hand"
    try:
        library = ctypes.CDLL(str(path))
        version = library.mh_version()
    except (OSError, AttributeError) as error:
        raise ModelError(f"the engine's library {path} cannot be loaded ({error}): {remedy}") from error
    if version != VERSION:
        raise ModelError(f"the engine's library {path} is of version {version}, not {VERSION}: {remedy}")
    if wrong := difference(library, POSITION + 1, globals()):
        raise ModelError(f"the engine's library {path} does not fit this version of manyhands ({wrong}): {remedy}")
    for name, (result, arguments) in SIGNATURES.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


def supported() -> list[str]:
    """The back ends that this CPU can run, best first."""
    library = load()
    return [name for name in PREFERENCE if library.mh_supports(BACK_ENDS.index(name))]


def forced() -> str | None:
    """The back end that MANYHANDS_ENGINE names, if it does. Raises ModelError where this machine cannot run it."""
    name = environ.get(FORCED, "")
    if is_device(name):
        return None
    if name and name not in supported():
        raise ModelError(
            f"{FORCED}={name}: this CPU runs {', '.join(supported())}; devices are cuda[:N], torch-cpu, mps and xpu[:N]: "
            "name one of them, or none"
        )
    return name or None


def calls(back_end: str) -> int:
    """Calls that a back end computed in this process."""
    return int(load().mh_calls(BACK_ENDS.index(back_end)))


def address(array: Array | None) -> int | None:
    return None if array is None else array.ctypes.data


def _fresh(array: Array) -> Any:
    """The address of an array that was just made, as an argument, in a third of `address`'s time; None of an empty one."""
    return ctypes.byref(ctypes.c_char.from_buffer(array.data)) if array.size else None


def tensor(array: Array | None) -> Tensor:
    """An array as C sees it: the caller keeps it alive. Raises ModelError if it is not contiguous."""
    if array is None:
        return Tensor(None, 0)
    if not array.flags.c_contiguous:
        raise ModelError(f"an array of {array.shape} is not contiguous")
    return Tensor(array.ctypes.data, array.nbytes)


def _listed(parts: TableParts) -> Array:
    """A Tensor of each part, as C reads it. Raises ModelError as `tensor`."""
    return np.array([(each.data, each.bytes) for each in map(tensor, parts.arrays)], np.int64)


def packed_size(n: int, k: int) -> int:
    """Numbers that a matrix [n, k] takes when packed. Raises ModelError for impossible shapes."""
    size = int(load().mh_packed_size(n, k))
    if size < 0:
        raise ModelError(f"a matrix of {n} x {k} cannot be packed")
    return size


def pack(
    weight_NK: Array, type_name: str, kept: str = "", rows: NDArray[np.int64] | None = None, out: Array | None = None
) -> Array:
    """A matrix as panels of 16 columns (native/kernels.h), in `out` if it is given, else in new memory.

    The matrix may be a view (transposed, a part); `rows` takes some of its rows, in that order. `kept`: "bf16" rounds a
    matrix of fp32. One thread; the GIL is released. Raises ModelError for impossible shapes.
    """
    kept = kept or type_name
    given, shape = view_of(weight_NK, rows)
    numbers = packed_size(*shape)
    out = np.empty(numbers, np.float32 if kept == "f32" else np.uint16) if out is None else out
    check(load().mh_pack(TYPES[type_name], TYPES[kept], *given, address(rows), address(out), out.nbytes))
    return out


def view_of(weight_NK: Array, rows: NDArray[np.int64] | None) -> tuple[tuple[int | None, ...], tuple[int, int]]:
    """A view as C is told it: address, numbers that it spans, n, k, steps; and (n, k). Raises ModelError."""
    size = weight_NK.itemsize
    if any(step < 0 or step % size for step in weight_NK.strides) or weight_NK.ndim != 2:
        raise ModelError(f"a matrix of shape {weight_NK.shape} and strides {weight_NK.strides} cannot be packed")
    n, k = weight_NK.shape if rows is None else (len(rows), weight_NK.shape[1])
    steps = [step // size for step in weight_NK.strides]
    extent = sum((count - 1) * step for count, step in zip(weight_NK.shape, steps, strict=True)) + 1
    return (address(weight_NK), extent, n, k, *steps), (n, k)


def check(code: int) -> None:
    """Raises what a call's answer means."""
    if code == _POSITION:
        raise ContextOverflow("a step reaches beyond the positions that the model has")
    if code:
        raise ModelError(f"the engine refused: {_FAILED.get(code, code)}")


def apply(back_end: str, function: str, x: NDArray[np.float32], alpha: float = 1.0) -> NDArray[np.float32]:
    """One of FUNCTIONS, number by number, as the back end computes it."""
    x = np.ascontiguousarray(x, np.float32)
    out = np.empty_like(x)
    number = FUNCTIONS.index(function)
    check(load().mh_apply(BACK_ENDS.index(back_end), number, alpha, address(x), address(out), x.size))
    return out


def double(function: str, x: NDArray[np.float64], y: float = 0.0) -> NDArray[np.float64]:
    """One of DOUBLES, number by number, in double (native/tables.c)."""
    x = np.ascontiguousarray(x, np.float64)
    out = np.empty_like(x)
    check(load().mh_double(DOUBLES.index(function), address(x), y, address(out), x.size))
    return out


def rope(frequencies: Sequence[float], factor: float, positions: int, first: int = 0) -> tuple[Array, Array]:
    """Tables of cosines and sines [positions, frequencies], from position `first` on (program/ops.py, Rope)."""
    rates = np.array(frequencies, np.float32)
    cos, sin = np.empty((2, positions, len(rates)), np.float32)
    check(load().mh_rope(address(rates), len(rates), factor, first, positions, address(cos), address(sin)))
    return cos, sin


def embed(
    back_end: str,
    table: Array,
    table_type: str,
    shape: tuple[int, int],
    ids: Sequence[int],
    scale: float,
    row_type: str,
) -> NDArray[np.uint8]:
    """Rows [T, bytes of a row] of a table of `shape` (vocab, width), times `scale`, rounded to `row_type`.

    The table [vocab, width] lies row by row, or packed in one dimension, as a head that shares its memory does. Raises
    ModelError.
    """
    given = np.array(ids, np.int64)
    out = np.empty((len(given), shape[1] * (2 if row_type == "bf16" else 4)), np.uint8)
    held = tensor(table)
    target, stored = BACK_ENDS.index(back_end), TYPES[table_type]
    wanted = (address(given), len(given), TYPES[row_type])
    placed = (address(out), out.nbytes, int(table.ndim == 1), scale)
    check(load().mh_embed(target, stored, held.data, held.bytes, *shape, *wanted, *placed))
    return out


class Team:
    """Threads that compute together, the caller among them. One step at a time. In a process that was forked from this one,
    which has no other threads, the caller computes alone."""

    def __init__(self, size: int) -> None:
        self._library = load()
        self.handle = self._library.mh_team_start(size)
        if not self.handle:
            raise ModelError(f"no team of {size} threads can be had: ask for 1 to 1024")
        _TEAMS.add(self)

    def drop_threads(self) -> None:
        """In a forked process: its threads are not there, and one may have held its lock."""
        self.handle = self.handle and self._library.mh_team_start(1)

    def close(self) -> None:
        """Ends the threads. Only while no step runs."""
        if self.handle:
            self._library.mh_team_stop(self.handle)
            self.handle = None

    def __del__(self) -> None:
        if hasattr(self, "handle"):
            self.close()


_TEAMS: Final[WeakSet[Team]] = WeakSet()


def _after_fork() -> None:
    for team in list(_TEAMS):
        team.drop_threads()


register_at_fork(after_in_child=_after_fork)


def apart(widths: Sequence[int]) -> list[int]:
    """Where registers begin that share nothing."""
    return [sum(-(-width // SIDE) * SIDE for width in widths[:i]) for i in range(len(widths))]


class Plan:
    """Operations over registers of fp32 rows, for one back end. One step at a time.

    widths: of the registers; 0 takes the rows that come in (`row_type`), `out` gives those that leave (`out_type`).
    offsets: the columns at which registers begin, if some share memory; multiples of 16.
    """

    def __init__(
        self,
        back_end: str,
        row_type: str,
        widths: Sequence[int],
        out: int,
        out_type: str,
        positions: int,
        offsets: Sequence[int] = (),
    ) -> None:
        self.widths, self.out, self.row_type, self.out_type = list(widths), out, row_type, out_type
        places = offsets or apart(widths)
        self.columns = max(place + width for place, width in zip(places, widths, strict=True)) if widths else 0
        array, begins = ((ctypes.c_int64 * len(widths))(*numbers) for numbers in (widths, places))
        given = BACK_ENDS.index(back_end), TYPES[row_type], array, begins, len(widths), out, TYPES[out_type], positions
        self._held: list[Given] = []
        self._files = Files()
        self.apart = BLOCK  # positions: entries of all operations begin at its multiples
        self._library = load()
        self._handle = self._library.mh_plan_new(*given)
        if not self._handle:
            raise ModelError(f"no plan of {len(widths)} registers and {positions} positions on {back_end}")
        self._out_bytes = widths[out] * (2 if out_type == "bf16" else 4)  # of a row

    def add(
        self, kind: int, numbers: Sequence[int], reals: Sequence[float] = (), tensors: Sequence[Given] = ()
    ) -> None:
        """One more operation (native/plan.c has what each takes). Raises ModelError where it does not fit."""
        lists = [_listed(each) if isinstance(each, TableParts) else each for each in tensors]
        held = [*lists, *[None] * (TENSORS - len(lists))]
        given = (ctypes.c_int64 * NUMBERS)(*numbers), (ctypes.c_double * REALS)(*reals)
        check(self._library.mh_plan_add(self._handle, kind, *given, (Tensor * TENSORS)(*map(tensor, held))))
        self.apart = lcm(self.apart, numbers[3]) if kind == COMPRESS else self.apart
        self._held += [*tensors, *lists]
        self._files.add(array for each in tensors if isinstance(each, TableParts) for array in each.arrays)

    @property
    def block_bytes(self) -> int:
        """Bytes that 64 positions take in a session's cache."""
        return int(self._library.mh_plan_block_bytes(self._handle))

    @property
    def state_bytes(self) -> int:
        """Bytes of a block of states of a session (engine/states.py); 0 where no operation has one."""
        return int(self._library.mh_plan_state_bytes(self._handle))

    @property
    def now_bytes(self) -> int:
        """Bytes of the state behind a session's last position."""
        return int(self._library.mh_plan_now_bytes(self._handle))

    def run(self, team: Team, threads: int, segments: Sequence[Segment], rows: Array | bytes, count: int) -> Array:
        """`count` rows -> `count` rows [count, bytes of a row]. Raises ModelError, ContextOverflow; then caches may hold
        some of the step's positions, which the next step writes again."""
        self._files.check()
        out = np.empty((count, self._out_bytes), np.uint8)
        # One is given as it is: to make an array of it takes a hop, whose caches are cold, some 10 us.
        array = ctypes.byref(segments[0]) if len(segments) == 1 else (Segment * len(segments))(*segments)
        given: tuple[bytes | int | None, int]
        if isinstance(rows, bytes):  # C takes them as they are; to ask an array for its address takes longer
            given = rows, len(rows)
        else:
            held = tensor(rows)
            given = held.data, held.bytes
        code = self._library.mh_plan_run(
            self._handle, team.handle, threads, array, len(segments), *given, _fresh(out), out.nbytes, count
        )
        self._files.let_go()
        if code:
            check(code)
        return out

    def release(self) -> None:
        """Free the memory for rows, tens of megabytes after a prompt; the next step allocates it again."""
        self._library.mh_plan_release(self._handle)

    def __del__(self) -> None:
        if getattr(self, "_handle", None):
            self._library.mh_plan_free(self._handle)
            self._handle = None


NORM, PRODUCT, ROTARY, ATTENTION, GATE, ADD, MULTIPLY, SOFTEN, COPY, ROUTE, EXPERTS, CONVOLVE, DECAY, DELTA = range(14)
INDEX, SCALE, XIELU, COLLAPSE, SPREAD, COMPRESS, ATTEND_ENTRIES, MIX, RESCALE, SPARSIFY = range(14, 24)
NGRAMS, ADMIT, ATTEND_STREAMS, POSITION = range(24, 28)
