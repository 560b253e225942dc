"""What does the gateway cost, and does it bear 200 streams at once?

Overhead: an origin whose tokens are there at once, so that nothing but the ways to them takes time, asked through its own
loop and through HTTP on loopback in the same process, arms interleaved; the difference of a pair is the gateway's, its
client's share included. Per request: one token, not streamed. Per streamed token: 256 tokens against one, both ways. In CPU
time of the process, which others on the machine do not change, and in wall time.
Load: `manyhands local tales --nodes 3 --api` as its own processes, bursts of 200 concurrent streams. All must complete; the
API's own share of a request is what the client waited less what the job says it waited and ran; resident memory after the
first burst and after the last one. /v1/models is asked while nothing else runs. `stalls`: what held the gateway's event loop.
Run: python -m bench.gateway [--quick]
"""

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from bench.report import finish, measuring, note, spread
from manyhands.cli.gateway import api_for
from manyhands.cli.options import run as run_loop
from manyhands.core import NodeAddr, SamplingParams
from manyhands.origin import Answer, Origin, Token
from manyhands.origin.session import Session
from manyhands.testing.swarm import memory_swarm
from manyhands.testing.tiny import make_tiny
from manyhands.wire.timings import HopTiming

TARGET = {"request_ms": 1.0, "token_us": 50.0, "models_ms": 5.0, "errors": 0, "memory_growth": 0.05}
STREAMS = 200
NEW = 256
PROMPT = "Once upon a time"
EXACT = {"temperature": 0, "manyhands": {"ignore_eos": True}}


class Client:
    """HTTP on one connection that stays open; costs as little as it can."""

    def __init__(self, url: str) -> None:
        self._host, port = url.removeprefix("http://").rsplit(":", 1)
        self._port = int(port)

    async def __aenter__(self) -> "Client":
        self._reader, self._writer = await asyncio.open_connection(self._host, self._port, limit=1 << 20)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._writer.close()

    async def ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> tuple[int, bytes]:
        """Status and body of an answer, streamed or not."""
        data = b"" if body is None else json.dumps(body).encode()
        head = f"{method} {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        head += f"content-length: {len(data)}\r\n\r\n"
        self._writer.write(head.encode() + data)
        headers = (await self._reader.readuntil(b"\r\n\r\n")).lower()
        status = int(headers.split(b" ", 2)[1])
        if b"transfer-encoding: chunked" in headers:
            return status, await self._chunks()
        length = int(headers.split(b"content-length: ")[1].split(b"\r\n")[0])
        return status, await self._reader.readexactly(length)

    async def _chunks(self) -> bytes:
        parts = []
        while size := int(await self._reader.readuntil(b"\r\n"), 16):
            parts.append(await self._reader.readexactly(size + 2))
        await self._reader.readexactly(2)
        return b"".join(part[:-2] for part in parts)


def body_of(model: str, tokens: int, **fields: Any) -> dict[str, Any]:
    return {"model": model, "prompt": PROMPT, "max_tokens": tokens, **EXACT, **fields}


# -- overhead ---------------------------------------------------------------------------------------------------------


async def at_once(session: Session, answer: Answer, **_: Any) -> AsyncGenerator[Token, None]:
    """Takes the place of Origin.stream: as if `session`, which has ended, had its tokens already."""
    answer.session, answer.timings.open_s = session, 0.0
    for index in range(answer.params.max_tokens):
        await asyncio.sleep(0)
        answer.timings.last_at = time.monotonic()
        session.returns.timings = tuple([HopTiming(0, 1000) for _ in session.route.hops])
        answer.token_ids.append(97)
        if index == answer.params.max_tokens - 1:
            answer.finish_reason = "length"
        yield Token(97, "a", None, None)


async def direct(origin: Origin, tokens: int) -> None:
    answer = await origin.complete(origin.request(PROMPT, SamplingParams(max_tokens=tokens, ignore_eos=True)))
    assert len(answer.token_ids) == tokens


async def over_http(client: Client, tokens: int, *, stream: bool) -> None:
    status, said = await client.ask("POST", "/v1/completions", body_of("toy", tokens, stream=stream))
    assert status == 200, said


