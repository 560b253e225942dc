"""tekken.json and tiktoken.model: the ids of a straightforward encoder by ranks, and of transformers; what is refused."""

import base64
import json
import random
from collections import Counter
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import regex
from tokenizers import Tokenizer
from transformers.integrations.mistral.tokenizer import MistralConverter

from manyhands.checkpoint import ranked_tokenizer, tokenizer_json
from manyhands.checkpoint.folder import TOKENIZER
from manyhands.checkpoint.header import MAX_COMMAS
from manyhands.checkpoint.manifest import build_manifest, check_small, hash_files
from manyhands.errors import Damaged, ModelError
from manyhands.testing.tiny import make_tiny
from manyhands.text.tokenizer import load_tokenizer
from manyhands.text.tokenizer_parts import is_plain

# As moonshotai's tokenization_kimi.py and Mistral's files have them.
KIMI_CUT = (
    r"[\p{Han}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEKKEN_CUT = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SAMPLE = (
    "The cat's on the mat, and they'll say it's the cat that sat. IT'S 1234567 or 89!\r\n\r\n  Where?  — «Né à la fête» "
    "的一是不在人有我他这的中国人不在 ひらがな カタカナ 한국어 한국 Привет, мир: приветы! नमस्ते दुनिया "
    "שלום עולם 🙂🙂👍🏽 ʰʱ ǅǅ e\u0301e\u0301 \u3000"
) * 3
ALPHABET = sorted(set(SAMPLE) | set("'sStTdDmMreREveVElLlL\u017f\u0085\u00a0\t/_-+0９一〇㐀\U00020000々ー"))
SPECIAL = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]", "<pad>"]
FIRST = 10  # ids of tekken's special tokens, with fillers


def trained() -> list[bytes]:
    """Tokens by rank, as training finds them: bytes, then the pair that is most frequent in the sample's words, and so on."""
    words = [[bytes([byte]) for byte in word.encode()] for word in regex.findall(KIMI_CUT, SAMPLE, regex.V1)]
    tokens = [bytes([byte]) for byte in range(256)]
    for _ in range(150):
        (left, right), _ = Counter(pair for word in words for pair in pairwise(word)).most_common(1)[0]
        tokens.append(left + right)
        for word in words:
            at = 0
            while at < len(word) - 1:
                if (word[at], word[at + 1]) == (left, right):
                    word[at : at + 2] = [left + right]
                at += 1
    return tokens


TOKENS = trained()


def expected(text: str, cut: str, special: Mapping[str, int], first: int) -> list[int]:
    """Ids by the definition: the lowest rank of two neighbours is merged, the leftmost of equals."""
    ranks = {token: rank for rank, token in enumerate(TOKENS)}
    ids: list[int] = []
    for part in regex.split("(" + "|".join(map(regex.escape, special)) + ")", text):
        if part in special:
            ids.append(special[part])
            continue
        for word in regex.findall(cut, part, regex.V1):
            pieces = [bytes([byte]) for byte in word.encode()]
            if word.encode() in ranks:
                pieces = [word.encode()]
            while found := [(ranks[a + b], at) for at, (a, b) in enumerate(pairwise(pieces)) if a + b in ranks]:
                at = min(found)[1]
                pieces[at : at + 2] = [pieces[at] + pieces[at + 1]]
            ids += [first + ranks[piece] for piece in pieces]
    return ids


def encoded(token: bytes) -> str:
    return base64.b64encode(token).decode()


def kimi_config() -> dict[str, Any]:
    """As the published one: [PAD] is the last of 256 tokens, most of which have no name."""
    names = {0: "[BOS]", 1: "[EOS]", 2: "<|im_end|>", 11: "<|tool_calls_section_begin|>", 254: "[UNK]", 255: "[PAD]"}
    form = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
    added = {str(len(TOKENS) + at): {"content": name, "special": at != 11, **form} for at, name in names.items()}
    return {
        "added_tokens_decoder": added,
        "additional_special_tokens": ["<|im_end|>"],
        "auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]},
        "bos_token": "[BOS]",
        "eos_token": "[EOS]",
        "pad_token": "[PAD]",
        "unk_token": "[UNK]",
        "tokenizer_class": "TikTokenTokenizer",
    }


def lines(tokens: list[bytes]) -> list[str]:
    return [f"{encoded(token)} {rank}" for rank, token in enumerate(tokens)]


