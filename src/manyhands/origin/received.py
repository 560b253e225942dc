"""What a client says it has of an answer, as guesses of its tokens: so a stream goes on about as soon as a prompt is read.

    text ─ ids ─► guesses ─ the route computes their rows, as many at a time as of a prompt ─ the tokens are drawn as always

A guess is verified like any draft (speculate.py): a text that is not the answer's costs time and changes nothing. The tokens
that were drawn need not be those that the tokenizer splits the text into; where they part, guesses go on at the next token
that begins where a drawn one ends.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import Final

from manyhands.text.received import ReceivedText

MAX_STRAY: Final = 8  # drawn tokens without a guess at their end, before the text is given up
MAX_MISSES: Final = 32  # guesses that were wrong, before the text is given up
AFTER_MISS: Final = 16  # guesses on their way at once, after one was wrong
_PARTIAL: Final = "\ufffd"  # what the bytes of a part of a character are decoded to


class ReceivedGuesses:
    """Guesses of one answer by what its client has received. Pure; asked in order, as the answer grows.

    `most` bounds the guesses: no more tokens were told. `decode` gives the text of ids, without special tokens;
    ids from `vocab_size` on are no guesses.
    """

    def __init__(
        self, received: ReceivedText, most: int, vocab_size: int, decode: Callable[[Sequence[int]], str]
    ) -> None:
        self._text, self._starts, self._decode = received.text, received.starts, decode
        self._ids = list(takewhile(lambda i: 0 <= i < vocab_size, received.ids[:most]))
        self._next = 0  # the first of _ids that is not drawn yet
        self._seen = 0  # tokens of the answer
        self._stray: list[int] = []  # the last tokens of the answer, that no guess is known to follow
        self._misses, self._reach = 0, len(self._ids)
        self._is_over = not self._ids

    def propose(self, answer: Sequence[int], ahead: int, most: int) -> Sequence[int] | None:
        """At most `most` guesses of what follows `answer` and the `ahead` guesses of this that are on their way.

        None once there are no more and none is on its way: for good.
        """
        for token in answer[self._seen :]:
            self._follow(token)
        self._seen = len(answer)
        start = self._next + ahead
        self._is_over |= self._next == len(self._ids) and not ahead
        if self._is_over:
            return None
        return () if self._stray else self._ids[start : min(start + most, self._next + self._reach)]

    def _follow(self, token: int) -> None:
        if self._is_over:
            return
        if not self._stray and self._next < len(self._ids) and self._ids[self._next] == token:
            self._next += 1
            return
        self._misses, self._reach = self._misses + (not self._stray), AFTER_MISS
        self._stray.append(token)
        self._is_over = self._misses > MAX_MISSES or not self._realign()

    def _realign(self) -> bool:
        """Find the guess that follows the stray tokens, if one begins there; whether their text is the client's so far."""
        if self._next == len(self._ids):
            return False
        before = self._ids[self._next - 1 : self._next] if self._next else []  # some tokenizers cut the first space
        text, start = self._decode([*before, *self._stray])[len(self._decode(before)) :], self._starts[self._next]
        if not text.endswith(_PARTIAL):
            if not self._text.startswith(text, start):
                text = text.lstrip()  # what is shown of an answer may lack white space
                if not self._text.startswith(text, start):
                    return False
            found = bisect_left(self._starts, start + len(text), self._next, len(self._ids))
            if found == len(self._ids):
                return False
            if self._starts[found] == start + len(text):
                self._next = found
                self._stray.clear()
        return len(self._stray) <= MAX_STRAY
