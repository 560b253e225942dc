"""Whether the steps of one epoch come to a place in order. Pure.

Under one guess each step begins where the one before it ended: a sender repeats no rows and leaves none out. Where a guess
begins, the origin says (Retract), and the first step under it says so too; the hop before may have made that up.
"""

from manyhands.errors import AnsweredEarly, ProtocolError


class StepOrder:
    """Of one epoch. `guess`: the newest.

    `may_begin_anew`: a step may begin before the first one. So it is in a session that goes on with a parked one: where hops
    have less of that than the origin knew, it sends again from an earlier position.
    """

    def __init__(self, *, may_begin_anew: bool) -> None:
        self.guess = 0
        self._may_begin_anew = may_begin_anew
        self._begins_at = self._computed = 0  # the newest guess; what was computed then
        self._is_begun = True  # a step came under it
        self._is_refused = False  # `confirm` has raised, which it does once
        self._first: int | None = None  # the least position at which a step has begun
        self._due: int | None = None  # the position at which the next step begins; None: any
        self._is_repeated = False  # rows came again behind the last step that was due

    def begin_guess(self, guess: int, position: int, computed: int) -> None:
        """`guess`, a newer one, begins at `position`; positions up to `computed` are computed."""
        self.guess, self._begins_at, self._computed = guess, position, computed
        self._due, self._is_begun, self._is_repeated = position, False, False

    def repeated(self) -> ProtocolError | None:
        """Why the next step is overdue, if rows came in its place that had come before."""
        what = f"rows that had come before came again, and none where {self._due} is due"
        return ProtocolError(what) if self._is_repeated else None

    def confirm(self, guess: int, position: int) -> None:
        """The origin says that `guess` begins at `position`.

        Raises ProtocolError if a step under it began elsewhere; AnsweredEarly if what is before it was not computed here when
        it began, though rows of it had come back.
        """
        if guess != self.guess or self._is_refused:
            return
        self._is_refused = True
        if position != self._begins_at:
            raise ProtocolError(f"guess {guess} began with a step at position {self._begins_at}, not {position}")
        if position > self._computed:
            raise AnsweredEarly(
                f"rows came back of positions up to {position}, of which this hop had computed {self._computed}"
            )
        self._is_refused = False

    def admit(self, position: int, count: int) -> bool:
        """Whether a step of `count` rows at `position` is in order; False: it repeats rows that came before.

        Raises ProtocolError if rows before it are missing, or if it is not where its guess begins.
        """
        begins = self._due is None or (self._may_begin_anew and self._first is not None and position < self._first)
        if self._due is not None and not (begins and self._is_begun):
            if position > self._due or (position != self._due and not self._is_begun):
                raise ProtocolError(f"a step at position {position} came where {self._due} was due")
            if position < self._due:
                self._is_repeated = True
                return False
        self._first = position if self._first is None else min(self._first, position)
        self._due, self._is_begun, self._is_repeated = position + count, True, False
        return True
