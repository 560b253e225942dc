"""manyhands.text.generation_config: the ids that end a text, and how to draw."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from manyhands.errors import ModelError
from manyhands.text.generation_config import eos_ids, load_eos_ids, load_recommended
from manyhands.text.prompt import Tokenizer
from manyhands.text.tokenizer import load_tokenizer
from tests.text.test_detokenize import END, byte_level


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint folder with a byte-level tokenizer and no weights."""
    byte_level().save_pretrained(tmp_path)
    return tmp_path


@pytest.fixture
def tokenizer(folder: Path) -> Tokenizer:
    return load_tokenizer(folder)


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


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_the_file_of_a_wrong_id_is_named(folder: Path, tokenizer: Tokenizer, name: str) -> None:
    (folder / name).write_text(json.dumps({"eos_token_id": "</s>"}))
    with pytest.raises(
        ModelError, match=r"^(.*): eos_token_id is '</s>'; it must be an id or a list of ids: "
    ) as raised:
        load_eos_ids(folder, tokenizer)
    assert str(raised.value).startswith(f"{folder / name}: ")


def recommended(folder: Path, **config: object) -> dict[str, float]:
    (folder / "generation_config.json").write_text(json.dumps(config))
    return load_recommended(folder)


def test_what_a_publisher_recommends(tmp_path: Path) -> None:
    assert load_recommended(tmp_path) == {}
    qwen = {
        "do_sample": True,
        "temperature": 0.6,
        "top_p": 0.95,
        "top_k": 20,
        "repetition_penalty": 1.05,
        "eos_token_id": [1],
    }
    drawing = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "repetition_penalty": 1.05}
    assert recommended(tmp_path, **qwen) == drawing
    assert recommended(tmp_path, temperature=0.7, min_p=None, top_k=-1) == {"temperature": 0.7, "top_k": 0}
    assert recommended(tmp_path, **qwen | {"do_sample": False}) == {}


@pytest.mark.parametrize(
    "field, value",
    [
        ("temperature", -1),
        ("top_p", 0),
        ("top_p", "x"),
        ("top_k", 1.5),
        ("top_k", -2),
        ("min_p", True),
        ("repetition_penalty", 0),
    ],
)
def test_what_no_request_could_ask_for_is_refused(tmp_path: Path, field: str, value: object) -> None:
    with pytest.raises(ModelError, match=rf"generation_config\.json: {field} is "):
        recommended(tmp_path, **{field: value})
