"""How many drafts go behind those on their way: as many as pay by what was measured, none if none does. Pure.

With a_i the chance that guess i of a chain is right if all before it are, E(j) = 1 + a_1 + a_1 a_2 + ... the tokens that a
chain of j guesses is expected to yield until the first wrong one, and T(j) the seconds of a round over the route with j
guesses, drafts are added as long as they raise E / T (docs/speculation.md). T follows from what rounds took on this route
(route_costs.py); drafts that travel apart from the committed token cost a part of a step more. Where several streams share the
route, T is that of all of them with as many guesses: what is best for each then is best for all.

That is a model of the route, and may be wrong; so what it wins is measured too. When rounds with drafts have lost time against
rounds without, there are none for a while, and for twice as long each time (Trial).
"""

from collections.abc import Sequence
from itertools import accumulate
from operator import mul
from typing import NamedTuple

from manyhands.origin.route_costs import RouteCosts
from manyhands.origin.step_costs import Timing

MAX_AHEAD = 64  # guesses on their way at most
# What is assumed of drafts of a kind before anything was seen: copied ones by the length of the match that they rest on (from
# so many ids on), those of a model by their number in its chain.
_MATCHES = ((0, 0.3), (4, 0.5), (8, 0.7), (16, 0.85))
_MODEL = ((0, 0.6), (1, 0.6), (4, 0.6))
_PRIOR_WEIGHT = 3.0
_FORGET = 0.99  # of the weight of older outcomes, at each new one
_SHARE = 8.0  # a round takes at least so many drafts of a model, or none is made
_MARGIN = 1.1  # a draft must pay by a tenth: estimates are noisy
_PROBE = 2  # drafts of the first window with drafts over a route: what a row costs shows in its time


class Kind(NamedTuple):
    """Drafts that are right equally often: of a drafter, at a place."""

    drafter: str
    place: int


def copied(match: int) -> Kind:
    """A draft that rests on a match of so many ids."""
    return Kind("suffix", max(i for i, (least, _) in enumerate(_MATCHES) if match >= least))


def modelled(number: int) -> Kind:
    """The draft of a model with so many guesses before it in its chain."""
    return Kind("model", max(i for i, (least, _) in enumerate(_MODEL) if number >= least))


class Acceptance:
    """Chance that a draft of a kind is right. Shared by requests of an origin: text of one kind repeats alike.

    Where little was seen of a kind, it is taken to be like the kind before it: a chain that is right so far goes on being so,
    and a longer match is no worse than a shorter one.
    """

    def __init__(self) -> None:
        self._seen: dict[Kind, tuple[float, float]] = {}  # weight of those that were right, and of all

    def chance(self, kind: Kind) -> float:
        """By all that was seen of drafts of `kind`, old outcomes for less."""
        right, seen = self._seen.get(kind, (0.0, 0.0))
        return (_PRIOR_WEIGHT * self._prior(kind) + right) / (_PRIOR_WEIGHT + seen)

    def best(self, kinds: Sequence[Kind]) -> float | None:
        """The best chance of those of `kinds` that were seen, of all if none was; None without any."""
        return max(map(self.chance, [kind for kind in kinds if kind in self._seen] or kinds), default=None)

    def note(self, kind: Kind, is_right: bool) -> None:
        """A draft of `kind` was right or wrong. (One behind a wrong one says nothing.)"""
        right, seen = self._seen.get(kind, (0.0, 0.0))
        self._seen[kind] = right * _FORGET + is_right, seen * _FORGET + 1

    def _prior(self, kind: Kind) -> float:
        least = (_MATCHES if kind.drafter == "suffix" else _MODEL)[kind.place][1]
        if kind.place == 0:
            return least
        before = self.chance(kind._replace(place=kind.place - 1))
        return max(least, before) if kind.drafter == "suffix" else before


class Trial:
    """Whether rounds with drafts win time, as measured: the sum of what they lost, in rounds without. `pause` counts the rounds
    without that are left."""

    LIMIT, BANK = 3.0, 6.0  # lost rounds that end drafting; won ones that are remembered

    def __init__(self) -> None:
        self.pause = 0
        self._lost = 0.0
        self._failures = 0  # in a row

    def note(self, tokens: int, seconds: float, token_s: float) -> None:
        """A round with drafts yielded so many tokens; one without takes `token_s` and yields one."""
        self._lost = max(-self.BANK, self._lost + seconds / token_s - tokens)
        if self._lost > self.LIMIT:
            self._failures += 1
            self.pause = min(32 << self._failures, 4096)
            self._lost = 0.0
        elif self._lost <= -self.BANK:
            self._failures = 0


