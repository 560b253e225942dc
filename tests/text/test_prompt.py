"""manyhands.text.prompt: ids the tokenizer's own way, and errors that say what to do."""

from pathlib import Path
from typing import Any

import pytest
from tokenizers import processors

from manyhands.errors import BadRequest, ModelError
from manyhands.tales import model_path
from manyhands.text.prompt import Tokenizer, encode_prompt, render_chat
from manyhands.text.tokenizer import load_tokenizer
from tests.text.test_detokenize import BEGIN, byte_level

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
