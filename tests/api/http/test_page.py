"""The page at / as it is served: its policy, its size, its sources' hash, and that nothing in it leads to another host.

What the page does is tried in Chromium by tests/test_page.py (nightly).
"""

import asyncio
import gzip
import re
from pathlib import Path

import pytest
from fastapi import FastAPI

from manyhands.api.auth import KeyRing
from manyhands.api.gateway import Gateway
from manyhands.api.http.app import create_app
from manyhands.api.http.page import page_files
from manyhands.api.http.reference import render
from manyhands.api.http.server import serving
from manyhands.core import NodeAddr
from tests.api.served import raw
from tools import dashboard

# Names of XML, and a page that an error of Svelte's would name: nothing is fetched from them.
NAMES = ("http://www.w3.org/", "https://svelte.dev/e/")


async def get(addr: NodeAddr, path: str, *headers: str, method: str = "GET") -> tuple[int, dict[str, str], bytes]:
    lines = [f"{method} {path} HTTP/1.1", f"host: {addr}", "connection: close", *headers, "", ""]
    status, said = await raw(addr, "\r\n".join(lines).encode())
    head, _, body = said.partition(b"\r\n\r\n")
    fields = (line.split(": ", 1) for line in head.decode().split("\r\n")[1:])
    return status, {name.lower(): value for name, value in fields}, body


def app_with(keys: KeyRing | None = None) -> FastAPI:
    return create_app(Gateway({}), keys=keys)


def test_the_built_page_is_of_these_sources_and_small() -> None:
    assert dashboard.problems() == []


def test_a_changed_source_or_build_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for path in [*dashboard.sources(), *(path for path in dashboard.BUILT.rglob("*") if path.is_file())]:
        copy = tmp_path / path.relative_to(dashboard.ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(path.read_bytes())
    monkeypatch.setattr(dashboard, "SOURCES", tmp_path / "dashboard")
    monkeypatch.setattr(dashboard, "BUILT", tmp_path / "src" / "manyhands" / "dashboard")
    assert dashboard.problems() == []
    (tmp_path / "dashboard" / "src" / "App.svelte").write_text("<p>other</p>")
    (tmp_path / "src" / "manyhands" / "dashboard" / "index.html.gz").write_text("other")
    assert [line.partition(":")[0] for line in dashboard.problems()] == [
        "dashboard/ has changed since src/manyhands/dashboard was built",
        "files in src/manyhands/dashboard are not those that were built",
    ]


def test_every_file_is_served_under_a_strict_policy_and_without_a_key(tmp_path: Path) -> None:
    async def main() -> None:
        keys = KeyRing(tmp_path / "keys.json")
        keys.add("someone", 0.0)
        async with serving(app_with(keys), "127.0.0.1", 0) as addr:
            for path, file in page_files().items():
                status, headers, body = await get(addr, path)
                assert (status, body) == (200, file.plain), path
                policy = dict(part.split(" ", 1) for part in headers["content-security-policy"].split("; "))
                assert policy["default-src"] == "'none'" and policy["frame-ancestors"] == "'none'"
                assert {policy[name] for name in ("script-src", "style-src", "connect-src", "img-src")} == {"'self'"}
                assert headers["x-content-type-options"] == "nosniff" and "unsafe" not in str(headers)
                status, packed, body = await get(addr, path, "accept-encoding: gzip")
                assert packed["content-encoding"] == "gzip" and gzip.decompress(body) == file.plain
                assert (await get(addr, path, f"if-none-match: {headers['etag']}"))[0] == 304
                assert (await get(addr, path, method="HEAD"))[::2] == (200, b"")
            for path in ("/page/", "/page/../build.json", "/page/%2e%2e/build.json", "/build.json", "/index.html"):
                assert (await get(addr, path))[0] in (401, 404), path
            assert (await get(addr, "/api/swarm"))[0] == 401

    asyncio.run(main())


def test_the_page_names_only_files_of_its_own_and_no_other_host() -> None:
    files = page_files()
    index = files["/"].plain.decode()
    assert set(re.findall(r'(?:src|href)="([^"]+)"', index)) <= files.keys()
    assert not re.search(r"<style|<script(?![^>]*\bsrc=)| style=| on\w+=", index)
    for path, file in files.items():
        addresses = re.findall(r"https?://[^\s\"'`)<]+", file.plain.decode())
        assert all(address.startswith(NAMES) for address in addresses), (path, addresses)


def test_the_reference_is_a_plain_page_that_lists_every_operation() -> None:
    async def main() -> None:
        app = app_with()
        async with serving(app, "127.0.0.1", 0) as addr:
            status, headers, body = await get(addr, "/docs")
            text = body.decode()
            (icon,) = re.findall(r'<link rel="icon" href="([^"]+)">', text)
            assert (await get(addr, icon))[0] == 200
        assert status == 200 and "script-src 'self'" in headers["content-security-policy"]
        assert "<script" not in text and "http://" not in text and "https://" not in text
        for path, item in app.openapi()["paths"].items():
            assert all(f"<code>{method.upper()}</code> {path}</h3>" in text for method in item), path
        assert "tokens_per_day" in text

    asyncio.run(main())


def test_the_reference_shows_foreign_texts_as_text() -> None:
    operation = {"summary": "<script>alert(1)</script>", "parameters": [{"name": '"><b>', "in": "query"}]}
    page = render({"info": {"title": "<i>", "version": "1"}, "paths": {"/<u>": {"get": operation}}}, "/page/icon.svg")
    assert not re.search(r"<(?:script|b|i|u)>", page) and "&lt;script&gt;" in page
