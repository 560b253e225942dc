"""Kinds of tokenizer.json beside those of the usual models: what reads a text otherwise, grows it, or fails in the library."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from manyhands.errors import BadRequest, ModelError
from manyhands.text.grammar import Grammars, json_grammar
from manyhands.text.tokenizer import TextTokenizer, load_tokenizer
from manyhands.text.tokenizer_parts import MAX_TOKEN_BYTES, MAX_TOKEN_ID, check_decoder, check_vocabulary, is_plain

END = "</s>"
# Two letters for one, a ligature, capitals, two spaces: each is lost by one of NORMALIZERS.
NAMES = ["A  B", "e\u0301", "\ufb01", " x "]
SPACES = normalizers.Replace(" ", "\u2581")
NORMALIZERS: dict[str, list[Any]] = {
    "none": [],
    "NFC": [normalizers.NFC()],
    "NFKC": [normalizers.NFKC()],
    "lower": [normalizers.Lowercase()],
    "accents": [normalizers.NFD(), normalizers.StripAccents()],
    "strip": [normalizers.Strip()],
    "replace": [normalizers.Replace("B", "ss")],
}
LEVEL = pre_tokenizers.ByteLevel(add_prefix_space=False)


def byte_level() -> Any:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={token: id for id, token in enumerate([END, *alphabet, '{"'])}, merges=[]))
    backend.pre_tokenizer, backend.decoder = LEVEL, decoders.ByteLevel()
    return backend


def byte_fallback(model: str) -> Any:
    tokens = [
        END,
        "<unk>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        *map(chr, range(33, 127)),
        "\u2581",
        '{"',
        "\ufb01",
    ]
    if model == "BPE":
        vocabulary = {token: id for id, token in enumerate(tokens)}
        backend = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    else:
        backend = Tokenizer(models.Unigram([(token, -1.0) for token in tokens], unk_id=1, byte_fallback=True))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return backend


def written(backend: Any) -> str:
    """What a model writes that draws the last of the tokens that a schema allows."""
    schema = {
        "type": "object",
        "properties": {name: {"const": name} for name in NAMES},
        "required": NAMES,
        "additionalProperties": False,
    }
    end = backend.token_to_id(END)
    grammar = Grammars(TextTokenizer(backend, {}), backend.get_vocab_size(), frozenset({end})).compile(
        json_grammar(schema)
    )
    ids: list[int] = []
    while len(ids) < 300:
        allowed = grammar.allowed(ids)
        assert allowed is not None
        drawn = int(allowed.nonzero()[0][-1])
        if drawn == end:
            break
        ids.append(drawn)
    return str(backend.decode(ids))


@pytest.mark.parametrize("lossy", NORMALIZERS)
@pytest.mark.parametrize("kind", ["byte level", "BPE", "Unigram"])
def test_a_schema_is_held_to_whatever_the_tokenizer_makes_of_prompts(kind: str, lossy: str) -> None:
    """Qwen's normalises (NFC): a name with a letter and its accent apart ended the answer with an error in its middle."""
    if kind == "byte level":
        backend = byte_level()
        backend.normalizer = normalizers.Sequence(NORMALIZERS[lossy])
    else:
        backend = byte_fallback(kind)
        backend.normalizer = normalizers.Sequence([*NORMALIZERS[lossy], SPACES])
    assert json.loads(written(backend)) == {name: name for name in NAMES}


@pytest.mark.parametrize(
    "cut",
    [
        pre_tokenizers.ByteLevel(add_prefix_space=True),
        pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), LEVEL]),
    ],
)
def test_a_schema_is_held_to_where_cutting_adds_or_drops_spaces(cut: Any) -> None:
    backend = byte_level()
    backend.pre_tokenizer = cut
    assert json.loads(written(backend)) == {name: name for name in NAMES}
    assert type(backend.pre_tokenizer) is type(cut) and backend.pre_tokenizer.__getstate__() == cut.__getstate__()


@pytest.mark.parametrize(
    ("model", "decoder", "named"),
    [
        (models.WordPiece({END: 0, "[UNK]": 1, "a": 2, "##b": 3}), decoders.WordPiece(), "WordPiece"),
        (models.WordLevel({END: 0, "a": 1}, unk_token="a"), decoders.ByteLevel(), "WordLevel"),
        (models.BPE({END: 0, "a": 1}, []), decoders.BPEDecoder("</w>"), "BPEDecoder"),
        (
            models.BPE({END: 0, "a": 1}, []),
            decoders.Sequence([decoders.ByteLevel(), decoders.Replace("a", "b")]),
            "Replace",
        ),
    ],
)
def test_tokenizers_that_grammars_would_misread_take_none(model: Any, decoder: Any, named: str) -> None:
    backend = Tokenizer(model)
    backend.decoder = decoder
    with pytest.raises(BadRequest, match=f"{named}.*: ask without response_format, tool_choice and logprobs") as caught:
        written(backend)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("decoder", "message"),
    [
        (decoders.Strip(" ", 0, 1), "token by token"),  # fails in the library where a token is empty
        (decoders.Strip(" ", 2, 0), "token by token"),
        (decoders.BPEDecoder(""), "token by token"),
        (decoders.Sequence([decoders.Replace("a", "aaaa")] * 3), "make 64 characters of one; at most 32"),
        (decoders.Sequence([decoders.Replace("", "aa")] * 4), "make 81 characters of one"),
    ],
)
def test_decoders_that_fail_or_grow_together_are_refused(decoder: Any, message: str) -> None:
    """Each of eight made 16 letters of one: a token would have been 4 GB of text, on the event loop."""
    backend = byte_level()
    backend.decoder = decoder
    with pytest.raises(ModelError, match=message):
        check_decoder(backend)


