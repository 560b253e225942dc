"""The origin's device: embeds ids, turns hidden states into logits, and lets requests decide on them, batched.

While the device thread is busy, what other requests need piles up and runs as one batch: eight requests pay for one pass
over the head's weights. Rows are invariant (model/linear.py), so company changes no bit.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from manyhands.model.ends import Ends
from manyhands.wire.message import Payload
from manyhands.wire.tensor import encode_tensor
from manyhands.worker.bounds import RowBounds
from manyhands.worker.execute import Device

# logits [T, vocab] -> ids [T'] to embed next (none: nothing more)
Decide = Callable[[Tensor], Sequence[int]]


@dataclass(slots=True)
class _Turn:
    hidden_TD: Tensor | None
    decide: Decide
    bounds: RowBounds
    done: "asyncio.Future[Payload | None]"


class EndsHost:
    """Serves the ends of one model to the requests of this origin. `run` must be running; owned by the Node."""

    def __init__(self, ends: Ends, device: Device) -> None:
        self.ends = ends
        self._device = device
        self._waiting: list[_Turn] = []
        self._wake = asyncio.Event()

    async def turn(self, hidden_TD: Tensor | None, decide: Decide, bounds: RowBounds | None = None) -> Payload | None:
        """Give `decide` the logits of the rows (an empty tensor without rows) and embed the ids it returns.

        Returns the hidden states [T', hidden] of those ids, None if there were none. `decide` runs on the device thread and
        must not touch the event loop. Raises what `decide` raises; Corruption for rows that `bounds` (None: those
        of a session's first rows) do not admit.
        """
        done: asyncio.Future[Payload | None] = asyncio.get_running_loop().create_future()
        self._waiting.append(_Turn(hidden_TD, decide, bounds or RowBounds(), done))
        self._wake.set()
        return await done

    async def run(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()  # set in the loop turn before, so by all whose rows came in one read
            turns, self._waiting = self._waiting, []
            turns = [t for t in turns if not t.done.done()]
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
        hidden_ND = self.ends.embed(torch.tensor(ids)) if ids else None
        out: list[Payload | Exception | None] = []
        row = 0
        for d in decided:
            if isinstance(d, Exception):
                out.append(d)
                continue
            out.append(encode_tensor(hidden_ND[row : row + len(d)]) if d and hidden_ND is not None else None)
            row += len(d)
        return out

    def _decide_all(self, turns: list[_Turn]) -> list[Sequence[int] | Exception]:
        rows = [t.hidden_TD for t in turns if t.hidden_TD is not None]
        logits_NV = self.ends.logits(torch.cat(rows)) if rows else torch.empty(0, self.ends.vocab_size)
        out: list[Sequence[int] | Exception] = []
        row = 0
        for turn in turns:
            count = 0 if turn.hidden_TD is None else turn.hidden_TD.shape[0]
            try:
                if turn.hidden_TD is not None:
                    turn.bounds.admit(turn.hidden_TD, "hidden states of the last hop")
                out.append(turn.decide(logits_NV[row : row + count]))
            except Exception as error:  # one request's error is that request's answer; the others go on
                out.append(error)
            row += count
        return out
