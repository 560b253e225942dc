"""bench.report: how sure a median is."""

import math
import random

import pytest

from bench.report import median_interval


def test_the_interval_is_two_of_the_samples_by_rank() -> None:
    """Of 20 samples the 6th and the 15th: fewer than 6 heads of 20 coins come in 2.1 %, fewer than 7 in 5.8 %."""
    shuffled = random.Random(1).sample(range(1, 21), 20)
    assert median_interval(shuffled) == (6, 15)
    assert median_interval(range(6)) == (0, 5)


@pytest.mark.parametrize("count", range(6))
def test_few_samples_tell_nothing(count: int) -> None:
    assert median_interval([1.0] * count) == (-math.inf, math.inf)


def test_it_holds_the_median_as_often_as_it_says() -> None:
    rng = random.Random(2)
    held = 0
    for _ in range(1000):
        low, high = median_interval([rng.expovariate(1.0) for _ in range(25)])
        held += low <= math.log(2) <= high
    assert 935 <= held <= 985
