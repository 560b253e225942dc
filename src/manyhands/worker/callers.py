"""For whom a span has computed: sessions and rows by the origin that opened them (HN-34). Pure, and bounded."""

from dataclasses import dataclass
from typing import Final

from manyhands.core import NodeId

MAX_ORIGINS: Final = 256
REST: Final = NodeId("")  # all origins beyond them


@dataclass(slots=True)
class OriginUse:
    """What one origin has had of a span."""

    sessions: int = 0
    rows: int = 0


class Callers:
    """The first MAX_ORIGINS origins are counted apart, further ones as REST: identities cost a member nothing."""

    def __init__(self, max_origins: int = MAX_ORIGINS) -> None:
        self.uses: dict[NodeId, OriginUse] = {}
        self._max_origins = max_origins

    def opened(self, origin: NodeId) -> None:
        """A session has begun for it."""
        self._use(origin).sessions += 1

    def computed(self, origin: NodeId, rows: int) -> None:
        """So many rows were computed for it."""
        use = self.uses.get(origin) or self._use(origin)
        use.rows += rows

    def _use(self, origin: NodeId) -> OriginUse:
        use = self.uses.get(origin)
        if use is None:
            if len(self.uses) >= self._max_origins:
                origin = REST
            use = self.uses.setdefault(origin, OriginUse())
        return use
