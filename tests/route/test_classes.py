"""Which arithmetic classes share a route: exact ones, or those of class E2, and both only where it is allowed."""

import pytest

from manyhands.core import UNPROVEN
from manyhands.errors import ShardUnavailable
from manyhands.route.offer import Rules, Terms
from manyhands.route.search import CLASS_WORTH, find_route
from tests.route.test_policies import offer, shown

GPU = "bf16/torch-2/cuda GPU" + UNPROVEN
SLOW_S = 1.0  # of a layer: round trips do not count beside it
APART, MIXED = Terms(), Terms(rules=Rules(mix_classes=True))
GREEDY = Terms(rules=Rules("greedy"))


def test_a_fast_device_takes_over_only_with_its_like() -> None:
    """Ten times as fast on half of the layers: the route stays exact. On all layers: it is the route."""
    slow = [offer("a", 0, 6, SLOW_S), offer("b", 6, 12, SLOW_S)]
    half = offer("gpu", 0, 6, SLOW_S / 10, arithmetic=GPU)
    for terms in (APART, GREEDY):
        assert shown(find_route([*slow, half], 12, terms=terms)) == "a:0-5 b:6-11"
    assert shown(find_route([*slow, half], 12, terms=MIXED)) == "gpu:0-5 b:6-11"
    whole = offer("gpu", 0, 12, SLOW_S / 10, arithmetic=GPU)
    assert shown(find_route([*slow, whole], 12, terms=APART)) == "gpu:0-11"


def test_exactness_is_worth_a_tenth() -> None:
    exact = offer("a", 0, 12, SLOW_S)
    for share, want in [(CLASS_WORTH / 2, "a:0-11"), (3 * CLASS_WORTH, "gpu:0-11")]:
        device = offer("gpu", 0, 12, SLOW_S / (1 + share), arithmetic=GPU)
        assert shown(find_route([exact, device], 12, terms=APART)) == want


def test_where_only_both_together_hold_all_layers_the_refusal_says_so() -> None:
    offers = [offer("a", 0, 6), offer("gpu", 4, 12, arithmetic=GPU)]
    said = "exact classes do not hold layers 6-11 of 12, .* do not hold layers 0-3, .* --mix-classes"
    with pytest.raises(ShardUnavailable, match=said):
        find_route(offers, 12, terms=APART)
    assert shown(find_route(offers, 12, terms=MIXED)) in ("a:0-5 gpu:6-11", "a:0-3 gpu:4-11")


def test_nodes_of_two_exact_classes_share_a_route_as_before() -> None:
    offers = [offer("a", 0, 6, arithmetic="x"), offer("b", 6, 12, arithmetic="y")]
    assert shown(find_route(offers, 12, terms=APART)) == "a:0-5 b:6-11"
