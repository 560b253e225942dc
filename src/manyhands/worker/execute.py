"""The device of one span: a thread that computes (but short steps: `Device.computes_here`), and what it computes for a batch.

Knows nothing of links, leases or order; it is told what to run. Loading and dropping the model happen on its thread too.
"""

import asyncio
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from manyhands.checkpoint.manifest import Manifest
from manyhands.core import PRECISIONS, Precision, Span
from manyhands.engine.span import Cache, Piece, Rows
from manyhands.errors import BadRequest, Corruption, ProtocolError, StateGone
from manyhands.wire.codec import as_sent, plain
from manyhands.wire.message import ITEMSIZE, Content, DType, Payload
from manyhands.wire.rounding import Rounding
from manyhands.wire.rows import ids_payload, logits_payload, numbers
from manyhands.worker.batch import WINDOW_ROWS, StepKind
from manyhands.worker.bounds import RowBounds, norms
from manyhands.worker.leaves import HopLeaves
from manyhands.worker.loading import UNSEEN, Loading
from manyhands.worker.runner import load_ends, load_span
from manyhands.worker.slot import CopySlot
from manyhands.worker.thread import OneThread, computing, current_scope

T = TypeVar("T")
# The dtype of hidden states on the wire is the compute dtype.
WIRE_DTYPES: dict[Precision, DType] = {
    **dict.fromkeys(PRECISIONS, "bf16"),
    "fp32": "fp32",
    "fp16": "fp16",
}


class DrawnToken(Protocol):
    @property
    def token(self) -> int: ...


class Draws(Protocol):
    """What the last hop needs of a sampler where it draws the tokens (origin/sampler.py)."""

    def draw(
        self, logits_V: NDArray[np.float32], position: int, history: Sequence[int], prompt_length: int
    ) -> DrawnToken: ...


@dataclass(slots=True)
class Work:
    """One segment of a device step: `count` rows at `position` of a session.

    `payload` holds `count` hidden rows, or is None where `ids` are to be embedded here. Rows at positions >= `reply_from`
    are wanted by the origin. `sampler` and `history` (ids before `position`) are set where this hop draws tokens;
    `logits` where it returns logits instead. `is_last`: no further hop. `bounds` judge the rows of `payload`, which another hop
    sent; None: the origin did (some vocabularies have tokens whose embedding is all zeros). `uplink_Bps`: what the link to the
    next hop was measured to carry, for rows of a prompt: over a slow one they go coded (wire/codec.py). `rounding`: with loss.
    `leaves` take note of the rows that came and of those computed.
    """

    cache: Cache
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
    uplink_Bps: float | None = None
    rounding: Rounding | None = None
    leaves: HopLeaves | None = None


class Result(NamedTuple):
    """What goes on to the next hop or the origin: rows [position, position + count)."""

    position: int
    count: int  # type: ignore[assignment]  # hides tuple's own
    content: Content
    payload: Payload | None


# What came of a device step, and the seconds of CPU that its thread took.
Timed = tuple[list[Result | Exception], float]


