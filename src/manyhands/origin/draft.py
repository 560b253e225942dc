"""Drafters: what guesses the tokens that follow. A wrong guess costs time, never text (speculate.py)."""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import NamedTuple, Protocol

from manyhands.origin.depth import MAX_AHEAD, Acceptance, Depth, Kind, copied, modelled
from manyhands.origin.route_costs import RouteCosts
from manyhands.origin.step_costs import Timing

# Once the first rows of a round have come back, the others are about to. Where the guesses on their way are all right with less
# than this chance, drafts behind them wait for those rows: most would be void before a hop computed them.
LIKELY = 0.2
# Where rounds are short (RouteCosts.is_short), to look for drafts and to learn what a round took costs up to 3 % of it.
# After so many rounds in a row without drafts, one in as many does so.
PATIENCE = 8


class Returned(NamedTuple):
    """What came back at the time `now`: `tokens` committed, so many of them guessed right (`right`).

    `is_dead`: the next guess was wrong. `timing` is that of the window they were in, None if unknown. `is_disturbed`: the
    route was repaired meanwhile, so that times say nothing.
    """

    tokens: int
    right: int
    is_dead: bool
    timing: Timing | None
    is_disturbed: bool
    now: float


@dataclass(slots=True)
class DraftTally:
    """Drafts of one drafter."""

    drafted: int = 0
    accepted: int = 0


class Drafter(Protocol):
    """Guesses the continuation of one request's ids. Made for one request; any guess is safe."""

    tallies: Mapping[str, DraftTally]  # by drafter

    def begin(self, ids: Sequence[int], wake: Callable[[], None]) -> None:
        """The request begins with `ids`, which are on their way over the route. On its event loop, where `wake` is to be called
        when drafts have become ready."""

    def propose(self, ids: Sequence[int], guessed: Sequence[int], most: int) -> Sequence[int]:
        """At most `most` guesses of what follows `ids` (prompt and committed tokens) and then `guessed`, guesses that are on
        their way already. Possibly none.

        From call to call `ids` only grows.
        """

    def note(self, outcome: Returned) -> None:
        """Tokens came back."""

    def close(self) -> None:
        """The request has ended."""

    @property
    def verdict(self) -> str:
        """Whether drafting pays in this request and why, for people."""


@dataclass(slots=True)
class Drafting:
    """What drafting did in one answer: `windows` traversals of the route and the `tokens` that they yielded, the drafts sent
    and those accepted, in all and by drafter, and the most that were on their way at once (`depth`).

    `verdict`: whether drafting pays and why, as of the last window.
    """

    windows: int = 0
    tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    depth: int = 0
    drafters: Mapping[str, DraftTally] = field(default_factory=dict)
    verdict: str = "off"

    @property
    def tokens_per_traversal(self) -> float | None:
        """Tokens that a traversal of the route yielded, None before the first."""
        return self.tokens / self.windows if self.windows else None


class NoDrafter:
    """Never guesses."""

    def __init__(self) -> None:
        self.tallies: Mapping[str, DraftTally] = {}
        self.verdict = "off"

    def begin(self, ids: Sequence[int], wake: Callable[[], None]) -> None:
        return

    def propose(self, ids: Sequence[int], guessed: Sequence[int], most: int) -> Sequence[int]:
        return ()

    def note(self, outcome: Returned) -> None:
        return

    def close(self) -> None:
        return


