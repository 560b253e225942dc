"""Tokens, the first bytes of TLS, and who has to go when too many callers have proved nothing."""

import hashlib
import os
import ssl

import pytest

from manyhands.net.admission import (
    MAX_HELLO_BYTES,
    MAX_SEEN,
    TOKEN_LENGTH,
    NotAMember,
    Pending,
    PendingLimits,
    Tokens,
    server_name,
    source_of,
)

SECRET = bytes(32)
LIMITS = PendingLimits(total=8, per_source=4, patience_s=3.0)


def hello(name: str | None) -> bytes:
    """The first flight of OpenSSL's client."""
    context = ssl.create_default_context()
    context.check_hostname = False
    sent, received = ssl.MemoryBIO(), ssl.MemoryBIO()
    tls = context.wrap_bio(received, sent, server_hostname=name)
    with pytest.raises(ssl.SSLWantReadError):
        tls.do_handshake()
    return sent.read()


def test_a_member_knows_a_members_token() -> None:
    token = Tokens(SECRET, os.urandom).make()
    assert len(token) == TOKEN_LENGTH <= 63
    Tokens(SECRET, os.urandom).check(token)


def test_tokens_of_others_are_refused() -> None:
    ours = Tokens(SECRET, os.urandom)
    token = ours.make()
    flipped = token[:-1] + ("0" if token[-1] != "0" else "1")
    for wrong in (Tokens(b"\1" * 32, os.urandom).make(), flipped, "", "manyhands", token[:-2], token + "00", "z" * 56):
        with pytest.raises(NotAMember):
            ours.check(wrong)
    ours.check(token)


def test_a_token_is_good_once_and_memory_of_them_is_bounded() -> None:
    numbers = iter(range(MAX_SEEN + 10))
    tokens = Tokens(SECRET, lambda size: next(numbers).to_bytes(size, "big"))
    first = tokens.make()
    tokens.check(first)
    with pytest.raises(NotAMember, match="used before"):
        tokens.check(first)
    for _ in range(MAX_SEEN + 5):
        tokens.check(tokens.make())
    assert len(tokens._seen) == MAX_SEEN


def test_a_token_is_good_once_however_it_is_written() -> None:
    """It goes over the network in clear: else every spelling of an overheard one would open another handshake."""
    tokens = Tokens(SECRET, os.urandom)
    token = tokens.make()
    tokens.check(token)
    for again in (token.upper(), token.title(), f"{token[:2]} {token[2:]}"):
        with pytest.raises(NotAMember, match="used before"):
            tokens.check(again)


def test_the_name_is_found_in_what_openssl_sends_however_it_is_cut() -> None:
    token = Tokens(SECRET, os.urandom).make()
    first = hello(token)
    assert server_name(first) == token
    for cut in range(len(first)):
        assert server_name(first[:cut]) == (5 if cut < 5 else len(first))


def test_what_is_no_hello_is_refused_at_its_first_bytes() -> None:
    for first in (b"GET / HTTP/1.1\r\n", b"\x16\x02", b"\0", b"\x16\x03\x01\xff\xff", b"\x16\x03\x01\0\0"):
        with pytest.raises(NotAMember):
            server_name(first)
    with pytest.raises(NotAMember, match="no token"):
        server_name(hello(None))


def test_a_hello_that_lies_about_its_lengths_is_refused_and_nothing_else_raised() -> None:
    """Every byte replaced, and random bodies: a name, or NotAMember."""
    first = hello("x" * TOKEN_LENGTH)
    assert len(first) < MAX_HELLO_BYTES
    bodies = [hashlib.sha512(bytes([i])).digest() * 4 for i in range(64)]
    damaged = [first[:at] + bytes([value]) + first[at + 1 :] for at in range(5, len(first)) for value in (0, 255)]
    for data in [*damaged, *(b"\x16\x03\x01\x01\x00\x01" + body[1:] for body in bodies)]:
        try:
            assert isinstance(server_name(data), str)
        except NotAMember:
            pass


@pytest.mark.parametrize(
    ("host", "source"),
    [
        ("10.1.2.3", "10.1.2.3"),
        ("::ffff:10.1.2.3", "10.1.2.3"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::"),
        ("fe80::1%eth0", "fe80::"),
        ("", ""),
    ],
)
def test_one_source_is_an_address_or_a_network_of_ipv6(host: str, source: str) -> None:
    assert source_of(host) == source


def test_a_flood_from_one_source_drops_its_own_oldest() -> None:
    pending = Pending[int](LIMITS)
    assert pending.enter(100, "b", 0.0) is None
    assert [pending.enter(i, "a", 0.0) for i in range(6)] == [None] * 4 + [0, 1]
    assert 100 in pending and len(pending) == 5


def test_a_flood_from_many_sources_drops_from_the_greediest() -> None:
    pending = Pending[int](LIMITS)
    for i in range(3):
        pending.enter(i, "greedy", 0.0)
    assert [pending.enter(10 + i, f"s{i}", 0.0) for i in range(6)] == [None] * 5 + [0]
    assert pending.enter(99, "greedy", 0.0) == 1 and len(pending) == 8


def test_a_caller_that_shares_its_address_with_a_flood_has_the_time_of_per_source_others() -> None:
    pending = Pending[int](LIMITS)
    for i in range(50):
        pending.enter(i, "nat", 0.0)
    pending.enter(1000, "nat", 0.0)
    for i in range(LIMITS.per_source - 1):
        assert pending.enter(2000 + i, "nat", 0.0) != 1000
    assert pending.enter(3000, "nat", 0.0) == 1000


def test_who_proves_nothing_in_time_goes_and_who_left_is_forgotten() -> None:
    pending = Pending[int](LIMITS)
    for i in range(3):
        pending.enter(i, f"s{i}", float(i))
    pending.leave(1)
    pending.leave(1)
    assert pending.overdue(2.9) == []
    assert pending.overdue(3.0) == [0] and pending.overdue(5.0) == [2]
    assert len(pending) == 0 and pending.evict() is None and not pending._sources
