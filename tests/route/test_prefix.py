"""manyhands.route.prefix: a cached prefix against a faster route, by what each saves."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manyhands.core import SpanLoad
from manyhands.route.offer import Offer, Terms
from manyhands.route.prefix import USUAL_TOKENS, gain_s, row_s
from tests.route.test_search import offer


def at(name: str, layer_ms: float, row_ms: float = 0.0) -> Offer:
    """A node that holds all layers, at so many ms a layer."""
    return replace(offer(name, 0, 12), load=SpanLoad(layer_s=layer_ms / 1e3, row_s=row_ms / 1e3))


def gain(kept: Offer, best: Offer, saved: int, max_tokens: int = 100) -> float:
    return gain_s([kept], [best], [kept, best], Terms(), saved, max_tokens)


def test_a_long_prefix_is_worth_a_slower_route_and_a_short_one_is_not() -> None:
    """12 layers at 1 ms slower for 100 tokens cost 1.2 s; a row of prefill saves 12 x 0.1 ms."""
    slow, fast = at("slow", 2.0), at("fast", 1.0, row_ms=0.1)
    assert gain(slow, fast, 2000) == pytest.approx(2000 * 0.0012 - 1.2)
    assert gain(slow, fast, 100) < 0 < gain(slow, fast, 1500)
    assert gain(slow, fast, 100, max_tokens=5) > 0


def test_a_route_that_is_as_good_or_better_is_always_kept() -> None:
    fast, slow = at("fast", 1.0), at("slow", 2.0)
    assert gain(fast, slow, 16) > 0 and gain(fast, fast, 16) > 0


def test_a_hop_that_is_gone_counts_as_fast_as_the_best() -> None:
    """It is replaced; what is left of the prefix is still worth something."""
    best = at("best", 1.0)
    assert gain_s([at("gone", 9.0)], [best], [best], Terms(), 100, 100) == 100 * row_s([best]) > 0


@given(st.integers(16, 5000), st.floats(0.01, 50), st.floats(0.01, 50), st.integers(1, 5000))
def test_more_saved_is_never_worse_and_longer_answers_never_better(
    saved: int, kept_ms: float, best_ms: float, tokens: int
) -> None:
    kept, best = at("kept", kept_ms), at("best", best_ms)
    assert gain(kept, best, saved + 1, tokens) > gain(kept, best, saved, tokens)
    assert gain(kept, best, saved, tokens + 1) <= gain(kept, best, saved, tokens)
    assert gain(kept, best, saved, USUAL_TOKENS) == gain(kept, best, saved, USUAL_TOKENS + tokens)
