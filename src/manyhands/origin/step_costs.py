"""What hops compute for steps of so many rows, and who shares them, by what hops say of each step. Pure.

A device step has the rows of all the windows in it, those of other requests and other origins too, and hops say how many. So
what a row costs is fitted over the rows of whole steps, and company is no disturbance of it.
"""

from collections.abc import Sequence
from itertools import repeat
from math import log2
from typing import NamedTuple

from manyhands.worker.batch import WINDOW_ROWS

_LEARN, _SLOWLY = 0.1, 0.05  # of a new value: who shares the steps; what a step takes
_FORGET = 0.95  # of the weight of older windows of others, at each new window
_FEW = 0.05  # windows of one row are assumed beside those of others that were seen: old ones come to count less
_FULL = 8.0  # steps after which a size is known as well as others
_LEAST_S = 1e-6  # hops count in microseconds
_FINE = 8  # sizes up to so many rows are told apart; beyond, four an octave


class DeviceStep(NamedTuple):
    """What a hop says of the device step that a window was in: `rows` and `windows` of all requests together (no windows: parts
    of prompts were in it too), and the `streams` that decode on the hop of late."""

    rows: int
    windows: int
    streams: int


class Timing(NamedTuple):
    """A window of `rows` rows came back; for which hops computed `compute_s`, one after another (none: they did not say), in
    steps with `company` and after waits of `queue_s`. `seconds` since it was sent, if nothing else was on its way then; else
    None."""

    rows: int
    seconds: float | None
    compute_s: tuple[float, ...] = ()
    queue_s: tuple[float, ...] = ()
    company: tuple[DeviceStep, ...] = ()


class _Size:
    """Steps of about as many rows, on one hop: mean rows and seconds."""

    def __init__(self) -> None:
        self.weight = self.rows = self.seconds = 0.0

    def note(self, rows: int, seconds: float) -> None:
        self.weight = min(_FULL, self.weight + 1)
        part = 1 / self.weight if self.weight < _FULL else _SLOWLY
        self.rows += part * (rows - self.rows)
        self.seconds += part * (max(_LEAST_S, seconds) - self.seconds)


class _Hop:
    """What one hop said."""

    def __init__(self) -> None:
        self.sizes: dict[int, _Size] = {}
        self.streams: float | None = None
        self._line: tuple[float, float] | None = 0.0, 0.0  # of a step and of each row; None: to be fitted

    @property
    def row_s(self) -> float:
        """What a further row takes."""
        return self._fitted()[1]

    @property
    def one_s(self) -> float:
        """What a step of one row takes."""
        return sum(self._fitted())

    def note(self, company: DeviceStep, seconds: float) -> None:
        rows = company.rows
        self.streams = _moved(self.streams, company.streams)
        if company.windows:
            key = rows if rows <= _FINE else _FINE + int(4 * log2(rows / _FINE))
            self.sizes.setdefault(key, _Size()).note(rows, seconds)
            self._line = None

    def _fitted(self) -> tuple[float, float]:
        """A line through the sizes by least squares of relative errors, for those of a step are in proportion to it."""
        if self._line is not None:
            return self._line
        w = x = y = xx = xy = 0.0
        for size in self.sizes.values():
            weight = size.weight / size.seconds**2
            w += weight
            x += weight * size.rows
            y += weight * size.seconds
            xx += weight * size.rows**2
            xy += weight * size.rows * size.seconds
        spread = w * xx - x * x
        row_s = max(0.0, (w * xy - x * y) / spread) if len(self.sizes) > 1 and spread > 0 else 0.0
        self._line = max(0.0, (y - row_s * x) / w), row_s
        return self._line


def _moved(estimate: float | None, value: float) -> float:
    return float(value) if estimate is None else estimate + _LEARN * (value - estimate)


class StepCosts:
    """What steps of a route cost, learnt by `note` from every window that came back."""

    def __init__(self) -> None:
        self._hops: list[_Hop] = []
        self._own_rows: float | None = None  # of a window
        self._others = (0.0, 0.0)  # rows and windows of others in the steps of ours

    def note(self, timing: Timing) -> None:
        """Where hops do not say what they computed, all of a round counts as that. What cannot be is taken for the nearest that
        can: a step has the rows of the window that was in it."""
        each_s = timing.compute_s or ((timing.seconds,) if timing.seconds is not None else ())
        if not each_s:
            return
        if len(each_s) != len(self._hops):  # the first, or the route was repaired
            self._hops = [_Hop() for _ in each_s]
        rows, alone = timing.rows, DeviceStep(timing.rows, 1, 1)
        self._own_rows = _moved(self._own_rows, rows)
        more_rows, more_windows = (_FORGET * each for each in self._others)
        for hop, seconds, said in zip(self._hops, each_s, timing.company or repeat(alone), strict=False):
            windows = min(said.windows, max(rows, said.rows) - rows + 1)
            hop.note(DeviceStep(max(rows, said.rows), windows, max(1, windows, said.streams)), seconds)
            if windows > 1:
                more_windows += windows - 1
                more_rows += min(said.rows - rows, (windows - 1) * WINDOW_ROWS)
        self._others = more_rows, more_windows

    @property
    def each_s(self) -> Sequence[float]:
        """What each hop computes in a step of one row."""
        return [hop.one_s for hop in self._hops]

    @property
    def row_s(self) -> float | None:
        """What a further row costs, on all hops together; None while one of them has computed steps of one size only."""
        if not self._hops or min(len(hop.sizes) for hop in self._hops) < 2:
            return None
        return sum(hop.row_s for hop in self._hops)

    def busiest(self, streams: int) -> tuple[float, float]:
        """Beside so many streams of ours: all the streams of the hop that has most to do, and how many there are for each hop
        that computes at the same time."""
        each_s = self.each_s
        if not any(each_s):
            return streams, streams
        load_s, on_it = max(
            (max(streams, hop.streams or 1) * one_s, max(streams, hop.streams or 1))
            for hop, one_s in zip(self._hops, each_s, strict=True)
        )
        return on_it, load_s / sum(each_s)

    def rows_of_others(self, streams: int, others: float) -> float:
        """What a window of other origins' `others` streams has, beside `streams` of ours, which share steps with each other."""
        rows, windows = self._others
        company = (streams - 1 + others) * (rows + _FEW) / (windows + _FEW)
        ours = (streams - 1) * (self._own_rows or 1.0)
        return min(float(WINDOW_ROWS), max(1.0, (company - ours) / others))
