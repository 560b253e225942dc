"""Log probabilities in OpenAI's two forms, with the true bytes of every token."""

from typing import Any, Protocol

from manyhands.api.http.encode import JsonRows
from manyhands.origin import Token
from manyhands.text.grammar import Grammars

IMPOSSIBLE = -9999.0  # as at OpenAI: JSON has no infinity


def finite(logprob: float) -> float:
    """As JSON can say it."""
    return max(logprob, IMPOSSIBLE)


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


class Odds(Protocol):
    """The log probabilities of a text, encoded token by token."""

    def add(self, token: Token, offset: int) -> None:
        """One more token. `offset`: characters shown before it."""

    def shown(self) -> dict[str, Any]:
        """All of them, as `logprobs` of a choice (encode.py)."""


class ChatOdds:
    """The form of chat completions."""

    def __init__(self, spelling: Spelling) -> None:
        self._spelling, self._content = spelling, JsonRows()

    def add(self, token: Token, offset: int) -> None:
        self._content.append(token_logprobs(self._spelling, token))

    def shown(self) -> dict[str, Any]:
        return {"content": self._content, "refusal": None}


class TextOdds:
    """The form of completions."""

    def __init__(self, spelling: Spelling) -> None:
        self._spelling = spelling
        self._tokens, self._logprobs, self._tops, self._offsets = JsonRows(), JsonRows(), JsonRows(), JsonRows()

    def add(self, token: Token, offset: int) -> None:
        text_of = self._spelling.text_of
        self._tokens.append(text_of(token.id))
        self._logprobs.append(None if token.logprob is None else finite(token.logprob))
        if token.top:  # the token that was drawn is among them, as at OpenAI
            drawn = {text_of(token.id): finite(token.logprob or 0.0)}
            self._tops.append({text_of(other): finite(logprob) for other, logprob in token.top} | drawn)
        self._offsets.append(offset)

    def shown(self) -> dict[str, Any]:
        return {
            "tokens": self._tokens,
            "token_logprobs": self._logprobs,
            "top_logprobs": self._tops if len(self._tops) else None,
            "text_offset": self._offsets,
        }


def token_logprobs(spelling: Spelling, token: Token) -> dict[str, Any]:
    """One token with its alternatives."""
    top = [_entry(spelling, other, logprob) for other, logprob in token.top or ()]
    return {**_entry(spelling, token.id, token.logprob or 0.0), "top_logprobs": top}


def _entry(spelling: Spelling, token: int, logprob: float) -> dict[str, Any]:
    return {"token": spelling.text_of(token), "logprob": finite(logprob), "bytes": list(spelling.bytes_of(token))}
