"""What is wrong between the nodes of a swarm now, and what is to go wrong at which moment. Knows names, not nodes."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from manyhands.core import ORIGIN_HOP, NodeId
from manyhands.wire.message import Lane, Message, Open, Step

# opening: the first Open · prefill: rows without a reply · decode: one row that comes back · window: several such rows ·
# replay: an Open or a Step of a later epoch.
Phase = Literal["opening", "prefill", "decode", "window", "replay", "any"]
PHASES: tuple[Phase, ...] = ("opening", "prefill", "decode", "window", "replay")


def phase_of(message: Message) -> Phase | None:
    """What a request is doing when this is sent to a hop; None for what says nothing about it."""
    match message:
        case Open():
            return "opening" if message.epoch == 1 else "replay"
        case Step() if message.hop == ORIGIN_HOP:
            return None
        case Step() if message.epoch > 1:
            return "replay"
        case Step() if message.position < message.reply_from:
            return "prefill"
        case Step():
            return "decode" if message.count == 1 else "window"
        case _:
            return None


@dataclass(frozen=True, slots=True)
class Change:
    """What arrives instead of a step; `is_late`: after the next message."""

    make: Callable[[Step], Sequence[Step]]
    is_late: bool = False


@dataclass(slots=True)
class Trigger:
    """Fires once, when a message of `phase` is about to reach `node`, after `skip` such messages: calls `action`, or changes
    the message, which then is a step from `sender`."""

    phase: Phase
    node: NodeId
    skip: int
    action: Callable[[], object] = lambda: None
    sender: NodeId | None = None
    change: Change | None = None

    def concerns(self, sender: NodeId, receiver: NodeId, message: Message, phase: Phase | None) -> bool:
        if self.node != receiver or self.phase not in ("any", phase):
            return False
        return self.sender is None or (self.sender == sender and isinstance(message, Step))


@dataclass(slots=True)
class Trouble:
    """What the links and transports of one swarm ask before they do anything."""

    dead: set[NodeId] = field(default_factory=set)
    frozen: set[NodeId] = field(default_factory=set)
    cuts: set[tuple[NodeId, NodeId, Lane | None]] = field(default_factory=set)
    delays: dict[tuple[NodeId, NodeId, Lane], float] = field(default_factory=dict)
    triggers: list[Trigger] = field(default_factory=list)
    fired: list[Phase] = field(default_factory=list)
    _thawed: asyncio.Event = field(default_factory=asyncio.Event)

    def notice(self, sender: NodeId, receiver: NodeId, message: Message) -> Change | None:
        """A message is about to leave: fire what was waiting for it. Returns what becomes of the message, if it is changed."""
        phase = phase_of(message)
        if phase is None and not (isinstance(message, Step) and message.hop == ORIGIN_HOP):
            return None
        change: Change | None = None
        for trigger in list(self.triggers):
            if not trigger.concerns(sender, receiver, message, phase):
                continue
            if trigger.skip:
                trigger.skip -= 1
            elif change is None or trigger.change is None:  # a step is changed once
                self.triggers.remove(trigger)
                self.fired.append(trigger.phase)
                trigger.action()
                change = change or trigger.change
        return change

    def is_blocked(self, sender: NodeId, receiver: NodeId, lane: Lane) -> bool:
        """Whether what `sender` sends to `receiver` now does not arrive now."""
        return sender in self.frozen or receiver in self.frozen or self.is_cut(sender, receiver, lane)

    def is_cut(self, sender: NodeId, receiver: NodeId, lane: Lane) -> bool:
        return bool(self.cuts & {(sender, receiver, None), (sender, receiver, lane)})

    def thaw(self, node: NodeId) -> None:
        self.frozen.discard(node)
        self._thawed.set()
        self._thawed = asyncio.Event()

    async def until_thawed(self, *nodes: NodeId) -> None:
        while self.frozen.intersection(nodes):
            await self._thawed.wait()
