"""What steps take on a route: a round without drafts, and each further row. Shared by the requests that take it. Pure.

Device steps that other requests share take longer, so what a row costs is judged by the least that was seen for each number of
rows; a least rises slowly, for a route may become slower. What a round takes when others share the route follows from that
(SharedRounds), for what is measured then depends on what the others do.
"""

from collections import OrderedDict
from collections.abc import Sequence
from math import inf, sqrt
from typing import NamedTuple

from manyhands.core import NodeId, Span
from manyhands.route.offer import Offer

_LEARN = 0.2  # of a new round's time in `token_s`
_RISE = 0.01  # by which a least time grows at each new one of its kind, of one stream; less where more share the steps
_COMPANY, _NOISE = 1.2, 0.1  # times what rows took in a shorter window, and of a step: more is not a window's own
_PLAIN_EVERY = 32  # rounds with drafts before one without, which keeps `token_s` true
_FLIGHT = (
    0.25  # of a round is computing at most where a round with drafts that follow is as good as one without, for that
)
_EXPLORE = 0.003  # of the time of rounds without drafts may go into single drafts that are not known to pay
_SHORT_S = 0.01  # rounds that take less, as on one machine, are short: what drafting does in each of them shows
_ASK_AGAIN = 32  # rounds after which a probe of which nothing came is made again
MAX_ROUTES = 64  # remembered


class Timing(NamedTuple):
    """A window of `rows` rows came back; for which hops computed `compute_s`, one after another (none: they did not say).
    `seconds` since it was sent, if nothing else was on its way then; else None."""

    rows: int
    seconds: float | None
    compute_s: tuple[float, ...] = ()


class _Least:
    """The least time seen for each number of rows, of each hop, and what a row costs by them: windows of other requests are
    rarely in the same step on all hops."""

    def __init__(self) -> None:
        self.of: dict[int, tuple[float, ...]] = {}

    def note(self, rows: int, each_s: tuple[float, ...], streams: int) -> None:
        known = self.of.get(rows)
        if known is None or len(known) != len(each_s):  # the route was repaired
            self.of[rows] = each_s
            return
        rise = 1 + _RISE / streams**2
        risen = [old * rise for old in known]
        self.of[rows] = tuple(map(min, risen, each_s))

    @property
    def one_s(self) -> float | None:
        """What a single row takes."""
        return sum(self.of[1]) if 1 in self.of else None

    @property
    def row_s(self) -> float | None:
        """By windows of several rows, each weighed by their number; None without one, or without one of a single row.

        What a long window takes far above what rows took in shorter ones (_COMPANY, _NOISE) is other requests': of many streams
        few long windows are sent, and none may have had its steps alone.
        """
        one_s, least_s, seconds, weight = self.one_s, inf, 0.0, 0
        if one_s is None or len(self.of) == 1:
            return None
        for rows, each in sorted(self.of.items())[1:]:
            more_s = sum(each) - one_s
            seconds += (rows - 1) * min(more_s, _COMPANY * (rows - 1) * least_s + _NOISE * one_s)
            weight += (rows - 1) ** 2
            least_s = max(0.0, min(least_s, more_s / (rows - 1)))
        return max(0.0, seconds / weight)


class SharedRounds(NamedTuple):
    """What a round takes that streams share, each with as many rows.

    Of one alone: `flight_s` on the way, and on all hops `fixed_s` for the steps and `row_s` for each row. Hops compute at the
    same time; `load` are the streams for each of them. Those that come while it computes wait, and share its next step: with
    U streams in a step and n rows of each, a round takes R = flight_s + C, of which all hops together compute
    C = fixed_s + U n row_s. In R a hop takes a step for every U streams, so R = load / U * C if it never rests: a quadratic
    equation for U.
    """

    flight_s: float
    fixed_s: float
    row_s: float
    load: float

    def seconds(self, rows: int) -> float:
        """Of a round in which each stream has so many rows."""
        alone_s, rows_s = self.flight_s + self.fixed_s, self.row_s * rows
        if self.load <= 1 or not rows_s:
            return alone_s + rows_s
        b = alone_s - self.load * rows_s
        together = (sqrt(b * b + 4 * rows_s * self.load * self.fixed_s) - b) / (2 * rows_s)
        return alone_s + rows_s * max(1.0, together)


