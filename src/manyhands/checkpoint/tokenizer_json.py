"""Parts of a tokenizer.json, for tokenizers that come in other forms (gguf_tokenizer.py, ranked_tokenizer.py). Pure."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Final, TypeVar

from manyhands.errors import ModelError

_MAX_PIECE: Final = 1 << 10  # characters or bytes of a piece that is split into merges
# To cut a piece everywhere takes the square of its length, and pieces of pieces have many cuts: of all pieces together.
_MAX_CUT: Final = 1 << 27  # characters that are copied: a second or two. Gemma's 262,000 pieces take 20 million
_MAX_MERGES: Final = 1 << 21  # Gemma has 580,000

Piece = TypeVar("Piece", str, bytes)


def byte_symbols() -> list[str]:
    """The printable character that byte-level BPE writes for each byte (GPT-2's table, in byte order)."""
    plain = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    spare = iter(range(256, 512))
    return [chr(byte) if byte in plain else chr(next(spare)) for byte in range(256)]


def splits(pieces: Collection[Piece], where: str) -> Iterator[tuple[Piece, Piece, Piece]]:
    """Every piece that is two others, one behind the other, with the two; piece by piece. Raises ModelError if that is a lot of
    work."""
    if max(map(len, pieces), default=0) > _MAX_PIECE:
        raise ModelError(f"{where} refused: its vocabulary has a piece of more than {_MAX_PIECE} characters")
    if (copied := sum(len(piece) ** 2 for piece in pieces)) > _MAX_CUT:
        raise ModelError(f"{where} refused: to cut its pieces takes {copied} characters; at most {_MAX_CUT} are read")
    count = 0
    for piece in pieces:
        cuts = ((piece[:at], piece[at:]) for at in range(1, len(piece)))
        found = [(piece, left, right) for left, right in cuts if left in pieces and right in pieces]
        if (count := count + len(found)) > _MAX_MERGES:
            raise ModelError(f"{where} refused: its pieces are made of each other in more than {_MAX_MERGES} ways")
        yield from found


def bpe(ids: Mapping[str, int], merges: Sequence[tuple[str, str]], **more: Any) -> dict[str, Any]:
    """The model: pairs are merged in the order of `merges`."""
    plain = {"dropout": None, "continuing_subword_prefix": None, "end_of_word_suffix": None}
    return {"type": "BPE", **plain, **more, "vocab": ids, "merges": merges}


def byte_pairs(
    cuts: Sequence[str], ids: Mapping[str, int], merges: Sequence[tuple[str, str]], *, whole_first: bool
) -> dict[str, Any]:
    """Texts are cut by regular expressions, one after the other, and bytes merged. whole_first: a known word is one token."""
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    parts: list[dict[str, Any]] = [
        {"type": "Split", "pattern": {"Regex": cut}, "behavior": "Isolated", "invert": False} for cut in cuts
    ]
    return {
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*parts, level]},
        "decoder": {**level, "use_regex": True},
        "model": bpe(ids, merges, unk_token=None, fuse_unk=False, byte_fallback=False, ignore_merges=whole_first),
    }


def whole(
    parts: Mapping[str, Any],
    added: Sequence[Mapping[str, Any]],
    ids: Mapping[str, int],
    begin: str | None,
    end: str | None,
) -> dict[str, Any]:
    """All of a tokenizer.json. added: tokens that are matched in a text before it is cut; begin, end: are put around one."""
    plain = {"version": "1.0", "truncation": None, "padding": None}
    return {**plain, "added_tokens": added, "post_processor": _around(ids, begin, end), **parts}


def _around(ids: Mapping[str, int], begin: str | None, end: str | None) -> dict[str, Any]:
    one, other = ({"Sequence": {"id": id, "type_id": 0}} for id in "AB")
    before, behind = ([{"SpecialToken": {"id": token, "type_id": 0}}] if token else [] for token in (begin, end))
    return {
        "type": "TemplateProcessing",
        "single": [*before, one, *behind],
        "pair": [one, other],
        "special_tokens": {t: {"id": t, "ids": [ids[t]], "tokens": [t]} for t in (begin, end) if t},
    }
