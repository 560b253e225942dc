"""Where others find a member: this machine's address, which may change while it runs; its relays, which may go away; iroh."""

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from itertools import islice, zip_longest
from typing import NamedTuple

from manyhands.aside import aside
from manyhands.core import NodeAddr
from manyhands.errors import BadRequest
from manyhands.member.config import MemberConfig
from manyhands.member.neighbours import relays_among
from manyhands.net.own_address import LOOPBACK, LOOPBACK_6, is_own, is_wildcard, on_default_route, reachable
from manyhands.net.relay.tunnel import relay_of, relayed
from manyhands.node import Node
from manyhands.swarm.record import Record

logger = logging.getLogger(__name__)

MAX_RECORDS = 256  # whose addresses may be relays
RETRY_S, MAX_RETRY_S = 1.0, 60.0  # between two tries to be found at a relay: doubled each time
# Looks without a default route until another address than the last counts: it may be that of a bridge (docker0).
UNROUTED_LOOKS = 5
LOOK_S, MAX_MISSES = 10.0, 2  # one that is away at so many looks in a row is replaced, if any relay would do


class _Seen(NamedTuple):
    """This machine's host, and whether that is on a default route; `other`: if not, the address on that of the other IP."""

    host: str
    is_routed: bool
    other: str | None

    def is_news(self, before: "_Seen") -> bool:
        """Whether the machine has another network than `before`, or has one again."""
        if self.host != before.host and self.host not in (LOOPBACK, LOOPBACK_6):
            return True
        if self.is_routed or before.is_routed:
            return self.is_routed and not before.is_routed
        return self.other is not None and self.other != before.other


