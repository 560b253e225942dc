"""Two searches of the DHT as pure state machines: the nodes nearest to a key, then the records that they hold.

The driver (backend.py) sends what `to_ask` returns and reports what came back. No clock, no network, no bytes.
"""

from bisect import insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from manyhands.core import NodeId
from manyhands.swarm.dht.table import Contact, K
from manyhands.swarm.directory import Peer

ALPHA = 3  # questions at a time (Kademlia's value), and one more for each that was not answered, up to
MAX_ALPHA = 12
MAX_ASKS = 96  # per lookup; an honest one in a swarm of 10,000 asks about 25 (bench/directory.py)
MAX_CANDIDATES = 4 * K  # a dishonest node may name nodes without end
MAX_WAYS = 4  # differing addresses of one candidate, each set named by another teller
MISLED = 4  # candidates of one teller that did not answer, none that did: its other ones are dropped
FETCH_TAGS = 11  # records per question: 11 of the largest (record.MAX_BYTES) fit into one answer


class _Way(NamedTuple):
    contact: Contact
    teller: int  # that named it so first; 0: our own table
    depth: int


@dataclass(slots=True)
class _Candidate:
    """One node. `ways`: as it was named, in the order in which it is asked; that of number `at` is its turn."""

    ways: list[_Way]
    at: int = 0
    state: str = "new"  # new -> asked (-> slow) -> answered | failed (-> new, if it is named elsewhere)

    @property
    def way(self) -> _Way:
        return self.ways[self.at]

    def takes(self, way: _Way) -> bool:
        """Whether this is a further place to ask the node at, and there is room for it."""
        is_known = any(way.contact.wire == known.contact.wire or way.teller == known.teller for known in self.ways)
        return not is_known and self.state != "answered" and len(self.ways) < MAX_WAYS

    def forget(self, teller: int) -> None:
        """Drop what `teller` named and that was not asked yet."""
        kept = self.at + (self.state != "new")
        self.ways = self.ways[:kept] + [way for way in self.ways[kept:] if way.teller != teller]
        if self.state == "new" and self.at == len(self.ways):
            self.state = "failed"


