"""Layers that a node would load on demand (--can-load), and those that it has loaded so."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from manyhands.core import SpanInfo
from manyhands.errors import ShardUnavailable
from manyhands.wire.message import Open
from manyhands.worker.hosted import KnownSpan
from manyhands.worker.leases import CacheBudget
from manyhands.worker.serve import SpanHost

# Layers that were loaded on demand leave memory again when no session has used them for so long.
UNUSED_S: Final = 600.0


@dataclass(slots=True)
class Loadable:
    """Layers that a node would load on demand (`info.is_loaded` is false), `max_layers` at most; `hosts` serve those that it
    has loaded now."""

    known: KnownSpan
    max_layers: int
    hosts: list[SpanHost] = field(default_factory=list)

    @property
    def info(self) -> SpanInfo:
        return self.known.info

    def announced(self, caches: CacheBudget, tokens: int) -> SpanInfo:
        """As it is said to others: with the positions, `tokens` at most, that `caches` have free on as many layers as would
        still be loaded, the largest; 0 if there are none."""
        span, num_layers = self.info.span, self.max_layers - self.num_loaded
        each = self.known.position_bytes[span.start : span.end], self.known.state_bytes[span.start : span.end]
        position, session = (sum(sorted(sizes, reverse=True)[:num_layers]) for sizes in each)
        free = caches.free(position, session) if num_layers else 0
        return replace(self.info, free_tokens=min(tokens, free))

    def is_served_by(self, infos: Sequence[SpanInfo]) -> bool:
        """Whether one of `infos`, which this node serves, is all of it: of one span of a node the directory has one record."""
        kind, span = (self.info.model, self.info.precision), self.info.span
        return any((info.model, info.precision) == kind and info.span.covers(span) for info in infos)

    @property
    def num_loaded(self) -> int:
        """Layers that are loaded now, of at most `max_layers`."""
        return sum(len(host.info.span) for host in self.hosts)


def find_loadable(loadables: Sequence[Loadable], message: Open, name: str) -> Loadable | None:
    """What could be loaded to serve `message`. Raises ShardUnavailable if only the limit is in the way.

    `name`: of this node, for the error.
    """
    wanted = (message.model, message.precision)
    for loadable in loadables:
        if (loadable.info.model, loadable.info.precision) == wanted and loadable.info.span.covers(message.span):
            if loadable.num_loaded + len(message.span) > loadable.max_layers:
                raise ShardUnavailable(
                    f"{name} loads at most {loadable.max_layers} layers on demand and has loaded "
                    f"{loadable.num_loaded}; layers {message.span} are too many"
                )
            return loadable
    return None