class RouteCosts:
    """Learnt by `learn` from every window that came back, and `rounds` from every round."""

    def __init__(self) -> None:
        self.token_s: float | None = None  # a round without drafts
        self._computed, self._took = _Least(), _Least()
        self._budget_s = 0.0  # for drafts that are not known to pay
        self._drafting = 0  # rounds with drafts since one without
        self._streams = self._due = 0  # that share the route; timings of rounds without drafts that are to come first
        self._probed: int | None = None  # rounds since a probe

    @property
    def step_s(self) -> float:
        """What hops compute in a step of one row; 0 where they do not say."""
        return self._computed.one_s or 0.0

    @property
    def is_short(self) -> bool:
        """Whether a round takes so little that one without drafts is to cost nothing more."""
        one_s = self._took.one_s
        return one_s is not None and one_s < _SHORT_S

    @property
    def _stages(self) -> float:
        """Hops that compute at the same time, the busiest counted as one."""
        each_s = self._computed.of.get(1, ())
        return sum(each_s) / max(each_s) if any(each_s) else 1.0

    @property
    def row_s(self) -> float | None:
        """What one more row costs: by what hops say they computed, else by how long windows were on their way."""
        computed = self._computed.row_s
        return self._took.row_s if computed is None else computed

    @property
    def share(self) -> float:
        """The part of a round in which hops compute: so often does a step find a hop busy with another."""
        return min(1.0, self.step_s / self.token_s) if self.step_s and self.token_s else 1.0

    @property
    def apart_s(self) -> float:
        """What a step of their own costs drafts, for what finds a hop busy with it."""
        return self.share * (self.step_s or self.token_s or 0.0)

    def shared(self, streams: int) -> SharedRounds:
        """What rounds take, by what is known by now, where so many streams share the route."""
        took_s, row_s = self._took.one_s or self.token_s or 0.0, self.row_s or 0.0
        step_s = min(took_s, self.step_s or took_s)
        load = streams / self._stages if streams > 1 else 1.0
        return SharedRounds(took_s - step_s, max(0.0, step_s - row_s), row_s, load)

    def odd_row_s(self, streams: int) -> float:
        """What a row more of one of so many streams costs them all, while the others have none: those that find hops busy wait
        behind it, wherever it is."""
        busy = min(1.0, streams / self._stages * self.share)
        return (self.row_s or 0.0) * (1 + (streams - 1) * busy)

    def wants_plain(self, streams: int) -> bool:
        """Whether the round that begins is to have no drafts: more streams share the route than when it was timed, say."""
        if streams > self._streams:
            self._due = 2 * (streams - 1)
        self._streams = streams
        if self._drafting < _PLAIN_EVERY:
            return self._due > 0
        self._drafting = 0  # of one stream is enough
        return True

    def may_explore(self, cost_s: float) -> bool:
        """Whether a draft that will cost so much may be sent to see if it is right; what it costs has been saved up."""
        return self._budget_s >= cost_s

    def explores(self, cost_s: float) -> None:
        """A draft was sent to see if it is right."""
        self._budget_s -= cost_s

    def may_probe(self) -> bool:
        """Whether a window is to find out what a row costs: none is under way that does."""
        return self._probed is None or self._probed >= _ASK_AGAIN

    def probes(self) -> None:
        """A window with drafts was sent, and will show what a row costs."""
        self._probed = 0

    def rounds(self, has_drafts: bool) -> None:
        """A round is over."""
        self._drafting = self._drafting + 1 if has_drafts else 0
        if self.token_s and not has_drafts:
            self._budget_s = min(self._budget_s + _EXPLORE * self.token_s, 4 * self.token_s)
        if self._probed is not None:
            self._probed += 1

    def learn(self, timing: Timing) -> None:
        """A window came back."""
        streams = max(1, self._streams)
        if any(timing.compute_s):
            self._computed.note(timing.rows, timing.compute_s, streams)
        if timing.seconds is None:
            return
        self._took.note(timing.rows, (timing.seconds,), streams)
        if timing.rows == 1:
            self._due = max(0, self._due - 1)
            self.token_s = _moved(self.token_s, timing.seconds)
            if self._drafting and self.share <= _FLIGHT:  # drafts behind it have not delayed it
                self._drafting = 0


def _moved(estimate: float | None, seconds: float) -> float:
    return seconds if estimate is None else estimate + _LEARN * (seconds - estimate)


class CostsOfRoutes:
    """The costs of the routes that an origin used last."""

    def __init__(self) -> None:
        self._known: OrderedDict[tuple[tuple[NodeId, Span], ...], RouteCosts] = OrderedDict()

    def of(self, route: Sequence[Offer]) -> RouteCosts:
        """Those of a route of these nodes and spans; new ones if it is not among the last MAX_ROUTES."""
        key = tuple((offer.node, offer.info.span) for offer in route)
        costs = self._known.setdefault(key, RouteCosts())
        self._known.move_to_end(key)
        if len(self._known) > MAX_ROUTES:
            self._known.popitem(last=False)
        return costs
