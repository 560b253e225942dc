"""Attacks F2 and F10 with their variants: pages of other sites, rebound names, malformed Hosts, keys that disappear."""

import asyncio
import http.server
import json
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI

from manyhands.api.access import Access
from manyhands.api.auth import RECENT_S, KeyRing
from manyhands.api.gateway import Gateway
from manyhands.api.http.app import create_app
from manyhands.api.http.hosts import MAX_AUTHORITY_CHARS, OLLAMA_PATHS, Authority, Hosts, is_loopback
from manyhands.api.http.server import serving
from manyhands.api.jobs import History
from manyhands.api.metrics import Metrics
from manyhands.api.native.plan import plan_router
from manyhands.api.native.process import process_router
from manyhands.api.native.routes import native_router
from manyhands.api.native.swarm import HopSpeeds, swarm_router, view_by_links
from manyhands.api.openai.chat import openai_router
from manyhands.api.openai.responses import responses_router
from manyhands.api.run import Caller
from manyhands.api.status import status_router
from manyhands.cli.client import GatewayError, call
from manyhands.cli.gateway import Names, api_for
from manyhands.cli.owner import owner_file, owner_secret
from manyhands.config import ApiConfig
from manyhands.core import NodeAddr
from manyhands.errors import BadRequest, ManyhandsError
from tests.api.served import MODEL, make_model, raw, served

EVIL = "http://evil.example"
JSON = "content-type: application/json"
GENERATING = {
    "/v1/completions": {"model": MODEL, "prompt": "hi", "max_tokens": 2},
    "/v1/chat/completions": {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2},
    "/v1/responses": {"model": MODEL, "input": "hi", "max_output_tokens": 16},
    "/v1/responses/input_tokens": {"model": MODEL, "input": "hi"},
    "/api/infer": {"prompt": "hi", "max_tokens": 2},
    "/api/infer/stream": {"prompt": "hi", "max_tokens": 2},
    "/bus/v1/call": {"params": {}, "input": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}},
}
ADMIN = {
    "POST /api/workers/register": b'{"address": "127.0.0.1:9"}',
    "DELETE /api/workers/b?force=true": b"",
    "POST /api/workers/b/readmit": b"",
    "POST /api/workers/b/reassign": b'{"to": "0-1"}',
    "POST /api/keys": b'{"name": "b"}',
    "DELETE /api/keys/b": b"",
    "POST /api/process": b'{"input_ids": [1]}',
}


def make_app(gateway: Gateway, **options: Any) -> FastAPI:
    """Every route that a gateway has."""
    metrics, history, view = Metrics(gateway), History(), view_by_links(gateway, HopSpeeds())
    routers = [
        openai_router(gateway),
        responses_router(gateway),
        native_router(gateway, history),
        status_router(gateway, metrics),
        swarm_router(view),
        plan_router(gateway, view),
        process_router(gateway),
    ]
    return create_app(gateway, routers=routers, **options)


def routes_of(app: FastAPI) -> list[str]:
    """ "METHOD PATH" of everything in the OpenAPI document."""
    return [f"{method.upper()} {path}" for path, item in app.openapi()["paths"].items() for method in item]


class Door:
    """A gateway without a model, and raw requests to it."""

    def __init__(self, app: FastAPI, addr: NodeAddr) -> None:
        self.app, self.addr = app, addr
        self.access: Access = app.state.access
        self.host = f"host: {addr}"

    async def send(
        self, line: str, *headers: str, body: bytes = b"", version: str = "1.1", has_host: bool = True
    ) -> tuple[int, bytes]:
        """`line`: "METHOD TARGET". The right Host unless has_host is false."""
        lines = [f"{line} HTTP/{version}", *([self.host] if has_host else []), *headers, "connection: close"]
        lines += [f"content-length: {len(body)}"] if body else []
        return await raw(self.addr, "\r\n".join([*lines, "", ""]).encode("latin-1") + body)

    async def status(self, line: str, *headers: str, **options: Any) -> int:
        return (await self.send(line, *headers, **options))[0]


@asynccontextmanager
async def opened(host: str = "127.0.0.1", *, insecure: bool = False, **options: Any) -> AsyncIterator[Door]:
    app = make_app(Gateway({}), **options)
    async with serving(app, host, 0, insecure=insecure) as addr:
        yield Door(app, NodeAddr("127.0.0.1", addr.port) if host == "0.0.0.0" else addr)


