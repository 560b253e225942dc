"""A small model as drafter, beside the origin: the same engine, on a thread of its own, so that drafting hides in the flight.

It draws from its own logits with the target's noise (seed, position, token) and filters (sampler.py), so that it draws the
very token wherever both models' odds are alike: at temperatures above 0 far more often than its likeliest token would be
right (docs/speculation.md). To roll back is to step from an earlier position, as on a hop.
"""

import asyncio
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from manyhands.core import Precision, SamplingParams, Span
from manyhands.engine.span import Piece
from manyhands.errors import ModelError
from manyhands.origin.sampler import Constraint, Sampler
from manyhands.text.tokenizer import TextTokenizer, load_tokenizer
from manyhands.worker.execute import Device
from manyhands.worker.runner import describe, load_ends, load_span

BUDGET_S: Final = 1.0  # for one turn on the drafter's thread, others' turns included; then the request goes on without
TURN_DRAFTS: Final = 4  # drafts of one turn: what is ready is sent while the next are made
LEARN: Final = 0.1  # of a new turn in what a draft is taken to take
TURN_ROWS: Final = 256  # of a prompt that a turn reads


class DraftModel:
    """A drafter's weights and its thread, shared by the requests of an origin. Blocking to make; the maker closes it.

    Raises ModelError if its tokenizer is not the target's: its guesses would be other words. `target` is that tokenizer, or
    the target's folder, for a drafter that has no tokenizer of its own and takes the target's embedding where it has none.
    """

    def __init__(self, folder: Path, name: str, target: TextTokenizer | Path, precision: Precision = "bf16") -> None:
        self.name = name
        beside = target if isinstance(target, Path) else None
        if not isinstance(target, Path):
            check_tokenizer(name, target, load_tokenizer(folder))
        facts = describe(folder, precision)
        self.vocab_size, self.context_length = facts.vocab_size, facts.context_length
        self.span = load_span(folder, Span(0, facts.num_layers), precision, 1)
        self.ends = load_ends(folder, precision, 1, beside=beside)
        self.device = Device.start(1, "drafter")
        self.draft_s = 0.0  # what a draft takes, waits for the thread included

    def close(self) -> None:
        """Drop the thread. What it is in the middle of ends by itself."""
        self.device.thread.shutdown(wait=False)

    def drafts(
        self, params: SamplingParams, eos_ids: frozenset[int], prompt_length: int, constraint: Constraint | None
    ) -> "ModelDrafts":
        """For one request. `constraint` is used on the drafter's thread alone. Raises BadRequest where the request's
        parameters do not fit the drafter."""
        eos = frozenset(i for i in eos_ids if i < self.vocab_size)
        sampler = Sampler(replace(params, logprobs=None), self.vocab_size, eos, constraint)
        return ModelDrafts(self, sampler, prompt_length)


def check_tokenizer(name: str, target: TextTokenizer, drafter: TextTokenizer) -> None:
    """Raises ModelError unless the ids of both mean the same."""
    ours, theirs = target.get_vocab(), drafter.get_vocab()
    if ours != theirs:
        differing = len(set(ours.items()) ^ set(theirs.items()))
        raise ModelError(
            f"{name} cannot draft for this model: {differing} entries of their vocabularies ({len(theirs)} and {len(ours)} "
            "tokens) differ; choose a drafter of the same family, or --draft suffix"
        )