@dataclass(frozen=True, slots=True)
class Device:
    """A thread of its own. `num_threads`: its compute threads, None where the model may choose."""

    thread: OneThread
    num_threads: int | None
    copying: CopySlot = field(default_factory=CopySlot)

    @classmethod
    def start(cls, num_threads: int | None = None, name: str = "device") -> "Device":
        return cls(OneThread(name, computing(num_threads or os.cpu_count() or 1)), num_threads)

    @property
    def most_threads(self) -> int:
        """Compute threads that a step may have."""
        return self.num_threads or os.cpu_count() or 1

    @property
    def computes_here(self) -> bool:
        """Whether a short function may run on the calling thread, the loop's: that is `computing`, and nothing else runs on
        the device. To hand it over and its result back would take a hop 150 us."""
        return current_scope() is not None and self.thread.is_idle

    def run(self, function: Callable[[], T]) -> "asyncio.Future[T]":
        """`function()` on the device thread. Cancelled, it ends at its next `check_is_wanted`, if it has begun."""
        return asyncio.get_running_loop().run_in_executor(self.thread, function)

    def close(self) -> None:
        self.thread.shutdown()


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
    the weights are proven to be that model's; it raises Damaged if they are not. `loading` is told how far it is.
    """

    def __init__(
        self,
        folder: Path,
        span: Span,
        precision: Precision,
        has_ends: bool,
        num_threads: int | None = None,
        manifest: Manifest | None = None,
        loading: Loading = UNSEEN,
    ) -> None:
        most = num_threads or os.cpu_count() or 1
        self.span, self.wire_dtype = span, WIRE_DTYPES[precision]
        self.runner = load_span(folder, span, precision, most, manifest, loading)
        embed, head = has_ends and span.start == 0, has_ends and span.end == self.runner.num_layers
        self.ends = None
        if embed or head:
            self.ends = load_ends(folder, precision, most, manifest, embed=embed, head=head, loading=loading)
        self.vocab_size, self.hidden_size = self.runner.vocab_size, self.runner.hidden_size
        self._row_bytes = self.hidden_size * ITEMSIZE[self.wire_dtype]
        self.num_threads = num_threads or fastest_threads(self._trial(), most)

    def _trial(self) -> Callable[[int], object]:
        """A decode step without a session, on so many threads."""
        pieces = [Piece(self.runner.new_cache(1), 0, 1)]
        return lambda threads: self.runner.step(bytes(self._row_bytes), pieces, threads)

    def kind(self, works: Sequence[Work]) -> StepKind | None:
        """Which other steps take as long as one of `works`; None if that is unknown (prefill, sampling, new tables)."""
        num_rows = end = 0
        for work in works:
            if work.payload is None or work.position == 0 or work.sampler is not None or work.logits:
                return None  # not hidden states in and out, or the first token, which must be looked at
            num_rows += work.count
            end = max(end, work.position + work.count)
        if num_rows > WINDOW_ROWS or not self.runner.is_ready(num_rows):
            return None
        spans = {work.span for work in works}
        num_layers = sum([span.end - span.start for span in spans])
        return StepKind(num_layers, num_rows, end.bit_length())

    def run(self, works: Sequence[Work]) -> list[Result | Exception]:
        """One device step. A segment with bad input gets its exception; the others are computed.

        Segments on the same layers run side by side; others one after the other.
        """
        if len(works) == 1:
            return self._run_on(works)
        spans: dict[Span, list[int]] = {}
        for i, work in enumerate(works):
            spans.setdefault(work.span, []).append(i)
        out: dict[int, Result | Exception] = {}
        for group in spans.values():
            out |= zip(group, self._run_on([works[i] for i in group]), strict=True)
        return [out[i] for i in range(len(works))]

    def _run_on(self, works: Sequence[Work]) -> list[Result | Exception]:
        given: list[bytes] = []
        pieces: list[Piece] = []
        put: list[int | Exception] = []  # the first row of each work
        row = 0
        for work in works:
            try:
                given.append(self._rows_of(work))
            except (Corruption, ProtocolError, StateGone) as error:
                put.append(error.with_traceback(None))  # which would keep this step's tensors, and itself
            else:
                pieces.append(Piece(work.cache, work.position, work.count))
                put.append(row)
                row += work.count
        if not pieces:
            return [one for one in put if isinstance(one, Exception)]
        rows = self.runner.step(b"".join(given), pieces, self.num_threads)
        results: list[Result | Exception] = []
        came = iter(given)
        for work, first in zip(works, put, strict=True):
            try:
                if isinstance(first, Exception):
                    taken: Result | Exception = first
                else:
                    taken = self._take(rows[first : first + work.count], work, next(came))
            except (BadRequest, Corruption, ProtocolError) as error:
                taken = error.with_traceback(None)
            results.append(taken)
        return results

    def _rows_of(self, work: Work) -> bytes:
        """The rows that a segment begins with. Raises ProtocolError, Corruption, StateGone."""
        if not 0 <= work.position <= work.cache.length:
            raise ProtocolError(f"a step at position {work.position} skips ahead of the cache ({work.cache.length})")
        if (nearest := work.cache.reachable(work.position)) < work.position:
            raise StateGone(f"there is no going back to position {work.position} any more, to {nearest} at most")
        if work.payload is None:
            if self.ends is None or work.ids is None:
                raise ProtocolError("ids came to a hop that does not hold the embedding")
            return self.ends.embed(work.ids).tobytes()
        dtype, width, data, _ = plain(work.payload, work.count)
        if (width, dtype, len(data)) != (self.hidden_size, self.wire_dtype, work.count * self._row_bytes):
            raise ProtocolError(
                f"{len(data)} bytes in rows of {width} {dtype} are not {work.count} rows of this span's"
            )
        rows = bytes(data)
        judge = norms if work.bounds is None else work.bounds.admit
        judge(rows, work.count, dtype, f"hidden states at position {work.position}")
        return rows

    def _take(self, rows: Rows, work: Work, given: bytes) -> Result:
        """All `rows`, that were made of those `given`, for the next hop; for the origin only the wanted ones, as hidden states,
        ids or logits."""
        if work.bounds is None and work.position == 0 and not numbers(rows[:1], self.wire_dtype).any():
            raise BadRequest(
                "the first token is all zeros in this model, which no other hop could tell from a broken node: "
                "begin the prompt with another one"
            )
        if work.leaves is not None:
            work.leaves.note(work.position, given, rows.tobytes(), work.count)
        if not work.is_last:
            payload = Payload(self.wire_dtype, self.hidden_size, rows.tobytes())
            if work.rounding is not None or work.uplink_Bps is not None:  # never of a decode step alone
                payload = as_sent(payload, work.position, work.rounding, work.uplink_Bps)
            return Result(work.position, work.count, "hidden", payload)
        end = work.position + work.count
        first = min(max(work.reply_from, work.position), end)
        wanted, count = rows[first - work.position :], end - first
        if count == 0:
            return Result(first, 0, "hidden", None)
        if work.sampler is None and not work.logits:
            return Result(first, count, "hidden", Payload(self.wire_dtype, self.hidden_size, wanted.tobytes()))
        if self.ends is None:
            raise ProtocolError("logits are asked of a hop that does not hold the head")
        logits_TV = self.ends.logits(wanted, count, self.num_threads)
        if work.sampler is None:
            return Result(first, count, "logits", logits_payload(logits_TV))
        return Result(
            first, count, "ids", ids_payload([self._draw(work, logits_TV[i], first + i) for i in range(count)])
        )

    @staticmethod
    def _draw(work: Work, logits_V: NDArray[np.float32], position: int) -> int:
        """The token after `position`: drawn with the noise of position + 1, given the ids up to `position`."""
        assert work.sampler is not None and work.ids is not None
        history = [*work.history, *work.ids[: position + 1 - work.position]]
        return work.sampler.draw(logits_V, position + 1, history, work.prompt_length).token


def timed(model: SpanModel, works: Sequence[Work]) -> Timed:
    """One device step."""
    began = time.thread_time()
    return model.run(works), time.thread_time() - began


def fastest_threads(run: Callable[[int], object], num_cores: int) -> int:
    """All cores or one, whichever runs `run` faster on this thread (best of 5 each, interleaved). Changes no bit."""
    best = dict.fromkeys((num_cores, 1), float("inf"))
    for _ in range(5):
        for count in best:
            began = time.perf_counter()
            run(count)
            best[count] = min(best[count], time.perf_counter() - began)
    return min(best, key=lambda count: best[count])
