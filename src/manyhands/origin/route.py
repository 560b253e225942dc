"""The route of a session: what it asks of its hops, how its origin sees each of them, and how each is told of its place."""

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple

from manyhands.config import RequestConfig
from manyhands.core import EndsAt, ModelId, NodeId, PathKind, Precision, SamplingParams, SessionId, Span
from manyhands.net.transport import Link, try_send
from manyhands.origin.lossy import Lossy
from manyhands.origin.repair_plan import Slot
from manyhands.route.chunks import Stage, chunk_rows, first_rows
from manyhands.route.cost import HOP_OVERHEAD_S
from manyhands.route.search import Offer
from manyhands.wire.codec import as_sent, is_slow
from manyhands.wire.credit import Credits
from manyhands.wire.handle import adopted_name, proof_of
from manyhands.wire.message import STANDBY, Extend, Extended, Open, Opened, Payload, Retract, Step
from manyhands.wire.signed import UNSIGNED, Signer

MAX_SETBACKS: Final = 2


@dataclass(frozen=True, slots=True)
class Lease:
    """What a session asks of its hops."""

    model: ModelId
    precision: Precision
    capacity: int
    prompt_length: int
    path: PathKind
    ends: EndsAt
    sampling: SamplingParams | None  # given iff the last hop draws the tokens
    handle: bytes | None = None  # by which another origin may adopt the session (wire/handle.py)
    lossy: Lossy | None = None  # rows that are sent with loss; None: none
    attests: bool = False  # hops keep hashes of all rows, for an audit


@dataclass(slots=True)
class Hop:
    """One hop of an open route. `control` and `data` are this origin's links to it (data: None in the middle of a ring)."""

    offer: Offer
    control: Link
    data: Link | None
    credits: int
    outgoing: Credits = field(init=False)  # for Steps to it
    incoming: Credits = field(init=False)  # for Steps from it
    arithmetic: str = ""
    epoch: int = 0  # of the last Opened
    has_log: bool = True
    cached: int = 0  # positions that it began this epoch with, of those that it was asked for
    setbacks: int = 0  # how often these were fewer, or it could not go back, since a position came back that was new
    granted: int = 0  # positions of its lease, as it answered the last Extend; 0: not yet, in this epoch
    rounds: bool = False  # it said so
    is_whole: bool = True  # its cache holds the committed positions, or they are on their way
    is_rebuilding: bool = False  # they are on their way
    outbox: deque[Step] = field(default_factory=deque)
    _is_full: bool = False

    def __post_init__(self) -> None:
        self.renew()

    def renew(self) -> None:
        """Begin an epoch: nothing waits for it, nothing is in flight."""
        self.outgoing, self.incoming, self.granted, self.cached = Credits(self.credits), Credits(self.credits), 0, 0
        self.outbox.clear()

    def opened(self, message: Opened) -> None:
        """Note that the hop answered Opened: it has its place in the epoch."""
        self.arithmetic, self.epoch, self.has_log = message.arithmetic, message.epoch, message.has_log
        self.cached, self.rounds = message.cached, message.rounds

    def held(self) -> int:
        """Positions that it goes on from, if it is not whole. One that answers with fewer than were asked for time and again
        counts as empty."""
        return 0 if self.is_rebuilding or self.setbacks > MAX_SETBACKS else self.cached

    @property
    def links(self) -> tuple[Link, ...]:
        return (self.control,) if self.data is None else (self.control, self.data)

    def has_room(self) -> bool:
        """Whether fewer steps wait for credits than it has credits in all. If not, `has_room_again` is true once that is so."""
        self._is_full = len(self.outbox) >= self.credits
        return not self._is_full

    def has_room_again(self) -> bool:
        return self._is_full and self.has_room()

    def left_until(self, sent_until: int) -> int:
        """The end of what has left for it, of what was sent up to `sent_until`: the rest waits for its credits."""
        return self.outbox[0].position if self.outbox else sent_until

    def flush(self) -> int:
        """Send what waits, as far as credits allow; returns how many steps."""
        num_sent = 0
        while self.outbox and self.outgoing.take():
            assert self.data is not None
            try_send(self.data, self.outbox.popleft())
            num_sent += 1
        return num_sent


