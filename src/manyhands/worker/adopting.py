"""Sessions that another origin goes on with: what its Open names by the proof of their handle (wire/handle.py). No links.

Open(resume = proof) ─► parked (parking.py), or served here still ─► a copy       origin gone ─ orphaned ─► parked
"""

import asyncio
from collections.abc import Collection, Iterable

from manyhands.core import NodeId
from manyhands.wire.handle import adopted_name
from manyhands.wire.message import Close, Open
from manyhands.worker.opening import Opening
from manyhands.worker.parking import Parked, Parking
from manyhands.worker.session import HopSession


def lend(sessions: Iterable[HopSession], message: Open) -> Parked | None:
    """What `message` may go on with of `sessions` that are served: their origin may be gone without a sign, or cut
    off from its client. They go on. None if `message` proves nothing of them."""
    adopted = adopted_name(message.resume) if message.resume is not None else None
    meant = [
        one
        for one in sessions
        if adopted is not None
        and (one.opened.adoption, one.opened.span, one.opened.ends) == (adopted, message.span, message.ends)
        and not one.is_standby
    ]
    longest = max(meant, key=lambda one: one.firm, default=None)
    return longest.lend(longest.firm) if longest is not None else None


def found_parked(parking: Parking, message: Open, origin: NodeId) -> Parked | None:
    """What an Open of `origin` would go on with, if it is parked here."""
    if message.resume is None:
        return None
    now = asyncio.get_running_loop().time()
    return parking.find(message.resume, message.span, origin, message.ends, now)


def held_for(parking: Parking, message: Open, origin: NodeId) -> Parked | None:
    """What an Open keeps of what is parked until it is carried out, if its lease covers all the memory of that: then this may
    lose its room to the lease."""
    parked = found_parked(parking, message, origin)
    return parked if parked is not None and parked.capacity <= message.capacity else None


def resumable(opening: Opening, parking: Parking, places: Collection[HopSession]) -> Parked | None:
    """What an Open goes on with: what was parked as it came or is now, or is served."""
    message = opening.message
    parked = found_parked(parking, message, opening.origin.peer)
    found = [one for one in (parked, opening.parked, lend(places, message)) if one is not None]
    return max(found, key=lambda one: one.positions, default=None)


def orphaned(session: HopSession) -> Close | None:
    """How a place ends whose origin is lost: parked, as far as it holds no guess, if another origin may adopt it."""
    opened = session.opened
    return None if opened.adoption is None else Close(opened.session, opened.adoption, session.firm)
