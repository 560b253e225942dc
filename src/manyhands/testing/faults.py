"""Faults for swarms in one process: nodes that die, freeze, dawdle or compute nonsense, and lines that misbehave.

faults = Faults()
async with memory_swarm(folder, "0-1,2-3,4-5", spares=["0-5"], wrap=faults.wrap) as swarm:
    faults.at("decode", swarm.hops[1], lambda: faults.die(swarm.hops[1]), skip=5)
    answer = await swarm.origin.complete(...)

Everything happens in wrapped transports and around a host's device; product code knows nothing of it. All nodes of the
swarm must be wrapped by the same Faults. Under the virtual clock (testing/clock.py) a slow hop costs no real time.

Poison "nan", "inf", "zero" and "scale" (x 1000) is noticed by whoever gets it (worker/bounds.py), "scale" once that has seen a
few rows of the session. "nudge" (x 1.5) gives plausible wrong numbers: nobody can notice those without computing the same again
(DESIGN §10, verification), so the answer is wrong and no repair happens.
"""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal, NoReturn, TypeVar, cast

from manyhands.core import ORIGIN_HOP, EdgeHealth, NodeAddr, NodeId
from manyhands.errors import LinkClosed
from manyhands.net.transport import Link, PongRoute, Transport
from manyhands.node import Node
from manyhands.testing.faulty_node import spoil
from manyhands.wire.message import Hello, Lane, Message, Open, Payload, Step
from manyhands.worker.execute import Device, Result, SpanModel, Work

T = TypeVar("T")
# opening: the first Open · prefill: rows nobody waits for · decode: one row that comes back · window: several such rows ·
# replay: an Open or a Step of a later epoch.
Phase = Literal["opening", "prefill", "decode", "window", "replay", "any"]
PHASES: tuple[Phase, ...] = ("opening", "prefill", "decode", "window", "replay")
Poison = Literal["nan", "inf", "scale", "zero", "nudge"]
# How long a frame that is to be overtaken waits for the next one.
OVERTAKE_S = 0.05


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


@dataclass(slots=True)
class _Trigger:
    """Calls `action` when a message of `phase` is about to reach `node`, after `skip` such messages."""

    phase: Phase
    node: NodeId
    skip: int
    action: Callable[[], object]
    sender: NodeId | None = None


@dataclass(slots=True)
class _Spoiler:
    """Takes the next step from one node to another and sends what `change` makes of it instead."""

    sender: NodeId
    receiver: NodeId
    phase: Phase
    change: Callable[["FaultyLink", Step], None]


