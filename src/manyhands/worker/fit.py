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
        end = step.position + step.count
        if step.count < 1 or end > opened.capacity:
            raise ContextOverflow(f"positions up to {end} exceed the lease of {opened.capacity}")
        embeds = opened.ends == "edges" and opened.hop == 0
        if (step.payload is None) != embeds or (opened.ends == "edges" and step.ids is None):
            raise ProtocolError("a step lacks the tensor or the ids that its route calls for")
        if step.payload is not None and (step.payload.width, step.content) != (self.hidden_size, "hidden"):
            raise ProtocolError(f"a step of width {step.payload.width} does not fit this model")
        if step.payload is not None and step.payload.dtype != self.wire_dtype:
            raise ProtocolError(f"a step in {step.payload.dtype} does not fit a span in {self.wire_dtype}")
        if step.ids is not None and max(step.ids) >= self.vocab_size:
            raise BadRequest(f"token id {max(step.ids)} is outside the vocabulary of {self.vocab_size}")
