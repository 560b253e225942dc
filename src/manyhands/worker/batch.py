"""Which waiting steps run together in the next device step. Pure: waiting steps in, picks out.

Decode first: every short step (a token or a verify window) joins, longest waiting first. Prefill fills what is left, in
pieces, the session served longest ago first; while a session decodes, prefill gets a small share so that it neither
starves nor stalls the others. A session has at most one segment in a step, since its steps depend on each other.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

# A step of more rows counts as prefill. 16: verify windows are 2..9 tokens, chunks are 64 or more.
WINDOW_ROWS = 16


# How long a decode step may be held for others, as a share of its own duration. Two sessions out of phase pay for a step
# each; held together they share one, so waiting pays while it is shorter than a step. The rest is margin for a guess.
HOLD_SHARE = 0.7


def hold_until(held_since: float, step_s: float, expected: Sequence[float]) -> float:
    """Until when a decode step that could begin at `held_since` should wait for others that decode here too.

    `expected` are the times at which their next steps are due, as learnt from their past turnarounds; `step_s` is the usual
    duration of a decode step. Returns `held_since` if none comes in time.
    """
    horizon = held_since + HOLD_SHARE * step_s
    return max((t for t in expected if t <= horizon), default=held_since)


# A device step that takes less (seconds of CPU) may run on the event loop's thread, which is to be free again within HELD_S.
# One of up to LONE_S may, too, if its session has no company and sends the next one FREE_X times as long after it as it takes,
# or later: so the loop is held for two fifths of the time at most, and the median of pings (net/transport.py) stays.
SHORT_S = 0.001
LONE_S = 0.009
HELD_S = 0.01
FREE_X = 1.5
_MAX_KINDS = 1024


class StepKind(NamedTuple):
    """What a decode step's duration depends on: layers (of all its spans), rows, and the octave of its last position."""

    num_layers: int
    num_rows: int
    octave: int


class Shortness:
    """Which decode steps are short enough for the loop's thread: those whose like were, every time of late."""

    def __init__(self) -> None:
        self._usual_s: dict[StepKind, float] = {}

    def learn(self, kind: StepKind, took_s: float, cpu_s: float) -> None:
        """A step of `kind` took so long, and so much of a CPU. The estimate rises at once and falls slowly.

        Others' work on the same core makes no step long (on a busy machine every second one was handed over, which costs
        more again); one that waits beyond HELD_S, as for a disk, is.
        """
        took_s = cpu_s if took_s <= HELD_S else took_s
        if len(self._usual_s) >= _MAX_KINDS:
            self._usual_s.clear()
        before = self._usual_s.get(kind, took_s)
        self._usual_s[kind] = max(took_s, 0.9 * before + 0.1 * took_s)

    def is_short(self, kind: StepKind, free_s: float = 0.0) -> bool:
        """False for a kind that was never seen. `free_s`: for how long nothing is to compute after it, as far as is known."""
        return self._usual_s.get(kind, math.inf) < max(SHORT_S, min(LONE_S, free_s / FREE_X))


# A device step of prompts alone lasts so long (seconds), or has so few rows: origins see that a slow machine gets on, which
# they give 30 s (origin/pace.py). Fewer rows would read the weights again for little; where so many take longer than SLOW_S
# there are fewer all the same, and before anything is known, but FEWEST_ROWS: halves of one more still count as a prompt.
PROMPT_S, SLOW_S = 4.0, 15.0
LEAST_ROWS, FEWEST_ROWS = 64, 2 * WINDOW_ROWS + 1


class PromptRows:
    """How many rows such a step may have, by what they took of late."""

    def __init__(self) -> None:
        self._row_s: float | None = None
        self._is_of_few = False  # only steps of fewer than FEWEST_ROWS made the estimate

    @property
    def limit(self) -> int:
        """FEWEST_ROWS or more."""
        if self._row_s is None:
            return FEWEST_ROWS
        row_s = max(self._row_s, 1e-6)
        return max(int(PROMPT_S / row_s), min(LEAST_ROWS, max(FEWEST_ROWS, int(SLOW_S / row_s))))

    def learn(self, num_rows: int, took_s: float) -> None:
        """A step took so long. The estimate rises at once and falls slowly.

        Most of the time of fewer than FEWEST_ROWS rows goes into reading weights: such steps never raise an estimate, and
        the first step of more rows replaces one that is made of them alone.
        """
        row_s, is_few = took_s / num_rows, num_rows < FEWEST_ROWS
        if self._row_s is None or (self._is_of_few and not is_few):
            self._row_s, self._is_of_few = row_s, is_few
        elif row_s < self._row_s or not is_few:
            self._row_s = max(row_s, 0.8 * self._row_s + 0.2 * row_s)


class Waiting(NamedTuple):
    """The oldest step of one session. `served` is when the session last ran (any monotonic counter)."""

    served: int
    key: int
    num_rows: int


class Pick(NamedTuple):
    """Run the first `num_rows` rows of session `key`'s oldest step."""

    key: int
    num_rows: int


def choose(waiting: Sequence[Waiting], prefill_rows: int, mixed_rows: int, prompt_rows: int) -> list[Pick]:
    """The next device step: never empty unless `waiting` is; at most max(prefill_rows, WINDOW_ROWS) rows, and where none
    decodes prompt_rows (more than WINDOW_ROWS)."""
    room = max(prefill_rows, WINDOW_ROWS)
    if len(waiting) == 1:
        parts = -(-waiting[0].num_rows // min(room, prompt_rows))  # about as many rows in each: none counts as decoding
        return [Pick(waiting[0].key, -(-waiting[0].num_rows // parts))]
    order = sorted(waiting)  # who was served longest ago comes first
    picks: list[Pick] = []
    # A prefill that waits longest keeps a share even if short steps could fill the whole step.
    kept = min(mixed_rows, room // 2) if order and order[0].num_rows > WINDOW_ROWS else 0
    room -= kept
    for w in order:
        if w.num_rows <= WINDOW_ROWS and w.num_rows <= room:
            picks.append(Pick(w.key, w.num_rows))
            room -= w.num_rows
    room = min(room + kept, mixed_rows if picks else prompt_rows)
    for w in order:
        if w.num_rows > WINDOW_ROWS and room > 0:
            rows = min(w.num_rows, room)
            picks.append(Pick(w.key, rows))
            room -= rows
    return picks
