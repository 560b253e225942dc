"""What --memory leaves a member for spans, caches and logs, and the bounds that its worker gets of it."""

from collections.abc import Callable, Collection
from dataclasses import replace
from typing import TYPE_CHECKING

from manyhands.config import RequestConfig
from manyhands.core import Span
from manyhands.errors import BadRequest, ShardUnavailable
from manyhands.place.budget import MemoryBudget, own_layers
from manyhands.plain import size_of

if TYPE_CHECKING:
    from manyhands.member.config import MemberConfig
    from manyhands.member.hosting import Hosting
    from manyhands.place.shape import ModelShape
    from manyhands.worker.serve import SpanHost
    from manyhands.worker.worker import Worker


def budget_of(
    config: "MemberConfig", shape: "ModelShape", *, with_ends: bool, others: int, own: tuple[Span, ...]
) -> MemoryBudget:
    """Of a member that hosts layers of `shape`, keeps `own` ones, and holds `others` bytes of other models' ends and own
    layers. Raises BadRequest if the model has fewer layers than --can-load says."""
    if config.can_load > shape.num_layers:
        raise BadRequest(
            f"--can-load {config.can_load}: {shape.name} has {shape.num_layers} layers, give at most those"
        )
    tokens = min(config.tokens, shape.context)
    kept = shape.most_bytes(config.can_load, tokens)
    caches = kept - shape.most_bytes(config.can_load, 0)
    ends = others + (shape.ends_bytes if config.has_ends else 0)
    return MemoryBudget(shape, config.memory_bytes, tokens, with_ends, kept + ends, caches, own)


def own_spans(hosting: "Hosting") -> tuple[Span, ...]:
    """The layers of the hosted model that this node keeps for its own requests, if it is an origin of it."""
    request, num_layers = hosting.member.node.request, hosting.weights.shape.num_layers
    return tuple(own_layers(num_layers, request.own_first, request.own_last)) if hosting.with_ends else ()


def own_bytes(request: RequestConfig, shape: "ModelShape") -> int:
    """Bytes of the layers of a model of `shape` that its origin keeps for its own requests."""
    return sum(shape.span_bytes(span, 0) for span in own_layers(shape.num_layers, request.own_first, request.own_last))


def has_room(
    worker: "Worker", budget: MemoryBudget, span: Span, held: Collection[Span], gone: Collection["SpanHost"] = ()
) -> bool:
    """Whether `budget` holds `span` beside `held` and what sessions lease, but for those on the hosts `gone`."""
    leased = worker.caches.leased_bytes - sum(host.leases.leased_bytes for host in gone)
    return budget.fits(span, held) and leased <= budget.cache_bytes([*held, span], worker.config.log_bytes)


def beginning_of(span: Span, fits: Callable[[Span], bool]) -> Span | None:
    """As many of its first layers as fit; None if not one does."""
    beginnings = (Span(span.start, end) for end in range(span.end, span.start, -1))
    return next(filter(fits, beginnings), None)


def has_room_for_ends(worker: "Worker", budget: MemoryBudget, num_bytes: int, held: Collection[Span]) -> bool:
    """Whether `budget` holds so many more bytes of ends beside `held` and what sessions lease on them."""
    after = replace(budget, kept_bytes=budget.kept_bytes + num_bytes)
    fits = worker.caches.leased_bytes <= after.cache_bytes(held, worker.config.log_bytes)
    return fits and after.left_bytes(held) >= 0


def bound(worker: "Worker", budget: MemoryBudget, held: Collection[Span]) -> None:
    """Let caches and logs of all sessions have what `held` leave."""
    roomy, most_logs = budget.keeping_ends(held), worker.config.log_bytes
    worker.caches.limit(roomy.cache_bytes(held, most_logs))
    worker.logs.limit_bytes = roomy.log_bytes(held, most_logs)


def bound_for(worker: "Worker", budget: MemoryBudget, span: Span, held: Collection[Span]) -> None:
    """As `bound`, before `span` is loaded beside `held`. Raises ShardUnavailable if sessions lease more already."""
    most = budget.cache_bytes([*held, span], worker.config.log_bytes)
    if worker.caches.leased_bytes > most:
        raise ShardUnavailable(
            f"beside layers {span} --memory ({size_of(budget.memory_bytes)}) leaves {size_of(most)} for caches, and sessions "
            f"have leased {size_of(worker.caches.leased_bytes)}: try again when they have ended, or give more"
        )
    bound(worker, budget, [*held, span])


def measured_positions(worker: "Worker", host: "SpanHost") -> int:
    """How many positions the session may have by which the span of `host` is measured: what a lease could have.

    Raises BadRequest where no lease could have one. No lease counts that session, and what one takes whatever its length, the
    states of layers, is made at its first step: of a config with wide heads gigabytes.
    """
    found = host.leases.most(host.info.context_length)
    if not found:
        needed, room = size_of(host.leases.bytes_of(1), is_limit=True), size_of(worker.caches.limit_bytes)
        raise BadRequest(
            f"layers {host.info.span} take {needed} of cache for a session of one position, and --memory leaves {room} for "
            "caches: give more, or fewer layers"
        )
    return found


def kept(hosting: "Hosting") -> list[Span]:
    """What caches leave room for: what is in memory, what is being loaded, and what is to be loaded again."""
    held, coming = hosting.in_memory, hosting.dropped if hosting.coming is None else [hosting.coming]
    return [*held, *(span for span in coming if span not in held)]


def rebound(hosting: "Hosting") -> None:
    """Caches and logs get what spans leave now."""
    bound(hosting.member.node.worker, hosting.budget, kept(hosting))


def hold_ends(hosting: "Hosting", name: str, num_bytes: int) -> None:
    """Count the ends of another model and own layers of it (0: they are not held any more), which leave less for caches."""
    hosting.other_ends[name] = num_bytes
    rebound(hosting)
