"""What a client says it has of an answer: a text in tokens, with where each begins."""

from typing import Any, Final, NamedTuple

MAX_RECEIVED: Final = 1 << 14  # tokens that are read of a text; what follows them is drawn one by one


class ReceivedText(NamedTuple):
    """A text, the ids of its tokens, and where in it each begins (in characters)."""

    text: str
    ids: tuple[int, ...]
    starts: tuple[int, ...]


def read_received(tokenizer: Any, text: str) -> ReceivedText:
    """`text` in the tokens of a TextTokenizer: the first MAX_RECEIVED of them, and as much of the text as they hold."""
    encoding = tokenizer.backend_tokenizer.encode(text, add_special_tokens=False)
    offsets = encoding.offsets
    if len(offsets) > MAX_RECEIVED:
        text, offsets = text[: offsets[MAX_RECEIVED - 1][1]], offsets[:MAX_RECEIVED]
    return ReceivedText(text, tuple(encoding.ids[:MAX_RECEIVED]), tuple([start for start, _ in offsets]))
