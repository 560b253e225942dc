"""A node with every role: it serves spans and weights, follows orders, and owns requests. Each role registers its handlers."""

from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from manyhands.checkpoint.config_fields import read_facts
from manyhands.config import RequestConfig, WorkerConfig
from manyhands.core import SamplingParams, SessionId
from manyhands.net.transport import Transport
from manyhands.node import Node
from manyhands.origin.sampler import Sampler
from manyhands.origin.session import Session
from manyhands.origin.sessions import Sessions
from manyhands.place.orders import Orders
from manyhands.text.prompt import load_eos_ids
from manyhands.text.tokenizer import load_tokenizer
from manyhands.weights.provider import WeightClient
from manyhands.weights.seed import WeightServer
from manyhands.wire.message import Hello, Lane
from manyhands.worker.serve import SpanHost
from manyhands.worker.worker import Worker


class FullNode(Node):
    """`key` is the transport's."""

    def __init__(
        self,
        make_transport: Callable[[Callable[[Lane], Hello]], Transport],
        key: Ed25519PrivateKey,
        *,
        name: str = "node",
        worker: WorkerConfig | None = None,
        request: RequestConfig | None = None,
    ) -> None:
        super().__init__(make_transport, name=name, spans=lambda: self.worker.spans)
        self.request = request or RequestConfig()
        self.worker = Worker(name, worker or WorkerConfig(), self.pool, self.setbacks, self.start, _sampling)
        self.requests = Sessions(self, key, self.worker.owners, self.request)
        self.wants = WeightClient()  # for weights from peers
        self.orders = Orders()  # to serve other layers: `orders.decide_by` sets what decides on those that arrive
        self.seed = WeightServer(self.start)  # weights for peers: `await node.seed.add(folder)` offers them
        self.requests.register()  # first: a step back from the last hop is never for a span of this node
        for role in (self.worker, self.wants, self.orders, self.seed):
            role.register(self)

    def __repr__(self) -> str:
        return f"<FullNode {self.name} hosts={self.hosts} sessions={len(self.sessions)} {self.pool}>"

    @property
    def hosts(self) -> list[SpanHost]:
        """The spans that this node serves."""
        return self.worker.hosts

    @property
    def sessions(self) -> dict[SessionId, Session]:
        """The open sessions that this node owns."""
        return self.requests.active

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.requests.close_all()
        await super().__aexit__(kind, error, trace)
        self.seed.close()


def _sampling(folder: Path, has_head: bool) -> Callable[[SamplingParams], Sampler]:
    """What draws the tokens of the model in `folder`. Without the head nothing is drawn, and end tokens are not looked up."""
    eos = load_eos_ids(folder, load_tokenizer(folder)) if has_head else frozenset[int]()
    vocab_size = read_facts(folder).vocab_size
    return lambda params: Sampler(params, vocab_size, eos)
