"""Faults for swarms in one process: nodes that die, freeze, dawdle or compute nonsense, and lines that misbehave.

faults = Faults()
async with memory_swarm(folder, "0-1,2-3,4-5", spares=["0-5"], wrap=faults.wrap) as swarm:
    faults.at("decode", swarm.hops[1], lambda: faults.die(swarm.hops[1]), skip=5)
    answer = await swarm.origin.complete(...)

Everything happens in wrapped transports and around a host's device; product code has no part in it. All nodes of the
swarm must be wrapped by the same Faults. Under the virtual clock (testing/clock.py) a slow hop costs no real time.

Poison "nan", "inf", "zero" and "scale" (x 1000) is noticed by its receiver (worker/bounds.py), "scale" once that has seen a
few rows of the session. "nudge" (x 1.5) gives plausible wrong numbers: these cannot be noticed without computing the same again
(docs/repair.md), so the answer is wrong and no repair happens.
"""

from collections.abc import Callable
from typing import cast

from manyhands.net.transport import Transport
from manyhands.origin.node import FullNode
from manyhands.testing.faulty_device import Poison, PoisonedModel, SlowDevice
from manyhands.testing.faulty_link import FaultyLink, FaultyTransport
from manyhands.testing.trouble import Change, Phase, Trigger, Trouble
from manyhands.wire.message import Lane, Step
from manyhands.worker.execute import Device, SpanModel


class Faults:
    """Makes nodes and lines misbehave; `trouble` is what is wrong. Each trigger fires once, each changed frame is one."""

    def __init__(self) -> None:
        self.trouble = Trouble()
        self._transports: list[FaultyTransport] = []

    def wrap(self, transport: Transport) -> FaultyTransport:
        """For the `wrap` of memory_swarm and memory_node."""
        self._transports.append(FaultyTransport(self.trouble, transport))
        return self._transports[-1]

    # -- nodes --------------------------------------------------------------------------------------------------------

    def die(self, node: FullNode) -> None:
        """As kill -9: every link breaks, nothing listens any more. For good."""
        self.trouble.dead.add(node.transport.node)
        for link in [link for link in self._links if link.owner == node.transport.node]:
            link.break_off("killed by the test")

    def freeze(self, node: FullNode) -> None:
        """As SIGSTOP: nothing leaves or arrives, no ping is answered, and the links stay open."""
        self.trouble.frozen.add(node.transport.node)

    def thaw(self, node: FullNode) -> None:
        """As SIGCONT: what waited goes on its way."""
        self.trouble.thaw(node.transport.node)
        for link in self._links:
            link.flush()

    @property
    def _links(self) -> list[FaultyLink]:
        return [link for transport in self._transports for link in transport.links]

    def slow(self, node: FullNode, seconds: float) -> None:
        """Every device step of the node takes so much longer (0: as before)."""
        for host in node.hosts:
            device = host.engine.device
            plain = device.plain if isinstance(device, SlowDevice) else device
            host.engine.device = cast(Device, SlowDevice(plain, seconds)) if seconds else plain

    def poison(self, node: FullNode, how: Poison) -> None:
        """What the node computes is spoiled from now on. Its spans must be loaded."""
        for host in node.hosts:
            assert host.engine.model is not None, "only a loaded span can be poisoned"
            host.engine.model = cast(SpanModel, PoisonedModel(host.engine.model, how))

    # -- lines --------------------------------------------------------------------------------------------------------

    def cut(self, sender: FullNode, receiver: FullNode, lane: Lane | None = None) -> None:
        """From now on nothing gets from `sender` to `receiver` (on one lane, or both); the other direction works."""
        self.trouble.cuts.add((sender.transport.node, receiver.transport.node, lane))

    def delay(self, sender: FullNode, receiver: FullNode, lane: Lane, seconds: float) -> None:
        """From now on what `sender` sends to `receiver` on a lane takes so long (pings aside)."""
        self.trouble.delays[sender.transport.node, receiver.transport.node, lane] = seconds

    def duplicate(self, sender: FullNode, receiver: FullNode, phase: Phase = "any", skip: int = 0) -> None:
        """One step from `sender` to `receiver` arrives twice."""
        self._change(sender, receiver, phase, skip, Change(lambda step: [step, step]))

    def reorder(self, sender: FullNode, receiver: FullNode, phase: Phase = "any", skip: int = 0) -> None:
        """One step from `sender` to `receiver` is overtaken by the next (or comes late, if there is none)."""
        self._change(sender, receiver, phase, skip, Change(lambda step: [step], is_late=True))

    def corrupt(self, sender: FullNode, receiver: FullNode, phase: Phase = "any", skip: int = 0) -> None:
        """The tensor of one step from `sender` to `receiver` arrives as ones, bit by bit (NaN)."""
        self._change(sender, receiver, phase, skip, Change(lambda step: [_garbled(step)]))

    def misplace(self, sender: FullNode, receiver: FullNode, by: int, phase: Phase = "any", skip: int = 0) -> None:
        """One step from `sender` to `receiver` arrives with its position wrong by `by`."""
        self._change(
            sender, receiver, phase, skip, Change(lambda step: [step._replace(position=max(0, step.position + by))])
        )

    def drop(self, sender: FullNode, receiver: FullNode, phase: Phase = "any", skip: int = 0) -> None:
        """One step from `sender` to `receiver` never arrives."""
        self._change(sender, receiver, phase, skip, Change(lambda step: []))

    def _change(self, sender: FullNode, receiver: FullNode, phase: Phase, skip: int, change: Change) -> None:
        trigger = Trigger(phase, receiver.transport.node, skip, sender=sender.transport.node, change=change)
        self.trouble.triggers.append(trigger)

    # -- moments ------------------------------------------------------------------------------------------------------

    def at(self, phase: Phase, node: FullNode, action: Callable[[], object], skip: int = 0) -> None:
        """Call `action` just before a message of `phase` reaches `node`, letting `skip` of them pass."""
        self.trouble.triggers.append(Trigger(phase, node.transport.node, skip, action))


def _garbled(step: Step) -> Step:
    if step.payload is None:
        return step
    return step._replace(payload=step.payload._replace(data=b"\xff" * len(step.payload.data)))
