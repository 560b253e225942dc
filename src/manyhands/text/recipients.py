"""Answers that are messages to recipients, as Muse writes them (headed.py). Sans-I/O.

    <|start|>assistant to=self<|message|>a thought<|eom|><|start|>assistant to=user<|message|>the answer
    <|start|>assistant to=f<|message|><atem:function_calls>
    <atem:invoke name="f">
    <atem:parameter name="k">v</atem:parameter>
    </atem:invoke>
    </atem:function_calls><|eom|>

The prompt ends with the first `<|start|>assistant`. A name may stand behind a namespace and a dot (f.f). What a call says is
passed on behind START, without what opens it.
"""

import re
from collections.abc import Collection
from typing import ClassVar, Final

from manyhands.text.dialects import MUSE
from manyhands.text.headed import HeadedReader, Message, State
from manyhands.text.reasoning import MESSAGE, MORE, START

_TO: Final = re.compile(r"to=([^\s<]+)")
_OPENS: Final = MUSE.lead.strip()
# A thought may lack its end, as models were seen to write; the head behind it has no START then.
_BARE: Final = re.compile(r"\s(to=[^\s<]{1,520}" + re.escape(MESSAGE) + ")")
_MAYBE_BARE: Final = re.compile(r"\s(?:t|to|to=[^\s<]{0,520}(?:<[|a-z]{0,9})?)?\Z")


class RecipientReader(HeadedReader):
    """Reads such answers. What is said to oneself is a thought, to any but a function the answer."""

    _head_ends: ClassVar = (MESSAGE,)
    _ends: ClassVar = (MORE,)
    _marks: ClassVar = (MORE, START)
    _begins: ClassVar = (START, "to=", MESSAGE)

    def __init__(self, functions: Collection[str], state: State = "start") -> None:
        super().__init__(functions, state)
        self._is_opened = True  # what opens the call of the message, if it stands there, is stepped over

    def _said(self, head: str, mark: str) -> Message:
        found = _TO.search(head)
        recipient = found[1] if found is not None else "user"
        self._is_opened = recipient.rpartition(".")[2] not in self._functions
        if not self._is_opened:
            return Message("answer", START)
        return Message("thought" if recipient == "self" else "answer")

    def _read_body(self) -> str:
        if not self._is_opened:
            rest = self._held.lstrip()
            if _OPENS.startswith(rest):
                return ""
            self._held, self._is_opened = rest.removeprefix(_OPENS), True
        return super()._read_body()

    def finish(self) -> tuple[str, str]:
        if not self._is_opened:  # of a call that has not begun nothing is shown
            self._held = ""
        return super().finish()

    def _next_head(self) -> tuple[int, int] | None:
        found = super()._next_head()
        bare = _BARE.search(self._held) if self._state == "thought" else None
        if bare is None or (found is not None and found[0] < bare.start()):
            return found
        return bare.start(), bare.start(1)

    def _kept(self) -> int:
        maybe = _MAYBE_BARE.search(self._held) if self._state == "thought" else None
        return max(super()._kept(), len(self._held) - maybe.start() if maybe is not None else 0)
