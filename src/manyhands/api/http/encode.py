"""JSON that is encoded as it grows and sent in pieces: however long an answer is, one piece of it is little work.

    JsonRows  ─ append(item), encoded at once ─┐
    JsonText  ─ a long string ─────────────────┤
    JsonBytes ─ encoded elsewhere ─────────────┼─ pieces(value that holds them) ─► about PIECE_BYTES each
    JsonItems ─ made when they are written ────┘

Of a token with k alternatives an answer keeps only its row: about 60 bytes for each of the k + 1.
"""

import asyncio
import json
from collections.abc import Callable, Iterable, Iterator
from typing import Any
from uuid import uuid4

from manyhands.text.whole_json import read_object

# Of an answer that is encoded, joined and written in one turn of the event loop. A piece may be larger by one item of it, or
# by what is no JsonRows and no JsonText: a client's tools, which are bounded (prepare.py).
PIECE_BYTES = 32 << 10
HOLE = uuid4().hex  # stands where a part is put in; no client can say it
_HOLE = f'"{HOLE}"'


def encode(value: Any) -> bytes:
    """As compact JSON, without JsonRows or JsonText in it."""
    return _JSON.encode(value).encode()


class JsonRows:
    """A JSON array that only grows, of items that are encoded when they are appended."""

    __slots__ = ("_rows",)

    def __init__(self) -> None:
        self._rows: list[bytes] = []

    def __len__(self) -> int:
        return len(self._rows)

    def append(self, item: Any) -> None:
        """Add an item, which may not hold JsonRows or JsonText."""
        self._rows.append(encode(item))

    def take(self, other: "JsonRows") -> None:
        """Add the items of `other`."""
        self._rows += other._rows

    @property
    def size(self) -> int:
        """What it holds, in bytes."""
        return sum(map(len, self._rows))

    def parts(self) -> Iterator[bytes]:
        """As JSON, an item at a time."""
        before = b"["
        for row in self._rows:
            yield before
            yield row
            before = b","
        yield b"]" if self._rows else b"[]"


class JsonText:
    """A string of any length, which may grow."""

    __slots__ = ("_texts",)

    def __init__(self, text: str = "") -> None:
        self._texts = [text]

    def add(self, text: str) -> None:
        """Go on with `text`."""
        self._texts.append(text)

    @property
    def size(self) -> int:
        """What it holds, in characters."""
        return sum(map(len, self._texts))

    def parts(self) -> Iterator[bytes]:
        """As JSON, at most PIECE_BYTES characters at a time."""
        yield b'"'
        for text in self._texts:
            for start in range(0, len(text), PIECE_BYTES):
                yield encode(text[start : start + PIECE_BYTES])[1:-1]
        yield b'"'


class JsonBytes:
    """JSON that was encoded before: in another process, say."""

    __slots__ = ("_data", "size")

    def __init__(self, data: bytes) -> None:
        self._data, self.size = data, len(data)

    def parts(self) -> Iterator[bytes]:
        """At most PIECE_BYTES at a time."""
        for start in range(0, len(self._data), PIECE_BYTES):
            yield self._data[start : start + PIECE_BYTES]


class JsonItems:
    """A JSON array whose items are made and encoded one by one, when their turn to be written comes."""

    __slots__ = ("_items",)
    size = 0  # nothing is held

    def __init__(self, items: Iterator[Any]) -> None:
        """`items`, which may not hold parts, are taken once."""
        self._items = items

    def parts(self) -> Iterator[bytes]:
        """As JSON, an item at a time."""
        before = b"["
        for item in self._items:
            yield before + encode(item)
            before = b","
        yield b"[]" if before == b"[" else b"]"


async def whole_object(text: str) -> JsonBytes | None:
    """`text` as it stands, None unless it is a JSON object. Other work is done between parts of a long one."""
    try:
        for _ in read_object(text):
            await asyncio.sleep(0)
    except ValueError:
        return None
    return JsonBytes(text.encode())


Part = JsonRows | JsonText | JsonBytes | JsonItems


def pieces(
    value: Any, before: bytes = b"", after: bytes = b"", note: Callable[[int], None] = lambda size: None
) -> Iterator[bytes]:
    """`value`, which may hold Parts, as compact JSON between `before` and `after`, lazily.

    `note` is told before the first piece how much the Parts hold.
    """
    held: list[Part] = []

    def hold(part: Any) -> str:
        if not isinstance(part, Part):
            raise TypeError(f"{type(part).__name__} is no JSON")
        held.append(part)
        return HOLE

    skeleton = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), default=hold).encode(value)
    if not held:
        yield b"%b%b%b" % (before, skeleton.encode(), after)
        return
    note(sum(part.size for part in held))
    yield from _joined(_filled(skeleton.split(_HOLE), held, before, after))


def _filled(skeleton: list[str], held: list[Part], before: bytes, after: bytes) -> Iterator[bytes]:
    yield before + skeleton[0].encode()
    for part, text in zip(held, skeleton[1:], strict=True):
        yield from part.parts()
        yield text.encode()
    yield after


def _joined(parts: Iterable[bytes]) -> Iterator[bytes]:
    group: list[bytes] = []
    size = 0
    for part in parts:
        group.append(part)
        size += len(part)
        if size >= PIECE_BYTES:
            yield b"".join(group)
            group, size = [], 0
    if group:
        yield b"".join(group)


_JSON = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))
