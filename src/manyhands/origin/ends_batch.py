"""The origin's device: embeds ids, turns hidden states into logits, and lets requests decide on them, batched.

While the device thread is busy, what other requests need piles up and runs as one batch: eight requests pay for one pass
over the head's weights. A row's bits do not depend on the others (docs/arithmetic.md), so company changes none.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Final

import numpy as np
from numpy.typing import NDArray

from manyhands.engine.span import EndsRunner, Rows
from manyhands.wire.message import DType, Payload
from manyhands.wire.rows import rows_payload
from manyhands.worker.bounds import RowBounds
from manyhands.worker.execute import Device

# Rows whose logits are made at once, of all requests together, beyond the first turn's: 80 MB for 152,000 tokens.
MAX_ROWS: Final = 128
# logits [T, vocab] -> ids [T'] to embed next (none: nothing more)
Decide = Callable[[NDArray[np.float32]], Sequence[int]]
AsSent = Callable[[Payload], Payload]


@dataclass(slots=True)
class _Turn:
    rows: Rows | None
    decide: Decide
    bounds: RowBounds
    done: "asyncio.Future[Payload | None]"
    as_sent: AsSent | None


class EndsBatcher:
    """Serves the ends of one model to the requests of this origin. `run` must be running; owned by the Node.

    `dtype`: of the rows that come and go.
    """

    def __init__(self, ends: EndsRunner, dtype: DType, device: Device) -> None:
        self.ends, self.dtype = ends, dtype
        self._device = device
        self._waiting: list[_Turn] = []
        self._wake = asyncio.Event()

    async def turn(
        self, rows: Rows | None, decide: Decide, bounds: RowBounds | None = None, as_sent: AsSent | None = None
    ) -> Payload | None:
        """Give `decide` the logits of the rows (none without rows) and embed the ids it returns.

        Returns the hidden states [T', hidden] of those ids, None if there were none. `decide` runs on the device thread and
        must not touch the event loop. `as_sent` codes them for the link that they go by (wire/codec.py). Raises what `decide`
        raises; Corruption for rows that `bounds` (None: those of a session's first rows) do not admit.
        """
        done: asyncio.Future[Payload | None] = asyncio.get_running_loop().create_future()
        self._waiting.append(_Turn(rows, decide, bounds or RowBounds(), done, as_sent))
        self._wake.set()
        return await done

    async def run(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()  # set in the loop turn before, so by all whose rows came in one read
            await self._next()  # a call each, so that no name keeps a request's rows and grammar while there is none

    async def _next(self) -> None:
        turns = [turn for turn in self._waiting if not turn.done.done()]
        rows = accumulate(0 if turn.rows is None else len(turn.rows) for turn in turns)
        count = max(1, sum(total <= MAX_ROWS for total in rows))
        turns, self._waiting = turns[:count], turns[count:]
        if self._waiting:
            self._wake.set()
        if turns:
            self._settle(turns, await self._run(turns))

    async def _run(self, turns: list[_Turn]) -> list[Payload | Exception | None]:
        try:
            return await self._device.run(lambda: self._compute(turns))
        except Exception as error:  # out of memory, say: these requests end, the node goes on
            return [error] * len(turns)

    @staticmethod
    def _settle(turns: list[_Turn], outcomes: list[Payload | Exception | None]) -> None:
        for turn, outcome in zip(turns, outcomes, strict=True):
            if turn.done.done():
                continue
            if isinstance(outcome, Exception):
                turn.done.set_exception(outcome)
            else:
                turn.done.set_result(outcome)

    def _compute(self, turns: list[_Turn]) -> list[Payload | Exception | None]:
        decided = self._decide_all(turns)
        ids = [i for d in decided if not isinstance(d, Exception) for i in d]
        rows_NB = self.ends.embed(ids) if ids else None
        out: list[Payload | Exception | None] = []
        row = 0
        for turn, d in zip(turns, decided, strict=True):
            if isinstance(d, Exception):
                out.append(d)
                continue
            payload = rows_payload(rows_NB[row : row + len(d)], self.dtype) if d and rows_NB is not None else None
            out.append(turn.as_sent(payload) if payload is not None and turn.as_sent is not None else payload)
            row += len(d)
        return out

    def _decide_all(self, turns: list[_Turn]) -> list[Sequence[int] | Exception]:
        logits_NV = self._logits([t.rows for t in turns if t.rows is not None])
        out: list[Sequence[int] | Exception] = []
        row = 0
        for turn in turns:
            count = 0 if turn.rows is None else len(turn.rows)
            try:
                if turn.rows is not None:
                    turn.bounds.admit(turn.rows.tobytes(), count, self.dtype, "hidden states of the last hop")
                out.append(turn.decide(logits_NV[row : row + count]))
            except Exception as error:  # one request's error is that request's answer; the others go on
                out.append(error)
            row += count
        return out

    def _logits(self, rows: list[Rows]) -> NDArray[np.float32]:
        if not rows:
            return np.empty((0, self.ends.vocab_size), np.float32)
        return self.ends.logits(b"".join([each.data for each in rows]), sum(map(len, rows)), self._device.most_threads)
