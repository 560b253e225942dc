"""What of a tokenizer.json may run where: a file from outside can make a letter take a minute, or a megabyte. Pure.

    text ─ normalizer ─ pre-tokenizer ─ model ─► ids            `is_plain`: no text takes these more than its length, so they
    ids ─ decoder ─► text                                        may run on an event loop. Others run in a process.
`check_decoder` refuses decoders that are not plain: tokens become text one by one, where they are drawn. `for_grammars`: a
tokenizer as grammars need it.
"""

import base64
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from copy import copy
from typing import Any, Final

from tokenizers import normalizers, pre_tokenizers

from manyhands.checkpoint.gguf_pre_tokenizers import PLAIN_SPLITS
from manyhands.checkpoint.ranked_tokenizer import KIMI_CUT
from manyhands.errors import BadRequest, ModelError

# Bytes of a token as the vocabulary spells it: the longest of the hub have some 500, runs of blanks.
MAX_TOKEN_BYTES: Final = 4096
MAX_TOKEN_ID: Final = (1 << 22) - 1  # tables have a row for each id; the largest vocabularies of the hub have 262,144
_MAX_CONTENT: Final = 16  # characters that a Replace or Prepend puts in
_MAX_GROWTH: Final = 32.0  # characters that all parts together make of one
# The library normalises added tokens while it loads them, and ends the process where it has no memory for one.
_MAX_NORMALISED: Final = 1 << 26  # characters of all of them together
_ESCAPED_LETTER: Final = re.compile(r"\\u00(?:[46][1-9a-fA-F]|[57][0-9aA])")
_IS_NORMALISED: Final = re.compile(r'"normalized"\s*:\s*true')
_NORMALIZER: Final = re.compile(r'"normalizer"\s*:\s*')
_CONTENT: Final = re.compile(r'"content"\s*:\s*"((?:[^"\\]|\\.)*)"')
_MAX_AROUND: Final = 16 << 10  # bytes of JSON of what is put before and behind a text
_CONTRACTIONS: Final = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL: Final = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_CASED: Final = tuple(
    rf"[^\r\n\p{{L}}\p{{N}}]?[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}]{upper}[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}]{lower}"
    for upper, lower in (("*", "+"), ("+", "*"))
)
# Expressions that cut texts in time that grows as their length does, as the hub's models have them; all others are not trusted.
_CUTS: Final = PLAIN_SPLITS | {
    KIMI_CUT,
    _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + _TAIL,
    _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + _TAIL,
    _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    "|".join(f"{cased}{_CONTRACTIONS}?" for cased in _CASED)
    + r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    "|".join(_CASED) + r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    " ?[^(\\s|[.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c])]+",  # BLOOM
    r"\p{N}{1,3}",
    r"\p{N}",
    "[0-9]",
    " ",
}
_NORMALIZERS: Final = frozenset("NFC NFD NFKC NFKD Lowercase Strip StripAccents ByteLevel".split())
_PRE_TOKENIZERS: Final = frozenset(
    "ByteLevel Metaspace Whitespace WhitespaceSplit Digits Punctuation CharDelimiterSplit UnicodeScripts".split()
)
_DECODERS: Final = frozenset("ByteLevel Metaspace Fuse Strip ByteFallback BPEDecoder WordPiece CTC".split())
_SPELLED: Final = ("BPE", "Unigram")  # models of which any text can be made
_DROPPING: Final = ("Whitespace", "WhitespaceSplit", "CharDelimiterSplit", "BertPreTokenizer")
_SPACES: Final = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
_SPACES_BACK: Final = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
_MODELS: Final = frozenset(("BPE", "Unigram", "WordLevel"))


def is_plain(backend: Any) -> bool:
    """Whether the text of a client takes a tokenizers.Tokenizer time and memory in proportion to its length."""
    around = backend.post_processor
    before = [*_parts(backend.normalizer, "normalizers")]
    cuts = [*_parts(backend.pre_tokenizer, "pretokenizers")]
    return (
        all(_is_known(part, _NORMALIZERS) for part in before)
        and all(_is_known(part, _PRE_TOKENIZERS) for part in cuts)
        and _growth([*before, *cuts]) <= _MAX_GROWTH
        and type(backend.model).__name__ in _MODELS
        and (around is None or len(around.__getstate__()) <= _MAX_AROUND)
    )


def check_vocabulary(vocabulary: Mapping[str, int]) -> int:
    """The bytes of the longest token. Raises ModelError for one that is too long, or an id that is too high."""
    longest, highest = max(len(token.encode()) for token in vocabulary), max(vocabulary.values())
    if longest > MAX_TOKEN_BYTES:
        raise ModelError(f"a token of {longest} bytes; at most {MAX_TOKEN_BYTES} are read")
    if highest > MAX_TOKEN_ID:
        raise ModelError(f"a token of the id {highest}; at most {MAX_TOKEN_ID} are read")
    return longest


def check_normalizers(text: str, further: int) -> None:
    """Raise ModelError if the normalizers of a tokenizer.json, `text`, could make too much of its added tokens and of `further`
    characters of others that are normalised: before the library reads it. Raises ValueError, RecursionError for other texts.

    It is not parsed: of the largest that takes a second and 300 MB. All that might be a normalizer counts.
    """
    if _ESCAPED_LETTER.search(text):  # a key may be spelled otherwise
        text = json.dumps(json.loads(text), ensure_ascii=False)
    if not further and not _IS_NORMALISED.search(text):
        return
    growth = max((_normalised(_decoded_at(text, match.end())) for match in _NORMALIZER.finditer(text)), default=1.0)
    size = further + sum(match.end(1) - match.start(1) for match in _CONTENT.finditer(text))
    if growth * size > _MAX_NORMALISED:
        raise ModelError(
            f"its tokenizer.json has normalizers that could make {growth:.3g} characters of one, and {size} characters of "
            f"added tokens; {_MAX_NORMALISED} together are read"
        )


