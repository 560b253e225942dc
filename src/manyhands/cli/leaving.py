"""How a member that was told to leave does so."""

import asyncio
from typing import TYPE_CHECKING

from manyhands.cli.reporter import Reporter

if TYPE_CHECKING:
    from manyhands.member.invite import Invitations
    from manyhands.member.member import Member


async def leave(member: "Member", invitations: "Invitations", tell: Reporter) -> None:
    """Hand sessions over and let this node's own answers end, `drain_s` at most for both."""
    limit_s = member.node.worker.config.drain_s
    ends_at = asyncio.get_running_loop().time() + limit_s
    again = "; Ctrl-C again to leave at once" if tell.shows else ""
    tell("leaving", f"leaving: handing sessions over ({limit_s:g} s at most{again})")
    await invitations.withdraw()
    await member.leave()
    if not await member.idle(ends_at):
        tell.line(f"answers of this node had {limit_s:g} s to end (drain_s of [worker]): those under way are cut")
