"""What a reader of answers, and the reader of calls behind it, make of a text."""

from manyhands.testing.tiny import EOS
from manyhands.text.grammar import Grammar
from manyhands.text.headed import HeadedReader
from manyhands.text.reasoning import ThoughtReader
from manyhands.text.tools import CallArguments, CallStart, Content, Piece, ToolReader

Read = tuple[str, str, list[tuple[str, str]]]


def read(reader: HeadedReader | ThoughtReader, tools: ToolReader | None, parts: list[str]) -> Read:
    """Thoughts, the answer and calls, each with its arguments; without `tools` none is a call."""
    pairs = [reader.feed(part) for part in parts] + [reader.finish()]
    said: list[Piece] = [piece for _, text in pairs for piece in (tools.feed(text) if tools else [Content(text)])]
    said += tools.finish() if tools else []
    calls = [(piece.name, "") for piece in said if isinstance(piece, CallStart)]
    for piece in said:
        if isinstance(piece, CallArguments):
            calls[piece.index] = (calls[piece.index][0], calls[piece.index][1] + piece.text)
    return "".join(thought for thought, _ in pairs), "".join(p.text for p in said if isinstance(p, Content)), calls


def accepts(grammar: Grammar, ids: list[int]) -> bool:
    """Whether every token is allowed in turn, and the end after the last."""
    for length, token in enumerate([*ids, EOS]):
        allowed = grammar.allowed(ids[:length])
        if allowed is not None and not allowed[token]:
            return False
    return True
