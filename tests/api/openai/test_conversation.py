"""What programs send back of earlier answers, as chat templates take it."""

from typing import Any

import pytest

from manyhands.api.http.body import BadField
from manyhands.api.openai.conversation import call_of, conversation_of, input_conversation, message_of

SAID = {"role": "assistant", "content": "x"}
PART = {"type": "text", "text": "a"}
CALLER = {"role": "assistant", "content": ""}
F = {"id": "f", "type": "function", "function": {"name": "f", "arguments": {}}}


@pytest.mark.parametrize(
    "message, wanted",
    [
        ({"role": "assistant", "refusal": "I will not."}, {"role": "assistant", "content": "I will not."}),
        ({**SAID, "refusal": "y"}, SAID),
        ({**SAID, "reasoning": "Hm."}, {**SAID, "reasoning_content": "Hm."}),
        ({**SAID, "reasoning": "Hm.", "reasoning_content": "Well."}, {**SAID, "reasoning_content": "Well."}),
        ({**SAID, "reasoning": {"summary": []}}, SAID),
        ({"role": "developer", "content": [PART]}, {"role": "system", "content": "a"}),
        ({**SAID, "content": [PART, {**PART, "text": ""}, PART]}, {**SAID, "content": "a\na"}),
        ({"role": "assistant", "function_call": {"name": "f", "arguments": "{}"}}, {**CALLER, "tool_calls": [F]}),
        ({"role": "function", "name": "f"}, {"role": "tool", "name": "f", "tool_call_id": "f", "content": ""}),
    ],
)
def test_a_message_loses_nothing_that_was_said(message: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert message_of(message) == wanted


@pytest.mark.parametrize("arguments, wanted", [("", {}), ("{}", {}), ('{"a": 1}', {"a": 1}), ("not JSON", "not JSON")])
def test_arguments_are_an_object_where_they_can_be(arguments: str, wanted: Any) -> None:
    assert call_of("1", "f", arguments)["function"]["arguments"] == wanted


def allowed(mode: str, *names: str) -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


TOOLS = [{"type": "function", "function": {"name": name, "description": name}} for name in ("f", "g", "h")]


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_the_model_is_told_of_no_tool_but_those_allowed(mode: str) -> None:
    choice = allowed(mode, "h", "f")
    said = conversation_of({"messages": [SAID], "tools": TOOLS, "tool_choice": choice})
    assert (said.tools, [f.name for f in said.functions], said.tool_choice) == ([TOOLS[0], TOOLS[2]], ["f", "h"], mode)
    flat = [{"type": "function", **tool["function"]} for tool in TOOLS]  # type: ignore[dict-item]
    choice = {"type": "allowed_tools", "mode": mode, "tools": [{"type": "function", "name": n} for n in ("h", "f")]}
    same = input_conversation({"input": "x", "tools": flat, "tool_choice": choice})
    assert (same.tools, same.functions, same.tool_choice) == (said.tools, said.functions, mode)


def test_a_tool_that_is_allowed_is_one_of_the_tools() -> None:
    with pytest.raises(BadField, match="no function k in tools"):
        conversation_of({"messages": [SAID], "tools": TOOLS, "tool_choice": allowed("auto", "f", "k")})
