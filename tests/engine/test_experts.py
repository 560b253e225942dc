"""Routers and experts on every back end, against their definition in numpy (program/ops.py)."""

import numpy as np
import pytest
from numpy.typing import NDArray

from manyhands.engine import library
from manyhands.engine.golden_cases import BackEnd, reals
from manyhands.engine.library import Team

ROWS, EXPERTS, TOP = 5, 12, 3
Floats = NDArray[np.float32]


@pytest.fixture(params=library.supported())
def machine(request: pytest.FixtureRequest) -> BackEnd:
    return BackEnd(str(request.param), Team(2))


def chosen(machine: BackEnd, x: Floats, scale: float, epsilon: float) -> Floats:
    """Pairs of expert and weight of each row of router products `x`, chosen by sigmoids whose weights are normalised."""
    route = (library.ROUTE, (0, 1, EXPERTS, TOP, 1, 1, 1, 1), (scale, epsilon), (None, None))
    return machine.run(x, "f32", [2 * TOP], [route], 1).view(np.float32).reshape(ROWS, TOP, 2)


def test_weights_are_divided_by_their_sum_and_epsilon(machine: BackEnd) -> None:
    x = reals(1, ROWS, EXPERTS, around=0)
    pairs = chosen(machine, x, 1.5, 0.25)
    scores = 1 / (1 + np.exp(-x.astype(np.float64)))
    order = np.argsort(-scores, axis=1, kind="stable")[:, :TOP]
    assert np.array_equal(pairs[..., 0], order)
    weights = np.take_along_axis(scores, order, 1)
    np.testing.assert_allclose(pairs[..., 1], weights / (weights.sum(1, keepdims=True) + 0.25) * 1.5, rtol=1e-5)
    assert not np.array_equal(pairs, chosen(machine, x, 1.5, 1e-6))
