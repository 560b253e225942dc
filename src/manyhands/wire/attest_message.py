"""What an origin asks of a hop when it audits it (origin/audit.py), and the answer. Part of message.py."""

from dataclasses import dataclass
from typing import NewType

from manyhands.core import ModelId, Precision, SessionId, Span

Signature = NewType("Signature", str)  # 128 hex digits: an Ed25519 signature
Root = NewType("Root", str)  # 64 hex digits: a hash over the hashes of rows (worker/leaves.py)


@dataclass(frozen=True, slots=True)
class Attest:
    """Hop `hop`, or its standby: sign which rows came to you of positions [0, `until`), and which your layers made of those
    of [`start`, `until`). Answered by Attested where the Open said `attests`, at most once a second by each place."""

    session: SessionId
    epoch: int
    hop: int
    start: int
    until: int


@dataclass(frozen=True, slots=True)
class Attested:
    """The answer to Attest: the roots of the rows that came (`given`) and of those that layers `span` of `model` made of them
    (`made`), signed by the node that says so (signed.py). None: not all of these positions were computed here, or some are
    being computed."""

    session: SessionId
    epoch: int
    hop: int
    start: int
    until: int
    model: ModelId
    precision: Precision
    span: Span
    given: Root | None
    made: Root | None
    signature: Signature
