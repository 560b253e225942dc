"""A node with every role: it hosts, and it owns requests."""

from collections.abc import Callable
from types import TracebackType

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from manyhands.config import RequestConfig, WorkerConfig
from manyhands.core import SessionId
from manyhands.errors import Draining, ExperimentalDisabled
from manyhands.host_node import HostNode
from manyhands.net.transport import Transport
from manyhands.origin.sampling import sampling
from manyhands.origin.session import Session
from manyhands.origin.sessions import Sessions
from manyhands.wire.message import Hello, Lane


class FullNode(HostNode):
    def __init__(
        self,
        make_transport: Callable[[Callable[[Lane], Hello]], Transport],
        key: Ed25519PrivateKey,
        *,
        name: str = "node",
        worker: WorkerConfig | None = None,
        request: RequestConfig | None = None,
    ) -> None:
        self.request = request or RequestConfig()
        super().__init__(make_transport, key, sampling, name=name, worker=worker)

    def _register(self) -> None:
        self.requests = Sessions(self, self.signer, self.worker.owners, self.worker.unopened.end, self.request)
        self.requests.register()  # first: a step back from the last hop is never for a span of this node
        super()._register()

    def __repr__(self) -> str:
        return f"<FullNode {self.name} hosts={self.hosts} sessions={len(self.sessions)} {self.pool}>"

    @property
    def sessions(self) -> dict[SessionId, Session]:
        """The open sessions that this node owns."""
        return self.requests.active

    def check_may_ask(self) -> None:
        """Raise for a new request of this node's own: ExperimentalDisabled while it is switched off, Draining while it leaves,
        since a member that leaves waits until its requests have ended."""
        if self.worker.is_off:
            raise ExperimentalDisabled(f"{self.name} is switched off: `manyhands switch on`")
        if self.worker.is_leaving:
            raise Draining(f"{self.name} is leaving: ask another member")

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.requests.close_all()
        await super().__aexit__(kind, error, trace)
