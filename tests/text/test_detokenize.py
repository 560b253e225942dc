"""manyhands.text.detokenize: every piece is final, none is early, and together they are the decoded ids."""

from collections.abc import Iterable, Sequence
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Core
from tokenizers import decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from manyhands.text.detokenize import MAX_UNREAD, Detokenizer, TextPiece
from manyhands.text.prompt import Tokenizer

BEGIN, END = "<|begin|>", "<|end|>"
SMILE = "\U0001f642"
FAMILY = "\U0001f468\u200d\U0001f469\u200d\U0001f467"  # five code points
ACCENT = "e\u0301"  # two code points
quick = settings(max_examples=200, deadline=None)


@cache
def byte_level() -> PreTrainedTokenizerFast:
    """GPT-2's kind. Ids 0..255: the bytes, in the order of its alphabet; then merges (longer tokens), two specials."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("Ġ", "t"), ("h", "e"), ("Ġt", "he"), ("ð", "Ł"), ("Ã", "©"), ("<", "/"), ("</", "s")]
    tokens = [*alphabet, *(left + right for left, right in merges)]
    core = Core(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=merges))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=core, bos_token=BEGIN, eos_token=END)


@cache
def metaspace() -> PreTrainedTokenizerFast:
    """SentencePiece's kind: words whose leading space is U+2581, single letters, an emoji, and the two specials."""
    words = ["<unk>", "▁", "▁the", "▁cat", "▁a", "s", "ion", "n", "▁▁", ".", "é", "🙂", "́", "cat", "▁<", "/s>"]
    core = Core(models.Unigram([(word, -float(rank)) for rank, word in enumerate(words)], unk_id=0))
    core.pre_tokenizer = pre_tokenizers.Metaspace()
    core.decoder = decoders.Metaspace()
    return PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>", bos_token=BEGIN, eos_token=END)


@cache
def byte_fallback() -> PreTrainedTokenizerFast:
    """Llama 2's decoder: ids 0..255 are the bytes <0x00>..<0xFF>, then words; one leading space is stripped."""
    tokens = [*(f"<0x{byte:02X}>" for byte in range(256)), "<unk>", "▁", "▁cat", "cat", "s"]
    core = Core(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=[]))
    core.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>", bos_token=BEGIN, eos_token=END)


