"""Answers in channels, as gpt-oss writes them (headed.py). Sans-I/O.

    <|channel|>analysis<|message|>a thought<|end|><|start|>assistant<|channel|>final<|message|>the answer
    <|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{...}<|call|>

A head may also begin with its recipient. What is said in `commentary` without one is part of the answer. A call is passed on as
its name, ARGS and its object behind CHANNEL.
"""

import re
from typing import ClassVar, Final

from manyhands.text.calls import ARGS
from manyhands.text.headed import HeadedReader, Message
from manyhands.text.reasoning import CHANNEL, END, MESSAGE, START

_RECIPIENT: Final = re.compile(r"to=(functions\.)?([\w-]+)")
_CHANNEL: Final = re.compile(re.escape(CHANNEL) + r"\s*(\w*)")


class ChannelReader(HeadedReader):
    """Reads such answers. What is said to others than functions is text, and to tools of the model's own a thought."""

    _head_ends: ClassVar = (MESSAGE,)
    _ends: ClassVar = (END,)
    _marks: ClassVar = (END, START, CHANNEL)
    _begins: ClassVar = (CHANNEL, START, "to=")

    def _said(self, head: str, mark: str) -> Message:
        recipient, channel = _RECIPIENT.search(head), _CHANNEL.search(head)
        if recipient is not None and recipient[2] in self._functions:
            return Message("answer", f"{CHANNEL}{recipient[2]}{ARGS}")
        is_analysis = channel is not None and channel[1] == "analysis"
        is_thought = is_analysis if recipient is None else recipient[1] is None
        return Message("thought" if is_thought else "answer")
