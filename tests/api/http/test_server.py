"""The loop in which the server waits to be told to end."""

import asyncio

import uvicorn

from manyhands.api.http.server import _Server
from manyhands.testing.clock import run_virtual


class _Counting(_Server):
    ticks = 0

    async def on_tick(self, counter: int) -> bool:
        self.ticks += 1
        return await super().on_tick(counter)


def test_an_idle_server_wakes_once_a_second_keeps_its_date_and_ends_at_once() -> None:
    """Ten seconds and a half of virtual time; uvicorn's own loop would tick 105 times, and end up to 0.1 s late."""

    async def main() -> None:
        server = _Counting(uvicorn.Config("none:none", log_config=None))
        loop = asyncio.get_running_loop()
        waiting = asyncio.create_task(server.main_loop())
        await asyncio.sleep(0.5)
        assert [name for name, _ in server.server_state.default_headers][:1] == [b"date"]
        server.server_state.default_headers = []
        await asyncio.sleep(10)
        assert server.ticks == 11 and server.server_state.default_headers
        server.end()
        told = loop.time()
        await waiting
        assert loop.time() == told

    run_virtual(main())
