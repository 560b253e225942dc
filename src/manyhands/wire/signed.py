"""Whose a session is: its id is made of its origin's key, and its Opens are signed by it. What hops attest is signed by them.

    8 drawn bytes ─ session_of(origin, drawn) ─► SessionId ─ is_session_of ─► the receiver of an Open or a Close

What is signed is a label and the JSON of the Open with an empty signature, as control.py encodes what it has decoded. An
Open names its receiver (`to`), repeats what the receiver's Hello to the origin said (`token`) and has a number (`serial`).
Each receiver accepts a number once for each link, so an Open sent again, later, or to another node is refused.
"""

import hashlib
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from typing import Final

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from manyhands.core import NodeId, SessionId
from manyhands.wire import control
from manyhands.wire.attest_message import Attested, Signature
from manyhands.wire.message import Open

LABEL: Final = b"manyhands open 4\0"
ATTEST_LABEL: Final = b"manyhands attest 1\0"
SESSION_LABEL: Final = b"manyhands session of\0"
DRAWN_BYTES: Final = 8  # of a session id, at random; the others follow from them and from its origin
WINDOW: Final = (
    1024  # serials below the highest that may still come: Opens may overtake each other where they are forwarded
)
UNSIGNED: Final = Signature("00" * 64)


def session_of(origin: NodeId, drawn: bytes) -> SessionId:
    """The session of `origin` by DRAWN_BYTES drawn bytes. Another node has the same id with a probability of 2**-64."""
    return SessionId(drawn + hashlib.sha256(SESSION_LABEL + origin.encode() + drawn).digest()[: 16 - DRAWN_BYTES])


def is_session_of(session: SessionId, origin: NodeId) -> bool:
    """Whether only `origin` can have made this id, so that an Open or a Close of it is its own."""
    return session == session_of(origin, session[:DRAWN_BYTES])


class Signer:
    """Signs for one node: the Opens of its sessions, each with a new serial, and what it attests. Never prints its key."""

    def __init__(self, key: Ed25519PrivateKey) -> None:
        self.node = NodeId(key.public_key().public_bytes_raw().hex())
        self._sign: Callable[[bytes], bytes] = key.sign
        self._serials = count(1)

    def __repr__(self) -> str:
        return f"<Signer {self.node[:8]}>"

    def sign(self, message: Open) -> Open:
        """`message` with the next serial and this origin's signature, whatever it has of both."""
        numbered = replace(message, origin=self.node, serial=next(self._serials), signature=UNSIGNED)
        if message.sampling is not None:  # 1 is read as 1.0 there
            numbered = control.decode(Open, control.encode(numbered))
        return replace(numbered, signature=Signature(self._sign(LABEL + control.encode(numbered)).hex()))

    def attest(self, message: Attested) -> Attested:
        """`message` with this node's signature."""
        return replace(message, signature=Signature(self._sign(_attested_bytes(message)).hex()))


def is_signed(message: Open) -> bool:
    """Whether the node that `message` names as its origin has signed it. Takes about 0.1 ms."""
    return _is_by(message.origin, message.signature, LABEL + control.encode(replace(message, signature=UNSIGNED)))


def is_attested(message: Attested, node: NodeId) -> bool:
    """Whether `node` has signed `message`. Takes about 0.1 ms."""
    return _is_by(node, message.signature, _attested_bytes(message))


def _is_by(node: NodeId, signature: Signature, signed: bytes) -> bool:
    try:
        Ed25519PublicKey.from_public_bytes(bytes.fromhex(node)).verify(bytes.fromhex(signature), signed)
    except (InvalidSignature, ValueError):
        return False
    return True


def _attested_bytes(message: Attested) -> bytes:
    return ATTEST_LABEL + control.encode(replace(message, signature=UNSIGNED))


class Serials:
    """The serials that came on one link: each is admitted once, and none that is WINDOW or more below the highest. Pure."""

    def __init__(self) -> None:
        self._highest = 0
        self._seen = 0  # bit n: highest - n has come

    def admit(self, serial: int) -> bool:
        """Whether `serial` comes for the first time."""
        ahead = serial - self._highest
        if ahead > 0:
            self._seen = (self._seen << min(ahead, WINDOW) | 1) & ((1 << WINDOW) - 1)
            self._highest = serial
            return True
        if -ahead >= WINDOW or self._seen >> -ahead & 1:
            return False
        self._seen |= 1 << -ahead
        return True
