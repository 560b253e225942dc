"""A session's hops, asked how far they are: which one holds the route up, and which is at fault for rows that cannot be.

    Probe ─► each hop ─► Progress ─┬─ hold_up ─► HeldStep
         session.doubts ─ trace ───┴─ misleading, or behind those that doubt ─► losses

A hop is held to what the one behind it says it got: of the two, the one before. One that lies so costs its neighbour its
place, as by any Fault, and not a hop further away.
"""

import asyncio
import contextlib
from collections.abc import Collection, Mapping
from types import MappingProxyType

from manyhands.net.transport import try_send
from manyhands.origin.fault import Blamed, Doubt
from manyhands.origin.pace import HeldStep, held_step
from manyhands.origin.route import Hop
from manyhands.origin.session import HopLost, Session
from manyhands.wire.message import Probe, Progress


async def ask(session: Session, limit_s: float) -> None:
    """Ask every hop how far it is, and wait for the answers (`session.progress`), `limit_s` at most. Raises as `wait`."""
    session.progress.clear()
    for hop in session.route.hops:
        try_send(hop.control, Probe(session.id, session.route.epoch))
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(limit_s):
            while len(session.progress) < len(session.route.hops):
                await session.wait()


async def hold_up(session: Session, limit_s: float) -> HeldStep:
    """The hop that holds the route up (pace.py). Deadline: `limit_s` for answers, and once more for a result if every hop has
    computed all: it may be on its way."""
    hops, until = session.route.hops, session.returns.sent_until
    await ask(session, limit_s)
    held = held_step(session.progress, len(hops), until, hops[0].left_until(until))
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(limit_s):
            while held.is_done and not session.returns.results:
                await session.wait()
    return held


async def trace(session: Session, limit_s: float) -> None:
    """If there are doubts about steps or rows, find the hop that they are to be laid to: it counts as lost, and its node is not
    to come back. `limit_s`: for answers, each time that another hop has doubts."""
    told = dict[int, Doubt]()
    while session.doubts.keys() - told.keys():
        told |= session.doubts
        session.doubts.clear()
        with contextlib.suppress(HopLost):
            await ask(session, limit_s)
    misled = {hop: doubt.reason for hop, doubt in told.items() if doubt.is_misled}
    if told and not lose_misleading(session, misled):
        # The one behind the last that had not computed what came back; or the last, which sent what cannot be.
        nodes = [each.offer.node for each in session.route.hops]
        hop = min(max(told) + 1, len(nodes) - 1)
        if hop > max(told):
            session.told.by[nodes[hop]] = nodes[hop - 1]
        session.lose(hop, "; ".join(doubt.reason for doubt in told.values()), untrusted=True)


def lose_beside(session: Session) -> None:
    """Where one node after the other is blamed: who says so may say it of any, or they hand on what one before them made up.

    With the second those beside it are lost, too; a node that has blamed two does not come back into the session, and those two
    may, where no others cover. With the third all others are lost, and it stays: one of them is at fault.
    """
    hops, told, untrusted = session.route.hops, session.told, session.untrusted_nodes
    blamed = {index: hops[index].offer.node for index in session.losses if _is_blamed(session, hops[index])}
    told.forgive(untrusted, is_new=False)
    times = len(told.lost.keys() - blamed.values()) + 1  # those that are blamed at once may have died at once
    for index, node in blamed.items():
        after = hops[index + 1 : index + 2]
        told.lost[node] = Blamed(told.by.get(node) or (after[0].offer.node if after else None), hops[index].control)
    untrusted |= (accusers := told.accusers())
    untrusted -= {node for node, said in told.lost.items() if said.by in accusers}
    others = [index for index, hop in enumerate(hops) if hop.offer.node not in blamed.values()]
    if times == 1:
        others = [index for index in others if hops[index].offer.node in accusers]
    elif times == 2:
        others = [index for index in others if not blamed.keys().isdisjoint((index - 1, index + 1))]
    elif blamed and others:
        untrusted -= set(blamed.values())
        session.standbys.let_go(session.route.begin_anew(0))
        for index in blamed:
            del session.losses[index]
    for index in others if blamed else ():
        session.lose(index, f"is on a route with {hops[min(blamed)].offer.name}, the next that is blamed")


def _is_blamed(session: Session, hop: Hop) -> bool:
    """Whether a lost hop sent what cannot be, or another says what this origin does not see of it."""
    node, told = hop.offer.node, session.told
    is_told = node in told.by and not hop.control.is_closed
    return node not in told.accusers() and (node in session.untrusted_nodes or is_told)


def lose_doubtful(session: Session) -> None:
    """As `trace`, while the route takes another shape, where a Probe would end places that were not told of it yet: hops that
    have doubts are lost, and those before them. They may come back where no others cover."""
    for index, doubt in session.doubts.items():
        for each in (max(0, index - 1), index):
            session.lose(each, doubt.reason)


def lose_misleading(session: Session, misled: Mapping[int, str] = MappingProxyType({})) -> bool:
    """Whether a hop sent on what it was never sent, by the answers to a Probe, or by word of the hops `misled`: it is lost, and
    not to come back."""
    returns = session.returns
    sent_until = max(returns.sent_until, returns.reached, session.begins_at)
    if (hop := misleading(session.progress, returns.guess, sent_until, misled)) is None:
        return False
    session.lose(hop, "; ".join(misled.values()) or "sent on steps that did not come to it", untrusted=True)
    return True


def misleading(
    progress: Mapping[int, Progress], guess: int, sent_until: int, misled: Collection[int] = ()
) -> int | None:
    """The hop before the first that got what was never sent, if one did: steps under a guess after `guess`, or beyond
    `sent_until` under that; or that says so, of the steps that came to it."""
    strange = [hop for hop, said in progress.items() if (said.guess, said.received) > (guess, sent_until)]
    return max(0, min([*strange, *misled]) - 1) if strange or misled else None
