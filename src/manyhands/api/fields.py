"""The fields of every request that generates: parsed, documented (docs/openai.md, OpenAPI) and tested from the same models.

A field that no model names is refused with 400, and so is a value that is not honoured. `null` is the same as leaving a field
out, wherever it stands; only in what is a client's own (a schema, the arguments of a call) it is a value.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, get_args, get_origin, get_type_hints

from pydantic import TypeAdapter

from manyhands.api.anthropic.fields import CountTokens, Messages
from manyhands.api.http.body import check, show
from manyhands.api.native.fields import BusCall, Infer
from manyhands.api.ollama.fields import OllamaChat, OllamaGenerate
from manyhands.api.openai.fields_chat import Chat, Completions
from manyhands.api.openai.fields_responses import Responses
from manyhands.api.openai.fields_tokens import Detokenize, Tokenize
from manyhands.api.openai.schema import Shown

MODELS: Mapping[str, Any] = {
    "/v1/chat/completions": Chat,
    "/v1/completions": Completions,
    "/v1/responses": Responses,
    "/v1/responses/input_tokens": Responses,
    "/api/infer": Infer,
    "/bus/v1/call": BusCall,
    "/v1/messages": Messages,
    "/v1/messages/count_tokens": CountTokens,
    "/api/chat": OllamaChat,
    "/api/generate": OllamaGenerate,
    "/tokenize": Tokenize,
    "/detokenize": Detokenize,
}


@dataclass(frozen=True, slots=True)
class Field:
    """One field as its model describes it."""

    name: str
    shown: Shown


def _fields(model: Any) -> Iterator[Field]:
    for name, hint in get_type_hints(model, include_extras=True).items():
        inner = get_args(hint)[0] if get_origin(hint) is not Annotated else hint  # NotRequired[...]
        found = [note for note in getattr(inner, "__metadata__", ()) if isinstance(note, Shown)]
        if found:
            yield Field(name, found[0])


_ADAPTERS: Mapping[str, TypeAdapter[Any]] = {path: TypeAdapter(model) for path, model in MODELS.items()}
_LINK = re.compile(r"\[([^]]*)\]\([^)]*\)")  # of a page, where a refusal has its words alone
_SAYS = {path: {f.name: _LINK.sub(r"\1", f.shown.says) for f in _fields(model)} for path, model in MODELS.items()}
# What is a client's own, on every path and on some.
_VERBATIM = frozenset({"parameters", "schema", "input_schema", "arguments"})
_OWN: Mapping[str, frozenset[str]] = {
    "/v1/messages": frozenset({"input", "input_examples"}),
    "/v1/messages/count_tokens": frozenset({"input", "input_examples"}),
    "/api/chat": frozenset({"format"}),
    "/api/generate": frozenset({"format"}),
}
FIELDS: Mapping[str, Sequence[Field]] = {path: list(_fields(model)) for path, model in MODELS.items()}
# The paths of OpenAI's API that generate, whose tables stand in docs/openai.md.
ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/responses")


def parse(path: str, sent: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that a request sets, checked by the model of its path. Raises BadField."""
    return check(_ADAPTERS[path], _without_nulls(sent, _VERBATIM | _OWN.get(path, frozenset())), _SAYS[path], path)


def _without_nulls(value: Any, verbatim: frozenset[str]) -> Any:
    """`value` (of bounded depth) without the keys that are null; what stands under a key of `verbatim` stays as it is."""
    if isinstance(value, Mapping):
        return {
            name: inner if name in verbatim else _without_nulls(inner, verbatim)
            for name, inner in value.items()
            if inner is not None
        }
    if isinstance(value, list):
        return [_without_nulls(inner, verbatim) if isinstance(inner, dict | list) else inner for inner in value]
    return value


# -- documentation ----------------------------------------------------------------------------------------------------

_REF = "#/components/schemas/{model}"


def body_schema(path: str) -> dict[str, Any]:
    """The request body as OpenAPI describes it; it names `definitions`."""
    schema = _ADAPTERS[path].json_schema(ref_template=_REF)
    schema.pop("$defs", None)
    return schema


def definitions() -> dict[str, Any]:
    """The schemas that request bodies name."""
    found: dict[str, Any] = {}
    for adapter in _ADAPTERS.values():
        found |= adapter.json_schema(ref_template=_REF).get("$defs", {})
    return found


def table(path: str) -> str:
    """The Markdown table of a path's fields, as it stands in docs/openai.md."""
    rows = ["| field | honoured | refused (400), for instance |", "|---|---|---|"]
    for field in FIELDS[path]:
        shown = field.shown
        refused = ", ".join(f"`{show(value).replace('|', chr(92) + '|')}`" for value in shown.refused[:2]) or "-"
        rows.append(f"| `{field.name}` | {shown.says.replace('|', chr(92) + '|')} | {refused} |")
    return "\n".join(rows) + "\n"
