"""What is said to the model: from the fields of a request to messages and functions as chat templates take them. Pure."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from manyhands.api.http.body import BadField
from manyhands.api.openai.namespaces import flat_tools, full_name
from manyhands.text.grammar import Function

Object = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Conversation:
    """A chat request, whichever API it came by. `format`: None (text), {} (any JSON object) or a JSON schema.

    `variables`: of the chat template. `is_continued`: the answer goes on from the last message, the assistant's. `may_shorten`:
    its oldest messages may be left out until it fits.
    """

    messages: Sequence[Mapping[str, Any]]
    functions: Sequence[Function] = ()
    tools: Sequence[Mapping[str, Any]] = ()  # as the template takes them
    tool_choice: str = "auto"  # none, auto, required, or the name of a function
    is_parallel: bool = True
    format: Mapping[str, Any] | None = None
    effort: str | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)
    is_continued: bool = False
    may_shorten: bool = False


def conversation_of(given: Mapping[str, Any]) -> Conversation:
    """The conversation of a chat request. Raises BadField."""
    tools = given.get("tools", ())
    functions, word = functions_of([t["function"] for t in tools], _flat_choice(given.get("tool_choice")))
    if not tools and word not in ("none", "auto"):
        raise BadField("tool_choice is for requests with tools", "tool_choice")
    return Conversation(
        [message_of(m) for m in given["messages"]],
        functions,
        _among(functions, tools),
        word,
        given.get("parallel_tool_calls", True),
        format_of(given.get("response_format")),
        given.get("reasoning_effort"),
        given.get("chat_template_kwargs", {}),
        _is_continued(given),
    )


def _is_continued(given: Mapping[str, Any]) -> bool:
    """Whether the last message is the beginning of the answer. Raises BadField."""
    last = given["messages"][-1]
    is_continued = bool(given.get("continue_final_message", False) or last.get("prefix", False))
    if given.get("add_generation_prompt", not is_continued) == is_continued:
        raise BadField(
            "add_generation_prompt is false where continue_final_message is true, and only there",
            "add_generation_prompt",
        )
    if is_continued and last["role"] != "assistant":
        raise BadField("continue_final_message: the last message is not the assistant's", "continue_final_message")
    return is_continued


def format_of(wanted: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """None for text, {} for any object, else the schema."""
    if wanted is None or wanted["type"] == "text":
        return None
    if wanted["type"] == "json_object":
        return {}
    schema: Mapping[str, Any] = wanted.get("json_schema", wanted)["schema"]
    return schema or {"type": ["object", "array", "string", "number", "boolean", "null"]}


def message_of(message: Mapping[str, Any]) -> Object:
    """A message as chat templates take it: text is text, arguments are objects, developers are the system, functions tools."""
    role = _ROLES.get(message["role"], message["role"])
    out: Object = {"role": role, "content": text_of(message.get("content")) or message.get("refusal") or ""}
    for name in ("name", "tool_call_id", "reasoning_content"):
        if message.get(name) is not None:
            out[name] = message[name]
    if isinstance(thought := message.get("reasoning"), str):
        out.setdefault("reasoning_content", thought)
    if message.get("tool_calls"):
        out["tool_calls"] = [call_of(c["id"], **c["function"]) for c in message["tool_calls"]]
    elif (called := message.get("function_call")) is not None:  # its name stands for the id that it has not
        out["tool_calls"] = [call_of(called["name"], **called)]
    elif message["role"] == "function":
        out["tool_call_id"] = message["name"]
    return out


_ROLES: Mapping[str, str] = {"developer": "system", "function": "tool"}


def call_of(call_id: str, name: str, arguments: str) -> Object:
    """A call as chat templates take it."""
    try:
        read = json.loads(arguments or "{}")  # as clients send back a call without any
    except (ValueError, RecursionError):
        read = arguments
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": read}}


def _flat_choice(choice: Any) -> Any:
    """tool_choice of a chat request as functions_of takes it."""
    if not isinstance(choice, dict):
        return choice
    if choice["type"] == "function":
        return choice["function"]
    allowed = choice["allowed_tools"]
    return {"mode": allowed["mode"], "tools": [tool["function"] for tool in allowed["tools"]]}


def _among(functions: Sequence[Function], tools: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    """The tools that the model is told of: those of `functions`."""
    names = {function.name for function in functions}
    return [tool for tool in tools if tool["function"]["name"] in names]


WORDS = ("none", "auto", "required")  # that are no names where Conversation.tool_choice says them


def functions_of(tools: Sequence[Mapping[str, Any]], choice: Any) -> tuple[list[Function], str]:
    """The functions that may be called, and tool_choice as a word. `choice`: a word, a function by its `name`, or the `tools`
    that are allowed with a `mode`. Raises BadField for a choice without its tool, or a name that comes twice.
    """
    functions = [
        Function(t["name"], t.get("parameters") or {"type": "object", "properties": {}}, bool(t.get("strict")))
        for t in tools
    ]
    names = [f.name for f in functions]
    if len(set(names)) < len(names):
        raise BadField("tools: a function's name comes twice", "tools")
    if isinstance(choice, dict) and "mode" in choice:
        allowed = [tool["name"] for tool in choice["tools"]]
        if missing := [name for name in allowed if name not in names]:
            raise BadField(f"tool_choice: there is no function {missing[0]} in tools", "tool_choice")
        return [f for f in functions if f.name in allowed], choice["mode"]
    named = choice["name"] if isinstance(choice, dict) else None
    if named not in (None, *names) or (choice == "required" and not names):
        raise BadField(f"tool_choice: there is no function {named or 'to choose'} in tools", "tool_choice")
    if named in WORDS:
        return [f for f in functions if f.name == named], "required"
    return functions, named or choice or "auto"


def text_of(content: Any) -> str:
    """The text of a message's content: a string, or parts of text or refusals, which are lines of their own."""
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(filter(None, (part.get("text") or part.get("refusal") for part in content)))


