"""Orders: a member asks another one to serve other layers, and the other one decides by its own rules.

    ask ── Reassign ──► on_asked ─► obey (member/reassign.py: facts ─► judge) ─┬─► moves, make before break
    ask ◄─ Reassigned ─────────────────────────── what it does, or why not ◄────┘

Every member may ask; each node decides for itself. `judge` is pure. A flood of orders costs a node one decision in
PAUSE_S and a bounded number of short answers, and keeps out neither its owner nor another member.
"""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from typing import Final

from manyhands.core import ModelId, NodeId, Precision, Span
from manyhands.errors import BadRequest, Conflict, LinkClosed, ManyhandsError, ShardUnavailable, WeightsMismatch
from manyhands.net.transport import Link
from manyhands.node import Node
from manyhands.wire.message import Reassign, Reassigned

ANSWER_S: Final = 5.0  # for an answer, which is a decision and not a move
PAUSE_S: Final = 1.0  # between two orders of a node that are looked at
MAX_HASTY: Final = 16  # orders that are told so in a pause; more are not answered
MAX_ASKERS: Final = 8  # other nodes of which orders are looked at in a pause; those of more are as hasty as of one

_REFUSALS: Final[dict[str, type[ManyhandsError]]] = {e.code: e for e in (BadRequest, Conflict, WeightsMismatch)}

Obey = Callable[[NodeId, Reassign], str]  # begins to move and says so; raises ManyhandsError
_OTHERS: Final = NodeId("")  # all that are more than MAX_ASKERS


@dataclass(slots=True)
class _Pause:
    """Until when further orders of one asking node are hasty, and how many of its orders were."""

    until: float
    num_hasty: int = 0


@dataclass(frozen=True, slots=True)
class Standing:
    """The state of a node that is asked to move. `is_owner`: it asks itself, by its own gateway."""

    name: str
    is_owner: bool
    knows_asker: bool
    obeys: bool
    pinned: Span | None  # what its owner told it to host
    model: ModelId
    precision: Precision
    num_layers: int
    held: tuple[Span, ...]
    is_moving: bool
    rests_s: float  # until it may move again
    has_room: bool  # for the span that is asked for, once the old ones are gone
    is_needed: bool  # no other node serves what it would leave


def judge(order: Reassign, mine: Standing) -> bool:
    """Whether a move is to begin; False: the node serves these layers already.

    Raises WeightsMismatch for another model, BadRequest for layers that it does not have, Conflict for every other no.
    """
    if not mine.is_owner:
        _check_owners_will(mine)
    if (order.model, order.precision) != (mine.model, mine.precision):
        raise WeightsMismatch(
            f"{mine.name} hosts {mine.model[:12]} in {mine.precision}, not {order.model[:12]} in {order.precision}"
        )
    if order.span.end > mine.num_layers:
        raise BadRequest(f"layers {order.span} do not exist: the model has layers 0-{mine.num_layers - 1}")
    if order.span in mine.held:
        return False
    if mine.is_moving:
        raise Conflict(f"{mine.name} is moving already: ask again when it has arrived")
    if mine.rests_s > 0:
        raise Conflict(f"{mine.name} has moved just now: ask again in {mine.rests_s:.0f} s")
    if not mine.has_room:
        raise Conflict(f"{mine.name} has no room for layers {order.span}: ask for fewer, or give it more --memory")
    if mine.is_needed and not order.is_forced:
        held = ", ".join(map(str, mine.held))
        raise Conflict(
            f"no other node serves all of layers {held} that {mine.name} would leave: add a node first, or force it"
        )
    return True


def _check_owners_will(mine: Standing) -> None:
    """Raise Conflict unless the owner of this node lets others move it."""
    if mine.pinned is not None:
        raise Conflict(f"{mine.name} was started with --layers {mine.pinned}: only its own gateway moves it")
    if not mine.obeys:
        raise Conflict(f"{mine.name} takes no orders: its owner has set [balance] obey = false")
    if not mine.knows_asker:
        raise Conflict(f"{mine.name} does not share with the node that asks: check scope, allow and deny on both")


