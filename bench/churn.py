"""Does a swarm survive its members? Processes join, leave, are killed and rejoin at random while requests run.

Resident 0 founds the swarm, holds layers 0-5 and answers the API. The others hold the rest, each time other layers, and one is
ended only while another is left that holds layers 6-11: so every request can be answered, and every one must be, with the
text of an undisturbed one. In the end all views must be equal, and name no node that is gone.

Run: python -m bench.churn [--quick]        10 minutes and 8 processes, or 1 minute and 4
"""

import argparse
import asyncio
import random
import signal
import sys
import time
from dataclasses import dataclass, field
from typing import Any

from bench.colony import Colony, Resident, colony, complete
from bench.report import finish, note, spread
from manyhands.errors import ManyhandsError

PROMPTS = ["Once upon a time", "The old king", "In a dark wood there", "A fox said"]
TOKENS = 24
# What may be told to host: all hold layers 6-11, by one node or by the room of two.
ROLES = [("--layers", "6-11"), ("--layers", "3-11"), ("--layers", "0-11"), ("--layers", "6-11")]
PAUSE_S = (1.0, 5.0)
GONE_S = 20.0
EQUAL_S = 30.0


@dataclass
class Tally:
    """What happened."""

    ok: int = 0
    lost: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    kills: int = 0
    leaves: int = 0
    joins: int = 0
    join_s: list[float] = field(default_factory=list)
    gone_s: list[float] = field(default_factory=list)
    ghosts: list[str] = field(default_factory=list)
    is_equal: bool = False
    equal_s: float = 0.0


async def ask_for_ever(api: str, wanted: dict[str, str], tally: Tally, stop: asyncio.Event, number: int) -> None:
    turn = number
    while not stop.is_set():
        prompt = PROMPTS[turn % len(PROMPTS)]
        turn += 1
        try:
            text = await complete(api, prompt, TOKENS)
        except ManyhandsError as error:
            tally.lost.append(f"{error.code}: {error}")
            await asyncio.sleep(0.2)
        else:
            tally.ok += text == wanted[prompt]
            if text != wanted[prompt]:
                tally.wrong.append(f"{prompt}: {text!r}, not {wanted[prompt]!r}")


async def join(town: Colony, resident: Resident, rng: random.Random, tally: Tally) -> None:
    tally.join_s.append(await town.join(resident, *rng.choice(ROLES)))
    tally.joins += 1


async def end(resident: Resident, first: Resident, is_kill: bool, tally: Tally) -> None:
    """End a resident; note how long the first one still offers it."""
    node = (await resident.said("serving"))["node"]
    began = time.monotonic()
    resident.signal(signal.SIGKILL if is_kill else signal.SIGTERM)
    await resident.ended()
    tally.kills += is_kill
    tally.leaves += not is_kill
    while any(each["node"] == node for each in (await first.view())["nodes"]):
        if time.monotonic() - began > 3 * GONE_S:
            tally.ghosts.append(f"{resident.name} after {'a kill' if is_kill else 'leaving'}")
            return
        await asyncio.sleep(0.1)
    tally.gone_s.append(time.monotonic() - began)


async def disturb(town: Colony, rng: random.Random, seconds: float, tally: Tally) -> None:
    """Join and end members, one thing after the other, for so long. At least one of the others always serves."""
    first, others = town.residents[0], town.residents[1:]
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        running = [resident for resident in others if resident.is_alive]
        idle = [resident for resident in others if not resident.is_alive]
        if len(running) < 2 or (idle and rng.random() < 0.5):
            await join(town, rng.choice(idle), rng, tally)
        else:
            await end(rng.choice(running), first, rng.random() < 0.6, tally)
        await asyncio.sleep(rng.uniform(*PAUSE_S))


def shape_of(view: dict[str, Any]) -> set[tuple[str, str, str]]:
    """Who holds what, in a view."""
    return {(node["node"], span["layers"], span["state"]) for node in view["nodes"] for span in node["spans"]}


async def settle(town: Colony, tally: Tally) -> None:
    """Wait for all views to be equal, and to name exactly those who live."""
    alive = [resident for resident in town.residents if resident.is_alive]
    nodes = {(await resident.said("serving"))["node"] for resident in alive}
    began = time.monotonic()
    while not tally.is_equal and time.monotonic() - began < EQUAL_S:
        views = [await resident.view() for resident in alive]
        shapes = [shape_of(view) for view in views]
        tally.is_equal = all(s == shapes[0] for s in shapes) and {node for node, _, _ in shapes[0]} == nodes
        tally.equal_s = time.monotonic() - began
        await asyncio.sleep(0.2)
    if not tally.is_equal:
        tally.ghosts += sorted({node[:12] for shape in shapes for node, _, _ in shape if node not in nodes})


async def churn(processes: int, seconds: float, seed: int) -> Tally:
    """The whole story."""
    rng, tally = random.Random(seed), Tally()
    async with colony(forked=True) as town:
        first = town.resident("first")
        api = await town.found(first, "--layers", "0-5")
        others = [town.resident(f"n{i}") for i in range(1, processes)]
        await asyncio.gather(*(join(town, resident, rng, tally) for resident in others[:2]))
        while (await first.view())["missing"]:  # noqa: ASYNC110
            await asyncio.sleep(0.1)
        wanted = {prompt: await complete(api, prompt, TOKENS) for prompt in PROMPTS}
        stop = asyncio.Event()
        asking = [asyncio.create_task(ask_for_ever(api, wanted, tally, stop, i)) for i in range(2)]
        await disturb(town, rng, seconds, tally)
        stop.set()
        await asyncio.gather(*asking)
        await settle(town, tally)
    return tally


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    processes, seconds = (4, 60.0) if args.quick else (8, 600.0)
    tally = asyncio.run(churn(processes, seconds, args.seed))
    for line in [*tally.lost, *tally.wrong, *tally.ghosts]:
        note(line)
    figures = {
        "processes": processes,
        "seconds": seconds,
        "requests_answered": tally.ok,
        "requests_lost": len(tally.lost),
        "requests_wrong": len(tally.wrong),
        "joins": tally.joins,
        "leaves": tally.leaves,
        "kills": tally.kills,
        "join_s": spread(tally.join_s),
        "gone_s": spread(tally.gone_s) if tally.gone_s else None,
        "ghosts": len(tally.ghosts),
        "views_equal_after_s": round(tally.equal_s, 2) if tally.is_equal else None,
    }
    target = {"requests_lost": 0, "requests_wrong": 0, "ghosts": 0, "gone_s_max": GONE_S, "views_equal": True}
    holds = {
        "requests_lost": not tally.lost and tally.ok > 0,
        "requests_wrong": not tally.wrong,
        "ghosts": not tally.ghosts,
        "gone_s": max(tally.gone_s, default=0.0) <= GONE_S,
        "views_equal": tally.is_equal,
    }
    return finish("churn", figures, target, holds)


if __name__ == "__main__":
    sys.exit(main())
