"""Routers and experts on every back end, against their definition in numpy (program/ops.py)."""

from collections.abc import Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from manyhands.engine import library
from manyhands.engine.golden_cases import BackEnd, reals, stored
from manyhands.engine.library import Array, Plan, Team
from manyhands.errors import ModelError

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


INNER, HIDDEN, OUT = 24, 40, 33


def mixture(
    kind: str, *, gates: bool
) -> tuple[tuple[int, Sequence[int], Sequence[float], Sequence[Array | None]], list[Floats]]:
    """Experts with or without gates, and biases: the operation from (rows, routes) to OUT columns, and its numbers."""
    given = [reals(20 + i, EXPERTS, n, k, around=-2) for i, (n, k) in enumerate(((INNER, HIDDEN), (OUT, INNER)))]
    packed = [np.concatenate([library.pack(stored(x, kind), kind) for x in matrices]) for matrices in given]
    biases = [reals(30, EXPERTS, INNER), reals(31, EXPERTS, OUT)]
    number, name = library.TYPES[kind], library.ACTIVATIONS.index("relu2")
    shape = (0, 1, 2, EXPERTS, TOP, INNER, number, name, number)
    first = (packed[0] if gates else None, packed[0], packed[1])
    return (library.EXPERTS, shape, (1.0, 0.0, 0.0), (*first, None, *biases)), [*given, *biases]


def test_experts_may_have_an_activation_in_place_of_gates(machine: BackEnd) -> None:
    op, (ups, downs, up_bias, down_bias) = mixture("f32", gates=False)
    x = reals(2, ROWS, HIDDEN, around=0)
    scores = (library.PRODUCT, (0, 3, library.TYPES["f32"], 0), (), (library.pack(reals(3, EXPERTS, HIDDEN), "f32"),))
    route = (library.ROUTE, (3, 1, EXPERTS, TOP, 1, 1, 1, 1), (1.5, 1e-20), (None, None))
    widths, ops = [2 * TOP, OUT, EXPERTS], [scores, route, op]
    found = machine.run(x, "f32", widths, ops, 2).view(np.float32).reshape(ROWS, OUT)
    pairs = machine.run(x, "f32", widths, ops[:2], 1).view(np.float32).reshape(ROWS, TOP, 2)
    wanted = np.zeros((ROWS, OUT))
    for row in range(ROWS):
        for number, weight in pairs[row]:
            expert = int(number)
            inner = np.maximum(ups[expert].astype(np.float64) @ x[row] + up_bias[expert], 0) ** 2
            wanted[row] += weight * (downs[expert] @ inner + down_bias[expert])
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4 * np.abs(wanted).max())
    plain = BackEnd("scalar", Team(1)).run(x, "f32", widths, ops, 2)
    assert np.array_equal(found.reshape(-1), plain.view(np.float32).reshape(-1))


def test_routes_may_name_what_gives_its_source(machine: BackEnd) -> None:
    """Of twelve experts the last four: as those that are not there, and then the row times the weight in their places."""
    ups, downs = reals(20, EXPERTS - 4, INNER, HIDDEN, around=-2), reals(21, EXPERTS - 4, HIDDEN, INNER, around=-2)
    x, number = reals(2, ROWS, HIDDEN, around=0), library.TYPES["f32"]
    scores = (library.PRODUCT, (0, 3, library.TYPES["f32"], 0), (), (library.pack(reals(3, EXPERTS, HIDDEN), "f32"),))
    route = (library.ROUTE, (3, 1, EXPERTS, TOP, 0, 0, 1, 1), (1.5, 1e-20), (reals(4, EXPERTS, around=0), None))
    packed = [np.concatenate([library.pack(one, "f32") for one in matrices]) for matrices in (ups, downs)]
    shape = (0, 1, 2, EXPERTS - 4, TOP, INNER, number, library.ACTIVATIONS.index("relu2"), number, 0, 4)
    widths = [2 * TOP, HIDDEN, EXPERTS]
    ops = [scores, route, (library.EXPERTS, shape, (1.0, 0.0, 0.0), (None, *packed))]
    found = machine.run(x, "f32", widths, ops, 2).view(np.float32).reshape(ROWS, HIDDEN)
    pairs = machine.run(x, "f32", widths, ops[:2], 1).view(np.float32).reshape(ROWS, TOP, 2)
    wanted, named = np.zeros((ROWS, HIDDEN)), set()
    for row in range(ROWS):
        for number, weight in pairs[row]:
            inner = np.maximum(ups[int(number) % 8].astype(np.float64) @ x[row], 0) ** 2
            wanted[row] += weight * (x[row] if number >= EXPERTS - 4 else downs[int(number)] @ inner)
            named.add(number >= EXPERTS - 4)
    assert named == {False, True}
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4 * np.abs(wanted).max())
    plain = BackEnd("scalar", Team(1)).run(x, "f32", widths, ops, 2)
    assert np.array_equal(found.reshape(-1), plain.view(np.float32).reshape(-1))


@pytest.mark.parametrize(("scales", "more", "out"), [(0, -1, HIDDEN), (0, 1025, HIDDEN), (1, 2, HIDDEN), (0, 2, OUT)])
def test_what_gives_its_source_is_as_wide_and_not_scaled(scales: int, more: int, out: int) -> None:
    ups, downs = reals(20, EXPERTS, INNER, HIDDEN), reals(21, EXPERTS, out, INNER)
    packed = [np.concatenate([library.pack(one, "f32") for one in matrices]) for matrices in (ups, downs)]
    number = library.TYPES["f32"]
    plan = Plan("scalar", "f32", [HIDDEN, 2 * TOP, out], 2, "f32", 64)
    shape = (0, 1, 2, EXPERTS, TOP, INNER, number, 0, number)
    plan.add(library.EXPERTS, (*shape, 0, 0), (1.0, 0.0, 0.0), (None, *packed))
    with pytest.raises(ModelError):
        plan.add(library.EXPERTS, (*shape, scales, more), (1.0, 0.0, 0.0), (None, *packed))


def test_gates_that_do_not_fit_are_refused() -> None:
    for gates, place, changed in (
        (True, 0, np.zeros(3, np.uint8)),  # gates of too few bytes
        (False, 1, None),  # no ups
        (False, 3, np.zeros((EXPERTS, INNER), np.float32)),  # a bias of gates that are not there
    ):
        kind, numbers, scales, tensors = mixture("bf16", gates=gates)[0]
        plan = Plan("scalar", "f32", [HIDDEN, 2 * TOP, OUT], 2, "f32", 64)
        plan.add(kind, numbers, scales, tensors)
        with pytest.raises(ModelError):
            plan.add(kind, numbers, scales, [changed if i == place else one for i, one in enumerate(tensors)])