class OwnAddresses:
    """`listen` first. `on_change` is called when `all` or `host` has changed after that. `notes`: lines for people.
    `records`: of the members by now, some of which may be relays."""

    def __init__(
        self,
        node: Node,
        config: MemberConfig,
        notes: list[str],
        on_change: Callable[[], None],
        records: Callable[[], Iterable[Record]],
    ) -> None:
        self._node, self._config, self._notes, self._on_change = node, config, notes, on_change
        self._records = records
        self._bound = config.listen
        self._relayed: list[NodeAddr] = []  # where a relay answered
        self._iroh: list[NodeAddr] = []
        self._away: dict[str, tuple[NodeAddr, ...]] = {}  # a note, and the relays of which one is still to answer
        self.host = ""  # of this machine, as others are told
        self._seen = _Seen("", False, None)  # at the last look
        self._num_unrouted = 0
        # Whether this machine's address is looked up, again and again: none was given.
        self.may_change = is_wildcard(config.listen) and (config.is_visitor or config.advertise is None)

    @property
    def all(self) -> tuple[NodeAddr, ...]:
        """The direct address first. A visitor has none."""
        direct = self._node.address
        return () if direct is None else (direct, *self._relayed, *self._iroh)

    async def listen(self) -> None:
        """Be reachable, a visitor excepted. A relay that was named and cannot be reached becomes a note. Raises BadRequest."""
        if self._config.is_visitor:
            self.host = reachable(self._bound).host
            return
        self._bound = await self._node.listen(self._config.listen)
        shown = self._config.advertise or reachable(self._bound)
        self._set_direct(NodeAddr(shown.host, shown.port or self._bound.port))  # before others can call
        if not self._config.is_one_relay_enough:  # else the nodes of the ticket, which may be silent: not waited for
            await self._ask_relays()
        if self._config.iroh_url is not None:
            self._iroh.append(await self._node.transport.listen(NodeAddr("iroh%0.0.0.0", 0)))

    async def look(self) -> bool:
        """See whether this machine has another address by now, which is told unless one was given; without a network the last
        one stays. Returns whether it has, or has a network again: what could not be dialled is to be dialled at once."""
        try:
            is_v6 = ":" in self._bound.host
            routed = await aside(on_default_route, is_v6=is_v6)
            host = routed or (await aside(reachable, NodeAddr("::" if is_v6 else "0.0.0.0", 0))).host
            other = None if routed else await aside(on_default_route, is_v6=not is_v6)
            self._note_bound(is_here=is_wildcard(self._bound) or await aside(is_own, self._bound.host))
        except (OSError, RuntimeError):  # no descriptor, or no thread, is free
            return False
        self._num_unrouted = 0 if routed else self._num_unrouted + 1
        if self._seen.host and 0 < self._num_unrouted < UNROUTED_LOOKS:
            host = self._seen.host
        seen, self._seen = self._seen, _Seen(host, routed is not None, other)
        if not self._seen.is_news(seen):
            return False
        if seen.host:
            self._node.setbacks.moved()
            self._node.watch.moved()
        if self.may_change and host not in (self.host, LOOPBACK, LOOPBACK_6):
            self._move(host)
        return bool(seen.host)

    def _note_bound(self, *, is_here: bool) -> None:
        """Tell people while the one address that is listened at is none of this machine's: other nodes call it in vain."""
        host = self._bound.host
        note = f"no node can call this one directly: this machine has not the address {host} now; leave --listen out"
        if is_here and note in self._notes:
            self._notes.remove(note)
        elif not (is_here or note in self._notes):
            self._notes.append(note)

    def _move(self, host: str) -> None:
        logger.info("this machine's address is %s now; it was %s", host, self.host)
        if self._config.is_visitor:
            self.host = host
        else:
            self._set_direct(NodeAddr(host, self._bound.port))
        self._on_change()

    def _relays(self) -> list[tuple[NodeAddr, ...]]:
        """Of each of these one is to answer."""
        relays = self._config.relays
        if self._config.is_one_relay_enough:
            return [relays] if relays else []
        return [(relay,) for relay in relays]

    async def _ask_relays(self) -> None:
        for relays in self._relays():
            try:
                self._relayed.append(await self._node.transport.listen(relayed(relays[0])))
            except BadRequest as error:
                self._away[f"not reachable by way of a relay: {error}"] = relays
        self._notes += self._away

    async def keep_relays(self) -> None:
        """Where none answered at the start: ask until one does. Where one is enough: ask it now, replace it when it is gone."""
        if self._config.is_one_relay_enough:
            await self._ask_relays()
            if self._relayed:
                self._on_change()
        await asyncio.gather(*(self._ask_again(relays, note, relays[0]) for note, relays in self._away.items()))
        while self._config.is_one_relay_enough and self._relayed:
            await self._until_away(lost := self._relayed[0])
            old = relay_of(lost)
            note = f"not reachable by way of the relay at {old}, which is away: another one is looked for"
            self._notes.append(note)
            await self._ask_again(self._config.relays, note, old)

    async def _until_away(self, addr: NodeAddr) -> None:
        misses = 0
        while misses < MAX_MISSES:
            await asyncio.sleep(LOOK_S)
            try:
                await self._node.transport.listen(addr)
                misses = 0
            except BadRequest:
                misses += 1

    async def _ask_again(self, relays: Sequence[NodeAddr], note: str, lost: NodeAddr) -> None:
        """Ask others than `lost` in turn, which is looked at each time, until one answers: it takes that one's place."""
        wait_s, tried, addr = RETRY_S, set[NodeAddr](), None
        while addr is None:
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, LOOK_S if tried else MAX_RETRY_S)
            other = next((relay for relay in self._candidates(relays) if relay not in {lost, *tried}), None)
            tried = set() if other is None else {other, *tried}
            for relay in (lost,) if other is None else (lost, other):
                try:
                    addr = await self._node.transport.listen(relayed(relay))
                    break
                except BadRequest as error:
                    logger.debug("no way by a relay yet: %s", error)
        self._notes.remove(note)
        self._relayed = [*(known for known in self._relayed if relay_of(known) != lost), addr]
        logger.info("reachable by way of %s", addr)
        self._on_change()

    def _candidates(self, relays: Sequence[NodeAddr]) -> tuple[NodeAddr, ...]:
        """`relays`; where any would do, before them those that members of now may be: one address of each before others."""
        if not self._config.is_one_relay_enough:
            return tuple(relays)
        known = zip_longest(*(record.addresses for record in islice(self._records(), MAX_RECORDS)))
        found = (addr for addrs in known for addr in addrs if addr is not None)
        return (*relays_among(found, self._node.transport.node), *relays)

    def _set_direct(self, addr: NodeAddr) -> None:
        self.host = addr.host
        self._node.address = NodeAddr(addr.host, addr.port, self._node.transport.node)
