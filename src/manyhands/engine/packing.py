"""What packs a model's matrices for the engine, or takes them as they were packed at an earlier load (weights/packed.py)."""

import hashlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Final, Protocol

import numpy as np

from manyhands.checkpoint.dtypes import BLOCKS
from manyhands.core import Precision
from manyhands.engine import library
from manyhands.engine.grids import stand_in
from manyhands.engine.library import Array
from manyhands.engine.memory import Memory
from manyhands.engine.quants import KEPT, pack_blocks, round_weights
from manyhands.engine.weights import Stored
from manyhands.weights.packed import PackedShelf

Make = Callable[[], Stored]
_ORDER: Final = "order"  # of the inputs of the matrix before it, in place of a type
# Their code says what is read of a checkpoint, which matrices a layer has, how they are packed, and in what order.
_SOURCES: Final = tuple(Path(__file__).parents[1] / name for name in ("checkpoint", "engine", "program"))


class Packer(Protocol):
    """Is asked for the matrices of one part after the other, always in the same order."""

    def begin(self, part: str) -> None:
        """What follows is of `part`, a text that is equal only where all its matrices are packed alike."""
        ...

    def take(self, make: Make, memory: Memory) -> Stored:
        """The next matrix of the part: what `make` packs."""
        ...


class Plain:
    """Packs everything each time."""

    def begin(self, part: str) -> None:
        pass

    def take(self, make: Make, memory: Memory) -> Stored:
        return make()


PLAIN: Final = Plain()


class Keeping:
    """Takes parts from `shelf` where they are there; keeps the others with `keep`, once the checkpoint's bytes are proven."""

    def __init__(self, shelf: PackedShelf, precision: Precision) -> None:
        self._shelf, self._kind = shelf, f"{precision} {packing_digest()}"
        self._key = ""
        self._found: list[tuple[str, Array]] | None = None
        self._made: dict[str, list[tuple[str, Array]]] = {}
        self.num_found = self.num_made = 0  # matrices

    def begin(self, part: str) -> None:
        self._key, self._found = f"{self._kind} {hashlib.sha256(part.encode()).hexdigest()}", None

    def take(self, make: Make, memory: Memory) -> Stored:
        if self._key not in self._made and self._found is None:
            self._found = self._shelf.load(self._key, memory.array)
            if self._found is None:
                self._made[self._key] = []
        if self._found is not None:
            self.num_found += 1
            name, array = self._found.pop(0)
            is_ordered = bool(self._found) and self._found[0][0] == _ORDER
            return Stored(name, array, self._found.pop(0)[1] if is_ordered else None)
        made = make()
        self.num_made += 1
        self._made[self._key].append((made.type, made.array))
        if made.order is not None:
            self._made[self._key].append((_ORDER, made.order))
        return made

    def keep(self) -> None:
        """Write what was packed."""
        for key, part in self._made.items():
            if not self._shelf.keep(key, part):
                break  # there is no room
        self._made.clear()


@cache
def packing_digest() -> str:
    """A hash of small matrices of every type, packed, and of the code that leads to them: another one means that packed bytes
    of other versions are of no use."""
    numbers = (np.arange(32 * 256, dtype=np.float32).reshape(32, 256) * np.float32(0.37)) % np.float32(
        7.0
    ) - np.float32(3)
    packed = [round_weights("scalar", numbers, "f32", small) for small in ("w8", "w4")]
    packed += [library.pack(numbers, "f32", kept).view(np.uint8) for kept in ("bf16", "f32")]
    for form in KEPT:
        numbers_of, size = BLOCKS[form]
        blocks = (np.arange(32 * 256 // numbers_of * size, dtype=np.int64) * 37 % 251).astype(np.uint8).reshape(32, -1)
        packed.append(pack_blocks(blocks, form, grid=stand_in(form)))
    known = [array.tobytes() for array in packed]
    known += [path.read_bytes() for folder in _SOURCES for path in sorted(folder.glob("*.py"))]
    return hashlib.sha256(b"".join(hashlib.sha256(data).digest() for data in known)).hexdigest()[:16]
