"""What the tests of real sockets share: both event loops."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
import uvloop

from tests.waiting import GUARD_S

Run = Callable[[Coroutine[Any, Any, None]], None]
DEADLINE_S = 2 * GUARD_S  # for a test that hangs; the longest takes 2 s


@pytest.fixture(params=[asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Run:
    """asyncio.run with a deadline, on either loop."""

    def run_on(main: Coroutine[Any, Any, None]) -> None:
        with asyncio.Runner(loop_factory=request.param) as runner:
            runner.run(asyncio.wait_for(main, DEADLINE_S))

    return run_on