class SuffixIndex:
    """Finds the longest suffix of a growing list of ids that occurred in it before.

    Positions with the same last MIN_MATCH ids are chained, newest first, as in LZ77 with hash chains (RFC 1951, 4); the
    newest CANDIDATES of a chain are compared backwards, up to LONGEST ids, and the longest match wins, of equals the
    newest. An id is indexed once, AT_ONCE of them at each call (some milliseconds of an event loop): behind a long prompt
    nothing is found at first. Memory: one integer an id and one entry for each distinct run of MIN_MATCH ids.
    """

    MIN_MATCH = 3
    CANDIDATES = 16
    LONGEST = 32
    AT_ONCE = 8192

    def __init__(self) -> None:
        self._newest: dict[tuple[int, ...], int] = {}  # the last MIN_MATCH ids -> the newest position after them
        self._older: list[int] = []  # [position] -> the position before it in its chain, -1 at its end

    def find(self, ids: Sequence[int]) -> tuple[int, int]:
        """(position after the earlier occurrence, length of the match), or (-1, 0). `ids` begin with those given before."""
        end = len(ids)
        self.extend(ids)
        if len(self._older) <= end:
            return -1, 0
        best, match, at = -1, 0, self._older[end]
        for _ in range(self.CANDIDATES):
            if at < 0 or match == self.LONGEST:
                break
            if (length := self._match(ids, at, end)) > match:
                best, match = at, length
            at = self._older[at]
        return best, match

    def extend(self, ids: Sequence[int]) -> None:
        """Index what is new of `ids`, AT_ONCE at most."""
        begins = len(self._older)
        newest, older = self._newest, self._older
        for end in range(begins, min(begins + self.AT_ONCE, len(ids)) + 1):
            if end < self.MIN_MATCH:
                older.append(-1)
                continue
            run = tuple(ids[end - self.MIN_MATCH : end])
            older.append(newest.get(run, -1))
            newest[run] = end

    def _match(self, ids: Sequence[int], at: int, end: int) -> int:
        """How many ids before `at` equal those before `end`, up to LONGEST."""
        most, length = min(self.LONGEST, at), 0
        while length < most and ids[at - 1 - length] == ids[end - 1 - length]:
            length += 1
        return length


class ModelSource(Protocol):
    """Drafts of one request by a model (draft_model.py). Its calls never wait."""

    @property
    def trouble(self) -> str:
        """Why it drafts no more; "" if it does."""

    @property
    def draft_s(self) -> float:
        """What a draft of it takes, its wait for others' drafts included; 0 while that is not known."""

    def begin(self, wake: Callable[[], None]) -> None:
        """The request begins; `wake` as in Drafter.begin."""

    def restart(self, ids: Sequence[int]) -> None:
        """A round begins: from now on guess what follows `ids`. What was guessed before stays if it still fits."""

    def take(self, start: int, most: int, wanted: int) -> Sequence[int]:
        """Guesses from position `start` on, at most `most` and as many as are ready; make ready as many as `wanted`."""

    def close(self) -> None:
        """As Drafter.close."""


