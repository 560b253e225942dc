"""The conversations of one origin whose caches are parked on the hops they ran over (worker/parking.py). Pure.

    a request ends ─► add          the next one ─► find: the longest common prefixes of ids, of the same tenant

A conversation here is a claim, not a fact: hops may have dropped what was parked. They say so when a session is opened.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from manyhands.core import Exactness, NodeId, SessionId, Span
from manyhands.origin.lossy import Lossy
from manyhands.route.search import Offer
from manyhands.worker.batch import WINDOW_ROWS

# How many there may be: of one tenant, and of all; and token ids of all of them together (4 bytes each).
MAX_PER_TENANT: Final = 32
MAX_CONVERSATIONS: Final = 256
MAX_IDS: Final = 4 << 20
# A shorter prefix is not worth a choice of route: so many rows of a step cost about what one does.
MIN_PREFIX: Final = WINDOW_ROWS
# Of those with something in common with a prompt: the route of the first may be too slow by now.
MAX_FOUND: Final = 3
# A conversation that has rested longer is not looked for any more: a minute before the hops drop it.
MAX_AGE_S: Final = 540.0


@dataclass(eq=False, frozen=True, slots=True)
class ParkedConversation:
    """Positions of `ids` that every hop of `route` has cached under `name`, and how exact what computed them was.

    `tenant`: whose it is. Only requests of the same tenant may go on with it, and where rows were `lossy`, only those that
    allow it.
    """

    tenant: str
    name: SessionId
    ids: NDArray[np.int32]
    route: tuple[Offer, ...]
    exactness: Exactness = "E0"
    lossy: Lossy | None = None


class Prefix(NamedTuple):
    """What a prompt has in common with a conversation: its first `length` ids, fewer than the prompt has."""

    conversation: ParkedConversation
    length: int


class Conversations:
    """Those of one model, the least recently used first. What `add` and `expire` return is to be closed on its hops."""

    def __init__(self) -> None:
        self._used_at: dict[ParkedConversation, float] = {}

    def __len__(self) -> int:
        return len(self._used_at)

    @property
    def num_ids(self) -> int:
        return sum(conversation.ids.size for conversation in self._used_at)

    def add(self, new: ParkedConversation, now: float) -> list[ParkedConversation]:
        """Remember a conversation that was parked at `now`; return those that it replaces, or that are too many or too old.

        One of the same tenant that is a prefix of the new one can win nothing any more.
        """
        gone = [old for old in self._used_at if old.tenant == new.tenant and _is_prefix(old.ids, new.ids)]
        gone += [old for old, used_at in self._used_at.items() if used_at + MAX_AGE_S <= now and old not in gone]
        for old in gone:
            del self._used_at[old]
        self._used_at[new] = now
        mine = [one for one in self._used_at if one.tenant == new.tenant]
        gone += [self.lose(old) for old in mine[: max(0, len(mine) - MAX_PER_TENANT)]]
        while self._used_at and (len(self) > MAX_CONVERSATIONS or self.num_ids > MAX_IDS):
            gone.append(self.lose(next(iter(self._used_at))))
        return gone

    def find(self, tenant: str, prompt: Sequence[int], now: float, *, allows_loss: bool = False) -> list[Prefix]:
        """The conversations of `tenant` with most in common with `prompt`, most first, of several with as much the newest: one
        of a route, MAX_FOUND at most, none that has not enough."""
        ids = np.array(prompt[:-1], np.int32)  # the last position is always computed: its row draws the first token
        best: dict[tuple[tuple[NodeId, Span], ...], Prefix] = {}
        for one, used_at in self._used_at.items():
            is_admitted = one.tenant == tenant and (one.lossy is None or allows_loss)
            if is_admitted and used_at + MAX_AGE_S > now:
                length, way = common_prefix(one.ids, ids), tuple([(hop.node, hop.info.span) for hop in one.route])
                if length >= MIN_PREFIX and (way not in best or length >= best[way].length):
                    best.pop(way, None)  # to its end
                    best[way] = Prefix(one, length)
        newest_first = [*best.values()][::-1]
        return sorted(newest_first, key=lambda prefix: -prefix.length)[:MAX_FOUND]

    def use(self, conversation: ParkedConversation, now: float) -> None:
        """A request goes on with it: it is the newest now."""
        if self._used_at.pop(conversation, None) is not None:
            self._used_at[conversation] = now

    def lose_over(self, node: NodeId) -> list[ParkedConversation]:
        """Forget those whose route has a hop on `node`, and return them."""
        return [self.lose(one) for one in list(self._used_at) if any(hop.node == node for hop in one.route)]

    def lose(self, conversation: ParkedConversation) -> ParkedConversation:
        """Forget it, and return it."""
        self._used_at.pop(conversation, None)
        return conversation


def common_prefix(a: NDArray[np.int32], b: NDArray[np.int32]) -> int:
    """How many of the first ids are equal."""
    size = min(a.size, b.size)
    differ = np.flatnonzero(a[:size] != b[:size])
    return int(differ[0]) if differ.size else size


def _is_prefix(old: NDArray[np.int32], new: NDArray[np.int32]) -> bool:
    return common_prefix(old, new) == old.size
