"""A ticket is read exactly, or refused with the reason."""

import base64
import hashlib
import string
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manyhands.config import DIRECTORIES
from manyhands.core import NodeAddr, NodeId
from manyhands.errors import BadRequest, TicketError
from manyhands.swarm.ticket import MAX_ADDRESSES, Ticket

NODE = NodeId("ab" * 32)
TICKET = Ticket(bytes(range(32)), "hörsaal", (NodeAddr("::1", 4000, NODE), NodeAddr("example.org", 65535)))
TEXT = TICKET.encode()


def test_round_trip() -> None:
    assert TEXT.startswith("mh1") and TEXT.isascii() and not set(TEXT) & set("+/= ")
    assert Ticket.parse(TEXT) == TICKET
    assert Ticket.parse(f"\n {TEXT}\t\n") == TICKET
    assert Ticket.parse(f"{TEXT[:20]}\r\n  {TEXT[20:50]}\n{TEXT[50:]}") == TICKET, "as a letter breaks lines"


@given(st.binary(min_size=32, max_size=32), st.text(string.printable[:62], min_size=1, max_size=20))
def test_any_ticket_round_trips(secret: bytes, name: str) -> None:
    ticket = Ticket(secret, name, (NodeAddr("10.0.0.1", 1),))
    assert Ticket.parse(ticket.encode()) == ticket


def test_every_single_character_change_is_refused() -> None:
    """All 64 letters of the alphabet, and some others, at every place; also spellings of the same bytes."""
    for ticket in (TICKET, Ticket(bytes(32), "x"), Ticket(bytes(32), "xy"), Ticket(bytes(32), "xyz")):
        text = ticket.encode()
        for place, letter in enumerate(text):
            letters = string.ascii_letters + string.digits + "-_" if place > len(text) - 3 else "Ab0-_"
            for other in letters + "+/= é":
                if other != letter:
                    with pytest.raises(TicketError):
                        Ticket.parse(text[:place] + other + text[place + 1 :])


def test_missing_swapped_and_extra_characters_are_refused() -> None:
    for place in range(len(TEXT)):
        for changed in (TEXT[:place], TEXT[:place] + TEXT[place + 1 :], TEXT[:place] + "A" + TEXT[place:]):
            with pytest.raises(TicketError):
                Ticket.parse(changed)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "not a ticket"),
        ("hello", "not a ticket"),
        ("mh", "version ''"),
        ("mh2" + TEXT[3:], "version '2'"),
        (TEXT[:-4], "truncated"),
        (TEXT[:40], "truncated|lacks its end"),
        (TEXT + "AAAA", "too long by 3 bytes"),
        (TEXT[:30] + ("A" if TEXT[30] != "A" else "B") + TEXT[31:], "wrong checksum"),
        (TEXT[:30] + "!" + TEXT[31:], "characters that no ticket has"),
    ],
)
def test_the_reason_is_exact(text: str, reason: str) -> None:
    with pytest.raises(TicketError, match=reason):
        Ticket.parse(text)


@given(st.text(max_size=100))
def test_random_text_is_refused(text: str) -> None:
    for candidate in (text, "mh1" + text):
        with pytest.raises(TicketError):
            Ticket.parse(candidate)


@pytest.mark.parametrize(
    ("secret", "name", "addr"),
    [
        (bytes(31), "x", NodeAddr("a", 1)),
        (bytes(32), "", NodeAddr("a", 1)),
        (bytes(32), "x" * 65, NodeAddr("a", 1)),
        (bytes(32), "x\n", NodeAddr("a", 1)),
        (bytes(32), "x", NodeAddr("a", 0)),
        (bytes(32), "x", NodeAddr("a", 65536)),
        (bytes(32), "x", NodeAddr("a b", 1)),
        (bytes(32), "x", NodeAddr("", 1)),
        (bytes(32), "x", NodeAddr("a" * 256, 1)),
    ],
)
def test_what_cannot_be_carried_is_refused(secret: bytes, name: str, addr: NodeAddr) -> None:
    with pytest.raises(TicketError):
        Ticket(secret, name, (addr,))


def test_new_tickets_differ_and_gain_addresses() -> None:
    ticket = Ticket.new("lab")
    assert ticket.secret != Ticket.new("lab").secret and ticket.addresses == ()
    for port in (1, 2, 1):
        ticket = ticket.with_address(NodeAddr("a", port, NODE))
    assert [addr.port for addr in ticket.addresses] == [1, 2]
    for port in range(10, 10 + MAX_ADDRESSES):
        ticket = ticket.with_address(NodeAddr("a", port))
    assert len(ticket.addresses) == MAX_ADDRESSES and ticket.addresses[0].port == 9 + MAX_ADDRESSES
    with pytest.raises(TicketError, match="at most 16"):
        Ticket(bytes(32), "x", ticket.addresses * 2)


def test_the_secret_is_not_printed() -> None:
    assert "secret" not in repr(TICKET) and repr(TICKET.secret)[2:-1] not in repr(TICKET)


def test_rotation_makes_old_tickets_useless_and_keeps_the_rest() -> None:
    rotated = TICKET.rotate()
    assert rotated.secret not in (TICKET.secret, TICKET.rotate().secret)
    assert (rotated.name, rotated.addresses) == (TICKET.name, TICKET.addresses)
    assert rotated.fingerprint != TICKET.fingerprint


@pytest.mark.parametrize("kind", DIRECTORIES)
def test_the_kind_of_directory_travels_and_outlives_changes(kind: str) -> None:
    ticket = Ticket.new("lab", kind)
    assert ticket.directory == kind
    moved = Ticket.parse(ticket.with_address(NodeAddr("a", 1, NODE)).rotate().encode())
    assert moved.directory == kind and moved.rotate("dht").directory == "dht"


def test_a_ticket_that_says_nothing_means_gossip() -> None:
    """Those that were made before there was a choice; and gossip's are as long as they were."""
    assert Ticket.new("lab").directory == TICKET.directory == "gossip"
    assert len(replace(TICKET, directory="dht").encode()) > len(TEXT)


@pytest.mark.parametrize("tail", [b"\0", b"\3", b"\xff", b"\1\0"])
def test_a_field_that_no_ticket_has_is_refused(tail: bytes) -> None:
    """Also a second spelling of gossip: equal tickets are equal texts."""
    body = base64.urlsafe_b64decode(TEXT[3:] + "=" * (-len(TEXT[3:]) % 4))[2:-8] + tail
    payload = len(body).to_bytes(2) + body
    check = hashlib.sha256(b"mh1" + payload).digest()[:8]
    with pytest.raises(TicketError, match="newer program"):
        Ticket.parse("mh1" + base64.urlsafe_b64encode(payload + check).rstrip(b"=").decode())


def test_a_machine_that_is_set_to_another_kind_is_told_both_and_the_remedy() -> None:
    ticket = Ticket.new("lab", "dht")
    ticket.agree("")
    ticket.agree("dht")
    with pytest.raises(
        BadRequest, match=r"swarm lab keeps its directory by dht, .* set to static: .*rotate --directory static"
    ):
        ticket.agree("static")
    for nonsense in ("chord", "DHT", " "):
        with pytest.raises(TicketError, match="must be one of gossip, dht, static"):
            ticket.agree(nonsense)
        with pytest.raises(TicketError, match="must be one of gossip, dht, static"):
            Ticket.new("lab", nonsense)
