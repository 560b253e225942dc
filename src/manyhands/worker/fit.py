"""What steps must look like to fit a span of a model. Pure."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

from manyhands.errors import BadRequest, ContextOverflow, ProtocolError
from manyhands.wire.header import MAX_STEP_BODY
from manyhands.wire.message import ITEMSIZE, DType, Open, Step
from manyhands.wire.timings import MAX_TIMINGS, TIMING
from manyhands.worker.log import split_step

# What may wait for one place, beside its credits: so many times the rows of its lease (a rollback sends rows again).
MAX_WAITING_LEASES: Final = 2
# Tokens that a device step draws for a session: twice as many as may be guessed. Each has a row of logits, of 1 MB where the
# vocabulary has 262,144 tokens.
MAX_DRAWN: Final = 128


def check_waiting(waiting: Collection[Step], step: Step, capacity: int) -> None:
    """Raise ProtocolError if more would wait behind a lease of `capacity` positions than may."""
    rows = sum([s.count for s in waiting], step.count) if waiting else step.count
    if rows > MAX_WAITING_LEASES * capacity:
        raise ProtocolError(f"{rows} rows wait, {MAX_WAITING_LEASES} times the lease of {capacity} is the limit")


@dataclass(frozen=True, slots=True)
class Fit:
    """The sizes of a span's model."""

    hidden_size: int
    wire_dtype: DType
    vocab_size: int

    def cut(self, step: Step, opened: Open, num_rows: int) -> tuple[Step, Step | None]:
        """As split_step. Where logits go back, the first part has no more of them than one Step holds, and rows that are not
        sent need none; where tokens are drawn, MAX_DRAWN at most."""
        if opened.ends == "edges" and opened.hop == opened.num_hops - 1:
            most = MAX_DRAWN
            if opened.sampling is None:
                step = step._replace(reply_from=max(step.reply_from, opened.emit_from))
                most = max(1, (MAX_STEP_BODY - MAX_TIMINGS * TIMING.size) // (ITEMSIZE["fp32"] * self.vocab_size))
            num_rows = min(num_rows, max(0, step.reply_from - step.position) + most)
        return split_step(step, num_rows)

    def check(self, step: Step, opened: Open) -> None:
        """Raise ContextOverflow, ProtocolError or BadRequest for a step that the place of `opened` cannot compute."""
        _, _, _, position, count, _, _, content, ids, payload, _, _ = step
        if count < 1 or position + count > opened.capacity:
            raise ContextOverflow(f"positions up to {position + count} exceed the lease of {opened.capacity}")
        is_edges = opened.ends == "edges"
        if (payload is None) != (is_edges and opened.hop == 0) or (is_edges and ids is None):
            raise ProtocolError("a step lacks the tensor or the ids that its route calls for")
        if payload is not None:
            dtype, width, _, _ = payload
            if width != self.hidden_size or content != "hidden":
                raise ProtocolError(f"a step of width {width} does not fit this model")
            if dtype != self.wire_dtype:
                raise ProtocolError(f"a step in {dtype} does not fit a span in {self.wire_dtype}")
        if ids is not None and max(ids) >= self.vocab_size:
            raise BadRequest(f"token id {max(ids)} is outside the vocabulary of {self.vocab_size}")