class AutoDrafter:
    """Each round copies what followed the longest suffix that occurred before, or takes what a model guesses: what is likelier
    to be right, and as far as it pays (depth.py). Without `model` or `copies`, only the other.

    `streams` says how many requests share the route.
    """

    def __init__(
        self,
        acceptance: Acceptance,
        *,
        model: ModelSource | None = None,
        copies: bool = True,
        streams: Callable[[], int] = lambda: 1,
    ) -> None:
        self._acceptance, self._model, self._copies, self._streams = acceptance, model, copies, streams
        self._index, self._depth = SuffixIndex(), Depth()
        self._tallies: dict[str, DraftTally] = {}
        self.tallies: Mapping[str, DraftTally] = self._tallies
        self._ahead: deque[Kind] = deque()  # of the guesses on their way
        self._source = ""  # of this round: suffix, model, or none
        self._at = self._base = self._matched = (
            0  # ids from _at on are copied to _base and on, for a match of so many ids
        )
        self._is_new = True
        self._fruitless = 0  # rounds without drafts since one with
        self._rests = 0  # rounds to come that do not look for any
        self._tokens, self._began_at = 0, 0.0  # of this round
        self._is_disturbed = True  # the prompt is read in the first

    @property
    def verdict(self) -> str:
        kinds, model, more = [copied(0)] if self._copies else [], self._model, ""
        if model is not None and model.trouble:
            more = f"; the model drafter is off: {model.trouble}"
        elif model is not None and model.draft_s and not self._depth.has_time_for(model.draft_s):
            more = f"; the model drafter rests: a draft takes {1e3 * model.draft_s:.1f} ms, too long for such rounds"
        elif model is not None:
            kinds.append(modelled(0))
        return self._depth.verdict(self._acceptance.best(kinds)) + more

    def share(self, costs: RouteCosts) -> None:
        """Before it begins: learn and use what is known of the route, with the other requests on it."""
        self._depth.costs = costs

    def begin(self, ids: Sequence[int], wake: Callable[[], None]) -> None:
        if self._model is not None:
            self._model.begin(wake)
        if self._copies:
            self._index.extend(ids)

    def close(self) -> None:
        if self._model is not None:
            self._model.close()

    def propose(self, ids: Sequence[int], guessed: Sequence[int], most: int) -> Sequence[int]:
        if self._rests:
            return ()
        is_head, self._is_new = self._is_new, False  # drafts travel with the committed token
        if is_head:
            self._begin_round(ids)
        if not self._source:
            return ()
        ahead = [self._acceptance.chance(kind) for kind in self._ahead]
        if self._tokens and prod(ahead) < LIKELY:
            return ()
        count = len(ids) + len(guessed)
        if self._source == "suffix":
            kinds = [copied(self._matched + count - self._base + i) for i in range(most)]
            taken = self._choose(ahead, kinds, is_apart=not is_head)
            period = max(1, self._base - self._at)  # a match that overlaps the end goes on from what it copied
            drafts: Sequence[int] = [ids[self._at + (count + i - self._base) % period] for i in range(taken)]
        else:
            assert self._model is not None, "it is the source"
            kinds = [modelled(len(guessed) + i) for i in range(MAX_AHEAD)]
            wanted = self._choose(ahead, kinds, is_apart=not is_head)
            drafts = self._model.take(count, min(most, wanted), wanted) if wanted else ()
        self._ahead.extend(kinds[: len(drafts)])
        if drafts:
            self._fruitless = 0
            self._depth.sent()
            self._tallies.setdefault(self._source, DraftTally()).drafted += len(drafts)
        return drafts

    def _choose(self, ahead: Sequence[float], kinds: Sequence[Kind], *, is_apart: bool) -> int:
        known = {kind: self._acceptance.chance(kind) for kind in set(kinds)}
        chances = [known[kind] for kind in kinds]
        draft_s = self._model.draft_s if self._model is not None and self._source == "model" else 0.0
        return self._depth.choose(ahead, chances, is_apart=is_apart, streams=self._streams(), draft_s=draft_s)

    def _begin_round(self, ids: Sequence[int]) -> None:
        """Choose the source of a round that begins with a token that was not guessed."""
        self._ahead.clear()
        self._source = ""
        self._fruitless += 1
        if not self._depth.begin(self._streams()):
            return
        self._at, self._matched = self._index.find(ids) if self._copies else (-1, 0)
        self._base = len(ids)
        copy = self._acceptance.chance(copied(self._matched)) if self._at >= 0 else 0.0
        model = self._model
        can = model is not None and self._depth.has_time_for(model.draft_s) and not model.trouble
        guess = self._acceptance.chance(modelled(0)) if can else 0.0
        if copy > 0 and copy >= guess:
            self._source = "suffix"
        elif model is not None and guess > 0:
            self._source = "model"
            model.restart(ids)

    def note(self, outcome: Returned) -> None:
        if self._rests:
            self._rests, self._began_at = self._rests - 1, outcome.now
            return
        for number in range(min(len(self._ahead), outcome.right + outcome.is_dead)):
            kind = self._ahead.popleft()
            self._acceptance.note(kind, number < outcome.right)
            self._tallies[kind.drafter].accepted += number < outcome.right
        if outcome.timing is not None:
            self._depth.learn(outcome.timing)
        self._tokens += outcome.tokens
        self._is_disturbed |= outcome.is_disturbed
        if outcome.tokens > outcome.right:  # the last one was not guessed: the round is over
            self._end_round(outcome.now)

    def _end_round(self, now: float) -> None:
        self._depth.note(self._tokens, None if self._is_disturbed else now - self._began_at)
        self._is_new, self._is_disturbed = True, False
        self._tokens, self._began_at = 0, now
        if self._fruitless >= PATIENCE and self._depth.costs.is_short:
            self._rests = PATIENCE - 1
            self._depth.rest(self._rests)
