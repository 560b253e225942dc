"""Small requests for which the HTTP server's parser, or what stands behind it, makes many calls of Python: lines of a header,
parts of a body, requests one after another, lists within one header. One read of them held the event loop for 15 to 60 ms.

What is asserted are the bounds, from both sides.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from manyhands.api.http.connection import MAX_HEADER_LINES, MAX_PIPELINED, MAX_TARGET_BYTES, PART_BYTES, Http
from tests.api.served import MODEL, Served, make_model, raw, raw_slowly, served

HOST = b"host: localhost\r\n"
CLOSE = b"connection: close\r\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("reads") / "m")


def play(folder: Path, scene: Callable[[Served], Awaitable[None]]) -> None:
    async def main() -> None:
        async with served(folder) as it:
            await scene(it)

    asyncio.run(main())


def get(path: bytes = b"/v1/models", header: bytes = b"", last: bytes = CLOSE) -> bytes:
    return b"GET %b HTTP/1.1\r\n%b%b%b\r\n" % (path, HOST, header, last)


def in_parts(body: bytes, size: int) -> bytes:
    """A request whose body comes in parts of so many bytes, in one read where it is short."""
    parts = [body[start : start + size] for start in range(0, len(body), size)]
    chunks = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts)
    head = b"POST /v1/completions HTTP/1.1\r\n" + HOST + CLOSE + b"content-type: application/json\r\n"
    return head + b"transfer-encoding: chunked\r\n\r\n" + chunks + b"0\r\n\r\n"


def test_lines_of_a_header_and_bytes_of_a_target_are_counted(folder: Path) -> None:
    async def scene(it: Served) -> None:
        lines = MAX_HEADER_LINES - 2  # host and connection
        assert (await raw(it.addr, get(header=b"a: b\r\n" * lines)))[0] == 200
        status, said = await raw(it.addr, get(header=b"a: b\r\n" * (lines + 1)))
        assert status == 400 and said.endswith(b"at most 128 lines in a header are taken: send less")
        target = b"/v1/models?"
        assert (await raw(it.addr, get(target + b"a&" * ((MAX_TARGET_BYTES - len(target)) // 2))))[0] == 200
        status, said = await raw(it.addr, get(target + b"a&" * (MAX_TARGET_BYTES // 2)))
        assert status == 400 and said.endswith(b"bytes in the target of a request are taken: send less")

    play(folder, scene)


def test_parts_of_a_body_are_counted_by_its_length(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a program writes piece by piece is read; a long body of nothing but single bytes is not."""
    monkeypatch.setattr("manyhands.api.http.connection.MAX_PARTS", 100)
    asked = json.dumps({"model": MODEL, "prompt": "hi", "max_tokens": 1}).encode()

    async def scene(it: Served) -> None:
        assert (await raw(it.addr, in_parts(asked, 1)))[0] == 200
        assert (await raw(it.addr, in_parts(asked + b" " * (200 * PART_BYTES), PART_BYTES)))[0] == 200
        for path in (b"/v1/completions", b"/v1/nothing"):  # also of a body that is refused and thrown away
            sent = in_parts(b" " * 150, 1).replace(b"/v1/completions", path)
            status, said = await raw(it.addr, sent)
            assert status == 400 and b"parts of a body" in said

    play(folder, scene)


def test_requests_that_wait_for_those_before_them_are_counted(folder: Path) -> None:
    async def scene(it: Served) -> None:
        few = get(last=b"") * (MAX_PIPELINED - 1) + get()
        status, said = await raw_slowly(it, few)
        assert status == 200 and said.count(b"HTTP/1.1 200") == MAX_PIPELINED
        _, said = await raw(it.addr, get(last=b"") * (MAX_PIPELINED + 2))
        assert b"requests that wait" in said and said.count(b"HTTP/1.1 200") == 0

    play(folder, scene)


def test_cookies_and_lists_of_upgrades_are_not_taken_apart(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    def looked_at(*args: Any) -> Any:
        seen.append(repr(args))
        return {}

    monkeypatch.setattr("starlette.requests.cookie_parser", looked_at)
    monkeypatch.setattr(Http, "_get_upgrade", looked_at)

    async def scene(it: Served) -> None:
        assert (await raw(it.addr, get(b"/api/jobs", b"Cookie: " + b"a=b;" * 10_000 + b"\r\n")))[0] == 200
        upgrade = b"upgrade: h2c\r\nconnection: upgrade" + b"," * 60_000 + b"\r\n"
        status, said = await raw(it.addr, get(header=upgrade, last=b""))
        assert status == 200 and b"connection: close" in said

    play(folder, scene)
    assert seen == []


def test_what_means_nothing_is_not_logged(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A line of each was written: 40,000 requests without a key pushed all else out of a node's log."""

    async def scene(it: Served) -> None:
        for nothing in (b"GARBAGE\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\r\n\r\n", get(header=b"a: b\r\n" * 200)):
            assert (await raw(it.addr, nothing))[0] == 400
        assert (await raw(it.addr, get(header=b"upgrade: h2c\r\nconnection: upgrade\r\n", last=b"")))[0] == 200

    play(folder, scene)
    assert not [record for record in caplog.records if record.name.startswith("uvicorn")]
