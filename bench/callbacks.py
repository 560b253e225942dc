"""Does any single callback hold the gateway's event loop for more than 10 ms of CPU, under 200 streams at once?

`manyhands local tales --nodes 3 --api` as its own processes, on asyncio's own loop, each of whose callbacks is timed by the CPU
of the loop's thread: what others on the machine take does not count, runs of the garbage collector do. From its first answer
on: bursts of 200 streams, and meanwhile, again and again, a chat of 199 messages, a chat with a grammar, a long prompt,
/v1/models, /metrics and the jobs. bench.gateway counts how late the loop runs: on shared cores mostly others' time.
Run: python -m bench.callbacks [--bursts 4] [--tokens 64] [--quick]
"""

import argparse
import asyncio
import json
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from bench.gateway import STREAMS, Client, body_of, one_stream
from bench.report import finish, measuring
from manyhands.cli.options import run as run_loop
from tests.turns import Turns

TARGET_MS = 10.0
WAIT_S = 60.0  # for a process that may have died
CHAT = "/v1/chat/completions"
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name"],
}


def serve(file: Path) -> None:
    """Be the process that is measured: from SIGUSR1 on, and until the next one, which writes what was seen to `file`."""
    sys.modules["uvloop"] = None  # type: ignore[assignment]  # whose callbacks cannot be timed one by one
    turns, watched = Turns(), ExitStack()

    def begin(*_: object) -> None:
        signal.signal(signal.SIGUSR1, end)
        watched.enter_context(turns.watching())

    def end(*_: object) -> None:
        watched.close()
        part = file.with_suffix(".part")
        part.write_text(
            json.dumps({"count": turns.count, "longest_ms": 1e3 * turns.longest_s, "longest": turns.longest})
        )
        part.rename(file)

    signal.signal(signal.SIGUSR1, begin)
    from manyhands.cli import main as command

    sys.argv = ["manyhands", "local", "tales", "--nodes", "3", "--threads", "1", "--api", "127.0.0.1:0", "--json"]
    command()


@asynccontextmanager
async def serving(file: Path) -> AsyncIterator[tuple[str, asyncio.subprocess.Process]]:
    """Its address, and the process."""
    command = (sys.executable, "-m", "bench.callbacks", "--serve", str(file))
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    assert process.stdout is not None
    try:
        yield json.loads(await process.stdout.readline())["url"], process
    finally:
        process.terminate()
        await process.wait()


def others(tokens: int) -> list[tuple[str, str, dict[str, Any] | None]]:
    """What is asked beside the streams."""
    talk = [{"role": ("user", "assistant")[number % 2], "content": "and then?"} for number in range(199)]
    grammar = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}}
    asked = {"model": "tales", "max_tokens": tokens}
    return [
        ("POST", CHAT, {**asked, "messages": talk}),
        ("POST", CHAT, {**asked, "messages": talk[:1], "response_format": grammar}),
        ("POST", "/v1/completions", body_of("tales", tokens, prompt="once upon a time " * 200)),
        ("GET", "/v1/models", None),
        ("GET", "/metrics", None),
        ("GET", "/api/jobs", None),
    ]


async def ask_forever(url: str, what: tuple[str, str, dict[str, Any] | None], answers: dict[str, int]) -> None:
    """Again and again until cancelled, ten times a second at most. `answers`: how many of each path and status."""
    method, path, body = what
    async with Client(url) as client:
        while True:
            status, _ = await client.ask(method, path, body)
            answers[f"{path} {status}"] = answers.get(f"{path} {status}", 0) + 1
            await asyncio.sleep(0.1)


def wait_for(file: Path) -> str:
    """What it holds, once it is there: the signal is handled between two callbacks. Raises FileNotFoundError after WAIT_S."""
    until = time.monotonic() + WAIT_S
    while not file.exists() and time.monotonic() < until:
        time.sleep(0.1)
    return file.read_text()


async def measure(bursts: int, tokens: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        file, answers = Path(folder) / "told.json", dict[str, int]()
        async with serving(file) as (url, process):
            await one_stream(url, tokens)
            process.send_signal(signal.SIGUSR1)
            asking = [asyncio.create_task(ask_forever(url, what, answers)) for what in others(tokens)]
            streams = []
            for burst in range(bursts):
                with measuring(f"burst {burst}"):
                    streams += await asyncio.gather(*(one_stream(url, tokens) for _ in range(STREAMS)))
            for task in asking:
                task.cancel()
            ended = await asyncio.gather(*asking, return_exceptions=True)
            process.send_signal(signal.SIGUSR1)
            told = json.loads(await asyncio.to_thread(wait_for, file))
    errors = sum(not stream.is_whole for stream in streams)
    errors += sum(not isinstance(each, asyncio.CancelledError) for each in ended)
    return {
        "streams": len(streams),
        "errors": errors,
        "others": answers,
        **told,
        "longest_ms": round(told["longest_ms"], 2),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bursts", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve is not None:
        serve(options.serve)
        return 0
    figures = run_loop(measure(1 if options.quick else options.bursts, 16 if options.quick else options.tokens))
    holds = {
        "longest_ms": figures["longest_ms"] <= TARGET_MS,
        "errors": figures["errors"] == 0,
        "others": len(figures["others"]) == 5 and all(told.endswith(" 200") for told in figures["others"]),
    }
    return finish("callbacks", figures, {"longest_ms": TARGET_MS, "errors": 0}, holds)


if __name__ == "__main__":
    sys.exit(main())
