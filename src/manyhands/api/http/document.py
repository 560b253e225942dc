"""What the OpenAPI document says of every operation alike: how errors look, and how a key is sent. Pure."""

from collections.abc import Callable, Iterator
from http import HTTPStatus
from typing import Any, Final

from manyhands.api.http.error import Dialect, dialect_of

Object = dict[str, Any]

_TEXT: Object = {"type": "string"}
_LINE: Object = {"type": "string", "description": "One line: value, limit, remedy."}
_NULLABLE: Object = {"type": ["string", "null"]}


def _object(**fields: Object) -> Object:
    return {"type": "object", "required": list(fields), "properties": fields}


# The schemas of errors (error.py), by whose clients read them.
ERRORS: Final[dict[Dialect, tuple[str, Object]]] = {
    "openai": ("Error", _object(error=_object(message=_LINE, type=_TEXT, param=_NULLABLE, code=_TEXT))),
    "anthropic": ("AnthropicError", _object(type=_TEXT, error=_object(type=_TEXT, message=_LINE))),
    "ollama": ("OllamaError", _object(error=_LINE)),
    "hearthnet": ("HearthNetError", _object(error=_TEXT, message=_LINE)),
}
# What the guard and the gateway may say before or instead of a route's answer.
ANYWHERE = (400, 401, 403, 404, 405, 408, 409, 413, 415, 421, 429, 501, 503, 504)
FIELDS_OF: Final = "x-fields-of"  # in place of a body's schema: the path whose fields it has (with_bodies)
_METHODS = frozenset({"get", "post", "put", "patch", "delete"})


def with_errors(document: Object, definitions: Object) -> Object:
    """The document, changed in place: FastAPI's 422 is our 400, errors look as their path's do, and `definitions` are there."""
    for path, operation in _operations(document):
        name, _ = ERRORS[dialect_of(path)]
        responses = operation["responses"]
        responses.pop("422", None)
        for status in ANYWHERE:
            said = responses.setdefault(str(status), {"description": HTTPStatus(status).phrase})
            said.setdefault("content", {"application/json": {"schema": {"$ref": f"#/components/schemas/{name}"}}})
    components = document.setdefault("components", {})
    schemas = components.setdefault("schemas", {})
    for name in ("HTTPValidationError", "ValidationError"):
        schemas.pop(name, None)
    schemas |= {**definitions, **dict(ERRORS.values())}
    components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    document["security"] = [{"key": []}, {}]  # needed only where there are keys
    return document


def with_bodies(document: Object, schema_of: Callable[[str], Object]) -> Object:
    """The document, changed in place: schemas of bodies instead of FIELDS_OF. To make them takes a quarter of a second, which
    a gateway that starts has no use for."""
    for _, operation in _operations(document):
        content = operation.get("requestBody", {}).get("content", {}).get("application/json", {})
        if (path := content.get("schema", {}).get(FIELDS_OF)) is not None:
            content["schema"] = schema_of(path)
    return document


def _operations(document: Object) -> Iterator[tuple[str, Object]]:
    for path, item in document.get("paths", {}).items():
        yield from ((path, operation) for method, operation in item.items() if method in _METHODS)
