"""Does the balancer heal a lopsided swarm, and what do its rules buy? In virtual time: seconds of real time, no sockets.

Scenes: `ten_to_one` (10 hosts of layers 0-3, 1 of 4-7), `hole` (a third of the layers loses its only host), `random`
(40 nodes of 1 to 8 of 24 layers, speeds 1 to 4) and `stale` (ten_to_one with views two periods old). Each with all rules,
without hysteresis (no patience, no cool-down), without the claim (all may move at once), and by InferD's own rule
(policy load, no claim, no hysteresis: IN-R06 as it was). Loading a span takes two periods; sessions pile up at the
weakest layer.
Holds if with all rules every scene comes to rest, the weakest layer never gets slower, no layer is ever uncovered that was
not so at first, at most one node moves to a span in a period, and ten_to_one ends with at least 5 hosts on every layer.
`--live`: the same with processes, TLS on loopback and requests that run all the while. Members with room for the whole model
are ordered to the first half, the gateway's to the second, which no owner would do; then the balance has them. Holds if it
comes to rest with every layer held twice or more, sessions were handed over, every request was answered with the text of an
undisturbed one, and no two nodes moved at once though several wished to (bench/results/balance-live.json).
Run: python -m bench.balance [--live [--nodes 5]]
"""

import argparse
import asyncio
import os
import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any
from unittest.mock import patch

from bench.churn import PROMPTS, TOKENS, Tally, ask_for_ever
from bench.colony import Colony, Resident, colony, complete
from bench.report import finish, note
from manyhands.cli.client import call
from manyhands.config import BalanceConfig
from manyhands.core import NodeId, Span, SpanLoad
from manyhands.place import balance
from manyhands.place.strategy import Holding, coverage
from tests.place.simulate import Simulation, hosts

TARGET = {"periods_to_rest": 60, "moves_of_one_period_to_one_span": 1, "uncovered_periods": 0}
PERIODS = 120
TEN_TO_ONE = [*hosts("0-3", 10), *hosts("4-7", 1, first=10)]
SESSIONS = 1000


def ten_to_one(rules: BalanceConfig) -> Simulation:
    return Simulation(TEN_TO_ONE, 8, rules, sessions=SESSIONS).run(PERIODS)


def stale(rules: BalanceConfig) -> Simulation:
    return Simulation(TEN_TO_ONE, 8, rules, lag=2, sessions=SESSIONS).run(PERIODS)


def hole(rules: BalanceConfig) -> Simulation:
    lonely = hosts("8-11", 1, first=20)
    swarm = Simulation([*hosts("0-3", 4), *hosts("4-7", 4, first=10), *lonely], 12, rules, sessions=SESSIONS).run(1)
    swarm.lose(lonely)
    return swarm.run(PERIODS - 1)


def scattered(rules: BalanceConfig) -> Simulation:
    rng = random.Random(4)
    nodes: list[Holding] = [*hosts("0-11", 1, first=90), *hosts("12-23", 1, first=91)]
    for index in range(40):
        length = rng.randint(1, 8)
        start = rng.randint(0, 24 - length)
        (node,) = hosts(f"{start}-{start + length - 1}", 1, first=index)
        nodes.append(replace(node, load=SpanLoad(layer_s=0.01 * rng.randint(1, 4))))
    return Simulation(nodes, 24, rules, sessions=SESSIONS).run(PERIODS)


SCENES: dict[str, Callable[[BalanceConfig], Simulation]] = {
    "ten_to_one": ten_to_one, "hole": hole, "random": scattered, "stale": stale
}  # fmt: skip
HASTY = BalanceConfig(patience=1, cool_down_s=0.0)


def figures(swarm: Simulation) -> dict[str, Any]:
    """What happened. `crowd`: most nodes that moved to one span in one period."""
    crowds = [max((made.count(move) for move in made), default=0) for made in swarm.moves]
    counts = coverage([holding for holding in swarm.holdings if holding.is_ready], swarm.num_layers)
    return {
        "moves": swarm.num_moves,
        "periods_to_rest": swarm.settled,
        "crowd": max(crowds),
        "uncovered_periods": sum(cover == 0 for cover in swarm.cover),
        "weakest_x": round(swarm.weakest[-1] / swarm.weakest[0], 2),
        "worst_x": round(min(swarm.weakest) / swarm.weakest[0], 2),
        "least_hosts": min(counts),
    }


