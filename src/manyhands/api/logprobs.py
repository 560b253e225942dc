"""Log probabilities in OpenAI's two forms, with the true bytes of every token."""

from collections.abc import Sequence
from typing import Any

from manyhands.origin import Token
from manyhands.text.grammar import Grammars


class Spelling:
    """The bytes of single tokens, also of those that are only part of a character. `load` first; it may block."""

    def __init__(self, grammars: Grammars) -> None:
        self._grammars = grammars
        self._table: Any = None

    def load(self) -> None:
        """Raises BadRequest if this tokenizer has no table."""
        self._table = self._grammars.table

    def bytes_of(self, token: int) -> bytes:
        spelled: bytes = self._table.decode_bytes([token])
        return spelled

    def text_of(self, token: int) -> str:
        """The text of a token; "bytes:\\xe2\\x80" where it is no text by itself, as at OpenAI."""
        raw = self.bytes_of(token)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def chat_logprobs(spelling: Spelling | None, tokens: Sequence[Token]) -> dict[str, Any] | None:
    """The form of chat completions; None where none were asked for."""
    if spelling is None:
        return None
    return {"content": [token_logprobs(spelling, token) for token in tokens], "refusal": None}


def token_logprobs(spelling: Spelling, token: Token) -> dict[str, Any]:
    """One token with its alternatives."""
    top = [_entry(spelling, other, logprob) for other, logprob in token.top or ()]
    return {**_entry(spelling, token.id, token.logprob or 0.0), "top_logprobs": top}


def _entry(spelling: Spelling, token: int, logprob: float) -> dict[str, Any]:
    return {"token": spelling.text_of(token), "logprob": logprob, "bytes": list(spelling.bytes_of(token))}


def text_logprobs(spelling: Spelling | None, tokens: Sequence[Token], offset: int) -> dict[str, Any] | None:
    """The form of completions. `offset`: characters shown before."""
    if spelling is None:
        return None
    names = [spelling.text_of(token.id) for token in tokens]
    offsets = []
    for token in tokens:
        offsets.append(offset)
        offset += len(token.text)
    tops = [{spelling.text_of(other): logprob for other, logprob in token.top or ()} for token in tokens]
    return {
        "tokens": names,
        "token_logprobs": [token.logprob for token in tokens],
        "top_logprobs": tops,
        "text_offset": offsets,
    }
