"""Tokenizers of GGUF files: the ids that llama.cpp gives over texts that are hard to cut, byte pairs and sentencepiece."""

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from manyhands.checkpoint import tokenizer_json
from manyhands.checkpoint.gguf_parts import read_gguf
from manyhands.checkpoint.gguf_tokenizer import tokenizer_files
from manyhands.errors import ModelError
from manyhands.testing.gguf import write_gguf
from manyhands.text.generation_config import load_eos_ids, load_recommended
from manyhands.text.prompt import render_chat
from manyhands.text.tokenizer import TextTokenizer, load_tokenizer
from tests.gguf_vocabularies import PRES, byte_pairs, gemma4, sentencepiece, texts

# SHA-256 of the ids of texts(), from llama.cpp (llama-cpp-python 0.3.36, ggml of September 2026).
GOLDEN: dict[str, str] = json.loads((Path(__file__).parent / "gguf_ids.json").read_text())
OTHERS = {"spm": sentencepiece(True), "spm-bare": sentencepiece(False), "gemma4": gemma4()}
VOCABULARIES = {**{pre: byte_pairs(pre) for pre in PRES}, **OTHERS}


def digest(ids: list[list[int]]) -> str:
    return hashlib.sha256(json.dumps(ids).encode()).hexdigest()


def files(facts: dict[str, Any], tmp_path: Path) -> dict[str, bytes]:
    return tokenizer_files(read_gguf(write_gguf(tmp_path / "f.gguf", facts, [])))


def with_tokens(*more: dict[str, int]) -> dict[str, Any]:
    """A vocabulary of byte pairs and more tokens, of each its type."""
    facts = byte_pairs("qwen2")
    types = [kind for tokens in more for kind in tokens.values()]
    facts["tokenizer.ggml.tokens"] += [token for tokens in more for token in tokens]
    facts["tokenizer.ggml.token_type"] = np.append(facts["tokenizer.ggml.token_type"], types).astype(np.int32)
    return facts


def load(facts: dict[str, Any], tmp_path: Path) -> TextTokenizer:
    for name, raw in files(facts, tmp_path).items():
        (tmp_path / name).write_bytes(raw)
    return load_tokenizer(tmp_path)


@pytest.mark.parametrize("name", sorted(VOCABULARIES))
def test_ids_are_those_of_llama_cpp(name: str, tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_str(files(VOCABULARIES[name], tmp_path)["tokenizer.json"].decode())
    assert digest([tokenizer.encode(text, add_special_tokens=False).ids for text in texts()]) == GOLDEN[name]


@pytest.mark.parametrize("name", sorted(VOCABULARIES))
def test_the_digests_are_those_of_llama_cpp(name: str, tmp_path: Path) -> None:
    """Where it is installed (pip install 'manyhands[bench]'); names the text that differs."""
    llama_cpp = pytest.importorskip("llama_cpp")
    path = write_gguf(tmp_path / "f.gguf", VOCABULARIES[name], [])
    theirs = llama_cpp.Llama(str(path), vocab_only=True, verbose=False)
    ours = load(VOCABULARIES[name], tmp_path)
    ids = []
    for text in texts():
        ids.append(theirs.tokenize(text.encode(), add_bos=False, special=True))
        assert ours.encode(text, add_special_tokens=False) == ids[-1], text
    assert digest(ids) == GOLDEN[name]


def test_of_a_merge_that_occurs_twice_the_first_counts(tmp_path: Path) -> None:
    facts = dict(VOCABULARIES["qwen2"])
    facts["tokenizer.ggml.merges"] = facts["tokenizer.ggml.merges"] + facts["tokenizer.ggml.merges"][::-1]
    tokenizer = load(facts, tmp_path)
    assert digest([tokenizer.encode(text, add_special_tokens=False) for text in texts()]) == GOLDEN["qwen2"]


def test_tokens_without_a_name_get_one(tmp_path: Path) -> None:
    """As in llama.cpp: two of them are no reason to refuse a file."""
    tokenizer = load(with_tokens({"": 1}, {"": 3}), tmp_path)
    count = len(VOCABULARIES["qwen2"]["tokenizer.ggml.tokens"])
    assert tokenizer.encode(f"the[EMPTY_{count + 1}]")[-1] == count + 1
    assert tokenizer.decode([count], skip_special_tokens=True) == f"[EMPTY_{count}]"
    assert tokenizer.decode([count + 1], skip_special_tokens=True) == ""


@pytest.mark.parametrize(("name", "strips"), [("Phi-3-mini", True), ("phi3", True), ("Phi 4", False), (None, False)])
def test_white_space_behind_special_tokens_of_phi_3_is_dropped(name: str | None, strips: bool, tmp_path: Path) -> None:
    """As in llama.cpp, which goes by the name; transformers reads it from the model's own tokenizer.json."""
    facts = sentencepiece(True) | ({} if name is None else {"general.name": name})
    tokenizer = load(facts, tmp_path)
    text = "<|user|>\n the<|im_end|>\n<|im_start|> <s> the"
    tokens = [tokenizer.backend_tokenizer.id_to_token(id) for id in tokenizer.encode(text, add_special_tokens=False)]
    kept = ["<|user|>", "▁the", "<|im_end|>", "<|im_start|>", "<s>", "▁", "▁the"]
    assert (tokens == kept) is strips
    assert tokens[-3:] == kept[-3:]


@pytest.mark.parametrize("name", ["qwen2", "spm", "spm-bare", "gemma4"])
def test_text_comes_back(name: str, tmp_path: Path) -> None:
    tokenizer = load(VOCABULARIES[name], tmp_path)
    for text in texts():
        if not {"<", "▁"} & set(text):  # sentencepiece begins anew behind a special token; its sign for a space is one
            assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        ({}, "spm begins"),
        ({"tokenizer.ggml.add_bos_token": False}, ""),
        ({"tokenizer.ggml.add_eos_token": True}, "spm begins ends"),
    ],
)
def test_bos_and_eos_follow_the_file(facts: dict[str, Any], expected: str, tmp_path: Path) -> None:
    ids = load({**VOCABULARIES["spm"], **facts}, tmp_path).encode("the")
    assert (ids[0] == 1, ids[-1] == 2) == ("begins" in expected, "ends" in expected)


