"""How many drafts go behind those on their way: as many as pay by what was measured, none if none does. Pure.

With a_i the chance that guess i of a chain is right if all before it are, E(j) = 1 + a_1 + a_1 a_2 + ... the tokens that a
chain of j guesses is expected to yield until the first wrong one, and T(j) the seconds of a round over the route with j
guesses, drafts are added as long as they raise E / T (docs/speculation.md). T is a line through what rounds took: `token_s`
without guesses, `row_s` more for each; drafts that travel apart from the committed token cost a part of a step more. Where
several streams share the route, a row delays all those that find a hop busy with it.

That is a model of the route, and may be wrong; so what it wins is measured too. When rounds with drafts have lost time against
rounds without, there are none for a while, and for twice as long each time (Trial).
"""

from collections.abc import Sequence
from typing import NamedTuple

MAX_AHEAD = 64  # guesses on their way, whatever they are said to be worth
# What is assumed of drafts of a kind before anything was seen: copied ones by the length of the match that they rest on (from
# so many ids on), those of a model by their number in its chain.
_MATCHES = ((0, 0.3), (4, 0.5), (8, 0.7), (16, 0.85))
_MODEL = ((0, 0.5), (1, 0.5), (4, 0.5))
_PRIOR_WEIGHT = 3.0
_FORGET = 0.97  # of the weight of older outcomes, at each new one
_LEARN = 0.2  # of a new round's time in the estimates
_RISE = 1.02  # of the least time of a step, at each new one
_PRIOR_ROW_OF_STEP = 0.5  # of what hops compute in a step, until a window with drafts was timed; ...
_PRIOR_ROW = 0.1  # ... of token_s, where they do not say
_MARGIN = 1.1  # a draft must pay by a tenth: estimates are noisy
_EXPLORE_EVERY = 96  # rounds without drafts before one with a single one: what was not worth it may be by now
_PLAIN_EVERY = 32  # rounds with drafts before one without, which keeps `token_s` true


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


class Timing(NamedTuple):
    """A window of `rows` rows came back; hops computed for `compute_s` (0: they did not say). `seconds` since it was sent, if
    nothing else was on its way then; else None."""

    rows: int
    seconds: float | None
    compute_s: float


class Acceptance:
    """Chance that a draft of a kind is right. Shared by requests of an origin: text of one kind repeats alike."""

    def __init__(self) -> None:
        self._seen: dict[Kind, tuple[float, float]] = {}  # weight of those that were right, and of all

    def chance(self, kind: Kind) -> float:
        right, seen = self._of(kind)
        return right / seen

    def note(self, kind: Kind, is_right: bool) -> None:
        """A draft of `kind` was right or wrong. (One behind a wrong one says nothing.)"""
        right, seen = self._of(kind)
        prior = _prior(kind)
        self._seen[kind] = prior + (right - prior) * _FORGET + is_right, 1 + (seen - 1) * _FORGET + 1

    def _of(self, kind: Kind) -> tuple[float, float]:
        return self._seen.get(kind, (_PRIOR_WEIGHT * _prior(kind), _PRIOR_WEIGHT))


