"""What a preparing process says, as its parent reads it."""

from manyhands.api.preparation.desk import Prepared
from manyhands.api.preparation.process import HEAD_BYTES, AnswerParts, lengths_of, to_answer
from manyhands.errors import ManyhandsError


def parts_of(answer: bytes) -> AnswerParts:
    """The parts behind its head."""
    rest, parts = answer[HEAD_BYTES:], list[bytes]()
    for length in lengths_of(answer[:HEAD_BYTES]):
        parts.append(rest[:length])
        rest = rest[length:]
    assert not rest
    return AnswerParts(*parts)


def told(made: Prepared | ManyhandsError) -> AnswerParts:
    """What the process says of `made`."""
    return parts_of(to_answer(made))