def keys_of(tmp_path: Path) -> KeyRing:
    return KeyRing(tmp_path / "home" / "keys.json")


# -- Host -------------------------------------------------------------------------------------------------------------

GOOD_HOSTS = [
    "127.0.0.1",
    "127.0.0.1:18000",
    "localhost",
    "LocalHost:1",
    "localhost.",
    "127.0.0.1.",
    "[::1]",
    "[::1]:80",
]
GOOD_HOSTS += ["[0:0:0:0:0:0:0:1]:9", "127.8.9.1", "[::ffff:127.0.0.1]:5", "localhost:"]
OTHER_HOSTS = [
    "evil.example",
    "evil.example:18000",
    "127.0.0.1.evil.example",
    "localhost.evil.example",
    "evil.localhost",
]
OTHER_HOSTS += ["0.0.0.0", "192.168.1.5:18000", "[fe80::1]", "2130706433", "0x7f.0.0.1", "127.1", "0177.0.0.1", "[::2]"]
BAD_HOSTS = ["", " ", "127.0.0.1:18000@evil", "user@127.0.0.1", "a:b@localhost", "127.0.0.1, evil", "http://localhost"]
BAD_HOSTS += [
    "localhost/",
    "localhost:99999",
    "localhost:-1",
    "localhost:1:2",
    "::1",
    "[::1",
    "[::1]x",
    "[evil]",
    "[::g]",
]
BAD_HOSTS += [
    "localhost..",
    ".localhost",
    "local host",
    "localhost\t",
    "l\xf6calhost",
    "localhost%00",
    "localhost#",
    "*",
]
BAD_HOSTS += ["[::1%25lo]", "localhost?x", "localhost\\evil"]


@pytest.mark.parametrize(
    "host, status",
    [
        *((host, 200) for host in GOOD_HOSTS),
        *((host, 421) for host in OTHER_HOSTS),
        *((host, 400) for host in BAD_HOSTS if host.strip() == host),
    ],
)
def test_a_gateway_on_loopback_answers_to_loopback_alone(host: str, status: int) -> None:
    hosts = Hosts()
    hosts.listen("127.0.0.1")
    try:
        said = 200 if hosts.sender("GET", "1.1", {"host": host}) == "program" else 0
    except ManyhandsError as error:
        said = error.http_status
    assert said == status


def test_the_host_is_checked_on_every_path() -> None:
    """DNS rebinding: the browser asks for evil.example, whose address is 127.0.0.1 now. Every route says no, before it runs."""

    async def main() -> None:
        async with opened(cors=["http://there"]) as door:
            for host in ("evil.example", f"evil.example:{door.addr.port}"):
                for line in routes_of(door.app):
                    same = f"origin: http://{host}"
                    assert await door.status(line, f"host: {host}", same, JSON, has_host=False) == 421, line
                for line in (
                    "GET /",
                    "GET /page/reference.css",
                    "GET /docs",
                    "GET /openapi.json",
                    "GET /nothing",
                    "OPTIONS /v1/models",
                    "GET //",
                    "POST /v1/completions",
                ):
                    cors = ("origin: http://there", "access-control-request-method: POST")
                    assert await door.status(line, f"host: {host}", *cors, has_host=False) == 421, line

    asyncio.run(main())


def test_host_is_one_and_not_missing() -> None:
    async def main() -> None:
        async with opened() as door:
            for headers in ((), (door.host, door.host), (door.host, "host: evil.example"), ("host:",), ("host: a, b",)):
                assert await door.status("GET /health", *headers, has_host=False) == 400, headers
            assert await door.status("GET /health", has_host=False, version="1.0") == 200  # no browser: a load balancer
            assert await door.status("GET /health", f"origin: {EVIL}", has_host=False, version="1.0") == 403
            assert await door.status("GET /health", "host: evil.example", has_host=False, version="1.0") == 421

    asyncio.run(main())


