"""What links of the test kit share: they wrap another Link, and are that one in all that they do not change."""

from manyhands.core import EdgeHealth, NodeId
from manyhands.net.liveness import LinkEvidence
from manyhands.net.transport import Link, PongRoute
from manyhands.wire.message import Hello, Lane


class WrappedLink:
    """The part of a Link (see transport.Link) that is that of `_link`."""

    def __init__(self, link: Link) -> None:
        self._link = link

    @property
    def peer(self) -> NodeId:
        return self._link.peer

    @property
    def hello(self) -> Hello:
        return self._link.hello

    @property
    def greeting(self) -> Hello:
        return self._link.greeting

    @property
    def lane(self) -> Lane:
        return self._link.lane

    @property
    def health(self) -> EdgeHealth:
        return self._link.health

    @property
    def is_closed(self) -> bool:
        return self._link.is_closed

    def line(self) -> LinkEvidence:
        return self._link.line()

    def answer_pings_with(self, pong: PongRoute) -> None:
        self._link.answer_pings_with(pong)
