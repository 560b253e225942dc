"""The page in headless Chromium, over `manyhands local`: dashboard/tests/page.mjs does the clicking (docs/page.md).

Needs node, Debian's chromium and `npm ci` in dashboard/ (`make dashboard` does it).
"""

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from bench.colony import Colony, colony
from tests.cable import Machine, cable, has

__all__ = ["cable"]

ROOT = Path(__file__).parent.parent
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@contextmanager
def gateway(home: Path, *options: str) -> Iterator[dict[str, Any]]:
    """`manyhands local tales` with its API; what it says when it is open."""
    command = [sys.executable, "-m", "manyhands.cli", "local", "tales", "--api", "127.0.0.1:0", "--json", *options]
    environment = {**os.environ, "MANYHANDS_HOME": str(home)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        try:
            assert process.stdout is not None
            yield json.loads(process.stdout.readline())
        finally:
            process.terminate()


@pytest.fixture
def chromium() -> str:
    """Where the browser is."""
    has_modules = (ROOT / "dashboard/node_modules/playwright-core").is_dir()
    if CHROMIUM is None or shutil.which("node") is None or not has_modules:
        pytest.skip("NOT RUN: apt-get install chromium nodejs npm; make dashboard")
    return CHROMIUM


@pytest.mark.nightly
def test_each_panel_in_chromium(tmp_path: Path, chromium: str) -> None:
    """Chat with a kill in mid-answer, the other panels, keys, axe's findings, and no request to another host."""
    with gateway(tmp_path / "home", "--nodes", "3", "--spares", "1") as told:
        (secret,) = (tmp_path / "home" / "run").glob("api-*.secret")
        asked = {"url": told["url"], "nodes": told["nodes"], "secret": secret.read_text(), "chromium": chromium}
        asked["shots"] = os.environ.get("MANYHANDS_SHOTS", "")
        asked["interactive_ms"] = float(os.environ.get("MANYHANDS_INTERACTIVE_MS", "10000"))  # 1000 on a quiet machine
        asked["longest_ms"] = float(os.environ.get("MANYHANDS_LONGEST_MS", "10000"))  # 1000 on a quiet machine
        asked["only"] = os.environ.get("MANYHANDS_PAGE_CHECKS", "")
        ran = subprocess.run(
            ["node", "tests/page.mjs"],
            cwd=ROOT / "dashboard",
            input=json.dumps(asked),
            capture_output=True,
            text=True,
            timeout=400,
        )
    print(ran.stdout)  # noqa: T201 - what was checked, and when the page took input
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "every check passed" in ran.stdout


@pytest.mark.nightly
def test_a_first_answer_and_who_comes_and_goes(chromium: str) -> None:
    """From `up tales` to a token on the page; then a node joins and leaves, and both are seen there."""

    async def scene(town: Colony, watch: asyncio.subprocess.Process) -> None:
        assert watch.stdin is not None and watch.stdout is not None

        async def told() -> str:
            async with asyncio.timeout(120):
                return (await watch.stdout.readline()).decode().strip()  # type: ignore[union-attr]

        async def seen(happened: str, name: str = "second") -> None:
            watch.stdin.write(f"{happened} {name}\n".encode())  # type: ignore[union-attr]
            assert await told() == f"seen {happened}"

        assert await told() == "ready"
        first, second = town.resident("first"), town.resident("second")
        began = 1e3 * time.time()
        api = await town.found(first)
        (secret,) = (first.home / "run").glob("api-*.secret")
        facts = {"url": api, "began": began, "secret": secret.read_text()}
        watch.stdin.write(json.dumps(facts).encode() + b"\n")
        first_token = await told()
        assert first_token.startswith("token ") and await told() == "watching"
        print(f"up tales to a first token in the browser: {first_token.split()[1]} s")  # noqa: T201 - a figure
        await town.join(second)
        await seen("joined")
        second.signal(signal.SIGTERM)
        await second.ended()
        await seen("left")
        third = town.resident("third")
        await town.join(third)
        await seen("joined", "third")
        third.signal(signal.SIGKILL)
        await seen("lost", "third")
        watch.stdin.close()
        assert await told() == "every check passed"

    async def main() -> None:
        watch = await asyncio.create_subprocess_exec(
            *("node", "tests/join.mjs", chromium),
            cwd=ROOT / "dashboard",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        try:
            async with colony(forked=False) as town:
                await scene(town, watch)
        finally:
            if watch.returncode is None:
                watch.terminate()
            await watch.wait()

    asyncio.run(main())


@pytest.mark.nightly
def test_a_machine_joins_by_the_code_that_the_page_shows(cable: None, chromium: str, tmp_path: Path) -> None:
    """The owner signs in, has a code shown, another machine joins with it, and the page says so; then the ticket's QR code."""
    desk, nas = Machine(tmp_path / "desk"), Machine(tmp_path / "nas")
    watch: subprocess.Popen[str] | None = None
    try:
        desk.start("up", "tales", "--api", "127.0.0.1:0")
        (opened,) = [event for event in desk.until(has("invitation")) if event["event"] == "api"]
        (secret,) = (desk.home / "run").glob("api-*.secret")
        watch = subprocess.Popen(
            desk.within("node", "tests/invite.mjs"),
            cwd=ROOT / "dashboard",
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert watch.stdin is not None and watch.stdout is not None
        facts = {"url": opened["api"], "chromium": chromium, "secret": secret.read_text()}
        facts["shots"] = os.environ.get("MANYHANDS_SHOTS", "")
        print(json.dumps(facts), file=watch.stdin, flush=True)
        word, _, code = watch.stdout.readline().strip().partition(" ")
        assert word == "code"
        nas.start("join", "--code", code)
        nas.until(has("serving"))
        print("joined nas", file=watch.stdin, flush=True)
        assert watch.stdout.readline().strip() == "every check passed"
    finally:
        if watch is not None:
            watch.kill()
            watch.communicate()
        nas.end()
        desk.end()