def kimi(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "tiktoken.model").write_text("\n".join(lines(TOKENS)) + "\n")
    (folder / "tokenizer_config.json").write_text(json.dumps(kimi_config()))
    return folder


def tekken_body() -> dict[str, Any]:
    """With three tokens beyond the model's vocabulary, which are left out."""
    tokens = [*TOKENS, b"the cat", b"cats", b"zzz"]
    vocab = [{"rank": rank, "token_bytes": encoded(token), "token_str": None} for rank, token in enumerate(tokens)]
    config = {
        "pattern": TEKKEN_CUT,
        "num_vocab_tokens": len(tokens),
        "default_vocab_size": FIRST + len(TOKENS),
        "default_num_special_tokens": FIRST,
        "version": "v7",
    }
    special = [{"rank": rank, "token_str": text, "is_control": True} for rank, text in enumerate(SPECIAL)]
    return {"config": config, "vocab": vocab, "special_tokens": special}


def tekken(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "tekken.json").write_text(json.dumps(tekken_body()))
    return folder


def texts(count: int, special: list[str]) -> list[str]:
    chance = random.Random(7)
    known = [token.decode() for token in TOKENS if token.decode(errors="ignore").encode() == token]
    kinds: list[Callable[[], str]] = [
        lambda: chance.choice(ALPHABET) * chance.choice((1, 1, 2, 5)),
        lambda: chance.choice(known),
        lambda: SAMPLE[(at := chance.randrange(200)) : at + chance.randrange(20)],
        lambda: chance.choice([" ", "  ", "\n", "\r\n", "\t", "\n\n "]),
    ]
    return [
        "".join(chance.choice(special) if chance.random() < 0.03 else chance.choice(kinds)() for _ in range(30))
        for _ in range(count)
    ]


def test_kimi_ids_are_those_of_the_ranks(tmp_path: Path) -> None:
    ours, first = load_tokenizer(kimi(tmp_path)), len(TOKENS)
    named = {int(id): token["content"] for id, token in kimi_config()["added_tokens_decoder"].items()}
    special = {named.get(id, f"<|reserved_token_{id}|>"): id for id in range(first, first + 256)}
    for text in ["", SAMPLE, *texts(300, [*special])]:
        ids = ours.encode(text)
        assert ids == expected(text, KIMI_CUT, special, 0)
        assert ours.decode(ids) == text
    assert is_plain(ours.backend_tokenizer)
    assert (ours.bos_token_id, ours.eos_token_id) == (first, first + 1)
    assert ours.decode(ours.encode("a[EOS]b<|tool_calls_section_begin|>"), skip_special_tokens=True) == (
        "ab<|tool_calls_section_begin|>"
    )
    assert ours.chat_template is None
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    assert load_tokenizer(tmp_path).chat_template == "{{ messages }}"


def test_tekken_ids_are_those_of_the_ranks(tmp_path: Path) -> None:
    ours = load_tokenizer(tekken(tmp_path))
    special = {text: rank for rank, text in enumerate([*SPECIAL, *(f"<SPECIAL_{id}>" for id in range(6, FIRST))])}
    for text in ["", SAMPLE, *texts(300, [*special])]:
        ids = ours.encode(text, add_special_tokens=False)
        assert ids == expected(text, TEKKEN_CUT, special, FIRST)
        assert ours.decode(ids) == text
        assert ours.encode(text) == [1, *ids]  # <s>, as in the tokenizer.json of these models
    assert is_plain(ours.backend_tokenizer)
    assert ours.special_ids == special and len(ours.get_vocab()) == FIRST + len(TOKENS)
    assert ours.special_tokens_map == {
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "pad_token": "<pad>",
    }
    assert ours.chat_template is None


@pytest.mark.parametrize("version", ["v3", "v7", "v11"])
def test_old_files_list_no_special_tokens(version: str, tmp_path: Path) -> None:
    body = tekken_body()
    del body["special_tokens"]
    body["config"] |= {"version": version, "default_num_special_tokens": 30, "default_vocab_size": 30 + len(TOKENS)}
    (tmp_path / "tekken.json").write_text(json.dumps(body))
    if version == "v11":
        with pytest.raises(ModelError, match="lists no special tokens, and is of version 'v11'"):
            load_tokenizer(tmp_path)
        return
    ours = load_tokenizer(tmp_path)
    told = {"<s>": 1, "[INST]": 3, "[TOOL_CALLS]": 9, "<pad>": 11, "[TOOL_CONTENT]": 19, "<SPECIAL_20>": 20}
    assert told.items() <= ours.special_ids.items() and len(ours.special_ids) == 30
    assert ours.encode("t[/INST]") == [1, 30 + ord("t"), 4]


