"""Does a swarm of four nodes keep eight streams whole, and stay quick, while every attack we know runs against it at once?

Four processes serve tales, each half of its layers on two of them; one is the gateway. Eight honest clients stream
completions through its API, one request after the other, greedy and hot; one polls /health ten times a second. Beside
them bench.attackers runs every family of tests/hostile that works from outside a process: requests that are costly to
parse, tokenise or compile, requests of foreign web pages, slow and leaving clients, half-open TLS connections, a member
that floods steps, opens, records and control messages. Attackers share the two cores, at a lower priority: an attacker
elsewhere would bring cores of its own.
A first minute of attack is not measured: code that it touches for the first time and the allocator's arenas stay resident
(`start_mb_fds` to `before_mb_fds`), which is no growth that goes on. In it one client waits until its grammars are compiled:
nearly all attackers leave before, so that on a busy machine the first was compiled minutes later. Memory is read after 15 s
of honest streams and 150 s without any: what a node keeps for a while on purpose (parked sessions of an origin that is gone,
compiled grammars: 120 s) is then over. `mb_each_minute` is every node's memory under attack: of a leak it goes on rising to
the last minute.
Holds if no stream is lost or changed, /health p99 <= 100 ms, first token p99 <= 3 s, and memory and descriptors of every
node return within 5 % (at least 8 MB, 4 descriptors) of what they were before the minutes that are measured.

Run: python -m bench.siege [--minutes 10] [--quick]
"""

import argparse
import asyncio
import json
import os
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.attackers import COSTLY_GRAMMARS
from bench.colony import Colony, Resident, colony
from bench.report import finish, note, spread
from manyhands.cli.options import run as run_loop

STREAMS = 8
CALM_S = 15.0
REST_S = 150.0  # parked sessions of a lost origin and compiled grammars stay for 120 s, freed pages go back every 30 s
SAMPLE_S = 60.0
REHEARSAL_S = 60.0
HALVES = (("gateway", "0-5"), ("b", "6-11"), ("c", "0-5"), ("d", "6-11"))
TARGET = {"lost": 0, "changed": 0, "health_p99_ms": 100.0, "first_token_p99_s": 3.0, "growth": 0.05}
PROMPTS = [
    "Once upon a time",
    "The old king",
    "In a dark wood there",
    "A fox said",
    "The miller's daughter",
    "At night",
]


@dataclass(slots=True)
class Tally:
    """What honest clients saw. Times in seconds."""

    whole: int = 0
    changed: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    first_s: list[float] = field(default_factory=list)
    longest_pause_s: list[float] = field(default_factory=list)
    health_s: list[float] = field(default_factory=list)
    health_failed: int = 0


def body_of(number: int, tokens: int) -> dict[str, Any]:
    return {
        "model": "tales",
        "prompt": PROMPTS[number % len(PROMPTS)],
        "max_tokens": tokens,
        "temperature": 0.8 * (number % 2),
        "seed": number,
        "stream": True,
        "manyhands": {"ignore_eos": True},
    }


async def answer_of(api: str, method: str, path: str, body: dict[str, Any] | None = None) -> AsyncIterator[bytes]:
    """The lines of an answer's body. Raises ConnectionError if it does not begin with 200 or ends early."""
    host, port = api.removeprefix("http://").rsplit(":", 1)
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        data = b"" if body is None else json.dumps(body).encode()
        head = f"{method} {path} HTTP/1.1\r\nhost: {host}:{port}\r\ncontent-type: application/json\r\nconnection: close\r\n"
        writer.write(f"{head}content-length: {len(data)}\r\n\r\n".encode() + data)
        headers = await reader.readuntil(b"\r\n\r\n")
        if b" 200 " not in headers[:16]:
            raise ConnectionError(f"{headers[:16]!r} {(await reader.read(300))!r}")
        async for line in reader:
            yield line
    except asyncio.IncompleteReadError as error:
        raise ConnectionError("the connection ended before an answer") from error
    finally:
        writer.close()


