"""What a token, and a first token, take on a route: seconds from measured parts. Pure; the one cost model of route and place.

One decode step visits every hop once: entry leg, then for each hop its wait, its layers and its overhead, then the leg to
the next, the last of them back to the origin (a ring; docs/routing.md).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from manyhands.core import SpanLoad
from manyhands.errors import BadRequest

# What a hop adds to a step beyond its layers, where it was not measured: framing, TLS, wake-ups of an event loop and a thread.
# On loopback 0.2 ms with a model that caches hold (bench/hop.py); 0.25 to 1.5 ms with one of 0.5B (bench/split.py), whose
# weights drive code and data of all else out of them.
HOP_OVERHEAD_S = 0.0009


@dataclass(frozen=True, slots=True)
class Leg:
    """The way from one node to another. `uplink_Bps`: bytes per second that the sender can send, inf if unknown.

    Raises BadRequest for a negative or endless rtt, or an uplink that is not above 0.
    """

    rtt_s: float
    uplink_Bps: float = math.inf

    def __post_init__(self) -> None:
        if not 0 <= self.rtt_s < math.inf:
            raise BadRequest(f"rtt_s is {self.rtt_s}; it must be 0 or more seconds")
        if not self.uplink_Bps > 0:
            raise BadRequest(f"uplink_Bps is {self.uplink_Bps}; it must be above 0 bytes/s, or inf if unknown")

    def seconds(self, num_bytes: int) -> float:
        """Until `num_bytes` sent at once have arrived."""
        return self.rtt_s / 2 + self.sending_s(num_bytes)

    def sending_s(self, num_bytes: int) -> float:
        """For which the sender is busy with them: what follows must wait."""
        return num_bytes / self.uplink_Bps


@dataclass(frozen=True, slots=True)
class SpanCost:
    """Of one hop. Of one layer: `layer_s` for a decode step, `pass_s` for a prefill chunk and `row_s` for each of its rows.

    `queue_s`: wait for the device before a step; `overhead_s`: what a hop adds beyond compute. Raises BadRequest unless
    all are finite and 0 or more.
    """

    layer_s: float
    queue_s: float = 0.0
    overhead_s: float = HOP_OVERHEAD_S
    row_s: float = 0.0
    pass_s: float = 0.0

    def __post_init__(self) -> None:
        for name in ("layer_s", "queue_s", "overhead_s", "row_s", "pass_s"):
            if not 0 <= getattr(self, name) < math.inf:
                raise BadRequest(f"{name} is {getattr(self, name)}; it must be 0 or more seconds")

    def step_s(self, num_layers: int) -> float:
        """One decode step through `num_layers`, the wait before it included."""
        return num_layers * self.layer_s + self.queue_s + self.overhead_s

    def chunk_s(self, num_layers: int, num_rows: int) -> float:
        """One prefill chunk, without the wait. Never less than a decode step: few rows cost what one does."""
        return num_layers * max(self.layer_s, self.pass_s + num_rows * self.row_s) + self.overhead_s


Hop = tuple[int, SpanCost]  # layers served there, and what they cost


def queue_s(load: SpanLoad, layer_s: float, num_layers: int) -> float:
    """How long a step waits where `load.queue` steps wait already and a step of the host runs `num_layers`.

    Waiting steps run together (worker/batch.py): it waits for the step that runs, and each that joins adds a row; a whole
    step, if what a row takes was not measured.
    """
    return num_layers * (layer_s + load.queue * (load.row_s or layer_s)) if load.queue else 0.0


def token_s(hops: Sequence[Hop], legs: Sequence[Leg], num_bytes: int, ends_s: float) -> float:
    """Seconds from one token to the next, without speculation.

    `legs`: entry, forwards, closing leg back to the origin: one more than hops. `num_bytes`: of one position as sent.
    `ends_s`: embedding, head and sampling at the origin. Raises BadRequest if the numbers of hops and legs do not fit.
    """
    _check(hops, legs)
    computing = math.fsum(cost.step_s(num_layers) for num_layers, cost in hops)
    return ends_s + computing + math.fsum(leg.seconds(num_bytes) for leg in legs)


def prefill_s(
    hops: Sequence[Hop], legs: Sequence[Leg], num_rows: int, row_bytes: int, chunk_rows: int, ends_s: float
) -> float:
    """Seconds to the first token of a prompt of `num_rows`, sent in chunks of `chunk_rows`. Legs as for `token_s`.

    Chunks pipeline: a hop or an uplink is busy with one at a time and passes it on when done, so the slowest of them sets
    the pace (permutation flow shop: done[chunk, stage] = max(done[chunk - 1, stage], done[chunk, stage - 1]) + work). Only
    the last row returns to the origin. Waits and half round trips are paid once.
    """
    _check(hops, legs)
    if num_rows < 1 or chunk_rows < 1:
        raise BadRequest(f"a prompt of {num_rows} rows in chunks of {chunk_rows}: both must be 1 or more")
    done = [0.0] * (2 * len(hops))  # when each stage (uplink, hop, uplink, hop ...) is through with the chunks so far
    for first in range(0, num_rows, chunk_rows):
        rows = min(chunk_rows, num_rows - first)
        arrived = 0.0
        for index, (num_layers, cost) in enumerate(hops):
            sent = max(done[2 * index], arrived) + legs[index].sending_s(rows * row_bytes)
            arrived = max(done[2 * index + 1], sent) + cost.chunk_s(num_layers, rows)
            done[2 * index : 2 * index + 2] = sent, arrived
    once = math.fsum(cost.queue_s for _, cost in hops) + math.fsum(leg.rtt_s / 2 for leg in legs)
    return ends_s + done[-1] + once + legs[-1].sending_s(row_bytes)


def _check(hops: Sequence[Hop], legs: Sequence[Leg]) -> None:
    if not hops or len(legs) != len(hops) + 1:
        raise BadRequest(
            f"{len(hops)} hops and {len(legs)} legs: a route has 1 or more hops and one leg more than hops"
        )
