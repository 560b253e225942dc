"""Does a swarm flap where machines are busy? Five members as processes, and beside them busy processes, so many per core.

Resident 0 founds the swarm, holds layers 0-5 and answers the API; two hold layers 6-11 and two all of them, so that every hop
has a replacement. Twice a second each is asked whom it sees (GET /api/swarm) while streams run, and one more joins in the
middle. No member is ended: one that a view loses is a flap, and each repair is without a death. The busy processes are started
and ended here; they end too if this process is killed.

Run: python -m bench.busy [--seconds 90] [--per-core 10]
"""

import argparse
import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

from bench.colony import Colony, Resident, colony, complete
from bench.report import finish, note
from manyhands.cli.client import call
from manyhands.errors import ManyhandsError

FIRST = ("--layers", "0-5")
OTHERS = (("--layers", "6-11"), ("--layers", "0-11"), ("--layers", "6-11"), ("--layers", "0-11"))
LATE = ("--layers", "3-11")
PROMPTS = ("Once upon a time", "Lily saw a", "The dog ran", "One day Tom")
TOKENS = 24
LOOK_S = 0.5
ANSWER_S = 120.0
READY_S = 120.0
# Ends with its stdin, so that none is left over.
BUSY = """import os, sys, threading
threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0)), daemon=True).start()
while True: pass"""


@dataclass
class Tally:
    """What went wrong, and how much there was of it. `reasons` are for people."""

    flaps: int = 0
    views: int = 0
    unseen: int = 0  # looks that a member did not answer
    slowest_s: float = 0.0  # the longest that a member took to answer a look
    streams: int = 0
    lost: int = 0
    changed: int = 0
    repairs: int = 0
    failed_joins: int = 0
    joins_s: list[float] = field(default_factory=list)
    repaired: list[str] = field(default_factory=list)  # what for
    reasons: list[str] = field(default_factory=list)


@contextmanager
def busy_processes(count: int) -> Iterator[None]:
    """So many processes that compute for ever. They end with the block, and with this process: their stdin is a pipe of it."""
    started = [subprocess.Popen([sys.executable, "-c", BUSY], stdin=subprocess.PIPE) for _ in range(count)]
    try:
        yield
    finally:
        for process in started:
            process.kill()
        for process in started:
            process.wait()


def names_of(view: dict[str, Any]) -> set[str]:
    """The members that a view holds present."""
    return {str(node["name"]) for node in view["nodes"]}


async def watch(resident: Resident, here: Colony, tally: Tally) -> None:
    """Look at one member's view for ever: a member that was in it, is alive, and is not in it any more is a flap."""
    seen: set[str] = set()
    while True:
        asked = time.monotonic()
        try:
            view = names_of(await asyncio.to_thread(call, resident.api, "", "GET", "/api/swarm"))
        except ManyhandsError:
            tally.unseen += 1
        else:
            tally.views += 1
            tally.slowest_s = max(tally.slowest_s, round(time.monotonic() - asked, 2))
            alive = {each.name for each in here.residents if each.is_alive}
            for name in sorted((seen - view) & alive):
                tally.flaps += 1
                tally.reasons.append(f"{resident.name} lost {name}")
            seen = view
        await asyncio.sleep(LOOK_S)


async def stream(url: str, wanted: dict[str, str], first: int, tally: Tally) -> None:
    """Ask one prompt after the other for ever."""
    turn = first
    while True:
        prompt = PROMPTS[turn % len(PROMPTS)]
        turn += 1
        try:
            async with asyncio.timeout(ANSWER_S):
                text = await complete(url, prompt, TOKENS)
        except (ManyhandsError, TimeoutError) as error:
            tally.lost += 1
            tally.reasons.append(f"stream: {error or 'no answer'}")
        else:
            tally.changed += text != wanted[prompt]
        tally.streams += 1


async def join(here: Colony, resident: Resident, layers: tuple[str, str], tally: Tally) -> None:
    try:
        tally.joins_s.append(round(await here.join(resident, *layers), 1))
    except (RuntimeError, TimeoutError) as error:
        tally.failed_joins += 1
        tally.reasons.append(f"{resident.name} did not join: {str(error)[-200:] or 'no answer'}")


async def repairs(url: str) -> list[str]:
    """What each repair of a request of that gateway was for, so far."""
    jobs = (await asyncio.to_thread(call, url, "", "GET", "/api/jobs?limit=1000"))["jobs"]
    found = [repair for job in jobs for repair in job["repairs"]]
    return [f"{each['lost']} to {each['replacement']}: {each['reason']}" for each in found]


async def begin(here: Colony, tally: Tally) -> str:
    """The swarm as it stands before anything is busy; returns the URL of its gateway."""
    first = here.resident("n0")
    url = await here.found(first, *FIRST)
    await asyncio.gather(*(join(here, here.resident(f"n{i}"), cut, tally) for i, cut in enumerate(OTHERS, 1)))
    names = {resident.name for resident in here.residents}
    async with asyncio.timeout(READY_S):
        for each in here.residents:
            while names_of(await each.view()) != names:  # noqa: ASYNC110
                await asyncio.sleep(LOOK_S)
    return url


async def measure(seconds: float, per_core: int) -> Tally:
    """The whole story."""
    tally = Tally()
    async with colony(forked=True) as here:
        url = await begin(here, tally)
        wanted = {prompt: await complete(url, prompt, TOKENS) for prompt in PROMPTS}
        began = time.monotonic()
        with busy_processes(per_core * (os.cpu_count() or 1)):
            note(f"{per_core} busy processes per core beside {len(here.residents)} members")
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(watch(each, here, tally)) for each in list(here.residents)]
                tasks += [group.create_task(stream(url, wanted, first, tally)) for first in range(2)]
                await asyncio.sleep(seconds / 3)
                await join(here, here.resident("late"), LATE, tally)
                await asyncio.sleep(max(0.0, began + seconds - time.monotonic()))
                for task in tasks:
                    task.cancel()
            tally.repaired = await repairs(url)
            tally.repairs = len(tally.repaired)
    return tally


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=90.0)
    parser.add_argument("--per-core", type=int, default=10)
    options = parser.parse_args()
    tally = asyncio.run(measure(options.seconds, options.per_core))
    for reason in tally.reasons[:20]:
        note(reason)
    figures = {name: value for name, value in asdict(tally).items() if name != "reasons"}
    target = {"flaps": 0, "repairs": 0, "lost": 0, "changed": 0, "failed_joins": 0}
    holds = {name: figures[name] <= most for name, most in target.items()} | {"streams": tally.streams > 0}
    figures |= {"members": 1 + len(OTHERS), "per_core": options.per_core, "seconds": options.seconds}
    return finish("busy", figures, target, holds)


if __name__ == "__main__":
    sys.exit(main())
