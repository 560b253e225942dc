"""How many drafts a window carries: as many as pay by what was measured, none if none does. Pure; time is an argument.

With a_i the chance that draft i is accepted if all before it were, E(j) = 1 + a_1 + a_1 a_2 + ... the tokens that a window
of j drafts is expected to yield, and T(j) the seconds it takes, draft j + 1 is added iff

    a_1 ... a_(j+1) * T(j) > (T(j+1) - T(j)) * E(j)

that is, iff it raises E / T (docs/speculation.md). T is a line through what windows took: `token_s` without drafts, `row_s`
more for each. Both follow the machine: older windows count less and less. Acceptance is learnt by the length of the match
that a draft rests on (draft i of a match of m ids counts as one of m + i - 1).
"""

MAX_DRAFTS = 15  # a window is decode work for a hop up to 16 rows (worker/batch.py:WINDOW_ROWS)
# Lower bounds of the match lengths that share one acceptance, with what is assumed of them before anything was seen.
_MATCHES = ((0, 0.3), (4, 0.5), (8, 0.7), (16, 0.85))
_PRIOR_WEIGHT = 3.0
_FORGET = 0.97  # of the weight of older outcomes, at each new one
_LEARN = 0.2  # of a new window's time in the estimates
_PRIOR_ROW = 0.1  # of token_s, until a window with drafts was timed
_MARGIN = 1.1  # a draft must pay by a tenth: estimates are noisy
_PLAIN_EVERY = 32  # windows with drafts before one without, which keeps `token_s` true


class Acceptance:
    """Chance that one draft is accepted, by match length. Shared by requests of an origin: text of one kind repeats alike."""

    def __init__(self) -> None:
        self._right = [_PRIOR_WEIGHT * prior for _, prior in _MATCHES]
        self._seen = [_PRIOR_WEIGHT] * len(_MATCHES)

    def chance(self, match: int) -> float:
        index = self._index(match)
        return self._right[index] / self._seen[index]

    def note(self, match: int, drafted: int, accepted: int) -> None:
        """Of `drafted` drafts resting on `match` ids the first `accepted` were right; those behind a wrong one say nothing."""
        for number in range(min(drafted, accepted + 1)):
            index = self._index(match + number)
            prior = _MATCHES[index][1]
            self._right[index] = prior + (self._right[index] - prior) * _FORGET + (number < accepted)
            self._seen[index] = 1 + (self._seen[index] - 1) * _FORGET + 1

    @staticmethod
    def _index(match: int) -> int:
        return max(index for index, (least, _) in enumerate(_MATCHES) if match >= least)


class Depth:
    """Decides for one request's windows. Ask `choose` for each, tell `note` how it went."""

    def __init__(self, acceptance: Acceptance) -> None:
        self.acceptance = acceptance
        self.token_s: float | None = None  # a window without drafts
        self.row_s: float | None = None  # each draft beside it
        self._drafting = 0  # windows with drafts since one without

    def choose(self, match: int, most: int) -> int:
        """How many of `most` drafts that rest on `match` ids shall go into the next window."""
        if self.token_s is None or self._drafting >= _PLAIN_EVERY:
            return 0
        row_s = _PRIOR_ROW * self.token_s if self.row_s is None else self.row_s
        taken, chance, tokens, seconds = 0, 1.0, 1.0, self.token_s
        while taken < min(most, MAX_DRAFTS):
            chance *= self.acceptance.chance(match + taken)
            if chance * seconds <= _MARGIN * row_s * tokens:
                break
            taken, tokens, seconds = taken + 1, tokens + chance, seconds + row_s
        return taken

    def note(self, match: int, drafted: int, accepted: int, seconds: float | None) -> None:
        """A window of `drafted` drafts came back after `seconds` (None: disturbed, as by a repair), `accepted` right."""
        self._drafting = self._drafting + 1 if drafted else 0
        if drafted:
            self.acceptance.note(match, drafted, accepted)
        if seconds is None:
            return
        if not drafted:
            self.token_s = _moved(self.token_s, seconds)
        elif self.token_s is not None:
            self.row_s = _moved(self.row_s, max(0.0, seconds - self.token_s) / drafted)

    @property
    def verdict(self) -> str:
        """Why the next window of a fresh match would carry drafts or none, for people."""
        if self.token_s is None:
            return "no window was timed yet"
        row_s = _PRIOR_ROW * self.token_s if self.row_s is None else self.row_s
        told = f"one more row costs {1e3 * row_s:.1f} ms of {1e3 * self.token_s:.1f} ms a token"
        chance = self.acceptance.chance(0)
        does = "pays" if chance * self.token_s > _MARGIN * row_s else "does not pay"
        return f"{told}, a draft is right in {chance:.0%}: drafting {does}"


def _moved(estimate: float | None, seconds: float) -> float:
    return seconds if estimate is None else estimate + _LEARN * (seconds - estimate)
