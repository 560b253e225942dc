"""Which nodes and addresses could not be dialled lately, and how long they are not dialled. Pure: the time is an argument.

A record may name any address, also one that blackholes, or a machine that has nothing to do with the swarm. So a dial that
failed is remembered for the node *and* for its address: both are left alone for FIRST_S, twice as long after each further
failure, at most MAX_S, and forgotten after as long again (20 s at least). However many made-up keys name one address, a node
dials it no more often than that. An address where a link has proven one node is not dialled for another one while that link is
open, nor one that is being dialled for another.

When a link to a node opens, from either side, the node may be dialled again at once, and the address where it was last not
reached FIRST_S after that: no sooner, for a node may name an address that is not its own, and open links as often as it likes.

Where another node than the one that was meant proved its key, the address is left alone for all but that one: a member that
names the addresses of others in records of made-up keys keeps no node from them.
"""

import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from manyhands.core import NodeAddr, NodeId
from manyhands.errors import LinkClosed

FIRST_S = 5.0
MAX_S = 300.0
DIAL_S = 20.0  # a dial takes less: one that was begun when it was allowed, and failed, counts as a further failure
AGAIN_S = 1.0  # until an address that is being dialled for another node is asked about again
MAX_REMEMBERED = 8192  # nodes and addresses that failed, and addresses that are proven; the oldest are forgotten first
Endpoint = tuple[str, int]  # host and port
NO_ONE: Mapping[Endpoint, str] = {}


class _Failure(NamedTuple):
    """`node`: for which an address was dialled last, if that is known. `owner`: which proved its key there."""

    wait_s: float
    until: float
    node: NodeId | None
    owner: str | None = None


_NEVER = _Failure(0.0, -math.inf, None)


class Setbacks:
    """Failed dials of one node, and when it may dial again. `now`: seconds of a monotonic clock."""

    def __init__(self) -> None:
        self._failures: dict[NodeId | Endpoint, _Failure] = {}
        self._proven: dict[Endpoint, NodeId] = {}  # by links that are open
        self._dialled: dict[Endpoint, NodeId] = {}  # now, and for which node

    def __len__(self) -> int:
        return len(self._failures) + len(self._proven)

    def failed(
        self, node: NodeId | None, addrs: Iterable[NodeAddr], now: float, answered: Mapping[Endpoint, str] = NO_ONE
    ) -> None:
        """A dial of `node` at `addrs` failed, or a session could not be opened on it. None: another peer named the addresses,
        perhaps wrongly, so that only they are left alone. `answered`: which other nodes took the call."""
        meant = {(addr.host, addr.port): node or addr.node for addr in addrs}
        keys: list[NodeId | Endpoint] = [endpoint for endpoint in meant if endpoint not in self._proven]
        keys += [] if node is None else [node]
        for key in keys:
            wait_s = self._further_s(key, now)
            who = (None, None) if isinstance(key, str) else (meant[key], answered.get(key))
            self._failures[key] = _Failure(wait_s, now + wait_s, *who)
            if len(self._failures) > MAX_REMEMBERED:
                del self._failures[next(iter(self._failures))]

    def _further_s(self, key: NodeId | Endpoint, now: float) -> float:
        """Forget the last failure of `key`; returns how long it is left alone after one more."""
        waited_s, until, *_ = self._failures.pop(key, _Failure(0.0, now, None))
        return FIRST_S if now >= until + max(waited_s, DIAL_S) else min(MAX_S, max(FIRST_S, 2 * waited_s))

    def began(self, node: NodeId, addr: NodeAddr) -> None:
        """`node` is dialled at `addr` from now on, until `ended`."""
        self._dialled[addr.host, addr.port] = node

    def ended(self, addr: NodeAddr) -> None:
        """The dial of `addr` is over, whatever came of it."""
        self._dialled.pop((addr.host, addr.port), None)

    def reached(self, node: NodeId, addr: NodeAddr | None = None) -> None:
        """A link to `node` is open; `addr`: where it was dialled."""
        self._failures.pop(node, None)
        for key, (wait_s, until, meant, owner) in self._failures.items():
            if meant == node:
                self._failures[key] = _Failure(FIRST_S, until - wait_s + FIRST_S, node, owner)
        if addr is not None:
            self.answered(addr)
            self._proven.pop((addr.host, addr.port), None)
            self._proven[addr.host, addr.port] = node
            if len(self._proven) > MAX_REMEMBERED:  # a peer may be dialled under any number of names
                del self._proven[next(iter(self._proven))]

    def moved(self) -> None:
        """This machine has another network: what failed over the last one may be dialled over this one."""
        self._failures.clear()

    def answered(self, addr: NodeAddr) -> None:
        """A dial of `addr` led to a link."""
        self._failures.pop((addr.host, addr.port), None)

    def lost(self, node: NodeId) -> None:
        """The last link to `node` has ended: its addresses are not proven any more."""
        self._proven = {endpoint: owner for endpoint, owner in self._proven.items() if owner != node}

    def failing(self, now: float) -> set[NodeId | Endpoint]:
        """The nodes and addresses that are left alone."""
        return {key for key, failure in self._failures.items() if failure.until > now}

    def failing_s(self, node: NodeId, now: float) -> float:
        """For how long `node` is not to be dialled, at any address."""
        return max(0.0, self._failures[node].until - now) if node in self._failures else 0.0

    def wait_s(self, node: NodeId, addr: NodeAddr, now: float) -> float:
        """How long `node` is not to be dialled at `addr`; 0: it may be now."""
        endpoint = (addr.host, addr.port)
        owner = self._proven.get(endpoint)
        if owner not in (None, node):
            return MAX_S
        if self._dialled.get(endpoint, node) != node:
            return AGAIN_S
        there = self._failures.get(endpoint, _NEVER)
        ends = max(self._failures.get(node, _NEVER).until, there.until if there.owner != node else -math.inf)
        return max(0.0, ends - now)


def not_again(addr: NodeAddr, wait_s: float) -> LinkClosed:
    """What to raise instead of dialling `addr`."""
    return LinkClosed(f"{addr} could not be reached lately: it is dialled again in {wait_s:.0f} s at the earliest")
