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
        ran = subprocess.run(
            ["node", "tests/page.mjs"],
            cwd=ROOT / "dashboard",
            input=json.dumps(asked),
            capture_output=True,
            text=True,
            timeout=400,
        )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "every check passed" in ran.stdout


@pytest.mark.nightly
def test_a_first_answer_and_who_comes_and_goes(chromium: str) -> None:
    """From `up tales` to a token on the page; then a node joins and leaves, and both are seen there."""

    async def scene(town: Colony) -> None:
        began = 1e3 * time.time()
        api = await town.found(town.resident("first"))
        second = town.resident("second")
        watch = await asyncio.create_subprocess_exec(
            *("node", "tests/join.mjs"), cwd=ROOT / "dashboard", stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert watch.stdin is not None and watch.stdout is not None

        async def told() -> str:
            async with asyncio.timeout(120):
                return (await watch.stdout.readline()).decode().strip()  # type: ignore[union-attr]

        async def seen(happened: str) -> None:
            watch.stdin.write(f"{happened} second\n".encode())  # type: ignore[union-attr]
            assert await told() == f"seen {happened}"

        try:
            watch.stdin.write(json.dumps({"url": api, "chromium": chromium, "began": began}).encode() + b"\n")
            first_token = await told()
            assert first_token.startswith("token ") and await told() == "watching"
            print(f"up tales to a first token in the browser: {first_token.split()[1]} s")  # noqa: T201 - a figure
            await town.join(second)
            await seen("joined")
            second.signal(signal.SIGTERM)
            await second.ended()
            await seen("left")
            watch.stdin.close()
            assert await told() == "every check passed"
        finally:
            if watch.returncode is None:
                watch.terminate()
            await watch.wait()

    async def main() -> None:
        async with colony(forked=False) as town:
            await scene(town)

    asyncio.run(main())
