"""Answers in sections, as Kimi K3 writes them (headed.py). Sans-I/O.

    <|open|>think<|sep|>a thought<|close|>think<|sep|><|open|>response<|sep|>the answer<|close|>response<|sep|>
    <|open|>tools<|sep|><|open|>call tool="f" index="1"<|sep|><|open|>argument key="k" type="string"<|sep|>v<|close|>argument
    <|sep|><|close|>call<|sep|><|close|>tools<|sep|><|close|>message<|sep|>

The prompt ends with what opens the first section. The section of calls is passed on whole.
"""

from collections.abc import Collection
from typing import ClassVar

from manyhands.text.detokenize import overlap
from manyhands.text.dialects import KIMI3
from manyhands.text.headed import HeadedReader, Message
from manyhands.text.reasoning import CLOSE, OPEN, SEP


class SectionReader(HeadedReader):
    """Reads such answers. `is_open`: the prompt has begun a thought, else the answer."""

    _head_ends: ClassVar = (SEP,)
    _ends: ClassVar = ()
    _marks: ClassVar = (OPEN, CLOSE)
    _begins: ClassVar = (OPEN, CLOSE)

    def __init__(self, functions: Collection[str], *, is_open: bool) -> None:
        super().__init__(functions, "thought" if is_open else "answer")

    def _said(self, head: str, mark: str) -> Message | None:
        section = head.strip()
        if section == f"{OPEN}tools" and self._functions:
            return Message("answer", KIMI3.marker)
        if section in (f"{OPEN}think", f"{OPEN}response"):
            return Message("thought" if section.endswith("think") else "answer")
        return None

    def _next_head(self) -> tuple[int, int] | None:
        if not self._is_call:
            return super()._next_head()
        place = self._held.find(KIMI3.close)
        return None if place < 0 else (place + len(KIMI3.close),) * 2

    def _kept(self) -> int:
        return overlap(self._held, KIMI3.close) if self._is_call else super()._kept()