def test_tekken_is_converted_as_transformers_converts_it(tmp_path: Path) -> None:
    theirs: Tokenizer = MistralConverter(str(tekken(tmp_path) / "tekken.json")).converted()
    ours = load_tokenizer(tmp_path).backend_tokenizer
    model, wanted = (json.loads(each.to_str())["model"] for each in (ours, theirs))
    assert model["merges"] == wanted["merges"] and model["vocab"] == wanted["vocab"]
    assert len(model["merges"]) > len(TOKENS) - 256  # also ways that training did not take
    for text in texts(50, SPECIAL):
        assert ours.encode(text, add_special_tokens=False).ids == theirs.encode(text).ids


def test_a_tokenizer_json_goes_before(tmp_path: Path) -> None:
    make_tiny("llama", tmp_path)
    plain = load_tokenizer(tmp_path).get_vocab()
    (tmp_path / "tekken.json").write_text("no JSON")
    assert load_tokenizer(tmp_path).get_vocab() == plain


@pytest.mark.parametrize("name", ["tekken.json", "tiktoken.model"])
def test_what_is_read_belongs_to_the_model(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MANYHANDS_HOME", str(tmp_path / "home"))
    folder = make_tiny("llama", tmp_path / "model", layers=2)
    before = build_manifest(folder)
    (folder / name).write_text("one")
    assert build_manifest(folder) == before  # beside a tokenizer.json it is not read
    (folder / TOKENIZER).unlink()
    manifest = build_manifest(folder)
    assert name in dict(manifest.files) and name in hash_files(folder)
    (folder / name).write_text("another")
    assert build_manifest(folder).id != manifest.id
    with pytest.raises(Damaged, match=rf"{name} is not the one"):
        check_small(manifest, folder)


def changed(rank: int, line: str) -> Callable[[list[str]], None]:
    return lambda every: every.__setitem__(rank, line)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (changed(300, f"{encoded(b'zz')} 299"), "the rank 299 occurs twice"),
        (changed(300, f"{encoded(b'zz')} 3000"), f"no token has the rank 300, of {len(TOKENS)}"),
        (changed(0, f"{encoded(bytes(1))} -1"), f"no token has the rank 0, of {len(TOKENS)}"),
        (changed(300, "!!!! 300"), "the token of rank 300 is no base64"),
        (changed(300, "\x00\x00\u0100 300"), "the token of rank 300 is no base64"),
        (changed(300, "300"), "a line is not a token and its rank"),
        (changed(300, f"{encoded(b'zz')} three"), "a line is not a token and its rank"),
        (changed(300, f"{encoded(TOKENS[299])} 300"), "a token is empty, or occurs twice"),
        (changed(300, f"{encoded(b'[BOS]')} 300"), "a token is empty, or occurs twice"),
        (changed(7, f"{encoded(b'zz')} 7"), "no token is the byte 7"),
        (changed(300, f"{encoded(b'z' * 1025)} 300"), "a piece of more than 1024 characters"),
    ],
)
def test_damaged_ranks_are_one_line(change: Callable[[list[str]], None], message: str, tmp_path: Path) -> None:
    every = lines(TOKENS)
    change(every)
    (kimi(tmp_path) / "tiktoken.model").write_text("\n".join(every))
    with pytest.raises(ModelError, match=message) as caught:
        load_tokenizer(tmp_path)
    assert str(tmp_path) in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"auto_map": {"AutoTokenizer": ["tokenization_other.TikTokenTokenizer", None]}}, "only Kimi's expression"),
        ({"auto_map": None}, "only Kimi's expression"),
        ({"added_tokens_decoder": {"5": {"content": "<x>"}}}, "added tokens have ids from 5 to 5"),
        ({"added_tokens_decoder": {"900000": {"content": "<x>"}}}, "ids from 900000 to 900000"),
        ({"added_tokens_decoder": {"x": {"content": "<x>"}}}, "cannot read the tokenizer"),
        ({"added_tokens_decoder": {"900": {}}}, "cannot read the tokenizer"),
        ({"auto_map": [1]}, "cannot read the tokenizer"),
    ],
)
def test_a_config_that_is_not_kimis_is_one_line(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    (kimi(tmp_path) / "tokenizer_config.json").write_text(json.dumps(kimi_config() | changes))
    with pytest.raises(ModelError, match=message) as caught:
        load_tokenizer(tmp_path)
    assert str(tmp_path) in str(caught.value) and "\n" not in str(caught.value)


def set_in(part: str, **values: Any) -> Callable[[dict[str, Any]], None]:
    return lambda body: body[part].update(values)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda body: body.pop("special_tokens"), "20 of 10 special tokens"),
        (lambda body: body.update(special_tokens=[]), "lists no special tokens, and is of version 'v7'"),
        (lambda body: body["special_tokens"].reverse(), "ranks of its special tokens are not 0, 1, 2"),
        (lambda body: body["special_tokens"].append({"rank": 6, "token_str": "<s>"}), "occurs twice"),
        (lambda body: body["vocab"][300].update(rank=299), "the rank 299 occurs twice"),
        (lambda body: body["vocab"][300].update(token_bytes="?"), "the token of rank 300 is no base64"),
        (lambda body: body["vocab"][300].update(token_bytes=""), "a token is empty, or occurs twice"),
        (set_in("config", default_vocab_size=1 << 20), "are not 1048576"),
        (set_in("config", default_num_special_tokens=2), "6 of 2 special tokens"),
        (set_in("config", default_num_special_tokens=1 << 20), "6 of 1048576 special tokens"),
        (set_in("config", pattern="("), "cannot read the tokenizer"),
        (set_in("config", pattern=5), "cannot read the tokenizer"),
        (set_in("config", default_vocab_size="5"), "cannot read the tokenizer"),
        (lambda body: body.update(vocab={}), "cannot read the tokenizer|are not"),
        (lambda body: body.pop("config"), "cannot read the tokenizer"),
        (lambda body: body["vocab"].__setitem__(3, [[]]), "cannot read the tokenizer"),
    ],
)
def test_a_damaged_tekken_is_one_line(change: Callable[[dict[str, Any]], None], message: str, tmp_path: Path) -> None:
    body = tekken_body()
    change(body)
    (tmp_path / "tekken.json").write_text(json.dumps(body))
    with pytest.raises(ModelError, match=message) as caught:
        load_tokenizer(tmp_path)
    assert str(tmp_path) in str(caught.value) and "\n" not in str(caught.value)


