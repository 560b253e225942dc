"""Which nodes a request's rules let take part, and which of them it trusts, by the scope and lists of its origin. Pure."""

from collections.abc import Callable
from dataclasses import replace
from typing import cast

from manyhands.core import NodeId
from manyhands.route.offer import Offer, Rules
from manyhands.swarm.members import Members
from manyhands.swarm.record import Scope

Admits = Callable[[Offer], bool]


def admits(rules: Rules, members: Members, me: NodeId) -> Admits | None:
    """Whom the scope of `rules` lets take part; this machine `me` always. None: it narrows nothing."""
    if not rules.scope:
        return None
    members = replace(members, scope=cast(Scope, rules.scope))
    near = ("localhost",)  # a record names several addresses, of which an offer has the first
    return lambda o: o.node == me or members.admits(o.node, (o.addr.host, *(near if o.is_lan else ())))


def trusts(rules: Rules, members: Members, me: NodeId) -> Admits | None:
    """Who may compute the layers that `rules` keep to trusted nodes: those on the allow list, and `me`. None: it keeps none."""
    if not (rules.trusted_first or rules.trusted_last):
        return None
    trusted = replace(members, scope="trusted")
    return lambda o: o.node == me or trusted.admits(o.node, ())
