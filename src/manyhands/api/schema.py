"""JSON from strangers, and the part of JSON Schema by which the API checks it. Pure.

Everything that is wrong is said in one line that names the place.
"""

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from manyhands.errors import BadRequest

Schema = Mapping[str, Any]
MAX_DEPTH = 64  # of a request's JSON


class BadField(BadRequest):
    """A field of a request is not what it can be; `param` names it."""

    def __init__(self, message: str, param: str) -> None:
        super().__init__(message)
        self.param = param


# -- schemas ----------------------------------------------------------------------------------------------------------


def integer(low: int, high: int) -> Schema:
    return {"type": "integer", "minimum": low, "maximum": high}


def number(low: float, high: float) -> Schema:
    return {"type": "number", "minimum": low, "maximum": high}


def only(*values: Any) -> Schema:
    return {"enum": list(values)}


def array(items: Schema, low: int = 0, high: int = 1 << 20) -> Schema:
    return {"type": "array", "items": items, "minItems": low, "maxItems": high}


def record(properties: Mapping[str, Schema], *required: str) -> Schema:
    """An object with these properties and no others."""
    return {"type": "object", "properties": dict(properties), "required": list(required), "additionalProperties": False}


def either(*schemas: Schema) -> Schema:
    return {"anyOf": list(schemas)}


BOOLEAN: Schema = {"type": "boolean"}
STRING: Schema = {"type": "string"}
OBJECT: Schema = {"type": "object"}
NAME: Schema = {"type": "string", "pattern": r"^[a-zA-Z0-9_-]{1,64}$"}
LABEL: Schema = {"type": "string", "maxLength": 512}
NOTHING: Schema = {"enum": []}

# -- checking --------------------------------------------------------------------------------------------------------


def read_json(body: bytes) -> dict[str, Any]:
    """A JSON object in UTF-8 with finite numbers and at most MAX_DEPTH levels. Raises BadRequest."""
    try:
        sent = json.loads(body.decode("utf-8"), parse_constant=_refuse_constant)
        json.dumps(sent, ensure_ascii=False, allow_nan=False).encode("utf-8")  # lone surrogates, 1e999
    except RecursionError:
        raise BadRequest(f"the body is nested too deeply: at most {MAX_DEPTH} levels") from None
    except ValueError as error:
        raise BadRequest(f"the body is not JSON in UTF-8: {str(error)[:200]}") from None
    if not isinstance(sent, dict):
        raise BadRequest(f"the body is a JSON {type(sent).__name__}, not an object: send {{...}}")
    if _depth(sent) > MAX_DEPTH:
        raise BadRequest(f"the body is nested too deeply: at most {MAX_DEPTH} levels")
    return sent


def _refuse_constant(text: str) -> None:
    raise ValueError(f"{text} is not a JSON number")


def _depth(value: Any) -> int:
    """Levels of nesting, without recursion."""
    level, depth = [value], 0
    while level := [
        c for v in level for c in (v.values() if isinstance(v, dict) else v if isinstance(v, list) else ())
    ]:
        depth += 1
        if depth > MAX_DEPTH:
            break
    return depth


def check(schema: Schema, value: Any, at: str) -> str | None:
    """What is wrong with `value`, naming the place; None if nothing. The part of JSON Schema that the table uses."""
    if "anyOf" in schema:
        problems = [check(s, value, at) for s in schema["anyOf"]]
        # The deepest complaint is about the alternative that was meant.
        return (
            None if None in problems else max((p for p in problems if p), key=lambda p: p.partition(" ")[0].count("."))
        )
    if "enum" in schema:
        is_one = any(value == v and type(value) is type(v) for v in schema["enum"])
        return None if is_one else _not_one_of(schema["enum"], value, at)
    if not _is_type(schema.get("type"), value):
        return f"{at} is {show(value)}, not of type {schema['type']}"
    return next(filter(None, _checks(schema, value, at)), None)


def _checks(schema: Schema, value: Any, at: str) -> Iterator[str | None]:
    if isinstance(value, int | float) and not isinstance(value, bool):
        low, high = schema.get("minimum", -math.inf), schema.get("maximum", math.inf)
        if not low <= value <= high or value == schema.get("exclusiveMinimum"):
            yield f"{at} is {show(value)}; it must be between {low} and {high}"
    elif isinstance(value, str):
        if not schema.get("minLength", 0) <= len(value) <= schema.get("maxLength", math.inf):
            yield f"{at} has {len(value)} characters; at least {schema.get('minLength', 0)}, at most {schema.get('maxLength')}"
        if "pattern" in schema and not re.search(schema["pattern"], value):
            yield f"{at} is {show(value)}; it must match {schema['pattern']}"
    elif isinstance(value, list):
        if not schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", math.inf):
            yield f"{at} has {len(value)} items; at least {schema.get('minItems', 0)}, at most {schema.get('maxItems')}"
        yield from (check(schema["items"], item, f"{at}.{i}") for i, item in enumerate(value))
    elif isinstance(value, dict):
        yield from _check_object(schema, value, at)


def _check_object(schema: Schema, value: Mapping[str, Any], at: str) -> Iterator[str | None]:
    properties, others = schema.get("properties", {}), schema.get("additionalProperties", True)
    if len(value) > schema.get("maxProperties", math.inf):
        yield f"{at} has {len(value)} entries; at most {schema['maxProperties']}"
    yield from (f"{at}.{name} is missing" for name in schema.get("required", ()) if name not in value)
    for name, inner in value.items():
        yield check({"type": "string", **schema.get("propertyNames", {})}, name, f"{at}, key {name[:40]!r},")
        if name in properties:
            yield check(properties[name], inner, f"{at}.{name}")
        elif others is False:
            yield f"{at}.{name[:100]} is not known"
        elif others is not True:
            yield check(others, inner, f"{at}.{name[:40]}")


_KINDS: Mapping[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "array": (list,),
    "object": (dict,),
    "boolean": (bool,),
    "null": (type(None),),
}


def _is_type(kind: str | None, value: Any) -> bool:
    if kind is None:
        return True
    return isinstance(value, _KINDS[kind]) and (kind == "boolean" or not isinstance(value, bool))


def _not_one_of(values: Sequence[Any], value: Any, at: str) -> str:
    if not values:
        return f"{at} is not offered: leave it out"
    return f"{at} is {show(value)}; it can be {', '.join(json.dumps(v) for v in values)}"


def show(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
