"""Around a host's device and model: one that takes its time, one whose results are spoiled."""

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, TypeVar

import numpy as np

from manyhands.wire.codec import plain
from manyhands.wire.message import Payload
from manyhands.wire.rows import numbers, read_rows, store
from manyhands.worker.execute import Device, Result, SpanModel, Work

T = TypeVar("T")
Poison = Literal["nan", "inf", "scale", "zero", "nudge"]
# By what "scale" and "nudge" multiply: numbers of another order, and plausible ones.
SCALE, NUDGE = 1000.0, 1.5


def spoiled(result: Result | Exception, how: str) -> Result | Exception:
    """The result with its rows poisoned, if it has any (drawn tokens stay as they are)."""
    if not isinstance(result, Result) or result.payload is None or result.payload.dtype == "int32":
        return result
    return result._replace(payload=_spoil(result.payload, result.count, how))


def spoiled_all(works: Sequence[Work], results: Sequence[Result | Exception], how: str) -> list[Result | Exception]:
    """As `spoiled`, of a device step: what is attested of its rows is as wrong as what is sent."""
    wrong = [spoiled(result, how) for result in results]
    for work, result in zip(works, wrong, strict=True):
        if work.leaves is not None and isinstance(result, Result) and result.payload is not None:
            work.leaves.made.note(result.position, plain(result.payload, result.count).data, result.count)
    return wrong


def _spoil(payload: Payload, count: int, how: str) -> Payload:
    """The payload with its tensor poisoned: all but nudge can be noticed by looking at it (worker/bounds.py)."""
    right = numbers(read_rows(payload, count), payload.dtype)
    match how:
        case "nan" | "inf":
            wrong = np.full_like(right, float(how))
        case "scale":
            wrong = right * np.float32(SCALE)
        case "nudge":
            wrong = right * np.float32(NUDGE)
        case "zero":
            wrong = np.zeros_like(right)
        case _:
            raise ValueError(f"no such poison: {how}")
    return store(wrong, payload.dtype)


class SlowDevice:
    """A Device that takes `seconds` of the loop's clock for each function, and `row_s` more for each row of a step. It runs one
    function after another, as the device's thread does."""

    def __init__(self, plain: Device, seconds: float, row_s: float = 0.0) -> None:
        self.plain, self._seconds, self._row_s = plain, seconds, row_s
        self.computes_here = False
        self._turn = asyncio.Lock()

    def run(self, function: Callable[[], T]) -> "asyncio.Future[T]":
        async def later() -> T:
            async with self._turn:
                await asyncio.sleep(self._seconds + self._row_s * _num_rows(function))
                return await self.plain.run(function)

        return asyncio.ensure_future(later())

    def __getattr__(self, name: str) -> Any:
        return getattr(self.plain, name)


def _num_rows(function: Callable[[], Any]) -> int:
    """Rows of a device step (worker/engine.py); 0 of any other function."""
    works = function.args[-1] if isinstance(function, partial) and function.args else ()
    return sum(work.count for work in works if isinstance(work, Work)) if isinstance(works, list) else 0


class PoisonedModel:
    """A SpanModel whose results are spoiled."""

    def __init__(self, plain: SpanModel, how: Poison) -> None:
        self._plain, self._how = plain, how

    def run(self, works: Sequence[Work]) -> list[Result | Exception]:
        return spoiled_all(works, self._plain.run(works), self._how)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._plain, name)