class Resume(NamedTuple):
    """Begin with the first `until` positions of what the hops of these indices have parked under `name`.

    With `handle` they are shown the proofs of that instead. `rows_from`: from there on the last hop sends the rows that it
    sent for them before, if it has them all.
    """

    name: SessionId
    until: int
    kept: Collection[int]
    handle: bytes | None = None
    rows_from: int | None = None

    def slots(self, hops: Sequence[Hop]) -> list[Slot]:
        """The places of these hops, all new."""
        kept = {index: self._slot(hops[index], is_last=index == len(hops) - 1) for index in self.kept}
        return [kept.get(index, Slot(hop.offer, None)) for index, hop in enumerate(hops)]

    def _slot(self, hop: Hop, *, is_last: bool) -> Slot:
        name = self.name if self.handle is None else proof_of(self.handle, hop.offer.node)
        slot = Slot(hop.offer, None, resume=name, resume_until=self.until)
        if is_last and self.rows_from is not None:
            return replace(slot, replay_from=self.rows_from, replay_until=self.until)
        return slot

    def begin(self, hops: Sequence[Hop]) -> int:
        """The hops have opened: where the session begins. Those that have less than half of what others have are not whole."""
        for hop in hops:
            hop.cached = min(hop.cached, self.until)
        if not (longest := max(hop.cached for hop in hops)):
            return 0
        for hop in hops:
            hop.is_whole = 2 * hop.cached >= longest
        return min(hop.cached for hop in hops if hop.is_whole)


