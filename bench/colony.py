"""Processes that run `manyhands up` and `manyhands join`, each with a home of its own: what they said, and what they see.

Forked from bench.nursery they start in a fraction of a second; as processes of their own they also import everything.
"""

import asyncio
import contextlib
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from manyhands.cli.client import call

START_S = 120.0


@dataclass
class Resident:
    """One member: its home, and its process while it runs (0: none)."""

    name: str
    home: Path
    pid: int = 0
    process: asyncio.subprocess.Process | None = None
    starts: int = 0

    @property
    def output(self) -> Path:
        return self.home / f"said-{self.starts}.jsonl"

    def events(self) -> list[dict[str, Any]]:
        """What this start said so far, in whole lines. Raises RuntimeError if it ended with an error."""
        text = self.output.read_bytes() if self.output.exists() else b""
        lines = text[: text.rfind(b"\n") + 1].splitlines()  # it may be writing another one just now
        found = [json.loads(line) for line in lines if line.startswith(b"{")]
        for event in found:
            if event["event"] == "error":
                raise RuntimeError(f"{self.name}: {event['text']}")
        return found

    async def said(self, event: str, timeout_s: float = START_S) -> dict[str, Any]:
        """The first such event. Raises RuntimeError with its last lines if the process ends before."""
        async with asyncio.timeout(timeout_s):
            while True:
                is_alive = self.is_alive  # before we read: what it said last has been written
                if (found := next((e for e in self.events() if e["event"] == event), None)) is not None:
                    return found
                if not is_alive:
                    raise RuntimeError(f"{self.name} ended: {self.output.read_text()[-800:]}")
                await asyncio.sleep(0.02)

    @property
    def api(self) -> str:
        """Where this member serves its view; "" while it does not."""
        with contextlib.suppress(OSError, ValueError):
            return str(json.loads((self.home / "run" / f"{self.name}.json").read_bytes())["api"])
        return ""

    @property
    def is_alive(self) -> bool:
        if self.pid == 0:
            return False
        try:
            stat = Path(f"/proc/{self.pid}/stat").read_text()
        except (FileNotFoundError, ProcessLookupError):  # its parent has reaped it, before or while we read
            return False
        return stat.rpartition(")")[2].split()[0] not in "ZX"

    def signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    async def ended(self, timeout_s: float = 30.0) -> None:
        async with asyncio.timeout(timeout_s):
            while self.is_alive:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        self.pid = 0

    async def view(self) -> dict[str, Any]:
        """What this member sees of the swarm, once it serves its API."""
        await self.said("invitation")
        found: dict[str, Any] = await asyncio.to_thread(call, self.api, "", "GET", "/api/swarm")
        return found


class Colony:
    """Starts residents; ends them all when its block is left."""

    def __init__(self, base: Path, nursery: asyncio.subprocess.Process | None) -> None:
        self._base, self._nursery = base, nursery
        self._turn = asyncio.Lock()
        self.residents: list[Resident] = []
        self.ticket = ""

    def resident(self, name: str) -> Resident:
        home = self._base / name
        home.mkdir(parents=True)
        self.residents.append(Resident(name, home))
        return self.residents[-1]

    async def start(self, resident: Resident, command: str, *arguments: str) -> float:
        """Start `manyhands COMMAND ...` for it; returns when (monotonic seconds)."""
        resident.starts += 1
        fixed = ["--listen", "127.0.0.1:0", "--name", resident.name, "--threads", "1", "--json"]
        environment = {"MANYHANDS_HOME": str(resident.home), "MANYHANDS_TICKET": self.ticket}
        began = time.monotonic()
        line = [command, *arguments, *fixed]
        if self._nursery is None:
            with resident.output.open("wb") as output:
                resident.process = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-m", "manyhands.cli", *line, "--while-stdin"),
                    stdin=asyncio.subprocess.PIPE,  # whose end says that we are gone
                    stdout=output,
                    stderr=output,
                    env={**os.environ, **environment},
                )
            resident.pid = resident.process.pid
            return began
        request = {"arguments": line, "environment": environment, "output": str(resident.output)}
        assert self._nursery.stdin is not None and self._nursery.stdout is not None
        async with self._turn:
            self._nursery.stdin.write(json.dumps(request).encode() + b"\n")
            await self._nursery.stdin.drain()
            resident.pid = int(await self._nursery.stdout.readline())
        return began

    async def found(self, resident: Resident, *arguments: str, model: str = "tales") -> str:
        """Start the first one, `up MODEL`; returns the URL of its API. Its ticket is that of all from now on."""
        await self.start(resident, "up", model, "--api", "127.0.0.1:0", *arguments)
        url = (await resident.said("api"))["api"]
        self.ticket = (await resident.said("invitation"))["ticket"]
        return str(url)

    async def join(self, resident: Resident, *arguments: str) -> float:
        """Start another one and wait until it serves; returns the seconds that took."""
        began = await self.start(resident, "join", *arguments)
        await resident.said("serving")
        return time.monotonic() - began


@asynccontextmanager
async def colony(*, forked: bool) -> AsyncIterator[Colony]:
    """`forked`: from a process that has imported everything."""
    with tempfile.TemporaryDirectory(prefix="manyhands-colony-") as base:
        nursery = None
        if forked:
            nursery = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "bench.nursery"),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
            )
        here = Colony(Path(base), nursery)
        try:
            yield here
        finally:
            for resident in here.residents:
                if resident.pid:
                    resident.signal(signal.SIGKILL)
                if resident.process is not None:
                    await resident.process.wait()
            if nursery is not None and nursery.stdin is not None:
                nursery.stdin.close()
                await nursery.wait()


async def complete(api: str, prompt: str, max_tokens: int, model: str = "tales") -> str:
    """One greedy completion. Raises ManyhandsError for whatever is no answer."""
    body = {"model": model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
    answer = await asyncio.to_thread(call, api, "", "POST", "/v1/completions", body)
    return str(answer["choices"][0]["text"])
