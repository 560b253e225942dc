"""An Open that is being carried out, and what must be true before it is."""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from manyhands.core import MAX_CREDITS, SessionId, Span, SpanInfo
from manyhands.errors import (
    Apart,
    BadRequest,
    Busy,
    ContextOverflow,
    ManyhandsError,
    ShardUnavailable,
    WeightsMismatch,
)
from manyhands.net.transport import Link, try_send
from manyhands.wire.codec import is_slow
from manyhands.wire.message import Fault, Open, Step
from manyhands.wire.rounding import Rounding
from manyhands.wire.signed import Serials, is_session_of, is_signed
from manyhands.worker.early import EarlySteps

if TYPE_CHECKING:
    from manyhands.worker.leases import Place
    from manyhands.worker.parking import Parked
    from manyhands.worker.serve import SpanHost
    from manyhands.worker.session import HopSession


@dataclass(eq=False, slots=True)
class Opening:
    """An Open that is being carried out, by `task`, which ends with it: overtaken, closed, or its origin gone."""

    message: Open
    origin: Link
    parked: "Parked | None" = None  # what it goes on with, also if that has lost its room to it
    task: "asyncio.Task[None] | None" = None
    early: EarlySteps = field(default_factory=EarlySteps)  # what came before it was carried out

    @property
    def place(self) -> tuple[SessionId, Span]:
        return self.message.session, self.message.span

    def check_early(self) -> None:
        """Raise Busy if rows came before this Open that are not here: their origin would wait for them in vain."""
        if self.early.is_short:
            raise Busy("the first rows came before this session was open, and are not held any more: open another one")

    def cancel(self) -> None:
        task, self.task = self.task, None  # which leads back here
        if task is not None:
            task.cancel()


def check_signed(message: Open, link: Link, serials: Serials) -> None:
    """Raise BadRequest unless the origin at the other end of `link` has signed this Open for this link, only now, and for a
    session of its own.

    `serials`: of the Opens that came on it before.
    """
    named = (message.origin, message.token) == (link.peer, link.greeting.token)
    if not named or not is_signed(message):
        raise BadRequest("this Open is not signed for this link by the node at its other end")
    if not is_session_of(message.session, message.origin):
        raise BadRequest("this session belongs to another node: open one of your own")
    if not serials.admit(message.serial):
        raise BadRequest(f"an Open of serial {message.serial} came before: sign another one")


def check_fits(message: Open, info: SpanInfo) -> None:
    """Raise WeightsMismatch or BadRequest unless `message` describes a place on this span."""
    if message.model != info.model or message.precision != info.precision:
        raise WeightsMismatch(
            f"hop {message.hop} holds {info.model_name} {info.model[:12]} in {info.precision}, "
            f"the request is for {message.model[:12]} in {message.precision}: serve the same weights and precision"
        )
    if not info.span.covers(message.span):
        raise BadRequest(f"hop {message.hop} holds layers {info.span}, not {message.span}")
    if message.hop >= message.num_hops or message.capacity < 1 or not 1 <= message.credits <= MAX_CREDITS:
        raise BadRequest(
            f"hop {message.hop} of {message.num_hops}, {message.capacity} positions, {message.credits} steps under way: "
            f"a hop is one of its route, a lease has a position or more, credits 1 to {MAX_CREDITS} steps"
        )
    if message.ends == "edges" and _lacks_ends(message, info):
        raise BadRequest(f"hop {message.hop} does not hold the model's ends: serve layers {info.span} with --ends")


def _lacks_ends(message: Open, info: SpanInfo) -> bool:
    """Whether `message` wants an embedding or a head that does not come with this span."""
    embeds = info.has_ends and info.span.start == 0
    draws = info.has_ends and info.span.end == info.num_layers
    return (message.hop == 0 and not embeds) or (message.hop == message.num_hops - 1 and not draws)


