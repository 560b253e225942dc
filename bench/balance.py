"""Does the balancer heal a lopsided swarm, and what do its rules buy? In virtual time: seconds of real time, no sockets.

Scenes: `ten_to_one` (10 hosts of layers 0-3, 1 of 4-7), `hole` (a third of the layers loses its only host), `random`
(40 nodes of 1 to 8 of 24 layers, speeds 1 to 4) and `stale` (ten_to_one with views two periods old). Each with all rules,
without hysteresis (no patience, no cool-down), without the claim (everybody may move at once), and by InferD's own rule
(policy load, no claim, no hysteresis: IN-R06 as it was). Loading a span takes two periods; sessions pile up at the
weakest layer.
Holds if with all rules every scene comes to rest, the weakest layer never gets slower, no layer is ever uncovered that was
not so at first, at most one node moves to a span in a period, and ten_to_one ends with at least 5 hosts on every layer.
Run: python -m bench.balance
"""

import random
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from bench.report import finish, note
from manyhands.config import BalanceConfig
from manyhands.core import SpanLoad
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


def main() -> int:
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


if __name__ == "__main__":
    sys.exit(main())
