"""The share of a joining member by a strategy: equal, by capacity, or as the plan that is fastest has it. Pure.

It is a number of layers. Which ones is for choose_span: what no node holds comes first, whatever the strategy says. Members
that are there keep what they hold (a move costs a download); `manyhands plan --apply` moves them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal, cast

from manyhands.config import STRATEGIES
from manyhands.core import NodeId
from manyhands.errors import BadRequest, CutError
from manyhands.place.living import MAX_MACHINES
from manyhands.place.machines import Fleet, Machine
from manyhands.place.plan import Task, find_plans
from manyhands.place.shape import ModelShape
from manyhands.place.strategy import assign
from manyhands.plain import figure_of

JoinStrategy = Literal["cover", "measured", "uniform", "capacity"]
PROMPT: Final = 128  # tokens of the prompt that is planned for


def strategy_of(text: str) -> JoinStrategy:
    """Raises BadRequest."""
    if text not in STRATEGIES:
        raise BadRequest(f"--strategy is {text!r:.40}; it is one of {', '.join(STRATEGIES)}")
    return cast(JoinStrategy, text)


@dataclass(frozen=True, slots=True)
class Share:
    """A number of layers, and what it follows from."""

    num_layers: int
    why: str


@dataclass(frozen=True, slots=True)
class Company:
    """A member that joins and those that are there, each machine named by its NodeId. `origin`: where the requests begin."""

    me: NodeId
    origin: NodeId
    machines: Mapping[NodeId, Machine]
    rtts: Mapping[frozenset[str], float] = field(default_factory=dict)  # seconds between two of them


def share_of(strategy: JoinStrategy, company: Company, shape: ModelShape, tokens: int) -> Share | None:
    """How many layers the strategy gives `company.me`; None: as many as help and fit."""
    if strategy == "cover":
        return None
    if strategy == "measured":
        return _planned(company, shape, tokens)
    names = sorted(company.machines)
    try:
        spans = assign(strategy, [company.machines[name] for name in names], shape)
    except CutError:  # more machines than layers
        return None
    span = dict(zip(names, spans, strict=True))[company.me]
    return Share(len(span), f"its share among {len(names)} nodes, {strategy}")


def _planned(company: Company, shape: ModelShape, tokens: int) -> Share | None:
    """As many as the fastest plan gives `me`; None if it is faster without."""
    names = _planned_with(company)
    rtts = {pair: rtt_s for pair, rtt_s in company.rtts.items() if pair <= set(names)}
    fleet = Fleet(tuple(company.machines[name] for name in names), company.origin, rtts)
    try:
        plans = find_plans(Task(shape, fleet, tokens, min(PROMPT, tokens)), 1)
    except BadRequest:  # the origin's machine is too small by what is known of it
        return None
    hop = next((h for plan in plans.ranked[:1] for h in plan.hops if h.machine == company.me), None)
    if hop is None:
        return None
    rate = plans.ranked[0].tokens_per_s
    return Share(len(hop.span), f"the fastest plan for {len(names)} nodes, {figure_of(rate)} tokens/s")


def _planned_with(company: Company) -> list[NodeId]:
    """MAX_MACHINES at most, as a member may make records of nodes that there are not: `me` and the origin, then those that a
    link of `me` has measured, then those with the most memory."""

    def rank(name: NodeId) -> tuple[bool, bool, int]:
        is_near = frozenset[str]((company.me, name)) in company.rtts
        return name not in (company.me, company.origin), not is_near, -company.machines[name].memory_bytes

    return sorted(sorted(company.machines, key=rank)[:MAX_MACHINES])
