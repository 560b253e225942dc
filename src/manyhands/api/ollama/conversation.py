"""From an /api/chat or /api/generate request to what is put to the model. Pure."""

from collections.abc import Mapping
from typing import Any

from manyhands.api.http.body import BadField
from manyhands.api.openai.conversation import Conversation, functions_of
from manyhands.api.preparation.desk import Speaker

Object = dict[str, Any]
# Ollama's own defaults, but no penalty unless asked for.
_DEFAULTS: Object = {"temperature": 0.8, "top_p": 0.9, "top_k": 40}
_SAME = ("temperature", "top_p", "top_k", "min_p", "seed", "stop", "presence_penalty", "frequency_penalty")


def wishes_of(options: Mapping[str, Any], speaker: Speaker) -> Object:
    """Sampling fields by OpenAI's names; of those left out what the model's publisher recommends, or Ollama's default."""
    wishes = _DEFAULTS | speaker.recommended | {name: options[name] for name in _SAME if name in options}
    if "repeat_penalty" in options:
        wishes["repetition_penalty"] = options["repeat_penalty"]
    return wishes


def max_tokens_of(options: Mapping[str, Any], speaker: Speaker) -> int | None:
    """num_predict; negative: all that the context leaves. None: the gateway's default."""
    wanted: int | None = options.get("num_predict")
    return speaker.context if wanted is not None and wanted < 0 else (1 if wanted == 0 else wanted)


def chat_conversation(given: Mapping[str, Any], speaker: Speaker) -> Conversation:
    """The conversation of /api/chat. Raises BadField."""
    tools = given.get("tools", ())
    functions, word = functions_of([tool["function"] for tool in tools], None)
    said = _with_ids([_message_of(message) for message in given["messages"]])
    is_continued = said[-1]["role"] == "assistant" and "tool_calls" not in said[-1]
    effort = effort_of(given.get("think"), speaker)
    return Conversation(
        said, functions, tools, word, True, _format(given.get("format")), effort, is_continued=is_continued
    )


def prompt_conversation(given: Mapping[str, Any], speaker: Speaker) -> Conversation:
    """The conversation of /api/generate without `raw`. Raises BadField."""
    system = [{"role": "system", "content": given["system"]}] if given.get("system") else []
    said = [*system, {"role": "user", "content": given["prompt"]}]
    return Conversation(said, format=_format(given.get("format")), effort=effort_of(given.get("think"), speaker))


def effort_of(think: bool | str | None, speaker: Speaker) -> str | None:
    """What `think` asks for, as reasoning_effort. Raises BadField for a model that cannot."""
    can_think = speaker.level is not None or speaker.thinking is not None
    if think is None or (think is False and not can_think):
        return None
    if not can_think:
        raise BadField(f"think: model {speaker.name!r} does not support thinking: leave it out", "think")
    has_switch = speaker.thinking is not None and speaker.thinking.switch is not None
    if think is False and not speaker.can_be_thoughtless:
        raise BadField(f"think: model {speaker.name!r} always thinks: leave it out", "think")
    if not has_switch and speaker.level is None:
        return None
    usual = "high" if has_switch and speaker.level is not None else "medium"  # Kimi K3 has low, high and max
    return "none" if think is False else usual if think is True else think


def _format(wanted: Any) -> Mapping[str, Any] | None:
    """As Conversation.format."""
    return None if not wanted else {} if wanted == "json" else wanted


def _message_of(message: Mapping[str, Any]) -> Object:
    out: Object = {"role": message["role"], "content": message.get("content", "")}
    if message.get("thinking"):
        out["reasoning_content"] = message["thinking"]
    if message.get("tool_name"):
        out["name"] = message["tool_name"]
    if message.get("tool_call_id"):
        out["tool_call_id"] = message["tool_call_id"]
    if message.get("tool_calls"):
        out["tool_calls"] = [
            {"id": call.get("id"), "type": "function", "function": dict(call["function"])}
            for call in message["tool_calls"]
        ]
    return out


def _with_ids(messages: list[Object]) -> list[Object]:
    """The same, where calls have ids and results those of theirs, also where none were sent, as Ollama's programs do: a result
    is then that of the first call before it that has none yet, of the same name if it says one."""
    left: list[Object] = []  # calls without results
    for number, message in enumerate(messages):
        for index, call in enumerate(message.get("tool_calls", ())):
            call["id"] = call["id"] or f"call_{number}_{index}"
        left = message.get("tool_calls", left)
        if message["role"] == "tool" and left:
            named = [call for call in left if call["function"]["name"] == message.get("name")]
            asked = message.setdefault("tool_call_id", (named or left)[0]["id"])
            left = [call for call in left if call["id"] != asked]
    return messages
