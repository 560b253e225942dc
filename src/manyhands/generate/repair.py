"""What to do when hops of a live session are lost: hops, losses and offers in, a new route out. Pure.

    lost run of layers ─ cover by offers (excluding the lost nodes) ─► new hops
    their predecessor re-sends its output log of the committed positions; the last new hop keeps what its successor has

Committed positions [0, committed) have passed every hop, so survivors keep their caches up to there; anything later is
sent again by the origin. A predecessor without a log is made to recompute as well, fed by the hop before it, at worst by
the origin from the ids.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

from manyhands.core import NodeId, Span
from manyhands.errors import ShardUnavailable
from manyhands.route.search import Offer, cover


@dataclass(frozen=True, slots=True)
class Slot:
    """One hop of the new route: a survivor (`kept` is its index in the old route) or a new hop (`kept` None).

    `replay_until`, `emit_from`: see Open. `recomputes`: it gets the committed positions again.
    """

    offer: Offer
    kept: int | None
    recomputes: bool = False
    replay_until: int = 0
    emit_from: int = 0


@dataclass(frozen=True, slots=True)
class RepairPlan:
    """The new route. `origin_replays`: the origin itself re-sends positions [0, committed) to hop 0."""

    slots: tuple[Slot, ...]
    origin_replays: bool


@dataclass(frozen=True, slots=True)
class Repair:
    """What a repair did, for people (times in seconds, monotonic differences)."""

    reason: str
    lost: tuple[str, ...]
    replacement: tuple[str, ...]
    at_token: int
    detect_s: float
    replay_s: float
    total_s: float


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened to a running route (names: HN-40, L9-23).

    shard_status (a hop is degraded) · shard_failover (replaced one for one) · reshard (the layers are cut anew) ·
    pipeline_aborted. `nodes` are those it is about, `at_token` the tokens committed then.
    """

    kind: Literal["shard_status", "shard_failover", "reshard", "pipeline_aborted"]
    nodes: tuple[str, ...]
    at_token: int
    detail: str


def plan_repair(
    route: Sequence[Offer],
    lost: Collection[int],
    empty: Collection[int],
    logless: Collection[int],
    offers: Sequence[Offer],
    excluded: Collection[NodeId],
    committed: int,
) -> RepairPlan:
    """Replace the hops `lost` of `route`. Survivors in `empty` have no cache yet (an earlier repair was cut short); those
    in `logless` cannot replay, so they recompute, fed from further upstream.

    Offers of `excluded` nodes are not used, nor those of other weights or precision. A session has one place on a span
    of a node, so offers of nodes that stay in the route are used only if nothing else covers. Raises ShardUnavailable.
    """
    slots = _replace(route, lost, _usable(route, offers, excluded))
    recomputes = [s.kept is None or s.kept in empty for s in slots]
    for index in range(len(slots) - 1, -1, -1):
        if recomputes[index] and index > 0 and slots[index - 1].kept in logless:
            recomputes[index - 1] = True
    planned = [_instruct(i, slot, recomputes, committed) for i, slot in enumerate(slots)]
    return RepairPlan(tuple(planned), origin_replays=recomputes[0] and committed > 0)


def _instruct(index: int, slot: Slot, recomputes: Sequence[bool], committed: int) -> Slot:
    """A hop before a recomputing one replays (unless it recomputes itself: then it emits everything)."""
    feeds_next = index + 1 < len(recomputes) and recomputes[index + 1]
    if recomputes[index]:
        return Slot(slot.offer, slot.kept, True, emit_from=0 if feeds_next else committed)
    return Slot(slot.offer, slot.kept, replay_until=committed if feeds_next else 0)


def _usable(route: Sequence[Offer], offers: Sequence[Offer], excluded: Collection[NodeId]) -> list[Offer]:
    kind = (route[0].info.model, route[0].info.precision)
    return [o for o in offers if o.node not in excluded and (o.info.model, o.info.precision) == kind]


def _replace(route: Sequence[Offer], lost: Collection[int], offers: Sequence[Offer]) -> list[Slot]:
    slots: list[Slot] = []
    index = 0
    while index < len(route):
        if index not in lost:
            slots.append(Slot(route[index], index))
            index += 1
            continue
        end = index
        while end < len(route) and end in lost:
            end += 1
        slots += [Slot(o, None) for o in _cover_run(route, index, end, lost, offers)]
        index = end
    return slots


def _cover_run(
    route: Sequence[Offer], start: int, end: int, lost: Collection[int], offers: Sequence[Offer]
) -> tuple[Offer, ...]:
    """New hops for the lost run route[start:end]; nodes outside the route first."""
    span = Span(route[start].info.span.start, route[end - 1].info.span.end)
    staying = {o.node for i, o in enumerate(route) if i not in lost}
    found = cover([o for o in offers if o.node not in staying], span) or cover(offers, span)
    if not found:
        raise ShardUnavailable(f"nobody else holds layers {span}")
    return found
