"""How long a session waits for room, until hops that have none are replaced, and until its answer ends. Pure."""

from typing import Final

FULL_S: Final = 3.0  # a hop that has no room is waited for so long at least, if patience allows
ANSWER_S: Final = 1.0  # for a hop to answer, beyond what event loops are late by; it is asked as often


class RoomWait:
    """The waiting of one session that positions have not made up for.

    Each position that the lease gains buys what a step may take (`row_s`), as in pace.py: a hop that grants a position every
    now and then is waited for no longer than one that grants none.
    """

    def __init__(self, leased: int) -> None:
        self._leased = leased  # what has been bought
        self._owed_s = 0.0

    def begin(self, leased: int, row_s: float) -> None:
        """The session waits, with so many positions leased."""
        self._owed_s = max(0.0, self._owed_s - (leased - self._leased) * max(ANSWER_S, row_s))
        self._leased = leased

    def end(self, waited_s: float) -> None:
        """End a wait that lasted `waited_s` since `begin`."""
        self._owed_s += waited_s

    def is_over(self, waited_s: float, patience_s: float) -> bool:
        """Whether the answer ends."""
        return self._owed_s + waited_s > patience_s

    def replaces(self, waited_s: float, asked_s: float, *, replay_s: float, late_s: float, patience_s: float) -> bool:
        """Whether hops that have no room are to be replaced, if others can take their places.

        `asked_s`: since they were asked for so much, `replay_s`: what replacing them costs, `late_s`: how late event loops are.
        """
        least_s = min(patience_s / 2, max(FULL_S, replay_s))
        return asked_s >= ANSWER_S + late_s and self._owed_s + waited_s >= least_s
