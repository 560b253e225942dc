"""Answers in sections, as Kimi K3 writes them (headed.py). Sans-I/O.

    <|open|>think<|sep|>a thought<|close|>think<|sep|><|open|>response<|sep|>the answer<|close|>response<|sep|>
    <|open|>tools<|sep|><|open|>call tool="f" index="1"<|sep|><|open|>argument key="k" type="string"<|sep|>v<|close|>argument
    <|sep|><|close|>call<|sep|><|close|>tools<|sep|><|close|>message<|sep|>

The prompt ends with what opens the first section. The section of calls is passed on whole.
"""

from collections.abc import Collection
from typing import ClassVar, Final

from manyhands.text.detokenize import overlap
from manyhands.text.dialects import KIMI3
from manyhands.text.headed import HeadedReader, Message, first_of
from manyhands.text.reasoning import CLOSE, OPEN, SEP

_CALLS_END: Final = (KIMI3.close, f"{CLOSE}message{SEP}")


class SectionReader(HeadedReader):
    """Reads such answers. `is_open`: the prompt has begun a thought, else the answer."""

    _head_ends: ClassVar = (SEP,)
    _ends: ClassVar = ()
    _marks: ClassVar = (OPEN, CLOSE)
    _begins: ClassVar = (OPEN, CLOSE)

    def __init__(self, functions: Collection[str], *, is_open: bool) -> None:
        super().__init__(functions, "thought" if is_open else "answer")

    def _said(self, head: str, mark: str) -> Message | None:
        section = head[max(head.rfind(OPEN), head.rfind(CLOSE), 0) :].strip()
        if section == f"{OPEN}tools" and self._functions:
            return Message("answer", KIMI3.marker)
        if section in (f"{OPEN}think", f"{OPEN}response"):
            return Message("thought" if section.endswith("think") else "answer")
        return None

    def _next_head(self) -> tuple[int, int] | None:
        if not self._is_call:
            return super()._next_head()
        found = first_of(self._held, _CALLS_END)
        if found is None:
            return None
        place, end = found
        return place + len(end) * (end == KIMI3.close), place + len(end)

    def _kept(self) -> int:
        return max(overlap(self._held, end) for end in _CALLS_END) if self._is_call else super()._kept()
