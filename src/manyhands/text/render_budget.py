"""What one render of a chat template may use (template.py): passes of its loops, seconds, and characters of one value. Pure."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Final

from manyhands.errors import BadRequest

_LIGHT: Final = 256  # characters and items that are counted without a look at the clock
_COUNTED: Final = 4096  # items after which it is looked at again: some milliseconds


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
    _looks: int = 0
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

    def look(self) -> None:
        """Before an operation: to look at the clock takes as long as a short one, so it is done before each eighth."""
        self._looks += 1
        if self._looks % 8 == 0:
            self.take(0)

    def join(self, *values: Any) -> str:
        """`a ~ b`, within `size`."""
        self.look()
        texts = [value if isinstance(value, str) else str(value) for value in values]
        self.check(sum(map(len, texts)))
        return "".join(texts)

    def weigh(self, value: Any) -> Any:
        """`value` itself, of which characters and items, each as often as it is written out, must be within `size`: a list that
        holds another twice, and so on, doubles with each few letters of a template."""
        size, _ = self.spread(value)
        self.check(size)
        if size > _LIGHT:
            self.take(0)
        return value

    def spread(self, value: Any) -> tuple[int, int]:
        """Characters and items of a value as it is written out, counted to beyond `size`, and how deep it is. Raises TooCostly
        where the seconds are over."""
        size = deepest = 0
        for number, (one, depth) in enumerate(_within(value), 1):
            if number % _COUNTED == 0:
                self.take(0)
            size, deepest = size + 1 + (len(one) if isinstance(one, str) else 0), max(deepest, depth)
            if size > self.size:
                break
        return size, deepest

    def check(self, size: float) -> None:
        """Raise TooCostly if one value would get so large."""
        if size > self.size:
            raise TooCostly(f"it builds a value of more than {self.size} characters or items")


def _within(value: Any) -> Iterator[tuple[Any, int]]:
    """A value and what it holds, each as often as it is written out, with its depth. No list of what is left is made."""
    open_values: list[Iterator[Any]] = [iter((value,))]
    while open_values:
        for one in open_values[-1]:
            yield one, len(open_values) - 1
            if isinstance(one, dict | list | tuple):
                open_values.append(chain(one, one.values()) if isinstance(one, dict) else iter(one))
                break
        else:
            open_values.pop()
