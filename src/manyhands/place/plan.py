"""Which machines should hold which layers for one fast stream, and what to expect of it. Pure; asked before loading.

For a fixed set of hops the time of a token separates (field.md §4(a)): compute is least when the fastest machine takes as
many layers as fit, whatever the order; the network is least on the shortest closed tour from the origin, whatever the
shares. So: every subset of up to EXACT machines, greedy fill, and Held-Karp for the tours of all subsets at once; the
result is exact under the cost model (route/cost.py). More machines: a beam of subsets with insertion tours. One machine
alone is always among the candidates.
"""

import heapq
import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from manyhands.config import RequestConfig
from manyhands.core import Span
from manyhands.errors import BadRequest
from manyhands.place.machines import Fleet, Machine
from manyhands.place.shape import ModelShape
from manyhands.place.strategy import Strategy, assign, layers_that_fit
from manyhands.place.tour import AllTours, Ways, improve, insert
from manyhands.plain import figure_of, size_of
from manyhands.route.chunks import Stage, chunk_rows, first_rows
from manyhands.route.cost import Leg, SpanCost, prefill_s, token_s

EXACT: Final = 12  # 4,096 subsets x 12 x 12 transitions: half a second
BEAM: Final = 16  # sets of each size that are extended: a second for 100 machines
KEPT: Final = 32  # sets that are worked out
MAX_HOPS: Final = 32
REQUEST: Final = RequestConfig()  # how prompts are cut and sent


@dataclass(frozen=True, slots=True)
class PlannedHop:
    """A span on a machine. Seconds of a token: `compute_s` its layers and the hop itself, `leg_s` the way to it."""

    machine: str
    span: Span
    compute_s: float
    leg_s: float
    needs_bytes: int


@dataclass(frozen=True, slots=True)
class PlacementPlan:
    """A placement and what one stream may expect of it. `return_s`: the way back to the origin."""

    hops: tuple[PlannedHop, ...]
    ends_s: float
    return_s: float
    token_s: float
    ttft_s: float

    @property
    def tokens_per_s(self) -> float:
        return 1 / self.token_s

    @property
    def machines(self) -> frozenset[str]:
        return frozenset(hop.machine for hop in self.hops)

    def __str__(self) -> str:
        return ", ".join(f"{hop.machine} {hop.span}" for hop in self.hops)


@dataclass(frozen=True, slots=True)
class Missing:
    """Layers that find no room on any machine, and the memory of one more machine that would hold them."""

    span: Span
    needs_bytes: int

    def __str__(self) -> str:
        needed = size_of(self.needs_bytes, is_limit=True)
        return f"layers {self.span} are held by no node: one more machine with {needed} would complete it"


@dataclass(frozen=True, slots=True)
class Plans:
    """What was found: placements, the best first (none: see `missing`), and the best on one machine alone, if it fits."""

    ranked: tuple[PlacementPlan, ...]
    alone: PlacementPlan | None
    missing: Missing | None

    @property
    def best(self) -> PlacementPlan:
        """The fastest. Raises BadRequest naming what is missing."""
        if not self.ranked:
            raise BadRequest(str(self.missing))
        return self.ranked[0]


@dataclass(frozen=True, slots=True)
class Task:
    """What is planned for: a model, cache for `tokens` positions on every hop, a prompt of `prompt` of them."""

    shape: ModelShape
    fleet: Fleet
    tokens: int = 2048
    prompt: int = 128

    def __post_init__(self) -> None:
        if not 1 <= self.prompt <= self.tokens:
            raise BadRequest(f"a prompt of {self.prompt} of {self.tokens} tokens: it must be between 1 and all of them")
        if self.tokens > self.shape.context:
            raise BadRequest(f"{self.tokens} tokens exceed the model's context of {self.shape.context}: plan for fewer")
        if self.origin.memory_bytes < self.shape.process_bytes + self.shape.ends_bytes:
            raise BadRequest(
                f"{self.origin.name} has {size_of(self.origin.memory_bytes)}: too little for the origin, whose process takes "
                f"{size_of(self.shape.process_bytes)} and embedding and head {size_of(self.shape.ends_bytes)}; "
                "give it more or name another origin"
            )

    @property
    def origin(self) -> Machine:
        return self.fleet.get_machine(self.fleet.origin)

    def capacity(self, machine: Machine) -> int:
        """Layers that fit on a machine, wherever they lie; the origin has the ends to hold, too."""
        with_ends = machine.name == self.fleet.origin
        return layers_that_fit(machine.memory_bytes, self.shape, self.tokens, with_ends)


