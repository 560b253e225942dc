"""What a route is made of and looked for on: spans on offer, and the terms of the origin. Values only."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from manyhands.config import MAX_HOPS, REQUEST_SCOPES, RequestConfig
from manyhands.core import NodeAddr, NodeId, Span, SpanInfo, SpanLoad
from manyhands.errors import BadRequest
from manyhands.route.classes import keeps_rows

Policy = Literal["latency", "greedy"]
Pair = tuple[NodeId, NodeId]

UNMEASURED = SpanLoad()
UNKNOWN = NodeId("")  # an origin without a known id


@dataclass(frozen=True, slots=True)
class Offer:
    """A span that a node offers, where to dial it, and what is known of its load.

    `uplink_Bps`: bytes per second it can send, inf if unknown. Figures that cannot be (negative, not a number) count as not
    measured.
    """

    addr: NodeAddr
    node: NodeId
    name: str
    info: SpanInfo
    load: SpanLoad = UNMEASURED
    uplink_Bps: float = math.inf
    is_lan: bool = False  # found on the origin's own network

    def part(self, span: Span) -> "Offer":
        """The same node with `span`, which lies within what it holds."""
        return replace(self, info=replace(self.info, span=span))

    @property
    def keeps_rows(self) -> bool:
        """Whether its arithmetic class gives a row the same bits in any company: only such hops make an answer exact."""
        return keeps_rows(self.info.arithmetic)

    @property
    def layer_s(self) -> float | None:
        """Measured seconds of one layer, None if there are none."""
        return self.load.layer_s if 0 < self.load.layer_s < math.inf else None


def pair(a: NodeId, b: NodeId) -> Pair:
    """The key of a round trip: the same from both ends."""
    return (a, b) if a <= b else (b, a)


@dataclass(frozen=True, slots=True)
class Rules:
    """What a request wants of its route, whatever is measured. Raises BadRequest for an unknown word or a negative number.

    `allow_self`: the origin's own spans may be hops; else they are used for layers that no other node holds. `sticky`: the
    route of the tenant's last request is kept while no other is much better. `scope`: narrows the node's own scope ("": does
    not): lan, trusted, or off for this machine alone. The first `own_first` and the last `own_last` layers are computed on
    the origin's own node and nowhere else, the first `trusted_first` and the last `trusted_last` on it and on trusted nodes.
    Nodes that keep rows apart and nodes that do not (devices of torch, class E2) are hops of one route only where
    `mix_classes` allows it. A route has at most `max_hops` hops. `fallback`: where no
    route can be made the origin may go on alone, if it is set up to. `codec`: how rows of prompts may go over slow links.
    """

    policy: Policy = "latency"
    allow_self: bool = True
    sticky: bool = False
    scope: str = ""
    own_first: int = 0
    own_last: int = 0
    mix_classes: bool = False
    trusted_first: int = 0
    trusted_last: int = 0
    max_hops: int = MAX_HOPS
    fallback: bool = True
    codec: Literal["lossless", "int8"] = "lossless"

    def __post_init__(self) -> None:
        if not 1 <= self.max_hops <= MAX_HOPS:
            raise BadRequest(f"max_shards_per_request is {self.max_hops}; it must be from 1 to {MAX_HOPS} hops")
        if self.scope not in REQUEST_SCOPES:
            raise BadRequest(f"scope is {self.scope!r:.40}; of a request it is one of {', '.join(REQUEST_SCOPES[1:])}")

    @classmethod
    def of(cls, config: RequestConfig) -> "Rules":
        """As the node's configuration says."""
        return cls(
            config.policy,  # type: ignore[arg-type]  # it was checked
            config.allow_self_as_shard,
            config.sticky,
            "",
            config.own_first,
            config.own_last,
            config.mix_classes,
            config.trusted_first,
            config.trusted_last,
            config.max_shards_per_request,
        )


@dataclass(frozen=True, slots=True)
class Terms:
    """On what terms a route is looked for."""

    rules: Rules = Rules()
    origin: NodeId = UNKNOWN
    uplink_Bps: float = math.inf  # the origin's
    rtts: Mapping[Pair, float] = field(default_factory=dict)  # seconds, by `pair`
    admits: Callable[[Offer], bool] | None = None  # trust and scope: what it refuses is never used. None: admit all
    trusts: Callable[[Offer], bool] | None = (
        None  # who may have the layers that `rules` keep to trusted nodes. None: all
    )
    num_tokens: int = 0  # positions to lease on every hop; a node with less room is asked last (HN-32)
    key: bytes = b""  # of the session: spreads requests over near-equals. Empty: always the cheapest
    current: tuple[Offer, ...] = ()  # the route so far, kept unless another is better by HYSTERESIS
    apart: frozenset[Pair] = frozenset()  # nodes that could not reach each other
    num_evicted: int = 0  # nodes whose offers are left out; a refusal says so


ANY = Terms()  # everything admitted, nothing known


def refuse_twins(offers: Sequence[Offer]) -> None:
    """Raise BadRequest if two nodes have one key: everything that is sent to one might go to the other."""
    homes: dict[NodeId, NodeAddr] = {}
    for offer in offers:
        first = homes.setdefault(offer.node, offer.addr)
        if (first.host, first.port) != (offer.addr.host, offer.addr.port):
            raise BadRequest(f"{first} and {offer.addr} have the same node key: start one of them with another --key")
