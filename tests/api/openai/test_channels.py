"""A model that answers in channels, as gpt-oss does, over the API: what of it is a thought, the answer, a call."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.api.openai.test_chat import HI, TOOLS, play
from tests.api.served import MODEL, Served, make_model

TEMPLATE = (
    "{% if tools %}{{ tools | tojson }} to functions.{% endif %}{{ reasoning_effort }}"
    "{% for m in messages %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% else %}<|channel|>final<|message|>{% endif %}"
)
LIKELY = {str(ord("f")): 100}  # the final channel, where a grammar leaves the choice


SPECIAL = {"system": "channel", "user": "message", "assistant": "start", "tool": "constrain"}


@pytest.fixture(scope="module", params=["text", "special"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its markers are letters, or special tokens as gpt-oss's are."""
    out = make_model(tmp_path_factory.mktemp("channels") / "m", TEMPLATE)
    text = (out / "tokenizer.json").read_text()
    for name, marker in SPECIAL.items() if request.param == "special" else ():
        text = text.replace(f"<|{name}|>", f"<|{marker}|>")
    (out / "tokenizer.json").write_text(text)
    return out


def test_json_is_the_answer_and_a_call_is_a_call(folder: Path) -> None:
    async def scene(it: Served) -> None:
        client = await it.client()
        form: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": ["f", "no"]}}}
        wishes: Any = {"model": MODEL, "messages": HI, "max_tokens": 300, "seed": 3}
        made = await client.chat.completions.create(**wishes, response_format=form, logit_bias=LIKELY)
        assert json.loads(made.choices[0].message.content or "") in ("f", "no")
        called = await client.chat.completions.create(
            **wishes, tools=TOOLS, tool_choice="required", logit_bias={str(ord(" ")): 100}
        )
        (choice,) = called.choices
        assert choice.finish_reason == "tool_calls" and choice.message.tool_calls and not choice.message.content
        (call,) = choice.message.tool_calls
        assert call.type == "function" and set(json.loads(call.function.arguments)) == {"unit", "deep"}

    play(folder, scene)


def test_a_text_that_is_continued_is_the_final_channels(folder: Path) -> None:
    """Its JSON stands in no channel of its own."""

    async def scene(it: Served) -> None:
        form: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": ["yes", "no"]}}}
        made = await (await it.client()).chat.completions.create(
            model=MODEL,
            messages=[*HI, {"role": "assistant", "content": "So: "}],
            max_tokens=9,
            response_format=form,
            extra_body={"continue_final_message": True, "add_generation_prompt": False},
        )
        assert json.loads(made.choices[0].message.content or "") in ("yes", "no")

    play(folder, scene)
