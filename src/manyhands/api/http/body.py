"""JSON from clients: read within bounds, checked by pydantic models, refused in one line that names the place. Pure.

read_json ─ an object, no deeper than MAX_DEPTH ─► check(model, ...) ─ only the model's fields, of the types it says
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, TypeVar

from pydantic import TypeAdapter, ValidationError

from manyhands.errors import BadRequest

T = TypeVar("T")
MAX_DEPTH = 64  # of a request's JSON
EMPTY = "the body is empty; it must be a JSON object: send {...}"
# What other servers (llama.cpp's, Ollama, vLLM) call a parameter, and where it is here: the first that the path has.
_LIMIT, _GRAMMAR = ("max_tokens", "max_output_tokens"), ("response_format", "text", "output_config", "format")
OTHERS_NAMES: Final[Mapping[str, tuple[str, ...]]] = {
    **dict.fromkeys(("n_predict", "num_predict", "max_new_tokens"), _LIMIT),
    **dict.fromkeys(("grammar", "json_schema", "guided_json", "guided_grammar", "structured_outputs"), _GRAMMAR),
    "repeat_penalty": ("repetition_penalty", "options"),
    "enable_thinking": ("chat_template_kwargs", "thinking", "think"),
    "ignore_eos": ("manyhands.ignore_eos",),
    "stop_sequences": ("stop",),
    "stop": ("stop_sequences", "options"),
}


class BadField(BadRequest):
    """A field of a request is not what it can be; `param` names it, `api_code` is OpenAI's word for how."""

    def __init__(self, message: str, param: str, api_code: str | None = "invalid_value") -> None:
        super().__init__(message)
        self.param, self.api_code = param, api_code


def read_json(body: bytes) -> dict[str, Any]:
    """A JSON object in UTF-8 with finite numbers and at most MAX_DEPTH levels. Raises BadRequest.

    Takes about 30 ns a byte, most of it for lists of small things, and up to 60 bytes of memory for each.
    """
    if not body.strip():
        raise BadRequest(EMPTY)
    try:
        sent = json.loads(body.decode("utf-8"), parse_constant=_refuse_constant)
        json.dumps(sent, ensure_ascii=False, allow_nan=False).encode("utf-8")  # lone surrogates, 1e999
    except RecursionError:
        raise BadRequest(f"the body is nested too deeply: at most {MAX_DEPTH} levels") from None
    except ValueError as error:
        raise BadRequest(f"the body is not JSON in UTF-8: {str(error)[:200]}") from None
    if not isinstance(sent, dict):
        raise _no_object(sent)
    if _depth(sent) > MAX_DEPTH:
        raise BadRequest(f"the body is nested too deeply: at most {MAX_DEPTH} levels")
    return sent


def _no_object(sent: Any) -> BadRequest:
    return BadRequest(f"the body is {show(sent)}; it must be a JSON object: send {{...}}")


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


def check(model: TypeAdapter[T], value: Any, says: Mapping[str, str], where: str) -> T:
    """`value` as `model` reads it. Raises BadField with the first problem, what the field honours, and `where` to send it."""
    try:
        return model.validate_python(value)
    except ValidationError as invalid:
        problem = max(invalid.errors(include_url=False, include_context=False)[:64], key=_weight_of)
    raise _bad_field(problem, problem["loc"], says, where)


def unread(problem: Mapping[str, Any], where: str) -> BadRequest:
    """What FastAPI found wrong with the body of `where`, or with a parameter of it, said as `check` and `read_json` say it."""
    (part, *loc), kind = problem["loc"], problem["type"]
    if kind == "json_invalid":
        return BadRequest(f"the body is not JSON in UTF-8: {problem['ctx']['error']}")
    if part == "body" and not loc:
        return BadRequest(EMPTY) if kind == "missing" else _no_object(problem["input"])
    return _bad_field(problem, loc, {}, where)


def _bad_field(problem: Mapping[str, Any], place: Sequence[Any], says: Mapping[str, str], where: str) -> BadField:
    # A tag of a union stands in the place as the model's name, in brackets: not a key that was sent.
    loc = [str(part)[:100] for part in place if not str(part).startswith("<")]
    at, name = ".".join(loc), (loc or [""])[0]
    match problem["type"]:
        case "extra_forbidden":
            code, reason = "unknown_parameter", "is not known"
            if len(loc) == 1:
                return BadField(f"{name!r} is not a parameter of {where}: {_instead(name, says)} (/docs)", name, code)
        case "missing":
            code, reason = (
                "missing_required_parameter",
                "is missing" if len(loc) > 1 else f"is missing: {where} needs it",
            )
        case kind:
            if name == "manyhands" and len(loc) > 1:
                says = {}  # of all its fields
            code = "invalid_type" if kind.endswith("_type") else "invalid_value"
            reason = f"is {show(problem['input'])}: {problem['msg'][0].lower()}{problem['msg'][1:]}"
    said = f" ({says[name]})" if name in says else ""
    return BadField(" ".join(f"{at} {reason}{said}".split()), name, code)


def _instead(name: str, known: Iterable[str]) -> str:
    """What to do about a parameter that is none of `known`: the one that was meant, where that can be said."""
    from difflib import get_close_matches

    if named := [ours for ours in OTHERS_NAMES.get(name, ()) if ours.partition(".")[0] in known]:
        return f"use {named[0]}, or leave it out"
    if close := get_close_matches(name, known, 1, 0.8):
        return f"did you mean {close[0]}? If not, leave it out"
    return "leave it out"


def _weight_of(problem: Mapping[str, Any]) -> tuple[int, bool]:
    """Of alternatives the deepest complaint is about the one that was meant; of one object, that about which kind it is."""
    return len(problem["loc"]), problem["type"] == "literal_error"


def show(value: Any) -> str:
    """The beginning of a value as JSON."""
    if isinstance(value, Mapping):
        value = dict(list(value.items())[:8])
    elif isinstance(value, Sequence):
        value = value[:80] if isinstance(value, str) else list(value[:8])
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else f"{text[:57]}..."