@dataclass(slots=True)
class Faults:
    """What is wrong with which node. Each trigger and each spoiled frame happens once."""

    links: list["FaultyLink"] = field(default_factory=list)
    dead: set[NodeId] = field(default_factory=set)
    frozen: set[NodeId] = field(default_factory=set)
    fired: list[Phase] = field(default_factory=list)
    _cuts: set[tuple[NodeId, NodeId, Lane | None]] = field(default_factory=set)
    _delays: dict[tuple[NodeId, NodeId, Lane], float] = field(default_factory=dict)
    _triggers: list[_Trigger] = field(default_factory=list)
    _spoilers: list[_Spoiler] = field(default_factory=list)
    _thawed: asyncio.Event = field(default_factory=asyncio.Event)

    def wrap(self, transport: Transport) -> "FaultyTransport":
        """For the `wrap` of memory_swarm and memory_node."""
        return FaultyTransport(self, transport)

    # -- nodes --------------------------------------------------------------------------------------------------------

    def die(self, node: Node) -> None:
        """As kill -9: every link breaks, nobody listens any more. For good."""
        name = node.transport.node
        self.dead.add(name)
        for link in [link for link in self.links if link.owner == name]:
            link.break_off("killed by the test")

    def freeze(self, node: Node) -> None:
        """As SIGSTOP: nothing leaves or arrives, no ping is answered, and the links stay open."""
        self.frozen.add(node.transport.node)

    def thaw(self, node: Node) -> None:
        """As SIGCONT: what waited goes on its way."""
        self.frozen.discard(node.transport.node)
        self._thawed.set()
        self._thawed = asyncio.Event()
        for link in list(self.links):
            link.flush()

    def slow(self, node: Node, seconds: float) -> None:
        """Every device step of the node takes so much longer (0: as before)."""
        for host in node.hosts:
            device = host.engine.device
            plain = device.plain if isinstance(device, _SlowDevice) else device
            host.engine.device = cast(Device, _SlowDevice(plain, seconds)) if seconds else plain

    def poison(self, node: Node, how: Poison) -> None:
        """What the node computes is spoiled from now on. Its spans must be loaded."""
        for host in node.hosts:
            assert host.engine.model is not None, "only a loaded span can be poisoned"
            host.engine.model = cast(SpanModel, _Poisoned(host.engine.model, how))

    # -- lines --------------------------------------------------------------------------------------------------------

    def cut(self, sender: Node, receiver: Node, lane: Lane | None = None) -> None:
        """From now on nothing gets from `sender` to `receiver` (on one lane, or both); the other direction works."""
        self._cuts.add((sender.transport.node, receiver.transport.node, lane))

    def delay(self, sender: Node, receiver: Node, lane: Lane, seconds: float) -> None:
        """From now on what `sender` sends to `receiver` on a lane takes so long (pings aside)."""
        self._delays[sender.transport.node, receiver.transport.node, lane] = seconds

    def duplicate(self, sender: Node, receiver: Node, phase: Phase = "any", skip: int = 0) -> None:
        """One step from `sender` to `receiver` arrives twice."""

        def twice(link: "FaultyLink", step: Step) -> None:
            link.send_now(step)
            link.send_now(step)

        self._spoil(sender, receiver, phase, skip, twice)

    def reorder(self, sender: Node, receiver: Node, phase: Phase = "any", skip: int = 0) -> None:
        """One step from `sender` to `receiver` is overtaken by the next (or comes late, if there is none)."""
        self._spoil(sender, receiver, phase, skip, FaultyLink.hold_back)

    def corrupt(self, sender: Node, receiver: Node, phase: Phase = "any", skip: int = 0) -> None:
        """The tensor of one step from `sender` to `receiver` arrives as ones, bit by bit (NaN)."""

        def garble(link: "FaultyLink", step: Step) -> None:
            payload = step.payload
            if payload is not None:
                payload = Payload(payload.dtype, payload.width, b"\xff" * len(payload.data))
            link.send_now(step._replace(payload=payload))

        self._spoil(sender, receiver, phase, skip, garble)

    def misplace(self, sender: Node, receiver: Node, by: int, phase: Phase = "any", skip: int = 0) -> None:
        """One step from `sender` to `receiver` arrives with its position wrong by `by`."""

        def move(link: "FaultyLink", step: Step) -> None:
            link.send_now(step._replace(position=max(0, step.position + by)))

        self._spoil(sender, receiver, phase, skip, move)

    def drop(self, sender: Node, receiver: Node, phase: Phase = "any", skip: int = 0) -> None:
        """One step from `sender` to `receiver` never arrives."""
        self._spoil(sender, receiver, phase, skip, lambda link, step: None)

    def _spoil(
        self, sender: Node, receiver: Node, phase: Phase, skip: int, change: Callable[["FaultyLink", Step], None]
    ) -> None:
        names = sender.transport.node, receiver.transport.node
        spoiler = _Spoiler(*names, phase, change)
        self._triggers.append(_Trigger(phase, names[1], skip, lambda: self._spoilers.append(spoiler), names[0]))

    # -- moments ------------------------------------------------------------------------------------------------------

    def at(self, phase: Phase, node: Node, action: Callable[[], object], skip: int = 0) -> None:
        """Call `action` just before a message of `phase` reaches `node`, letting `skip` of them pass."""
        self._triggers.append(_Trigger(phase, node.transport.node, skip, action))

    def notice(self, link: "FaultyLink", message: Message) -> None:
        """A message is about to leave over a link: fire what was waiting for it."""
        phase = phase_of(message)
        if phase is None and not (isinstance(message, Step) and message.hop == ORIGIN_HOP):
            return
        for trigger in list(self._triggers):
            if trigger.node != link.peer or trigger.phase not in ("any", phase):
                continue
            if trigger.sender is not None and (trigger.sender != link.owner or not isinstance(message, Step)):
                continue
            if trigger.skip:
                trigger.skip -= 1
                continue
            self._triggers.remove(trigger)
            self.fired.append(trigger.phase)
            trigger.action()

    def take_spoiler(self, link: "FaultyLink", message: Message) -> _Spoiler | None:
        for spoiler in self._spoilers if isinstance(message, Step) else ():
            if (spoiler.sender, spoiler.receiver) == (link.owner, link.peer):
                self._spoilers.remove(spoiler)
                return spoiler
        return None

    def is_blocked(self, sender: NodeId, receiver: NodeId, lane: Lane) -> bool:
        """Whether what `sender` sends to `receiver` now does not arrive now."""
        return sender in self.frozen or receiver in self.frozen or self.is_cut(sender, receiver, lane)

    def is_cut(self, sender: NodeId, receiver: NodeId, lane: Lane) -> bool:
        return bool(self._cuts & {(sender, receiver, None), (sender, receiver, lane)})

    def delay_of(self, sender: NodeId, receiver: NodeId, lane: Lane) -> float:
        return self._delays.get((sender, receiver, lane), 0.0)

    async def until_thawed(self, *nodes: NodeId) -> None:
        while self.frozen.intersection(nodes):
            await self._thawed.wait()


