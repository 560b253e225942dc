"""The device of one span: one thread that owns the model, and what it computes for a batch of segments.

Knows nothing of links, leases or order; it is told what to run. Loading and dropping the model happen on its thread too.
"""

import asyncio
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from manyhands.core import Precision, Span
from manyhands.errors import BadRequest, Corruption, ProtocolError
from manyhands.model import threads
from manyhands.model.cache import Segment, SessionCache, StepPlan
from manyhands.model.ends import Ends
from manyhands.model.shard import Shard
from manyhands.wire.message import Content, DType, Payload
from manyhands.wire.tensor import decode_tensor, encode_tensor
from manyhands.worker.bounds import RowBounds, norms
from manyhands.worker.thread import OneThread

T = TypeVar("T")
# The dtype of hidden states on the wire is the compute dtype.
WIRE_DTYPES: dict[Precision, DType] = {"bf16": "bf16", "fp32": "fp32", "fp16": "fp16", "int8": "bf16"}


class Drawn(Protocol):
    @property
    def token(self) -> int: ...


class Draws(Protocol):
    """What the last hop needs of a sampler where it draws the tokens (generate/sample.py)."""

    def draw(self, logits_V: Tensor, position: int, history: Sequence[int], prompt_length: int) -> Drawn: ...


@dataclass(slots=True)
class Work:
    """One segment of a device step: `count` rows at `position` of a session.

    `payload` holds `count` hidden rows, or is None where `ids` are to be embedded here. Rows at positions >= `reply_from`
    are wanted by the origin. `sampler` and `history` (ids before `position`) are set where this hop draws tokens;
    `logits` where it returns logits instead. `is_last`: no further hop. `bounds` judge the rows of `payload`, which another hop
    sent; None: the origin did (some vocabularies have tokens whose embedding is all zeros).
    """

    cache: SessionCache
    span: Span
    position: int
    count: int
    reply_from: int
    payload: Payload | None
    ids: tuple[int, ...] | None
    is_last: bool
    logits: bool = False
    sampler: Draws | None = None
    history: Sequence[int] = ()
    prompt_length: int = 0
    bounds: RowBounds | None = None


@dataclass(frozen=True, slots=True)
class Result:
    """What goes on to the next hop or the origin: rows [position, position + count)."""

    position: int
    count: int
    content: Content
    payload: Payload | None


@dataclass(frozen=True, slots=True)
class Device:
    """A thread of its own. `num_threads`: its compute threads, None where the model may choose."""

    thread: OneThread
    num_threads: int | None

    @classmethod
    def start(cls, num_threads: int | None = None, name: str = "device") -> "Device":
        return cls(OneThread(name, _computing(num_threads or os.cpu_count() or 1)), num_threads)

    def run(self, function: Callable[[], T]) -> "asyncio.Future[T]":
        """`function()` on the device thread. Cancelling the future does not stop a function that has begun."""
        return asyncio.get_running_loop().run_in_executor(self.thread, function)

    def close(self) -> None:
        self.thread.shutdown()


@contextmanager
def _computing(num_threads: int) -> Iterator[None]:
    """What a device's thread is in for good: to enter inference mode at every step costs a hop 20 us."""
    threads.give(num_threads)
    with torch.inference_mode():
        yield


