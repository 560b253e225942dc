"""Guessed tokens: the chain of what is known and what is guessed behind it, and the verification of guesses. Pure.

    ledger (committed) ─ guessed (on their way, right or not) ─ drafts (to be sent)

Plain decoding is a chain without guesses.
"""

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from manyhands.origin.sampler import Drawn, Sampler


class Judged(NamedTuple):
    """What tokens that came back said of the guesses: the first `right` were right; `is_dead`: the next one was wrong, so
    that all behind it are void and what is on its way is of no use."""

    right: int
    is_dead: bool


class GuessChain:
    """The ids of one request: `ledger` is committed, `guessed` follows it and is on its way.

    `sent`: how many ids of both have been sent. The one id that is committed and not sent begins the next window.
    """

    def __init__(self, prompt: Sequence[int]) -> None:
        self.ledger: list[int] = list(prompt)
        self.guessed: list[int] = []
        self.sent = 0
        self._ends: deque[int] = deque()  # of windows on their way, in order

    def __len__(self) -> int:
        return len(self.ledger) + len(self.guessed)

    @property
    def windows(self) -> int:
        """Windows on their way whose rows have not all come back."""
        while self._ends and self._ends[0] < len(self.ledger):
            self._ends.popleft()
        return len(self._ends)

    def from_position(self, start: int) -> list[int]:
        """All ids from position `start` on, guesses too."""
        if start < len(self.ledger):
            return self.ledger[start:] + self.guessed
        return self.guessed[start - len(self.ledger) :]

    def commit(self, drawn: Sequence[int]) -> Judged:
        """Append drawn tokens, at most one more than there are guesses."""
        right = 0
        while right < min(len(drawn), len(self.guessed)) and drawn[right] == self.guessed[right]:
            right += 1
        self.ledger.extend(drawn)
        is_dead = right < len(drawn) and right < len(self.guessed)
        del self.guessed[:right]
        if right < len(drawn):  # a token that nothing was sent for
            self.guessed.clear()
            self._ends.clear()
            self.sent = len(self.ledger) - 1
        return Judged(right, is_dead)

    def extend(self, drafts: Sequence[int]) -> tuple[int, list[int]]:
        """Guess `drafts` behind the rest; what is to be sent now: its first position, and the ids (perhaps none)."""
        self.guessed.extend(drafts)
        position, ids = self.sent, self.from_position(self.sent)
        if ids:
            self.sent = len(self)
            self._ends.append(self.sent)
        return position, ids

    def resend(self, most: int) -> None:
        """All of it, but no more than the first `most` ids, is sent again, as one window."""
        self.sent = min(most, len(self))
        self._ends.clear()
        self._ends.append(self.sent)


def verify(
    sampler: Sampler, logits_TV: NDArray[np.float32], ids: Sequence[int], drafts: Sequence[int], prompt_length: int
) -> list[Drawn]:
    """Draw the tokens that follow `ids`, one per row of logits, as far as the drafts were right.

    Row 0 holds the logits after the last of `ids`, row i those after draft i - 1. A draft is accepted iff it is the very
    token drawn (docs/exactness.md), so the result is what decoding one by one would give: at least one token, at most
    len(drafts) + 1.
    """
    drawn: list[Drawn] = []
    history = list(ids)
    for row in range(logits_TV.shape[0]):
        drawn.append(sampler.draw(logits_TV[row], len(history), history, prompt_length))
        if row >= len(drafts) or drafts[row] != drawn[-1].token:
            break
        history.append(drawn[-1].token)
    return drawn