@dataclass(slots=True)
class Route:
    """The hops of one session as they stand in `epoch`; a new epoch has a new list of hops."""

    session: SessionId
    signer: Signer
    lease: Lease
    credits: int  # steps that may be in flight to each hop
    hops: list[Hop]
    epoch: int = 0
    asked: int = 0  # positions that the hops were last asked to lease

    def retract(self, guess: int, position: int) -> None:
        """Have the hops drop what waits under guesses before `guess`, which begins at `position`. Not the first: the next step
        comes as soon."""
        for hop in self.hops[1:]:
            try_send(hop.control, Retract(self.session, self.epoch, guess, position))

    def extend(self, capacity: int) -> None:
        """Ask the hops for a lease of `capacity` positions."""
        if capacity != self.asked:
            for hop in self.hops:
                hop.granted = 0
        self.asked = capacity
        for hop in self.hops:
            try_send(hop.control, Extend(self.session, self.epoch, capacity))

    @property
    def not_extended(self) -> list[int]:
        """The hops that have not answered `extend` in this epoch."""
        return [index for index, hop in enumerate(self.hops) if not hop.granted]

    @property
    def full(self) -> list[int]:
        """The hops that have granted no more positions than the lease has, or have not answered."""
        return [index for index, hop in enumerate(self.hops) if hop.granted <= self.lease.capacity]

    def extended(self, message: Extended) -> bool:
        """A hop of this epoch has answered. Once all have, the lease is the least of theirs, and no more than was asked for.
        Returns whether it has grown by that."""
        if message.epoch != self.epoch:
            return False
        self.hops[message.hop].granted = message.capacity
        capacity = min(self.asked, *(hop.granted for hop in self.hops))
        if capacity <= self.lease.capacity:
            return False
        self.lease = replace(self.lease, capacity=capacity)
        return True

    @property
    def standby_capacity(self) -> int:
        """Positions that a standby has to lease: what the hops were asked for, whether they have it or not."""
        return max(self.asked, self.lease.capacity)

    @property
    def short(self) -> dict[int, int]:
        """The hops that do not hold the committed positions, with what they hold of them."""
        return {index: hop.held() for index, hop in enumerate(self.hops) if hop.is_rebuilding or not hop.is_whole}

    def begin_anew(self, first: int) -> set[Span]:
        """Hop `first` and those behind it were given rows that cannot be relied on: they hold nothing of use. Their spans."""
        for hop in self.hops[first:]:
            hop.is_whole, hop.cached = False, 0
        return {hop.offer.info.span for hop in self.hops[first:]}

    @property
    def logless(self) -> list[int]:
        """The hops that cannot replay."""
        return [index for index, hop in enumerate(self.hops) if not hop.has_log]

    def answered(self, slots: Sequence[Slot]) -> None:
        """All hops have opened: they are whole if each has the positions and the log that its place asks for."""
        places = list(zip(self.hops, slots, strict=True))
        for hop, slot in places:
            if hop.cached < slot.resume_until:
                hop.is_whole, hop.is_rebuilding, hop.setbacks = False, False, hop.setbacks + 1
        if all((hop.has_log or not slot.replay_until) and hop.cached >= slot.resume_until for hop, slot in places):
            for hop, slot in places:
                hop.is_whole, hop.is_rebuilding = True, slot.recomputes

    @property
    def rebuilding(self) -> frozenset[int]:
        """The hops that compute positions again."""
        return frozenset(index for index, hop in enumerate(self.hops) if hop.is_rebuilding)

    @property
    def needs_ends(self) -> bool:
        """Whether the first and the last hop must hold the model's ends."""
        return self.lease.ends == "edges"

    def index_of(self, span: Span) -> int | None:
        """The hop that serves exactly `span`."""
        return next((i for i, hop in enumerate(self.hops) if hop.offer.info.span == span), None)

    def node_of(self, hop: int) -> NodeId | None:
        """The node of hop `hop`; None if there is no such hop."""
        return self.hops[hop].offer.node if hop < len(self.hops) else None

    def is_from(self, hop: int, link: Link) -> bool:
        """Whether `link` leads to the node of hop `hop`: what others say in its name is dropped."""
        return hop < len(self.hops) and link.peer == self.hops[hop].offer.node

    @property
    def stated_s(self) -> float | None:
        """What a step of one row takes by what records and experience say of each hop, and by its round trip from here, which
        no leg of the route is longer than. None if of one hop nothing is known."""
        total_s = 0.0
        for hop in self.hops:
            if (layer_s := hop.offer.layer_s) is None:
                return None
            total_s += len(hop.offer.info.span) * layer_s + HOP_OVERHEAD_S + (hop.control.health.rtt_s or 0.0)
        return total_s

    @property
    def uplink_Bps(self) -> float | None:
        """What the link to hop 0 was measured to carry."""
        data = self.hops[0].data
        return None if data is None else data.line().uplink_Bps

    def settle(self) -> None:
        """All hops have opened: which boundaries are lossy is fixed by what each said, and by the link to hop 0."""
        if (lossy := self.lease.lossy) is not None and lossy.boundaries is None:
            ends = [hop.offer.info.span.end for hop in self.hops if hop.rounds]
            own = [0] if is_slow(self.uplink_Bps) and not self.needs_ends else []
            self.lease = replace(self.lease, lossy=replace(lossy, boundaries=frozenset([*own, *ends])))

    @property
    def boundaries(self) -> frozenset[int]:
        """The layers before which rows of the prompt come with loss (0: from here)."""
        lossy = self.lease.lossy
        return frozenset() if lossy is None or lossy.boundaries is None else lossy.boundaries

    def as_sent(self, payload: Payload, position: int) -> Payload:
        """Rows from `position` on as they leave for hop 0 (wire/codec.py)."""
        rounding = self.lease.lossy.at(0) if self.lease.lossy is not None else None
        return as_sent(payload, position, rounding, self.uplink_Bps)

    @property
    def row_bytes(self) -> int:
        """Bytes of a hidden state."""
        return self.hops[0].offer.info.hidden_size * (4 if self.lease.precision == "fp32" else 2)

    def chunk_rows(self, num_rows: int, config: RequestConfig) -> int:
        """Rows of one step of `num_rows` (route/chunks.py): at most prefill_chunk, and no more bytes than frame_bytes."""
        most = max(1, min(config.prefill_chunk, config.frame_bytes // self.row_bytes))
        return chunk_rows(num_rows, self._stages(), self.credits, most)

    def first_rows(self, num_rows: int, config: RequestConfig) -> int:
        """How many of a prompt's `num_rows` rows are sent right behind the Opens; may be 0."""
        return first_rows(num_rows, self.chunk_rows(num_rows, config), self.row_bytes, self._stages())

    def _stages(self) -> list[Stage]:
        return [Stage.of(hop.offer, hop.control.health.rtt_s) for hop in self.hops]

    def renew(self, hops: Sequence[Hop]) -> None:
        """Begin an epoch with these hops: nothing waits for them, nothing is in flight."""
        self.epoch += 1
        self.hops = list(hops)
        for hop in hops:
            hop.renew()

    def open_message(self, index: int, slot: Slot, control: Link) -> Open:
        """The signed Open for the node at the end of `control`: hop `index`, or its standby, in this epoch."""
        last = index == len(self.hops) - 1
        lease = self.lease
        ring = lease.path == "ring"
        message = Open(
            session=self.session,
            epoch=self.epoch,
            hop=index,
            num_hops=len(self.hops),
            model=lease.model,
            precision=lease.precision,
            span=slot.offer.info.span,
            capacity=self.standby_capacity if slot.emit_from == STANDBY else lease.capacity,
            prompt_length=lease.prompt_length,
            path=lease.path,
            ends=lease.ends,
            predecessor=self.hops[index - 1].offer.node if ring and index else self.signer.node,
            successor=self.hops[index + 1].offer.addr if ring and not last else None,
            sampling=lease.sampling if last else None,
            credits=self.credits,
            replay_from=slot.replay_from,
            replay_until=slot.replay_until,
            emit_from=slot.emit_from,
            origin=self.signer.node,
            to=control.peer,
            token=control.hello.token,
            serial=0,
            signature=UNSIGNED,
            resume=slot.resume,
            resume_until=slot.resume_until,
            adoption=self.adoption(control),
            rounding=lease.lossy.at(slot.offer.info.span.end) if lease.lossy is not None and not last else None,
            attests=lease.attests and lease.lossy is None,
        )
        return self.signer.sign(message)

    def adoption(self, control: Link) -> SessionId | None:
        """What the node at the end of `control` calls the session for who adopts it; None if it cannot be adopted."""
        return adopted_name(proof_of(self.lease.handle, control.peer)) if self.lease.handle is not None else None