async def stream(api: str, number: int, tokens: int, tally: Tally) -> str | None:
    """The text of one streamed completion, timed; None if it was lost, which is noted."""
    text, is_done = "", False
    began = last = time.perf_counter()
    pause_s = 0.0
    try:
        async for line in answer_of(api, "POST", "/v1/completions", body_of(number, tokens)):
            if line.startswith(b"data: [DONE]"):
                is_done = True
            elif line.startswith(b"data: "):
                event = json.loads(line[6:])
                if "error" in event:
                    raise ConnectionError(str(event["error"]))
                now = time.perf_counter()
                if not text:
                    tally.first_s.append(now - began)
                else:
                    pause_s = max(pause_s, now - last)
                last = now
                text += "".join(choice["text"] for choice in event["choices"])
        if not is_done:
            raise ConnectionError("the stream ended without its end mark")
    except (OSError, ValueError, KeyError) as error:
        tally.lost.append(f"{type(error).__name__}: {error}"[:300])
        return None
    tally.longest_pause_s.append(pause_s)
    return text


async def keep_asking(
    api: str, number: int, tokens: int, wanted: dict[int, str], tally: Tally, stop: asyncio.Event
) -> None:
    turn = number
    while not stop.is_set():
        request = turn % len(wanted)
        text = await stream(api, request, tokens, tally)
        turn += 1
        if text is None:
            await asyncio.sleep(0.2)
        elif text == wanted[request]:
            tally.whole += 1
        else:
            tally.changed.append(f"{request}: {text!r}"[:300])


async def poll_health(api: str, tally: Tally, stop: asyncio.Event) -> None:
    while not stop.is_set():
        began = time.perf_counter()
        try:
            async for _ in answer_of(api, "GET", "/health"):
                pass
            tally.health_s.append(time.perf_counter() - began)
        except OSError as error:
            tally.health_failed += 1
            note(f"/health: {error}")
        await asyncio.sleep(0.1)


async def serve_honest(api: str, tokens: int, wanted: dict[int, str], tally: Tally, until: asyncio.Event) -> None:
    """Eight clients and the poll of /health, until the event is set and their last answers have ended."""
    async with asyncio.TaskGroup() as group:
        for number in range(STREAMS):
            group.create_task(keep_asking(api, number, tokens, wanted, tally, until))
        group.create_task(poll_health(api, tally, until))


