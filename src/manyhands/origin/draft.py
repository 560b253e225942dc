"""Drafters: what guesses the tokens that follow. A wrong guess costs time, never text (speculate.py). Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from manyhands.origin.depth import Acceptance, Depth


class Drafter(Protocol):
    """Guesses the continuation of one request's ids. Made for one request; any guess is safe."""

    def propose(self, ids: Sequence[int], most: int) -> Sequence[int]:
        """At most `most` guesses of what follows `ids` (prompt and committed tokens), possibly none.

        From call to call `ids` only grows.
        """

    def note(self, drawn: Sequence[int], seconds: float | None) -> None:
        """The window with the guesses last proposed drew these tokens, `seconds` after it was sent.

        None: it was disturbed, as by a repair, so the time says nothing.
        """

    @property
    def verdict(self) -> str:
        """Whether drafting pays in this request and why, for people."""


@dataclass(slots=True)
class Drafting:
    """What drafting did in one answer: `windows` traversals of the route, the drafts they carried, and those accepted.

    `verdict`: whether drafting pays and why, as of the last window.
    """

    windows: int = 0
    drafted: int = 0
    accepted: int = 0
    verdict: str = "off"

    @property
    def tokens_per_traversal(self) -> float | None:
        """Tokens that a traversal of the route yielded, None before the first."""
        return (self.windows + self.accepted) / self.windows if self.windows else None


class NoDrafter:
    """Never guesses."""

    verdict = "off"

    def propose(self, ids: Sequence[int], most: int) -> Sequence[int]:
        return ()

    def note(self, drawn: Sequence[int], seconds: float | None) -> None:
        return


class SuffixIndex:
    """Finds the longest suffix of a growing list of ids that occurred in it before.

    Positions with the same last MIN_MATCH ids are chained, newest first, as in LZ77 with hash chains (RFC 1951, 4); the
    newest CANDIDATES of a chain are compared backwards, up to LONGEST ids, and the longest match wins, of equals the
    newest. An id is indexed once. Memory: one integer an id and one entry for each distinct run of MIN_MATCH ids.
    """

    MIN_MATCH = 3
    CANDIDATES = 16
    LONGEST = 32

    def __init__(self) -> None:
        self._newest: dict[tuple[int, ...], int] = {}  # the last MIN_MATCH ids -> the newest position after them
        self._older: list[int] = []  # [position] -> the position before it in its chain, -1 at its end

    def find(self, ids: Sequence[int]) -> tuple[int, int]:
        """(position after the earlier occurrence, length of the match), or (-1, 0). `ids` begin with those given before."""
        end = len(ids)
        self._extend(ids)
        best, match, at = -1, 0, self._older[end]
        for _ in range(self.CANDIDATES):
            if at < 0 or match == self.LONGEST:
                break
            if (length := self._match(ids, at, end)) > match:
                best, match = at, length
            at = self._older[at]
        return best, match

    def _extend(self, ids: Sequence[int]) -> None:
        for end in range(len(self._older), len(ids) + 1):
            if end < self.MIN_MATCH:
                self._older.append(-1)
                continue
            run = tuple(ids[end - self.MIN_MATCH : end])
            self._older.append(self._newest.get(run, -1))
            self._newest[run] = end

    def _match(self, ids: Sequence[int], at: int, end: int) -> int:
        """How many ids before `at` equal those before `end`, up to LONGEST."""
        most, length = min(self.LONGEST, at), 0
        while length < most and ids[at - 1 - length] == ids[end - 1 - length]:
            length += 1
        return length


class SuffixDrafter:
    """Guesses that the longest suffix that occurred before goes on as it did then, as far as that pays (depth.py)."""

    def __init__(self, acceptance: Acceptance) -> None:
        self._index = SuffixIndex()
        self._depth = Depth(acceptance)
        self._proposed: Sequence[int] = ()
        self._matched = 0

    def propose(self, ids: Sequence[int], most: int) -> Sequence[int]:
        at, self._matched = self._index.find(ids)
        count = self._depth.choose(self._matched, most) if at >= 0 else 0
        period = max(1, len(ids) - at)  # a match that overlaps the end goes on from what it copied
        self._proposed = [ids[at + i % period] for i in range(count)]
        return self._proposed

    def note(self, drawn: Sequence[int], seconds: float | None) -> None:
        right = 0
        for guess, token in zip(self._proposed, drawn, strict=False):
            if guess != token:
                break
            right += 1
        self._depth.note(self._matched, len(self._proposed), right, seconds)

    @property
    def verdict(self) -> str:
        return self._depth.verdict
