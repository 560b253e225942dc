"""What programs send back of earlier answers, as chat templates take it."""

from typing import Any

import pytest

from manyhands.api.http.body import BadField
from manyhands.api.openai.conversation import call_of, conversation_of, input_conversation, message_of
from manyhands.api.openai.namespaces import called_tools

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


CALL_ITEM = {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}", "namespace": "mcp__n__"}


def test_a_call_and_its_text_are_one_turn_before_the_result() -> None:
    """In the order in which Codex sends them back."""
    result = {"type": "function_call_output", "call_id": "1", "output": "z"}
    said = input_conversation({"input": [CALL_ITEM, SAID, {**SAID, "content": "y"}, result, SAID]})
    assert [message["role"] for message in said.messages] == ["assistant", "tool", "assistant"]
    (call,) = said.messages[0]["tool_calls"]
    assert said.messages[0]["content"] == "x\ny" and call["function"]["name"] == "mcp__n__f"


def test_tools_of_a_namespace_have_longer_names() -> None:
    inner = [{"type": "function", "name": name, "description": name} for name in ("f", "g")]
    spaces = [{"type": "namespace", "name": n, "description": n, "tools": inner} for n in ("mcp__n__", "m")]
    tools: list[dict[str, Any]] = [*spaces, {"type": "custom", "name": "p"}]
    said = input_conversation({"input": "x", "tools": tools})
    told = [(tool["function"]["name"], tool["function"]["description"]) for tool in said.tools]
    first = [("mcp__n__f", "mcp__n__\n\nf"), ("mcp__n__g", "g"), ("m__f", "m\n\nf"), ("m__g", "g")]
    assert told == [*first, ("p", "")] and [f.name for f in said.functions] == [name for name, _ in told]
    assert called_tools(tools) == {
        "mcp__n__f": ("f", "mcp__n__", False),
        "mcp__n__g": ("g", "mcp__n__", False),
        "m__f": ("f", "m", False),
        "m__g": ("g", "m", False),
        "p": ("p", "", True),
    }
    with pytest.raises(BadField, match="comes twice"):
        input_conversation({"input": "x", "tools": [*tools, {"type": "function", "name": "m__f"}]})


def test_a_tool_that_is_allowed_is_one_of_the_tools() -> None:
    with pytest.raises(BadField, match="no function k in tools"):
        conversation_of({"messages": [SAID], "tools": TOOLS, "tool_choice": allowed("auto", "f", "k")})


@pytest.mark.parametrize("name", ["none", "auto", "required"])
def test_a_function_is_chosen_whatever_its_name(name: str) -> None:
    """None was called of the first name, any of the others."""
    tools = [{"type": "function", "function": {"name": one}} for one in (name, "other")]
    choice = {"type": "function", "function": {"name": name}}
    said = conversation_of({"messages": [{"role": "user", "content": "x"}], "tools": tools, "tool_choice": choice})
    assert [function.name for function in said.functions] == [name] and said.tool_choice == "required"
