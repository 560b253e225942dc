"""In which order the steps of one epoch come to a place. Pure.

Under one guess each step begins where the one before it ended: who sends it does not send twice what it has sent, and leaves
nothing out.
"""

from manyhands.errors import ProtocolError


class StepOrder:
    """Of one epoch. With `may_begin_anew`, of a session that goes on with what was parked, a step may begin before the first
    one: hops had less of it than their origin knew, which sends from there then."""

    def __init__(self, *, may_begin_anew: bool) -> None:
        self._may_begin_anew = may_begin_anew
        self._first: int | None = None
        self._due: int | None = None

    def begin_guess(self) -> None:
        """The next step may begin at any position that is here."""
        self._due = None

    def admit(self, position: int, count: int) -> bool:
        """Whether a step of `count` rows at `position` is one that follows; False: its sender has sent these rows before.

        Raises ProtocolError if rows before it did not come.
        """
        begins = self._due is None or (self._may_begin_anew and self._first is not None and position < self._first)
        if self._due is not None and not begins:
            if position > self._due:
                raise ProtocolError(f"a step at position {position} came where {self._due} was due")
            if position < self._due:
                return False
        self._first = position if self._first is None else min(self._first, position)
        self._due = position + count
        return True
