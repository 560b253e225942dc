"""What this node publishes: its newest statement of every record, by the key of the DHT it is stored under. Pure."""

from dataclasses import dataclass, replace
from typing import Literal

from manyhands.swarm.dht.table import Contact
from manyhands.swarm.record import Record, RecordKey

# What a statement is to nodes that have the one before: new content, the same content signed anew, or a beat.
Change = Literal["news", "signed", "beat"]


@dataclass(frozen=True, slots=True)
class _Statement:
    """`signed_at`: when it was signed, by our monotonic clock."""

    data: bytes
    record: Record
    signed_at: float


class Published:
    """`nearest`: key -> the nodes where its records were stored last."""

    def __init__(self) -> None:
        self.nearest: dict[int, list[Contact]] = {}
        self._statements: dict[int, dict[RecordKey, _Statement]] = {}

    def __contains__(self, key: int) -> bool:
        return key in self._statements

    def put(self, key: int, record: Record, data: bytes, now: float) -> Change:
        """Take the newest statement of `record`; says what it changes."""
        mine = self._statements.setdefault(key, {})
        old = mine.get(record.key)
        is_beat = old is not None and old.record.sequence == record.sequence
        mine[record.key] = _Statement(data, record, old.signed_at if old is not None and is_beat else now)
        if old is None or _is_news(old.record, record):
            return "news"
        return "beat" if is_beat else "signed"

    def newest(self, key: int, now: float) -> list[bytes]:
        """The statements under `key`; those whose lifetime has ended are forgotten."""
        mine = self._statements.get(key, {})
        for name in [name for name, it in mine.items() if it.signed_at + it.record.lifetime_s <= now]:
            del mine[name]
        if not mine:
            self._statements.pop(key, None)
        return [statement.data for statement in mine.values()]


def _is_news(old: Record, new: Record) -> bool:
    """Whether the span changed, or its state, and not only how busy it is."""
    if old.is_withdrawn != new.is_withdrawn or old.info is None or new.info is None:
        return True
    return replace(old.info, free_tokens=0) != replace(new.info, free_tokens=0)