def find_plans(task: Task, limit: int = 5) -> Plans:
    """The `limit` best sets of machines, each with its best shares and order, fastest token first."""
    search = _Search(task)
    if not search.useful or sum(search.capacity) < task.shape.num_layers:
        return Plans((), None, _missing(task, sum(search.capacity)))
    orders = search.exact() if len(search.useful) <= EXACT else search.beam()
    plans = sorted(
        (search.plan(order) for order in set(orders)), key=lambda plan: (plan.token_s, plan.ttft_s, str(plan))
    )
    alone = next((plan for plan in plans if len(plan.hops) == 1), None)
    return Plans(tuple(plans[:limit]), alone, None)


def place(task: Task, strategy: Strategy) -> PlacementPlan:
    """The plan of a strategy: the fastest found (`measured`), or shares by rule for all machines that hold a layer, in order.

    Raises BadRequest for a share that does not fit its machine, or layers that no machine can hold.
    """
    if strategy == "measured":
        return find_plans(task, 1).best
    machines = [machine for machine in task.fleet.machines if task.capacity(machine)]
    spans = assign(strategy, machines, task.shape)
    for machine, span in zip(machines, spans, strict=True):
        if task.capacity(machine) < len(span):
            raise BadRequest(
                f"strategy {strategy} gives {machine.name} {len(span)} layers, of which {task.capacity(machine)} fit into "
                f"{size_of(machine.memory_bytes)}: give it more memory, or use --strategy measured"
            )
    return evaluate(task, list(zip(machines, spans, strict=True)))


def evaluate(task: Task, hops: Sequence[tuple[Machine, Span]]) -> PlacementPlan:
    """What a placement gives: spans in order, on machines of the fleet.

    A machine that waits while the others work dozes off: the slowdown (Machine.slowed) follows from the time of a token without
    it.
    """
    shape, origin = task.shape, task.origin
    stops = [origin, *(machine for machine, _ in hops), origin]
    legs = [task.fleet.leg(a, b) for a, b in itertools.pairwise(stops)]
    awake = [(len(span), _cost(machine)) for machine, span in hops]
    awake_s = token_s(awake, legs, shape.hidden_bytes, origin.ends_s)
    costs = [
        (n, _cost(machine, machine.slowed(awake_s - cost.step_s(n))))
        for (machine, _), (n, cost) in zip(hops, awake, strict=True)
    ]
    ends_s = origin.ends_s * origin.slowed(awake_s - origin.ends_s)
    planned = tuple(
        PlannedHop(
            machine.name,
            span,
            cost.step_s(num_layers),
            leg.seconds(shape.hidden_bytes),
            shape.span_bytes(span, task.tokens) + shape.process_bytes,
        )
        for (machine, span), (num_layers, cost), leg in zip(hops, costs, legs, strict=False)
    )
    each_s = token_s(costs, legs, shape.hidden_bytes, ends_s)
    first_s = _first_token_s(task, hops, legs)
    return PlacementPlan(planned, ends_s, legs[-1].seconds(shape.hidden_bytes), each_s, first_s)


