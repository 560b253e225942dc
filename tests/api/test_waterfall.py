"""Where a token's time went: the parts are its whole, whatever hops say."""

from hypothesis import given
from hypothesis import strategies as st

from manyhands.api.waterfall import TokenTime, Waterfall
from manyhands.wire.timings import HopTiming

_US = st.integers(0, 2**32 - 1)
_HOPS = st.lists(st.builds(HopTiming, _US, _US), min_size=1, max_size=4).map(tuple)


@given(_HOPS, st.floats(0, 1e3), st.floats(0, 1e3))
def test_the_parts_are_the_whole_and_none_is_negative(
    hops: tuple[HopTiming, ...], turn_s: float, wait_s: float
) -> None:
    """Also where hops claim more time than there was."""
    parts = TokenTime(hops, turn_s, turn_s + wait_s).parts_ms()
    assert min(parts) >= -1e-6
    assert abs(sum(parts) - 1e3 * (turn_s + wait_s)) < 1e-3


def test_the_mean_leaves_out_the_first_token_and_tokens_without_a_turn() -> None:
    waterfall = Waterfall()
    assert waterfall.mean() is None
    waterfall.note([], TokenTime((HopTiming(9000, 9000),), 1.0, 1.0), is_first=True)
    waterfall.note([], TokenTime((HopTiming(1000, 2000),), 0.004, 0.010), is_first=False)
    waterfall.note([], TokenTime(), is_first=False)
    waterfall.note([], TokenTime((HopTiming(0, 4000),), 0.004, 0.004), is_first=False)
    assert waterfall.num_turns == 2
    assert waterfall.mean() == {"queue_ms": 0.5, "compute_ms": 3.0, "wire_ms": 0.5, "wait_ms": 3.0}
