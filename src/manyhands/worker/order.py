"""Whether the steps of one epoch come to a place in order. Pure.

Under one guess each step begins where the one before it ended: a sender repeats no rows and leaves none out.
"""

from manyhands.errors import ProtocolError


class StepOrder:
    """Of one epoch.

    `may_begin_anew`: a step may begin before the first one. So it is in a session that goes on with a parked one: where hops
    have less of that than the origin knew, it sends again from an earlier position.
    """

    def __init__(self, *, may_begin_anew: bool) -> None:
        self._may_begin_anew = may_begin_anew
        self._first: int | None = None  # the least position at which a step has begun
        self._due: int | None = None  # the position at which the next step begins; None: any

    def begin_guess(self) -> None:
        """The next step may begin at any position."""
        self._due = None

    def admit(self, position: int, count: int) -> bool:
        """Whether a step of `count` rows at `position` is in order; False: it repeats rows that came before.

        Raises ProtocolError if rows before it are missing.
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
