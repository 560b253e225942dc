"""Siblings of F1 on the way out: an answer, a list or a page of numbers is as long as a client makes it, or waits for a reader
that never comes. What one turn of the event loop does for it is counted, not timed.
"""

import asyncio
import contextlib
import json
import socket
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from manyhands.api.auth import KeyRing
from manyhands.api.gateway import Gateway
from manyhands.api.http.app import create_app
from manyhands.api.http.encode import PIECE_BYTES, JsonRows
from manyhands.api.http.sse import EventStream, Single, event_pieces
from manyhands.api.jobs import EndedJob, History
from manyhands.api.metrics import LINES_A_TURN, Metrics, _Watch, _Words
from manyhands.api.native.routes import native_router
from manyhands.api.preparation import prepare
from manyhands.api.run import Job
from manyhands.config import LimitsConfig
from manyhands.core import NodeId
from manyhands.origin import Origin
from tests.api.served import MODEL, Served, make_model, post, raw_slowly, served
from tests.waiting import GUARD_S, until

LIMITS = LimitsConfig()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("answers") / "m")


class Turns:
    """Counts what is done in each turn of the event loop."""

    def __init__(self) -> None:
        self._turn = 0
        self._is_on = True
        self.done: Counter[int] = Counter()
        self._next()

    def _next(self) -> None:
        self._turn += 1
        if self._is_on:
            asyncio.get_running_loop().call_soon(self._next)

    def note(self, amount: int = 1) -> None:
        self.done[self._turn] += amount

    def close(self) -> int:
        """The most of one turn."""
        self._is_on = False
        return max(self.done.values())


def odds(num_tokens: int) -> JsonRows:
    rows = JsonRows()
    row = {"token": "x", "logprob": -1.5, "bytes": [120], "top_logprobs": [{"token": "x", "logprob": -1.5}] * 20}
    for _ in range(num_tokens):
        rows.append(row)
    return rows


Send = Callable[[Callable[[dict[str, Any]], Awaitable[None]]], Awaitable[None]]


async def written(answer: Send) -> tuple[bytes, int]:
    """The body, and the most bytes of it in one turn of the loop."""
    turns, body = Turns(), bytearray()

    async def send(message: dict[str, Any]) -> None:
        turns.note(len(message.get("body", b"")))
        body.extend(message.get("body", b""))

    await answer(send)
    return bytes(body), turns.close()


async def receive() -> Any:
    await asyncio.get_running_loop().create_future()


def test_a_whole_answer_is_written_in_pieces() -> None:
    """16 choices with 20 alternatives of each token, which were built and encoded in one go."""
    choices = [{"index": index, "logprobs": {"content": odds(200)}} for index in range(16)]

    async def work() -> Any:
        return {"choices": choices}

    async def main() -> None:
        body, most = await written(lambda send: Single(work).send_to({}, receive, send))  # type: ignore[arg-type]
        assert len(body) > 2_000_000 and most < PIECE_BYTES + 2000
        assert [len(c["logprobs"]["content"]) for c in json.loads(body)["choices"]] == [200] * 16

    asyncio.run(main())


def test_a_large_event_is_written_in_pieces_and_nothing_comes_between() -> None:
    """The last events of /v1/responses repeat all that was said; a keep-alive waits until one is whole."""

    async def main() -> None:
        is_stuck = asyncio.Event()

        async def produce(emit: Any) -> None:
            await emit(event_pieces({"logprobs": odds(300)}))

        async def slow(message: dict[str, Any]) -> None:
            said.append(message.get("body", b""))
            if len(said) == 4:
                await is_stuck.wait()

        said: list[bytes] = []
        limits = LimitsConfig(keep_alive_s=0.01)
        sending = asyncio.ensure_future(EventStream(produce, limits).send_to({}, receive, slow))  # type: ignore[arg-type]
        while len(said) < 4:  # noqa: ASYNC110 - another's state
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.05)
        is_stuck.set()
        await sending
        whole = b"".join(said)
        assert max(map(len, said)) < PIECE_BYTES + 2000 and whole.count(b"\n\n") == 1
        assert len(json.loads(whole.removeprefix(b"data: "))["logprobs"]) == 300

        _, most = await written(lambda send: EventStream(produce, LIMITS).send_to({}, receive, send))  # type: ignore[arg-type]
        assert most < PIECE_BYTES + 2000

    asyncio.run(main())


