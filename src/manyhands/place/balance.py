"""Whether a node's span should move, decided each period by every node for itself from the same records. Pure.

What keeps a swarm from thrashing or tearing (C-19; field.md §4(a); petals, server/block_selection.py):
- a move must raise the throughput of the weakest layer it touches by `gain`, `patience` periods in a row, and not soon after
  another;
- no node leaves a layer that no other node serves;
- of all nodes that would move from a span or to one, a single one may in a period: the lowest hash of (period, node). All nodes
  that see the same records pick the same one, without a message;
- a mover is announced at its new span while it still serves the old one (make before break), and what is announced counts
  as strength there, so that others do not follow it; only what is ready counts as cover.
"""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from manyhands.config import BalanceConfig
from manyhands.core import NodeId, Span
from manyhands.place.strategy import Holding, coverage, gaps, throughputs, weakest_span


@dataclass(frozen=True, slots=True)
class LoadHistory:
    """What a node keeps between periods: how many in a row it has wanted to move, and when it last did."""

    wanted: int = 0
    moved_at_s: float = -math.inf


@dataclass(frozen=True, slots=True)
class Move:
    """Serve `target` too, then drain `source`."""

    source: Span
    target: Span


@dataclass(frozen=True, slots=True)
class Decision:
    """`move` None: stay. `why`: one sentence for people. `history`: to be given next time."""

    move: Move | None
    why: str
    history: LoadHistory = field(default_factory=LoadHistory)


def decide(
    mine: Holding,
    holdings: Sequence[Holding],
    num_layers: int,
    history: LoadHistory,
    period: int,
    now_s: float,
    rules: BalanceConfig,
) -> Decision:
    """Whether `mine` should move, given all records (its own among them or not: then it stays, unknown to the others).

    `period`: its number, the same on all nodes (unix time / length). Not pure would be: reading clocks; `now_s` is given.
    """
    move = propose(mine, holdings, num_layers, rules)
    if move is None:
        return Decision(None, "no move would help", replace(history, wanted=0))
    is_urgent = 0 in coverage(holdings, num_layers)
    history = replace(history, wanted=history.wanted + 1)
    if not is_urgent and history.wanted < rules.patience:
        return Decision(None, f"{move.target} could use help: wait and see ({history.wanted})", history)
    if not is_urgent and now_s - history.moved_at_s < rules.cool_down_s:
        return Decision(None, f"moved less than {rules.cool_down_s:g} s ago", history)
    if not holds_claim(mine, holdings, num_layers, period, rules):
        return Decision(None, f"another node moves to or from these layers in period {period}", history)
    return Decision(move, _reason(move, holdings, num_layers), LoadHistory(0, now_s))


def propose(mine: Holding, holdings: Sequence[Holding], num_layers: int, rules: BalanceConfig) -> Move | None:
    """The move that these records alone suggest to the holder of `mine`; None if none, or if it must not leave."""
    if mine not in holdings or not mine.is_ready:
        return None
    movers = {holding.node for holding in holdings if not holding.is_ready}
    staying = [holding.span for holding in holdings if holding.node not in {*movers, mine.node}]
    if mine.node in movers or not _are_covered(mine.span, staying):
        return None
    target = (_by_load if rules.policy == "load" else _by_throughput)(mine, holdings, num_layers, rules)
    return None if target is None or target == mine.span else Move(mine.span, target)


def may_leave(mine: Holding, target: Span | None, holdings: Sequence[Holding]) -> bool:
    """Whether a node that serves `target` now (None: nothing) may drop `mine`: asked again at the end of a move, as records
    change.

    Others that are on the move themselves count as staying if their id is higher: of two that rely on each other, one goes.
    """
    spans = [h.span for h in holdings if h.node != mine.node and h.is_ready and not _goes_first(h, mine, holdings)]
    return _are_covered(mine.span, spans if target is None else [*spans, target])


def _goes_first(other: Holding, mine: Holding, holdings: Sequence[Holding]) -> bool:
    is_moving = sum(holding.node == other.node for holding in holdings) > 1
    return is_moving and other.node < mine.node


def _are_covered(span: Span, spans: Sequence[Span]) -> bool:
    """Whether every layer of `span` lies in one of `spans`."""
    return all(any(other.start <= layer < other.end for other in spans) for layer in range(span.start, span.end))


def _by_throughput(mine: Holding, holdings: Sequence[Holding], num_layers: int, rules: BalanceConfig) -> Span | None:
    """The weakest span of the swarm without me, if the weakest layer of those I leave and reach gets `gain` times as fast.

    Layers beyond them do not change, so each move raises the sorted list of throughputs: moves cannot go in circles.
    """
    others = [holding for holding in holdings if holding != mine]
    target = weakest_span(throughputs(others, num_layers), len(mine.span))
    moved = [*others, replace(mine, span=target)]
    before, after = throughputs(holdings, num_layers), throughputs(moved, num_layers)
    if 0 in before:  # to make a hole smaller helps, even if it takes two moves to close it
        return target if after.count(0) < before.count(0) else None
    touched = [*range(mine.span.start, mine.span.end), *range(target.start, target.end)]
    weakest = min(before[layer] for layer in touched)
    return target if min(after[layer] for layer in touched) >= rules.gain * weakest * (1 - 1e-9) else None


def _by_load(mine: Holding, holdings: Sequence[Holding], num_layers: int, _: BalanceConfig) -> Span | None:
    """IN-R06: if no stage has less to do than mine, the stage that has most to do; an empty one beats all.

    Stages are the spans that are held, and the gaps. Beyond the source: equal loads move no node.
    """
    loads = dict.fromkeys(gaps(coverage(holdings, num_layers)), math.inf)
    for holding in holdings:
        loads[holding.span] = loads.get(holding.span, 0.0) + holding.load.sessions + holding.load.queue
    most = max(loads, key=lambda span: (loads[span], span))
    has_least = loads[mine.span] == min(loads.values())
    return most if has_least and loads[most] > loads[mine.span] else None


def holds_claim(mine: Holding, holdings: Sequence[Holding], num_layers: int, period: int, rules: BalanceConfig) -> bool:
    """Whether `mine` is the one that may move in this period, among all that these records suggest moves to.

    In order of hash, a node gets the claim unless one before it leaves, or goes to, a span that overlaps its own.
    """
    left: list[Span] = []
    reached: list[Span] = []
    for holding in sorted(holdings, key=lambda holding: _lot(period, holding.node)):
        move = propose(holding, holdings, num_layers, rules)
        if move is None or _overlaps(move.source, left) or _overlaps(move.target, reached):
            continue
        if holding == mine:
            return True
        left.append(move.source)
        reached.append(move.target)
    return False


def _lot(period: int, node: NodeId) -> bytes:
    return hashlib.sha256(f"{period}/{node}".encode()).digest()


def _overlaps(span: Span, others: Sequence[Span]) -> bool:
    return any(span.overlaps(other) for other in others)


def _reason(move: Move, holdings: Sequence[Holding], num_layers: int) -> str:
    counts = coverage(holdings, num_layers)
    here = min(counts[move.source.start : move.source.end])
    there = min(counts[move.target.start : move.target.end])
    return f"layers {move.target} are held {there} times and limit the swarm; layers {move.source} {here} times"
