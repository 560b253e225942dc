"""What runs a span, and what runs the ends, whatever computes: the native engine (cpu.py), a GPU (cuda/span.py) or torch
(worker/torch_program.py).

Rows are bytes in the storage dtype from the wire to the engine and back to the wire. One thread at a time.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from manyhands.core import Span

Rows = NDArray[np.uint8]  # [T, bytes of a row]


class Cache(Protocol):
    """What one session keeps of the layers of one span. Positions beyond `length` are stale: they are written before they
    are read.

    Of a model with states (engine/states.py) a session cannot go back to each of them: `reachable` says to which."""

    length: int

    @property
    def positions(self) -> int:
        """For which there is memory."""
        ...

    def reachable(self, position: int) -> int:
        """The greatest position, at most this one, from which a step or a fork can begin; of those up to `length`."""
        ...


class Piece(NamedTuple):
    """`count` rows of a step: positions [start, start + count) of one session. A step's pieces lie one after another.

    A start before what was cached rolls back: later positions are written again before they are read.
    """

    cache: Any  # a Cache that the runner of the step made
    start: int
    count: int  # type: ignore[assignment]  # hides tuple's own


class SpanRunner(Protocol):
    """Layers of a model. `back_end`: what computes ("avx2", "cuda:0"). The sizes are the whole model's."""

    back_end: str
    num_layers: int
    hidden_size: int
    vocab_size: int
    shares_blocks: bool  # a fork has the memory of what it begins with in common with its source

    @property
    def bytes_per_token(self) -> int:
        """Cache bytes that one position of one session takes on all layers."""
        ...

    @property
    def session_bytes(self) -> int:
        """Cache bytes that a session takes at most whatever its length: the states of layers that have some."""
        ...

    @property
    def cache_room(self) -> int | None:
        """Bytes that all caches together may take on the device, beside the layers; None: as the node is configured."""
        ...

    def new_cache(self, capacity: int, span: Span | None = None, mark: int = 0) -> Cache:
        """An empty cache of `capacity` positions for a session on `span`, which lies within this one's (default: all).

        mark: a position near which other sessions are likely to go on from this one, the end of its prompt.
        """
        ...

    def fork(self, source: Any, positions: int, capacity: int, mark: int = 0) -> Cache:
        """A cache as `new_cache` makes it, on the span of `source`, that begins with the first `positions` positions of it.

        `source` has them, they are `reachable`, and `capacity` covers them. What either writes later, the other does not see.
        """
        ...

    def step(self, rows: bytes, pieces: Sequence[Piece], threads: int) -> Rows:
        """Rows of all pieces through the layers of their caches' span, which they share; rows out.

        Sets each cache's length to the end of its piece. Raises StateGone where one begins at a position that is not reachable:
        nothing was computed then.
        """
        ...

    def is_ready(self, num_rows: int) -> bool:
        """Whether a step of so many rows takes as long as any like it: nothing is left to work out."""
        ...


class EndsRunner(Protocol):
    """Embedding, final norm and head."""

    back_end: str
    hidden_size: int
    vocab_size: int
    holds_numbers: bool  # rows hold whole numbers, which are others once they are rounded (program/ops.py: Program)

    def embed(self, ids: Sequence[int]) -> Rows:
        """Rows that enter layer 0. Raises ModelError for an id that the model does not have."""
        ...

    def logits(self, rows: bytes | Rows, count: int, threads: int) -> NDArray[np.float32]:
        """Logits [count, vocab] of rows that left the last layer."""
        ...
