"""manyhands.origin.depth: over acceptance, round trip and row cost, never under 0.98 of plain, near the best fixed depth."""

import random
from itertools import product

import pytest

from manyhands.origin.depth import MAX_DRAFTS, Acceptance, Depth

TOKENS = 4000


def play(depth: Depth, chance: float, token_s: float, row_s: float, *, offered: float, rng: random.Random) -> float:
    """Seconds for TOKENS tokens: windows whose drafts are right with `chance` each, where a match is offered that often."""
    seconds, tokens = 0.0, 0
    while tokens < TOKENS:
        count = depth.choose(8, MAX_DRAFTS) if rng.random() < offered else 0
        right = next((i for i in range(count) if rng.random() >= chance), count)
        took = (token_s + row_s * count) * rng.uniform(0.9, 1.1)
        depth.note(8, count, right, took)
        seconds, tokens = seconds + took, tokens + 1 + right
    return seconds


class Fixed(Depth):
    """Always as many drafts."""

    def __init__(self, count: int) -> None:
        super().__init__(Acceptance())
        self._count = count

    def choose(self, match: int, most: int) -> int:
        return self._count


GRID = list(product((0.0, 0.2, 0.5, 0.8, 0.98), (0.0, 0.02, 0.3), (0.0, 0.002, 0.03), (1.0, 0.3)))


@pytest.mark.parametrize(("chance", "trip_s", "row_s", "offered"), GRID)
def test_never_slower_than_plain_and_near_the_best_fixed_depth(
    chance: float, trip_s: float, row_s: float, offered: float
) -> None:
    token_s = 0.03 + trip_s

    def seconds(depth: Depth) -> float:
        return play(depth, chance, token_s, row_s, offered=offered, rng=random.Random(1))

    ours = seconds(Depth(Acceptance()))
    fixed = [seconds(Fixed(count)) for count in (0, 1, 2, 4, 8, 15)]
    assert ours <= fixed[0] / 0.98
    assert ours <= 1.15 * min(fixed)


def test_nothing_is_drafted_before_a_plain_window_was_timed() -> None:
    depth = Depth(Acceptance())
    assert depth.choose(32, 8) == 0
    depth.note(0, 0, 0, None)  # disturbed: no time
    assert depth.choose(32, 8) == 0
    depth.note(0, 0, 0, 0.1)
    assert depth.choose(32, 8) > 0


def test_a_step_that_becomes_dear_per_row_ends_drafting() -> None:
    """Others' load makes rows cost as much as tokens: the estimate follows within some windows."""
    depth, rng = Depth(Acceptance()), random.Random(2)
    play(depth, 0.5, 0.1, 0.0, offered=1.0, rng=rng)
    assert depth.choose(8, 15) >= 2
    play(depth, 0.5, 0.1, 0.12, offered=1.0, rng=rng)
    assert depth.choose(8, 15) == 0


def test_verdict_names_the_figures() -> None:
    depth = Depth(Acceptance())
    assert "no window" in depth.verdict
    depth.note(0, 0, 0, 0.1)
    depth.note(8, 4, 0, 0.5)
    assert (
        depth.verdict
        == "one more row costs 100.0 ms of 100.0 ms a token, a draft is right in 30%: drafting does not pay"
    )
