"""Siblings of F1 on the way out: an answer, a list or a page of numbers is as long as a client makes it, or waits for a reader
that never comes. What one turn of the event loop does for it is counted, not timed.
"""

import asyncio
import json
import socket
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from manyhands.api.encode import PIECE_BYTES, Rows
from manyhands.api.sse import EventStream, Single, event_pieces
from manyhands.config import LimitsConfig
from tests.api.served import MODEL, Served, make_model, post, raw_slowly, served

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


def odds(num_tokens: int) -> Rows:
    rows = Rows()
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
        body, most = await written(lambda send: Single(work, LIMITS).send_to({}, receive, send))  # type: ignore[arg-type]
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
    append, counts = Rows.append, []

    async def ask(it: Served, path: str, count: int, **fields: Any) -> Any:
        turns = Turns()

        def counted(rows: Rows, item: Any) -> None:
            turns.note()
            append(rows, item)

        monkeypatch.setattr(Rows, "append", counted)
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


@pytest.mark.parametrize("stream", [True, False])
def test_a_reader_that_takes_nothing_is_cut(stream: bool, folder: Path) -> None:
    """What waits for it stays within the transport's mark, one piece and the system's buffers; its session is freed."""
    sizes: list[int] = []

    def waiting() -> list[int]:
        """Bytes that wait to be written, of every connection of this process."""
        transports = list(asyncio.get_running_loop()._transports.values())  # type: ignore[attr-defined]
        return [transport.get_write_buffer_size() for transport in transports]

    async def main() -> None:
        async with served(folder, limits=LimitsConfig(write_timeout_s=0.5)) as it:
            chat = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "stream": stream}
            chat |= {"logprobs": True, "top_logprobs": 20, "max_tokens": 200, "manyhands": {"ignore_eos": True}}
            with socket.create_connection((it.addr.host, it.addr.port)) as reader:
                reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                reader.sendall(post("/v1/chat/completions", json.dumps(chat).encode()))
                async with asyncio.timeout(60):
                    while not sizes or waiting():
                        sizes.extend(waiting())
                        await asyncio.sleep(0.005)
                await it.freed()

    asyncio.run(main())
    assert 0 < max(sizes) < (64 << 10) + 2 * PIECE_BYTES