@pytest.mark.parametrize("several", [1, 6])
@pytest.mark.parametrize("part", [normalizers.ByteLevel(), normalizers.Replace("a", "bb"), LEVEL])
def test_parts_that_grow_a_text_together_are_not_plain(part: Any, several: int) -> None:
    backend = byte_level()
    if part is LEVEL:
        backend.pre_tokenizer = pre_tokenizers.Sequence([part] * several)
    else:
        backend.normalizer = normalizers.Sequence([part] * several)
    assert is_plain(backend) is (several == 1)


def test_cuts_of_qwen3_5_and_bloom_are_known_to_take_a_text_in_time_of_its_length() -> None:
    """As their tokenizer.json have them: combining marks are letters, of the first. Another one is not."""
    marked = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    bloom = json.loads(r'" ?[^(\\s|[.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c])]+"')
    for cut, known in ((marked, True), (bloom, True), (marked + "|x", False)):
        backend = byte_level()
        backend.pre_tokenizer = pre_tokenizers.Split(Regex(cut), "isolated")
        assert is_plain(backend) is known


def test_an_end_that_no_token_has_is_no_hindrance_to_grammars() -> None:
    backend = byte_level()
    size = backend.get_vocab_size()
    grammars = Grammars(TextTokenizer(backend, {}), size, frozenset({backend.token_to_id(END), size + 1000, -1}))
    assert grammars.compile(json_grammar(None)).allowed([]) is not None


def test_vocabularies_out_of_all_proportion_are_refused() -> None:
    """An id of 4,000,000,000 ended the gateway, at the first schema: a table of 16 GB."""
    assert check_vocabulary({"a": 0, "\u00e9" * (MAX_TOKEN_BYTES // 2): MAX_TOKEN_ID}) == MAX_TOKEN_BYTES
    with pytest.raises(ModelError, match=f"the id {MAX_TOKEN_ID + 1}; at most {MAX_TOKEN_ID}"):
        check_vocabulary({"a": MAX_TOKEN_ID + 1})
    with pytest.raises(ModelError, match="a token of 4098 bytes; at most 4096"):
        check_vocabulary({"\u00e9" * 2049: 0})


def save(folder: Path, backend: Any, **changes: Any) -> Path:
    (folder / "tokenizer.json").write_text(json.dumps(json.loads(backend.to_str()) | changes))
    return folder


UNNAMED = {
    "type": "TemplateProcessing",
    "single": [{"SpecialToken": {"id": "<x>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
    "pair": [],
    "special_tokens": {},
}


@pytest.mark.parametrize(
    "changes", [{"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}}, {"post_processor": UNNAMED}]
)
def test_files_on_which_the_library_fails_are_refused_in_one_line(changes: dict[str, Any], tmp_path: Path) -> None:
    """It raises what no `except Exception` catches."""
    with pytest.raises(ModelError, match=r"cannot read the tokenizer .*: fetch its files again") as caught:
        load_tokenizer(save(tmp_path, byte_level(), **changes))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "changes",
    [
        {"model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "[UNK]"}},
        {"model": {"type": "Unigram", "vocab": [["a", 0.0]], "unk_id": None}},
        {"pre_tokenizer": {"type": "FixedLength", "length": 0}},
    ],
)
def test_texts_that_a_tokenizer_has_no_ids_for_are_refused(changes: dict[str, Any], tmp_path: Path) -> None:
    tokenizer = load_tokenizer(save(tmp_path, byte_level(), **changes))
    with pytest.raises(BadRequest, match=r"cannot read the text .*: send less, or other characters"):
        tokenizer.encode("xyz")


def test_a_text_that_is_not_utf8_is_refused_by_its_place(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(save(tmp_path, byte_level()))
    with pytest.raises(BadRequest, match=r"no Unicode at character 3 \('\\udce9'\): send it in UTF-8"):
        tokenizer.encode(b"caf\xe9".decode("utf8", "surrogateescape"))


@pytest.mark.parametrize("stopped", [KeyboardInterrupt, SystemExit])
def test_what_ends_the_program_is_no_failure_of_a_text(stopped: type[BaseException]) -> None:
    class Ending:
        def encode(self, text: str, *, add_special_tokens: bool) -> None:
            raise stopped

    with pytest.raises(stopped):
        TextTokenizer(Ending(), {}).encode("a")