async def overhead(reps: int) -> list[dict[str, tuple[float, float]]]:
    """CPU and wall seconds of every arm, rep by rep."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = make_tiny("qwen3", Path(scratch) / "toy", layers=3)
        async with (
            memory_swarm(folder, "0,1,2") as swarm,
            api_for({"toy": swarm.origin}, NodeAddr("127.0.0.1", 0)) as url,
        ):
            real = await swarm.origin.complete(swarm.origin.request(PROMPT, SamplingParams(max_tokens=1)))
            assert real.session is not None
            swarm.origin.stream = partial(at_once, real.session)  # type: ignore[method-assign]
            async with Client(url) as client:
                arms: dict[str, Callable[[], Awaitable[None]]] = {
                    "direct 1": lambda: direct(swarm.origin, 1),
                    "http 1": lambda: over_http(client, 1, stream=False),
                    "direct": lambda: direct(swarm.origin, NEW),
                    "http 1 streamed": lambda: over_http(client, 1, stream=True),
                    "http": lambda: over_http(client, NEW, stream=True),
                }
                seen = [{arm: await timed(run) for arm, run in arms.items()} for _ in range(reps)]
    return seen[reps // 10 :]


async def timed(run: Callable[[], Awaitable[None]]) -> tuple[float, float]:
    cpu, wall = time.process_time(), time.perf_counter()
    await run()
    return time.process_time() - cpu, time.perf_counter() - wall


def overhead_figures(seen: list[dict[str, tuple[float, float]]]) -> dict[str, Any]:
    figures: dict[str, Any] = {}
    for clock, suffix in enumerate(("", "_wall")):
        reps = [{arm: times[clock] for arm, times in rep.items()} for rep in seen]
        request_ms = [1e3 * (rep["http 1"] - rep["direct 1"]) for rep in reps]
        http_s = [rep["http"] - rep["http 1 streamed"] for rep in reps]
        token_us = [
            1e6 * (s - (rep["direct"] - rep["direct 1"])) / (NEW - 1) for s, rep in zip(http_s, reps, strict=True)
        ]
        figures |= {f"request_ms{suffix}": spread(request_ms, 3), f"token_us{suffix}": spread(token_us, 1)}
    return figures


# -- load -------------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Stream:
    """One stream of a burst: what the client waited, and what the job says of itself (ms)."""

    is_whole: bool
    total_ms: float = 0.0
    own_ms: float = 0.0


@asynccontextmanager
async def local_api() -> AsyncIterator[dict[str, Any]]:
    command = (sys.executable, "-m", "manyhands.cli", "local", "tales", "--nodes", "3", "--threads", "1")
    process = await asyncio.create_subprocess_exec(
        *command, "--api", "127.0.0.1:0", "--json", stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    try:
        told = json.loads(await process.stdout.readline())
        yield {**told, "pids": [process.pid, *(node["pid"] for node in told["nodes"])]}
    finally:
        process.terminate()
        await process.wait()


async def one_stream(url: str, tokens: int) -> Stream:
    began = time.perf_counter()
    async with Client(url) as client:
        status, said = await client.ask("POST", "/v1/completions", body_of("tales", tokens, stream=True))
    total_ms = 1e3 * (time.perf_counter() - began)
    events = [line[6:] for line in said.splitlines() if line.startswith(b"data: ")]
    if status != 200 or not events or events[-1] != b"[DONE]":
        note(f"{status} {said[-300:]!r}")
        return Stream(False)
    last = json.loads(events[-2])["choices"][0]
    ours = last["manyhands"]["timings"]
    return Stream(last["finish_reason"] == "length", total_ms, total_ms - ours["queue_ms"] - ours["total_ms"])


def memory_mb(pids: list[int]) -> float:
    """Resident memory of the processes together."""
    pages = [int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in pids]
    return sum(pages) * os.sysconf("SC_PAGE_SIZE") / 1e6


def stalls_of(metrics: str) -> dict[str, float]:
    """How often and for how long the gateway's loop was held (api/http/watchdog.py)."""
    name = "manyhands_loop_stall_seconds"
    told = dict(line.rsplit(" ", 1) for line in metrics.splitlines() if line.startswith(name))
    count = float(told[f"{name}_count"])
    return {
        "over_10_ms": count,
        "over_100_ms": count - float(told[f'{name}_bucket{{le="0.1"}}']),
        "seconds": round(float(told[f"{name}_sum"]), 3),
    }


async def load(bursts: int, tokens: int) -> dict[str, Any]:
    async with local_api() as told:
        url, pids = told["url"], told["pids"]
        async with Client(url) as client:
            await one_stream(url, tokens)
            models_ms = []
            for _ in range(100):
                began = time.perf_counter()
                status, _ = await client.ask("GET", "/v1/models")
                assert status == 200
                models_ms.append(1e3 * (time.perf_counter() - began))
        streams: list[Stream] = []
        memory, seconds = [], []
        for burst in range(bursts):
            with measuring(f"burst {burst}"):
                began = time.perf_counter()
                streams += await asyncio.gather(*(one_stream(url, tokens) for _ in range(STREAMS)))
                seconds.append(time.perf_counter() - began)
            await asyncio.sleep(1)
            memory.append(memory_mb(pids))
            note(f"{seconds[-1]:.1f} s, {memory[-1]:.0f} MB")
        async with Client(url) as client:
            _, told_metrics = await client.ask("GET", "/metrics")
    own_ms = sorted(stream.own_ms for stream in streams if stream.is_whole)
    return {
        "streams": len(streams),
        "errors": sum(not stream.is_whole for stream in streams),
        "tokens_per_s": spread([STREAMS * tokens / s for s in seconds], 1),
        "own_ms_p50": round(statistics.median(own_ms), 2),
        "own_ms_p99": round(own_ms[int(0.99 * len(own_ms))], 2),
        "models_ms": spread(models_ms, 2),
        "memory_mb": [round(mb) for mb in memory],
        "memory_growth": round(memory[-1] / memory[0] - 1, 4),
        "stalls": stalls_of(told_metrics.decode()),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true")
    quick = parser.parse_args().quick
    with measuring("overhead"):
        figures = overhead_figures(run_loop(overhead(50 if quick else 300)))
    note(json.dumps(figures))
    figures |= run_loop(load(2 if quick else 4, 8 if quick else 16))
    holds = {
        "request_ms": figures["request_ms"]["median"] <= TARGET["request_ms"],
        "token_us": figures["token_us"]["median"] <= TARGET["token_us"],
        "models_ms": figures["models_ms"]["median"] <= TARGET["models_ms"],
        "errors": figures["errors"] == TARGET["errors"],
        "memory_growth": figures["memory_growth"] <= TARGET["memory_growth"],
    }
    return finish("gateway", figures, TARGET, holds)


if __name__ == "__main__":
    sys.exit(main())
