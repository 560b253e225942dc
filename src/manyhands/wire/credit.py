"""Credits: how many Steps may be under way from one node to the next, in one session and epoch. Pure.

Both ends keep one `Credits` and count the same: the sender takes one for each Step it sends and gets back what a Credit
message says; the receiver takes one for each Step that arrives, and gets back what it pays. So a receiver can bound what it
has granted, and a Step for which it holds no credit was not sent by the rules.
"""

from typing import Final

# Steps computed before their credits go back together: at most half of all, so that the sender never waits for them.
BATCH: Final = 8


class Credits:
    """The credits of one direction between two nodes; `left` is what the sender may still send."""

    def __init__(self, granted: int) -> None:
        self.granted = self.left = granted
        self._owed = 0

    def __repr__(self) -> str:
        return f"<Credits {self.left} of {self.granted}, owed {self._owed}>"

    def take(self) -> bool:
        """A Step is sent, or has arrived. False if there was no credit for it."""
        if self.left < 1:
            return False
        self.left -= 1
        return True

    def give(self, steps: int) -> None:
        """The receiver says that it has done `steps` Steps. Never more than were granted is left, whatever it says."""
        self.left = min(self.granted, self.left + steps)

    def settle(self, steps: int = 1) -> int:
        """This receiver has done `steps` Steps: how many to pay back now, in batches (0: later, with others)."""
        self._owed += steps
        if self._owed < min(BATCH, self.granted // 2 or 1):
            return 0
        paid, self._owed = self._owed, 0
        self.give(paid)
        return paid
