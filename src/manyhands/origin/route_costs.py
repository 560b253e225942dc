"""What rounds take on a route: one without drafts, and each further row. Shared by the requests that take it. Pure.

What a round takes when others share the route follows from what steps cost and who shares them (step_costs.py, SharedRounds),
for what is measured then depends on what the others do.
"""

from collections import OrderedDict
from collections.abc import Sequence
from math import sqrt
from typing import NamedTuple

from manyhands.core import NodeId, Span
from manyhands.origin.step_costs import StepCosts, Timing
from manyhands.route.offer import Offer

_LEARN = 0.2  # of a new round's time in `token_s`
_RISE = 0.01  # by which a least time grows at each new one, for a route may become slower
_FEW = 0.5  # streams of others: fewer are none
_PLAIN_EVERY = 32  # rounds with drafts before one without, which keeps `token_s` true
_FLIGHT = (
    0.25  # of a round is computing at most where a round with drafts that follow is as good as one without, for that
)
_EXPLORE = 0.003  # of the time of rounds without drafts may go into single drafts that are not known to pay
_SHORT_S = 0.01  # rounds that take less, as on one machine, are short: what drafting does in each of them shows
_ASK_AGAIN = 32  # rounds after which a probe of which nothing came is made again
MAX_ROUTES = 64  # remembered


class SharedRounds(NamedTuple):
    """What a round takes that streams share, each with as many rows.

    Of one alone: `flight_s` on the way, and on all hops `fixed_s` for the steps and `row_s` for each row. Hops compute at the
    same time; `load` are the streams for each of them. Those that come while it computes wait, and share its next step: with
    U streams in a step and n rows of each, a round takes R = flight_s + C, of which all hops together compute
    C = fixed_s + U n row_s. In R a hop takes a step for every U streams, so R = load / U * C if it never rests: a quadratic
    equation for U.

    `others` streams, of windows of `others_rows` rows, are other origins' beside `own` of ours. n is the mean of all then, and
    no round is shorter than one alone. Steps are served in turn, so where hops never rest one of ours with
    fewer rows takes as long as the others; where they do, it waits behind those as often as it finds a hop busy, and a row
    more costs it something.
    """

    flight_s: float
    fixed_s: float
    row_s: float
    load: float
    own: int = 1
    others: float = 0.0
    others_rows: float = 1.0

    def seconds(self, rows: int) -> float:
        """How long a round takes in which each stream of ours has `rows` rows."""
        mean = self._mean(rows)
        together = self._together(mean)
        all_s = self._alone(mean * together)
        busy = min(1.0, self.load / together * (1 - self.flight_s / all_s)) if all_s else 1.0
        return max(self._alone(rows), all_s - (1 - busy) * self.row_s * max(0.0, mean - rows))

    def others_seconds(self, rows: int) -> float:
        """How long a round of other origins' streams takes meanwhile."""
        mean = self._mean(rows)
        return self._alone(max(self.others_rows, mean * self._together(mean)))

    def _alone(self, rows: float) -> float:
        return self.flight_s + self.fixed_s + self.row_s * rows

    def _mean(self, rows: int) -> float:
        return (self.own * rows + self.others * self.others_rows) / (self.own + self.others)

    def _together(self, mean: float) -> float:
        """U, for windows of so many rows."""
        rows_s = self.row_s * mean
        if self.load <= 1 or not rows_s:
            return 1.0
        b = self.flight_s + self.fixed_s - self.load * rows_s
        return max(1.0, (sqrt(b * b + 4 * rows_s * self.load * self.fixed_s) - b) / (2 * rows_s))


class RouteCosts:
    """Learnt by `learn` from every window that came back, and `rounds` from every round."""

    def __init__(self) -> None:
        self.token_s: float | None = None  # a round without drafts
        self._steps = StepCosts()
        self._least_s: float | None = None  # of rounds of one row
        self._flight_s: float | None = None  # the least that a round was neither computed nor waiting for a hop
        self._budget_s = 0.0  # for drafts that are not known to pay
        self._drafting = 0  # rounds with drafts since one without
        self._streams = self._due = 0  # that share the route; timings of rounds without drafts that are to come first
        self._probed: int | None = None  # rounds since a probe

    @property
    def step_s(self) -> float:
        """What hops compute in a step of one row; all of a round where they do not say."""
        return sum(self._steps.each_s)

    @property
    def is_short(self) -> bool:
        """Whether a round takes so little that one without drafts is to cost nothing more."""
        return self._least_s is not None and self._least_s < _SHORT_S

    @property
    def row_s(self) -> float | None:
        """What one more row costs; None if that is not known yet."""
        return self._steps.row_s

    @property
    def share(self) -> float:
        """The part of a round in which hops compute: so often does a step find a hop busy with another."""
        return min(1.0, self.step_s / self.token_s) if self.step_s and self.token_s else 1.0

    @property
    def apart_s(self) -> float:
        """What a step of their own costs drafts, for what finds a hop busy with it."""
        return self.share * (self.step_s or self.token_s or 0.0)

    def shared(self, streams: int) -> SharedRounds:
        """What rounds take, by what is known by now, where so many streams of ours share the route."""
        row_s, (on_it, load) = self.row_s or 0.0, self._steps.busiest(streams)
        rounds = SharedRounds(self._flight_s or 0.0, max(0.0, self.step_s - row_s), row_s, load, streams)
        others = on_it - streams
        if others < _FEW:
            return rounds
        return rounds._replace(others=others, others_rows=self._steps.rows_of_others(streams, others))

    def odd_row_s(self, streams: int) -> float:
        """What a row more of one of so many streams costs them all, and others beside them, while those have none: who finds
        hops busy waits behind it, wherever it is."""
        on_it, load = self._steps.busiest(streams)
        return (self.row_s or 0.0) * (1 + (on_it - 1) * min(1.0, load * self.share))

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
        self._steps.note(timing)
        if timing.seconds is None:
            return
        flight_s = timing.seconds - sum(timing.compute_s or (timing.seconds,)) - sum(timing.queue_s)
        self._flight_s = _least(self._flight_s, max(0.0, flight_s))
        if timing.rows == 1:
            self._least_s = _least(self._least_s, timing.seconds)
            self._due = max(0, self._due - 1)
            self.token_s = _moved(self.token_s, timing.seconds)
            if self._drafting and self.share <= _FLIGHT:  # drafts behind it have not delayed it
                self._drafting = 0


def _moved(estimate: float | None, seconds: float) -> float:
    return seconds if estimate is None else estimate + _LEARN * (seconds - estimate)


def _least(known: float | None, seconds: float) -> float:
    return seconds if known is None else min(known * (1 + _RISE), seconds)


class CostsOfRoutes:
    """The costs of the routes that an origin used last."""

    def __init__(self) -> None:
        self._known: OrderedDict[tuple[tuple[NodeId, Span], ...], RouteCosts] = OrderedDict()

    def of(self, route: Sequence[Offer]) -> RouteCosts:
        """The costs of a route of these nodes and spans; new ones if it is not among the last MAX_ROUTES."""
        key = tuple((offer.node, offer.info.span) for offer in route)
        costs = self._known.setdefault(key, RouteCosts())
        self._known.move_to_end(key)
        if len(self._known) > MAX_ROUTES:
            self._known.popitem(last=False)
        return costs