def decode(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    return str(tokenizer.decode(list(ids), skip_special_tokens=True))


def open_detokenizer(tokenizer: Tokenizer, stop: Sequence[str] = (), prompt_ids: Sequence[int] = ()) -> Detokenizer:
    return Detokenizer(tokenizer, tuple(stop), (), (), prompt_ids)


def pieces_of(detokenizer: Detokenizer, ids: Iterable[int]) -> list[str]:
    """Feed until stopped; return the pieces and what flush gives."""
    pieces: list[str] = []
    for token in ids:
        piece = detokenizer.feed(token)
        pieces.append(piece.text)
        if piece.finished:
            break
    return [*pieces, detokenizer.flush()]


def bytes_to_ids(data: bytes) -> list[int]:
    """One byte-level token a byte, so that characters and stop strings are split everywhere."""
    return [ALPHABET.index(_GPT2_BYTES[byte]) for byte in data]


def _gpt2_bytes() -> list[str]:
    """GPT-2's printable stand-in for each byte (openai/gpt-2, encoder.py, bytes_to_unicode)."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


_GPT2_BYTES = _gpt2_bytes()
ALPHABET = sorted(_GPT2_BYTES)


@given(st.lists(st.integers(0, 264), max_size=40))
@quick
def test_random_byte_level_ids_give_the_decoded_text(ids: list[int]) -> None:
    """Invalid UTF-8, special tokens and merged tokens among them (ids 263 and 264 are the specials)."""
    assert "".join(pieces_of(open_detokenizer(byte_level()), ids)) == decode(byte_level(), ids)


@given(st.text(max_size=20), st.text(max_size=10))
@quick
def test_any_text_comes_back_behind_any_prompt(text: str, prompt: str) -> None:
    pieces = pieces_of(
        open_detokenizer(byte_level(), prompt_ids=bytes_to_ids(prompt.encode())), bytes_to_ids(text.encode())
    )
    assert "".join(pieces) == text


@given(st.lists(st.integers(0, 17), max_size=30), st.lists(st.integers(1, 15), max_size=8))
@quick
def test_random_metaspace_ids_give_what_they_add_to_the_prompt(ids: list[int], prompt: list[int]) -> None:
    """Specials (16, 17) only in the output: those of a prompt window hide whether a word came before."""
    text = "".join(pieces_of(open_detokenizer(metaspace(), prompt_ids=prompt), ids))
    window = prompt[-6:]
    assert decode(metaspace(), window) + text == decode(metaspace(), [*window, *ids])


@given(st.lists(st.sampled_from([SMILE, FAMILY, ACCENT, "a", " ", "\n", "cat"]), max_size=12))
@quick
def test_byte_fallback_of_valid_text_gives_the_decoded_text(parts: list[str]) -> None:
    ids = [token for part in parts for token in ([259] if part == "cat" else part.encode())]
    assert "".join(pieces_of(open_detokenizer(byte_fallback()), ids)) == decode(byte_fallback(), ids)


def test_byte_fallback_that_turns_invalid_keeps_what_was_shown() -> None:
    """The tokenizer now blanks the good character too; we show the bad byte alone, and lose nothing after it."""
    ids = [*"éé".encode(), 0xFF, 259]
    assert decode(byte_fallback(), ids) == "�����cat"
    assert "".join(pieces_of(open_detokenizer(byte_fallback()), ids)) == "éé�cat"


@pytest.mark.parametrize("text", [SMILE, FAMILY, ACCENT, "\u20ac", "\u00e9"])
def test_a_split_character_is_shown_once_and_whole(text: str) -> None:
    """No U+FFFD in between; every code point appears with its last byte."""
    detokenizer = open_detokenizer(byte_level())
    shown = ""
    for count, token in enumerate(bytes_to_ids(text.encode()), start=1):
        shown += detokenizer.feed(token).text
        assert shown == text.encode()[:count].decode(errors="ignore")


def test_an_unfinished_character_comes_out_on_flush() -> None:
    detokenizer = open_detokenizer(byte_level())
    assert pieces_of(detokenizer, bytes_to_ids(b"a\xf0\x9f")) == ["a", "", "", "�"]
    assert detokenizer.flush() == ""


def test_spaces_of_words_survive_and_the_first_is_dropped_only_at_the_beginning() -> None:
    the, cat = 2, 3
    assert pieces_of(open_detokenizer(metaspace()), [the, cat]) == ["the", " cat", ""]
    assert pieces_of(open_detokenizer(metaspace(), prompt_ids=[the]), [cat, cat]) == [" cat", " cat", ""]


def test_pieces_come_at_once_when_nothing_is_in_doubt() -> None:
    pieces = pieces_of(open_detokenizer(byte_level(), stop=["</s>"]), bytes_to_ids(b"one < two"))
    assert pieces == ["o", "n", "e", " ", "", "< ", "t", "w", "o", ""]


def test_a_stop_string_over_token_borders_is_never_shown() -> None:
    detokenizer = open_detokenizer(byte_level(), stop=["</s>"])
    fed = [detokenizer.feed(token) for token in bytes_to_ids(b"hi</s>")]
    assert fed == [TextPiece(text, None) for text in ("h", "i", "", "", "")] + [TextPiece("", "stop")]
    assert detokenizer.feed(bytes_to_ids(b"x")[0]) == TextPiece("", "stop")
    assert detokenizer.flush() == ""


def test_text_after_a_stop_within_one_token_is_cut() -> None:
    ids = [4, 14, 15]  # " a", " <", "/s>"
    detokenizer = open_detokenizer(metaspace(), stop=[" </"])
    assert [detokenizer.feed(token) for token in ids] == [
        TextPiece("a", None),
        TextPiece("", None),
        TextPiece("", "stop"),
    ]


def test_the_beginning_of_a_stop_string_comes_out_on_flush() -> None:
    assert pieces_of(open_detokenizer(byte_level(), stop=["</s>"]), bytes_to_ids(b"a</s")) == ["a", "", "", "", "</s"]


def test_a_stop_string_that_restarts_inside_itself_is_found() -> None:
    assert "".join(pieces_of(open_detokenizer(byte_level(), stop=["aab"]), bytes_to_ids(b"aaabx"))) == "a"


@pytest.mark.parametrize("pieces", [["xabc"], ["xa", "bc"], ["x", "a", "b", "c"]])
def test_the_stop_string_that_is_complete_first_wins_however_the_text_comes(pieces: list[str]) -> None:
    assert "".join(pieces_of(open_detokenizer(_Echo(pieces), stop=["abc", "b"]), range(len(pieces)))) == "xa"
    assert "".join(pieces_of(open_detokenizer(_Echo(pieces), stop=["c", "bc"]), range(len(pieces)))) == "xa"


def test_a_stop_string_in_the_prompt_does_not_stop() -> None:
    detokenizer = open_detokenizer(byte_level(), stop=["ab"], prompt_ids=bytes_to_ids(b"xa"))
    assert pieces_of(detokenizer, bytes_to_ids(b"b")) == ["b", ""]


def test_a_stop_string_completed_by_flush_is_not_shown() -> None:
    assert "".join(pieces_of(open_detokenizer(byte_level(), stop=["b�"]), bytes_to_ids(b"ab\xf0"))) == "a"


@given(st.text("ab", max_size=12), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3), st.data())
@quick
def test_stops_do_not_depend_on_how_the_text_is_cut_into_tokens(
    text: str, stop: list[str], data: st.DataObject
) -> None:
    """Reference: character by character, stop at the first stop string that is complete, the longest of several."""
    complete = [(end, end - len(s)) for s in stop for end in range(len(text) + 1) if text[:end].endswith(s)]
    expected = text[: min(complete)[1]] if complete else text
    pieces, rest = [], text
    while rest:
        size = data.draw(st.integers(1, len(rest)))
        pieces.append(rest[:size])
        rest = rest[size:]
    detokenizer = open_detokenizer(_Echo(pieces), stop)
    assert "".join(pieces_of(detokenizer, range(len(pieces)))) == expected


class _Echo:
    """A tokenizer whose token i is the i-th of the given strings."""

    def __init__(self, pieces: list[str]) -> None:
        self._pieces = pieces

    def decode(self, ids: list[int], /, *, skip_special_tokens: bool) -> str:
        return "".join(self._pieces[token] for token in ids)


def test_end_and_stop_ids_are_not_shown_and_release_what_was_held() -> None:
    """Even where the tokenizer would decode them: a stop id is an ordinary token."""
    held = bytes_to_ids(b"a</s")
    for end_id in (bytes_to_ids(b"z")[0], byte_level().eos_token_id):
        detokenizer = Detokenizer(byte_level(), ("</s>",), bytes_to_ids(b"z"), {byte_level().eos_token_id}, ())
        assert "".join(detokenizer.feed(token).text for token in held) == "a"
        assert detokenizer.feed(end_id) == TextPiece("</s", "stop")
        assert detokenizer.flush() == ""


def test_special_tokens_are_skipped() -> None:
    begin, end = byte_level().convert_tokens_to_ids([BEGIN, END])
    ids = [*bytes_to_ids(b"a"), begin, *bytes_to_ids(b"b"), end, *bytes_to_ids(b"c")]
    assert "".join(pieces_of(open_detokenizer(byte_level()), ids)) == "abc"


# -- bounds -----------------------------------------------------------------------------------------------------------


class Counting:
    """A tokenizer that notes how many ids it is given at a time."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer, self.most, self.sum = tokenizer, 0, 0

    def decode(self, ids: list[int], *, skip_special_tokens: bool) -> str:
        self.most, self.sum = max(self.most, len(ids)), self.sum + len(ids)
        return str(self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens))


@pytest.mark.parametrize("kind", ["bytes", "special"])
def test_ids_without_text_do_not_gather(kind: str) -> None:
    """logit_bias can have a model repeat a byte that no character has, or a token that shows nothing: each id was decoded
    together with all before it, on the event loop."""
    tokenizer = Counting(byte_level())
    token = bytes_to_ids(b"\xff")[0] if kind == "bytes" else byte_level().bos_token_id
    ids = [*bytes_to_ids(b"hi"), *[token] * 2000, *bytes_to_ids("h\u00e9".encode())]
    text = "".join(pieces_of(open_detokenizer(tokenizer), ids))
    assert text == decode(byte_level(), ids)
    assert tokenizer.most <= 2 * MAX_UNREAD and tokenizer.sum < 2000 * 5 * MAX_UNREAD