def _first_token_s(task: Task, hops: Sequence[tuple[Machine, Span]], legs: Sequence[Leg]) -> float:
    """Until a prompt's first token is drawn; the prompt finds every machine dozing.

    The origin finds a route, signs an Open for each hop, one after the other, and sends the first rows behind them: they wait
    at a hop that has not carried its Open out. The rest runs down the route in chunks once all hops have answered, which takes
    a round trip and a hop's overhead.
    """
    origin, row_bytes = task.origin, task.shape.hidden_bytes
    dozing = [(len(span), _cost(machine, machine.doze)) for machine, span in hops]
    rtts = [task.fleet.leg(origin, machine).rtt_s for machine, _ in hops]
    stages = [Stage(n * cost.layer_s, n * cost.row_s, rtt_s) for rtt_s, (n, cost) in zip(rtts, dozing, strict=True)]
    most = max(1, min(REQUEST.prefill_chunk, REQUEST.frame_bytes // row_bytes))
    chunk = chunk_rows(task.prompt, stages, REQUEST.credits, most)
    own_s = origin.begin_s + (len(hops) - 1) * origin.open_s + origin.ends_s * origin.doze
    own_s += math.fsum(machine.new_s for machine, _ in hops)
    first = first_rows(task.prompt, chunk, row_bytes, stages)
    passed_s = late_s = answered_s = (
        0.0  # the first rows are through a hop; what they have waited; all hops have answered
    )
    for rtt_s, (num_layers, cost), leg in zip(rtts, dozing, legs, strict=False):
        passed_s += leg.seconds(first * row_bytes)
        late_s = max(late_s, rtt_s / 2 + cost.overhead_s - passed_s)
        passed_s += cost.chunk_s(num_layers, first)
        answered_s = max(answered_s, rtt_s + cost.overhead_s)
    through_s = late_s + prefill_s(dozing, legs, task.prompt, row_bytes, chunk, own_s)
    if (rest := task.prompt - first) < 1:
        return through_s
    return max(through_s, answered_s + prefill_s(dozing, legs, rest, row_bytes, chunk, own_s))


def _cost(machine: Machine, slowed: float = 1.0) -> SpanCost:
    return SpanCost(
        machine.layer_s * slowed,
        overhead_s=machine.overhead_s * slowed,
        row_s=machine.row_s * slowed,
        pass_s=machine.pass_s * slowed,
    )


def _missing(task: Task, placed: int) -> Missing:
    span = Span(placed, task.shape.num_layers)
    return Missing(span, task.shape.span_bytes(span, task.tokens) + task.shape.process_bytes)


class _Search:
    """Sets of machines for one task, by index into `useful`: those on which a layer fits."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self.useful = [machine for machine in task.fleet.machines if task.capacity(machine)]
        self.capacity = [task.capacity(machine) for machine in self.useful]
        self.costs = [_cost(machine) for machine in self.useful]
        # Fastest first; of equals the earlier, so that equal input gives equal plans.
        self.by_speed = sorted(range(len(self.useful)), key=lambda i: (self.useful[i].layer_s, i))
        self.ways = self._ways()

    def _ways(self) -> Ways:
        fleet, origin, num_bytes = self.task.fleet, self.task.origin, self.task.shape.hidden_bytes

        def seconds(a: Machine, b: Machine) -> float:
            return fleet.leg(a, b).seconds(num_bytes)

        return Ways(
            [seconds(origin, machine) for machine in self.useful],
            [[seconds(a, b) for b in self.useful] for a in self.useful],
            [seconds(machine, origin) for machine in self.useful],
        )

    def fill(self, chosen: Collection[int]) -> dict[int, int] | None:
        """How many layers each takes: one, then as many as fit, the fastest first. None if they hold too few or many."""
        left = self.task.shape.num_layers - len(chosen)
        lengths = dict.fromkeys(chosen, 1)
        if left < 0:
            return None
        for index in self.by_speed:
            if index in lengths:
                more = min(left, self.capacity[index] - 1)
                lengths[index] += more
                left -= more
        return None if left else lengths

    def compute_s(self, lengths: Mapping[int, int]) -> float:
        return math.fsum(self.costs[index].step_s(length) for index, length in lengths.items())

    def exact(self) -> list[tuple[int, ...]]:
        """The best KEPT sets, each in its best order, and every machine that can do it alone."""
        tours = AllTours(self.ways)
        scores: dict[int, float] = {}
        for mask in range(1, 1 << len(self.useful)):
            lengths = self.fill([i for i in range(len(self.useful)) if mask >> i & 1])
            if lengths is not None:
                scores[mask] = self.compute_s(lengths) + tours.cost(mask)
        best = heapq.nsmallest(KEPT, scores, key=lambda mask: (scores[mask], mask))
        return [tuple(tours.order(mask)) for mask in {*best, *(mask for mask in scores if mask.bit_count() == 1)}]

    def beam(self) -> list[tuple[int, ...]]:
        """As exact(), but only of sets that grow from the BEAM most promising smaller ones, and of the fewest machines that
        hold all layers; in good orders."""
        fewest = self._fewest()
        found = {fewest: self._promise(fewest)} | self._grown()
        best = heapq.nsmallest(KEPT, found, key=lambda order: (found[order], order))
        kept = {*best, *(order for order in found if len(order) == 1)}
        return [improve(self.ways, order) if len(order) <= MAX_HOPS else order for order in kept]

    def _grown(self) -> dict[tuple[int, ...], float]:
        """Complete orders and their promise, hop by hop."""
        found: dict[tuple[int, ...], float] = {}
        frontier: list[tuple[int, ...]] = [()]
        for _ in range(min(MAX_HOPS, self.task.shape.num_layers, len(self.useful))):
            grown = {frozenset((*order, i)): (order, i) for order in frontier for i in self._others(order)}
            scores = {order: self._promise(order) for order in (insert(self.ways, *pair) for pair in grown.values())}
            frontier = heapq.nsmallest(BEAM, scores, key=lambda order: (scores[order], order))
            complete = [order for order in frontier if self.fill(order)]
            if len(complete) == BEAM and scores[frontier[0]] > min(found.values(), default=math.inf):
                break  # one hop more no longer helps
            alone = [order for order in scores if len(order) == 1 and self.fill(order)]
            found |= {order: scores[order] for order in (*complete, *alone)}
        return found

    def _fewest(self) -> tuple[int, ...]:
        """The roomiest machines, of equals the fastest: what grows by promise may take those that hold little for ever."""
        order: tuple[int, ...] = ()
        for index in sorted(self.by_speed, key=lambda i: -self.capacity[i]):
            if sum(self.capacity[i] for i in order) < self.task.shape.num_layers:
                order = insert(self.ways, order, index)
        return order

    def _others(self, order: Collection[int]) -> list[int]:
        return [index for index in range(len(self.useful)) if index not in order]

    def _promise(self, order: Sequence[int]) -> float:
        """Seconds of a token; layers that do not fit yet are priced at the fastest machine left, hop and all."""
        lengths = self.fill(order)
        if lengths is not None:
            return self.compute_s(lengths) + self.ways.cost(order)
        held = {index: self.capacity[index] for index in order}
        left = self.task.shape.num_layers - sum(held.values())
        layer_s = min((self.useful[i].layer_s for i in self.by_speed if i not in held), default=math.inf)
        return self.compute_s(held) + self.ways.cost(order) + left * layer_s

    def plan(self, order: Sequence[int]) -> PlacementPlan:
        lengths = self.fill(order)
        assert lengths is not None
        edges = itertools.accumulate((lengths[index] for index in order), initial=0)
        spans = [Span(a, b) for a, b in itertools.pairwise(edges)]
        return evaluate(self.task, [(self.useful[i], span) for i, span in zip(order, spans, strict=True)])


def advice(plans: Plans) -> str:
    """One sentence for people: what to do, and what it brings."""
    if not plans.ranked:
        return f"not enough room: {plans.missing}"
    best, alone = plans.ranked[0], plans.alone
    if alone is None:
        return f"no machine holds it alone; share it: {best}. Expect {figure_of(best.tokens_per_s)} tokens/s"
    if best.tokens_per_s > alone.tokens_per_s:
        gain = best.tokens_per_s / alone.tokens_per_s
        rate = f"{figure_of(best.tokens_per_s)} tokens/s, {gain:.2f} times {alone.hops[0].machine} alone"
        return f"share it: {best}. Expect {rate}"
    shared = next((plan for plan in plans.ranked if len(plan.hops) > 1), None)
    said = f"{alone.hops[0].machine} alone is fastest: expect {figure_of(alone.tokens_per_s)} tokens/s"
    return said if shared is None else f"{said}; shared ({shared}) it would be {figure_of(shared.tokens_per_s)}"
