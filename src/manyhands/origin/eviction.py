"""What becomes of running sessions when an operator evicts a node."""

from collections.abc import Callable, Collection, Iterable
from typing import NamedTuple

from manyhands.core import NodeId, Span
from manyhands.origin.session import Session


class Evicted(NamedTuple):
    """Sessions that a node served when it was evicted: those that repair to others, and those that end where they are, for
    no other node holds its layers."""

    repaired: int = 0
    finishing: int = 0


def leave(sessions: Iterable[Session], evicted: Collection[NodeId], unheld: Callable[[], Collection[Span]]) -> Evicted:
    """Count hops on `evicted` nodes as lost, but those of layers that are `unheld` by others: they serve on. Asked again at
    every token, so that a session moves as soon as others hold them."""
    repaired = finishing = 0
    for session in sessions:
        there = [i for i, hop in enumerate(session.route.hops) if hop.offer.node in evicted]
        if not there:
            continue
        missing = unheld()
        kept = [i for i in there if any(gap.overlaps(session.route.hops[i].offer.info.span) for gap in missing)]
        lost = [i for i in there if i not in kept and i not in session.losses]
        for index in lost:
            session.lose(index, "was evicted")
        repaired, finishing = repaired + bool(lost), finishing + (bool(kept) and not lost)
    return Evicted(repaired, finishing)
