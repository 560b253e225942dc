"""What a node may use of its machine, and which spans that holds with their cache. Pure."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Final

from manyhands.core import Span
from manyhands.errors import BadRequest
from manyhands.place.shape import ModelShape
from manyhands.place.strategy import layers_that_fit
from manyhands.plain import size_of

LOG_SHARE: Final = 4  # one part in so many of what weights leave may be output logs


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """`memory_bytes` for the model, all told. `tokens`: positions of cache to find room for on every layer.

    `with_ends`: the machine is an origin too. `kept_bytes`: for layers that may be loaded later (--can-load), of them
    `kept_cache_bytes` for their cache, and for ends that are held for other origins (--ends) or of other models. `own`: spans
    that are kept for this node's own requests, beside what is served; one that is served whole is not loaded again.
    """

    shape: ModelShape
    memory_bytes: int
    tokens: int
    with_ends: bool
    kept_bytes: int = 0
    kept_cache_bytes: int = 0
    own: tuple[Span, ...] = ()

    def cache_bytes(self, held: Collection[Span], most_logs: int) -> int:
        """For the caches of `held`, and of layers loaded later, together: what their weights and log_bytes(held, most_logs)
        leave."""
        return max(0, self._room(held) + self.kept_cache_bytes - self.log_bytes(held, most_logs))

    def log_bytes(self, held: Collection[Span], most: int) -> int:
        """For the output logs of all sessions: at most `most`, and no cache that `tokens` need."""
        spare = self._room(held) - sum(
            self.shape.span_bytes(s, self.tokens) - self.shape.span_bytes(s, 0) for s in held
        )
        return max(0, min(most, spare, self._room(held) // LOG_SHARE))

    def fits(self, span: Span, held: Collection[Span] = ()) -> bool:
        """Whether there is room for `span` beside `held`."""
        return self.left_bytes([*held, span]) >= 0

    def left_bytes(self, held: Collection[Span]) -> int:
        """What `held` leave, with their cache for `tokens` positions; below zero if they do not fit."""
        cache = sum(self.shape.span_bytes(s, self.tokens) - self.shape.span_bytes(s, 0) for s in held)
        return self._room(held) - cache

    def keeping_ends(self, held: Collection[Span]) -> "MemoryBudget":
        """With room for the ends, where `held` leave it: a member may be asked to answer later."""
        roomy = replace(self, with_ends=True)
        return roomy if roomy.left_bytes(held) >= 0 else self

    def check(self, span: Span) -> None:
        """Raise BadRequest unless the model has `span` and the budget holds it."""
        if span.end > self.shape.num_layers:
            raise BadRequest(f"--layers {span}: {self.shape.name} has layers 0-{self.shape.num_layers - 1}")
        if not self.fits(span):
            kept_bytes = self.kept_bytes + self.own_bytes([span])
            kept = f" ({size_of(kept_bytes)} of them for --can-load, --ends and own layers)" if kept_bytes else ""
            needed = self.shape.process_bytes + self.ends_bytes + kept_bytes + self.shape.span_bytes(span, self.tokens)
            raise BadRequest(
                f"layers {span} of {self.shape.name} take {size_of(needed)}{kept}, --memory is {size_of(self.memory_bytes)}: "
                "give more, or fewer layers"
            )

    @property
    def ends_bytes(self) -> int:
        """Bytes of the ends, if this machine is an origin; else 0."""
        return self.shape.ends_bytes if self.with_ends else 0

    def own_bytes(self, held: Collection[Span]) -> int:
        """Weights of the own layers that none of `held` has."""
        beside = (own for own in self.own if not any(span.covers(own) for span in held))
        return sum(self.shape.span_bytes(span, 0) for span in beside)

    def _room(self, held: Collection[Span]) -> int:
        """Bytes that are left beside the weights of `held`."""
        return (
            self.memory_bytes
            - self.shape.process_bytes
            - self.ends_bytes
            - self.kept_bytes
            - self.own_bytes(held)
            - sum(self.shape.span_bytes(s, 0) for s in held)
        )


def own_layers(num_layers: int, first: int, last: int) -> list[Span]:
    """The `first` and the `last` layers of a model, which an origin keeps for its own requests: one span if they meet."""
    first, last = min(first, num_layers), min(last, num_layers)
    if first + last >= num_layers and first and last:
        return [Span(0, num_layers)]
    return [Span(start, end) for start, end in ((0, first), (num_layers - last, num_layers)) if start < end]


def layers_in_reserve(available: int, shape: ModelShape, spans: Sequence[Span], tokens: int) -> int:
    """Layers, with a cache for `tokens` positions, that still fit into `available` bytes beside processes that each serve one
    of `spans`."""
    left = available - sum(shape.process_bytes + shape.span_bytes(span, tokens) for span in spans)
    return layers_that_fit(left + shape.process_bytes, shape, tokens)
