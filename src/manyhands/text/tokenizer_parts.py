"""What of a tokenizer.json may run where: a file from outside can make a letter take a minute, or a megabyte. Pure.

    text ─ normalizer ─ pre-tokenizer ─ model ─► ids            `is_plain`: no text takes these more than its length, so they
    ids ─ decoder ─► text                                        may run on an event loop. Others run in a process.
`check_decoder` refuses decoders that are not plain: tokens become text one by one, where they are drawn.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any, Final

from manyhands.checkpoint.gguf_tokenizer import KNOWN_CUTS
from manyhands.errors import ModelError

# Bytes of a token as the vocabulary spells it: the longest of the hub have some 500, runs of blanks.
MAX_TOKEN_BYTES: Final = 4096
_MAX_CONTENT: Final = 16  # characters that a Replace or Prepend puts in
_MAX_AROUND: Final = 16 << 10  # bytes of JSON of what is put before and behind a text
_CONTRACTIONS: Final = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL: Final = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_CASED: Final = tuple(
    rf"[^\r\n\p{{L}}\p{{N}}]?[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}]{upper}[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}]{lower}"
    for upper, lower in (("*", "+"), ("+", "*"))
)
# Expressions that cut texts in time that grows as their length does, as the hub's models have them; all others are not trusted.
_CUTS: Final = KNOWN_CUTS | {
    _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + _TAIL,
    _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + _TAIL,
    "|".join(f"{cased}{_CONTRACTIONS}?" for cased in _CASED)
    + r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    "|".join(_CASED) + r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
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
_MODELS: Final = frozenset(("BPE", "Unigram", "WordLevel"))


def is_plain(backend: Any) -> bool:
    """Whether the text of a client takes a tokenizers.Tokenizer time and memory in proportion to its length."""
    around = backend.post_processor
    return (
        all(_is_known(part, _NORMALIZERS) for part in _parts(backend.normalizer, "normalizers"))
        and all(_is_known(part, _PRE_TOKENIZERS) for part in _parts(backend.pre_tokenizer, "pretokenizers"))
        and type(backend.model).__name__ in _MODELS
        and (around is None or len(around.__getstate__()) <= _MAX_AROUND)
    )


def check_decoder(backend: Any) -> None:
    """Raise ModelError for a decoder that is not plain."""
    for part in _parts(backend.decoder, "decoders"):
        if not _is_known(part, _DECODERS):
            what = json.dumps(part)[:120]
            raise ModelError(f"its tokenizer.json has a decoder that could make long texts of short ones: {what}")


def _parts(component: Any, inner: str) -> Iterator[Mapping[str, Any]]:
    """A component, or those of a Sequence, as tokenizer.json has them."""
    waiting = [] if component is None else [json.loads(component.__getstate__())]
    while waiting:
        part = waiting.pop()
        if part["type"] == "Sequence":
            waiting += part[inner]
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