class Orders:
    """Orders that this node gives, and those that it gets."""

    def __init__(self) -> None:
        self._obey: Obey = _refuse
        self._numbers = count()
        self._asked: dict[int, tuple[Link, asyncio.Future[Reassigned | str]]] = {}
        self._me: NodeId | None = None
        self._pauses: dict[NodeId, _Pause] = {}

    def __repr__(self) -> str:
        return f"<Orders asked={len(self._asked)}>"

    def register(self, node: Node) -> None:
        """Take orders and their answers as they arrive on control links."""
        self._me = node.transport.node
        node.handle(Reassign, self.on_asked)
        node.handle(Reassigned, self.on_answer)
        node.observe_links(lost=self.on_lost)

    def decide_by(self, obey: Obey) -> None:
        """Let `obey` decide on the orders that arrive. Until then all are refused: the node serves what it was told to."""
        self._obey = obey

    async def ask(self, link: Link, model: ModelId, precision: Precision, span: Span, *, is_forced: bool) -> str:
        """Ask the node at `link` to serve `span`; returns what it says that it does. Deadline: ANSWER_S.

        Raises Conflict, BadRequest or WeightsMismatch as it refuses, ShardUnavailable if it does not answer.
        """
        number = next(self._numbers) % (1 << 32)
        answer: asyncio.Future[Reassigned | str] = asyncio.get_running_loop().create_future()
        self._asked[number] = (link, answer)
        try:
            async with asyncio.timeout(ANSWER_S):
                link.send(Reassign(number, model, precision, span, is_forced))
                told = await answer
        except (LinkClosed, TimeoutError) as error:
            raise ShardUnavailable(f"no answer within {ANSWER_S:g} s: {error or 'is it frozen?'}") from error
        finally:
            del self._asked[number]
        if isinstance(told, str):
            raise ShardUnavailable(f"no answer: {told}")
        if told.code is not None:
            raise _REFUSALS.get(told.code, Conflict)(told.detail)
        return told.detail

    def on_asked(self, order: Reassign, link: Link) -> bool:
        """Decide and answer, or, in a flood, neither."""
        now = asyncio.get_running_loop().time()
        pause, is_hasty = self._pause_of(link.peer, now)
        pause.num_hasty += is_hasty
        if pause.num_hasty > MAX_HASTY:
            return True
        try:
            if is_hasty:
                raise Conflict(f"asked again within {PAUSE_S:g} s: wait a moment")
            answer = Reassigned(order.request, None, self._obey(link.peer, order))
        except ManyhandsError as error:
            answer = Reassigned(order.request, error.code, str(error))
        with suppress(LinkClosed):
            link.send(answer)
        return True

    def _pause_of(self, asker: NodeId, now: float) -> tuple[_Pause, bool]:
        """The pause that an order of `asker` begins, or falls into."""
        self._pauses = {node: pause for node, pause in self._pauses.items() if now < pause.until}
        is_one_more = asker not in (*self._pauses, self._me) and len(self._pauses) >= MAX_ASKERS
        key = _OTHERS if is_one_more else asker
        if (pause := self._pauses.get(key)) is not None:
            return pause, True
        self._pauses[key] = _Pause(now + PAUSE_S)
        return self._pauses[key], is_one_more

    def on_answer(self, answer: Reassigned, link: Link) -> bool:
        """An answer without a question, or from another node, is ignored."""
        asked, future = self._asked.get(answer.request, (None, None))
        if future is not None and asked is link and not future.done():
            future.set_result(answer)
        return True

    def on_lost(self, link: Link, reason: str) -> None:
        for asked, future in self._asked.values():
            if asked is link and not future.done():
                future.set_result(reason)


def _refuse(_: NodeId, order: Reassign) -> str:
    raise Conflict(f"this node serves what it was told to (manyhands serve): restart it with --layers {order.span}")
