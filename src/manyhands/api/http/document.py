"""What the OpenAPI document says of every operation alike: how errors look, and how a key is sent. Pure."""

from collections.abc import Iterator
from http import HTTPStatus
from typing import Any

Object = dict[str, Any]

ERROR: Object = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string", "description": "One line: value, limit, remedy."},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": "string"},
            },
        }
    },
}
# What the guard and the gateway may say before or instead of a route's answer.
ANYWHERE = (400, 401, 403, 404, 405, 408, 409, 413, 415, 421, 429, 501, 503, 504)
_METHODS = frozenset({"get", "post", "put", "patch", "delete"})


def with_errors(document: Object, definitions: Object) -> Object:
    """The document, changed in place: FastAPI's 422 is our 400, every error has one shape, and `definitions` are there."""
    for operation in _operations(document):
        responses = operation["responses"]
        responses.pop("422", None)
        for status in ANYWHERE:
            said = responses.setdefault(str(status), {"description": HTTPStatus(status).phrase})
            said.setdefault("content", {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}})
    components = document.setdefault("components", {})
    schemas = components.setdefault("schemas", {})
    for name in ("HTTPValidationError", "ValidationError"):
        schemas.pop(name, None)
    schemas |= {**definitions, "Error": ERROR}
    components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    document["security"] = [{"key": []}, {}]  # needed only where there are keys
    return document


def _operations(document: Object) -> Iterator[Object]:
    for item in document.get("paths", {}).values():
        yield from (operation for method, operation in item.items() if method in _METHODS)
