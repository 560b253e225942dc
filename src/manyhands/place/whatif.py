"""What more machines would change: the plans with and without them, for people and as JSON. Pure; and a process of its own.

    python -m manyhands.place.whatif      a pickled WhatIf on stdin, JSON on stdout

A gateway asks in a process, since a search takes up to a second of Python (plan.py: EXACT), which its event loop cannot spare.
"""

import json
import os
import pickle
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from manyhands.errors import BadRequest
from manyhands.place.living import better_origin
from manyhands.place.machines import Machine
from manyhands.place.plan import PlacementPlan, Plans, Task, advice, find_plans, place
from manyhands.place.strategy import Strategy
from manyhands.plain import figure_of

DEADLINE_S: Final = 10  # of CPU time
NICENESS: Final = 5


@dataclass(frozen=True, slots=True)
class WhatIf:
    """A task as things stand, and machines that there are not."""

    task: Task
    added: tuple[Machine, ...] = ()
    strategy: Strategy = "measured"

    @property
    def wider(self) -> Task:
        return replace(self.task, fleet=self.task.fleet.with_machines(self.added))


def compare(question: WhatIf) -> dict[str, Any]:
    """Both plans and what to make of them; times in ms. Raises BadRequest for machines that cannot be."""
    wider = question.wider
    before = find_plans(question.task)
    if question.strategy != "measured":
        after = Plans((place(wider, question.strategy),), before.alone, None)
    else:
        after = find_plans(wider) if question.added else before
    names = {machine.name for machine in question.added}
    said = [advice(after)]
    if names:
        said.append(what_if(before, after, names))
    elif after.ranked and (better := better_origin(wider, after.best)) is not None:
        said.append(
            f"requests that begin at {better[0]} would get {figure_of(better[1])} tokens/s: send them to its API"
        )
    return {
        "layers": wider.shape.num_layers,
        "precision": wider.shape.precision,
        "tokens": wider.tokens,
        "machines": [_machine(machine, wider, is_new=machine.name in names) for machine in wider.fleet.machines],
        "before": _plan(before),
        "after": _plan(after),
        "missing": after.missing and {"layers": str(after.missing.span), "needs_bytes": after.missing.needs_bytes},
        "advice": said,
    }


def what_if(before: Plans, after: Plans, names: set[str]) -> str:
    """What machines that are added change, in one sentence."""
    who = " and ".join(sorted(names))
    if not after.ranked:
        return f"{who} would not be enough"
    if not before.ranked:
        return f"{who} would make it possible"
    was, now = before.best.tokens_per_s, after.best.tokens_per_s
    if not after.best.machines & names:
        return f"{who} would not be used: it is faster without"
    return f"{who} would give {figure_of(now)} tokens/s instead of {figure_of(was)}"


def _machine(machine: Machine, task: Task, *, is_new: bool) -> dict[str, Any]:
    return {
        "name": machine.name,
        "is_new": is_new,
        "memory_bytes": machine.memory_bytes,
        "layer_ms": _ms(machine.layer_s),
        "rtt_ms": _ms(machine.rtt_s),
        "layers_that_fit": task.capacity(machine),
    }


def _plan(plans: Plans) -> dict[str, Any] | None:
    """The fastest of one stream, without speculation; None if the machines do not hold the model."""
    if not plans.ranked:
        return None
    best: PlacementPlan = plans.best
    hops = [
        {
            "machine": hop.machine,
            "layers": str(hop.span),
            "compute_ms": _ms(hop.compute_s),
            "link_ms": _ms(hop.leg_s),
            "needs_bytes": hop.needs_bytes,
        }
        for hop in best.hops
    ]
    facts = {"tokens_per_s": round(best.tokens_per_s, 2), "token_ms": _ms(best.token_s)}
    return {**facts, "ends_ms": _ms(best.ends_s), "return_ms": _ms(best.return_s), "hops": hops}


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 3)


def answer(question: WhatIf) -> Mapping[str, Any]:
    """As compare; what refuses the question is its `error`."""
    try:
        return compare(question)
    except BadRequest as error:
        return {"error": str(error)}


def main() -> None:
    """Answer one question and end, once it has computed for DEADLINE_S at the latest.

    Its parent is trusted: it pickles what it has checked.
    """
    os.nice(NICENESS)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.setitimer(signal.ITIMER_PROF, DEADLINE_S)
    sys.stdout.write(json.dumps(answer(pickle.loads(sys.stdin.buffer.read())), allow_nan=False))


if __name__ == "__main__":
    main()
