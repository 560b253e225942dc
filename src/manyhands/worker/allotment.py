"""How much of something peers may cause at once: so many each, so many together. Pure."""

from collections import Counter
from collections.abc import Hashable, Iterator
from contextlib import contextmanager

from manyhands.core import NodeId
from manyhands.errors import Busy


class Allotment:
    """Counts the distinct things that peers use: a peer that asks again for one that it uses adds nothing.

    `what` names them in the refusal.
    """

    def __init__(self, what: str, per_peer: int, total: int) -> None:
        self._what, self._per_peer, self._total = what, per_peer, total
        self._used: dict[NodeId, Counter[Hashable]] = {}

    def __repr__(self) -> str:
        return f"<Allotment {self.num_used} of {self._total} {self._what}>"

    @property
    def num_used(self) -> int:
        return sum(map(len, self._used.values()))

    @contextmanager
    def use(self, peer: NodeId, thing: Hashable) -> Iterator[None]:
        """Count `thing` for `peer` within the block. Raises Busy at a limit."""
        mine = self._used.get(peer, Counter[Hashable]())
        if thing not in mine and (len(mine) >= self._per_peer or self.num_used >= self._total):
            raise Busy(
                f"{len(mine)} {self._what} for this peer and {self.num_used} in all are under way, "
                f"at most {self._per_peer} and {self._total} may be: try again in some seconds"
            )
        mine[thing] += 1
        self._used[peer] = mine
        try:
            yield
        finally:
            mine[thing] -= 1
            if not mine[thing]:
                del mine[thing]
            if not mine:
                self._used.pop(peer, None)