class _Frozen(Exception):
    """Ends deliver, so that the next messages wait below until the thaw."""


class FaultyLink:
    """A Link (see transport.Link) of `owner` that does what Faults says. Closes the link it wraps."""

    def __init__(self, faults: Faults, owner: NodeId, link: Link) -> None:
        self.owner = owner
        self._faults, self._link = faults, link
        self._waiting: list[Message] = []  # sent while frozen
        self._received: Message | None = None  # the first that came while the owner was frozen
        self._held: Step | None = None
        self._end: str | None = None
        link.answer_pings_with(self._send_pong)
        faults.links.append(self)

    @property
    def peer(self) -> NodeId:
        return self._link.peer

    @property
    def hello(self) -> Hello:
        return self._link.hello

    @property
    def lane(self) -> Lane:
        return self._link.lane

    @property
    def health(self) -> EdgeHealth:
        return self._link.health

    @property
    def is_closed(self) -> bool:
        return self._end is not None or self._link.is_closed

    def send(self, message: Message) -> None:
        if self.is_closed:
            raise LinkClosed(self._end or self.health.last_error or "closed")
        self._faults.notice(self, message)
        spoiler = self._faults.take_spoiler(self, message)
        if self.is_closed:  # that was the moment to die
            return
        if spoiler is not None and isinstance(message, Step):
            spoiler.change(self, message)
            return
        delay_s = self._faults.delay_of(self.owner, self.peer, self.lane)
        if delay_s:
            asyncio.get_running_loop().call_later(delay_s, self.send_now, message)
        else:
            self.send_now(message)
        self._release()

    def send_now(self, message: Message) -> None:
        """Send without looking for faults of single frames."""
        if self._faults.is_cut(self.owner, self.peer, self.lane):
            return
        if self._is_blocked():
            self._waiting.append(message)
        elif not self._link.is_closed:
            self._link.send(message)

    def hold_back(self, step: Step) -> None:
        """Let the next message, or OVERTAKE_S, pass before this one."""
        self._held = step
        asyncio.get_running_loop().call_later(OVERTAKE_S, self._release)

    def _release(self) -> None:
        held, self._held = self._held, None
        if held is not None:
            self.send_now(held)

    def flush(self) -> None:
        """Send what waited for the thaw, or close if that was decided meanwhile."""
        if self._is_blocked():
            return
        waiting, self._waiting = self._waiting, []
        for message in waiting:
            if not self._link.is_closed:
                self._link.send(message)
        if self._end is not None:
            self._link.abort(self._end)

    def break_off(self, reason: str) -> None:
        self._end = self._end or reason
        self._link.abort(reason)

    async def drain(self) -> None:
        await self._link.drain()

    async def deliver(self, take: Callable[[Message], None]) -> NoReturn:
        while True:
            if self._received is not None:
                await self._faults.until_thawed(self.owner)
                message, self._received = self._received, None
                take(message)
            with suppress(_Frozen):
                await self._link.deliver(lambda message: self._hand_on(message, take))

    def _hand_on(self, message: Message, take: Callable[[Message], None]) -> None:
        if self.owner in self._faults.frozen:
            self._received = message
            raise _Frozen
        take(message)

    async def ping(self) -> float:
        await self._faults.until_thawed(self.owner, self.peer)
        if self._faults.is_cut(self.owner, self.peer, self.lane):
            await asyncio.Event().wait()
        return await self._link.ping()

    def answer_pings_with(self, pong: PongRoute) -> None:
        self._link.answer_pings_with(pong)

    def abort(self, reason: str) -> None:
        """A frozen node may give a link up; its peer cannot hear of it before the thaw."""
        self._end = self._end or reason
        if self.owner not in self._faults.frozen:
            self._link.abort(reason)

    async def aclose(self) -> None:
        self._end = self._end or "closed by this node"
        await self._link.aclose()

    def _send_pong(self, message: Message) -> None:
        if not self.is_closed:
            with suppress(LinkClosed):
                self.send_now(message)

    def _is_blocked(self) -> bool:
        return self._faults.is_blocked(self.owner, self.peer, self.lane)


