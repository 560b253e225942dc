"""Links that peers dialled and that were not taken yet: the accept side of every Transport."""

import asyncio
import logging
from typing import Generic, TypeVar

from manyhands.errors import LinkClosed
from manyhands.net.transport import Link

logger = logging.getLogger(__name__)

L = TypeVar("L", bound=Link)


class Arrivals(Generic[L]):
    """Links in the order in which they came. Bounded by the limit that its transport puts on open links."""

    def __init__(self) -> None:
        self._waiting: asyncio.Queue[L | None] = asyncio.Queue()  # None wakes a taker at the end
        self.has_ended = False

    def put(self, link: L) -> None:
        """Let a taker have `link`, which is aborted if this has ended."""
        if self.has_ended:
            link.abort("this node stopped listening")
        else:
            self._waiting.put_nowait(link)

    async def take(self) -> L:
        """The next link that is still open. Raises LinkClosed, to every taker, once this has ended."""
        while not self.has_ended:
            link = await self._waiting.get()
            if link is not None and not link.is_closed:
                return link
        self._waiting.put_nowait(None)  # for the next taker
        raise LinkClosed("this node stopped listening")

    def end(self) -> None:
        """No link is given out any more."""
        self.has_ended = True
        self._waiting.put_nowait(None)

    def end_with(self, listener: asyncio.Task[None]) -> None:
        """What to do when a task that listens is done: cancelling it is in order, a bug in it ends this, loudly."""
        if not listener.cancelled() and listener.exception() is not None:
            logger.error("%s ended", listener.get_name(), exc_info=listener.exception())
            self.end()

    async def aclose(self) -> None:
        """End, and close what was not taken."""
        self.end()
        while not self._waiting.empty():
            link = self._waiting.get_nowait()
            if link is not None:
                await link.aclose()
        self._waiting.put_nowait(None)  # in place of those just taken out