def test_an_expression_of_its_own_is_not_trusted(tmp_path: Path) -> None:
    body = tekken_body()
    body["config"]["pattern"] = r"(\p{L}+)+x|\s|\S"
    (tmp_path / "tekken.json").write_text(json.dumps(body))
    assert not is_plain(load_tokenizer(tmp_path).backend_tokenizer)


@pytest.mark.parametrize("name", ["tekken.json", "tiktoken.model"])
@pytest.mark.parametrize(
    ("fill", "message"),
    [
        (lambda file: file.truncate(1 << 40), "the limit is 67108864"),
        (lambda file: file.write(b",\n" * (MAX_COMMAS + 1)), "commas; at most|more than 1048576 lines"),
        (lambda file: file.write(b"[" * (1 << 20)), "cannot read the tokenizer|is not a token and its rank"),
        (lambda file: file.write(b"\xff" * 99), "cannot read the tokenizer"),
    ],
)
def test_what_is_no_vocabulary_is_refused_soon(
    name: str, fill: Callable[[Any], object], message: str, tmp_path: Path
) -> None:
    kimi(tmp_path)
    (tmp_path / "tiktoken.model").unlink()
    with (tmp_path / name).open("wb") as file:
        fill(file)
    with pytest.raises(ModelError, match=message) as caught:
        load_tokenizer(tmp_path)
    assert "\n" not in str(caught.value)


def test_the_work_of_splitting_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer_json, "_MAX_MERGES", 100)
    with pytest.raises(ModelError, match="made of each other in more than 100 ways"):
        load_tokenizer(tekken(tmp_path))


def test_the_expression_is_kimis() -> None:
    assert ranked_tokenizer.KIMI_CUT == KIMI_CUT