class FaultyTransport:
    """A Transport (see transport.Transport) whose links do what Faults says."""

    def __init__(self, faults: Faults, transport: Transport) -> None:
        self._faults, self._transport = faults, transport

    @property
    def node(self) -> NodeId:
        return self._transport.node

    async def listen(self, addr: NodeAddr) -> NodeAddr:
        return await self._transport.listen(addr)

    async def accept(self) -> FaultyLink:
        while True:
            link = await self._transport.accept()
            if self.node not in self._faults.dead:
                return FaultyLink(self._faults, self.node, link)
            link.abort("dead")

    async def dial(self, addr: NodeAddr, lane: Lane) -> FaultyLink:
        await self._faults.until_thawed(self.node)
        link = await self._transport.dial(addr, lane)
        try:
            await self._faults.until_thawed(link.peer)
            if self._faults.is_cut(self.node, link.peer, lane) or self._faults.is_cut(link.peer, self.node, lane):
                await asyncio.Event().wait()
        except BaseException:
            link.abort("dial failed")
            raise
        if self._faults.dead & {self.node, link.peer}:
            link.abort("dead")
            raise LinkClosed(f"{addr} cannot be reached: nobody listens there")
        return FaultyLink(self._faults, self.node, link)

    async def aclose(self) -> None:
        await self._transport.aclose()


class _SlowDevice:
    """A Device that takes its time, on the loop's clock."""

    def __init__(self, plain: Device, seconds: float) -> None:
        self.plain, self._seconds = plain, seconds

    def run(self, function: Callable[[], T], *, is_short: bool = False) -> "asyncio.Future[T]":
        async def later() -> T:
            await asyncio.sleep(self._seconds)
            return await self.plain.run(function)

        return asyncio.ensure_future(later())

    def __getattr__(self, name: str) -> Any:
        return getattr(self.plain, name)


class _Poisoned:
    """A SpanModel whose results are spoiled."""

    def __init__(self, plain: SpanModel, how: Poison) -> None:
        self._plain, self._how = plain, how

    def run(self, works: Sequence[Work]) -> list[Result | Exception]:
        return [self._spoiled(result) for result in self._plain.run(works)]

    def _spoiled(self, result: Result | Exception) -> Result | Exception:
        if not isinstance(result, Result) or result.payload is None or result.payload.dtype == "int32":
            return result
        return result._replace(payload=spoil(result.payload, result.count, self._how))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._plain, name)
