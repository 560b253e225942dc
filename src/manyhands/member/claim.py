"""Which layers a member hosts first: it chooses, says so, and looks again after others had time to say the same."""

import asyncio
import time
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from manyhands.aside import aside
from manyhands.core import NodeId
from manyhands.member.company import company_of
from manyhands.place.joining import Share, share_of
from manyhands.place.measure import measured_speed
from manyhands.place.strategy import UNKNOWN_LAYER_S, Holding, SpanChoice, choose_span

if TYPE_CHECKING:
    from manyhands.member.hosting import Hosting

MAX_ROUNDS = 5  # of claiming: each time a node with a lower id was faster


async def claim(hosting: "Hosting") -> SpanChoice:
    """The span to host, announced so that others choose something else. Raises BadRequest if no layer fits."""
    config = hosting.member.config
    pinned, why = config.span, "as --layers (or swarm.nodes) says"
    if pinned is None and hosting.weights.part is not None:
        pinned, why = hosting.weights.here, "the folder holds these"
    if pinned is not None:
        hosting.budget.check(pinned)
        hosting.announce(pinned)
        return SpanChoice(pinned, why)
    seniors, layer_s = {record.node for record in hosting.records()}, await _own_layer_s(hosting)
    choice = await _choose(hosting, seniors, layer_s)
    for _ in range(MAX_ROUNDS):
        hosting.announce(choice.span)
        if not hosting.member.edges():
            break
        await asyncio.sleep(config.settle_s)
        seniors |= {record.node for record in hosting.records() if record.node < hosting.member.id}
        if (again := await _choose(hosting, seniors, layer_s)).span == choice.span:
            break
        choice = again
    return choice


async def _own_layer_s(hosting: "Hosting") -> float:
    """What a layer takes here, before any is loaded. Measured where the strategy asks for it: seconds, once a day."""
    if hosting.member.config.strategy != "measured":
        return UNKNOWN_LAYER_S
    speed = await asyncio.to_thread(measured_speed, hosting.weights.checkpoint(), hosting.home, time.time())
    return speed.layer_s


async def _choose(hosting: "Hosting", seniors: Collection[NodeId], layer_s: float) -> SpanChoice:
    """What helps most beside what others serve, or claim with more right: they came first, or have the lower id."""
    config, me, budget = hosting.member.config, hosting.member.id, hosting.budget
    others = [h for h in hosting.holdings() if h.node != me and (h.is_ready or h.node in seniors)]
    share = await _share(hosting, others, layer_s)
    choice = choose_span(
        hosting.weights.shape,
        others,
        config.memory_bytes - budget.kept_bytes - budget.own_bytes(()),
        tokens=budget.tokens,
        max_pipes=config.max_pipes,
        with_ends=hosting.with_ends,
        files=hosting.weights.here,
        share=share.num_layers if share else 0,
    )
    return choice if share is None else SpanChoice(choice.span, f"{choice.why} ({share.why})")


async def _share(hosting: "Hosting", others: Sequence[Holding], layer_s: float) -> Share | None:
    """As share_of; a plan is searched for beside the event loop: a second, for many nodes."""
    strategy, shape, tokens = hosting.member.config.strategy, hosting.weights.shape, hosting.budget.tokens
    if strategy == "cover":
        return None
    return await aside(share_of, strategy, company_of(hosting, others, layer_s), shape, tokens)
