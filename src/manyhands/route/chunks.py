"""How many rows of a prompt go into one step: as many as let the hops work at once, and no fewer. Pure; seconds are arguments.

A prompt in k chunks over n hops is a pipeline: each hop computes one chunk while the next hop computes the one before, so it
takes n + k - 1 chunks' time of the slowest hop instead of n * k. Small chunks overlap more, and each costs what a step costs
however few rows it has.
"""

from collections.abc import Sequence
from typing import Final, NamedTuple

from manyhands.route.cost import HOP_OVERHEAD_S
from manyhands.route.offer import Offer
from manyhands.route.prefix import ROW_SHARE
from manyhands.route.space import DEFAULT_LAYER_S
from manyhands.worker.early import EARLY_BYTES

# Of rows that leave right behind the Opens; the other half is for what holding them takes, cut by a hop into several steps.
FIRST_BYTES: Final = EARLY_BYTES // 2
LEAST_ROWS: Final = 32  # fewer hops do not tell from a window of drafts (worker/batch.py), nor compute faster


class Stage(NamedTuple):
    """One hop: seconds of a step however few its rows are, of each row, and of the round trip to it."""

    step_s: float
    row_s: float
    rtt_s: float = 0.0

    @classmethod
    def of(cls, offer: Offer, rtt_s: float | None) -> "Stage":
        """By what was measured of a hop; by what hops usually take where nothing was."""
        num_layers, layer_s = len(offer.info.span), offer.layer_s or DEFAULT_LAYER_S
        row_s = offer.load.row_s or layer_s * ROW_SHARE
        return cls(num_layers * layer_s, num_layers * row_s, rtt_s or 0.0)

    def chunk_s(self, rows: int, credits: int) -> float:
        """Until it can take the next chunk, of which `credits` may be on their way to it."""
        return max(self.step_s, rows * self.row_s, self.rtt_s / credits) + HOP_OVERHEAD_S


def pipelined_s(num_rows: int, rows: int, stages: Sequence[Stage], credits: int) -> float:
    """Seconds of compute of a prompt of `num_rows` in chunks of `rows`; the flight of the first is not counted."""
    each = [stage.chunk_s(rows, credits) for stage in stages]
    return sum(each) + (-(-num_rows // rows) - 1) * max(each)


def chunk_rows(num_rows: int, stages: Sequence[Stage], credits: int, most: int) -> int:
    """Rows of one chunk, 1 to `most`: what is soonest through, in doubt the larger."""
    sizes = [most]
    while sizes[-1] // 2 >= LEAST_ROWS:
        sizes.append(sizes[-1] // 2)
    return min(sizes, key=lambda rows: pipelined_s(num_rows, min(rows, max(1, num_rows)), stages, credits))


def first_rows(num_rows: int, chunk: int, row_bytes: int, stages: Sequence[Stage]) -> int:
    """Rows of a prompt that hops hold before they are open: one chunk, of FIRST_BYTES at most.

    0 where they would make one chunk more and reading a hop's weights for it takes longer than the round trip that they save.
    `row_bytes`: of one row on the wire; `stages`: one for each hop.
    """
    rows = min(num_rows, chunk, FIRST_BYTES // row_bytes)
    is_one_more = -(-(num_rows - rows) // chunk) + 1 > -(-num_rows // chunk)
    is_far = max(stage.rtt_s for stage in stages) >= max(stage.step_s for stage in stages)
    return rows if is_far or not is_one_more else 0
