"""Which rows a hop rounds to 8 bits before it sends them on (int8.py): of positions, whatever a step or a log makes of them."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Final

Ranges = tuple[tuple[int, int], ...]  # of positions [start, end), ascending

# A conversation has one for each turn that was rounded.
MAX_RANGES: Final = 32


@dataclass(frozen=True, slots=True)
class Rounding:
    """Rows of the positions `ranges` are rounded where they leave a hop; `if_slow`: only if the link that they leave by was
    measured to be slow as the session opens. Neither changes while the session lives."""

    ranges: Ranges
    if_slow: bool = False

    def __post_init__(self) -> None:
        ends = [0, *(position for each in self.ranges for position in each)]
        if len(self.ranges) > MAX_RANGES or any(a > b for a, b in pairwise(ends)):
            raise ValueError(f"{len(self.ranges)} ranges to round: at most {MAX_RANGES}, ascending, none over another")

    def within(self, position: int, count: int) -> Iterator[tuple[int, int]]:
        """Which of `count` rows from `position` on are rounded, as ranges of rows."""
        for start, end in self.ranges:
            first, last = max(0, start - position), min(count, end - position)
            if first < last:
                yield first, last

    def going_on(self, cached: int, until: int) -> "Rounding | None":
        """Of a session that begins with the first `cached` positions of one that was rounded so, and rounds up to `until`.

        None if it would have too many ranges.
        """
        before = tuple((start, min(end, cached)) for start, end in self.ranges if start < cached)
        if before and before[-1][1] == cached:
            (start, _), before = before[-1], before[:-1]
            cached = start
        return None if len(before) >= MAX_RANGES else replace(self, ranges=(*before, (cached, until)))
