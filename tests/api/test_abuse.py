"""Clients that are malformed, huge, deep, slow or gone: never a 500, a session that stays, or harm to another request."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from manyhands.api.fields import FIELDS, parse
from manyhands.api.http.body import BadField, read_json
from manyhands.config import LimitsConfig
from manyhands.errors import BadRequest
from tests.api.served import HERMES_TEMPLATE, MODEL, Served, make_model, post, raw, served
from tests.waiting import GUARD_S, until

CHAT = "/v1/chat/completions"
GOOD = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
TYPE = "content-type: application/json\r\n"
SMALL = LimitsConfig(max_body_bytes=100_000)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("abuse") / "m", HERMES_TEMPLATE)


def play(folder: Path, scene: Callable[[Served], Awaitable[None]], limits: LimitsConfig = SMALL) -> None:
    async def main() -> None:
        async with served(folder, limits=limits) as it:
            await scene(it)
            await it.freed()
            status, _ = await raw(it.addr, post(CHAT, json.dumps(GOOD).encode()))
            assert status == 200, "another's request"
            await it.freed()
            assert not it.gateway.jobs

    asyncio.run(main())


def with_(**fields: Any) -> bytes:
    return json.dumps({**GOOD, **fields}).encode()


OUTSIDE = {"$ref": "http://x/y"}
BAD = [
    b"",
    b"{",
    b"[]",
    b'"x"',
    b"null",
    b"\xff\xfe",
    b'{"model": "\xc3"}',
    b"\x00" * 100,
    b"[" * 50_000,
    b'{"a":' * 10_000,
    b"[" * 900 + b"]" * 900,
    b'{"model": "tiny", "messages": [{"role": "user", "content": "\\ud800"}]}',
    b'{"model": "tiny", "temperature": NaN, "messages": []}',
    b'{"model": "tiny", "temperature": 1e999, "messages": []}',
    b'{"model": "tiny", "seed": ' + b"9" * 5000 + b"}",
    with_(temperature=1e308),
    with_(max_tokens=10**30),
    with_(seed=-(10**30)),
    with_(n=10**9),
    with_(stop=["x"] * 17),
    with_(stop="x" * 257),
    with_(logit_bias={str(i): 1 for i in range(2000)}),
    with_(logit_bias={"9" * 400: 1}),
    with_(messages=[]),
    with_(messages=[[]]),
    with_(messages=[{"role": "user", "content": {"x": 1}}]),
    with_(messages=[{"role": "tool", "content": "x"}]),
    with_(model="../../etc/passwd"),
    with_(model=["tiny"]),
    with_(frobnicate=1),
    with_(tools=[{"type": "function", "function": {"name": "f\n%json"}}]),
    with_(tools=[{"type": "function", "function": {"name": "f", "parameters": OUTSIDE}}], tool_choice="required"),
    with_(response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": {"pattern": "(a+)+$" * 50}}}),
    with_(response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": {"$ref": "#"}}}),
    with_(manyhands={"path": []}),
]  # fmt: skip


def test_no_malformed_body_is_a_bug_of_ours(folder: Path) -> None:
    async def scene(it: Served) -> None:
        for body in BAD:
            status, said = await raw(it.addr, post(CHAT, body))
            assert status in (400, 404), (body[:80], said[:300])
            error = json.loads(said.partition(b"\r\n\r\n")[2])["error"]
            assert (
                error["message"]
                and "\n" not in error["message"]
                and error.keys() == {"message", "type", "param", "code"}
            )
        assert all(job.error == "bad_request" for job in it.watcher.ended_jobs)  # a schema that nothing can satisfy

    play(folder, scene)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@given(st.sampled_from(sorted(FIELDS)), st.data())
@settings(max_examples=300)
def test_any_json_is_taken_or_refused_in_one_line(path: str, data: st.DataObject) -> None:
    names = st.sampled_from([f.name for f in FIELDS[path]])
    sent = data.draw(st.dictionaries(names, JSON, max_size=4))
    try:
        given_ = parse(path, read_json(json.dumps(sent).encode()))
        assert set(given_) <= set(sent)
    except BadRequest as error:
        assert "\n" not in str(error)


@given(st.binary(max_size=60))
def test_any_bytes_are_json_or_refused(body: bytes) -> None:
    try:
        assert isinstance(read_json(body), dict)
    except BadRequest as error:
        assert str(error)


def test_a_body_too_large_is_refused_while_it_comes(folder: Path) -> None:
    async def scene(it: Served) -> None:
        status, said = await raw(it.addr, post(CHAT, b"x" * 100_001))
        assert status == 413 and b"too_large" in said
        head = f"POST {CHAT} HTTP/1.1\r\nhost: localhost\r\n{TYPE}transfer-encoding: chunked\r\n\r\n".encode()
        status, said = await raw(it.addr, head + (b"8000\r\n" + b"x" * 0x8000 + b"\r\n") * 5)
        assert status == 413
        status, _ = await raw(it.addr, post(CHAT, b"", **{"x-huge": "x" * 70_000}))
        assert status in (0, 400)

    play(folder, scene)


def test_who_sends_slowly_is_cut(folder: Path) -> None:
    """A header or a body that never ends, also on a connection that has served before."""

    async def scene(it: Served) -> None:
        begun = f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n{TYPE}".encode()

        async def again() -> None:
            reader, writer = await asyncio.open_connection(it.addr.host, it.addr.port)
            writer.write(b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\n\r\n")
            await reader.readuntil(b'"list"')
            writer.write(begun)
            async with asyncio.timeout(GUARD_S):
                await reader.read()
            writer.close()

        half = begun + b"content-length: 50\r\n\r\n{"
        first, silent, (status, said), _ = await asyncio.gather(
            raw(it.addr, begun), raw(it.addr, b""), raw(it.addr, half), again()
        )
        assert first == silent == (0, b"")
        assert status == 408 and b"request_timeout" in said

    # Clients and server share one loop: what is too slow must be longer than a busy machine may hold that up.
    play(folder, scene, replace(SMALL, read_timeout_s=1.0))


def test_a_client_may_leave_at_any_stage(folder: Path) -> None:
    whole = post(CHAT, with_(stream=True, max_tokens=500, manyhands={"ignore_eos": True}))

    async def leave(it: Served, sent: bytes, tokens: int) -> None:
        _, writer = await asyncio.open_connection(it.addr.host, it.addr.port)
        writer.write(sent)
        await writer.drain()
        wanted = it.watcher.num_tokens + tokens
        await asyncio.sleep(0.02)
        await until(lambda: it.watcher.num_tokens >= wanted)
        writer.transport.abort()

    async def scene(it: Served) -> None:
        for length in (0, 10, len(whole) // 2, len(whole) - 1):
            await leave(it, whole[:length], 0)
        for tokens in (0, 1, 2, 7):
            await leave(it, whole, tokens)
        await asyncio.gather(*(leave(it, whole, 0) for _ in range(8)))

    play(folder, scene)


def test_paths_and_methods_that_are_not_there(folder: Path) -> None:
    async def scene(it: Served) -> None:
        for request, wanted in (
            (b"GET /v1/nothing HTTP/1.1", 404),
            (b"GET /v1/chat/completions HTTP/1.1", 405),
            (b"DELETE /v1/models/tiny HTTP/1.1", 405),
            (b"GET /v1/models/%00%ff HTTP/1.1", 404),
            (b"GARBAGE", 400),
            (b"\x16\x03\x01\x02\x00\x01\x00\x01", 400),
        ):
            status, said = await raw(it.addr, request + b"\r\nhost: localhost\r\nconnection: close\r\n\r\n")
            assert status == wanted, (request, said)

    play(folder, scene)


def test_what_the_parser_keeps_is_bounded(folder: Path) -> None:
    """A header or a trailer without end, in one piece and in many."""
    body = b"1\r\n{\r\n0\r\n"
    chunked = f"POST {CHAT} HTTP/1.1\r\nhost: localhost\r\n{TYPE}transfer-encoding: chunked\r\n\r\n".encode() + body

    async def scene(it: Served) -> None:
        for endless in (b"GET /v1/models HTTP/1.1\r\nx: " + b"x" * 400_000, chunked + b"x: " + b"x" * 400_000):
            status, _ = await raw(it.addr, endless)
            assert status == 400
        many = (
            b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\n"
            + b"".join(b"x%d: y\r\n" % i for i in range(20_000))
            + b"\r\n"
        )
        assert (await raw(it.addr, many))[0] == 400

    play(folder, scene)


def test_nothing_is_upgraded_and_the_request_is_answered(folder: Path) -> None:
    async def scene(it: Served) -> None:
        upgrade = b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\nconnection: upgrade\r\nupgrade: h2c\r\n\r\n"
        status, said = await raw(it.addr, upgrade)
        assert status == 200 and b"connection: close" in said
        status, said = await raw(it.addr, upgrade + upgrade)
        assert status == 200 and said.count(b"HTTP/1.1") == 1

    play(folder, scene)


def test_a_client_that_asks_on_before_it_has_its_answer_may_leave(folder: Path) -> None:
    """The stream that runs is the one that ends, and the one that waits behind it never begins."""
    body = with_(stream=True, max_tokens=500, manyhands={"ignore_eos": True})
    request = post(CHAT, body).replace(b"connection: close\r\n", b"")

    async def scene(it: Served) -> None:
        _, writer = await asyncio.open_connection(it.addr.host, it.addr.port)
        writer.write(request + request)
        await until(lambda: it.watcher.num_tokens >= 3)
        writer.transport.abort()
        await it.freed()
        assert it.watcher.num_tokens < 490 and len(it.watcher.started_jobs) == 1

    play(folder, scene)


def test_a_wrong_value_in_manyhands_is_said_without_its_other_fields_and_without_links() -> None:
    """The message goes to a terminal; what docs/openai.md says of the object is for a key that it has not."""
    sent = {"model": "m", "messages": [{"role": "user", "content": "a"}]}
    with pytest.raises(
        BadField, match=r"manyhands\.draft is \"x\": input should be 'auto', 'off', 'suffix' or 'model'$"
    ):
        parse("/v1/chat/completions", {**sent, "manyhands": {"draft": "x"}})
    with pytest.raises(BadField, match="`draft`") as unknown:
        parse("/v1/chat/completions", {**sent, "manyhands": {"hops": 3}})
    assert "](" not in str(unknown.value)