class Lookup:
    """The `k` live nodes nearest to `target`: ask the nearest known, learn nearer ones, until the k nearest answered.

    A candidate that fails leaves the list, unless another teller named it at other addresses: it is asked there then. A
    teller whose candidates do not exist loses its say, so a handful of false ones costs a few deadlines and does not end a
    lookup; nodes that exist and collude near a key can hide it.
    """

    def __init__(self, target: int, start: Iterable[Contact], *, own: int = 0, k: int = K) -> None:
        self.target = target
        self.num_asked = 0
        self._own = own
        self._k = k
        self._alpha = ALPHA
        self._num_open = 0  # asked or slow
        self._num_slow = 0
        self._candidates: dict[int, _Candidate] = {}
        self._order: list[tuple[int, int]] = []  # (distance, id) of candidates that may still count, nearest first
        self._credit: dict[int, int] = {}  # teller -> candidates that answered, minus those that did not
        for contact in start:
            self._add(contact, 0, 1)

    def to_ask(self) -> list[Contact]:
        """Whom to ask now; at most ALPHA questions are open, up to MAX_ALPHA where many died."""
        asks: list[Contact] = []
        num_near = 0  # a slow one keeps its place, but the next is asked too: the dead are not waited for one by one
        for _, node in self._order:
            if num_near >= self._k or self._num_open - self._num_slow >= self._alpha or self.num_asked >= MAX_ASKS:
                break
            candidate = self._candidates[node]
            num_near += candidate.state != "slow"
            if candidate.state == "new":
                candidate.state = "asked"
                self._num_open += 1
                self.num_asked += 1
                asks.append(candidate.way.contact)
        return asks

    def answered(self, node: int, told: Sequence[Contact]) -> None:
        """`node` answered and named at most k contacts (more are ignored)."""
        candidate = self._close(node, "answered")
        if candidate is None:
            return
        way = candidate.way
        self._credit[way.teller] = self._credit.get(way.teller, 0) + 1
        if self._credit.get(node, 0) > -MISLED:
            for contact in told[: self._k]:
                self._add(contact, node, way.depth + 1)

    def slow(self, node: int) -> None:
        """`node` has not answered for a while: another may be asked meanwhile."""
        candidate = self._candidates.get(node)
        if candidate is not None and candidate.state == "asked":
            candidate.state = "slow"
            self._num_slow += 1

    def failed(self, node: int) -> None:
        """`node` did not answer in time, or with nonsense."""
        candidate = self._close(node, "failed")
        if candidate is None:
            return
        teller = candidate.way.teller
        candidate.at += 1
        if candidate.at < len(candidate.ways):
            candidate.state = "new"
        else:
            self._order.remove((node ^ self.target, node))
        self._alpha = min(self._alpha + 1, MAX_ALPHA)
        self._credit[teller] = self._credit.get(teller, 0) - 1
        if teller and self._credit[teller] <= -MISLED:
            self._forget(teller)

    @property
    def is_done(self) -> bool:
        """Nothing is open and no near node is left to ask."""
        if self._num_open:
            return False
        near = self._order[: self._k]
        return self.num_asked >= MAX_ASKS or all(self._candidates[n].state == "answered" for _, n in near)

    def closest(self) -> list[Contact]:
        """The nearest nodes that answered, at most k, nearest first."""
        live = [self._candidates[n] for _, n in self._order]
        return [c.way.contact for c in live if c.state == "answered"][: self._k]

    @property
    def hops(self) -> int:
        """How many answers one upon the other led to the nearest node that answered."""
        live = (self._candidates[n] for _, n in self._order)
        return next((c.way.depth for c in live if c.state == "answered"), 0)

    def _add(self, contact: Contact, teller: int, depth: int) -> None:
        way, known = _Way(contact, teller, depth), self._candidates.get(contact.id)
        if contact.id == self._own or (known is not None and not known.takes(way)):
            return
        if known is not None and known.state != "failed":
            known.ways.append(way)
        elif self._has_room(entry := (contact.id ^ self.target, contact.id)):
            candidate = self._candidates[contact.id] = known or _Candidate([])
            candidate.ways.append(way)
            candidate.state = "new"
            insort(self._order, entry)

    def _has_room(self, entry: tuple[int, int]) -> bool:
        """Whether a candidate may enter there; the farthest makes room for a nearer one."""
        if len(self._order) >= MAX_CANDIDATES:
            if entry > self._order[-1]:
                return False
            self._drop_farthest()
        return True

    def _drop_farthest(self) -> None:
        """Make room; only a candidate that was not asked yet may be forgotten."""
        for index in range(len(self._order) - 1, -1, -1):
            node = self._order[index][1]
            if self._candidates[node].state == "new":
                del self._order[index], self._candidates[node]
                return

    def _forget(self, teller: int) -> None:
        """Drop what a misleading teller named and that was not asked yet; others may name it again."""
        for candidate in self._candidates.values():
            candidate.forget(teller)
        self._order = [entry for entry in self._order if self._candidates[entry[1]].state != "failed"]

    def _close(self, node: int, state: str) -> _Candidate | None:
        candidate = self._candidates.get(node)
        if candidate is None or candidate.state not in ("asked", "slow"):
            return None
        self._num_slow -= candidate.state == "slow"
        candidate.state = state
        self._num_open -= 1
        return candidate


class RecordFetch:
    """Get every wanted record once, from any holder that lists it; from the next one if a holder does not deliver.

    `holders` maps a tag (a record and a version of it) to the nodes that list it.
    """

    def __init__(self, holders: dict[bytes, list[Peer]]) -> None:
        self._waiting = {tag: list(peers) for tag, peers in holders.items()}
        self._open: dict[NodeId, dict[bytes, list[Peer]]] = {}

    def to_ask(self) -> list[tuple[Peer, list[bytes]]]:
        """Whom to ask for which tags; one open question per holder, at most ALPHA in all."""
        asks = []
        while len(self._open) < ALPHA and (holder := self._next_holder()) is not None:
            tags = [tag for tag, known in self._waiting.items() if holder in known][:FETCH_TAGS]
            self._open[holder.node] = {tag: self._waiting.pop(tag) for tag in tags}
            asks.append((holder, tags))
        return asks

    def answered(self, node: NodeId, delivered: set[bytes]) -> None:
        """`node` sent the records of `delivered`; what it owes is asked of others, and all of it if it sent none."""
        if not delivered:
            return self.failed(node)
        self._give_back(node, delivered)

    def failed(self, node: NodeId) -> None:
        """`node` did not answer in time, or with nonsense: it is asked no more."""
        self._give_back(node, set())
        for tag, known in list(self._waiting.items()):
            others = [peer for peer in known if peer.node != node]
            if others:
                self._waiting[tag] = others
            else:
                del self._waiting[tag]

    def _give_back(self, node: NodeId, delivered: set[bytes]) -> None:
        for tag, known in self._open.pop(node, {}).items():
            others = [peer for peer in known if peer.node != node]
            if tag not in delivered and others:
                self._waiting[tag] = others

    @property
    def is_done(self) -> bool:
        return not self._open and not self._waiting

    def _next_holder(self) -> Peer | None:
        """A holder with nothing open; spread by the tag, so that no holder serves all."""
        for tag, known in self._waiting.items():
            free = [peer for peer in known if peer.node not in self._open]
            if free:
                return free[tag[0] % len(free)]
        return None
