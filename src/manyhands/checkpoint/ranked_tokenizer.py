"""Vocabularies of ranked bytes as the tokenizer.json that they stand for: Mistral's tekken.json and Kimi's tiktoken.model.

A word that is a token is that token; else the two neighbours are merged whose bytes have the lowest rank as a token. Merges
have an order of their own in a tokenizer.json: of every way to make a token of two others, by the token's rank. Pure.
"""

import base64
import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from manyhands.checkpoint.header import check_values
from manyhands.checkpoint.tokenizer_json import byte_pairs, byte_symbols, splits, whole
from manyhands.errors import ModelError

_MAX_TOKENS: Final = 1 << 20  # Kimi has 163,584, tekken 130,072
_MAX_SPECIAL: Final = 1 << 16  # tekken has 1,000, Kimi 256
_KIMI: Final = "tokenization_kimi.TikTokenTokenizer"
_LETTERS: Final = tuple(rf"[\p{{L{case}}}\p{{Lm}}\p{{Lo}}\p{{M}}&&[^\p{{Han}}]]" for case in (r"u}\p{Lt", "l"))
_ENDINGS: Final = "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
KIMI_CUT: Final = "|".join(
    [
        r"[\p{Han}]+",
        *(
            rf"[^\r\n\p{{L}}\p{{N}}]?{_LETTERS[0]}{upper}{_LETTERS[1]}{lower}{_ENDINGS}"
            for upper, lower in (("*", "+"), ("+", "*"))
        ),
        r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ]
)
_FORM: Final = ("single_word", "lstrip", "rstrip", "normalized")
# Of files that list none, as mistral-common has them.
_UNLISTED: Final = (
    "<unk> <s> </s> [INST] [/INST] [AVAILABLE_TOOLS] [/AVAILABLE_TOOLS] [TOOL_RESULTS] [/TOOL_RESULTS] [TOOL_CALLS] [IMG] "
    "<pad> [IMG_BREAK] [IMG_END] [PREFIX] [MIDDLE] [SUFFIX] [SYSTEM_PROMPT] [/SYSTEM_PROMPT] [TOOL_CONTENT]"
)
_NAMED: Final = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}


def from_tekken(raw: bytes, where: str) -> tuple[dict[str, Any], dict[str, str]]:
    """tokenizer.json, and what special tokens are called. Raises ModelError; any other Exception for what is no such file."""
    check_values(raw, where)
    body = json.loads(raw)
    config, vocab, special = body["config"], body["vocab"], _special(body, where)
    first = config.get("default_num_special_tokens", len(special))
    size = config.get("default_vocab_size", first + len(vocab))
    if not len(special) <= first <= _MAX_SPECIAL or not first < size <= first + len(vocab):
        raise _refused(where, f"{len(special)} of {first} special tokens and {len(vocab)} others are not {size}")
    special += [f"<SPECIAL_{id}>" for id in range(len(special), first)]
    tokens = _by_rank([(each["rank"], each["token_bytes"]) for each in vocab[: size - first]], where)
    added = [_added(id, text, {"special": True}) for id, text in enumerate(special)]
    named = {name: text for name, text in _NAMED.items() if text in special}
    return _made(tokens, first, config["pattern"], added, named.get("bos_token"), where), named


def _special(body: Mapping[str, Any], where: str) -> list[str]:
    listed, version = body.get("special_tokens"), body["config"].get("version")
    if listed is None and version in ("v3", "v7"):
        return _UNLISTED.split()
    if not listed:
        raise _refused(where, f"it lists no special tokens, and is of version {version!r:.20}")
    if [each["rank"] for each in listed] != list(range(len(listed))):
        raise _refused(where, "the ranks of its special tokens are not 0, 1, 2 ...")
    return [each["token_str"] for each in listed]


def from_tiktoken(raw: bytes, config: Mapping[str, Any], where: str) -> dict[str, Any]:
    """tokenizer.json; `config` is tokenizer_config.json. Raises as `from_tekken`."""
    code = (config.get("auto_map") or {}).get("AutoTokenizer") or [None]
    if not str(code[0]).endswith(_KIMI):
        raise _refused(where, f"only Kimi's expression is known, of {_KIMI}, not that of {code[0]!r:.60}")
    if raw.count(b"\n") > _MAX_TOKENS:
        raise _refused(where, f"more than {_MAX_TOKENS} lines")
    try:
        tokens = _by_rank([(int(rank), text) for text, rank in map(bytes.split, raw.splitlines())], where)
    except ValueError as error:
        raise _refused(where, f"a line is not a token and its rank ({error})") from error
    stated = {int(id): token for id, token in (config.get("added_tokens_decoder") or {}).items()}
    first, end = len(tokens), max(stated, default=0) + 1
    if min(stated, default=first) < first or end - first > _MAX_SPECIAL:
        raise _refused(where, f"added tokens have ids from {min(stated)} to {end - 1}, behind {first} ranks")
    reserved = {"special": True}
    added = [
        _added(id, stated[id]["content"], stated[id])
        if id in stated
        else _added(id, f"<|reserved_token_{id}|>", reserved)
        for id in range(first, end)
    ]
    return _made(tokens, 0, KIMI_CUT, added, None, where)


def _refused(where: str, what: str) -> ModelError:
    return ModelError(f"{where} refused: {what}; fetch tokenizer.json of this model")


def _added(id: int, content: str, stated: Mapping[str, Any]) -> dict[str, Any]:
    form = {name: bool(stated.get(name)) for name in (*_FORM, "special")}
    return {"id": id, "content": content, **form}


def _by_rank(pairs: Sequence[tuple[int, str | bytes]], where: str) -> list[bytes]:
    """Tokens in the order of their ranks."""
    found: dict[int, bytes] = {}
    for rank, text in pairs:
        if rank in found:
            raise _refused(where, f"the rank {rank} occurs twice")
        try:
            found[rank] = base64.b64decode(text, validate=True)
        except ValueError as error:
            raise _refused(where, f"the token of rank {rank} is no base64 ({error})") from error
    if absent := [rank for rank in range(len(found)) if rank not in found]:
        raise _refused(where, f"no token has the rank {absent[0]}, of {len(found)}")
    return [found[rank] for rank in range(len(found))]


def _made(
    tokens: Sequence[bytes], first: int, cut: str, added: Sequence[Mapping[str, Any]], begin: str | None, where: str
) -> dict[str, Any]:
    ranks = {token: rank for rank, token in enumerate(tokens)}
    symbols = dict(enumerate(byte_symbols()))
    if lacking := [byte for byte in symbols if bytes([byte]) not in ranks]:
        raise _refused(where, f"no token is the byte {lacking[0]}")
    texts = [token.decode("latin-1").translate(symbols) for token in tokens]
    ids = {text: first + rank for rank, text in enumerate(texts)} | {each["content"]: each["id"] for each in added}
    if len(ids) < len(texts) + len(added) or "" in ids:
        raise _refused(where, "a token is empty, or occurs twice")
    order = sorted((ranks[token], ranks[left], ranks[right]) for token, left, right in splits(ranks, where))
    merges = [(texts[left], texts[right]) for _, left, right in order]
    return whole(byte_pairs([cut], ids, merges, whole_first=True), added, ids, begin, None)
