"""What one render of a chat template may use (template.py): passes of its loops, seconds, and characters of one value. Pure."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from manyhands.errors import BadRequest


class TooCostly(BadRequest):
    """A render went beyond its budget."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"the chat template of this model: {reason}")


@dataclass(slots=True)
class RenderBudget:
    """What one render may use: passes of its loops and macros, seconds, and characters (or items) of one value."""

    passes: int = 1_000_000
    seconds: float = 2.0
    size: int = 16 << 20
    clock: Callable[[], float] = time.thread_time  # CPU time: a busy machine is no costly template
    used: int = 0
    _end: float = field(init=False)

    def __post_init__(self) -> None:
        self._end = self.clock() + self.seconds

    def take(self, passes: int = 1) -> bool:
        """Count passes, and look at the clock. Raises TooCostly."""
        self.used += passes
        if self.used > self.passes:
            raise TooCostly(f"it takes more than {self.passes} passes of its loops")
        if self.clock() > self._end:
            raise TooCostly(f"it takes more than {self.seconds:g} s")
        return True

    def join(self, *values: Any) -> str:
        """`a ~ b`, within `size`."""
        self.take(0)
        texts = [value if isinstance(value, str) else str(value) for value in values]
        self.check(sum(map(len, texts)))
        return "".join(texts)

    def check(self, size: float) -> None:
        """Raise TooCostly if one value would get so large."""
        if size > self.size:
            raise TooCostly(f"it builds a value of more than {self.size} characters or items")
