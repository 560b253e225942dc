"""From a /v1/messages request to the conversation that is put to the model. Pure."""

import json
from collections.abc import Iterable, Mapping
from typing import Any, Final

from manyhands.api.http.body import BadField
from manyhands.api.openai.conversation import Conversation, functions_of, text_of
from manyhands.api.preparation.desk import Speaker

Object = dict[str, Any]
BILLING: Final = "x-anthropic-billing-header:"


def messages_conversation(given: Mapping[str, Any], speaker: Speaker) -> Conversation:
    """The conversation, with its tools and format. Raises BadField."""
    choice = given.get("tool_choice", {"type": "auto"})
    tools = [_function(tool) for tool in given.get("tools", ())]
    functions, word = functions_of(tools, _word(choice))
    said: list[Object] = []
    if system := _system_of(given.get("system")):
        said.append({"role": "system", "content": system})
    for turn in given["messages"]:
        said += _messages_of(turn)
    said = list(_merged(said))
    is_continued = bool(said) and said[-1]["role"] == "assistant"
    if is_continued and said[-1].get("tool_calls"):
        raise BadField("messages: the last one calls a tool, and the tool's result is missing", "messages")
    options = given.get("output_config", {})
    return Conversation(
        said,
        functions,
        [{"type": "function", "function": tool} for tool in tools],
        word,
        not choice.get("disable_parallel_tool_use", False),
        options["format"]["schema"] if "format" in options else None,
        _effort(given.get("thinking", {}).get("type"), options.get("effort"), speaker),
        is_continued=is_continued,
    )


def _system_of(given: Any) -> str:
    """The system prompt, without the block in which Claude Code tells Anthropic's servers its version: where it came first and
    changed, nothing of a prompt could be reused."""
    return text_of(given if isinstance(given, str) else [b for b in given or () if not b["text"].startswith(BILLING)])


def _word(choice: Mapping[str, Any]) -> Any:
    """tool_choice as functions_of takes it. Raises BadField."""
    match choice["type"]:
        case "any":
            return "required"
        case "tool" if "name" not in choice:
            raise BadField(
                "tool_choice.name is missing: type tool needs it", "tool_choice", "missing_required_parameter"
            )
        case "tool":
            return {"name": choice["name"]}
        case word:
            return word


def _function(tool: Mapping[str, Any]) -> Object:
    kept = {name: tool[name] for name in ("name", "description", "strict") if name in tool}
    if examples := tool.get("input_examples"):  # which chat templates know nothing of
        shown = f"Examples of its input: {json.dumps(examples, ensure_ascii=False)}"
        kept["description"] = "\n\n".join(filter(None, (tool.get("description"), shown)))
    return {**kept, "parameters": tool["input_schema"]}


def _effort(thinking: str | None, level: str | None, speaker: Speaker) -> str | None:
    """The effort as the template can be told it; None where it can be told nothing, or nothing was asked."""
    if speaker.level is not None and thinking != "disabled":
        return level
    if not speaker.can_be_thoughtless or thinking in (None, "adaptive", "between_tools"):
        return None
    return "none" if thinking == "disabled" else "medium"


def _messages_of(turn: Mapping[str, Any]) -> list[Object]:
    """The messages of one turn: results of tools are messages of their own."""
    role, content = turn["role"], turn["content"]
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    out: list[Object] = []
    for block in content:
        match block["type"]:
            case "text":
                out.append({"role": role, "content": block["text"]})
            case "thinking":
                out.append({"role": role, "content": "", "reasoning_content": block["thinking"]})
            case "tool_use":
                function = {"name": block["name"], "arguments": block["input"]}
                call = {"id": block["id"], "type": "function", "function": function}
                out.append({"role": "assistant", "content": "", "tool_calls": [call]})
            case "tool_result":
                said = text_of(block.get("content"))
                said = f"error: {said}" if block.get("is_error") else said
                out.append({"role": "tool", "tool_call_id": block["tool_use_id"], "content": said})
    return out or [{"role": role, "content": ""}]


def _merged(messages: Iterable[Object]) -> Iterable[Object]:
    """Neighbours of one role as one message, as this API takes them; but results of tools each for itself."""
    last: Object | None = None
    for message in messages:
        if last is None or message["role"] != last["role"] or message["role"] == "tool":
            if last is not None:
                yield last
            last = dict(message)
            continue
        last["content"] = "\n".join(text for text in (last["content"], message["content"]) if text)
        for name in ("tool_calls", "reasoning_content"):
            if name in message:
                last[name] = last[name] + message[name] if name in last else message[name]
    if last is not None:
        yield last
