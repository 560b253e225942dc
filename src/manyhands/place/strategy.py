"""Which layers: how many fit a budget, which span helps a swarm most, how a set of machines shares a model. Pure.

Spans are contiguous, always: layer n + 1 needs layer n, so an interleaved share would be a hop per layer (L9-17).
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Final, Literal

from manyhands.core import NodeId, Span, SpanLoad, even_cut, weight_precision
from manyhands.errors import BadRequest, CutError
from manyhands.place.machines import Machine
from manyhands.place.shape import ModelShape
from manyhands.plain import size_of

Strategy = Literal["measured", "uniform", "capacity"]

# What a node that has measured nothing yet counts for: only the ratio to others matters.
UNKNOWN_LAYER_S: Final = 0.01


@dataclass(frozen=True, slots=True)
class Holding:
    """That a node hosts a span of the model, from its record; or will, once it is loaded (`is_ready` False).

    Spares are no holdings: they serve only in need.
    """

    node: NodeId
    span: Span
    load: SpanLoad = field(default_factory=SpanLoad)
    is_ready: bool = True

    @property
    def throughput(self) -> float:
        """Decode steps through the whole span per second."""
        return 1 / (len(self.span) * (self.load.layer_s or UNKNOWN_LAYER_S))


@dataclass(frozen=True, slots=True)
class SpanChoice:
    """A span to host, and one sentence for people on why."""

    span: Span
    why: str


def layers_that_fit(memory_bytes: float, shape: ModelShape, tokens: int, with_ends: bool = False) -> int:
    """Layers, wherever they lie, whose weights and cache for `tokens` positions fit beside the process; 0 if none."""
    room = memory_bytes - shape.process_bytes - (shape.ends_bytes if with_ends else 0)
    sizes = sorted(map(sum, zip(shape.layer_bytes, shape.cached(tokens), strict=True)), reverse=True)
    return sum(total <= room for total in itertools.accumulate(sizes))


def check_budget(memory_bytes: float, shape: ModelShape, tokens: int, with_ends: bool = False) -> int:
    """As layers_that_fit, at least 1. Raises BadRequest with what one layer takes and what can be done."""
    fitting = layers_that_fit(memory_bytes, shape, tokens, with_ends)
    if fitting == 0:
        layer, cache = max(zip(shape.layer_bytes, shape.cached(tokens), strict=True), key=sum)
        ends = shape.ends_bytes if with_ends else 0
        remedies = [f"give at least {size_of(layer + cache + ends + shape.process_bytes, is_limit=True)}"]
        may_help = weight_precision(shape.precision) != "w4" and memory_bytes > shape.process_bytes + cache
        remedies += ["use --dtype w4"] if may_help else []
        with_them = f", its ends {size_of(ends)}" if ends else ""
        raise BadRequest(
            f"{size_of(memory_bytes)} of memory holds no layer of {shape.name}: one takes {size_of(layer)}, its cache for "
            f"{tokens} tokens {size_of(cache)}{with_them}, the process {size_of(shape.process_bytes)}; {' or '.join(remedies)}"
        )
    return fitting


def coverage(holdings: Sequence[Holding], num_layers: int) -> list[int]:
    """How many nodes hold each layer. Takes a moment for each holding and each layer, however much they overlap."""
    changes = [0] * (num_layers + 1)
    for holding in holdings:
        changes[min(holding.span.start, num_layers)] += 1
        changes[min(holding.span.end, num_layers)] -= 1
    return list(itertools.accumulate(changes[:num_layers]))


def gaps(counts: Sequence[int]) -> list[Span]:
    """The runs of layers that no node holds."""
    edges = [i for i, (a, b) in enumerate(itertools.pairwise([1, *counts, 1])) if bool(a) != bool(b)]
    return [Span(a, b) for a, b in zip(edges[::2], edges[1::2], strict=True)]


def choose_span(
    shape: ModelShape,
    holdings: Sequence[Holding],
    memory_bytes: float,
    *,
    tokens: int,
    max_pipes: int = 2,
    with_ends: bool = False,
    files: Span | None = None,
    share: int = 0,
) -> SpanChoice:
    """The span that a joining node should host, given what others hold (LP-13, LP-17).

    Layers that no node holds come first; then those that lack to the next complete copy of the model, up to `max_pipes`
    copies; then those with the least throughput. Of these the node takes as many as fit its budget, and with room left
    goes on into its neighbours while they are below `max_pipes`. `files`: the span whose weights lie on its disk (None: all,
    or none); it is preferred unless a gap needs others (SH-R14: moving every node at every death costs hours of downloads).
    `share`: how many layers it is to take at most, where no longer run is held by no node; 0: as many as fit.
    Raises BadRequest if the budget holds no layer, or max_pipes is below 1.
    """
    if max_pipes < 1:
        raise BadRequest(f"max_pipes is {max_pipes}; it must be at least 1")
    if files is not None and files.end > shape.num_layers:
        files = None  # of another model
    room = check_budget(memory_bytes, shape, tokens, with_ends)
    counts = coverage(holdings, shape.num_layers)
    level = min(counts)
    if share:
        room = min(room, max(share, *(len(gap) for gap in gaps(counts)), 1))
    if level == 0 or (level < max_pipes and files is None):
        gap = _fill(counts, level, room, files)
        span = _grown(gap, counts, room, max_pipes)
        return SpanChoice(span, _reason(gap, span, level, room))
    if files is not None:
        strength = throughputs(holdings, shape.num_layers)[files.start : files.end]
        start = files.start + weakest_span(strength, min(room, len(files))).start
        kept = Span(start, start + min(room, len(files)))
        span = _grown(kept, counts, room, max_pipes)
        more = "" if span == kept else f"; with room for {room} it takes {span}"
        return SpanChoice(span, f"nothing is missing, and layers {kept} are on this machine's disk already{more}")
    span = weakest_span(throughputs(holdings, shape.num_layers), room)
    why = f"every layer is held {level} times or more; layers {span} have the least throughput, and {room} fit here"
    return SpanChoice(span, why)


def _fill(counts: list[int], level: int, room: int, files: Span | None) -> Span:
    """The span of at most `room` layers with most of those held `level` times, then most on disk, then the shortest."""
    low = [layer for layer, count in enumerate(counts) if count == level]

    def held(start: int) -> Span:
        return Span(start, max(layer for layer in low if layer < start + room) + 1)

    def value(span: Span) -> tuple[int, int, int, int]:
        on_disk = max(0, min(span.end, files.end) - max(span.start, files.start)) if files else 0
        return counts[span.start : span.end].count(level), on_disk, -len(span), -span.start

    return max(map(held, low), key=value)


def _grown(span: Span, counts: Sequence[int], room: int, max_pipes: int) -> Span:
    """`span` and its neighbours, the weaker side first, as long as they are held less than max_pipes times and fit."""
    start, end = span.start, span.end
    while end - start < room:
        sides = [(counts[i], -i) for i in (end, start - 1) if 0 <= i < len(counts) and counts[i] < max_pipes]
        if not sides:
            break
        layer = -min(sides)[1]
        start, end = min(start, layer), max(end, layer + 1)
    return Span(start, end)


def _reason(gap: Span, span: Span, level: int, room: int) -> str:
    held = "no node holds" if level == 0 else f"only {level} {'node holds' if level == 1 else 'nodes hold'}"
    more = f"; with room for {room} it takes {span}" if span != gap else f", and {room} fit here"
    return f"{held} layers {gap}{more}"


def throughputs(holdings: Sequence[Holding], num_layers: int) -> list[float]:
    """Steps per second that each layer's holders manage together, summed in one order so that all nodes agree."""
    out = [0.0] * num_layers
    for holding in sorted(holdings, key=lambda h: (h.node, h.span)):
        for layer in range(holding.span.start, min(holding.span.end, num_layers)):
            out[layer] += holding.throughput
    return out


