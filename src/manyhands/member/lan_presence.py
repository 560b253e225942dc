"""A member on its local network: announced there by mDNS, told of others there; anew when its machine's address changes."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Final

from manyhands.core import NodeAddr
from manyhands.errors import BadRequest
from manyhands.member.member import Member
from manyhands.swarm.lan import Advertised, Browser, advertise

logger = logging.getLogger(__name__)

RETRY_S: Final = 30.0  # where a new network took no news
SEEN_S, MET_S = 3.0, 5.0  # for a node of the swarm to be seen, and then to take a call and say what it serves


@asynccontextmanager
async def present_on_lan(member: Member, model: str, say: Callable[[str], None]) -> AsyncIterator[Advertised | None]:
    """Until the block ends. None where it is pointless: scope off, or what listens on loopback only.

    `model`: the name of what it serves. `say` gets a line for people if multicast is not to be had.
    """
    scope, name = member.config.scope, member.config.name
    if scope == "off" or not (_direct(member) or member.own.may_change):
        yield None
        return
    browser = Browser(lambda: member.found_on_lan(browser.addresses(member.ticket)))
    async with (
        AsyncExitStack() as networks,
        advertise(member.ticket, member.id, (), scope, name=name, model=model) as said,
    ):
        told = _direct(member)
        try:
            if told:
                await _appear(told, said, browser, networks)
        except (OSError, BadRequest) as error:
            say(f"other machines cannot find this swarm by themselves ({error}): give them the whole line below")
        following = asyncio.ensure_future(_follow(member, told, said, browser, networks))
        try:
            yield said
        finally:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)


async def met_on_lan(member: Member) -> bool:
    """Whether a node of the swarm that the local network names takes a call: none may be left where the ticket says."""
    browser = Browser(lambda: member.found_on_lan(browser.addresses(member.ticket)))

    def is_met() -> bool:
        return any(record.node != member.id for record in member.records())

    with contextlib.suppress(OSError):
        async with browser.listen():
            if not await member.wait_until(is_met, SEEN_S) and browser.addresses(member.ticket):
                await member.wait_until(is_met, MET_S)
    return is_met()


def _direct(member: Member) -> list[NodeAddr]:
    return [addr for addr in member.addresses if "%" not in addr.host and not addr.host.startswith("127.")]


async def _appear(told: list[NodeAddr], said: Advertised, browser: Browser, networks: AsyncExitStack) -> None:
    """On the networks that there are now. Raises OSError."""
    await networks.aclose()
    await said.move(told)
    await networks.enter_async_context(browser.listen())


async def _follow(
    member: Member, told: list[NodeAddr], said: Advertised, browser: Browser, networks: AsyncExitStack
) -> None:
    """Appear anew for every change of the address, which the member's own records tell. Without end."""
    while True:
        async with member.directory.changed:
            while _direct(member) == told:
                await member.directory.changed.wait()
        told = _direct(member)
        try:
            await _appear(told, said, browser, networks)
        except Exception as error:  # what helps others to find the node must not end it
            logger.warning("not announced on the local network now: %r", error)
            told = []
            await asyncio.sleep(RETRY_S)