def test_gemma_4_begins_whatever_the_file_says(tmp_path: Path) -> None:
    facts = {**VOCABULARIES["gemma4"], "tokenizer.ggml.add_bos_token": False}
    assert load(facts, tmp_path).encode("the")[0] == 2


def test_tokens_of_newlines_that_lack_a_length_are_refused(tmp_path: Path) -> None:
    """llama.cpp makes one token of as many newlines as there is a token for; merges must be able to."""
    facts = gemma4()
    facts["tokenizer.ggml.tokens"][facts["tokenizer.ggml.tokens"].index("\n" * 3)] = "odd"
    with pytest.raises(ModelError, match="its tokens of newlines are not 1, 2, 3 and so on"):
        files(facts, tmp_path)


def test_llama_3_begins_where_the_file_does_not_say(tmp_path: Path) -> None:
    facts = VOCABULARIES["llama-bpe"]
    assert load(facts, tmp_path).encode("the")[0] == facts["tokenizer.ggml.bos_token_id"]
    assert load(VOCABULARIES["qwen2"], tmp_path).encode("the")[0] != facts["tokenizer.ggml.bos_token_id"]


def test_answers_end_at_every_token_that_ends_a_turn(tmp_path: Path) -> None:
    """Also where the file calls it a normal token, or names another as eos."""
    count = len(VOCABULARIES["qwen2"]["tokenizer.ggml.tokens"])
    facts = with_tokens({"<|endoftext|>": 1, "<other>": 3})
    facts |= {"tokenizer.ggml.eos_token_id": count, "tokenizer.ggml.eot_token_id": count + 1}
    tokenizer = load(facts, tmp_path)
    assert load_eos_ids(tmp_path, tokenizer) == {count - 2, count, count + 1}
    assert tokenizer.encode("<|endoftext|>") == [count]


def test_how_to_draw_is_as_the_file_says(tmp_path: Path) -> None:
    keys = {"temp": np.float32(0.6).item(), "top_k": 20, "penalty_repeat": np.float32(1.05).item(), "mirostat": 0}
    load(VOCABULARIES["qwen2"] | {f"general.sampling.{name}": value for name, value in keys.items()}, tmp_path)
    assert load_recommended(tmp_path) == {"temperature": 0.6, "top_k": 20, "repetition_penalty": 1.05}
    load(VOCABULARIES["qwen2"], tmp_path)
    assert load_recommended(tmp_path) == {}