def test_absolute_targets_name_the_same_host() -> None:
    """A second place to name the host (RFC 9112 §3.2.2) must not say something else."""

    async def main() -> None:
        async with opened() as door:
            port = door.addr.port
            for target, status in {
                f"http://127.0.0.1:{port}/health": 200,
                f"HTTP://127.0.0.1:{port}/health": 200,
                "http://evil.example/health": 400,
                f"http://evil.example:{port}/health": 400,
                f"http://127.0.0.1:{port}@evil.example/health": 400,
                f"http://evil@127.0.0.1:{port}/health": 400,
                f"http://127.0.0.1:{port + 1}/health": 400,
                f"http://127.0.0.1:{port}?/health": 400,
            }.items():
                assert await door.status(f"GET {target}") == status, target
                if status == 200:
                    assert await door.status(f"GET {target}", "host: evil.example", has_host=False) == 400
            assert await door.status("GET http://evil.example/health", "host: evil.example", has_host=False) == 421
            assert await door.status(f"GET http://127.0.0.1:{port}/health", has_host=False, version="1.0") == 400

    asyncio.run(main())


def test_beyond_loopback_addresses_and_told_names_count() -> None:
    hosts = Hosts(["llm.example.org", "other.example.org:8443"])
    hosts.listen("0.0.0.0")
    for host in ("192.168.1.5:8000", "[2001:db8::1]:8000", "127.0.0.1", "LLM.example.org", "llm.example.org.:444"):
        assert hosts.sender("GET", "1.1", {"host": host}) == "program", host
    assert hosts.sender("GET", "1.1", {"host": "other.example.org:8443"}) == "program"
    for host in ("evil.example", "xllm.example.org", "llm.example.org.evil.example", "other.example.org"):
        with pytest.raises(ManyhandsError, match="--allow-host"):
            hosts.sender("GET", "1.1", {"host": host})
    for text in ("http://x", "x/y", "x:123456", "", "*"):
        with pytest.raises(BadRequest, match="hosts has"):
            ApiConfig(hosts=(text,))


# -- Origin -----------------------------------------------------------------------------------------------------------

HERE = {"host": "127.0.0.1:8000"}


@pytest.mark.parametrize(
    "headers, sender",
    [
        ({}, "program"),
        ({"origin": "http://127.0.0.1:8000"}, "page"),
        ({"origin": "http://127.0.0.1:8000", "sec-fetch-site": "same-origin"}, "page"),
        ({"sec-fetch-site": "same-origin"}, "page"),
        ({"sec-fetch-site": "none"}, "page"),
        ({"origin": "https://ok.example"}, "site"),
        ({"origin": "https://ok.example", "sec-fetch-site": "cross-site"}, "site"),
        ({"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate", "sec-fetch-dest": "document"}, "site"),
        ({"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate", "sec-fetch-dest": "iframe"}, None),
        ({"sec-fetch-site": "cross-site", "sec-fetch-mode": "no-cors", "sec-fetch-dest": "image"}, None),
        ({"sec-fetch-site": "same-site", "sec-fetch-mode": "no-cors"}, None),  # http://localhost:3000
        ({"sec-fetch-site": "nonsense"}, None),
        ({"origin": "http://127.0.0.1:8000", "sec-fetch-site": "cross-site"}, None),
        ({"origin": "http://127.0.0.1:3000"}, None),
        ({"origin": "http://localhost:8000"}, None),
        ({"origin": "ftp://127.0.0.1:8000"}, None),
        ({"origin": "https://ok.example.evil.example"}, None),
        ({"origin": "https://ok.example:444"}, None),
        ({"origin": "http://ok.example"}, None),
        ({"origin": "null"}, None),
        ({"origin": ""}, None),
        ({"origin": "http://127.0.0.1:8000@evil.example"}, None),
        ({"origin": "http://127.0.0.1:8000, https://ok.example"}, None),
    ],
)
def test_who_may_be_behind_a_request(headers: dict[str, str], sender: str | None) -> None:
    hosts = Hosts(cors=["https://ok.example"])
    try:
        assert hosts.sender("GET", "1.1", HERE | headers) == sender
    except ManyhandsError as error:
        assert sender is None and error.http_status == 403


def test_only_reading_may_be_linked_to() -> None:
    link = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate", "sec-fetch-dest": "document"}
    with pytest.raises(ManyhandsError):
        Hosts().sender("POST", "1.1", HERE | link)