class SpanModel:
    """The layers of one span, and the ends where this node serves them. Only its device's thread may call it.

    `num_threads` None: as many compute threads as are fastest for this span (small layers lose by sharing).
    """

    def __init__(
        self, folder: Path, span: Span, precision: Precision, has_ends: bool, num_threads: int | None = None
    ) -> None:
        self.shard = Shard(folder, span, precision)
        num_layers = self.shard.config.num_hidden_layers
        embed, head = has_ends and span.start == 0, has_ends and span.end == num_layers
        self.ends = Ends(folder, precision, embed=embed, head=head) if embed or head else None

        self.wire_dtype = WIRE_DTYPES[precision]
        self.vocab_size = int(self.shard.config.vocab_size)
        threads.give(num_threads or fastest_threads(self._decode_once, os.cpu_count() or 1))

    def _decode_once(self) -> None:
        """One decode step of nobody's session."""
        cache = self.shard.new_cache(1)
        plan = StepPlan([Segment(cache, 0, 0, 1)])
        self.shard.forward(torch.zeros(1, self.shard.hidden_size, dtype=self.shard.dtype), plan)

    def run(self, works: Sequence[Work]) -> list[Result | Exception]:
        """One device step. A segment with bad input gets its exception; the others are computed.

        Segments on the same layers run side by side; others one after the other.
        """
        out: dict[int, Result | Exception] = {}
        groups: dict[Span, list[tuple[int, Tensor]]] = {}
        for i, work in enumerate(works):
            try:
                given_TD = self._input(work)
            except (Corruption, ProtocolError) as error:
                out[i] = error
            else:
                groups.setdefault(work.span, []).append((i, given_TD))
        for span, group in groups.items():
            plan = _side_by_side([works[i] for i, _ in group])
            given_ND = group[0][1] if len(group) == 1 else torch.cat([x for _, x in group])
            hidden_ND = self.shard.forward(given_ND, plan, span)
            for (i, _), s in zip(group, plan.segments, strict=True):
                rows_TD = hidden_ND if len(group) == 1 else hidden_ND[s.row : s.row + s.count]
                out[i] = self._try_output(works[i], rows_TD)
        return [out[i] for i in range(len(works))]

    def _try_output(self, work: Work, hidden_TD: Tensor) -> Result | Exception:
        try:
            return self._output(work, hidden_TD)
        except (BadRequest, Corruption, ProtocolError) as error:
            return error

    def _input(self, work: Work) -> Tensor:
        """The hidden states [count, hidden] that a segment begins with. Raises ProtocolError, Corruption."""
        if work.position > work.cache.length:
            raise ProtocolError(f"a step at position {work.position} skips ahead of the cache ({work.cache.length})")
        if work.payload is None:
            if self.ends is None or work.ids is None:
                raise ProtocolError("ids came to a hop that does not hold the embedding")
            return self.ends.embed(torch.tensor(work.ids))
        hidden_TD = decode_tensor(work.payload, work.count)
        judge = norms if work.bounds is None else work.bounds.admit
        judge(hidden_TD, f"hidden states at position {work.position}")
        return hidden_TD

    def _output(self, work: Work, hidden_TD: Tensor) -> Result:
        """All rows for the next hop; for the origin only the wanted ones, as hidden states, ids or logits."""
        if work.bounds is None and work.position == 0 and not hidden_TD[0].any():
            raise BadRequest(
                "the first token is all zeros in this model, which no other hop could tell from a broken node: "
                "begin the prompt with another one"
            )
        if not work.is_last:
            return Result(work.position, work.count, "hidden", encode_tensor(hidden_TD))
        first = min(max(work.reply_from, work.position), work.position + work.count)
        wanted_TD = hidden_TD[first - work.position :]
        count = wanted_TD.shape[0]
        if count == 0:
            return Result(first, 0, "hidden", None)
        if work.sampler is None and not work.logits:
            return Result(first, count, "hidden", encode_tensor(wanted_TD))
        if self.ends is None:
            raise ProtocolError("logits are asked of a hop that does not hold the head")
        logits_TV = self.ends.logits(wanted_TD)
        if work.sampler is None:
            return Result(first, count, "logits", encode_tensor(logits_TV))
        ids = [self._draw(work, logits_TV[i], first + i) for i in range(count)]
        return Result(first, count, "ids", encode_tensor(torch.tensor(ids, dtype=torch.int32)[:, None]))

    @staticmethod
    def _draw(work: Work, logits_V: Tensor, position: int) -> int:
        """The token after `position`: drawn with the noise of position + 1, given the ids up to `position`."""
        assert work.sampler is not None and work.ids is not None
        history = [*work.history, *work.ids[: position + 1 - work.position]]
        return work.sampler.draw(logits_V, position + 1, history, work.prompt_length).token


def fastest_threads(run: Callable[[], None], num_cores: int) -> int:
    """All cores or one, whichever runs `run` faster on this thread (best of 5 each, interleaved). Changes no bit."""
    best = dict.fromkeys((num_cores, 1), float("inf"))
    for _ in range(5):
        for count in best:
            threads.give(count)
            began = time.perf_counter()
            run()
            best[count] = min(best[count], time.perf_counter() - began)
    return min(best, key=lambda count: best[count])


def _side_by_side(works: Sequence[Work]) -> StepPlan:
    segments: list[Segment] = []
    row = 0
    for work in works:
        segments.append(Segment(work.cache, work.position, row, work.count))
        row += work.count
    return StepPlan(segments)
