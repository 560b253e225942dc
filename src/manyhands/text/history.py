"""Conversations with tools as a chat template takes them, and what it leaves out of them. Pure.

Templates differ in whether the arguments of a call are an object or JSON as a text; some write no calls, and some are of models
that know tools but take none. What a template does is seen by rendering a call with it, once.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, Final, NamedTuple

from manyhands.text.dialects import GEMMA4, GLM4, KIMI, MISTRAL, MISTRAL11, PHI4, Dialect, find_dialect
from manyhands.text.reasoning import variables_of
from manyhands.text.render_budget import RenderBudget
from manyhands.text.template import MAX_KEPT, ChatTemplate

Object = dict[str, Any]
Messages = Sequence[Mapping[str, Any]]
_ARGUMENTS: Final = {"qzkey": 1}


class _Habits(NamedTuple):
    """What a template does with calls."""

    wants_text: bool  # their arguments are JSON as a text
    writes_calls: bool


def as_taught(tokenizer: Any, template: ChatTemplate, messages: Messages, tools: Sequence[Any]) -> Messages:
    """The messages of a conversation with `tools`, or with calls, as the template takes them."""
    has_calls = any(message.get("tool_calls") or message.get("role") == "tool" for message in messages)
    dialect = find_dialect(tokenizer) if tools or has_calls else None
    if dialect is None:
        return messages
    if has_calls:
        messages = with_calls(messages, dialect, template, tuple(tokenizer.special_tokens_map.items()))
    return messages if "tools" in variables_of(tokenizer) or not tools else _with_tools(messages, tools, dialect)


def with_calls(
    messages: Messages, dialect: Dialect, template: ChatTemplate, named: tuple[tuple[str, str], ...]
) -> Messages:
    """A conversation with calls, and what functions returned, as the template takes them. `named`: its special tokens."""
    habits = _habits(template, named)
    if dialect is GLM4 and not habits.writes_calls:
        return _with_metadata(messages)
    messages = [_with_calls(message, dialect, habits) if message.get("tool_calls") else message for message in messages]
    if dialect in (MISTRAL, MISTRAL11):
        return list(map(_with_short_ids, messages))
    return _with_named_ids(messages) if dialect is KIMI else messages


@lru_cache(maxsize=MAX_KEPT)
def _habits(template: ChatTemplate, named: tuple[tuple[str, str], ...]) -> _Habits:
    text = json.dumps(_ARGUMENTS)
    as_object, as_text = _probe(template, named, _ARGUMENTS), _probe(template, named, text)
    wants_text = text in (as_text or "") and (as_object is None or str(_ARGUMENTS) in as_object)
    said = as_text if wants_text else as_object
    return _Habits(wants_text, said is None or "qzname" in said)


def _probe(template: ChatTemplate, named: tuple[tuple[str, str], ...], arguments: Any) -> str | None:
    """A conversation with a call of qzname (which some say by its id); None if the template refuses it."""
    call = {"id": "qzname000", "type": "function", "function": {"name": "qzname", "arguments": arguments}}
    asked, called = {"role": "user", "content": "x"}, {"role": "assistant", "content": "", "tool_calls": [call]}
    tool = {
        "type": "function",
        "function": {"name": "f", "description": "", "parameters": {"type": "object", "properties": {}}},
    }
    try:
        return template.render([asked, called], {**dict(named), "tools": [tool]}, RenderBudget(4096, 0.05, 1 << 17))
    except Exception:  # a template raises what it likes
        return None


def _with_calls(message: Mapping[str, Any], dialect: Dialect, habits: _Habits) -> Mapping[str, Any]:
    """A message of the assistant with its calls as the template takes them, or within its text where it writes none."""
    functions = [call["function"] for call in message["tool_calls"]]
    if not habits.writes_calls and dialect.forms and not dialect.is_put:
        calls = write_calls(dialect, [(f["name"], _json(f["arguments"])) for f in functions])
        return {
            **{key: value for key, value in message.items() if key != "tool_calls"},
            "content": message["content"] + calls,
        }
    if not habits.wants_text:
        return message
    told = [
        {**call, "function": {**f, "arguments": _json(f["arguments"])}}
        for call, f in zip(message["tool_calls"], functions, strict=True)
    ]
    return {**message, "tool_calls": told}


def _with_named_ids(messages: Messages) -> Messages:
    """The same with ids of calls as Kimi's models make and read them: all that is said of which function was called."""
    ids: dict[str, str] = {}
    out: list[Mapping[str, Any]] = []
    num_calls = 0
    for message in messages:
        calls = []
        for call in message.get("tool_calls", ()):
            ids[call["id"]] = f"functions.{call['function']['name']}:{num_calls}"
            calls.append({**call, "id": ids[call["id"]]})
            num_calls += 1
        told: dict[str, Any] = {"tool_calls": calls} if calls else {}
        if (asked := message.get("tool_call_id")) in ids:
            told["tool_call_id"] = ids[asked]
        out.append({**message, **told})
    return out


