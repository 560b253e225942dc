"""One gateway for all tests of what programs send: it takes seconds to start, and each test is a few requests."""

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import pytest

from tests.api.served import HERMES_TEMPLATE, MODEL, Served, make_model, post, raw, served

TEMPLATE = HERMES_TEMPLATE.replace("{% if tools %}", "{% if note %}{{ note }}{% endif %}{% if tools %}", 1)
TIMEOUT_S = 120.0


@dataclass(slots=True)
class Stage:
    """A gateway in a thread of its own. `it` belongs to that thread's loop."""

    it: Served
    loop: asyncio.AbstractEventLoop

    def play(self, scene: Callable[[Served], Awaitable[None]]) -> None:
        """Run `scene` beside the gateway; then nothing of it is left."""

        async def whole() -> None:
            await scene(self.it)
            await self.it.freed()

        asyncio.run_coroutine_threadsafe(whole(), self.loop).result(TIMEOUT_S)

    @property
    def url(self) -> str:
        return f"http://{self.it.addr}"


async def sent(it: Served, path: str, body: dict[str, Any], **headers: str) -> tuple[int, dict[str, Any]]:
    """Status and JSON of one request."""
    status, said = await raw(it.addr, post(path, json.dumps(body).encode(), **headers))
    told: dict[str, Any] = json.loads(said.partition(b"\r\n\r\n")[2])
    return status, told


@pytest.fixture(scope="session")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    """The gateway, of one tiny model named MODEL."""
    folder = make_model(tmp_path_factory.mktemp("compat") / MODEL, TEMPLATE)
    ready: Future[Stage] = Future()
    end = asyncio.Event()

    async def serve() -> None:
        async with served(folder) as it:
            ready.set_result(Stage(it, asyncio.get_running_loop()))
            await end.wait()

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    made = ready.result(TIMEOUT_S)
    yield made
    made.loop.call_soon_threadsafe(end.set)
    thread.join(TIMEOUT_S)
