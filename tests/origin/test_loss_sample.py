"""manyhands.origin.lossy, decisions: what rounding may do to a route's answers, when that is looked at, what is fixed."""

import itertools
from typing import Any

import numpy as np
import pytest

from manyhands.core import NodeId, Span
from manyhands.origin.loss_guard import divergence
from manyhands.origin.lossy import (
    MAX_FLIPS,
    MAX_MEAN_KL,
    MAX_WAYS,
    REQUESTS_A_SAMPLE,
    SAMPLE_AGE_S,
    LossSample,
    LossSamples,
    Lossy,
)


def test_what_is_too_large() -> None:
    assert not LossSample(32, 0.0, 0).is_too_large and not LossSample(32, MAX_MEAN_KL, int(32 * MAX_FLIPS)).is_too_large
    assert (
        LossSample(32, 1.01 * MAX_MEAN_KL, 0).is_too_large and LossSample(32, 0.0, int(32 * MAX_FLIPS) + 1).is_too_large
    )
    assert LossSample(32, float("nan"), 0).is_too_large and LossSample(32, float("inf"), 0).is_too_large


def test_kl_and_flips_are_those_of_the_distributions() -> None:
    exact = np.log(np.array([[0.5, 0.25, 0.25], [0.1, 0.8, 0.1]], np.float32))
    other = np.log(np.array([[0.25, 0.5, 0.25], [0.1, 0.8, 0.1]], np.float32)) + 7
    found = divergence(exact, other.astype(np.float32))
    wanted = (0.5 * np.log(2) - 0.25 * np.log(2)) / 2
    assert found.flips == 1 and found.rows == 2 and found.mean_kl == pytest.approx(wanted, rel=1e-4)
    assert divergence(exact, exact) == LossSample(2, 0.0, 0)
    assert divergence(exact, np.full_like(exact, np.nan)).is_too_large


def ways(number: int) -> Any:
    return ((NodeId(f"{number:064x}"), Span(0, 2)),), frozenset({2})


def test_samples_are_made_again_in_time_and_bounded_in_number() -> None:
    good, bad, known = LossSample(32, 0.0, 0), LossSample(32, 9.0, 9), LossSamples()
    assert known.find(ways(0), 0.0) is None
    known.note(ways(0), good, 0.0)
    known.note(ways(1), bad, 0.0)
    assert [known.find(ways(0), 1.0) for _ in range(REQUESTS_A_SAMPLE)] == [good] * (REQUESTS_A_SAMPLE - 1) + [None]
    assert all(known.find(ways(1), SAMPLE_AGE_S - 1) == bad for _ in range(3 * REQUESTS_A_SAMPLE))
    assert known.find(ways(1), SAMPLE_AGE_S) is None
    for number in itertools.islice(itertools.count(2), MAX_WAYS):
        known.note(ways(number), good, 1.0)
    assert len(known._known) == MAX_WAYS and known.find(ways(0), 1.0) is None


def test_boundaries_are_fixed_once() -> None:
    open_, fixed = Lossy(((0, 90),)), Lossy(((0, 90),), frozenset({2}))
    may = open_.at(2)
    assert may is not None and may.if_slow and open_.at(4) == may
    must = fixed.at(2)
    assert must is not None and not must.if_slow and fixed.at(4) is None
