"""Which layers a member hosts first: it chooses, says so, and looks again after others had time to say the same."""

import asyncio
from collections.abc import Collection
from typing import TYPE_CHECKING

from manyhands.core import NodeId
from manyhands.place.strategy import SpanChoice, choose_span

if TYPE_CHECKING:
    from manyhands.member.hosting import Hosting

MAX_ROUNDS = 5  # of claiming: each time a node with a lower id was faster


async def claim(hosting: "Hosting") -> SpanChoice:
    """The span to host, announced so that others choose something else. Raises BadRequest if no layer fits."""
    config = hosting.member.config
    pinned, why = config.span, "as told (--layers, or swarm.nodes)"
    if pinned is None and hosting.weights.part is not None:
        pinned, why = hosting.weights.here, "the folder holds these"
    if pinned is not None:
        hosting.budget.check(pinned)
        hosting.announce(pinned)
        return SpanChoice(pinned, why)
    seniors = {record.node for record in hosting.records()}
    choice = _choose(hosting, seniors)
    for _ in range(MAX_ROUNDS):
        hosting.announce(choice.span)
        if not hosting.member.edges():
            break
        await asyncio.sleep(config.settle_s)
        seniors |= {record.node for record in hosting.records() if record.node < hosting.member.id}
        if (again := _choose(hosting, seniors)).span == choice.span:
            break
        choice = again
    return choice


def _choose(hosting: "Hosting", seniors: Collection[NodeId]) -> SpanChoice:
    """What helps most beside what others serve, or claim with more right: they came first, or have the lower id."""
    config, me = hosting.member.config, hosting.member.id
    return choose_span(
        hosting.weights.shape,
        [h for h in hosting.holdings() if h.node != me and (h.is_ready or h.node in seniors)],
        config.memory_bytes - hosting.budget.kept_bytes,
        tokens=hosting.budget.tokens,
        max_pipes=config.max_pipes,
        with_ends=hosting.with_ends,
        files=hosting.weights.here,
    )