class _Line:
    """What the drafter has read and drawn of one request. Used on its thread alone."""

    def __init__(self, model: DraftModel, sampler: Sampler, prompt_length: int) -> None:
        self._model, self._sampler, self._prompt_length = model, sampler, prompt_length
        self._cache = model.span.new_cache(0, None, prompt_length)
        self._read: list[int] = []
        self._logits_V: NDArray[np.float32] | None = None  # after what was read

    def turn(self, ids: Sequence[int], most: int, is_void: Callable[[], bool]) -> list[int] | None:
        """Read `ids`, TURN_ROWS at most; once all are read, draw up to `most` tokens that follow (none: there are none), or
        until `is_void`. None: there is more to read."""
        if self._read != ids[: len(self._read)]:
            same = next(i for i, (a, b) in enumerate(zip([*self._read, -1], [*ids, -2], strict=False)) if a != b)
            del self._read[same:]
            self._logits_V = None
        start = len(self._read)
        if start == len(ids) and self._logits_V is None:
            start -= 1  # the row of the last id was overwritten
        if start < len(ids):
            start = self._cache.reachable(start)
            del self._read[start:]
        self._step(ids[start : start + TURN_ROWS], start)
        if len(self._read) < len(ids):
            return None
        drafts: list[int] = []
        while len(drafts) < most and len(self._read) < self._model.context_length and not is_void():
            assert self._logits_V is not None
            if len(self._read) > self._prompt_length and self._sampler.is_stop_id(self._read[-1]):
                break
            drafts.append(self._sampler.draw(self._logits_V, len(self._read), self._read, self._prompt_length).token)
            self._step(drafts[-1:], len(self._read))
        return drafts

    def _step(self, ids: Sequence[int], start: int) -> None:
        if not ids:
            return
        rows = self._model.span.step(self._model.ends.embed(ids).tobytes(), [Piece(self._cache, start, len(ids))], 1)
        self._logits_V = self._model.ends.logits(rows[-1:].tobytes(), 1, 1)[0]
        self._read[start:] = ids


class ModelDrafts:
    """Guesses of one request, made in turns on the drafter's thread (draft.py: ModelSource). It never waits."""

    def __init__(self, model: DraftModel, sampler: Sampler, prompt_length: int) -> None:
        self._model = model
        self._line = _Line(model, sampler, prompt_length)
        self._lock = threading.Lock()  # of the next three: asked on the origin's device thread, filled on the loop
        self._chain: list[int] = []  # the request's ids, and the guesses that follow
        self._until = 0  # positions that are to be made ready
        self._is_stale = False  # the chain has changed since the present turn began
        self._turn: asyncio.Future[list[int] | None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._wake: Callable[[], None] = lambda: None
        self._timer: asyncio.TimerHandle | None = None
        self._began_at = 0.0
        self.trouble = ""

    @property
    def draft_s(self) -> float:
        return self._model.draft_s

    def begin(self, wake: Callable[[], None]) -> None:
        self._loop, self._wake = asyncio.get_running_loop(), wake

    def restart(self, ids: Sequence[int]) -> None:
        with self._lock:
            self._until = 0
            if self._chain[: len(ids)] != ids:
                self._chain, self._is_stale = list(ids), True

    def take(self, start: int, most: int, wanted: int) -> Sequence[int]:
        with self._lock:
            self._until = start + wanted
            ready, is_short = self._chain[start : start + most], len(self._chain) < self._until
        if is_short and self._loop is not None:
            self._loop.call_soon_threadsafe(self._advance)
        return ready

    def close(self) -> None:
        self._end("the request has ended")

    def _end(self, trouble: str) -> None:
        self.trouble = self.trouble or trouble
        self._is_stale = True
        if self._timer is not None:
            self._timer.cancel()

    def _advance(self) -> None:
        """Begin a turn if there is something to guess and none is under way. On the event loop."""
        with self._lock:
            if self._turn is not None or self.trouble or len(self._chain) >= self._until or self._loop is None:
                return
            ids, most = list(self._chain), min(TURN_DRAFTS, self._until - len(self._chain))
            self._is_stale = False
        try:
            self._turn = self._model.device.run(lambda: self._line.turn(ids, most, lambda: self._is_stale))
        except RuntimeError as error:  # the origin ends
            self._end(str(error))
            return
        self._began_at = self._loop.time()
        self._timer = self._loop.call_later(BUDGET_S, self._end, f"a turn took more than {BUDGET_S:g} s")
        self._turn.add_done_callback(self._turned)

    def _turned(self, turn: "asyncio.Future[list[int] | None]") -> None:
        self._turn = None
        if self._timer is not None:
            self._timer.cancel()
        error = None if turn.cancelled() else turn.exception()  # asked for in any case: else asyncio logs it
        if turn.cancelled() or self.trouble:
            return
        if error is not None:
            self._end(f"{type(error).__name__}: {error}")
            return
        with self._lock:
            drafts = turn.result()
            if not self._is_stale and drafts is not None:
                self._chain.extend(drafts)
                self._until = self._until if drafts else 0
        if drafts and self._loop is not None:
            took_s, known_s = (self._loop.time() - self._began_at) / len(drafts), self._model.draft_s
            self._model.draft_s = took_s if not known_s else known_s + LEARN * (took_s - known_s)
            self._wake()
        self._advance()
