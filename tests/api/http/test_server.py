"""The loop in which the server waits to be told to end, and what becomes of requests then."""

import asyncio
import json
import logging
import socket
from collections.abc import AsyncIterator

import pytest
import uvicorn
from fastapi import APIRouter
from fastapi.responses import StreamingResponse

from manyhands.api.gateway import Gateway
from manyhands.api.http import server as server_module
from manyhands.api.http.app import create_app
from manyhands.api.http.server import _Server, serving
from manyhands.testing.clock import run_virtual
from tests.waiting import GUARD_S


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


def test_what_is_not_over_in_time_is_refused_where_no_answer_has_begun_and_cut_where_one_has(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A request by itself, one with another behind it on its connection, a stream; and nothing is logged of any."""
    monkeypatch.setattr(server_module, "STOP_TIMEOUT_S", 0.2)
    caplog.set_level(logging.WARNING)
    router, asked = APIRouter(), asyncio.Semaphore(0)

    async def parts() -> AsyncIterator[bytes]:
        yield b"the first part"
        await asyncio.Event().wait()

    @router.get("/v1/long")
    async def long() -> None:
        asked.release()
        await asyncio.Event().wait()

    @router.get("/v1/stream")
    async def stream() -> StreamingResponse:
        asked.release()
        return StreamingResponse(parts())

    async def main() -> tuple[bytes, ...]:
        async with serving(create_app(Gateway({}), routers=[router]), "127.0.0.1", 0) as addr:
            readers = []
            for paths in (["long"], ["long", "long"], ["stream"]):
                reader, writer = await asyncio.open_connection(addr.host, addr.port)
                writer.write(b"".join(f"GET /v1/{path} HTTP/1.1\r\nhost: {addr}\r\n\r\n".encode() for path in paths))
                readers.append((reader, writer))
                await asked.acquire()
            streamed = await readers[2][0].readuntil(b"the first part")
        rest = [await reader.read() for reader, _ in readers]
        for _, writer in readers:
            writer.close()
        return rest[0], rest[1], streamed + rest[2]

    alone, first, streamed = asyncio.run(main())
    for said in (alone, first):
        head, body = said.split(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 503 ") and b"retry-after: 1" in head and b"connection: close" in head
        assert json.loads(body)["error"]["code"] == "draining" and b"stopping" in body
    assert streamed.startswith(b"HTTP/1.1 200 ") and not streamed.endswith(b"0\r\n\r\n"), "it is no whole answer"
    assert not caplog.records


@pytest.mark.parametrize("is_stopping", [False, True])
def test_a_stop_that_is_cancelled_does_not_wait(
    is_stopping: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A second Ctrl-C, before the stop has begun or during it: a reader that took nothing held it, and left a traceback."""
    monkeypatch.setattr(server_module, "STOP_TIMEOUT_S", 600.0)
    caplog.set_level(logging.WARNING)
    router, full, closed = APIRouter(), asyncio.Event(), list[str]()

    class Part:
        async def open(self) -> None:
            pass

        async def close(self) -> None:
            closed.append("part")

    async def parts() -> AsyncIterator[bytes]:
        while True:
            asyncio.get_running_loop().call_later(0.2, full.set)  # none was asked for since: nothing more is taken
            yield bytes(1 << 20)
            await asyncio.sleep(0)

    @router.get("/v1/stream")
    async def stream() -> StreamingResponse:
        return StreamingResponse(parts())

    async def main() -> None:
        ready, leave = asyncio.get_running_loop().create_future(), asyncio.Event()
        gateway = Gateway({})
        gateway.parts.append(Part())

        async def serve() -> None:
            async with serving(create_app(gateway, routers=[router]), "127.0.0.1", 0) as addr:
                ready.set_result(addr)
                await leave.wait()

        task = asyncio.create_task(serve())
        addr = await ready
        with socket.create_connection((addr.host, addr.port)) as reader:
            reader.sendall(f"GET /v1/stream HTTP/1.1\r\nhost: {addr}\r\n\r\n".encode())
            await full.wait()
            if is_stopping:
                leave.set()
                await asyncio.sleep(0)
            task.cancel()
            async with asyncio.timeout(GUARD_S):
                await asyncio.wait([task])
        assert task.cancelled() and closed == ["part"]

    asyncio.run(main())
    assert not caplog.records
