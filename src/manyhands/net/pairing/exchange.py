"""The messages of a pairing: SPAKE2 over a code, key confirmation both ways, and the ticket under the key. No I/O.

    joiner                                  host
      first  ── X, 33 bytes ──────────────►
             ◄─────────────── Y, 33 bytes ── answer
      prove  ── proof of the joiner, 32 ──►  is_right: a wrong one is a failed guess, and nothing more is said
             ◄─ proof of the host, sealed ── seal
      open

X and Y are SPAKE2's (package `spake2`, Ed25519). Both sides hash the whole transcript: swarm, both TLS certificates, X, Y.
From SPAKE2's key and that hash HKDF derives two proof keys and the key of ChaCha20-Poly1305 that the ticket is sealed with.
A man in the middle has other certificates, so another transcript and other keys, even if he forwards every message. Y alone
reveals nothing of the code: the host proves the code only to a joiner that did so before.

The methods take some 10 ms of pure Python each: call them outside the event loop.
"""

import hashlib
import hmac
import struct
from dataclasses import dataclass
from typing import Any, Final

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from manyhands.errors import ProtocolError

ELEMENT_BYTES: Final = 33  # of X and Y: the side, and a point
PROOF_BYTES: Final = 32
MAX_SEALED_BYTES: Final = 8192  # a ticket has at most 16 addresses of some 300 bytes
_LABEL: Final = b"manyhands pairing v1"
_NONCE: Final = bytes(12)  # each key seals one text


@dataclass(frozen=True, slots=True)
class PairingContext:
    """What both sides know before they begin: the swarm's fingerprint, and both TLS certificates (DER)."""

    swarm: str
    joiner: bytes
    host: bytes


@dataclass(frozen=True, slots=True)
class _Keys:
    transcript: bytes
    joiner: bytes
    host: bytes
    seal: bytes

    def proof(self, side: bytes) -> bytes:
        return hmac.digest(self.joiner if side == b"A" else self.host, side + self.transcript, hashlib.sha256)


class JoinerExchange:
    """The side of the machine that has the code from a person's hand. Its methods are called once each, in order."""

    def __init__(self, code: str, setting: PairingContext) -> None:
        self._setting = setting
        self._pake = _spake2().SPAKE2_A(code.encode(), setting.joiner, setting.host)
        self._first = b""
        self._keys: _Keys | None = None

    def first(self) -> bytes:
        """The joiner's first message, X."""
        self._first = bytes(self._pake.start())
        return self._first

    def prove(self, answer: bytes) -> bytes:
        """The joiner's proof, for the host's Y. Raises ProtocolError if Y is no such message."""
        self._keys = _keys(_finish(self._pake, answer), self._setting, self._first, answer)
        return self._keys.proof(b"A")

    def open(self, proof: bytes, sealed: bytes) -> bytes:
        """What the host sealed. Raises ProtocolError unless the host knows the code, and for damaged bytes."""
        assert self._keys is not None, "prove comes first"
        if not hmac.compare_digest(proof, self._keys.proof(b"B")):
            raise ProtocolError("the other machine does not know the code")
        try:
            return ChaCha20Poly1305(self._keys.seal).decrypt(_NONCE, sealed, self._keys.transcript)
        except InvalidTag as error:
            raise ProtocolError("the ticket was damaged on its way") from error


class HostExchange:
    """The side of the machine that shows the code. Its methods are called once each, in order."""

    def __init__(self, code: str, setting: PairingContext) -> None:
        self._setting = setting
        self._pake = _spake2().SPAKE2_B(code.encode(), setting.joiner, setting.host)
        self._keys: _Keys | None = None

    def answer(self, first: bytes) -> bytes:
        """Y, for the joiner's X. Raises ProtocolError if X is no such message."""
        answer = bytes(self._pake.start())
        self._keys = _keys(_finish(self._pake, first), self._setting, first, answer)
        return answer

    def is_right(self, proof: bytes) -> bool:
        """Whether the joiner knows the code."""
        assert self._keys is not None, "answer comes first"
        return hmac.compare_digest(proof, self._keys.proof(b"A"))

    def seal(self, text: bytes) -> tuple[bytes, bytes]:
        """The host's proof, and `text` sealed. Only for a joiner whose proof was right."""
        assert self._keys is not None, "answer comes first"
        sealed = ChaCha20Poly1305(self._keys.seal).encrypt(_NONCE, text, self._keys.transcript)
        return self._keys.proof(b"B"), sealed


def load() -> None:
    """Import what an exchange needs: 0.15 s, better before the other side waits."""
    _spake2()


def _spake2() -> Any:
    import spake2

    return spake2


def _finish(pake: Any, message: bytes) -> bytes:
    """SPAKE2's key. Raises ProtocolError for what is no message of the other side."""
    if len(message) != ELEMENT_BYTES:
        raise ProtocolError(f"a message of the pairing has {ELEMENT_BYTES} bytes, not {len(message)}")
    try:
        return bytes(pake.finish(message))
    except Exception as error:  # SPAKEError, ValueError, NotOnCurve, AssertionError: no common base
        raise ProtocolError("a message of the pairing is no point of the curve, or of this side") from error


def _keys(key: bytes, setting: PairingContext, first: bytes, answer: bytes) -> _Keys:
    parts = (_LABEL, setting.swarm.encode(), setting.joiner, setting.host, first, answer)
    transcript = hashlib.sha256(b"".join(struct.pack(">I", len(part)) + part for part in parts)).digest()
    derived = HKDF(hashes.SHA256(), length=96, salt=transcript, info=_LABEL).derive(key)
    return _Keys(transcript, derived[:32], derived[32:64], derived[64:])