# What the model is told of a custom tool, whose input is plain text.
CUSTOM_INPUT: Object = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
    "additionalProperties": False,
}


def input_conversation(given: Mapping[str, Any]) -> Conversation:
    """The conversation of a /v1/responses request. Raises BadField."""
    tools = [_flat_function(tool) for tool in flat_tools(given.get("tools", ()))]
    functions, word = functions_of(tools, given.get("tool_choice"))
    if not tools and word not in ("none", "auto"):
        raise BadField("tool_choice is for requests with tools", "tool_choice")
    said: list[Object] = []
    if "instructions" in given:
        said.append({"role": "system", "content": given["instructions"]})
    wanted = given["input"]
    said += [{"role": "user", "content": wanted}] if isinstance(wanted, str) else messages_of(wanted)
    return Conversation(
        said,
        functions,
        _among(functions, [{"type": "function", "function": tool} for tool in tools]),
        word,
        given.get("parallel_tool_calls", True),
        format_of(given.get("text", {}).get("format")),
        given.get("reasoning", {}).get("effort"),
        may_shorten=given.get("truncation") == "auto",
    )


def _flat_function(tool: Mapping[str, Any]) -> Object:
    """A function as chat requests have it, of a flat tool."""
    if tool["type"] == "custom":
        return {"name": tool["name"], "description": tool.get("description", ""), "parameters": CUSTOM_INPUT}
    return {name: value for name, value in tool.items() if name != "type"}


def _say(out: list[Object], message: Object) -> None:
    """Add a message; the assistant's text behind a call is of the same turn, as the result of the call is to follow that."""
    if out and "tool_calls" in out[-1] and message["role"] == "assistant":
        out[-1]["content"] = "\n".join(filter(None, (out[-1]["content"], message["content"])))
    else:
        out.append(message)


def messages_of(items: Sequence[Mapping[str, Any]]) -> list[Object]:
    """Messages of input items: calls join the assistant's turn, their outputs are the tool's."""
    out: list[Object] = []
    for item in items:
        match item.get("type", "message"):
            case "message":
                _say(out, message_of(item))
            case "function_call" | "custom_tool_call" as kind:
                if not out or out[-1]["role"] != "assistant":
                    out.append({"role": "assistant", "content": ""})
                name = full_name(item["name"], item.get("namespace", ""))
                arguments = item["arguments"] if kind == "function_call" else json.dumps({"input": item["input"]})
                out[-1].setdefault("tool_calls", []).append(call_of(item["call_id"], name, arguments))
            case "function_call_output" | "custom_tool_call_output":
                out.append({"role": "tool", "tool_call_id": item["call_id"], "content": text_of(item["output"])})
    return out
