"""What a request leaves out is drawn as the model's publisher recommends (generation_config.json), on every path."""

import json
from pathlib import Path
from typing import Any

import pytest

from manyhands.api.preparation.desk import PreparationDesk, Speaker
from manyhands.api.preparation.prepare import prepare
from manyhands.core import SamplingParams
from manyhands.text.tokenizer import TextTokenizer, load_tokenizer
from tests.api.served import MODEL, make_model

TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
RECOMMENDED = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.01, "repetition_penalty": 1.05}
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
PATHS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": {"prompt": "hi"},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {**CHAT, "max_tokens": 4},
    "/api/chat": CHAT,
    "/api/generate": {"prompt": "hi"},
    "/api/infer": {"prompt": "hi"},
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> TextTokenizer:
    return load_tokenizer(make_model(tmp_path_factory.mktemp("recommended") / "m", TEMPLATE))


def params(tokenizer: TextTokenizer, path: str, recommended: dict[str, float], **wishes: object) -> SamplingParams:
    facts: dict[str, Any] = {"level": None, "recommended": recommended, "is_plain": False}
    speaker = Speaker(MODEL, tokenizer, 1024, 264, 8, "bf16", None, None, {}, **facts)
    body = json.dumps({"model": MODEL, **PATHS[path], **wishes}).encode()
    return prepare(path, body, PreparationDesk({MODEL: speaker}, 16, 1024, lambda grammar: 0)).params


def drawn(params: SamplingParams) -> dict[str, float]:
    return {name: getattr(params, name) for name in RECOMMENDED}


@pytest.mark.parametrize("path", PATHS)
def test_what_is_left_out_is_as_recommended(tokenizer: TextTokenizer, path: str) -> None:
    assert drawn(params(tokenizer, path, RECOMMENDED)) == RECOMMENDED
    assert drawn(params(tokenizer, path, {"top_k": 20}))["top_k"] == 20


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/messages", "/api/infer"])
def test_what_is_asked_for_goes_before(tokenizer: TextTokenizer, path: str) -> None:
    assert drawn(params(tokenizer, path, RECOMMENDED, temperature=0)) == {**RECOMMENDED, "temperature": 0}
    asked = drawn(params(tokenizer, path, RECOMMENDED, temperature=0.9, top_p=1))
    assert asked == {**RECOMMENDED, "temperature": 0.9, "top_p": 1}


def test_in_ollamas_options_and_our_namespace_too(tokenizer: TextTokenizer) -> None:
    told = params(tokenizer, "/api/chat", RECOMMENDED, options={"top_k": 3, "repeat_penalty": 1.2})
    assert drawn(told) == {**RECOMMENDED, "top_k": 3, "repetition_penalty": 1.2}
    told = params(tokenizer, "/v1/completions", RECOMMENDED, manyhands={"min_p": 0, "top_k": 3})
    assert drawn(told) == {**RECOMMENDED, "min_p": 0, "top_k": 3}


def test_without_recommendations_each_path_has_its_own_defaults(tokenizer: TextTokenizer) -> None:
    told = {path: params(tokenizer, path, {}) for path in PATHS}
    assert [told[path].temperature for path in PATHS] == [1, 1, 1, 1, 0.8, 0.8, 0.9]
    assert [told[path].top_k for path in PATHS] == [0, 0, 0, 0, 40, 40, 0]


def test_a_folder_says_it_for_its_gateway(tmp_path: Path) -> None:
    from manyhands.api.formats import ModelFormat
    from manyhands.origin.model import OriginModel

    folder = make_model(tmp_path / "m", TEMPLATE)
    said = {**json.loads((folder / "generation_config.json").read_text()), **RECOMMENDED}
    (folder / "generation_config.json").write_text(json.dumps(said))

    class Asked:
        model = OriginModel(folder, "bf16")

    read = ModelFormat.of(MODEL, Asked())  # type: ignore[arg-type]
    assert read.speaker.recommended == RECOMMENDED == read.spec.load().recommended
