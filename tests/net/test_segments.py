"""Segments on ways with a router, and a way whose middle is narrower than its ends while no router may say so.

The network of the second is that of test_nat.py: its middle cable, between pub and nat-a, gets an MTU of 1280, and the ICMP of
both ends of it is dropped.
"""

import socket
import sys
from pathlib import Path

import pytest

from manyhands.net.segments import MAX_SEGMENT_BYTES, limit_segments
from tests.net.test_nat import PORT, Networks
from tests.net.test_nat_members import Resident, answer, networks

__all__ = ["networks"]  # a fixture

NO_ICMP = """
    add table ip quiet
    add chain ip quiet out { type filter hook output priority 0; policy accept; }
    add rule ip quiet out ip protocol icmp drop
"""


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not tell the limit before the connection is made")
@pytest.mark.parametrize(("host", "is_limited"), [("198.51.100.1", True), ("127.0.0.1", False)])  # TEST-NET-2; itself
def test_segments_are_limited_where_a_router_is_on_the_way(host: str, is_limited: bool) -> None:
    with socket.socket() as connection:
        limit_segments(connection, (host, 9))
        limit = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG)
        assert (limit == MAX_SEGMENT_BYTES) is is_limited


@pytest.mark.parametrize(
    ("here", "there", "world", "is_limited"),
    [
        ("192.168.1.2", "192.168.1.3", None, False),  # a neighbour; all else goes by a router
        ("10.8.0.2", "8.8.8.8", "10.8.0.2", True),  # all goes by WireGuard, which has no router
        ("2001:db8:1::2", "2001:db8:1::3", None, False),
        (
            "2001:db8:1::2",
            "2001:db8:99::9",
            None,
            True,
        ),  # Linux says of any address of IPv6 that no router is on the way
        ("fe80::2", "fe80::3%eth0", None, False),
    ],
)
def test_what_the_system_says_of_a_way_without_a_router(
    here: str, there: str, world: str | None, is_limited: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def source(family: int, name: tuple[str, int]) -> str | None:
        return world if name[0] == "192.0.2.1" else here

    monkeypatch.setattr("manyhands.net.segments._source", source)
    with socket.socket(socket.AF_INET6 if ":" in there else socket.AF_INET) as connection:
        limit_segments(connection, (there, 9))
        assert (connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG) == MAX_SEGMENT_BYTES) is is_limited


@pytest.mark.nightly
def test_a_member_joins_and_answers_over_a_narrow_link_that_nothing_tells_of(
    networks: Networks, tmp_path: Path
) -> None:
    for place, device in (("pub", "c0e0"), ("nat-a", "c0e1")):
        networks.run(place, "ip", "link", "set", device, "mtu", "1280")
        networks.run(place, "nft", NO_ICMP)
    networks.forward_port()
    places = ["--listen", f"0.0.0.0:{PORT}", "--advertise", f"203.0.113.2:{PORT}", "--api", "127.0.0.1:0"]
    running = [Resident(networks, "a", tmp_path / "a", "", "up", "tales", "--layers", "0-5", *places)]
    try:
        ticket = running[0].said("invitation")["ticket"]
        running.append(Resident(networks, "b", tmp_path / "b", ticket, "join", "--layers", "6-11"))
        running[1].said("serving")
        assert answer(running[1])["result"] == answer(running[0])["result"] != ""
    finally:
        for resident in running:
            resident.stop()
