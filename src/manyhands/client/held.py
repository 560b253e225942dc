"""A client's answers, held open in a thread of their own until the client closes or is collected."""

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, suppress

from manyhands.client.backend import AnswerSource
from manyhands.errors import BadRequest

SourceOpening = Callable[[], AbstractAsyncContextManager[AnswerSource]]
# Of a gateway, that one client reads at once; more wait.
MAX_STREAMS = 64


class HeldSource:
    """A client's answers, held open by the client's thread until `close`.

    It knows nothing of the client: one that is dropped without `close` is collected, and its source is closed then.
    """

    def __init__(self, opening: SourceOpening, loop: asyncio.AbstractEventLoop) -> None:
        self._opening, self._loop = opening, loop
        self._end = asyncio.Event()
        self.ready: asyncio.Future[AnswerSource] = loop.create_future()
        self.over: Future[None] = Future()

    def run(self) -> None:
        """The thread: open, wait for `close`, leave. What leaving raises is in `over`."""
        asyncio.set_event_loop(self._loop)
        # Each stream of a gateway reads in a thread.
        self._loop.set_default_executor(ThreadPoolExecutor(MAX_STREAMS, "manyhands"))
        try:
            try:
                self._loop.run_until_complete(self._hold())
            finally:
                self._loop.run_until_complete(self._end_uses())
                self._loop.run_until_complete(self._loop.shutdown_asyncgens())
                self._loop.run_until_complete(self._loop.shutdown_default_executor())
                self._loop.close()
        except BaseException as error:
            self.over.set_exception(error)
        else:
            self.over.set_result(None)

    def close(self) -> None:
        """From any thread. Harmless when repeated."""
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._end.set)

    async def _end_uses(self) -> None:
        """Cancel what threads of the program still wait for."""
        left = asyncio.all_tasks() - {asyncio.current_task()}
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)

    async def _hold(self) -> None:
        """Hold it until `close`, which also ends an opening."""
        holding, ending = asyncio.ensure_future(self._held()), asyncio.ensure_future(self._end.wait())
        await asyncio.wait([holding, ending], return_when=asyncio.FIRST_COMPLETED)
        if not self.ready.done():
            holding.cancel()
            self.ready.set_exception(BadRequest("this client was closed while it was being opened: connect again"))
            self.ready.exception()  # seen, as below
        ending.cancel()
        with suppress(asyncio.CancelledError):
            await holding

    async def _held(self) -> None:
        """One task enters and leaves. If it cannot be opened, every use tells why until `close`."""
        try:
            async with self._opening() as source:
                self.ready.set_result(source)
                await self._end.wait()
        except Exception as error:
            if self.ready.done():
                raise
            self.ready.set_exception(error)
            self.ready.exception()  # seen, so that asyncio does not log it if nothing asks
            await self._end.wait()
