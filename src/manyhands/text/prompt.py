"""Text and messages to ids, and what a checkpoint says of its tokenizer. Stands at the beginning of a token's path."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import Any, Final

from jinja2 import TemplateError

from manyhands.errors import BadRequest
from manyhands.text.apart import read_templates
from manyhands.text.dialects import Dialect, find_dialect
from manyhands.text.history import as_taught, with_calls, with_turn
from manyhands.text.reasoning import sources_of
from manyhands.text.render_budget import RenderBudget
from manyhands.text.template import MAX_KEPT, ChatTemplate, compile_template, is_read

# Stands behind the words that an answer goes on from: where they end cannot be told by themselves, as "<" and "end" stand in
# markers of turns too. Its space shows whether a template trims.
_MARK: Final = "CONTINUE_FINAL_MESSAGE_TAG "
Tokenizer = Any  # a TextTokenizer; tests also give transformers' own


def encode_prompt(tokenizer: Tokenizer, text: str) -> list[int]:
    """Return the ids of a plain prompt, with the special tokens (bos) that the tokenizer itself adds; never empty.

    Raises BadRequest for an empty prompt if the model has no token to begin with.
    """
    ids = [int(token) for token in tokenizer.encode(text)]
    if ids:
        return ids
    if tokenizer.bos_token_id is None:
        raise BadRequest("the prompt is empty and this model has no begin token: give at least one character")
    return [int(tokenizer.bos_token_id)]


def render_chat(
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] = (),
    budget: RenderBudget | None = None,
    **variables: Any,
) -> list[int]:
    """Return the ids of a conversation in the model's own chat template, ready for the assistant's answer.

    The template places the special tokens; `tools` and `variables` (enable_thinking, say) are its inputs, `budget` bounds
    what it may use. Raises TooCostly (a BadRequest) beyond that, and BadRequest if there is no template, no message, or if
    the template refuses the messages (for instance roles that must alternate).
    """
    text = render_text(tokenizer, messages, tools, budget or RenderBudget(), **variables)
    return [int(token) for token in tokenizer.encode(text, add_special_tokens=False)]


def render_text(
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Any],
    budget: RenderBudget,
    begun: str = "",
    **variables: Any,
) -> str:
    """The text of which `render_chat` returns the ids; with `begun`, the content of the last message, it ends with that, so
    that an answer goes on from it. Raises as it does."""
    if begun:
        marked = [*messages[:-1], {**messages[-1], "content": begun + _MARK}]
        text = render_text(tokenizer, marked, tools, budget, add_generation_prompt=False, **variables)
        return _up_to_mark(text, begun)
    if not messages:
        raise BadRequest("messages is empty: send at least one message")
    try:
        template = find_template(tokenizer, has_tools=bool(tools))
        _check_heard(tokenizer, template, messages, has_tools=bool(tools))
        known = {**tokenizer.special_tokens_map, "tools": list(tools) or None, **variables}
        text = template.render(as_taught(tokenizer, template, messages, tools), known, budget)
        return with_turn(text, find_dialect(tokenizer)) if known.get("add_generation_prompt", True) else text
    except (
        TemplateError,
        TypeError,
        ValueError,
        AttributeError,
        LookupError,
        ArithmeticError,
        RecursionError,
        MemoryError,
    ) as error:
        reason = " ".join(str(error).split())[:300]  # what it raises itself, or content that it does not expect
        said = reason or type(error).__name__
        raise BadRequest(f"the chat template of this model refuses these messages: {said}") from error


def _check_heard(
    tokenizer: Tokenizer, template: ChatTemplate, messages: Sequence[Mapping[str, Any]], *, has_tools: bool
) -> None:
    """Raise BadRequest for a conversation of which the template leaves out what users say, or what functions returned."""
    unheard = _unheard(template, tuple(tokenizer.special_tokens_map.items()), find_dialect(tokenizer), has_tools)
    if "user" in unheard:
        raise BadRequest("the chat template of this model leaves out what users say in plain text: use /v1/completions")
    if "tool" in unheard and any(message.get("role") == "tool" for message in messages):
        raise BadRequest(
            "the chat template of this model leaves out what functions returned: send the conversation without messages of "
            "the role tool, or take another model"
        )


@lru_cache(maxsize=MAX_KEPT)
def _unheard(
    template: ChatTemplate, named: tuple[tuple[str, str], ...], dialect: Dialect | None, has_tools: bool
) -> frozenset[str]:
    """The roles, user or tool, whose words a template leaves out of a conversation."""
    function = {"name": "f", "arguments": {}}
    call = {"id": "call00000", "type": "function", "function": function}
    asked = {"role": "user", "content": "Qzuser"}
    called = {"role": "assistant", "content": "", "tool_calls": [call]}
    returned = {"role": "tool", "tool_call_id": "call00000", "name": "f", "content": "Qztool"}
    parameters = {"type": "object", "properties": {}}
    tool = {"type": "function", "function": {"name": "f", "description": "", "parameters": parameters}}
    known = {**dict(named), "tools": [tool] if has_tools else None}
    unheard = set[str]()
    said: tuple[list[Mapping[str, Any]], ...] = ([asked], [asked, called, returned])
    for messages in said:
        last = messages[-1]
        try:
            taught = messages if dialect is None else with_calls(messages, dialect, template, named)
            text = template.render(taught, known, RenderBudget(passes=4096, seconds=0.05, size=1 << 17))
        except Exception:  # a template raises what it likes; what it refuses it does not leave out silently
            continue
        unheard |= set() if str(last["content"]).lower() in text.lower() else {str(last["role"])}
    return frozenset(unheard)


def _up_to_mark(text: str, begun: str) -> str:
    """`text` until `begun`, behind which _MARK stands. Raises BadRequest if the template shows it otherwise."""
    before, mark, after = text.rpartition(_MARK.rstrip())
    if not after.startswith(" "):  # the template trims: also what is written before
        before = before.rstrip()
    if not mark or not before.rstrip().endswith(begun.strip()):
        raise BadRequest("the chat template of this model changes the last message: no answer can go on from it")
    return before


def find_template(tokenizer: Tokenizer, *, has_tools: bool) -> ChatTemplate:
    """The template for a conversation; there may be one for tools. Raises BadRequest."""
    source = _source(tokenizer, has_tools=has_tools)
    if not source:
        raise BadRequest("this model has no chat template: use /v1/completions with a plain prompt, or a chat model")
    return compile_template(source)


def are_templates_read(tokenizer: Tokenizer) -> bool:
    """Whether `render_text` compiles nothing."""
    return all(map(is_read, sources_of(tokenizer)))


def learn_templates(tokenizer: Tokenizer) -> None:
    """Compile the templates of a tokenizer, and see how they take conversations, before `render_text` runs on an event loop.

    Those that are not simple are not run: no budget holds what that costs. Blocking: half a second where they are large. What
    is wrong with one, `find_template` says.
    """
    read_templates(sources_of(tokenizer))
    for has_tools in (False, True):
        with suppress(BadRequest):
            template, named = find_template(tokenizer, has_tools=has_tools), tuple(tokenizer.special_tokens_map.items())
            if template.is_simple:
                _unheard(template, named, find_dialect(tokenizer), has_tools)


def _source(tokenizer: Tokenizer, *, has_tools: bool) -> str:
    source = tokenizer.chat_template
    if isinstance(source, dict):
        source = (source.get("tool_use") if has_tools else None) or source.get("default")
    return str(source or "")