def test_behind_a_proxy_that_ends_tls() -> None:
    """The page is https://llm.example.org; the gateway is asked by that name, or by its own where the proxy writes that."""
    told = Hosts(["llm.example.org"])
    for host in ("llm.example.org", "127.0.0.1:8000"):
        assert told.sender("POST", "1.1", {"host": host, "origin": "https://llm.example.org"}) == "page"
        with pytest.raises(ManyhandsError):
            told.sender("POST", "1.1", {"host": host, "origin": "https://llm.example.org:8443"})


def test_what_a_page_can_send_unasked_runs_nothing(tmp_path: Path) -> None:
    """Simple requests (text/plain, forms, beacons, no type) with and without Origin, to every path that generates."""
    folder = make_model(tmp_path / "m")
    kinds = ["text/plain", "text/plain; application/json", "application/x-www-form-urlencoded", "", "application/jsonx"]
    kinds += ["multipart/form-data; boundary=x", "application/octet-stream", "text/plain;charset=application/json"]
    untyped = {path: {"model": MODEL, "prompt": "hi"} for path in OLLAMA_PATHS}

    async def main() -> None:
        async with served(folder) as it:
            async with serving(make_app(it.gateway), "127.0.0.1", 0) as addr:
                door = Door(make_app(it.gateway), addr)
                for path, given in (GENERATING | untyped).items():
                    body, wanted = json.dumps(given).encode(), {415} if path in GENERATING else {404, 405, 415}
                    for kind in kinds:
                        said = [f"content-type: {kind}"] if kind else []
                        said += ["user-agent: Mozilla/5.0"] if path in OLLAMA_PATHS else []
                        assert await door.status(f"POST {path}", *said, body=body) in wanted, (path, kind)
                        assert await door.status(f"POST {path}", *said, f"origin: {EVIL}", body=body) == 403
                    for head in (f"origin: {EVIL}", "origin: null", "sec-fetch-site: cross-site"):
                        assert await door.status(f"POST {path}", JSON, head, body=body) == 403, (path, head)
                    assert await door.status(f"POST {path}", JSON, "content-type: text/plain", body=body) == 400
                for path, status in (("/nowhere", 404), ("/v1/chat/completion", 404), ("/v1/models", 405)):
                    assert await door.status(f"POST {path}", "content-type: text/plain", body=b"{}") == status, path
                chunked = b"2\r\n{}\r\n0\r\n\r\n"
                head = f"POST /api/infer HTTP/1.1\r\n{door.host}\r\nconnection: close\r\ntransfer-encoding: chunked\r\n\r\n"
                assert (await raw(addr, head.encode() + chunked))[0] == 415
                assert it.watcher.started_jobs == []
                body = json.dumps(GENERATING["/api/infer"]).encode()
                for kind in ("application/json", "Application/JSON; charset=utf-8"):  # a program runs it
                    assert await door.status("POST /api/infer", f"content-type: {kind}", body=body) == 200
                assert len(it.watcher.started_jobs) == 2

    asyncio.run(main())


# -- admins, pages and owners -----------------------------------------------------------------------------------------


def test_no_client_is_an_admin_unless_told() -> None:
    assert not Caller().is_admin and not Caller("a").is_admin


def test_without_keys_a_loopback_caller_changes_nothing() -> None:
    async def main() -> None:
        async with opened() as door:
            owner = f"x-manyhands-owner: {door.access.owner_secret}"
            token = f"x-manyhands-token: {door.access.page_token}"
            page = f"origin: http://{door.addr}"
            named = {line.replace("/keys/b", "/keys/{name}").replace("/b", "/{worker_id}") for line in ADMIN}
            admin = {line.partition("?")[0] for line in named}
            harmless = {f"POST {path}" for path in GENERATING} | {"POST /v1/embeddings", "POST /api/workers/heartbeat"}
            harmless |= {"POST /api/plan"}
            harmless |= {
                "POST /api/session/link",
                "POST /api/session/redeem",
                "DELETE /api/session",
            }  # test_page_link.py
            assert {line for line in routes_of(door.app) if not line.startswith("GET")} == admin | harmless
            for line, body in {**ADMIN, "GET /api/keys": b""}.items():
                for extra in ((), (page, token), (token,), ("x-manyhands-owner: x",), ("authorization: Bearer none",)):
                    status, said = await door.send(line, JSON, *extra, body=body)
                    assert status == 403 and b"may not change the swarm" in said, (line, extra)
                assert await door.status(line, JSON, page, body=body) == 403
                assert await door.status(line, JSON, owner, body=body) not in (401, 403), line
                assert await door.status(line, JSON, owner, f"origin: {EVIL}", body=body) == 403

    asyncio.run(main())


