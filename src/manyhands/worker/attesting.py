"""Attest: a node says, signed, which rows came to a place of a session and what its layers made of them."""

import asyncio
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Final
from weakref import WeakKeyDictionary

from manyhands.net.transport import Link, try_send
from manyhands.node import Node
from manyhands.wire.attest_message import Attest, Attested
from manyhands.wire.signed import UNSIGNED, Signer
from manyhands.worker.serve import SpanHost
from manyhands.worker.session import HopSession

# Between two answers of one place. Each takes the event loop 0.1 ms, and 2 ms more at a hundred thousand positions.
ATTEST_S: Final = 1.0


class Attesting:
    """Answers for `hosts`, the spans of the node that `signer` signs for."""

    def __init__(self, hosts: Sequence[SpanHost], signer: Signer) -> None:
        self._hosts, self._signer = hosts, signer
        self._answered: WeakKeyDictionary[HopSession, float] = WeakKeyDictionary()  # when each place did last

    def register(self, node: Node) -> None:
        node.handle(Attest, lambda message, link: self.on_attest(message, link, asyncio.get_running_loop().time()))

    def on_attest(self, message: Attest, link: Link, now: float) -> bool:
        """Answer the session's origin, unless the place did so less than ATTEST_S ago. Of rows that are being computed nothing
        is said: what came may be noted, and what is made of it not yet."""
        for host in self._hosts:
            place = host.meant(message, link.peer)
            if place is not None and now >= self._answered.get(place, -math.inf) + ATTEST_S:
                self._answered[place], said = now, _attested(place, message)
                changes_from = host.engine.computes_from(place)
                if changes_from is not None and changes_from < message.until:
                    said = replace(said, given=None, made=None)
                try_send(link, self._signer.attest(said))
        return True


def _attested(place: HopSession, message: Attest) -> Attested:
    """What `place` has of the positions of `message`; to be signed."""
    opened, leaves = place.opened, place.leaves
    given = made = None
    if leaves is not None:
        given, made = leaves.given.root(0, message.until), leaves.made.root(message.start, message.until)
    where = message.session, message.epoch, message.hop, message.start, message.until
    return Attested(*where, opened.model, opened.precision, opened.span, given, made, UNSIGNED)