def usage(resident: Resident) -> tuple[float, int]:
    """(resident MB, open descriptors) of a process."""
    pages = int(Path(f"/proc/{resident.pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6, len(os.listdir(f"/proc/{resident.pid}/fd"))


async def calm(
    town: Colony, api: str, tokens: int, wanted: dict[int, str], rest_s: float
) -> dict[str, tuple[float, int]]:
    """What every process uses after CALM_S of honest streams alone and a rest."""
    stop, tally = asyncio.Event(), Tally()
    asyncio.get_running_loop().call_later(CALM_S, stop.set)
    await serve_honest(api, tokens, wanted, tally, stop)
    if tally.lost or tally.changed:
        note(f"in the calm: {tally.lost} {tally.changed}")
    await asyncio.sleep(rest_s)
    return {resident.name: usage(resident) for resident in town.residents}


async def attack(town: Colony, api: str, seconds: float) -> dict[str, Any]:
    """Run bench.attackers for so long; what it reports of each family."""
    addresses = [(await resident.said("serving"))["address"] for resident in town.residents]
    order = {"api": api, "ticket": town.ticket, "addresses": addresses, "seconds": seconds}
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "bench.attackers"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        preexec_fn=lambda: os.nice(10) and None,
    )
    out, _ = await process.communicate(json.dumps(order).encode())
    found: dict[str, Any] = json.loads(out.splitlines()[-1])
    return found


async def watch_memory(town: Colony, samples: dict[str, list[float]]) -> None:
    """Note every node's resident MB each SAMPLE_S, until cancelled."""
    while True:
        await asyncio.sleep(SAMPLE_S)
        for resident in town.residents:
            samples.setdefault(resident.name, []).append(round(usage(resident)[0], 1))


async def under_attack(
    town: Colony, api: str, tokens: int, wanted: dict[int, str], tally: Tally, seconds: float
) -> dict[str, Any]:
    """Honest clients and all attackers for so long; what the attackers tell."""
    stop = asyncio.Event()
    honest = asyncio.create_task(serve_honest(api, tokens, wanted, tally, stop))
    attacks = await attack(town, api, seconds)
    stop.set()
    await honest
    return attacks


async def rehearse(town: Colony, api: str, tokens: int, wanted: dict[int, str]) -> None:
    """A minute of attack, and each of the attackers' grammars from a client that waits for its answer or refusal."""
    rehearsal = asyncio.create_task(under_attack(town, api, tokens, wanted, Tally(), REHEARSAL_S))
    for request in COSTLY_GRAMMARS:
        try:
            async for _ in answer_of(api, "POST", "/v1/chat/completions", request):
                pass
        except OSError as error:
            note(f"a grammar: {error}"[:200])
    await rehearsal


async def siege(minutes: float, tokens: int) -> dict[str, Any]:
    tally = Tally()
    async with colony(forked=False) as town:
        api = ""
        for name, layers in HALVES:
            resident = town.resident(name)
            if api:
                await town.join(resident, "--layers", layers)
            else:
                api = await town.found(resident, "--layers", layers)
        while (await town.residents[0].view())["missing"]:  # noqa: ASYNC110
            await asyncio.sleep(0.1)
        wanted: dict[int, str] = {}
        for number in range(2 * len(PROMPTS)):
            text = await stream(api, number, tokens, Tally())
            assert text, "no undisturbed answer"
            wanted[number] = text
        start = await calm(town, api, tokens, wanted, 5.0)
        note(f"start: {start}")
        await rehearse(town, api, tokens, wanted)
        before = await calm(town, api, tokens, wanted, REST_S)
        note(f"before: {before}")
        mb_each_minute: dict[str, list[float]] = {}
        watch = asyncio.create_task(watch_memory(town, mb_each_minute))
        attacks = await under_attack(town, api, tokens, wanted, tally, minutes * 60)
        watch.cancel()
        after = await calm(town, api, tokens, wanted, REST_S)
        note(f"after: {after}")
    return {
        "minutes": minutes,
        "streams_at_once": STREAMS,
        "whole": tally.whole,
        "changed": len(tally.changed),
        "lost": len(tally.lost),
        "first_lost": tally.lost[:3],
        "first_token_s": quantiles(tally.first_s),
        "longest_pause_s": quantiles(tally.longest_pause_s),
        "health_ms": quantiles([1e3 * s for s in tally.health_s]),
        "health_failed": tally.health_failed,
        "attacks": attacks,
        "mb_each_minute": mb_each_minute,
        "start_mb_fds": start,
        "before_mb_fds": before,
        "after_mb_fds": after,
    }


def quantiles(samples: list[float]) -> dict[str, float]:
    """Median, p99, extremes and number of samples."""
    if not samples:
        return {"n": 0}
    return {**spread(samples, 3), "p99": round(sorted(samples)[int(0.99 * len(samples))], 3)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--quick", action="store_true", help="one minute")
    args = parser.parse_args()
    figures = run_loop(siege(1.0 if args.quick else args.minutes, 64))
    before, after = figures["before_mb_fds"], figures["after_mb_fds"]
    growth = TARGET["growth"]
    holds = {
        "lost": figures["lost"] == 0 and figures["whole"] > 0,
        "changed": figures["changed"] == 0,
        "health_p99_ms": not figures["health_failed"]
        and figures["health_ms"].get("p99", 1e9) <= TARGET["health_p99_ms"],
        "first_token_p99_s": figures["first_token_s"].get("p99", 1e9) <= TARGET["first_token_p99_s"],
        "memory_returns": all(after[n][0] <= before[n][0] + max(8.0, growth * before[n][0]) for n in before),
        "descriptors_return": all(after[n][1] <= before[n][1] + max(4, growth * before[n][1]) for n in before),
        "attacks_ran": all(count["attempts"] > 0 for count in figures["attacks"].values()),
    }
    return finish("siege", figures, TARGET, holds)


if __name__ == "__main__":
    sys.exit(main())