class Depth:
    """Decides for one request. Ask `begin` for each round and `choose` for drafts; tell `sent`, `learn` and `note` how it
    went.

    `costs`: of its route, shared with the requests that take it.
    """

    def __init__(self, costs: RouteCosts | None = None) -> None:
        self.costs = costs or RouteCosts()
        self.trial = Trial()
        self._has_drafts = False
        self._explores_s = 0.0  # what the drafts last chosen cost, if they are not known to pay

    def begin(self, streams: int = 1) -> bool:
        """A round begins, of one of so many streams on the route: whether it may carry drafts."""
        self._has_drafts = False
        if self.costs.token_s is None or self.costs.wants_plain(streams):
            return False
        if self.trial.pause:
            self.trial.pause -= 1
            return False
        return True

    def rest(self, rounds: int) -> None:
        """So many rounds follow that are to have no drafts and to teach nothing. They count in a pause."""
        self.trial.pause = max(0, self.trial.pause - rounds)

    def has_time_for(self, draft_s: float) -> bool:
        """Whether rounds are long enough for a model to draft in, at `draft_s` a draft (0: not known). It needs the cores that
        the round computes on, where both are one machine's, so that more than its own time is lost."""
        return self.costs.token_s is not None and _SHARE * draft_s <= self.costs.token_s

    def choose(
        self,
        ahead: Sequence[float],
        offered: Sequence[float],
        *,
        is_apart: bool,
        streams: int = 1,
        draft_s: float = 0.0,
    ) -> int:
        """How many of the drafts `offered` shall follow the guesses on their way `ahead` (both: chances to be right, each if
        all before it are). `is_apart`: as a step of their own. `streams` share the route. `draft_s`: what making one takes."""
        costs = self.costs
        if not costs.token_s or not offered:
            return 0
        if costs.row_s is None:
            return self._probe(ahead, offered) if draft_s < costs.token_s else 0
        offered = offered[: max(0, MAX_AHEAD - len(ahead))]
        tokens = list(accumulate(accumulate((*ahead, *offered), mul), initial=1.0))
        rounds, rows, apart_s = costs.shared(streams), 1 + len(ahead), costs.apart_s if is_apart else 0.0
        theirs = rounds.others / rounds.own * tokens[min(len(tokens), round(rounds.others_rows)) - 1]
        seconds, theirs_s = rounds.seconds(rows), rounds.others_seconds(rows)
        best, best_rate = 0, tokens[rows - 1] / seconds + theirs / theirs_s
        for taken in range(1, len(offered) + 1):
            cost_s = _MARGIN * (rounds.seconds(rows + taken) - seconds + apart_s + taken * draft_s)
            rate = tokens[rows + taken - 1] / (seconds + cost_s)
            if theirs:
                rate += theirs / (theirs_s + _MARGIN * (rounds.others_seconds(rows + taken) - theirs_s))
            if rate > best_rate:
                best, best_rate = taken, rate
        self._explores_s = 0.0
        one_s = _MARGIN * (costs.odd_row_s(streams) + draft_s)
        if offered and not best and not ahead and costs.may_explore(one_s):
            best, self._explores_s = 1, one_s  # what is not worth it may be by now
        return best

    def sent(self) -> None:
        """Drafts were sent as `choose` said, or fewer."""
        self._has_drafts = True
        if self.costs.row_s is None:
            self.costs.probes()
        else:
            self.costs.explores(self._explores_s)

    def _probe(self, ahead: Sequence[float], offered: Sequence[float]) -> int:
        """What a row costs is not known yet: a few find out, of one request at a time."""
        return 0 if ahead or not self.costs.may_probe() else min(_PROBE, len(offered))

    def note(self, tokens: int, seconds: float | None) -> None:
        """A round yielded `tokens` in `seconds` (None: it was disturbed)."""
        self.costs.rounds(self._has_drafts)
        token_s = self.costs.token_s
        if self._has_drafts and seconds is not None and token_s is not None and self.costs.row_s is not None:
            self.trial.note(tokens, seconds, token_s)

    def learn(self, timing: Timing) -> None:
        """A window came back."""
        self.costs.learn(timing)

    def verdict(self, chance: float | None) -> str:
        """Whether a draft that is right with `chance` pays, for people. None: there is nothing to draft with."""
        row_s, token_s = self.costs.row_s, self.costs.token_s
        if token_s is None:
            return "no window was timed yet"
        if row_s is None:
            return f"a round takes {1e3 * token_s:.1f} ms; there was nothing to draft on this route yet"
        told = f"one more row costs {1e3 * row_s:.1f} ms, a round {1e3 * token_s:.1f} ms"
        if self.trial.pause:
            return f"{told}: drafting was tried and did not pay"
        if chance is None:
            return told
        does = "pays" if chance * token_s > _MARGIN * row_s else "does not pay"
        return f"{told}, a draft is right in {chance:.0%}: drafting {does}"
