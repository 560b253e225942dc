"""Give back what a spare took: a running session leaves it, make before break, for a node that serves those layers again."""

from collections import Counter
from collections.abc import Collection

from manyhands.core import NodeId, Span
from manyhands.errors import ManyhandsError
from manyhands.origin.route import Hop
from manyhands.origin.session import Session
from manyhands.origin.standby_search import LOOK_AGAIN_ROWS, Followers, RouteServices


class GiveBack:
    """Looks for such nodes every LOOK_AGAIN_ROWS committed positions, while the session runs through a spare.

    The node found gets a standby of the spare's hop, and takes over when that has caught up. A node that was lost once in this
    session may have its layers back, one that was lost twice may not: it would come and go. A spare that gave layers back did
    not fail and may be asked again.
    """

    def __init__(self, session: Session, around: RouteServices, followers: Followers) -> None:
        self._session, self._around, self._followers = session, around, followers
        self._looked_at, self._is_looking = 0, False
        self._owners: dict[Span, str] = {}  # of a spare's hop: the name of a node that serves it again
        self._lost: Counter[NodeId] = Counter()
        self._gave: set[NodeId] = set()

    def note_lost(self, nodes: Collection[NodeId]) -> None:
        """A repair begins: count a loss of each of `nodes`, except of spares that gave their layers back."""
        self._lost.update(node for node in set(nodes) if node not in self._gave)

    @property
    def is_all(self) -> bool:
        """Whether the hops that are lost now have given their layers back, all of them: nothing has failed."""
        hops, losses = self._session.route.hops, self._session.losses
        return bool(losses) and all(hops[index].offer.node in self._gave for index in losses)

    def excused(self) -> set[NodeId]:
        """The spares that gave layers back since the last call."""
        gave, self._gave = self._gave, set()
        return gave

    def barred(self, excluded: Collection[NodeId]) -> set[NodeId]:
        """Those of `excluded` that may not have their layers back."""
        return {node for node in excluded if self._lost[node] != 1}

    def go_on(self, committed: int, excluded: set[NodeId]) -> None:
        """Look, or move a hop on: it counts as lost once its successor is ready and not `excluded` now. Never waits."""
        session = self._session
        spares = [i for i, hop in enumerate(session.route.hops) if hop.offer.info.is_spare]
        if not spares or session.losses:
            return
        barred = self.barred(excluded)
        for index in spares:
            span = session.route.hops[index].offer.info.span
            if (owner := self._owners.get(span)) is not None:
                self._move(index, span, owner, committed, excluded)
        if not self._is_looking and committed >= self._looked_at + LOOK_AGAIN_ROWS:
            self._looked_at, self._is_looking = committed, True
            self._around.start(self._look(barred))

    def _move(self, index: int, span: Span, owner: str, committed: int, excluded: set[NodeId]) -> None:
        session = self._session
        standby = session.standbys.by_span.get(span)
        if standby is not None and standby.hop.offer.info.is_spare:
            session.standbys.dismiss(span)
        match self._followers.recruit(span, committed, self.barred(excluded), is_for_good=True):
            case "ready":
                del self._owners[span]
                excluded.discard(session.standbys.by_span[span].hop.offer.node)
                self._gave.add(session.route.hops[index].offer.node)
                session.lose(index, f"is a spare, and {owner} serves layers {span} again")
            case "none":
                del self._owners[span]
            case "following":
                pass

    async def _look(self, barred: set[NodeId]) -> None:
        try:
            offers = await self._around.offers(barred | self._session.untrusted_nodes)
            hops = self._session.route.hops
            in_route = {hop.offer.node for hop in hops}
            able = [o for o in offers if not o.info.is_spare and o.info.is_loaded and o.node not in in_route]
            for hop in (hop for hop in hops if hop.offer.info.is_spare):
                if owner := next((o.name for o in able if _serves(o.info.span, hop)), None):
                    self._owners[hop.offer.info.span] = owner
        except (ManyhandsError, TimeoutError):
            pass  # the session stays where it is until the next look
        finally:
            self._is_looking = False


def _serves(span: Span, hop: Hop) -> bool:
    return span.covers(hop.offer.info.span)
