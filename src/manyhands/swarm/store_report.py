"""What back-ends of the directory report of the store that they keep."""

from collections import Counter
from collections.abc import Container, Iterable, Iterator
from typing import Generic, Protocol, TypeVar

from manyhands.core import ModelId, NodeAddr, NodeId
from manyhands.swarm.record import Record
from manyhands.swarm.record_store import Forks, RecordStore
from manyhands.swarm.statement import Verdict


class ReportedStore(Protocol):
    """What a back-end reports of its store; see RecordStore."""

    counts: Counter[Verdict]
    forks: Forks

    def left(self) -> set[NodeId]: ...


S = TypeVar("S", bound=ReportedStore)


class StoreReport(Generic[S]):
    """What every back-end reports of the `store` that it keeps."""

    store: S

    @property
    def forks(self) -> Forks:
        """See RecordStore."""
        return self.store.forks

    @property
    def num_news(self) -> int:
        """Statements and beats that were news, since the start."""
        return self.store.counts["new"]

    def left(self) -> set[NodeId]:
        """Nodes that have withdrawn all their records: they left, and were not lost."""
        return self.store.left()


class StoreBacked(StoreReport[RecordStore]):
    """What back-ends have in common that keep every record they receive: there is nothing to watch."""

    def watch(self, model: ModelId) -> None:
        """It is at hand."""

    def unwatch(self, model: ModelId) -> None:
        """It stays at hand."""

    def addresses(self, node: NodeId) -> tuple[NodeAddr, ...]:
        """Where `node` can be dialled, as its newest record says, fresh or not."""
        held = self.held_of(node)
        return max(held, key=lambda record: record.version).addresses if held else ()

    def held_of(self, node: NodeId) -> list[Record]:
        """What is held of `node`, withdrawn and stale records too."""
        return [entry.record for entry in self.store.of_node(node)]

    def records(self, now: float) -> list[Record]:
        """Fresh records, our own included."""
        return self.store.records(now)

    def records_of(self, nodes: Iterable[NodeId], model: ModelId, now: float) -> list[Record]:
        """Fresh records of a model, of these nodes; takes as long as they have records."""
        entries = (entry for node in nodes for entry in self.store.of_node(node))
        return [entry.record for entry in entries if entry.record.is_of(model) and entry.is_fresh(now)]

    def in_turn(self, model: ModelId | None, without: Container[object], now: float) -> Iterator[Record]:
        """Fresh records of a model, or of all, as RecordStore.in_turn."""
        meant = (e for e in self.store.in_turn(without) if model is None or e.record.is_of(model))
        return (entry.record for entry in meant if entry.is_fresh(now))
