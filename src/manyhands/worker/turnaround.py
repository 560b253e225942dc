"""When the next decode step of a session is due. Pure: times are arguments."""


class Turnaround:
    """How long a session's next decode step takes to come after the last one's result went out (learnt; seconds)."""

    def __init__(self) -> None:
        self.usual_s: float | None = None  # None: none has come yet
        self._sent_at: float | None = None

    def sent(self, now: float) -> None:
        """A decode result went out."""
        self._sent_at = now

    def returned(self, now: float) -> None:
        """A step came in."""
        if self._sent_at is not None:
            took_s = now - self._sent_at
            self.usual_s = took_s if self.usual_s is None else 0.8 * self.usual_s + 0.2 * took_s
            self._sent_at = None

    def expected_at(self) -> float | None:
        """When the next step is due, with a quarter to spare; None if none is known to be on its way."""
        if self._sent_at is None or self.usual_s is None:
            return None
        return self._sent_at + 1.25 * self.usual_s