# -- live -------------------------------------------------------------------------------------------------------------

RULES = BalanceConfig(period_s=3.0, cool_down_s=15.0)  # so long all orders must have arrived before the balance acts
REST_S = RULES.cool_down_s + 3 * RULES.period_s  # without a move: all may have moved since
LIVE_S = 90.0
LAYERS = 12
POLL_S = 0.1
ASKING = 4


@dataclass
class Watch:
    """What one member saw: when a node was on the move to which span, and who held what at last."""

    began: float = field(default_factory=time.monotonic)
    moved_at: float = field(default_factory=time.monotonic)
    at_once: int = 0
    eager: int = 0  # most who would have moved before the first one did, had nothing but the gain counted
    holdings: list[Holding] = field(default_factory=list)

    def look(self, view: dict[str, Any]) -> None:
        self.holdings = holdings_in(view)
        movers = {holding.node for holding in self.holdings if not holding.is_ready}
        self.at_once = max(self.at_once, len(movers))
        if movers:
            self.moved_at = time.monotonic()
        if not self.at_once:
            self.eager = max(self.eager, eager(self.holdings))

    @property
    def rests(self) -> bool:
        return time.monotonic() - self.moved_at > REST_S

    @property
    def hosts(self) -> list[int]:
        return coverage([holding for holding in self.holdings if holding.is_ready], LAYERS)


def holdings_in(view: dict[str, Any]) -> list[Holding]:
    """What a member's view says of spans: what the balance of every node goes by."""
    return [
        Holding(
            NodeId(node["node"]),
            Span.parse(span["layers"]),
            SpanLoad(span["sessions"], span["queue"], (span["layer_ms"] or 0) / 1e3),
            is_ready=span["state"] != "loading",
        )
        for node in view["nodes"]
        for span in node["spans"]
    ]


def eager(holdings: list[Holding]) -> int:
    """How many would move if nothing but the gain counted."""
    return sum(balance.propose(holding, holdings, LAYERS, RULES) is not None for holding in holdings)


async def order(api: str, resident: Resident, layers: str) -> None:
    node = (await resident.said("serving"))["node"]
    body = {"to": layers, "force": True}
    told = await asyncio.to_thread(call, api, "", "POST", f"/api/workers/{node}/reassign", body)
    note(f"{resident.name}: {told['status']} {told['new_stage']}")


async def settle(first: Resident, length: int, nodes: int) -> list[int]:
    """Wait until each node serves one span of `length` layers; how many then serve each layer. Deadline: LIVE_S."""
    until, holdings = time.monotonic() + LIVE_S, list[Holding]()
    while time.monotonic() < until:
        holdings = holdings_in(await first.view())
        if len(holdings) == nodes and all(h.is_ready and len(h.span) == length for h in holdings):
            return coverage(holdings, LAYERS)
        await asyncio.sleep(POLL_S)
    raise RuntimeError(f"after {LIVE_S:g} s still not {nodes} spans of {length} layers: {holdings}")


