"""How long does a new user wait: for `manyhands demo` to end, and from `manyhands up tales` to a first token?

demo_s: from Enter to the end of the demo, on a machine that has its model (it is fetched before, and that is not counted).
first_token_s: from Enter to the first token of an answer of `up tales` in a new home, as a program gets it.
page_s: the same on the page, in a headless Chromium that is open before; needs `chromium`, `node` and `npm ci` in dashboard/,
and is left out where they are not.

Run: python -m bench.first_answer [--reps 3] [--model tales]      `--model`: of the demo; default: its own
"""

import argparse
import asyncio
import json
import shutil
import subprocess
import sys
import time
from http.client import HTTPConnection
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from bench.colony import colony
from bench.report import finish, machine, measuring, note, spread

DEMO_S, FIRST_TOKEN_S = 10.0, 5.0
DASHBOARD: Final = Path(__file__).parents[1] / "dashboard"
BROWSERS: Final = ("chromium", "chromium-browser", "google-chrome")
PROMPT: Final = "Once upon a time"


def demo_s(model: str) -> float:
    """Seconds of one demo. Raises CalledProcessError if its texts differ or it fails."""
    command = [sys.executable, "-m", "manyhands.cli", "demo", *(["--model", model] if model else [])]
    began = time.monotonic()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return time.monotonic() - began


def fetch(model: str) -> None:
    """Have the model of the demo on this machine."""
    subprocess.run([sys.executable, "-m", "manyhands.cli", "pull", model or "smollm2"], check=True)


async def first_token_s() -> float:
    """Seconds from the start of `up tales` to the first token of a stream."""
    async with colony(forked=False) as town:
        began = time.monotonic()
        api = await town.found(town.resident("first"))
        await asyncio.to_thread(_first_token, api)
        return time.monotonic() - began


def _first_token(api: str) -> None:
    connection = HTTPConnection(urlsplit(api).netloc, timeout=60)
    body = json.dumps({"model": "tales", "prompt": PROMPT, "max_tokens": 8, "stream": True})
    connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
    answer = connection.getresponse()
    while not answer.readline().startswith(b"data: {"):
        pass
    connection.close()


async def page_s(chromium: str) -> float:
    """Seconds from the start of `up tales` to the first token on its page."""
    pipe = asyncio.subprocess.PIPE
    watch = await asyncio.create_subprocess_exec(
        *("node", "tests/join.mjs", chromium), cwd=DASHBOARD, stdin=pipe, stdout=pipe
    )
    assert watch.stdin is not None and watch.stdout is not None
    try:
        if (await watch.stdout.readline()).strip() != b"ready":
            raise RuntimeError("the browser did not start")
        async with colony(forked=False) as town:
            began = 1e3 * time.time()
            api = await town.found(town.resident("first"))
            watch.stdin.write(json.dumps({"url": api, "began": began}).encode() + b"\n")
            word, _, seconds = (await watch.stdout.readline()).decode().partition(" ")
            if word != "token":
                raise RuntimeError("no token was seen")
            return float(seconds)
    finally:
        watch.terminate()
        await watch.wait()


def browser() -> str | None:
    """Where Chromium is, if the page can be tried in it."""
    has_modules = (DASHBOARD / "node_modules" / "playwright-core").is_dir() and shutil.which("node") is not None
    return next(filter(None, map(shutil.which, BROWSERS)), None) if has_modules else None


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--reps", type=int, default=3)
    parser.add_argument("--model", default="", help="of the demo")
    options = parser.parse_args()
    chromium = browser()
    note("no Chromium, or no node modules in dashboard/: the page is left out" if chromium is None else chromium)
    fetch(options.model)
    figures: dict[str, list[float]] = {"demo_s": [], "first_token_s": [], **({"page_s": []} if chromium else {})}
    for _ in range(options.reps):
        with measuring("demo"):
            figures["demo_s"].append(demo_s(options.model))
        with measuring("first token"):
            figures["first_token_s"].append(asyncio.run(first_token_s()))
        if chromium:
            with measuring("page"):
                figures["page_s"].append(asyncio.run(page_s(chromium)))
        note(", ".join(f"{name} {values[-1]:.2f}" for name, values in figures.items()))
    target = {"demo_s": DEMO_S, "first_token_s": FIRST_TOKEN_S, "page_s": FIRST_TOKEN_S}
    told = {name: spread(values) for name, values in figures.items()}
    holds = {name: found["median"] <= target[name] for name, found in told.items()}
    return finish("first_answer", {"machine": machine(), **told}, {name: target[name] for name in told}, holds)


if __name__ == "__main__":
    sys.exit(main())
