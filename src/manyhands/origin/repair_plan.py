"""What to do when hops of a live session are lost: hops, losses and offers in, a new route out. Pure.

    lost run of layers ─ cover by offers (excluding the lost nodes) ─► new hops
    their predecessor re-sends its output log of the committed positions; the last new hop keeps what its successor has

Committed positions [0, committed) have passed every hop, so survivors keep their caches up to there; anything later is
sent again by the origin. A standby (standby.py) that is promoted has most of them too and gets the rest. A predecessor
without a log is made to recompute what the next hop lacks, fed by the hop before it, at worst by the origin from the ids.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from manyhands.config import MAX_HOPS
from manyhands.core import NodeId, SessionId, Span
from manyhands.errors import ShardUnavailable
from manyhands.route.offer import ANY, Offer, Terms
from manyhands.route.search import cover, without_needless_loading


@dataclass(frozen=True, slots=True)
class Slot:
    """One hop of the new route: a survivor (`kept` is its index in the old route) or a new hop (`kept` None).

    `replay_from`, `replay_until`, `emit_from`, `resume`: see Open. `recomputes`: it gets committed positions (again).
    `resume_until`: those that it holds, as far as the origin knows; Opened says whether it can go on from there.
    """

    offer: Offer
    kept: int | None
    recomputes: bool = False
    replay_from: int = 0
    replay_until: int = 0
    emit_from: int = 0
    resume: SessionId | None = None
    resume_until: int = 0


@dataclass(frozen=True, slots=True)
class RepairPlan:
    """The new route. The origin sends positions from `replay_from` to hop 0: at most the committed ones again."""

    slots: tuple[Slot, ...]
    replay_from: int


@dataclass(frozen=True, slots=True)
class Warm:
    """A standby: `offer` is exactly its place, whose cache holds positions [0, computed), all of them committed."""

    offer: Offer
    computed: int


@dataclass(frozen=True, slots=True)
class Repair:
    """What a repair did, for people (times in seconds, monotonic differences).

    `detect_s`: since the last step that had come back. `replay_s`: from the plan that worked until the first new position came
    back, so what is recomputed is in it; `total_s`: from the beginning of the repair until then. Until it has come, both end
    where the route stood again.
    """

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
    pipeline_aborted · audit (nodes computed wrong numbers, or contradict each other: audit.py). `nodes` are those it is about,
    `at_token` the tokens committed then.
    """

    kind: Literal["shard_status", "shard_failover", "reshard", "pipeline_aborted", "audit"]
    nodes: tuple[str, ...]
    at_token: int
    detail: str


def plan_repair(
    route: Sequence[Offer],
    lost: Collection[int],
    short: Mapping[int, int],
    logless: Collection[int],
    offers: Sequence[Offer],
    excluded: Collection[NodeId],
    committed: int,
    warm: Sequence[Warm] = (),
    terms: Terms = ANY,
    cuts: Collection[int] = (),
) -> RepairPlan:
    """Replace the hops `lost` of `route`. Survivors in `short` can go on from so many positions only (0: an earlier repair was
    cut short); those in `logless` cannot replay, so they recompute, fed from further upstream. Lost hops that have a standby in
    `warm` are replaced by it.

    Offers of `excluded` nodes are not used, nor those of other weights or precision. A session has one place on a span
    of a node, so offers of nodes that stay in the route are used only if nothing else covers. Else new hops are those that cost
    least between the neighbours of the lost run, by the round trips of `terms`. No new hop reaches over one of the layers
    `cuts`, before which rows were rounded. Raises ShardUnavailable.
    """
    standbys = [w for w in warm if w.offer.node not in excluded]
    slots = _replace(route, lost, _usable(route, offers, excluded), [w.offer for w in standbys], terms, cuts)
    held = {(w.offer.node, w.offer.info.span): min(w.computed, committed) for w in standbys}
    starts = [_holds(slot, short, held, committed) for slot in slots]
    for index in range(len(slots) - 2, -1, -1):
        if slots[index].kept in logless:
            starts[index] = min(starts[index], starts[index + 1])
    needs = [*starts[1:], committed]
    planned = [
        _instruct(slot, start, need, committed, is_new=slot.kept is None or slot.kept in short)
        for slot, start, need in zip(slots, starts, needs, strict=True)
    ]
    return RepairPlan(tuple(planned), starts[0])


