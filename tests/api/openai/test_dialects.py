"""Calls of models whose marks are special tokens, over the API: forced, read as they stream, and said back to the model."""

import json
from pathlib import Path
from typing import Any

import pytest

from manyhands.text.dialects import COMMAND, DEEPSEEK31, GEMMA4, GLM4, GRANITE, KIMI, OLMO3, SEED, Dialect
from tests.api.openai.test_chat import HI, TOOLS, play
from tests.api.served import MODEL, Served, make_model
from tests.text.test_templates import (
    COMMAND_R7B,
    DEEPSEEK_V31,
    GEMMA4_IT,
    GLM4_0414,
    GRANITE33,
    KIMI_K2,
    OLMO3_INSTRUCT,
    SEED_OSS,
)

TEMPLATES = {
    DEEPSEEK31: DEEPSEEK_V31,
    KIMI: KIMI_K2,
    GRANITE: GRANITE33,
    COMMAND: COMMAND_R7B,
    SEED: SEED_OSS,
    GLM4: GLM4_0414,
    GEMMA4: GEMMA4_IT,
    OLMO3: OLMO3_INSTRUCT,
}


@pytest.fixture(scope="module", params=TEMPLATES, ids=lambda dialect: dialect.name)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its marks are special tokens, as far as there are spare ones."""
    dialect: Dialect = request.param
    out = make_model(tmp_path_factory.mktemp("dialects") / "m", TEMPLATES[dialect], context=4096)
    text = (out / "tokenizer.json").read_text()
    spare = ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>", "<|tool|>")
    for name, mark in zip(spare, sorted(dialect.marks - {"[ARGS]"}), strict=False):
        text = text.replace(name, json.dumps(mark, ensure_ascii=False)[1:-1])
    (out / "tokenizer.json").write_text(text)
    return out


def test_a_forced_call_is_read_and_goes_on(folder: Path) -> None:
    async def scene(it: Served) -> None:
        client = await it.client()
        wishes: Any = {"model": MODEL, "max_tokens": 400, "seed": 3, "tools": TOOLS, "logit_bias": {str(ord(" ")): 100}}
        made = await client.chat.completions.create(messages=HI, tool_choice="required", **wishes)
        (choice,) = made.choices
        assert choice.finish_reason == "tool_calls" and choice.message.tool_calls and not choice.message.content
        stream = await client.chat.completions.create(messages=HI, tool_choice="required", stream=True, **wishes)
        streamed = "".join(
            [
                call.function.arguments or ""
                async for chunk in stream
                for call in chunk.choices[0].delta.tool_calls or []
                if call.function is not None
            ]
        )
        called = [call for call in choice.message.tool_calls if call.type == "function"]
        assert streamed == "".join(call.function.arguments for call in called)
        for call in called:
            assert set(json.loads(call.function.arguments)) == {"unit", "deep"}
        turn: Any = {"role": "assistant", "content": None, "tool_calls": [call.model_dump() for call in called]}
        results: Any = [{"role": "tool", "tool_call_id": call.id, "content": "7"} for call in called]
        after = await client.chat.completions.create(messages=[*HI, turn, *results], **{**wishes, "max_tokens": 4})
        assert after.usage and made.usage and after.usage.prompt_tokens > made.usage.prompt_tokens + 20

    play(folder, scene)
