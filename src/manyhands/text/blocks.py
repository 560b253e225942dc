"""Answers in blocks, as Inkling writes them (headed.py). Sans-I/O.

    <|message_model|><|content_thinking|>a thought<|end_message|><|message_model|><|content_text|>the answer<|end_message|>
    <|message_model|>f<|content_invoke_tool_json|>{"name": "f", "args": {...}}<|end_message|>
    <|message_model|>f<|content_invoke_tool_text|>a call that is no JSON, which is part of the answer<|end_message|>

The prompt ends with the first `<|message_model|>`. A call is passed on as its object behind CALL_BLOCK.
"""

from typing import ClassVar

from manyhands.text.headed import HeadedReader, Message
from manyhands.text.reasoning import CALL_BLOCK, END_BLOCK, MODEL, TEXT_BLOCK, TEXT_CALL_BLOCK, THOUGHT_BLOCK


class BlockReader(HeadedReader):
    """Reads such answers."""

    _head_ends: ClassVar = (THOUGHT_BLOCK, TEXT_BLOCK, CALL_BLOCK, TEXT_CALL_BLOCK)
    _ends: ClassVar = (END_BLOCK,)
    _marks: ClassVar = (END_BLOCK, MODEL, *_head_ends)
    _begins: ClassVar = (MODEL, *_head_ends)

    def _begin(self) -> None:
        """A head may begin with the name of a function."""
        start = self._held.lstrip()
        name = start.partition("<")[0]
        rest = start[len(name) :]
        if name in self._functions and rest.startswith(CALL_BLOCK):
            self._state = "head"
        elif name in self._functions and CALL_BLOCK.startswith(rest):
            return
        elif rest or not any(known.startswith(name) for known in self._functions):
            super()._begin()

    def _said(self, head: str, mark: str) -> Message:
        if mark == CALL_BLOCK and self._functions:
            return Message("answer", CALL_BLOCK)
        return Message("thought" if mark == THOUGHT_BLOCK else "answer")