def check_again(message: Open, known: Sequence[Open]) -> None:
    """Raise BadRequest unless `message` may follow the Opens of the same place that came before it."""
    if any(message.epoch <= opened.epoch for opened in known):
        raise BadRequest(f"this session is open on layers {message.span} in epoch {known[-1].epoch} or later")


def hold(openings: Iterable[Opening], step: Step, link: Link) -> bool:
    """Keep a step that came over `link` for the one of `openings` that its place waits for; False if there is none."""
    for opening in openings:
        message = opening.message
        is_due = (message.session, message.hop, message.epoch) == (step.session, step.hop, step.epoch)
        if is_due and message.predecessor == link.peer:
            opening.early.add(step, link)
            return True
    return False


def check_lease(message: Open, leased: int) -> None:
    """Raise Busy if a place that is here, whose lease has `leased` positions now, has no room for those of `message`."""
    if leased < message.capacity:
        raise Busy(
            f"a lease of {leased} positions on layers {message.span} has no room for {message.capacity}; try another node"
        )


def check_room(message: Open, info: SpanInfo, most: int, free: int, sessions: int) -> None:
    """Raise ContextOverflow, ShardUnavailable or Busy if a span with so many sessions cannot take another: on the layers of
    `message` a lease may have `most` positions, and `free` now."""
    span, asked = message.span, message.capacity
    if asked > info.context_length:
        raise ContextOverflow(f"{asked} positions exceed the model's context of {info.context_length}")
    if asked > most:
        said = f"layers {span} have cache for {most} positions in all, {asked} are asked for"
        raise ShardUnavailable(f"{said}: lower max_tokens, or raise --cache-tokens or --memory there")
    if sessions >= info.max_sessions:
        raise Busy(f"layers {info.span} already serve {sessions} sessions, the limit; try another node or later")
    if asked > free:
        raise Busy(
            f"layers {span} have cache for {free} more positions, {asked} are asked for; try another node or later"
        )


def make_room(
    check: Callable[[], None],
    outlived: "list[tuple[Place, HopSession]]",
    free: "Callable[[Place, HopSession], None]",
) -> None:
    """Check; while there is no room, free what the session has outlived here, the oldest first. Raises as `check`.

    They stay where there is room: a place that begins takes over what they hold, and another plan may go back to one.
    """
    while True:
        try:
            return check()
        except Busy:
            if not outlived:
                raise
            free(*outlived.pop(0))


def rounding_of(message: Open, successor: Link) -> Rounding | None:
    """Which rows a place sends with loss. What is decided as the session opens holds for its life."""
    rounding = message.rounding
    if rounding is None or message.hop == message.num_hops - 1:
        return None
    return None if rounding.if_slow and not is_slow(successor.line().uplink_Bps) else rounding


async def open_within(limit_s: float, host: "SpanHost", opening: Opening, successor: Link) -> None:
    """Open. Raises Busy if the layers are not in memory by then; loading goes on."""
    try:
        async with asyncio.timeout(limit_s):
            await host.open(opening, successor)
    except TimeoutError as error:
        raise Busy(
            f"layers {host.info.span} were not loaded within {limit_s:g} s: loading goes on, try again in some seconds"
        ) from error


def cut_off(message: Open, error: Exception, blame: int | None) -> ManyhandsError:
    """What an Open fails with whose place cannot reach the next one (`blame`), or its origin."""
    kind = ShardUnavailable if blame is None else Apart
    why = str(error) or "no link within the time for one"
    return kind(f"its successor {message.successor or 'origin'} cannot be reached: {why}")


def refuse(message: Open, origin: Link, error: Exception, blame: int | None = None) -> None:
    """Answer an Open that is not carried out."""
    code = error.code if isinstance(error, ManyhandsError) else ManyhandsError.code
    said = str(error) or type(error).__name__
    try_send(origin, Fault(message.session, message.epoch, message.hop, code, said, blame))
