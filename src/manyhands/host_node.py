"""A node that hosts: it serves spans and weights, and follows orders. Each role registers its handlers."""

from collections.abc import Callable
from types import TracebackType

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from manyhands.config import WorkerConfig
from manyhands.net.transport import Transport
from manyhands.node import Node
from manyhands.place.orders import Orders
from manyhands.weights.provider import WeightClient
from manyhands.weights.seed import WeightServer
from manyhands.wire.message import Hello, Lane
from manyhands.wire.signed import Signer
from manyhands.worker.attesting import Attesting
from manyhands.worker.serve import SpanHost
from manyhands.worker.worker import Sampling, Worker


class HostNode(Node):
    """`key` is the transport's. `sampling` gives what draws the tokens of a folder's model, where this node is the last hop."""

    def __init__(
        self,
        make_transport: Callable[[Callable[[Lane], Hello]], Transport],
        key: Ed25519PrivateKey,
        sampling: Sampling,
        *,
        name: str = "node",
        worker: WorkerConfig | None = None,
    ) -> None:
        super().__init__(make_transport, name=name, spans=lambda: self.worker.spans)
        self.worker = Worker(name, worker or WorkerConfig(), self.pool, self.setbacks, self.start, sampling)
        self.wants = WeightClient()  # for weights from peers
        self.orders = Orders()  # to serve other layers: `orders.decide_by` sets what decides on those that arrive
        self.seed = WeightServer(self.start)  # weights for peers: `await node.seed.add(folder)` offers them
        self.signer = Signer(key)
        self._register()

    def _register(self) -> None:
        """Register the roles; called once, when they are made."""
        for role in (self.worker, Attesting(self.worker.hosts, self.signer), self.wants, self.orders, self.seed):
            role.register(self)

    def __repr__(self) -> str:
        return f"<HostNode {self.name} hosts={self.hosts} {self.pool}>"

    @property
    def hosts(self) -> list[SpanHost]:
        """The spans that this node serves."""
        return self.worker.hosts

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await super().__aexit__(kind, error, trace)
        self.seed.close()
