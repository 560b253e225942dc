"""Prompts that end within a thought: what is asked of the answer then."""

import json
from typing import Any

import pytest

from manyhands.api.http.body import BadField
from manyhands.api.preparation.desk import PreparationDesk, Prepared, Speaker
from manyhands.api.preparation.prepare import prepare
from manyhands.text.dialects import HARMONY, INKLING, KIMI3, MUSE
from manyhands.text.reasoning import Heads, Thinking, find_thinking
from manyhands.text.tokenizer import TextTokenizer, load_tokenizer
from tests.api.served import MODEL, make_model

TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{{ opens }}{# </think> #}{% endif %}"
)
FORM = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": ["yes", "no"]}}}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> TextTokenizer:
    return load_tokenizer(make_model(tmp_path_factory.mktemp("thoughts") / "m", TEMPLATE))


def prepared(tokenizer: TextTokenizer, said: str = "", **wishes: Any) -> Prepared:
    """A request, after the words `said` of the assistant if there are any."""
    speaker = Speaker(
        MODEL, tokenizer, 1024, 264, 8, "bf16", None, find_thinking(tokenizer), {}, level=None, is_plain=False
    )
    messages = [{"role": "user", "content": "hi"}]
    if said:
        messages.append({"role": "assistant", "content": said})
        wishes |= {"continue_final_message": True, "add_generation_prompt": False}
    body = json.dumps({"model": MODEL, "messages": messages, "max_tokens": 9, **wishes}).encode()
    return prepare("/v1/chat/completions", body, PreparationDesk({MODEL: speaker}, 16, 1024, lambda grammar: 0))


def test_json_follows_a_thought_that_no_token_ends(tokenizer: TextTokenizer) -> None:
    """olmo3's markers are several tokens: where a thought ends only its text says."""
    shut = prepared(tokenizer, response_format=FORM)
    opened = prepared(tokenizer, response_format=FORM, chat_template_kwargs={"opens": "<think>\n"})
    assert not shut.is_open and opened.is_open
    assert shut.grammar is not None and opened.grammar is not None
    assert "</think>" in opened.grammar and opened.grammar.endswith(shut.grammar.removeprefix("start: "))


@pytest.mark.parametrize(
    "said, is_open",
    [("<think>\nWell, ", True), ("<think>so</think>Well, ", False), ("</think><think>", True), ("a", False)],
)
def test_an_answer_may_go_on_from_within_a_thought(said: str, is_open: bool, tokenizer: TextTokenizer) -> None:
    assert prepared(tokenizer, said).is_open is is_open


def test_ollamas_think_is_refused_by_its_name_where_only_a_level_can_be_said(tokenizer: TextTokenizer) -> None:
    """As of gpt-oss. It was refused as reasoning_effort, which no program of Ollama's sends."""
    thinking = Thinking("<think>", "</think>", None, None, None)
    speaker = Speaker(
        MODEL, tokenizer, 1024, 264, 8, "bf16", None, thinking, {}, level="reasoning_effort", is_plain=False
    )
    desk = PreparationDesk({MODEL: speaker}, 16, 1024, lambda grammar: 0)
    asked = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
    with pytest.raises(BadField, match="think: model 'tiny' always thinks") as refusal:
        prepare("/api/chat", json.dumps({**asked, "think": False}).encode(), desk)
    assert refusal.value.param == "think"
    for think in (True, "low"):
        assert prepare("/api/chat", json.dumps({**asked, "think": think}).encode(), desk).prompts


TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


def headed(heads: Heads, tokenizer: TextTokenizer, level: str | None = None) -> PreparationDesk:
    """A desk for a model whose messages have heads."""
    dialect = {"channels": HARMONY, "recipients": MUSE, "blocks": INKLING, "sections": KIMI3}[heads]
    thinking = Thinking("<think>", "</think>", None, None, None, heads)
    speaker = Speaker(MODEL, tokenizer, 1024, 264, 8, "bf16", dialect, thinking, {}, level=level, is_plain=False)
    return PreparationDesk({MODEL: speaker}, 16, 1024, lambda grammar: 0)


def ask(desk: PreparationDesk, said: str = "", **wishes: Any) -> Prepared:
    messages = [{"role": "user", "content": "hi"}]
    if said:
        messages.append({"role": "assistant", "content": said})
        wishes |= {"continue_final_message": True, "add_generation_prompt": False}
    body = json.dumps({"model": MODEL, "messages": messages, "max_tokens": 9, **wishes}).encode()
    return prepare("/v1/chat/completions", body, desk)


@pytest.mark.parametrize("heads", ["channels", "recipients", "blocks", "sections"])
def test_calls_behind_words_that_are_there_are_enforced_or_refused(heads: Heads, tokenizer: TextTokenizer) -> None:
    """The grammar was one of calls without heads, of which nothing reads a call."""
    desk = headed(heads, tokenizer)
    assert ask(desk, "Well, ", tools=[TOOL]).grammar is None
    if heads == "sections":  # the words stand in the section that is begun
        grammar = ask(desk, "Well, ", tools=[TOOL], tool_choice="required").grammar
        assert grammar is not None and "closed {" not in grammar and "call_0" in grammar
        return
    for wish in ({"tool_choice": "required"}, {"response_format": FORM}):
        with pytest.raises(BadField, match="goes on from the last message calls of this model cannot be enforced"):
            ask(desk, "Well, ", tools=[TOOL], **wish)
    assert ask(desk, "Well, ", response_format=FORM).grammar is not None


def test_of_inkling_no_thoughts_are_a_level(tokenizer: TextTokenizer) -> None:
    asked = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "think": False}
    for heads in ("blocks", "channels"):
        desk = headed(heads, tokenizer, "reasoning_effort")
        if heads == "blocks":
            assert ask(desk, reasoning_effort="none").prompts
            assert prepare("/api/chat", json.dumps(asked).encode(), desk).prompts
            continue
        with pytest.raises(BadField, match="has no such switch"):
            ask(desk, reasoning_effort="none")
