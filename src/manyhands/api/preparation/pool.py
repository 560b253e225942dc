"""Where requests are prepared: small ones at once, costly ones in a few processes, by turns, under a deadline.

    body ≤ INLINE_BYTES ─ prepare(is_inline) ─────────────────────────────► Prepared
              │ NeedsProcess                                                    ▲
              ▼                                                                 │
    FairTurns (fair by key, bounded) ─ one of `size` processes, DEADLINE_S ─────────┘   a client that leaves, or takes too long:
                                                                                    its process is killed
The deadline counts CPU time of the process: the same request is refused or taken on a busy machine as on an idle one.
A thread would not do: a long call that holds the interpreter's lock stops the event loop, and none can be ended.
"""

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field

from manyhands.api.preparation.child import STARVED, Child
from manyhands.api.preparation.desk import Prepared
from manyhands.api.preparation.process import (
    HEAD_BYTES,
    READY,
    AnswerParts,
    PreparationJob,
    SpeakerSpec,
    lengths_of,
    read_answer,
    to_frame,
)
from manyhands.errors import BadRequest, RateLimited, ShardUnavailable

# What is parsed, checked, rendered and tokenised on the event loop (tests/api/preparation/test_pool.py).
INLINE_BYTES = 8 << 10
DEADLINE_S = 10.0
LOOK_S = 0.05  # between two looks at what a process has used, at least
NUM_PROCESSES = 2
# Jobs that wait for a process, each with its body: 64 x max_body_bytes of memory at the worst.
MAX_WAITING = 64
# For a new process to load the models' tokenizers: 2 s for 120,000 tokens on two busy cores.
START_S = 60.0
# Processes that have had nothing to do for so long end. Till then what a conversation has cached stays on its hops too
# (worker/parking.py), and its next turn waits for neither.
IDLE_S = 600.0
# Of an answer: ids of a context, and fields within MAX_SCHEMA_BYTES and a prompt's text.
MAX_ANSWER_BYTES = 64 << 20


@dataclass(slots=True)
class FairTurns:
    """Whose job goes next. Pure. At most `size` run, one fewer of any one key (but one); keys take turns.

    `max_waiting` wait in all: one more drops the newest of the key that has the most waiting, unless that is its own.
    """

    size: int = NUM_PROCESSES
    max_waiting: int = MAX_WAITING
    running: dict[int, str] = field(default_factory=dict)
    waiting: dict[str, list[int]] = field(default_factory=dict)  # keys in the order of their turns

    @property
    def num_waiting(self) -> int:
        return sum(map(len, self.waiting.values()))

    def ask(self, key: str, job: int) -> int | None:
        """Let `job` wait; returns a job that was dropped for it. Raises RateLimited."""
        dropped = None
        if self.num_waiting >= self.max_waiting:
            most = max(self.waiting, key=lambda k: len(self.waiting[k]), default=key)
            if len(self.waiting.get(most, ())) <= len(self.waiting.get(key, ())) + 1:
                raise busy(self.num_waiting)
            dropped = self.waiting[most].pop()
        self.waiting.setdefault(key, []).append(job)
        return dropped

    def next(self) -> int | None:
        """The job whose turn has come, which runs now; None if none may."""
        if len(self.running) >= self.size:
            return None
        for key in self.waiting:
            if sum(other == key for other in self.running.values()) < max(1, self.size - 1):
                jobs = self.waiting.pop(key)
                job = jobs.pop(0)
                if jobs:
                    self.waiting[key] = jobs  # behind the others
                self.running[job] = key
                return job
        return None

    def leave(self, job: int) -> None:
        """`job` has ended, or waits no longer. Harmless when repeated."""
        self.running.pop(job, None)
        for key, jobs in list(self.waiting.items()):
            if job in jobs:
                jobs.remove(job)
            if not jobs:
                del self.waiting[key]


def busy(num_waiting: int) -> RateLimited:
    return RateLimited(f"{num_waiting} large requests wait to be read: try again later", 5.0)


class TurnQueue:
    """Requests that wait for their turns."""

    def __init__(self, turns: FairTurns) -> None:
        self.turns = turns
        self._futures: dict[int, asyncio.Future[None]] = {}
        self._count = 0

    @asynccontextmanager
    async def of(self, key: str) -> AsyncIterator[None]:
        """Wait for a turn of `key`; it lasts as long as the block. Raises RateLimited if too many wait."""
        number = self._count = self._count + 1
        turn = self._futures[number] = asyncio.get_running_loop().create_future()
        try:
            dropped = self.turns.ask(key, number)
            if dropped is not None and not self._futures[dropped].done():
                self._futures[dropped].set_exception(busy(self.turns.num_waiting))
            self._fill()
            await turn
            yield
        finally:
            self._futures.pop(number, None)
            self.turns.leave(number)
            self._fill()

    def _fill(self) -> None:
        while (number := self.turns.next()) is not None:
            if not self._futures[number].done():
                self._futures[number].set_result(None)


@contextmanager
def watched(left_s: Callable[[], float], expire: Callable[[], None]) -> Iterator[None]:
    """Meanwhile `expire` is called once nothing is left. `left_s`: how much is, at the earliest in so many seconds."""
    loop = asyncio.get_running_loop()
    timer: asyncio.Handle

    def look() -> None:
        nonlocal timer
        least_s = left_s()
        timer = loop.call_soon(expire) if least_s <= 0 else loop.call_later(max(least_s, LOOK_S), look)

    timer = loop.call_later(left_s(), look)
    try:
        yield
    finally:
        timer.cancel()


