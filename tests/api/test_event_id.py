"""Ids of events: what goes in comes out, and nothing else is taken for one."""

import base64
import random

import pytest

from manyhands.api.event_id import MAX_ID_CHARS, BadEventId, Position, Reached, Sealer, marks_of, route_bytes, unseal
from manyhands.origin.adoption import HopMark

SECRET, STREAM = b"s" * 32, b"t" * 16
HOPS = (HopMark("a1" * 6, 0, 300), HopMark("b2" * 6, 300, 301))
ROUTE = route_bytes(HOPS)
POSITION = Position(
    *(STREAM, 1, 2**32 - 1, 2**64 - 1, b"s" * 16, b"r" * 8, b"c" * 8),
    (Reached(1 << 20, 200, 0, True, ROUTE), Reached()),
    exactness="E2",
)


def test_ids_carry_a_position() -> None:
    """Of one choice and of 128, with and without routes; 128 over routes of their own stay within the limit."""
    draw = random.Random(1)
    hops = [[HopMark(draw.randbytes(6).hex(), at, at + 9) for at in range(0, 999, 9)] for _ in range(3)]
    routes = [route_bytes(each) for each in hops]
    many = [
        Reached(draw.randrange(1 << 20), draw.randrange(1 << 20), 5, draw.random() < 0.5, draw.choice(routes))
        for _ in range(128)
    ]
    for choices in ((Reached(),), POSITION.choices, tuple(many)):
        for is_usage_told in (False, True):
            wanted = POSITION._replace(choices=choices, is_usage_told=is_usage_told)
            sealed = Sealer(SECRET, STREAM, b"a" * 8).seal(wanted).decode()
            assert unseal(SECRET, sealed) == wanted and len(sealed) <= MAX_ID_CHARS
    short = Sealer(SECRET, STREAM, b"a" * 8).seal(POSITION._replace(choices=(Reached(100, 99, 0, False, ROUTE),)))
    assert len(short) <= 172
    assert marks_of(ROUTE) == HOPS and marks_of(Reached().route) == ()


def test_ids_are_opaque_and_never_the_same() -> None:
    sealer = Sealer(SECRET, STREAM, b"a" * 8)
    ids = [base64.urlsafe_b64decode(sealer.seal(POSITION) + b"==") for _ in range(64)]
    assert len({one[29:] for one in ids}) == 64
    for secret in (POSITION.request, POSITION.caller, b"\xa1" * 6, b"\xff" * 8):
        assert not any(secret in one for one in ids)


def test_what_is_changed_cut_or_of_another_secret_is_refused() -> None:
    """Every bit, every length; other versions, other texts, ids that are too long."""
    sealed = Sealer(SECRET, STREAM, b"a" * 8).seal(POSITION).decode()
    raw = base64.urlsafe_b64decode(sealed + "==")
    bad = [sealed[:length] for length in range(len(sealed))]
    bad += [
        sealed + "A",
        sealed + "=",
        " " + sealed,
        sealed.replace(sealed[40], "é", 1),
        "\0",
        "x" * (MAX_ID_CHARS + 1),
    ]
    for bit in range(8 * len(raw)):
        changed = bytearray(raw)
        changed[bit // 8] ^= 1 << bit % 8
        bad.append(base64.urlsafe_b64encode(changed).rstrip(b"=").decode())
    for text in bad:
        with pytest.raises(BadEventId):
            unseal(SECRET, text)
    with pytest.raises(BadEventId):
        unseal(b"z" * 32, sealed)
