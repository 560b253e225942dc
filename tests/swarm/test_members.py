"""Scope and lists: who may speak, and with whom work is shared."""

import pytest

from manyhands.core import NodeId
from manyhands.errors import BadRequest
from manyhands.swarm.members import Members, is_local

FRIEND, FOE, OTHER = NodeId("aa" * 32), NodeId("bb" * 32), NodeId("cc" * 32)
LAN, WORLD = ["192.168.1.7"], ["8.8.8.8", "example.org"]


@pytest.mark.parametrize(
    ("scope", "friend_far", "other_near", "other_far"),
    [
        ("off", False, False, False),
        ("lan", True, True, False),
        ("trusted", True, False, False),
        ("public", True, True, True),
    ],
)
def test_scopes(scope: str, friend_far: bool, other_near: bool, other_far: bool) -> None:
    members = Members(scope, frozenset({FRIEND}), frozenset({FOE}))  # type: ignore[arg-type]
    assert members.admits(FRIEND, WORLD) == friend_far
    assert members.admits(OTHER, LAN) == members.admits(OTHER, WORLD + LAN) == other_near
    assert members.admits(OTHER, WORLD) == members.admits(OTHER, []) == other_far
    assert not members.admits(FOE, LAN) and not members.may_speak(FOE)
    assert members.may_speak(OTHER) == (scope != "off")


def test_the_deny_list_beats_the_allow_list() -> None:
    assert not Members("public", frozenset({FOE}), frozenset({FOE})).admits(FOE, LAN)


def test_nothing_leaves_the_local_network_by_default() -> None:
    assert Members().admits(OTHER, LAN) and not Members().admits(OTHER, WORLD)


NEAR = "127.0.0.1 10.1.2.3 172.31.0.1 192.168.0.1 169.254.1.1 ::1 fe80::1%eth0 fd00::1 ::ffff:10.0.0.1 localhost desk.local"
FAR = "8.8.8.8 172.32.0.1 192.0.2.1 100.64.0.1 0.0.0.0 2001:db8::1 ::ffff:8.8.8.8 example.org 10.0.0.1.example.org"


def test_local_addresses() -> None:
    assert [host for host in NEAR.split() if not is_local(host)] == []
    assert [host for host in [*FAR.split(), "", "localhost.example.org"] if is_local(host)] == []


def test_nonsense_is_refused() -> None:
    with pytest.raises(BadRequest, match="must be one of off, lan, trusted, public"):
        Members("world")  # type: ignore[arg-type]
    with pytest.raises(BadRequest, match="is not a node id"):
        Members(deny=frozenset({NodeId("node-1")}))