class Preparing:
    """The processes, and the requests that wait for them. `specs`: the models; a process of others is replaced."""

    def __init__(
        self,
        specs: Callable[[], Sequence[SpeakerSpec]],
        *,
        deadline_s: float = DEADLINE_S,
        turns: FairTurns | None = None,
    ) -> None:
        self._specs, self._deadline_s = specs, deadline_s
        self.turns = turns or FairTurns()
        self._queue = TurnQueue(self.turns)
        self._idle: list[tuple[Child, Sequence[SpeakerSpec]]] = []
        self._live: list[Child] = []  # all that have not been seen to end
        self._retire: asyncio.TimerHandle | None = None
        self._beginning: asyncio.Task[None] | None = None  # ends with close
        self.num_started = self.num_killed = 0

    async def run(self, key: str, job: PreparationJob) -> Prepared:
        """Prepare in a process, once it is the turn of `key`. Cancelling kills the process.

        Raises what `prepare` does; RateLimited if too many wait; BadRequest if it takes more than the deadline.
        """
        async with self._queue.of(key):
            return await self._do(job)

    def expect(self) -> None:
        """A request that is for a process is likely to follow: start one, which takes half a second, unless there are some."""
        if all(child.has_ended for child in self._live) and (self._beginning is None or self._beginning.done()):
            self._beginning = asyncio.create_task(self._begin())

    async def _begin(self) -> None:
        specs = self._specs()
        with suppress(ShardUnavailable, OSError):  # the request that needs one will say what is wrong
            await self._leave(await self._process(specs), specs, is_whole=True)

    async def _do(self, job: PreparationJob) -> Prepared:
        specs = self._specs()
        if self._beginning is not None:
            await asyncio.wait([self._beginning])
        process = await self._process(specs)
        is_done = False
        try:
            parts = await self._ask_in_time(process, job)
            is_done = True
        except TimeoutError:
            raise BadRequest(f"preparing this request takes more than {self._deadline_s:g} s: send less") from None
        except (asyncio.IncompleteReadError, ConnectionError):
            raise BadRequest("preparing this request takes too much memory or time: send less") from None
        finally:
            await self._leave(process, specs, is_whole=is_done)
        return await read_answer(parts)

    async def _ask_in_time(self, process: Child, job: PreparationJob) -> AnswerParts:
        """Raises TimeoutError once the process has computed for the deadline, or that is long past by the clock."""
        loop, used_s = asyncio.get_running_loop(), process.cpu_s()
        began = loop.time()
        async with asyncio.timeout(None) as limit:

            def left_s() -> float:
                waited_s, now_s = loop.time() - began, process.cpu_s()
                computed_s = waited_s if now_s is None or used_s is None else now_s - used_s
                return min(self._deadline_s - computed_s, STARVED * self._deadline_s - waited_s)

            with watched(left_s, lambda: limit.reschedule(loop.time())):
                return await self._ask(process, job)

    async def _ask(self, process: Child, job: PreparationJob) -> AnswerParts:
        process.stdin.write(to_frame(job))
        await process.stdin.drain()
        lengths = lengths_of(await process.stdout.readexactly(HEAD_BYTES))
        if sum(lengths) > MAX_ANSWER_BYTES:
            raise ConnectionError("an answer without bounds")
        read = process.stdout.readexactly
        return AnswerParts(*[await read(length) for length in lengths])

    async def _process(self, specs: Sequence[SpeakerSpec]) -> Child:
        while self._idle:
            process, known = self._idle.pop()
            if not process.has_ended and known is specs:
                return process
            await self._end(process)
        self._live = [child for child in self._live if not child.has_ended]  # which reaps those that retired
        self.num_started += 1
        environment = {
            **os.environ,
            "TOKENIZERS_PARALLELISM": "false",
            "RAYON_NUM_THREADS": "1",
            "OMP_NUM_THREADS": "1",
        }
        command = (
            sys.executable,
            "-P",
            "-m",
            "manyhands.api.preparation.process",
            str(max(1, round(self._deadline_s))),
        )
        process = await Child.start(command, environment)
        self._live.append(process)
        try:
            await self._load(process, specs)
        except BaseException:
            await self._end(process)
            raise
        return process

    async def _load(self, process: Child, specs: Sequence[SpeakerSpec]) -> None:
        process.stdin.write(to_frame(specs))
        try:
            async with asyncio.timeout(START_S):
                await process.stdin.drain()
                await process.stdout.readexactly(len(READY))
        except (TimeoutError, asyncio.IncompleteReadError, ConnectionError) as error:
            raise ShardUnavailable("large requests cannot be read now: their process did not start") from error

    async def _leave(self, process: Child, specs: Sequence[SpeakerSpec], *, is_whole: bool) -> None:
        """Keep it for the next job, if it has done the last one; else end it."""
        if not is_whole:
            return await self._end(process)
        self._idle.append((process, specs))
        if self._retire is not None:
            self._retire.cancel()
        self._retire = asyncio.get_running_loop().call_later(IDLE_S, self._retire_idle)

    def _retire_idle(self) -> None:
        """Their stdin ends, and they with it."""
        self._retire = None
        for process, _ in self._idle:
            process.stdin.close()
        self._idle.clear()

    async def _end(self, process: Child) -> None:
        self.num_killed += 1
        await process.end()
        if process in self._live:
            self._live.remove(process)

    async def close(self) -> None:
        """End all processes, also those of jobs that were cancelled while they ended theirs."""
        if self._retire is not None:
            self._retire.cancel()
        self._idle.clear()
        if self._beginning is not None:
            self._beginning.cancel()
            await asyncio.wait([self._beginning])
        for process in list(self._live):
            await self._end(process)
