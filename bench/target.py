"""What the attackers of bench.siege share: whom they attack, for how long, and what they count."""

import time
from collections import Counter
from dataclasses import dataclass, field


@dataclass(slots=True)
class Target:
    """Whom to attack until when (time.monotonic), and what came of it."""

    api: str
    ticket: str
    addresses: list[str]
    until: float
    counts: dict[str, Counter[str]] = field(default_factory=dict)

    @property
    def is_over(self) -> bool:
        return time.monotonic() >= self.until

    def count(self, family: str, answer: str = "") -> None:
        """One attempt of `family`, or one answer to it."""
        self.counts.setdefault(family, Counter())[answer or "attempts"] += 1

    @property
    def host(self) -> tuple[str, int]:
        host, port = self.api.removeprefix("http://").rsplit(":", 1)
        return host, int(port)
