"""What operations are compiled with: compile.py has it, and modules beside it add operations of theirs."""

from collections.abc import Sequence
from typing import Protocol

from manyhands.core import Precision
from manyhands.engine.filed import Given
from manyhands.engine.weights import Read, Stored
from manyhands.program.ops import Op, Weight


class Emitter(Protocol):
    """What takes native operations, and knows the registers that names are bound to."""

    family: str
    read: Read
    precision: Precision
    has_codes: bool

    def emit(
        self, kind: int, numbers: Sequence[int], reals: Sequence[float] = (), tensors: Sequence[Given] = ()
    ) -> None: ...

    def source(self, name: str) -> int: ...

    def width(self, name: str) -> int: ...

    def target(self, name: str, width: int, apart: Sequence[int] = ()) -> int: ...

    def by_head(self, weight: Weight, heads: int, turned: bool) -> Stored: ...

    def exact(self, weight: Weight) -> Stored: ...

    def stack(self, count: int, weight: Weight) -> Stored: ...

    def rounds(self, op: Op) -> bool: ...
