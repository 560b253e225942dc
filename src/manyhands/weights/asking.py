"""Asking providers in turn, so that none holds up the rest: a member can say nothing, or trickle bytes that are wrong."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from manyhands.weights.provider import Provider

T = TypeVar("T")


async def first_answer(
    providers: Sequence[Provider], ask: Callable[[Provider], Awaitable[T | None]], next_s: float, most: int
) -> T | None:
    """What the first provider says that has an answer, None if none has.

    One is asked, and for each `next_s` without an answer, or each that has none, one more, `most` at once. What `ask` raises
    ends it. Deadline: that of `ask` for each.
    """
    waiting, asking = iter(providers), set[asyncio.Task[T | None]]()
    try:
        while True:
            if len(asking) < most and (provider := next(waiting, None)) is not None:
                asking.add(asyncio.ensure_future(ask(provider)))
            if not asking:
                return None
            done, asking = await asyncio.wait(asking, timeout=next_s, return_when=asyncio.FIRST_COMPLETED)
            for answer in [task.result() for task in done]:
                if answer is not None:
                    return answer
    finally:
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)