def test_tokens_are_encoded_as_they_come(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one turn of the loop at most one token of each choice, however many there are at the end."""
    append, counts = JsonRows.append, []

    async def ask(it: Served, path: str, count: int, **fields: Any) -> Any:
        turns = Turns()

        def counted(rows: JsonRows, item: Any) -> None:
            turns.note()
            append(rows, item)

        monkeypatch.setattr(JsonRows, "append", counted)
        body = {"model": MODEL, "manyhands": {"ignore_eos": True}, "temperature": 0, **fields}
        status, said = await raw_slowly(it, post(path, json.dumps(body).encode()))
        assert status == 200, said
        counts.append((turns.close(), sum(turns.done.values())))
        assert counts[-1][0] <= count < counts[-1][1]
        return said

    async def main() -> None:
        async with served(folder) as it:
            chat: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "logprobs": True}
            said = await ask(it, "/v1/chat/completions", 4, n=4, max_tokens=16, top_logprobs=20, **chat)
            assert b"transfer-encoding: chunked" in said
            await ask(it, "/v1/completions", 4, prompt="hi", max_tokens=16, logprobs=5)  # four arrays
            wanted = {"include": ["message.output_text.logprobs"], "top_logprobs": 20}
            await ask(it, "/v1/responses", 1, input="hi", max_output_tokens=16, **wanted)

    asyncio.run(main())


def waiting() -> list[int]:
    """Bytes that wait to be written, of every connection of this process."""
    transports = list(asyncio.get_running_loop()._transports.values())  # type: ignore[attr-defined]
    return [transport.get_write_buffer_size() for transport in transports if transport._sock is not None]


@pytest.mark.parametrize("stream", [True, False])
def test_a_reader_that_takes_nothing_is_cut(stream: bool, folder: Path) -> None:
    """What waits for it stays within the transport's mark, one piece and the system's buffers; its session is freed."""
    sizes: list[int] = []

    async def main() -> None:
        async with served(folder, limits=LimitsConfig(write_timeout_s=1, read_timeout_s=1)) as it:
            chat = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "stream": stream}
            chat |= {"logprobs": True, "top_logprobs": 20, "max_tokens": 160, "manyhands": {"ignore_eos": True}}
            with socket.socket() as reader:
                reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                reader.connect((it.addr.host, it.addr.port))
                reader.sendall(post("/v1/chat/completions", json.dumps(chat).encode()))
                async with asyncio.timeout(GUARD_S):
                    while not sizes or waiting():
                        sizes.extend(waiting())
                        await asyncio.sleep(0.005)
                await it.freed()

    asyncio.run(main())
    assert 0 < max(sizes) < (64 << 10) + 2 * PIECE_BYTES


def test_a_reader_that_never_takes_a_finished_answer_is_cut(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer is complete, so no write waits any more: closing the connection would, for as long as its reader likes."""
    monkeypatch.setattr("manyhands.api.http.server.KEEP_ALIVE_S", 1)

    async def main() -> None:
        async with served(folder, limits=LimitsConfig(read_timeout_s=1)) as it:
            with socket.socket() as reader:
                reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                reader.connect((it.addr.host, it.addr.port))
                for _ in range(2):
                    reader.sendall(b"GET /openapi.json HTTP/1.1\r\nhost: localhost\r\n\r\n")
                await until(lambda: sum(waiting()) > 0)
                await until(lambda: not waiting())

    asyncio.run(main())


def test_a_reader_that_asks_on_and_takes_nothing_is_cut(folder: Path) -> None:
    """The second request waits to be answered until the first answer is taken: it was for ever, with its descriptor."""

    async def main() -> None:
        async with served(folder, limits=LimitsConfig(write_timeout_s=1)) as it:
            with socket.socket() as reader:
                reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                reader.connect((it.addr.host, it.addr.port))
                reader.sendall(b"GET /openapi.json HTTP/1.1\r\nhost: localhost\r\n\r\n" * 8)
                await until(lambda: sum(waiting()) > 0)
                await until(lambda: not waiting())

    asyncio.run(main())


@pytest.mark.parametrize("size, is_kept", [(100_000, True), (100_000_000, False)])
def test_a_body_that_is_refused_is_not_read_for_ever(
    size: int, is_kept: bool, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a body after its answer, what is small is thrown away; more than that, or slower, ends the connection."""
    if is_kept:
        monkeypatch.setattr("manyhands.api.http.connection.DRAIN_S", GUARD_S)

    async def main() -> None:
        keys = KeyRing(tmp_path / "keys.json")
        keys.add("ann", 0.0)
        async with served(folder, keys=keys) as it:
            reader, writer = await asyncio.open_connection(it.addr.host, it.addr.port)
            head = "POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json"
            writer.write(f"{head}\r\ncontent-length: {size}\r\n\r\n".encode())
            assert (await reader.readline()).split()[1] == b"401"
            sent = 0
            with contextlib.suppress(ConnectionError):
                while sent < size:
                    writer.write(b" " * 20_000)
                    await writer.drain()
                    sent += 20_000
                    await asyncio.sleep(0)
            assert (sent == size) == is_kept and sent < 20_000_000
            if is_kept:
                writer.write(b"GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
                assert b"GET /health" in await reader.read(), "served on the same connection"
            writer.close()

    asyncio.run(main())


def test_a_body_that_is_refused_is_not_waited_for(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("manyhands.api.http.connection.DRAIN_S", 0.2)

    async def main() -> None:
        async with served(folder) as it:
            reader, writer = await asyncio.open_connection(it.addr.host, it.addr.port)
            writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 9999999\r\n\r\n")
            async with asyncio.timeout(GUARD_S):
                with contextlib.suppress(ConnectionError):
                    assert (await reader.read()).split()[1] in (b"413", b"415")
            writer.close()

    asyncio.run(main())


def test_a_prompt_is_looked_at_once_for_all_its_choices(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[int] = []
    fit = prepare.check_fit

    def counted(ids: Any, *rest: Any) -> None:
        looked.append(len(ids))
        fit(ids, *rest)

    monkeypatch.setattr(prepare, "check_fit", counted)
    monkeypatch.setattr(Origin, "request_ids", lambda *_: looked.append(-1))

    async def main() -> None:
        async with served(folder) as it:
            body = {"model": MODEL, "prompt": [1, 2, 3], "n": 4, "max_tokens": 2}
            status, said = await raw_slowly(it, post("/v1/completions", json.dumps(body).encode()))
            assert status == 200 and len(json.loads(said.split(b"\r\n\r\n")[1])["choices"]) == 4

    asyncio.run(main())
    assert looked == [3]


def test_numbers_and_jobs_are_told_in_parts(folder: Path) -> None:
    """256 nodes and 500 jobs: some hundred lines, and some jobs, in one turn of the loop."""

    async def main() -> None:
        async with served(folder) as it:
            metrics = Metrics(it.gateway)
            watch = _Watch(_Words())
            for index in range(300):
                metrics._share(watch, NodeId(f"{index:064x}"[::-1])).queue_s.observe(0.1)
            parts = [part.count(b"\n") for part in metrics.exposition()]
            assert sum(parts) > 256 * 40 and max(parts) < LINES_A_TURN + 64
            families = text_string_to_metric_families(b"".join(metrics.exposition()).decode())
            assert len(names := [family.name for family in families]) == len(set(names))

    asyncio.run(main())


def test_a_list_of_jobs_is_made_as_its_reader_takes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """500 jobs of long routes are 100 MB, which every reader held that took its time."""
    made: list[str] = []
    unpack = EndedJob.unpack

    def counted(job: EndedJob) -> dict[str, Any]:
        made.append(job.id)
        return unpack(job)

    monkeypatch.setattr(EndedJob, "unpack", counted)
    history = History(wall_clock=lambda: 0.0)
    for number in range(500):
        history.ended(Job(f"{number}", "m" * 4000, "native", None, 0.0, 1, 1, ended=0.0), "done")
    app = create_app(Gateway({}), routers=[native_router(Gateway({}), history)])
    body, first = bytearray(), list[int]()
    scope: dict[str, Any] = {
        "type": "http",
        "method": "GET",
        "path": "/api/jobs",
        "raw_path": b"/api/jobs",
        "root_path": "",
    }
    scope |= {"query_string": b"limit=1000", "headers": [(b"host", b"localhost")], "http_version": "1.1"}
    scope |= {"client": ("127.0.0.1", 1), "state": {}}
    requests = [{"type": "http.request", "body": b"", "more_body": False}]

    async def asked() -> Any:
        return requests.pop() if requests else await receive()

    async def send(message: dict[str, Any]) -> None:
        body.extend(message.get("body", b""))
        first.extend([len(made)] * bool(body))

    asyncio.run(app(scope, asked, send))  # type: ignore[arg-type]
    assert first[0] < 50 and len(json.loads(bytes(body))["jobs"]) == len(made) == 500


def test_answers_that_wait_for_a_slow_reader_count_as_its_keys(folder: Path, tmp_path: Path) -> None:
    """Each was held for as long as its reader took, and 16 MiB of tokens are made in a second: some connections that read
    slowly took all memory."""

    async def main() -> None:
        keys = KeyRing(tmp_path / "keys.json")
        mine, others = (f"Bearer {keys.add(name, 0.0)}" for name in ("mine", "others"))
        made = make_model(tmp_path / "m", context=8192)
        limits = LimitsConfig(max_body_bytes=60_000)
        async with served(made, keys=keys, limits=limits) as it:
            long = json.dumps({"content": "x" * 50_000, "with_pieces": True}).encode()
            reader, writer = await asyncio.open_connection(it.addr.host, it.addr.port, limit=4096)
            writer.write(post("/tokenize", long, authorization=mine))
            async with asyncio.timeout(GUARD_S):
                assert b" 200 " in await reader.readuntil(b"\r\n\r\n")
            small = b'{"content": "hi"}'
            status, said = await raw_slowly(it, post("/tokenize", small, authorization=mine))
            assert status == 429 and b"take the answers" in said
            assert (await raw_slowly(it, post("/tokenize", small, authorization=others)))[0] == 200
            writer.close()
            async with asyncio.timeout(GUARD_S):
                while status == 429:
                    status, _ = await raw_slowly(it, post("/tokenize", small, authorization=mine))

    asyncio.run(main())