def _holds(slot: Slot, short: Mapping[int, int], held: Mapping[tuple[NodeId, Span], int], committed: int) -> int:
    """The committed positions [0, n) that the cache of a hop of the new route holds already."""
    if slot.kept is None:
        return held.get((slot.offer.node, slot.offer.info.span), 0)
    return min(short.get(slot.kept, committed), committed)


def _instruct(slot: Slot, start: int, need: int, committed: int, *, is_new: bool) -> Slot:
    """`slot` computes from position `start` on; the hop after it lacks those from `need` on (the origin: none).

    What lies before `start` it can only replay, what it computes it emits.
    """
    recomputes = is_new or start < committed
    replays = need < start
    return Slot(
        slot.offer,
        slot.kept,
        recomputes,
        replay_from=need if replays else 0,
        replay_until=start if replays else 0,
        emit_from=need if recomputes else 0,
        resume_until=start,
    )


def rounds(slots: Sequence[Slot]) -> list[list[int]]:
    """The hops in the order in which they are told of their places: no rows reach a hop that has not been told of its own.

    Those that recompute come first, and of them last those that also send out of a log at once: after all hops behind them that
    recompute, which those rows may reach.
    """
    turns, behind = dict[int, int](), 0  # the turn after those of the hops behind that recompute
    for index in reversed(range(len(slots))):
        if slots[index].recomputes:
            turns[index] = behind if slots[index].replay_until else 0
            behind = max(behind, turns[index] + 1)
    return [[index for index in range(len(slots)) if turns.get(index, behind) == turn] for turn in range(behind + 1)]


def _usable(route: Sequence[Offer], offers: Sequence[Offer], excluded: Collection[NodeId]) -> list[Offer]:
    kind = (route[0].info.model, route[0].info.precision)
    return [o for o in offers if o.node not in excluded and (o.info.model, o.info.precision) == kind]


def _replace(
    route: Sequence[Offer],
    lost: Collection[int],
    offers: Sequence[Offer],
    standbys: Sequence[Offer],
    terms: Terms,
    cuts: Collection[int],
) -> list[Slot]:
    slots: list[Slot] = []
    index = 0
    while index < len(route):
        if index not in lost:
            slots.append(Slot(route[index], index))
            index += 1
            continue
        end = index + 1
        while end < len(route) and end in lost and route[end].info.span.start not in cuts:
            end += 1
        run = _standbys_of(route[index:end], standbys) or _cover_run(route, index, end, lost, offers, terms)
        slots += [Slot(o, None) for o in run]
        index = end
    return slots


def _standbys_of(run: Sequence[Offer], standbys: Sequence[Offer]) -> list[Offer]:
    """The standbys of all hops of a lost run; [] if one has none."""
    found = [next((s for s in standbys if s.info.span == lost.info.span), None) for lost in run]
    return [s for s in found if s is not None] if all(found) else []


def _cover_run(
    route: Sequence[Offer], start: int, end: int, lost: Collection[int], offers: Sequence[Offer], terms: Terms
) -> tuple[Offer, ...]:
    """New hops for the lost run route[start:end]: nodes outside the route first, of them those that are lost now after others;
    those that must load the layers last."""
    span = Span(route[start].info.span.start, route[end - 1].info.span.end)
    before = route[start - 1].node if start else terms.origin
    after = route[end].node if end < len(route) else terms.origin
    staying, leaving = ({o.node for i, o in enumerate(route) if (i in lost) == is_lost} for is_lost in (False, True))
    ready = [o for o in offers if o.info.is_loaded]
    outside = [o for o in ready if o.node not in staying]
    others = [o for o in outside if o.node not in leaving]
    kept = len(route) - len(lost) + sum(i in lost and i - 1 not in lost for i in range(len(route))) - 1
    short = replace(terms, rules=replace(terms.rules, max_hops=max(1, terms.rules.max_hops - kept)))
    free = replace(terms, rules=replace(terms.rules, max_hops=MAX_HOPS))  # rather than lose a stream
    able = others, outside, ready, without_needless_loading(offers, span)
    for bounds in (short, free) if terms.rules.max_hops < MAX_HOPS else (terms,):
        for those in able:
            if found := cover(those, span, bounds, (before, after)):
                return found
    raise ShardUnavailable(f"no other node holds layers {span}")