def test_a_page_of_the_gateway_gets_a_token_and_needs_it() -> None:
    async def main() -> None:
        async with opened(cors=["https://ok.example"]) as door:
            page, body = f"origin: http://{door.addr}", b'{"worker_id": "b"}'
            status, said = await door.send("GET /api/session", "sec-fetch-site: same-origin")
            assert status == 200 and b"cache-control: no-store" in said and b"access-control" not in said
            token = json.loads(said.split(b"\r\n\r\n", 1)[1])["token"]
            line = "POST /api/workers/heartbeat"
            status, said = await door.send(line, page, JSON, body=body)
            assert status == 403 and b"/api/session" in said
            assert await door.status(line, page, JSON, f"x-manyhands-token: {token}", body=body) == 404
            assert await door.status(line, page, JSON, "x-manyhands-token: x", body=body) == 403
            for head in (f"origin: {EVIL}", "origin: https://ok.example", "sec-fetch-site: cross-site", "origin: null"):
                status, said = await door.send("GET /api/session", head)
                assert status == 403 and token.encode() not in said, head
            link = ("sec-fetch-site: cross-site", "sec-fetch-mode: navigate", "sec-fetch-dest: document")
            assert await door.status("GET /api/session", *link) == 403
            assert await door.status("GET /docs", *link) == 200
        async with opened() as other:
            assert other.access.page_token != token

    asyncio.run(main())


@pytest.mark.parametrize(
    "how", ["deleted", "emptied", "damaged", "replaced by a folder", "revoked", "no keys left in it"]
)
def test_a_gateway_that_had_keys_stays_locked(how: str, tmp_path: Path) -> None:
    keys = keys_of(tmp_path)
    secret = keys.add("ann", 1.0, is_admin=True)

    def spoil() -> None:
        if how == "revoked":
            keys.revoke("ann", 2.0)
            return
        keys.path.unlink()
        texts = {"emptied": "", "damaged": "{", "no keys left in it": '{"keys": []}'}
        if how == "replaced by a folder":
            keys.path.mkdir()
        elif how in texts:
            keys.path.write_text(texts[how])

    async def main() -> None:
        async with opened(keys=KeyRing(keys.path)) as door:
            bearer = f"authorization: Bearer {secret}"
            assert await door.status("GET /v1/models", bearer) == 200
            spoil()
            await asyncio.sleep(RECENT_S)
            for line, body in {"GET /v1/models": b"", "GET /api/jobs": b"", **ADMIN}.items():
                for extra in ((), (bearer,), ("authorization: Bearer none",)):
                    status, said = await door.send(line, JSON, *extra, body=body)
                    assert status == 401, (line, extra, said)
                    assert b"keys.json" not in said
                owner = f"x-manyhands-owner: {door.access.owner_secret}"
                assert await door.status(line, JSON, owner, body=body) not in (401, 403), line
            assert await door.status("GET /health") == 200

    asyncio.run(main())


def test_the_first_key_locks_and_its_file_may_go_again(tmp_path: Path) -> None:
    keys = keys_of(tmp_path)

    async def main() -> None:
        async with opened(keys=KeyRing(keys.path)) as door:
            assert await door.status("GET /v1/models") == 200
            keys.add("ann", 1.0)
            await asyncio.sleep(RECENT_S)
            assert await door.status("GET /v1/models") == 401
            keys.path.unlink()
            await asyncio.sleep(RECENT_S)
            assert await door.status("GET /v1/models") == 401

    asyncio.run(main())


def test_beyond_loopback_it_never_opens_by_itself(tmp_path: Path) -> None:
    keys = keys_of(tmp_path)
    keys.add("ann", 1.0)

    async def main() -> None:
        app = make_app(Gateway({}), keys=KeyRing(keys.path))
        keys.path.unlink()
        with pytest.raises(BadRequest, match="key add"):
            async with serving(app, "0.0.0.0", 0):
                pass
        async with opened("0.0.0.0", insecure=True) as door:
            assert await door.status("GET /v1/models") == 200
            assert await door.status("DELETE /api/workers/b") == 403
        access = Access(KeyRing(keys.path), Hosts())
        access.listen("0.0.0.0", insecure=False)
        assert await access.needs_key()

    asyncio.run(main())


