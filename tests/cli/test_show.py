"""What people read of an answer: what happened to its route, and its exactness class, in words."""

from typing import Literal

import pytest

from manyhands.cli.show import explained, told_of
from manyhands.origin.repair_plan import Event


@pytest.mark.parametrize(
    ("kind", "detail", "said"),
    [
        ("shard_status", "degraded: is gone: link to ca3e976db9d361cb: closed by the peer", "nas: is gone"),
        ("shard_status", "degraded: hop 1 lost its link to the next", "nas: hop 1 lost its link to the next"),
        ("shard_failover", "laptop -> nas", "nas goes on in place of laptop"),
        ("reshard", "laptop, desk -> nas", "the layers are cut anew: laptop, desk -> nas"),
        ("pipeline_aborted", "no node holds layers 3-5", "given up: no node holds layers 3-5"),
    ],
)
def test_what_happens_to_a_route_is_said_without_ids(
    kind: Literal["shard_status", "shard_failover", "reshard", "pipeline_aborted"], detail: str, said: str
) -> None:
    assert told_of(Event(kind, ("nas",), 7, detail)) == f"[at token 7: {said}]"


def test_the_class_is_explained_and_one_that_is_not_known_is_named() -> None:
    assert explained("E0") == "exactness E0 (the same bits on any nodes)"
    assert explained("E2").startswith("exactness E2 (equal up to rounding") and explained("E9") == "exactness E9"
