"""manyhands.text.prompt: ids the tokenizer's own way, and errors that say what to do."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import processors

from manyhands.errors import BadRequest, ModelError
from manyhands.tales import model_path
from manyhands.text.prompt import Tokenizer, encode_prompt, eos_ids, load_eos_ids, render_chat
from manyhands.text.tokenizer import load_tokenizer
from tests.text.test_detokenize import BEGIN, END, byte_level

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] not in ['user', 'assistant'] %}"
    "{{ raise_exception('only user and assistant') }}{% endif %}[{{ m['role'] }}]{{ m['content'] + '' }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint folder with a byte-level tokenizer and no weights."""
    byte_level().save_pretrained(tmp_path)
    return tmp_path


@pytest.fixture
def tokenizer(folder: Path) -> Tokenizer:
    return load_tokenizer(folder)


def test_loaded_tokenizer_is_the_saved_one(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("the cat") == byte_level().encode("the cat")
    assert tokenizer.eos_token_id == byte_level().eos_token_id


@pytest.mark.parametrize("config", [None, '{"model_type": "llama"}'])
def test_a_folder_without_a_vocabulary_is_refused(tmp_path: Path, config: str | None) -> None:
    """transformers would answer with an empty tokenizer for some families."""
    if config is not None:
        (tmp_path / "config.json").write_text(config)
    with pytest.raises(ModelError, match=f"no tokenizer in {tmp_path}: fetch"):
        load_tokenizer(tmp_path)


def test_a_missing_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no tokenizer in"):
        load_tokenizer(tmp_path / "absent")


@pytest.mark.parametrize("content", ["not json", '{"model": 1}'])
def test_a_damaged_tokenizer_names_its_folder(folder: Path, content: str) -> None:
    (folder / "tokenizer.json").write_text(content)
    with pytest.raises(ModelError, match=f"cannot read the tokenizer in {folder}"):
        load_tokenizer(folder)


def test_prompt_has_the_special_tokens_the_tokenizer_adds(tokenizer: Tokenizer) -> None:
    bare = encode_prompt(tokenizer, "the")
    assert bare == byte_level().encode("the")
    bos = tokenizer.bos_token_id
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(f"{BEGIN} $A", None, [(BEGIN, bos)])
    assert encode_prompt(tokenizer, "the") == [bos, *bare]
    assert encode_prompt(tokenizer, "") == [bos]


def test_empty_prompt_begins_with_bos_or_is_refused(tokenizer: Tokenizer) -> None:
    assert encode_prompt(tokenizer, "") == [tokenizer.bos_token_id]
    del tokenizer.special_tokens_map["bos_token"]
    with pytest.raises(BadRequest, match="empty"):
        encode_prompt(tokenizer, "")


def test_chat_is_rendered_with_the_models_template(tokenizer: Tokenizer) -> None:
    tokenizer.chat_template = TEMPLATE
    ids = render_chat(tokenizer, [{"role": "user", "content": "hi"}])
    assert tokenizer.decode(ids) == f"{BEGIN}[user]hi[assistant]"
    assert ids.count(tokenizer.bos_token_id) == 1


def test_chat_without_a_template_names_the_remedy(tokenizer: Tokenizer) -> None:
    tokenizer.chat_template = None  # other tests share it, and give it templates
    with pytest.raises(BadRequest, match=r"no chat template: use /v1/completions"):
        render_chat(tokenizer, [{"role": "user", "content": "hi"}])


@pytest.mark.parametrize("message", [{"role": "cook", "content": "hi"}, {"role": "user", "content": None}])
def test_messages_the_template_refuses_are_bad_requests(tokenizer: Tokenizer, message: dict[str, Any]) -> None:
    tokenizer.chat_template = TEMPLATE
    with pytest.raises(BadRequest, match="chat template of this model refuses"):
        render_chat(tokenizer, [message])


def test_chat_without_messages_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(BadRequest, match="messages is empty"):
        render_chat(tokenizer, [])


def eos_of(own: int | None, config: dict[str, Any], generation: dict[str, Any] | None) -> set[int]:
    return set(eos_ids(config, generation, SimpleNamespace(eos_token_id=own)))


def test_eos_of_generation_config_go_before_those_of_config() -> None:
    assert eos_of(7, {"eos_token_id": 1}, {"eos_token_id": [2, 3]}) == {2, 3, 7}
    assert eos_of(7, {"eos_token_id": 1}, {"eos_token_id": None}) == {1, 7}
    assert eos_of(None, {"eos_token_id": 0}, None) == {0}
    assert eos_of(None, {}, None) == set()


def test_eos_of_a_folder(folder: Path, tokenizer: Tokenizer) -> None:
    own = tokenizer.backend_tokenizer.token_to_id(END)
    assert load_eos_ids(folder, tokenizer) == {own}
    (folder / "config.json").write_text(json.dumps({"eos_token_id": 5}))
    assert load_eos_ids(folder, tokenizer) == {own, 5}
    (folder / "config.json").write_text(json.dumps({"model_type": "gemma3", "text_config": {"eos_token_id": [4, 5]}}))
    assert load_eos_ids(folder, tokenizer) == {own, 4, 5}
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [8, 9]}))
    assert load_eos_ids(folder, tokenizer) == {own, 8, 9}


@pytest.mark.parametrize("damage", ["[1]", "{"])
def test_a_damaged_config_is_refused(folder: Path, tokenizer: Tokenizer, damage: str) -> None:
    (folder / "config.json").write_text(damage)
    with pytest.raises(ModelError, match=r"config\.json"):
        load_eos_ids(folder, tokenizer)


@pytest.mark.parametrize("stated", [{}, {"a": 1}, [[]], ["</s>"], 0.5, True, "</s>"], ids=str)
def test_what_is_no_id_ends_no_text(stated: object) -> None:
    """From files of unknown people: an object was a TypeError."""
    pairs: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"eos_token_id": stated}, {}),
        ({}, {"eos_token_id": stated}),
    ]
    for config, generation in pairs:
        with pytest.raises(ModelError, match="eos_token_id"):
            eos_of(None, config, generation)


def test_the_next_question_to_tales_begins_with_what_was_asked_and_drawn() -> None:
    """Then a hop has all of it cached (docs/reuse.md)."""
    tales = load_tokenizer(model_path())
    asked = {"role": "user", "content": "Once upon a time there was a king, and he"}
    said = {"role": "assistant", "content": " had three sons.\n\nThe youngest"}
    begun = render_chat(tales, [asked])
    drawn = encode_prompt(tales, said["content"])
    more = render_chat(tales, [asked, said, {"role": "user", "content": "And then?"}])
    assert more[: len(begun) + len(drawn)] == [*begun, *drawn]
    assert tales.decode(more).endswith("The youngest\n\nAnd then?")
