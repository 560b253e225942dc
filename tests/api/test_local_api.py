"""`manyhands local --api` as a user has it: a process of its own, nodes that are processes, the official client."""

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI
from typer.testing import CliRunner

from manyhands.cli import app
from manyhands.cli.client import call, running_api
from manyhands.errors import BadRequest

NEW = 300  # tokens of an answer


@asynccontextmanager
async def local_api(folder: Path, home: Path) -> AsyncIterator[dict[str, Any]]:
    """What it said when the API was open; on leaving it is asked to stop, and must do so without complaint."""
    arguments = ["local", str(folder), "--nodes", "2", "--spares", "1", "--threads", "1"]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "manyhands.cli", *arguments, "--api", "127.0.0.1:0", "--json"),
        *("--job-file", str(home / "jobs.sqlite")),
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "MANYHANDS_HOME": str(home)},
    )
    assert process.stdout is not None
    try:
        async with asyncio.timeout(120):
            yield json.loads(await process.stdout.readline())
        process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(20):
            assert await process.wait() == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def text(
    client: AsyncOpenAI, model: str, at_sixth: Callable[[], Awaitable[None]] | None = None
) -> tuple[str, dict[str, Any]]:
    """A streamed answer and what the gateway says of it; `at_sixth` is called after six chunks."""
    said, last = "", None
    stream = await client.completions.create(
        model=model, prompt="Once", max_tokens=NEW, seed=7, stream=True, extra_body={"manyhands": {"ignore_eos": True}}
    )
    num_chunks = 0
    async for chunk in stream:
        said, last, num_chunks = said + chunk.choices[0].text, chunk, num_chunks + 1
        if at_sixth is not None and num_chunks == 6:
            await at_sixth()
    assert last is not None and last.choices[0].model_extra is not None
    return said, last.choices[0].model_extra["manyhands"]


async def text_with_a_death(client: AsyncOpenAI, told: dict[str, Any], index: int) -> tuple[str, dict[str, Any]]:
    """As `text`, of a request in the middle of which node `index` dies; asked again where it was over too soon for that."""
    pid, is_dead = told["nodes"][index]["pid"], False

    async def kill() -> None:
        nonlocal is_dead
        os.kill(pid, signal.SIGSTOP)  # no more tokens come while it is looked how many have
        jobs = (await asyncio.to_thread(call, told["url"], "", "GET", "/api/jobs"))["jobs"]
        is_dead = jobs[0]["status"] == "running" and jobs[0]["completion_tokens"] < NEW // 2
        os.kill(pid, signal.SIGKILL if is_dead else signal.SIGCONT)

    while True:
        found = await text(client, told["model"], kill)
        if is_dead:
            return found


@pytest.mark.slow
def test_a_stream_of_the_official_client_survives_the_death_of_a_node(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scene() -> None:
        async with local_api(folder, tmp_path) as told:
            assert told["event"] == "api" and [node["name"] for node in told["nodes"]] == [
                "node-0",
                "node-1",
                "spare-2",
            ]
            monkeypatch.setenv("MANYHANDS_HOME", str(tmp_path))
            assert running_api() == told["url"], "commands of this machine find it"
            view = await asyncio.to_thread(call, told["url"], "", "GET", "/api/swarm")
            (model,) = view["models"]
            assert (model["name"], model["missing"], len(view["nodes"])) == (told["model"], [], 3)
            client = AsyncOpenAI(base_url=told["url"] + "/v1", api_key="none", max_retries=0)
            async with client:
                calm, _ = await text(client, told["model"])
                shaken, ours = await text_with_a_death(client, told, 1)
            assert shaken == calm
            assert [repair["lost"] for repair in ours["repairs"]] == [["node-1"]]
        assert (tmp_path / "jobs.sqlite").exists()

    asyncio.run(scene())


@pytest.mark.parametrize(
    "arguments, says",
    [
        ([], "give either a prompt"),
        (["-p", "x", "--api", "127.0.0.1:0"], "give either a prompt"),
        (["--api", "0.0.0.0:0"], "lets other machines in without a key"),
        (["--api", "nonsense"], "not of the form host:port"),
        (["-p", "x", "--job-file", "jobs"], "--job-file is for the HTTP API"),
        (["-p", "x", "--insecure"], "--insecure is for the HTTP API"),
        (["--api", "127.0.0.1:0", "--kill", "0@3"], "goes with -p, not with --api"),
    ],
)
def test_options_that_make_no_sense_are_refused_before_anything_starts(
    arguments: list[str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MANYHANDS_HOME", str(tmp_path))
    result = CliRunner().invoke(app, ["local", "tales", *arguments])
    assert isinstance(result.exception, BadRequest) and says in str(result.exception)
