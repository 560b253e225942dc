"""What befalls the swarm of a life of requests (request_lives.py): nodes, lines and devices fail, alone or together.

It begins at a drawn time or with a drawn message, while requests run. A node whose layers no other holds is rarely taken, and
then for less than the patience of a request; but for nonsense, of which docs/repair.md says what may come.
"""

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final, cast

from manyhands.core import NodeId, Span
from manyhands.errors import ModelError
from manyhands.origin.session import Session
from manyhands.testing.faults import Faults
from manyhands.testing.faulty_device import PoisonedModel
from manyhands.testing.faulty_link import FaultyLink
from manyhands.testing.swarm import node_id
from manyhands.testing.trouble import Change, Trouble
from manyhands.wire.message import Lane, Message
from manyhands.worker.execute import SpanModel

if TYPE_CHECKING:
    from tools.request_draws import Place
    from tools.request_lives import Life

# How many messages of a kind are let pass at most, before the one with which something begins.
MOMENTS: Final = {
    "Open": 12,
    "Opened": 12,
    "Step": 200,
    "Credit": 100,
    "Extend": 4,
    "Extended": 4,
    "Retract": 10,
    "Probe": 4,
    "Progress": 10,
    "Feed": 4,
    "Close": 4,
    "Fault": 4,
}
LAYERS: Final = 6  # of the model
SHORT_S: Final = 15.0  # half of a request's patience
LOOKS: Final = 100  # for requests that run, and between two of them
LOOK_S: Final = 0.1


def covers(spans: Sequence[Sequence[Span]]) -> bool:
    """Whether nodes of these spans hold every layer."""
    return all(any(span.start <= layer < span.end for mine in spans for span in mine) for layer in range(LAYERS))


class Moments(Trouble):
    """Trouble that calls what is `due` with a message: its kind, how many are let pass, what is called."""

    due: list[tuple[str, int, Callable[[], None]]]

    def notice(self, sender: NodeId, receiver: NodeId, message: Message) -> Change | None:
        kind, waiting, self.due = type(message).__name__, self.due, []
        for name, left, act in waiting:
            if name == kind and not left:
                act()
            else:
                self.due.append((name, left - (name == kind), act))
        return Trouble.notice(self, sender, receiver, message)


