"""How many rows of a step run at once where the last hop holds the head."""

import pytest

from manyhands.core import SamplingParams
from manyhands.worker.fit import MAX_DRAWN, Fit
from tests.worker.hop import hidden, opening, step

ROWS = 256


@pytest.mark.parametrize("wanted_from", [0, 100, 255, 1000])
def test_no_more_tokens_are_drawn_in_a_device_step_than_a_bound(wanted_from: int) -> None:
    """256 rows of logits of 262,144 tokens are 268 MB, which no lease counts; so many are no one's guesses."""
    last = opening(1, ROWS, ends="edges", hop=2, sampling=SamplingParams(max_tokens=8))
    given = step(1, 0, hidden(ROWS), hop=2, reply_from=wanted_from)
    head, rest = Fit(64, "bf16", 264).cut(given, last, ROWS)
    assert max(0, head.count - wanted_from) <= MAX_DRAWN
    assert head.count == min(ROWS, wanted_from + MAX_DRAWN)
    assert (rest is None) == (head.count == ROWS)


def test_rows_that_are_drawn_from_elsewhere_are_not_cut() -> None:
    given = step(1, 0, hidden(ROWS), reply_from=0)
    for place in (opening(1, ROWS), opening(1, ROWS, ends="edges", sampling=SamplingParams(max_tokens=8))):
        assert Fit(64, "bf16", 264).cut(given, place, ROWS) == (given, None)
