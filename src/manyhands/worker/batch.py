"""Which waiting steps run together in the next device step. Pure: waiting steps in, picks out.

Decode first: every short step (a token or a verify window) joins, longest waiting first. Prefill fills what is left, in
pieces, the session served longest ago first; while somebody decodes, prefill gets a small share so that it neither
starves nor stalls the others. A session has at most one segment in a step, since its steps depend on each other.
"""

from collections.abc import Sequence
from dataclasses import dataclass

# A step of more rows counts as prefill. 16: verify windows are 2..9 tokens, chunks are 64 or more.
WINDOW_ROWS = 16


# How long a decode step may be held for others, as a share of its own duration. Two sessions out of phase pay for a step
# each; held together they share one, so waiting pays while it is shorter than a step. The rest is margin for a guess.
HOLD_SHARE = 0.7


def hold_until(held_since: float, step_s: float, expected: Sequence[float]) -> float:
    """Until when a decode step that could begin at `held_since` should wait for others that decode here too.

    `expected` are the times at which their next steps are due, as learnt from their past turnarounds; `step_s` is the usual
    duration of a decode step. Returns `held_since` if nobody comes in time.
    """
    horizon = held_since + HOLD_SHARE * step_s
    return max((t for t in expected if t <= horizon), default=held_since)


@dataclass(frozen=True, slots=True)
class Waiting:
    """The oldest step of one session. `served` is when the session last ran (any monotonic counter)."""

    key: int
    num_rows: int
    served: int


@dataclass(frozen=True, slots=True)
class Pick:
    """Run the first `num_rows` rows of session `key`'s oldest step."""

    key: int
    num_rows: int


def choose(waiting: Sequence[Waiting], prefill_rows: int, mixed_rows: int) -> list[Pick]:
    """The next device step: never empty unless `waiting` is; at most max(prefill_rows, WINDOW_ROWS) rows."""
    order = sorted(waiting, key=lambda w: (w.served, w.key))
    picks: list[Pick] = []
    room = max(prefill_rows, WINDOW_ROWS)
    # A prefill that waits longest keeps a share even if short steps could fill the whole step.
    kept = min(mixed_rows, room // 2) if order and order[0].num_rows > WINDOW_ROWS else 0
    room -= kept
    for w in order:
        if w.num_rows <= WINDOW_ROWS and w.num_rows <= room:
            picks.append(Pick(w.key, w.num_rows))
            room -= w.num_rows
    room += kept
    if picks:
        room = min(room, mixed_rows)
    for w in order:
        if w.num_rows > WINDOW_ROWS and room > 0:
            rows = min(w.num_rows, room)
            picks.append(Pick(w.key, rows))
            room -= rows
    return picks
