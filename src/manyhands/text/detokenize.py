"""Ids to text, one at a time: the step from a drawn token to what a reader sees. Without model and network.

Three things keep the pieces honest:

* *Context.* A token's text depends on its neighbours (SentencePiece drops the space of a first word, a character may be
  spread over several byte tokens). So the unread ids are decoded behind a short window of ids already shown, and what
  the window alone gives is cut off: the prefix_offset / read_offset technique of vLLM (`detokenize_incrementally`) and
  text-generation-inference (`Model.decode_token`).
* *Unfinished characters.* While the text ends in U+FFFD the last bytes may be the head of a character: nothing is shown
  until the rest has come, `flush`, or MAX_UNREAD ids have come: what so many leave unfinished are no characters. (Each id is
  decoded together with the unread ones, so they must not become many: a client can bias all tokens but one away.)
* *Stop strings* may span tokens: the longest end of the text that could still become a stop string is held back.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal, Protocol

# As vLLM (INITIAL_INCREMENTAL_DETOKENIZATION_OFFSET = 5): enough for the longest character (4 byte tokens) and a space.
_PROMPT_WINDOW = 6
# Ids without text of their own that wait for more: special tokens, or bytes of characters of at most four.
MAX_UNREAD: Final = 32
_REPLACEMENT = "\ufffd"


class Decodes(Protocol):
    """What is asked of a tokenizer here."""

    def decode(self, ids: list[int], /, *, skip_special_tokens: bool) -> str: ...


@dataclass(frozen=True, slots=True)
class TextPiece:
    """Text that may be shown now (often empty), and whether the text ends with it."""

    text: str
    finished: Literal["stop"] | None


class Detokenizer:
    """Turns the generated ids of one request into pieces of text.

    Without a stop, the pieces and the flush together are what the generated ids add to the decoded prompt; for an empty
    prompt, `tokenizer.decode(ids, skip_special_tokens=True)`. Only where an id
    makes the tokenizer rewrite text already shown (a byte-fallback tokenizer blanks a whole run of bytes once it turns
    invalid; a prompt cut within a character) can it not follow; then the new ids are decoded by themselves.
    """

    def __init__(
        self,
        tokenizer: Decodes,
        stop: tuple[str, ...],
        stop_ids: Iterable[int],
        eos_ids: Iterable[int],
        prompt_ids: Sequence[int],
        marks: Mapping[int, str] | None = None,
    ) -> None:
        """`stop` strings are not empty. Pass no `eos_ids` for a request that ignores them.

        `marks`: special tokens that are shown as this text; all others show nothing.
        """
        self._marks = marks or {}
        self._tokenizer = tokenizer
        self._end_ids = frozenset(stop_ids) | frozenset(eos_ids)
        self._shown_ids = list(prompt_ids[-_PROMPT_WINDOW:])  # the window
        self._unread_ids: list[int] = []
        self._tail = _StopTail(stop)

    @property
    def stopped_by(self) -> str | None:
        """The stop string that ended the text; None if it goes on, or a token ended it."""
        return self._tail.stopped_by

    def feed(self, token_id: int) -> TextPiece:
        """Take the next id; return the text it releases. After a piece with `finished`, further ids give nothing.

        A stop id or end id shows no text of its own, but releases what was held back.
        """
        if not self._tail.is_stopped and token_id in self._end_ids:
            text = self.flush()
            self._tail.is_stopped = True
        elif token_id in self._marks:
            text = self._tail.push(self._read(is_last=True) + self._marks[token_id])
        else:
            self._unread_ids.append(token_id)
            text = self._tail.push(self._read(is_last=False))
        return TextPiece(text, "stop" if self._tail.is_stopped else None)

    def flush(self) -> str:
        """Return what was held back, at the end of the ids: an unfinished character, the beginning of a stop string."""
        return self._tail.push(self._read(is_last=True)) + self._tail.release()

    def _read(self, *, is_last: bool) -> str:
        """Return the text of the unread ids and move the window on, or "" if it is not (all) there yet."""
        shown = self._decode(self._shown_ids)
        text = self._decode(self._shown_ids + self._unread_ids)
        fresh = text.removeprefix(shown) if text.startswith(shown) else self._decode(self._unread_ids)
        is_enough = is_last or len(self._unread_ids) >= MAX_UNREAD
        if not is_enough and (not fresh or fresh.endswith(_REPLACEMENT)):
            return ""
        if not fresh:
            self._unread_ids = self._unread_ids[-_PROMPT_WINDOW:] if not is_last else self._unread_ids
            return ""
        self._shown_ids, self._unread_ids = self._unread_ids, []
        return fresh

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=True)


class _StopTail:
    """The end of the text that may yet become a stop string. What it lets out does not depend on how text is cut."""

    def __init__(self, stop: tuple[str, ...]) -> None:
        self.is_stopped = False
        self.stopped_by: str | None = None
        self._stop = stop
        self._held = ""

    def push(self, text: str) -> str:
        """Take text; return what is safe to show. Nothing comes out from the stop string on."""
        if self.is_stopped:
            return ""
        self._held += text
        cut = self._find_stop()
        if cut is not None:
            self.is_stopped = True
            return self._take(cut)
        return self._take(len(self._held) - self._count_suspect())

    def release(self) -> str:
        """Return everything held, or "" after a stop."""
        return "" if self.is_stopped else self._take(len(self._held))

    def _take(self, count: int) -> str:
        taken, self._held = self._held[:count], self._held[count:]
        return taken

    def _find_stop(self) -> int | None:
        """Return where the stop string that is complete first begins (the longest of those that end together)."""
        found = ((self._held.find(stop), stop) for stop in self._stop)
        ends = [(start + len(stop), start, stop) for start, stop in found if start >= 0]
        if not ends:
            return None
        _, start, self.stopped_by = min(ends)
        return start

    def _count_suspect(self) -> int:
        """Return the length of the longest end of the text that begins a stop string."""
        return max((overlap(self._held, stop) for stop in self._stop), default=0)


def overlap(text: str, stop: str) -> int:
    """Return the length of the longest end of `text` with which `stop` begins (0 if none)."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)
