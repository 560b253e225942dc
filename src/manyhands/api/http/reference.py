"""`/docs`: the OpenAPI document as a plain page without scripts. Pure: document in, HTML out."""

from collections.abc import Iterator, Mapping
from html import escape
from typing import Any, Final

from manyhands.api.http.page import STYLE

Object = Mapping[str, Any]
_METHODS: Final = ("get", "post", "put", "patch", "delete")
MAX_DEPTH: Final = 4  # of a type that is written out


def render(api: Object, icon: str) -> str:
    """The page, with the icon at that path. Whatever the document holds is text in it, never markup."""
    groups: dict[str, list[str]] = {}
    links: list[str] = []
    for path, method, operation in _operations(api):
        group = (operation.get("tags") or ["OpenAI"])[0]
        name = f"{method}-{path}".replace("/", "-").replace("{", "").replace("}", "").replace(":", "-")
        groups.setdefault(group, []).append(_operation(api, path, method, operation, name))
        links.append(f'<li><a href="#{escape(name)}"><code>{method.upper()}</code> {escape(path)}</a></li>')
    sections = "".join(
        f"<section><h2>{escape(group)}</h2>{''.join(parts)}</section>" for group, parts in groups.items()
    )
    title = f"{escape(api['info']['title'])} {escape(api['info']['version'])}: API"
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<title>{title}</title><link rel="icon" href="{icon}"><link rel="stylesheet" href="{STYLE}"></head><body>'
        f'<header><h1>{title}</h1><p><a href="/">The page of this gateway</a> · '
        '<a href="/openapi.json">This document for programs (OpenAPI)</a></p></header>'
        f'<nav aria-label="Operations"><ul>{"".join(links)}</ul></nav><main>{sections}</main></body></html>'
    )


def _operations(api: Object) -> Iterator[tuple[str, str, Object]]:
    for path, item in api["paths"].items():
        yield from ((path, method, item[method]) for method in _METHODS if method in item)


def _operation(api: Object, path: str, method: str, operation: Object, name: str) -> str:
    said = [f"<p>{escape(text)}</p>" for text in (operation.get("summary"), operation.get("description")) if text]
    rows = [
        (parameter["name"], f"{parameter['in']}, {_type(api, parameter.get('schema', {}))}", parameter)
        for parameter in operation.get("parameters", ())
    ]
    rows += [(field, _type(api, schema), schema) for field, schema in _fields(api, operation)]
    table = "".join(
        f"<tr><th scope=row><code>{escape(field)}</code></th><td>{escape(kind)}</td>"
        f"<td>{escape(about.get('description', ''))}</td></tr>"
        for field, kind, about in rows
    )
    table = f"<table><thead><tr><th>Field<th>Type<th>Meaning</thead><tbody>{table}</tbody></table>" if rows else ""
    head = f"<h3><code>{method.upper()}</code> {escape(path)}</h3>"
    return f'<article id="{escape(name)}">{head}{"".join(said)}{table}</article>'


def _fields(api: Object, operation: Object) -> list[tuple[str, Object]]:
    """The fields of an operation's JSON body."""
    content = operation.get("requestBody", {}).get("content", {})
    schema = _resolved(api, content.get("application/json", {}).get("schema", {}))
    return [(name, _resolved(api, field) | field) for name, field in schema.get("properties", {}).items()]


def _resolved(api: Object, schema: Object) -> dict[str, Any]:
    reference = schema.get("$ref", "")
    name = reference.rpartition("/")[2]
    return dict(api.get("components", {}).get("schemas", {}).get(name, {})) if reference else dict(schema)


def _type(api: Object, schema: Object, depth: int = 0) -> str:
    """A schema in a few words: "string", "list of number", "one of a, b"."""
    schema = _resolved(api, schema)
    if depth >= MAX_DEPTH:
        return "object"
    if "enum" in schema:
        return "one of " + ", ".join(str(value) for value in schema["enum"])
    if "const" in schema:
        return str(schema["const"])
    choices = schema.get("anyOf") or schema.get("oneOf")
    if choices:
        return " or ".join(dict.fromkeys(_type(api, choice, depth + 1) for choice in choices))
    kind = schema.get("type", "any")
    if kind == "array":
        return f"list of {_type(api, schema.get('items', {}), depth + 1)}"
    return " or ".join(kind) if isinstance(kind, list) else str(kind)