def weakest_span(strength: Sequence[float], length: int) -> Span:
    """The span of `length` layers whose worst layer is worst, then whose next is, and so on; the first among equals.

    (Petals, server/block_selection.py: sorted throughputs compared as lists.) Raises CutError if it is longer than all.
    """
    if not 1 <= length <= len(strength):
        raise CutError(f"a span of {length} of {len(strength)} layers")
    starts = range(len(strength) - length + 1)
    best = min(starts, key=lambda start: (sorted(strength[start : start + length]), start))
    return Span(best, best + length)


def share(num_layers: int, weights: Sequence[float]) -> list[Span]:
    """Contiguous spans of lengths in proportion to `weights`, by largest remainder, ties to the earlier; none is empty.

    Exact: fractions, no rounding of floats. Raises CutError if there are more machines than layers or a weight is not
    positive.
    """
    if not 1 <= len(weights) <= num_layers or not all(0 < weight < float("inf") for weight in weights):
        raise CutError(f"{num_layers} layers cannot be shared by weights {list(weights)}: 1 to {num_layers} above 0")
    total = sum(map(Fraction, weights))
    ideal = [Fraction(weight) * num_layers / total for weight in weights]
    lengths = [int(part) for part in ideal]
    by_remainder = sorted(range(len(ideal)), key=lambda i: (lengths[i] - ideal[i], i))
    for index in by_remainder[: num_layers - sum(lengths)]:
        lengths[index] += 1
    while 0 in lengths:  # one from the longest
        lengths[lengths.index(max(lengths))] -= 1
        lengths[lengths.index(0)] += 1
    edges = itertools.accumulate(lengths, initial=0)
    return [Span(a, b) for a, b in itertools.pairwise(edges)]


def capacity_weight(machine: Machine) -> float:
    """L9-18: cpu_cores + memory_mb / 1024."""
    return machine.cores + machine.memory_bytes / (1 << 30)


def assign(strategy: Literal["uniform", "capacity"], machines: Sequence[Machine], shape: ModelShape) -> list[Span]:
    """A share for each machine, in order: equal, or by capacity. Raises CutError, BadRequest for no machines.

    `measured` is what plan.py finds.
    """
    if not machines:
        raise BadRequest("no machines to share the layers: name at least one")
    if strategy == "uniform":
        return even_cut(shape.num_layers, len(machines))
    return share(shape.num_layers, [capacity_weight(machine) for machine in machines])
