"""The device of one span: a thread that computes (short steps aside, see `Device.run`), and what it computes for a batch.

Knows nothing of links, leases or order; it is told what to run. Loading and dropping the model happen on its thread too.
"""

import asyncio
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from manyhands.checkpoint.manifest import Manifest
from manyhands.core import Precision, Span
from manyhands.errors import BadRequest, Corruption, ProtocolError
from manyhands.model import threads
from manyhands.model.cache import Segment, SessionCache, StepPlan
from manyhands.model.ends import Ends
from manyhands.model.shard import Shard
from manyhands.model.stack import FEW_ROWS
from manyhands.wire.message import Content, DType, Payload
from manyhands.wire.tensor import encode_tensor
from manyhands.worker.batch import WINDOW_ROWS, Kind
from manyhands.worker.bounds import RowBounds
from manyhands.worker.rows import ByteRows, TensorRows
from manyhands.worker.thread import OneThread, run_here

T = TypeVar("T")
_here = threading.local()
# The dtype of hidden states on the wire is the compute dtype.
WIRE_DTYPES: dict[Precision, DType] = {"bf16": "bf16", "fp32": "fp32", "fp16": "fp16", "int8": "bf16"}


class Drawn(Protocol):
    @property
    def token(self) -> int: ...


class Draws(Protocol):
    """What the last hop needs of a sampler where it draws the tokens (origin/sampler.py)."""

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


class Result(NamedTuple):
    """What goes on to the next hop or the origin: rows [position, position + count)."""

    position: int
    count: int  # type: ignore[assignment]  # hides tuple's own
    content: Content
    payload: Payload | None


@dataclass(frozen=True, slots=True)
class Device:
    """A thread of its own. `num_threads`: its compute threads, None where the model may choose."""

    thread: OneThread
    num_threads: int | None

    @classmethod
    def start(cls, num_threads: int | None = None, name: str = "device") -> "Device":
        return cls(OneThread(name, computing(num_threads or os.cpu_count() or 1)), num_threads)

    def run(self, function: Callable[[], T], *, is_short: bool = False) -> "asyncio.Future[T]":
        """`function()` on the device thread. Cancelling the future does not stop a function that has begun.

        One that `is_short` runs on the loop's own thread, and the future is done, where that is `computing` and nothing else
        runs on the device: to hand it over and its result back would take a hop 150 us.
        """
        if is_short and getattr(_here, "is_computing", False) and self.thread.is_idle:
            return run_here(function)
        return asyncio.get_running_loop().run_in_executor(self.thread, function)

    def close(self) -> None:
        self.thread.shutdown()


@contextmanager
def computing(num_threads: int) -> Iterator[None]:
    """What a thread that computes is in for good: to enter inference mode at every step costs a hop 20 us.

    A process whose loop's thread is in it lets its devices use that too, for steps on one thread that are short.
    """
    _here.is_computing = True
    try:
        with threads.given(num_threads), torch.inference_mode():
            yield
    finally:
        _here.is_computing = False


@contextmanager
def device_of_process(num_threads: int | None) -> Iterator[Device]:
    """The device of a process that is there to serve: its loop, on the calling thread, computes too."""
    device = Device.start(num_threads)
    try:
        with computing(1):
            yield device
    finally:
        device.close()


