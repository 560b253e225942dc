"""What a place on a hop still has to send, in order. What it sends again is made step by step, as credits come for it."""

from collections import deque
from collections.abc import Iterable, Iterator

from manyhands.wire.message import Step


class Outbox:
    """Steps that wait for credits of the successor; false if there are none."""

    def __init__(self) -> None:
        self._steps: deque[Step] = deque()
        self._again: Iterator[Step] = iter(())  # goes before all `_steps`
        self._next: Step | None = None  # of `_again`

    def __repr__(self) -> str:
        return f"<Outbox {len(self._steps)} steps{' after what is sent again' if self._next is not None else ''}>"

    def __bool__(self) -> bool:
        return self._next is not None or bool(self._steps)

    def send_again(self, steps: Iterable[Step]) -> None:
        """Send `steps`, from a log, before all that is appended. Nothing waits."""
        self._again = iter(steps)
        self._next = next(self._again, None)

    def append(self, step: Step) -> None:
        self._steps.append(step)

    def pop(self) -> Step:
        """The step that is next; there is one."""
        if self._next is None:
            return self._steps.popleft()
        step, self._next = self._next, next(self._again, None)
        return step

    def clear(self) -> None:
        self._steps.clear()
        self.send_again(())