@pytest.mark.parametrize(
    ("token", "kind", "ends"),
    [
        ("<eos>", 1, True),
        ("<|file_sep|>", 3, True),
        ("[EOS]", 4, True),
        ("</s>", 3, True),
        ("</s>", 4, False),  # a tag of HTML in Gemma's
        ("<|fim_prefix|>", 3, False),
    ],
)
def test_answers_end_where_they_do_in_llama_cpp(token: str, kind: int, ends: bool, tmp_path: Path) -> None:
    tokenizer = load(with_tokens({token: kind}), tmp_path)
    count = len(VOCABULARIES["qwen2"]["tokenizer.ggml.tokens"])
    assert (count in load_eos_ids(tmp_path, tokenizer)) is ends
    named = load(with_tokens({token: kind}) | {"tokenizer.ggml.fim_sep_token_id": count}, tmp_path)
    assert count in load_eos_ids(tmp_path, named)


def test_the_chat_template_is_the_files(tmp_path: Path) -> None:
    template = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>{% endfor %}"
    facts = {**VOCABULARIES["qwen2"], "tokenizer.chat_template": template}
    tokenizer = load(facts, tmp_path)
    ids = render_chat(tokenizer, [{"role": "user", "content": "the"}])
    assert tokenizer.decode(ids) == "<|im_start|>user\nthe<|im_end|>"
    named = load({**facts, "tokenizer.chat_template.tool_use": "tools"}, tmp_path)
    assert named.chat_template == {"default": template, "tool_use": "tools"}


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        ({"tokenizer.ggml.model": "t5"}, "its tokenizer is 't5'"),
        ({"tokenizer.ggml.model": 3}, "tokenizer.ggml.model is no str"),
        ({"tokenizer.ggml.pre": "odd"}, "its pre-tokenizer is 'odd'; known are"),
        ({"tokenizer.ggml.tokens": ["a", "b"]}, "one number for each of the 2 tokens"),
        ({"tokenizer.ggml.tokens": "abc"}, "tokens is no list"),
        ({"tokenizer.ggml.token_type": np.zeros(3, np.int32)}, "not one number for each"),
        ({"tokenizer.ggml.bos_token_id": 1 << 30}, "bos_token_id is 1073741824"),
        ({"tokenizer.ggml.eos_token_id": np.zeros(2, np.int32)}, "eos_token_id' is a list; one value is needed"),
        ({"tokenizer.ggml.merges": np.zeros(2, np.int32)}, "merges is no list"),
        ({"tokenizer.ggml.merges": ["t h", "x Ġthe"]}, "its merge 'x Ġthe' is not of two tokens that make a third"),
        ({"tokenizer.ggml.merges": ["the"]}, "its merge 'the' is not of two tokens"),
        ({"tokenizer.ggml.merges": [""]}, "its merge '' is not of two tokens"),
        ({"tokenizer.ggml.add_bos_token": 3}, "add_bos_token is no bool"),
    ],
)
def test_vocabularies_that_make_no_sense_are_refused(facts: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=message):
        files({**VOCABULARIES["qwen2"], **facts}, tmp_path)


def test_a_token_that_occurs_twice_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"the token 'a' twice, as \d+ and \d+: convert it again"):
        files(with_tokens({"a": 1}), tmp_path)


@pytest.mark.parametrize(("score", "message"), [(-1000.0, "all have the score -1000.0"), (np.nan, "what is no number")])
def test_scores_that_put_no_piece_first_are_refused(score: float, message: str, tmp_path: Path) -> None:
    facts = sentencepiece(True)
    facts["tokenizer.ggml.scores"] = np.full(len(facts["tokenizer.ggml.tokens"]), score, np.float32)
    with pytest.raises(ModelError, match=message):
        files(facts, tmp_path)


def test_pieces_that_would_take_long_to_split_are_refused(tmp_path: Path) -> None:
    facts = sentencepiece(True)
    facts["tokenizer.ggml.tokens"][300] = "x" * 5000
    with pytest.raises(ModelError, match="a piece of more than 1024 characters"):
        files(facts, tmp_path)


@pytest.mark.parametrize(("limit", "most", "message"), [("_MAX_CUT", 9000, "takes"), ("_MAX_MERGES", 900, "900 ways")])
def test_pieces_of_pieces_are_bounded_together(
    limit: str, most: int, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """64 MB of runs of letters, each 1 to 1,024 long, were made of each other in 67 million ways: 40 GB, in minutes."""
    monkeypatch.setattr(tokenizer_json, limit, most)
    facts = sentencepiece(True)
    files(facts, tmp_path)
    for length in range(2, 60):
        facts["tokenizer.ggml.tokens"][300 + length] = "x" * length
    with pytest.raises(ModelError, match=message):
        files(facts, tmp_path)