def _with_short_ids(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """The same with ids of calls as Mistral's templates take them: of nine letters and digits."""
    told: dict[str, Any] = {}
    if message.get("tool_calls"):
        told["tool_calls"] = [{**call, "id": _short(call["id"])} for call in message["tool_calls"]]
    if "tool_call_id" in message:
        told["tool_call_id"] = _short(message["tool_call_id"])
    return {**message, **told}


def _short(call_id: str) -> str:
    is_short = len(call_id) == 9 and call_id.isascii() and call_id.isalnum()
    return call_id if is_short else hashlib.sha256(call_id.encode()).hexdigest()[:9]


def _with_metadata(messages: Messages) -> Messages:
    """The same with each call as a message of its own, the name of its function in what GLM-4 calls metadata, and with what
    functions returned as observations."""
    out: list[Mapping[str, Any]] = []
    for message in messages:
        calls = [call["function"] for call in message.get("tool_calls") or ()]
        if message["role"] == "tool":
            out.append({**message, "role": "observation"})
        elif message.get("content") or not calls:
            out.append({key: value for key, value in message.items() if key != "tool_calls"})
        out += [{"role": "assistant", "metadata": f["name"], "content": _json(f["arguments"])} for f in calls]
    return out


def with_turn(text: str, dialect: Dialect | None) -> str:
    """A prompt in which the assistant's turn has begun: Gemma 4's template leaves it out behind what functions returned, if
    there were words beside the calls."""
    return text + "<|turn>model\n" if dialect is GEMMA4 and text.endswith("<turn|>\n") else text


def _json(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def write_calls(dialect: Dialect, calls: Sequence[tuple[str, str]]) -> str:
    """Calls, each a name and the JSON of its arguments, as the model is taught to write them."""
    said = [
        dialect.forms[0].replace("{n}", str(n)).replace("{name}", name) + arguments + dialect.tail
        for n, (name, arguments) in enumerate(calls)
    ]
    inside = said if dialect.between is None else [dialect.between.join(said)]
    return dialect.apart.join(f"{dialect.marker}{dialect.lead}{each}{dialect.trail}{dialect.close}" for each in inside)


def _with_tools(messages: Messages, tools: Sequence[Any], dialect: Dialect) -> Messages:
    """The same with the tools told in the system message: by Phi's template, else as DeepSeek's model card of V3.1 has it."""
    functions = [tool["function"] for tool in tools]
    system = messages[0]["content"] if messages[0]["role"] == "system" else ""
    rest = messages[1:] if messages[0]["role"] == "system" else messages
    if dialect is PHI4:
        return [{"role": "system", "content": system, "tools": _json(functions)}, *rest]
    told = [
        f"### {f['name']}\nDescription: {f.get('description') or ''}\n\nParameters: {_json(f.get('parameters') or {})}\n"
        for f in functions
    ]
    form = write_calls(dialect, [("tool_call_name", "tool_call_arguments")])
    text = (
        "## Tools\nYou have access to the following tools:\n\n"
        + "\n".join(told)
        + f"\nIMPORTANT: ALWAYS adhere to this exact format for tool use:\n{form}\n\nWhere:\n"
        "- `tool_call_name` must be an exact match to one of the available tools\n"
        "- `tool_call_arguments` must be valid JSON that strictly follows the tool's Parameters Schema\n"
        "- For multiple tool calls, chain them directly, before the last mark"
    )
    return [{"role": "system", "content": f"{system}\n\n{text}".lstrip()}, *rest]
