"""The page in headless Chromium, over `manyhands local`: dashboard/tests/page.mjs does the clicking (docs/page.md).

Needs node, Debian's chromium and `npm ci` in dashboard/ (`make dashboard` does it).
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

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


@pytest.mark.nightly
def test_each_panel_in_chromium(tmp_path: Path) -> None:
    """Chat with a kill in mid-answer, the other panels, keys, axe's findings, and no request to another host."""
    if (
        CHROMIUM is None
        or shutil.which("node") is None
        or not (ROOT / "dashboard/node_modules/playwright-core").is_dir()
    ):
        pytest.skip("NOT RUN: apt-get install chromium nodejs npm; make dashboard")
    with gateway(tmp_path / "home", "--nodes", "3", "--spares", "1") as told:
        (secret,) = (tmp_path / "home" / "run").glob("api-*.secret")
        asked = {"url": told["url"], "nodes": told["nodes"], "secret": secret.read_text(), "chromium": CHROMIUM}
        asked["shots"] = os.environ.get("MANYHANDS_SHOTS", "")
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
