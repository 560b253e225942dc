"""manyhands page: the link that it prints, for whom, and that no pipe and no log gets one from `up`."""

import asyncio
import io
import json
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from manyhands.api.sign_in import FRAGMENT
from manyhands.cli import app
from manyhands.cli.gateway import api_for
from manyhands.cli.page import page_link
from manyhands.cli.reporter import Reporter, tell_page
from manyhands.core import NodeAddr
from manyhands.errors import BadRequest, LinkClosed
from manyhands.plain import one_line


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_owner_gets_a_link_and_others_get_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MANYHANDS_HOME", str(tmp_path))

    async def main() -> None:
        async with api_for({}, NodeAddr("127.0.0.1", 0)) as url:
            for words in (["page", "--api", url], ["page", "--api", url, "--json"]):
                done = await asyncio.to_thread(CliRunner().invoke, app, words)
                assert done.exit_code == 0, done.output
                link = json.loads(done.stdout)["url"] if "--json" in words else done.stdout.strip()
                assert link.startswith(f"{url}/{FRAGMENT}") and len(link) <= 80
            first, again = [await asyncio.to_thread(page_link, url) for _ in range(2)]
            assert first != again
            said = Terminal()
            monkeypatch.setattr(sys, "stdout", said)
            await tell_page(url, Reporter(as_json=False))
            assert f"{url}/{FRAGMENT}" in said.getvalue() and "manyhands page" in said.getvalue()
            assert max(map(len, said.getvalue().splitlines())) <= 110
            for silent, as_json in ((io.StringIO(), False), (Terminal(), True)):
                monkeypatch.setattr(sys, "stdout", silent)
                await tell_page(url, Reporter(as_json=as_json))
                assert silent.getvalue() == ""
            monkeypatch.setenv("MANYHANDS_HOME", str(tmp_path / "other"))
            with pytest.raises(BadRequest, match="is not of this user"):
                await asyncio.to_thread(page_link, url)
            terminal = Terminal()
            monkeypatch.setattr(sys, "stdout", terminal)
            await tell_page(url, Reporter(as_json=False))
            assert terminal.getvalue() == ""

    asyncio.run(main())


def test_elsewhere_it_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MANYHANDS_HOME", str(tmp_path))
    for api in ("http://192.0.2.7:8000", "http://evil.example"):
        with pytest.raises(BadRequest, match="key add NAME --admin"):
            page_link(api)
    with pytest.raises(LinkClosed, match="start one"):
        page_link("http://127.0.0.1:9")


def test_a_gateway_of_every_address_is_opened_on_loopback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MANYHANDS_HOME", str(tmp_path))

    async def main() -> None:
        async with api_for({}, NodeAddr("0.0.0.0", 0), insecure=True) as url:
            link = await asyncio.to_thread(page_link, url)
            assert link.url.startswith("http://127.0.0.1:"), one_line(link.url)

    asyncio.run(main())
