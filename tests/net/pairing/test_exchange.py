"""The messages of a pairing, without a network: both sides agree, and any difference between them is a failed guess."""

import dataclasses

import pytest

from manyhands.errors import ProtocolError
from manyhands.net.pairing.exchange import ELEMENT_BYTES, HostExchange, JoinerExchange, PairingContext

SETTING = PairingContext("0123456789abcdef", b"certificate of the joiner", b"certificate of the host")
TICKET = b"mh1" + b"x" * 400


def meet(joiner: JoinerExchange, host: HostExchange) -> bytes | None:
    """What the joiner gets; None if the host turned it away."""
    proof = joiner.prove(host.answer(joiner.first()))
    return joiner.open(*host.seal(TICKET)) if host.is_right(proof) else None


def test_the_same_code_gives_the_ticket() -> None:
    assert meet(JoinerExchange("ABCDEF", SETTING), HostExchange("ABCDEF", SETTING)) == TICKET


def test_another_code_does_not() -> None:
    assert meet(JoinerExchange("ABCDEG", SETTING), HostExchange("ABCDEF", SETTING)) is None


@pytest.mark.parametrize(
    "seen",
    [
        dataclasses.replace(SETTING, joiner=b"certificate of the man in the middle"),
        dataclasses.replace(SETTING, host=b"certificate of the man in the middle"),
        dataclasses.replace(SETTING, swarm="fedcba9876543210"),
    ],
    ids=["joiner", "host", "swarm"],
)
def test_a_man_in_the_middle_who_forwards_every_message_is_turned_away(seen: PairingContext) -> None:
    """He has other certificates (or offers another swarm): the right code then gives other keys on both sides."""
    assert meet(JoinerExchange("ABCDEF", seen), HostExchange("ABCDEF", SETTING)) is None


def test_a_recorded_exchange_is_worth_nothing_a_second_time() -> None:
    joiner, host = JoinerExchange("ABCDEF", SETTING), HostExchange("ABCDEF", SETTING)
    first = joiner.first()
    proof = joiner.prove(host.answer(first))
    assert host.is_right(proof)
    again = HostExchange("ABCDEF", SETTING)
    again.answer(first)
    assert not again.is_right(proof)


def test_a_host_that_does_not_know_the_code_cannot_hand_over_a_ticket_of_its_own() -> None:
    joiner, impostor = JoinerExchange("ABCDEF", SETTING), HostExchange("ABCDEG", SETTING)
    joiner.prove(impostor.answer(joiner.first()))
    with pytest.raises(ProtocolError, match="does not know the code"):
        joiner.open(*impostor.seal(TICKET))


def test_a_ticket_that_was_changed_on_its_way_is_refused() -> None:
    joiner, host = JoinerExchange("ABCDEF", SETTING), HostExchange("ABCDEF", SETTING)
    joiner.prove(host.answer(joiner.first()))
    proof, sealed = host.seal(TICKET)
    assert TICKET[:8] not in sealed
    with pytest.raises(ProtocolError, match="damaged"):
        joiner.open(proof, bytes([sealed[0] ^ 1]) + sealed[1:])


def test_a_message_that_is_none_is_refused() -> None:
    """Of another length, of the same side, off the curve, of a small subgroup, zero, the other's own message sent back."""
    mine = JoinerExchange("ABCDEF", SETTING).first()
    zero, small = (1).to_bytes(32, "little"), (2**255 - 20).to_bytes(32, "little")  # order 1, order 2
    for first in (
        b"",
        mine[:-1],
        mine + b"x",
        b"B" + mine[1:],
        b"S" + mine[1:],
        b"A" + zero,
        b"A" + small,
        b"A" + b"\xff" * 32,
    ):
        with pytest.raises(ProtocolError):
            HostExchange("ABCDEF", SETTING).answer(first)
    joiner = JoinerExchange("ABCDEF", SETTING)
    reflected = b"B" + joiner.first()[1:]
    assert len(reflected) == ELEMENT_BYTES
    with pytest.raises(ProtocolError):
        joiner.prove(reflected)
