"""What arrived on a link and was not taken yet. Knows no bytes and no transport: what fills it pauses while it is full."""

import asyncio
from collections import deque
from collections.abc import Callable

from manyhands.errors import LinkClosed
from manyhands.wire.message import Credit, DirectoryUpdate, Message, Step
from manyhands.wire.weights_message import WeightsChunk

# Received and not yet taken. 64 frames: four sessions' default credit (16 each). The last read may go over by one read.
MAX_QUEUED_MESSAGES = 64
MAX_QUEUED_BYTES = 16 << 20
ID_BYTES = 40  # of a token id: a number of Python and its place
JSON_BYTES = 13  # of memory for each byte of a JSON frame: an Open that is all biases takes 12.4, others 2 to 4

Take = Callable[[Message], None]


class Inbox:
    """Messages in order, handed to at most one taker at a time, which is called where they are put."""

    def __init__(self) -> None:
        self.waiting: deque[tuple[Message, int]] = deque()  # and bytes of their frames
        self._end: str | None = None
        self._take: Take | None = None
        self._ended: asyncio.Future[Exception] | None = None  # done, also by cancelling: `_take` gets nothing more
        self._is_handing = False

    @property
    def is_full(self) -> bool:
        waiting = self.waiting
        return bool(waiting) and (len(waiting) >= MAX_QUEUED_MESSAGES or self.num_bytes >= MAX_QUEUED_BYTES)

    @property
    def num_bytes(self) -> int:
        """Of memory for what waits."""
        return sum(_held_bytes(*one) for one in self.waiting)

    def put(self, message: Message, frame_bytes: int) -> None:
        """Keep a message, whose frame had so many bytes, until hand_on."""
        self.waiting.append((message, frame_bytes))

    def hand_to(self, take: Take) -> "asyncio.Future[Exception]":
        """Let `take` have what waits and comes, at each `hand_on`, until the future is done: cancelled, or why it ended.

        The reason is LinkClosed, after the last message, or what `take` raised; messages after that one wait for the next.
        It is a result, not an exception: asyncio would log an exception that is never awaited.
        """
        assert self._ended is None or self._ended.done(), "deliver has one caller at a time"
        self._take, self._ended = take, asyncio.get_running_loop().create_future()
        return self._ended

    def hand_on(self, is_over: Callable[[], bool] = lambda: False) -> bool:
        """Give what waits to the taker, until this turn `is_over`; whether that left some.

        Within a call of `take` this does nothing: the message at hand is done first.
        """
        if self._is_handing or self._take is None or self._ended is None:
            return False
        ended = self._ended
        self._is_handing = True
        try:
            reason = self._hand_on(self._take, ended, is_over)
        finally:
            self._is_handing = False
        if reason is not None and not ended.done():
            ended.set_result(reason)
        if self._ended is not ended:  # `take` ended its own delivery, and another began
            return self.hand_on(is_over)
        if not ended.done():
            return bool(self.waiting)
        self._take = self._ended = None  # they lead to whom this belongs: what is over is freed at once
        return False

    def _hand_on(self, take: Take, ended: "asyncio.Future[Exception]", is_over: Callable[[], bool]) -> Exception | None:
        """Why no more is to be handed on, if so. (A frame of its own: an error's traceback must not lead to the error.)"""
        try:
            while self.waiting and not ended.done():
                take(self.waiting.popleft()[0])
                if self.waiting and is_over():
                    return None
            return LinkClosed(self._end) if self._end is not None else None
        except Exception as error:
            return error

    def end(self, reason: str, *, drop: bool) -> None:
        """No more will arrive; the next `hand_on` ends the taker. `drop`: what arrived is discarded. The first call counts."""
        self._end = self._end or reason
        if drop:
            self.waiting.clear()


def _held_bytes(message: Message, frame_bytes: int) -> int:
    """Bytes of memory that a message holds while it waits; `frame_bytes` were its frame's."""
    match message:
        case Step():
            rows = len(message.payload.data) if message.payload is not None else 0
            return rows + ID_BYTES * len(message.ids or ())
        case Credit():
            return 0
        case WeightsChunk():
            return len(message.data)
        case DirectoryUpdate():
            return len(message.body)
        case _:
            return JSON_BYTES * frame_bytes
