"""What a place on a hop still has to send, in order. What it sends again is made step by step, as credits come for it."""

from collections import deque
from collections.abc import Iterable, Iterator

from manyhands.wire.message import Step


class Outbox(deque[Step]):
    """Steps that wait for credits of the successor. `send_next` takes them out, so that what is sent again can follow."""

    def __init__(self) -> None:
        super().__init__()
        self._again: Iterator[Step] = iter(())  # goes behind the first step here, before all others

    def send_again(self, steps: Iterable[Step]) -> None:
        """Send `steps`, from a log, before all that is appended. Nothing waits."""
        self._again = iter(steps)
        self._fetch()

    def _fetch(self) -> None:
        if (step := next(self._again, None)) is not None:
            self.appendleft(step)

    def send_next(self) -> Step:
        """The step that is next; there is one."""
        step = self.popleft()
        self._fetch()
        return step

    def clear(self) -> None:
        super().clear()
        self._again = iter(())
