"""Rows of prompts that a session sends with loss, in 8 bits (wire/int8.py), because its request allows it. Pure.

Which rows is a matter of positions and of boundaries between layers, both fixed as the session opens: whatever is computed
again in a repair is rounded as it was, so the text is that of the session without the repair.
"""

from collections import OrderedDict
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

from manyhands.core import NodeId, Span
from manyhands.wire.rounding import Ranges, Rounding

# New positions of a prompt below which nothing is gained.
LEAST_ROWS: Final = 64
# The first positions of a prompt of which a sample is made, by another session without loss and one with it. At most of one
# request in REQUESTS_A_SAMPLE over a route; what was found too large is not tried again for SAMPLE_AGE_S.
SAMPLE_ROWS: Final = 32
REQUESTS_A_SAMPLE: Final = 16
SAMPLE_AGE_S: Final = 3600.0
MAX_WAYS: Final = 256
# What a sample may show: nats on average, and the part of positions with another likeliest token.
MAX_MEAN_KL: Final = 0.02
MAX_FLIPS: Final = 0.125


@dataclass(frozen=True, slots=True)
class Lossy:
    """Rows of the positions `ranges` are rounded before the layers `boundaries` (0: as the origin sends them).

    `boundaries` None: not fixed yet. Each hop decides by its uplink as it opens, and says so.
    """

    ranges: Ranges
    boundaries: frozenset[int] | None = None

    def at(self, layer: int) -> Rounding | None:
        """What is rounded before `layer`; while boundaries are not fixed, what may be."""
        if self.boundaries is None:
            return Rounding(self.ranges, if_slow=True)
        return Rounding(self.ranges) if layer in self.boundaries else None

    def going_on(self, cached: int, until: int) -> "Lossy | None":
        """The loss of a session that begins with `cached` positions of one with this loss; None: it cannot be told."""
        rounding = Rounding(self.ranges).going_on(cached, until)
        return None if rounding is None else replace(self, ranges=rounding.ranges)


@dataclass(frozen=True, slots=True)
class LossSample:
    """What rounding did to the next token after each of `rows` positions: the mean of KL(exact || rounded) in nats, and how
    often another token was the likeliest."""

    rows: int
    mean_kl: float
    flips: int

    @property
    def is_too_large(self) -> bool:
        """Whether rows are better sent without loss. What is not a number is too large."""
        return not self.mean_kl <= MAX_MEAN_KL or self.flips > MAX_FLIPS * self.rows


@dataclass(frozen=True, slots=True)
class Loss:
    """What came of a request's wish to send rows with loss, for people. `layers`: the boundaries where they were."""

    is_wanted: bool = False
    layers: tuple[int, ...] = ()
    why: str = ""
    sample: LossSample | None = None

    def as_object(self) -> dict[str, Any] | None:
        """The JSON form; None if nothing was asked (docs/routing.md)."""
        if not self.is_wanted:
            return None
        sample = None if self.sample is None else asdict(self.sample)
        used = "int8" if self.layers else "lossless"
        return {"used": used, "before_layers": list(self.layers), "why": self.why, "sample": sample}


Ways = tuple[tuple[tuple[NodeId, Span], ...], frozenset[int]]  # a route, and the boundaries where it rounds


@dataclass(slots=True)
class _Known:
    sample: LossSample
    at: float
    uses: int = 1


class LossSamples:
    """What was sampled of each way that rows were sent with loss; of MAX_WAYS, the least recent are forgotten."""

    def __init__(self) -> None:
        self._known: OrderedDict[Ways, _Known] = OrderedDict()

    def find(self, ways: Ways, now: float) -> LossSample | None:
        """The last sample of `ways`; None if it is time for another one: each request that comes with it is counted."""
        known = self._known.get(ways)
        if known is None or now >= known.at + SAMPLE_AGE_S:
            return None
        if not known.sample.is_too_large and known.uses >= REQUESTS_A_SAMPLE:
            return None
        known.uses += 1
        return known.sample

    def note(self, ways: Ways, sample: LossSample, now: float) -> None:
        self._known[ways] = _Known(sample, now)
        self._known.move_to_end(ways)
        if len(self._known) > MAX_WAYS:
            self._known.popitem(last=False)
