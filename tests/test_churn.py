"""Members come and go at random while requests run: no request is lost or wrong, and no member that is gone is offered."""

import asyncio

import pytest

from bench.churn import GONE_S, churn


@pytest.mark.nightly
@pytest.mark.slow
def test_a_swarm_outlives_its_members() -> None:
    # This seed begins with one that leaves, a join, a kill and a join, with short pauses.
    tally = asyncio.run(churn(processes=4, seconds=14, seed=687))
    assert tally.ok > 0 and tally.kills + tally.leaves > 0
    assert (tally.lost, tally.wrong, tally.ghosts) == ([], [], [])
    assert max(tally.gone_s) <= GONE_S
    assert tally.is_equal