class SpanModel:
    """The layers of one span, and the ends where this node serves them. Made and run within `Device.run`.

    `num_threads` None: as many compute threads as are fastest for this span (small layers lose by sharing). With a `manifest`
    the weights are proven to be that model's; it raises Damaged if they are not.
    """

    def __init__(
        self,
        folder: Path,
        span: Span,
        precision: Precision,
        has_ends: bool,
        num_threads: int | None = None,
        manifest: Manifest | None = None,
    ) -> None:
        self.shard = Shard(folder, span, precision, manifest=manifest)
        num_layers = self.shard.config.num_hidden_layers
        embed, head = has_ends and span.start == 0, has_ends and span.end == num_layers
        self.ends = Ends(folder, precision, embed=embed, head=head, manifest=manifest) if embed or head else None

        self.wire_dtype = WIRE_DTYPES[precision]
        self.vocab_size = int(self.shard.config.vocab_size)
        self.num_threads = num_threads or fastest_threads(self._decode_once, os.cpu_count() or 1)
        threads.give(self.num_threads)

    def _decode_once(self) -> None:
        """One decode step of nobody's session."""
        cache = self.shard.new_cache(1)
        plan = StepPlan([Segment(cache, 0, 0, 1)])
        self.shard.forward(torch.zeros(1, self.shard.hidden_size, dtype=self.shard.dtype), plan)

    def kind(self, works: Sequence[Work]) -> Kind | None:
        """Which other steps take as long as one of `works`; None if that is unknown (prefill, sampling, new tables) or threads
        share it.
        """
        if self.num_threads > 1 or not all(map(_comes_and_goes_as_bytes, works)):
            return None
        num_rows = end = 0
        for work in works:
            num_rows += work.count
            end = max(end, work.position + work.count)
        if num_rows > WINDOW_ROWS or not self.shard.is_ready(end):
            return None
        spans = (works[0].span,) if len(works) == 1 else {work.span for work in works}
        return Kind(sum(map(len, spans)), num_rows, end.bit_length())

    def run(self, works: Sequence[Work]) -> list[Result | Exception]:
        """One device step. A segment with bad input gets its exception; the others are computed.

        Segments on the same layers run side by side; others one after the other.
        """
        if len(works) == 1:
            return self._run_on(works[0].span, works)
        spans: dict[Span, list[int]] = {}
        for i, work in enumerate(works):
            spans.setdefault(work.span, []).append(i)
        out: dict[int, Result | Exception] = {}
        for span, group in spans.items():
            out |= zip(group, self._run_on(span, [works[i] for i in group]), strict=True)
        return [out[i] for i in range(len(works))]

    def _run_on(self, span: Span, works: Sequence[Work]) -> list[Result | Exception]:
        rows, row = self._rows(span, works), 0
        put: list[Segment | Exception] = []
        segments: list[Segment] = []
        for work in works:
            try:
                self._put(rows, work)
            except (Corruption, ProtocolError) as error:
                put.append(error)
            else:
                segment = Segment(work.cache, work.position, row, work.count)
                put.append(segment)
                segments.append(segment)
                row += work.count
        if segments:
            rows.run(StepPlan(segments))
        out: list[Result | Exception] = []
        for work, one in zip(works, put, strict=True):
            out.append(self._try_take(rows, work, one.row) if isinstance(one, Segment) else one)
        return out

    def _rows(self, span: Span, works: Sequence[Work]) -> TensorRows | ByteRows:
        num_rows = 0
        for work in works:
            num_rows += work.count
        few = self.shard.few(span) if num_rows <= FEW_ROWS and all(map(_comes_and_goes_as_bytes, works)) else None
        return TensorRows(self.shard, span) if few is None else ByteRows(self.shard, span, few)

    def _put(self, rows: TensorRows | ByteRows, work: Work) -> None:
        """Add the hidden states that a segment begins with. Raises ProtocolError, Corruption."""
        if not 0 <= work.position <= work.cache.length:
            raise ProtocolError(f"a step at position {work.position} skips ahead of the cache ({work.cache.length})")
        if work.payload is not None:
            rows.put(work.payload, work.count, work.bounds, f"hidden states at position {work.position}")
        elif self.ends is None or work.ids is None or isinstance(rows, ByteRows):
            raise ProtocolError("ids came to a hop that does not hold the embedding")
        else:
            rows.add(self.ends.embed(torch.tensor(work.ids)))

    def _try_take(self, rows: TensorRows | ByteRows, work: Work, row: int) -> Result | Exception:
        try:
            return self._take(rows, work, row)
        except (BadRequest, Corruption, ProtocolError) as error:
            return error

    def _take(self, rows: TensorRows | ByteRows, work: Work, row: int) -> Result:
        """All rows for the next hop; for the origin only the wanted ones, as hidden states, ids or logits."""
        is_first = work.bounds is None and work.position == 0
        if is_first and isinstance(rows, TensorRows) and not rows.tensor(row, work.count)[0].any():
            raise BadRequest(
                "the first token is all zeros in this model, which no other hop could tell from a broken node: "
                "begin the prompt with another one"
            )
        if not work.is_last:
            return Result(work.position, work.count, "hidden", rows.take(row, work.count))
        end = work.position + work.count
        first = min(max(work.reply_from, work.position), end)
        row, count = row + first - work.position, end - first
        if count == 0:
            return Result(first, 0, "hidden", None)
        if work.sampler is None and not work.logits:
            return Result(first, count, "hidden", rows.take(row, count))
        if self.ends is None or isinstance(rows, ByteRows):
            raise ProtocolError("logits are asked of a hop that does not hold the head")
        logits_TV = self.ends.logits(rows.tensor(row, count))
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


def _comes_and_goes_as_bytes(work: Work) -> bool:
    """Hidden states in and out, and none that must be looked at (the first token)."""
    return work.payload is not None and work.position > 0 and work.sampler is None and not work.logits