def _prior(kind: Kind) -> float:
    return (_MATCHES if kind.drafter == "suffix" else _MODEL)[kind.place][1]


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
    """Decides for one request. Ask `begin` for each round and `choose` for drafts; tell `learn` and `note` how it went."""

    def __init__(self) -> None:
        self.token_s: float | None = None  # a round without drafts
        self.step_s = 0.0  # what hops compute in a step of one row
        self._computed_s: float | None = None  # what they compute more for each further row
        self._took_s: float | None = None  # how much longer a window is on its way for each further row
        self.trial = Trial()
        self._drafting = 0  # rounds with drafts since one without
        self._idle = 0  # rounds without since one with
        self._has_drafts = False

    @property
    def _knows_rows(self) -> bool:
        return self._computed_s is not None or self._took_s is not None

    @property
    def row_s(self) -> float:
        """What one more row is believed to cost."""
        known = [cost for cost in (self._computed_s, self._took_s) if cost is not None]
        if known:
            return max(0.0, *known)
        return _PRIOR_ROW_OF_STEP * self.step_s or _PRIOR_ROW * (self.token_s or 0.0)

    def begin(self) -> bool:
        """A round begins: whether it may carry drafts."""
        self._has_drafts = False
        if self.token_s is None or self._drafting >= _PLAIN_EVERY:
            self._drafting = 0
            return False
        if self.trial.pause:
            self.trial.pause -= 1
            return False
        return True

    def choose(self, ahead: Sequence[float], offered: Sequence[float], *, is_apart: bool, streams: int = 1) -> int:
        """How many of the drafts `offered` shall follow the guesses on their way `ahead` (both: chances to be right, each if
        all before it are). `is_apart`: as a step of their own. `streams` share the route."""
        if not self.token_s:
            return 0
        row_s, chance, tokens = self.row_s, 1.0, 1.0
        for each in ahead:
            chance *= each
            tokens += chance
        seconds = self.token_s + row_s * len(ahead)
        best, best_rate = 0, tokens / seconds
        cost = _MARGIN * self._apart_s if is_apart else 0.0
        row_cost_s = _MARGIN * row_s * (1 + (streams - 1) * min(1.0, streams * self._share))
        most = MAX_AHEAD if self._knows_rows else 1
        for taken, each in enumerate(offered[: max(0, most - len(ahead))], 1):
            chance *= each
            tokens += chance
            cost += row_cost_s
            if tokens / (seconds + cost) > best_rate:
                best, best_rate = taken, tokens / (seconds + cost)
        if offered and self._idle >= _EXPLORE_EVERY:
            best = max(best, 1)
        self._has_drafts |= best > 0
        return best

    @property
    def _share(self) -> float:
        """The part of a round in which hops compute: so often does a step find a hop busy with another."""
        return self.step_s / self.token_s if self.step_s and self.token_s else 1.0

    @property
    def _apart_s(self) -> float:
        """What a step of their own costs drafts, for what finds a hop busy with it."""
        return self._share * (self.step_s or self.token_s or 0.0)

    def note(self, tokens: int, seconds: float | None) -> None:
        """A round yielded `tokens` in `seconds` (None: it was disturbed)."""
        self._drafting += self._has_drafts
        self._idle = 0 if self._has_drafts else self._idle + 1
        if self._has_drafts and seconds is not None and self.token_s is not None:
            self.trial.note(tokens, seconds, self.token_s)

    def learn(self, timing: Timing) -> None:
        """A window came back."""
        more = timing.rows - 1
        if more == 0 and timing.seconds is not None:
            self.token_s = _moved(self.token_s, timing.seconds)
            least_s = min(timing.compute_s, timing.seconds)  # less company in a step than in this one there may be
            self.step_s = min(self.step_s * _RISE, least_s) if self.step_s else least_s
        elif more > 0 and self.token_s is not None:
            if timing.compute_s and self.step_s:
                self._computed_s = _moved(self._computed_s, (timing.compute_s - self.step_s) / more)
            if timing.seconds is not None:
                self._took_s = _moved(self._took_s, (timing.seconds - self.token_s) / more)

    def verdict(self, chance: float) -> str:
        """Whether a draft that is right with `chance` pays, for people."""
        if self.token_s is None:
            return "no window was timed yet"
        row_s, token_s = self.row_s, self.token_s
        told = f"one more row costs {1e3 * row_s:.1f} ms, a round {1e3 * token_s:.1f} ms"
        if self.trial.pause:
            return f"{told}: drafting was tried and did not pay"
        does = "pays" if chance * token_s > _MARGIN * row_s else "does not pay"
        return f"{told}, a draft is right in {chance:.0%}: drafting {does}"


def _moved(estimate: float | None, seconds: float) -> float:
    return seconds if estimate is None else estimate + _LEARN * (seconds - estimate)
