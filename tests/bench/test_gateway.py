"""bench.gateway: its stand-in for an origin is one that the gateway of now can ask."""

import pytest

from bench.gateway import NEW, overhead, overhead_figures
from manyhands.cli.options import run as run_loop


@pytest.mark.slow
def test_requests_are_answered_both_ways() -> None:
    seen = run_loop(overhead(2))
    assert NEW > 1 and {"request_ms", "token_us"} <= set(overhead_figures(seen))
    assert all(len(arms) == 5 and all(cpu_s > 0 for cpu_s, _ in arms.values()) for arms in seen)