class Misfortune:
    """What befalls `life`, between `begin` and `end`, which mends what is not for good."""

    def __init__(self, life: "Life") -> None:
        self.faults, self._life, self._draw = Faults(), life, life.draw
        self.faults.trouble = self._moments = Moments()
        self._moments.due = []
        self._mends = list[Callable[[], object]]()

    def begin(self) -> None:
        draw, loop = self._draw, asyncio.get_running_loop()
        for _ in range(draw.choice([1, 1, 2, 2, 3, 4, 6])):
            some = partial(self._befall, draw.choice([1, 1, 1, 2]), draw.choice([0.0, 0.0, 0.001, 0.05]))
            if draw.random() < 0.7:
                kind = draw.choice([*MOMENTS])
                self._moments.due.append((kind, draw.randrange(MOMENTS[kind]), some))
            else:
                loop.call_later(draw.choice([draw.uniform(0, 0.5), draw.uniform(0, 2), draw.uniform(0, 5)]), some)

    def end(self) -> None:
        self._moments.due.clear()
        for mend in self._mends:
            mend()

    def _befall(self, count: int, within_s: float, looks: int = LOOKS) -> None:
        """So many things happen now, or in a moment, or once a request runs."""
        loop = asyncio.get_running_loop()
        if not self._sessions() and looks and not self._life.is_over:
            loop.call_later(LOOK_S, self._befall, count, within_s, looks - 1)
            return
        often = [self.kill] * 4 + [self.snap, self.part, self.delay] * 2
        kinds = [
            *often,
            self.freeze,
            self.slow,
            self.fail,
            self.poison,
            self.leave,
            self.switch,
            self.evict,
            self.forget,
        ]
        for _ in range(count):
            loop.call_later(within_s * self._draw.random(), self._draw.choice(kinds))

    # -- who and for how long -----------------------------------------------------------------------------------------

    def _sessions(self) -> list[Session]:
        return [session for origin in self._life.origins for session in origin.node.sessions.values()]

    def _victim(self, *, is_spared: bool = False) -> "Place | None":
        """A node, mostly one on the route of a request. Its layers are held by others too: always if `is_spared`."""
        able = [place for place in self._life.places if place.is_up and not place.is_leaving]
        used = {hop.offer.node for session in self._sessions() for hop in session.route.hops}
        if self._draw.random() < 0.85:
            able = [place for place in able if place.id in used] or able
        if not able or self._life.is_over:
            return None
        place = self._draw.choice(able)
        return place if self._is_spare(place) or (not is_spared and self._draw.random() < 0.2) else None

    def _is_spare(self, place: "Place") -> bool:
        others = [p.spans for p in self._life.places if p is not place and p.is_up and not p.is_leaving]
        return covers(others)

    def _pair(self) -> tuple[NodeId, NodeId]:
        """Two nodes that speak to each other, or any two."""
        ids = [place.id for place in self._life.places] + [o.node.transport.node for o in self._life.origins]
        one, other = self._draw.sample(ids, 2)
        if (sessions := self._sessions()) and self._draw.random() < 0.85:
            route = self._draw.choice(sessions).route
            ring = [route.signer.node, *(hop.offer.node for hop in route.hops), route.signer.node]
            at = self._draw.randrange(len(ring) - 1)
            one, other = ring[at : at + 2] if ring[at] != ring[at + 1] else (one, other)
        return (one, other) if self._draw.random() < 0.5 else (other, one)

    def _links(self, one: NodeId, other: NodeId, lane: Lane | None) -> list[FaultyLink]:
        links = [link for link in self.faults._links if {link.owner, link.peer} == {one, other}]
        return [link for link in links if lane in (None, link.lane) and not link.is_closed]

    def _name(self, node: NodeId) -> str:
        names = [place.name for place in self._life.places] + [o.node.name for o in self._life.origins]
        return next(name for name in names if node_id(name) == node)

    def _note(self, what: str) -> None:
        self._life.num_faults += 1
        self._life.tally[what.split()[0]] += 1
        self._life.told.append(f"{asyncio.get_running_loop().time():.3f} s: {what}")

    def _until(self, seconds: float, mend: Callable[[], object]) -> None:
        """Have `mend`, which may be called twice, called after so long, or at the end."""
        asyncio.get_running_loop().call_later(seconds, mend)
        self._mends.append(mend)

    # -- nodes --------------------------------------------------------------------------------------------------------

    def kill(self) -> None:
        if (place := self._victim()) is not None:
            seconds = self._draw.choice([0.2, 1.0, 5.0, SHORT_S, 200.0])
            seconds = seconds if self._is_spare(place) else min(seconds, SHORT_S)
            self._note(f"kill {place.name} for {seconds:g} s")
            self._down(place, seconds)

    def _down(self, place: "Place", seconds: float) -> None:
        assert place.node is not None
        place.is_up = False
        self.faults.die(place.node)
        self.faults.thaw(place.node)
        asyncio.get_running_loop().call_later(seconds, lambda: self._life.work(self._revive(place)))

    async def _revive(self, place: "Place") -> None:
        """Another process of the node, with nothing of what the last one knew."""
        if not self._life.is_over:
            await self._life.stop(place)
            self.faults.trouble.dead.discard(place.id)
        if not self._life.is_over:
            await self._life.start(place)

    def leave(self) -> None:
        """Drain and go."""
        if (place := self._victim(is_spared=True)) is not None:
            self._note(f"leave {place.name}")
            place.is_leaving = True
            self._life.work(self._leave(place, self._draw.choice([0.5, 5.0, 200.0])))

    async def _leave(self, place: "Place", seconds: float) -> None:
        node = place.node
        assert node is not None
        await node.worker.drain()
        if place.node is node and place.is_up and not self._life.is_over:
            self._down(place, seconds)

    def freeze(self) -> None:
        if (place := self._victim()) is not None and (node := place.node) is not None:
            seconds = self._draw.choice([0.3, 2.0, 5.0, 14.0])
            self._note(f"freeze {place.name} for {seconds:g} s")
            self.faults.freeze(node)
            self._until(seconds, lambda: self.faults.thaw(node))

    def switch(self) -> None:
        """Off, and on again."""
        if (place := self._victim(is_spared=True)) is not None and (node := place.node) is not None:
            seconds = self._draw.choice([0.5, 5.0, 12.0])
            self._note(f"switch {place.name} off for {seconds:g} s")
            node.worker.switch(on=False)
            self._until(seconds, lambda: node.worker.switch(on=True))

    def evict(self) -> None:
        """An origin uses a node no more, for a while."""
        if (place := self._victim(is_spared=True)) is not None:
            routes, seconds = self._draw.choice(self._life.origins).routes, self._draw.choice([0.5, 5.0, 12.0])
            self._note(f"evict {place.name} for {seconds:g} s")
            routes.evict(place.id)
            self._until(seconds, lambda: routes.readmit(place.id))

    def forget(self) -> None:
        """What is parked goes."""
        if (place := self._victim()) is not None and place.node is not None:
            self._note(f"forget {place.name}")
            for host in place.node.hosts:
                host.parking.clear()

    # -- devices ------------------------------------------------------------------------------------------------------

    def slow(self) -> None:
        if (place := self._victim()) is not None and (device := place.device) is not None:
            seconds, device.extra_s = self._draw.choice([1.0, 8.0]), self._draw.choice([0.05, 0.4, 2.0])
            self._note(f"slow {place.name} by {device.extra_s:g} s for {seconds:g} s")
            self._until(seconds, lambda: setattr(device, "extra_s", 0.0))

    def fail(self) -> None:
        """The next step, load or copy fails."""
        if (place := self._victim()) is not None and place.device is not None:
            self._note(f"fail {place.name}")
            place.device.failing = self._draw.choice(
                [ModelError("no room"), MemoryError("no memory"), OSError("no file")]
            )

    def poison(self) -> None:
        """Rows that are not finite."""
        if (place := self._victim(is_spared=True)) is None or place.node is None or self._draw.random() < 0.5:
            return
        self._note(f"poison {place.name}")
        self._life.poisoned.add(place.id)
        for host in place.node.hosts:
            if host.engine.model is not None and not isinstance(host.engine.model, PoisonedModel):
                plain = host.engine.model
                host.engine.model = cast(SpanModel, PoisonedModel(plain, "nan"))
                self._until(self._draw.choice([0.05, 1.0]), partial(_heal, host.engine, plain))

    # -- lines --------------------------------------------------------------------------------------------------------

    def snap(self) -> None:
        """Links between two nodes break, of one lane or both."""
        (one, other), lane = (
            self._pair(),
            self._draw.choice(cast("list[Lane | None]", ["control", "data", "data", None])),
        )
        if links := self._links(one, other, lane):
            self._note(f"snap {self._name(one)} {self._name(other)} {lane}")
            for link in links:
                link.break_off("snapped")

    def part(self) -> None:
        """Nothing comes through, one way or both; links that lost something so break in the end."""
        (one, other), lane = self._pair(), self._draw.choice(cast("list[Lane | None]", ["control", "data", None]))
        seconds, is_mutual = self._draw.choice([0.5, 2.0, 6.0, 14.0]), self._draw.random() < 0.5
        self._note(f"part {self._name(one)} {self._name(other)} {lane} for {seconds:g} s, mutually: {is_mutual}")
        cuts = {(one, other, lane), (other, one, lane)} if is_mutual else {(one, other, lane)}
        self.faults.trouble.cuts |= cuts

        def mend() -> None:
            if cuts & self.faults.trouble.cuts:
                self.faults.trouble.cuts -= cuts
                for link in self._links(one, other, lane):
                    link.break_off("parted")

        self._until(seconds, mend)

    def delay(self) -> None:
        """What goes one way on a lane takes longer, in order."""
        (one, other), lane = self._pair(), self._draw.choice(cast("list[Lane]", ["control", "data"]))
        seconds, more_s = self._draw.choice([0.5, 3.0, 20.0]), self._draw.choice([0.01, 0.1, 0.7, 3.0])
        self._note(f"delay {self._name(one)} {self._name(other)} {lane} by {more_s:g} s for {seconds:g} s")
        delays = self.faults.trouble.delays
        delays[one, other, lane] = more_s
        self._until(seconds, lambda: delays.pop((one, other, lane), None))


def _heal(engine: Any, plain: SpanModel) -> None:
    if isinstance(engine.model, PoisonedModel):
        engine.model = plain