def _decoded_at(text: str, start: int) -> Any:
    try:
        return json.JSONDecoder().raw_decode(text, start)[0]
    except ValueError:
        return None  # the library refuses it, too


def _normalised(part: Any) -> float:
    """How many characters a normalizer, as JSON has it, may make of one; of what is none 1."""
    if not isinstance(part, dict):
        return 1.0
    inner, content, map = part.get("normalizers"), part.get("content"), part.get("precompiled_charsmap")
    prepended = part.get("prepend")
    growth = math.prod(_normalised(each) for each in inner) if isinstance(inner, list) else 1.0
    growth *= 1.0 + len(prepended) if isinstance(prepended, str) else 1.0
    growth *= _growth_of({"type": "Replace", "pattern": {}, **part}) if isinstance(content, str) else 1.0
    return growth * (_longest_mapped(map) if isinstance(map, str) else 1.0)


def _longest_mapped(charsmap: str) -> float:
    """What a Precompiled makes of a character at most: behind the trie, whose size comes first, texts that end in zeros."""
    raw = base64.b64decode(charsmap + "===")
    texts = raw[4 + int.from_bytes(raw[:4], "little") :]
    return max(1.0, *(len(each.decode(errors="replace")) for each in texts.split(b"\0")))


def check_decoder(backend: Any) -> None:
    """Raise ModelError for a decoder that is not plain, or that the library has no answer to."""
    parts = [*_parts(backend.decoder, "decoders")]
    for part in parts:
        what = json.dumps(part)[:120]
        if not _is_known(part, _DECODERS):
            raise ModelError(f"its tokenizer.json has a decoder that could make long texts of short ones: {what}")
        if part.get("stop", 0) or part.get("start", 0) > 1 or part.get("suffix") == "":
            raise ModelError(f"its tokenizer.json has a decoder that cannot be followed token by token: {what}")
    if (growth := _growth(parts)) > _MAX_GROWTH:
        raise ModelError(
            f"its tokenizer.json has decoders that make {growth:.0f} characters of one; at most {_MAX_GROWTH:.0f} are read"
        )


def for_grammars(backend: Any) -> Any:
    """A copy that llguidance can use: it spells texts with it that the model is forced to write, which must come back as they
    were. So nothing normalises them but SentencePiece's sign for a space, and nothing is put before or left out.

    Raises BadRequest for a model or a decoder by which tokens are not the text that llguidance takes them for.
    """
    kind = type(backend.model).__name__
    odd = [part for part in _parts(backend.decoder, "decoders") if not _is_understood(part)]
    if kind not in _SPELLED or odd:
        what = f"a decoder {json.dumps(odd[0])[:120]}" if kind in _SPELLED else f"the kind {kind}"
        raise BadRequest(
            f"this model's tokenizer takes no grammars (it has {what}): ask without response_format, tool_choice and logprobs"
        )
    made = copy(backend)
    kept = [part for part in _parts(backend.normalizer, "normalizers") if part["type"] == "Prepend" or part == _SPACES]
    made.normalizer = _sequence(normalizers.Sequence([]), "normalizers", kept)
    cuts = [
        {**part, "add_prefix_space": False} if part["type"] == "ByteLevel" else part
        for part in _parts(backend.pre_tokenizer, "pretokenizers")
        if part["type"] not in _DROPPING and part.get("behavior") != "Removed"
    ]
    made.pre_tokenizer = _sequence(pre_tokenizers.Sequence([]), "pretokenizers", cuts)
    made.no_padding()
    made.no_truncation()
    return made


def _sequence(component: Any, inner: str, parts: list[Mapping[str, Any]]) -> Any:
    """An empty Sequence filled with parts as tokenizer.json has them."""
    component.__setstate__(json.dumps({"type": "Sequence", inner: parts}).encode())
    return component


def _is_understood(part: Mapping[str, Any]) -> bool:
    return part["type"] in ("ByteLevel", "ByteFallback", "Fuse", "Strip") or part == _SPACES_BACK


def _growth(parts: Iterable[Mapping[str, Any]]) -> float:
    """How many characters may stand for one behind all of `parts`; what each does once for all (NFKD) is not counted."""
    return math.prod(map(_growth_of, parts))


def _growth_of(part: Mapping[str, Any]) -> float:
    match part["type"]:
        case "Replace":
            pattern = part["pattern"].get("String")
            return max(1.0, len(part["content"]) / len(pattern) if pattern else 1.0 + len(part["content"]))
        case "ByteLevel":
            return 2.0  # a byte of a character becomes a character of two bytes
    return 1.0


def _parts(component: Any, inner: str) -> Iterator[Mapping[str, Any]]:
    """A component, or those of a Sequence, as tokenizer.json has them."""
    waiting = [] if component is None else [json.loads(component.__getstate__())]
    while waiting:
        part = waiting.pop()
        if part["type"] == "Sequence":
            waiting += reversed(part[inner])
        else:
            yield part


def _is_known(part: Mapping[str, Any], kinds: frozenset[str]) -> bool:
    match part["type"]:
        case "Replace":
            return "String" in part["pattern"] and len(part["content"]) <= _MAX_CONTENT
        case "Prepend":
            return len(part["prepend"]) <= _MAX_CONTENT
        case "Split":
            pattern = part["pattern"]
            return "String" in pattern or pattern.get("Regex") in _CUTS
        case kind:
            return kind in kinds