# -- the commands of this machine -------------------------------------------------------------------------------------


def test_the_owner_administers_with_every_key_revoked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MANYHANDS_HOME", str(tmp_path))
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # what is on this machine is not asked through a proxy
    keys = KeyRing(tmp_path / "keys.json")
    secret = keys.add("ann", 1.0)
    keys.revoke("ann", 2.0)

    async def main() -> None:
        names = Names.of(["llm.example.org"], ["https://ok.example"])
        async with api_for({}, NodeAddr("127.0.0.1", 0), names=names) as url:
            port = int(url.rpartition(":")[2])
            file = tmp_path / "run" / f"api-{port}.secret"
            assert file.stat().st_mode & 0o777 == 0o600
            for api in (url, f"http://localhost:{port}"):
                assert (await asyncio.to_thread(call, api, "", "GET", "/api/jobs"))["jobs"] == []
            with pytest.raises(GatewayError, match="no worker"):
                await asyncio.to_thread(call, url, "", "DELETE", "/api/workers/b")
            with pytest.raises(GatewayError, match="revoked"):
                await asyncio.to_thread(call, url, secret, "GET", "/api/jobs")
            monkeypatch.setenv("MANYHANDS_HOME", str(tmp_path / "other"))
            with pytest.raises(GatewayError, match="key"):
                await asyncio.to_thread(call, url, "", "GET", "/api/jobs")
            told, allowed = "host: llm.example.org", "origin: https://ok.example"
            for lines in ((told,), (f"host: 127.0.0.1:{port}", allowed), (told, "origin: http://llm.example.org")):
                ask = "\r\n".join(["GET /health HTTP/1.1", *lines, "connection: close", "", ""])
                assert (await raw(NodeAddr("127.0.0.1", port), ask.encode()))[0] == 200, lines
        assert not file.exists()

    asyncio.run(main())


def test_the_owners_secret_goes_to_this_machine_alone(tmp_path: Path) -> None:
    with owner_file(tmp_path, 8000, "s3cret"):
        for api in ("http://127.0.0.1:8000", "http://localhost:8000/", "http://[::1]:8000", "http://0.0.0.0:8000"):
            assert owner_secret(tmp_path, api) == "s3cret", api
        for api in ("http://evil.example:8000", "http://127.0.0.1.evil.example:8000", "http://127.0.0.1:8001"):
            assert owner_secret(tmp_path, api) is None, api
        assert owner_secret(tmp_path, "http://127.0.0.1:8000@evil.example:8000") is None
    assert owner_secret(tmp_path, "http://127.0.0.1:8000") is None


@contextmanager
def answering(status: int, headers: dict[str, str], body: bytes = b"{}") -> Iterator[tuple[str, list[Any]]]:
    """An HTTP server that always answers so; its URL, and the headers that it was sent."""
    seen: list[Any] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            seen.append(dict(self.headers))
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}", seen
        finally:
            server.shutdown()
            thread.join()


def test_a_redirect_gets_neither_key_nor_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MANYHANDS_HOME", str(tmp_path))
    with answering(200, {}) as (goal, seen), answering(302, {"location": goal}) as (api, _):
        for key in ("mhk_x", ""):
            with pytest.raises(GatewayError):
                call(api, key, "GET", "/api/jobs")
        assert seen == []


@pytest.mark.parametrize("text", ["a" * 300, "x" + ".y" * 2000, "[" + ":" * 200 + "]", "1" * 5000, "a-" * 4000])
def test_long_hosts_are_read_at_once(text: str) -> None:
    """The pattern does not go back and forth over what it cannot match."""
    for host in (text, text + "!", text + ":99999999"):
        try:
            Authority.parse(host)
        except BadRequest as error:
            assert len(str(error)) < 200
    assert not is_loopback(text)


def test_a_host_has_at_most_so_many_characters() -> None:
    """60 kB of a name in Origin took 10 ms: it is looked at twice, label by label."""
    assert Authority.parse("a." * 126 + "a").host
    with pytest.raises(BadRequest):
        Authority.parse("a." * (MAX_AUTHORITY_CHARS // 2) + "a")
