"""What steps must look like to fit a span of a model. Pure."""

from dataclasses import dataclass

from manyhands.errors import BadRequest, ContextOverflow, ProtocolError
from manyhands.wire.message import DType, Open, Step


@dataclass(frozen=True, slots=True)
class Fit:
    """The sizes of a span's model."""

    hidden_size: int
    wire_dtype: DType
    vocab_size: int

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
