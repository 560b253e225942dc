"""Whose fault a Fault is, and whether the session can go on without that hop. Pure."""

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from manyhands.core import ORIGIN_HOP, NodeId
from manyhands.errors import (
    AnsweredEarly,
    Apart,
    BadRequest,
    Busy,
    Corruption,
    Draining,
    LinkClosed,
    ManyhandsError,
    ModelError,
    PipelineAborted,
    PipelineStalled,
    ProtocolError,
    ShardUnavailable,
    StateGone,
    WeightsMismatch,
)
from manyhands.net.transport import Link
from manyhands.origin.route import Hop
from manyhands.wire.message import Fault

_ERRORS: dict[str, type[ManyhandsError]] = {
    e.code: e
    for e in (
        BadRequest,
        ModelError,
        WeightsMismatch,
        ShardUnavailable,
        Busy,
        Draining,
        PipelineStalled,
        PipelineAborted,
    )
}


# A request gives its hops few reasons to go far back: what a client had was guessed wrong, hops began at different positions.
MAX_STUCK: Final = 4


@dataclass(frozen=True, slots=True)
class Verdict:
    """Hop `at_fault` is to be replaced, for good if it `untrusted`, unless there is a `refusal`: that ends the session."""

    at_fault: int
    untrusted: bool
    refusal: ManyhandsError | None


class Blamed(NamedTuple):
    """A node that was lost for what it sent, or for what another says of it: `by` which (None: this origin); our link to it."""

    by: NodeId | None
    control: Link


@dataclass(slots=True)
class Told:
    """What the hops of a session said. `by`: of a node that was blamed, the one that blamed it. `lost`: those lost for that.
    `faulty`: of a node that called the running request faulty, its words. `stuck`: how often a node could not go back."""

    by: dict[NodeId, NodeId] = field(default_factory=dict)
    lost: dict[NodeId, Blamed] = field(default_factory=dict)
    stuck: Counter[NodeId] = field(default_factory=Counter[NodeId])
    faulty: dict[NodeId, ManyhandsError] = field(default_factory=dict)

    def may_stay(self, fault: Fault, hops: Sequence[Hop]) -> bool:
        """Whether this is a hop that could not go back so far, and may say from where it can. Else it is lost: a hop that says
        so once more before a new position has come back, or time and again."""
        if fault.code != StateGone.code:
            return False
        hop = hops[fault.hop]
        hop.setbacks += 1
        return self.may_go_back(hop.offer.node) and hop.setbacks == 1

    def accusers(self) -> set[NodeId]:
        """Nodes that have cost more than one other its place."""
        times = Counter(blamed.by for blamed in self.lost.values())
        return {by for by in times if by is not None and times[by] > 1}

    def forgive(self, untrusted: Collection[NodeId], *, is_new: bool = True) -> None:
        """Forget nodes that were lost for what others said, and not for what they sent: a new position came back, or (not
        `is_new`) our own link to them has closed since, so that they were gone."""
        self.lost = {
            node: blamed
            for node, blamed in self.lost.items()
            if node in untrusted or not (is_new or blamed.control.is_closed)
        }

    def may_go_back(self, node: NodeId) -> bool:
        """Note that a node could not go back so far, without need as it may be: once too often, and it is lost."""
        self.stuck[node] += 1
        return self.stuck[node] <= MAX_STUCK


class Doubt(NamedTuple):
    """What a hop says of steps or rows that cannot be. `is_misled`: of steps that came to it, not of rows that came back."""

    reason: str
    is_misled: bool


def doubt_of(fault: Fault) -> Doubt | None:
    """What casts doubt on hops beside the one that sent `fault`: others may be about to say the same, for the same reason, and
    only by all their words is known which is at fault (probe.py). None: `judge` says it."""
    if fault.code == AnsweredEarly.code:
        return Doubt(fault.detail, False)
    is_misled = fault.code == ProtocolError.code and fault.hop > 0 and fault.blame == fault.hop - 1
    return Doubt(fault.detail, True) if is_misled else None


def judge(fault: Fault, hops: Sequence[Hop], told: Told, *, is_running: bool) -> Verdict:
    """A hop's refusal to open ends the session; so does a running request that two nodes call faulty (one is replaced).

    A hop can name its neighbours only: a fault that names another is its own.
    """
    near = range(max(0, fault.hop - 1), min(len(hops), fault.hop + 2))
    at_fault = fault.blame if fault.blame is not None and fault.blame in near else fault.hop
    kind = _ERRORS.get(fault.code, PipelineAborted)
    blames_origin = fault.blame == ORIGIN_HOP and fault.hop == 0 and fault.code != LinkClosed.code
    offer = hops[at_fault].offer
    word = kind(f"{'the origin' if blames_origin else f'hop {at_fault} ({offer.name})'}: {fault.detail}")
    word.node = offer.node
    if at_fault != fault.hop:
        told.by[offer.node] = hops[fault.hop].offer.node
    if is_running and (blames_origin or (kind is BadRequest and fault.blame is None)):
        told.faulty[offer.node] = word
        return Verdict(at_fault, False, word if len(told.faulty) > 1 else None)
    if is_running or (fault.blame is not None and not blames_origin):
        untrusted = fault.blame is not None and fault.code in (Corruption.code, ProtocolError.code)
        return Verdict(at_fault, untrusted, None)
    return Verdict(at_fault, False, word)


def apart(fault: Fault, hops: Sequence[Hop]) -> NodeId | None:
    """The node of the next hop, if the one that sent this cannot reach it and the origin has a link to it; else None."""
    near = fault.hop + 1
    is_apart = fault.code == Apart.code and fault.blame == near < len(hops) and not hops[near].control.is_closed
    return hops[near].offer.node if is_apart else None
