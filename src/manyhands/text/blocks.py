"""Answers in blocks, as Inkling writes them (headed.py). Sans-I/O.

    <|message_model|><|content_thinking|>a thought<|end_message|><|message_model|><|content_text|>the answer<|end_message|>
    <|message_model|>f<|content_invoke_tool_json|>{"name": "f", "args": {...}}<|end_message|>

The prompt ends with the first `<|message_model|>`. A call is passed on as its object behind CALL_BLOCK.
"""

from typing import ClassVar

from manyhands.text.headed import HeadedReader, Message
from manyhands.text.reasoning import CALL_BLOCK, END_BLOCK, MODEL, TEXT_BLOCK, THOUGHT_BLOCK


class BlockReader(HeadedReader):
    """Reads such answers."""

    _head_ends: ClassVar = (THOUGHT_BLOCK, TEXT_BLOCK, CALL_BLOCK)
    _ends: ClassVar = (END_BLOCK,)
    _marks: ClassVar = (END_BLOCK, MODEL, CALL_BLOCK)
    _begins: ClassVar = (MODEL, THOUGHT_BLOCK, TEXT_BLOCK, CALL_BLOCK)

    def _begin(self) -> None:
        start = self._held.lstrip()
        calls = [f"{name}{CALL_BLOCK}" for name in self._functions]
        if any(start.startswith(call) for call in calls):
            self._state = "head"
        elif not any(call.startswith(start) for call in calls):
            super()._begin()

    def _said(self, head: str, mark: str) -> Message:
        if mark == CALL_BLOCK and self._functions:
            return Message("answer", CALL_BLOCK)
        return Message("thought" if mark == THOUGHT_BLOCK else "answer")
