"""The routes of one request: those of its origin (routes.py), by the request's own rules."""

from collections import OrderedDict
from collections.abc import Collection, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from manyhands.core import NodeId, PathKind
from manyhands.errors import ShardUnavailable
from manyhands.origin.adoption import HopMark, resolve
from manyhands.origin.lossy import Loss
from manyhands.origin.repair_plan import Event, Slot
from manyhands.origin.route import Hop, Lease
from manyhands.origin.session import Session
from manyhands.route.offer import Offer, Rules, Terms

if TYPE_CHECKING:
    from manyhands.origin.routes import Routes

MAX_TENANTS: Final = 256  # whose last routes are remembered


@dataclass(slots=True)
class Routing:
    """By what rules a request got its route, and what they did, for people.

    `num_refused`: nodes that its scope kept out. `is_kept`: the route is the one of the tenant's last request.
    """

    rules: Rules = Rules()
    path: PathKind = "ring"  # that was asked for
    num_refused: int = 0
    is_star: bool = False  # hops cannot reach each other: a star, though a ring was asked for
    is_kept: bool = False
    is_fallback: bool = False  # no route could be made, at first or by a repair: the origin computes alone
    loss: Loss = field(default_factory=Loss)

    def as_object(self) -> dict[str, Any]:
        """The JSON form (docs/routing.md)."""
        rules = self.rules
        return {
            "policy": rules.policy,
            "path": self.path,
            "allow_self_as_shard": rules.allow_self,
            "sticky": rules.sticky,
            "scope": rules.scope or None,
            "own_first": rules.own_first,
            "own_last": rules.own_last,
            "mix_classes": rules.mix_classes,
            "trusted_first": rules.trusted_first,
            "trusted_last": rules.trusted_last,
            "max_shards_per_request": rules.max_hops,
            "fallback_to_local": rules.fallback,
            "refused_nodes": self.num_refused,
            "is_star": self.is_star,
            "is_kept": self.is_kept,
            "is_fallback": self.is_fallback,
            "codec": self.loss.as_object(),
        }


class LastRoutes:
    """The route that each tenant's last request ran over; of MAX_TENANTS, the least recent are forgotten."""

    def __init__(self) -> None:
        self._routes: OrderedDict[str, tuple[Offer, ...]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._routes)

    def of(self, tenant: str) -> tuple[Offer, ...]:
        return self._routes.get(tenant, ())

    def note(self, tenant: str, route: tuple[Offer, ...]) -> None:
        self._routes[tenant] = route
        self._routes.move_to_end(tenant)
        if len(self._routes) > MAX_TENANTS:
            self._routes.popitem(last=False)


class RequestRoutes:
    """What repairs, standbys and reuse ask of a request's surroundings. `tenant`: whose last route a sticky one keeps."""

    def __init__(self, routes: "Routes", rules: Rules, tenant: str | None, path: PathKind) -> None:
        self._routes, self._tenant = routes, tenant or ""
        self.routing = Routing(rules, path)
        self.events: list[Event] = []  # before the session was open
        self._route: Sequence[Offer] = ()  # the session's first

    @property
    def rules(self) -> Rules:
        return self.routing.rules

    def alone(self, last_resort: Offer | None) -> Offer | None:
        """The origin's fallback, where the request may go on there."""
        return last_resort if self.rules.fallback else None

    async def find(self, excluded: Collection[NodeId] = (), num_tokens: int = 0) -> tuple[Offer, ...]:
        """As Routes.find, by the rules."""
        current = self._routes.last.of(self._tenant) if self.rules.sticky else ()
        try:
            route = await self._routes.find(excluded, num_tokens, self.rules, current)
        finally:
            self.routing.num_refused = self._routes.num_refused(self.rules)
        self.routing.is_kept = bool(current) and _places(current) == _places(route)
        return route

    def opened(self, route: tuple[Offer, ...]) -> None:
        """A session runs over `route`, and over what keeps rows apart as its hops do."""
        self._route = route
        self._routes.last.note(self._tenant, route)

    async def offers(self, excluded: Collection[NodeId]) -> list[Offer]:
        """As Routes.offers, those that the rules permit beside the hops of the session, with what experience says of them."""
        permitted = self._routes.permitted(await self._routes.offers(excluded), self.rules)
        return self._beside(self._route, self._routes.informed(permitted))

    def _beside(self, route: Sequence[Offer], offers: list[Offer]) -> list[Offer]:
        """Those of `offers` that may be hops beside those of `route`."""
        if not route or self.rules.mix_classes:
            return offers
        return [o for o in offers if o.keeps_rows == route[0].keeps_rows]

    def terms(self) -> Terms:
        """As Routes.terms, by the rules."""
        return self._routes.terms(0, self.rules)

    def learn(self, session: Session) -> None:
        """As Routes.learn."""
        self._routes.learn(session)

    def note_star(self) -> None:
        """Hops cannot reach each other: the route is a star, though a ring was asked for."""
        self.routing.is_star = True

    def note_fallback(self) -> None:
        """No route can be made: the origin computes alone."""
        self.routing.is_fallback = True

    async def keeps(self, route: Sequence[Offer], saved: int, lease: Lease) -> bool:
        """As Routes.keeps, by the rules."""
        return await self._routes.keeps(route, saved, lease, self.rules)

    async def rejoin(
        self, route: Sequence[Offer], excluded: Collection[NodeId], positions: int, cuts: Collection[int]
    ) -> tuple[Slot, ...]:
        """As Routes.rejoin, by the rules: a hop that they do not permit counts as lost."""
        beside = self._beside(route, await self.offers(excluded))
        return self._routes.rejoin(route, beside, excluded, positions, self.rules, cuts)

    async def marked(self, marks: Sequence[HopMark]) -> tuple[Offer, ...]:
        """The hops of `marks`, for `rejoin`. Raises ShardUnavailable if no node serves the model."""
        await self._routes.meet([mark.node for mark in marks])
        offers = await self.offers(())
        if not offers:
            raise ShardUnavailable("no node serves this model")
        return resolve(marks, offers)

    async def look_around(self) -> bool:
        return await self._routes.look_around()

    async def connect(self, index: int, offer: Offer, num_hops: int, lease: Lease) -> Hop:
        """As Routes.connect. Raises ShardUnavailable."""
        return await self._routes.connect(index, offer, num_hops, lease)

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        self._routes.start(work)


def _places(route: Sequence[Offer]) -> list[tuple[NodeId, str]]:
    return [(o.node, str(o.info.span)) for o in route]
