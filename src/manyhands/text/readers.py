"""Which reader reads a model's answer."""

from collections.abc import Collection

from manyhands.text.blocks import BlockReader
from manyhands.text.channels import ChannelReader
from manyhands.text.headed import HeadedReader, State
from manyhands.text.reasoning import Thinking, ThoughtReader
from manyhands.text.recipients import RecipientReader
from manyhands.text.sections import SectionReader


def answer_reader(
    thinking: Thinking | None, functions: Collection[str], *, is_open: bool
) -> ThoughtReader | HeadedReader:
    """A reader of one answer. `functions` may be called; `is_open`: the prompt ended within a thought."""
    begun: State = "thought" if is_open else "start"
    match thinking.heads if thinking is not None else None:
        case None:
            return ThoughtReader(thinking, is_open=is_open)
        case "channels":
            return ChannelReader(functions, begun)
        case "recipients":
            return RecipientReader(functions, begun)
        case "blocks":
            return BlockReader(functions, begun)
        case "sections":
            return SectionReader(functions, is_open=is_open)