async def heal(town: Colony, nodes: int, tally: Tally) -> dict[str, Any]:
    """The story: a whole model on each, all but one ordered to the first half, and what the balance makes of it."""
    first, *others = (town.resident(f"n{i}") for i in range(nodes))
    for resident in (first, *others):
        keys = {
            "period_s": RULES.period_s,
            "cool_down_s": RULES.cool_down_s,
            "patience": RULES.patience,
            "gain": RULES.gain,
        }
        lines = [f"{key} = {value}" for key, value in keys.items()]
        (resident.home / "manyhands.toml").write_text("\n".join(["[balance]", *lines]))
    api = await town.found(first)
    os.environ["MANYHANDS_HOME"] = str(first.home)  # where the secret of the gateway's owner is: orders need it
    await asyncio.gather(*(town.join(resident) for resident in others))
    await settle(first, LAYERS, nodes)
    wanted = {prompt: await complete(api, prompt, TOKENS) for prompt in PROMPTS}
    stop = asyncio.Event()
    asking = [asyncio.create_task(ask_for_ever(api, wanted, tally, stop, i)) for i in range(ASKING)]
    try:
        halves = ["6-11" if resident is first else "0-5" for resident in (first, *others)]
        await asyncio.gather(*(order(api, r, half) for r, half in zip((first, *others), halves, strict=True)))
        lopsided = await settle(first, LAYERS // 2, nodes)
        watch = Watch()
        while not watch.rests and time.monotonic() - watch.began < LIVE_S:
            watch.look(await first.view())
            await asyncio.sleep(POLL_S)
    finally:
        stop.set()
        await asyncio.gather(*asking)
    jobs = (await asyncio.to_thread(call, api, "", "GET", "/api/jobs?limit=500"))["jobs"]
    said = [(resident.name, event["text"]) for resident in (first, *others) for event in resident.events()]
    moves = [f"{name}: {text}" for name, text in said if text.startswith("moving") and "an operator" not in text]
    return {
        "nodes": nodes,
        "rules": {"period_s": RULES.period_s, "cool_down_s": RULES.cool_down_s, "patience": RULES.patience},
        "hosts_before": lopsided,
        "hosts_after": watch.hosts,
        "eager_before": watch.eager,
        "eager_after": eager(watch.holdings),
        "moves": moves,
        "moving_at_once": watch.at_once,
        "seconds_to_rest": round(watch.moved_at - watch.began, 1) if watch.rests else None,
        "requests_answered": tally.ok,
        "requests_lost": len(tally.lost),
        "requests_wrong": len(tally.wrong),
        "handed_over": sum(len(job["repairs"]) for job in jobs),
    }


async def live(nodes: int) -> int:
    tally = Tally()
    async with colony(forked=True) as town:
        out = await heal(town, nodes, tally)
    for line in [*tally.lost, *tally.wrong, *out["moves"]]:
        note(line)
    target = {"requests_lost": 0, "requests_wrong": 0, "moving_at_once": 1, "hosts_of_any_layer": 2}
    holds = {
        "requests_lost": not tally.lost and tally.ok > 0,
        "requests_wrong": not tally.wrong,
        "one_at_a_time": out["moving_at_once"] == 1 and out["eager_before"] > 1,
        "handed_over": out["handed_over"] > 0,
        "at_rest": out["seconds_to_rest"] is not None,
        "healed": min(out["hosts_before"]) == 1 and min(out["hosts_after"]) >= 2,
    }
    return finish("balance", out, target, holds)


def simulated() -> int:
    out: dict[str, Any] = {}
    for name, scene in SCENES.items():
        arms = {"all_rules": figures(scene(BalanceConfig())), "no_hysteresis": figures(scene(HASTY))}
        with patch.object(balance, "holds_claim", lambda *_: True):
            arms["no_claim"] = figures(scene(BalanceConfig()))
            arms["inferd"] = figures(scene(replace(HASTY, policy="load")))
        out[name] = arms
        for arm, row in arms.items():
            note(f"{name:11} {arm:14} {row}")
    ours = {name: arms["all_rules"] for name, arms in out.items()}
    holds = {
        "at_rest": all(row["periods_to_rest"] <= TARGET["periods_to_rest"] for row in ours.values()),
        "one_at_a_time": all(row["crowd"] <= 1 for name, row in ours.items() if name != "stale"),
        "covered": all(row["uncovered_periods"] == 0 for name, row in ours.items() if name != "hole"),
        "hole_closes": ours["hole"]["least_hosts"] >= 1 and ours["hole"]["uncovered_periods"] <= 3,
        "never_slower": all(row["worst_x"] >= 1 for name, row in ours.items() if name != "hole"),
        "healed": ours["ten_to_one"]["least_hosts"] >= 5,
    }
    return finish("balance", out, TARGET, holds)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--live", action="store_true")
    parser.add_argument("--nodes", type=int, default=5)
    args = parser.parse_args()
    return asyncio.run(live(args.nodes)) if args.live else simulated()


if __name__ == "__main__":
    sys.exit(main())
