"""What a member does when it is asked to serve other layers: gathers its state, lets place/orders.py decide, and moves."""

from typing import TYPE_CHECKING

from manyhands.core import NodeId
from manyhands.errors import Conflict
from manyhands.place.orders import Standing, judge
from manyhands.wire.message import Reassign

if TYPE_CHECKING:
    from manyhands.member.hosting import Hosting


class ReassignHandler:
    """Call it with the node that asks, and its order. One ordered move in a period of the balance."""

    def __init__(self, hosting: "Hosting") -> None:
        self._hosting = hosting

    def __call__(self, asker: NodeId, order: Reassign) -> str:
        """Says what happens now; the move itself goes on in a task of the node. Raises as `judge`."""
        if self._hosting.member.is_leaving:
            raise Conflict(f"{self._hosting.member.config.name} is leaving")
        if self._hosting.is_lost:
            raise Conflict(f"the device of {self._hosting.member.config.name} computes no more: start it anew")
        if not judge(order, self._standing(asker, order)):
            return f"serves layers {order.span} already"
        self._hosting.balancer.note_move()
        self._hosting.member.start_until_leaving(self._move(asker, order))
        return f"moves to layers {order.span}"

    def _standing(self, asker: NodeId, order: Reassign) -> Standing:
        hosting, config = self._hosting, self._hosting.member.config
        return Standing(
            name=config.name,
            is_owner=asker == hosting.member.id,
            knows_asker=any(record.node == asker for record in hosting.member.records()),
            obeys=config.balance.obey,
            pinned=config.span,
            model=hosting.kind.model,
            precision=hosting.kind.precision,
            num_layers=hosting.weights.shape.num_layers,
            held=tuple(hosting.held),
            is_moving=hosting.is_moving,
            rests_s=hosting.balancer.moved_at_s + config.balance.period_s - hosting.member.clock(),
            has_room=hosting.budget.fits(order.span),
            is_needed=not hosting.may_move(order.span),
        )

    async def _move(self, asker: NodeId, order: Reassign) -> None:
        hosting = self._hosting
        name = next((record.name for record in hosting.member.records() if record.node == asker), asker[:12])
        try:
            await hosting.move(order.span, f"an operator at {name} asked for it", is_forced=order.is_forced)
        except Exception as error:  # what the machine refuses too: the node serves on
            hosting.note_failure(error)
