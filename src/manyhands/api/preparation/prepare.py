"""From the bytes of a request to what is asked of a model: parse, check, render, tokenise. Pure.

    bytes ─ read_json ─ sizes against the model's context ─ pydantic ─ conversation ─ template ─ ids ─► Prepared

What a client may make it cost is bounded by its caller (pool.py): inline only small bodies come here, under a small
RenderBudget, and what would cost more raises NeedsProcess; all others come to a process that is killed at its deadline.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from manyhands.api.fields import parse
from manyhands.api.http.body import BadField, read_json
from manyhands.api.preparation.asked import COUNTING, MAX_CHOICES, PATHS, refuse_elsewhere
from manyhands.api.preparation.desk import FORMATS, NeedsProcess, PreparationDesk, Prepared, Speaker, bytes_of
from manyhands.errors import BadRequest, ContextOverflow, Forbidden, ModelNotFound

# Tools and a format together, as JSON: what compiles into a grammar and is echoed by /v1/responses. OpenAI's own limit on the
# names and values of a schema is 120,000 characters.
MAX_SCHEMA_BYTES = 128 << 10
MIN_VALUES = 1 << 16  # of a body's JSON; 8 more for each position of the largest context
# The fields that hold the prompt: they go no further than this file.
_BULK = ("messages", "prompt", "input", "system", "content", "tokens", "received")


def prepare(path: str, body: bytes, desk: PreparationDesk) -> Prepared:
    """Raises BadRequest, ContextOverflow, ModelNotFound, Forbidden; NeedsProcess where `desk.is_inline`.

    ModelNotFound.model is the name that was asked for; "" where the request names none, and desk.unnamed neither.
    """
    _check_values(body, desk)
    sent = read_json(body)
    refuse_elsewhere(path, sent)
    named = sent.get("params", {}) if path == "/bus/v1/call" else sent
    if (speaker := _speaker(named if isinstance(named, dict) else {}, desk)) is not None:
        _check_counts(sent, speaker)
    given = parse(path, sent)
    if speaker is None:
        raise ModelNotFound("the request names no model")
    for name in ("stream_options", "return_progress"):
        if given.get(name) and not given.get("stream", False):
            raise BadField(f"{name} is for stream: true", name)
    _check_schemas(given)
    if desk.is_inline and not speaker.is_plain:
        raise NeedsProcess
    made = PATHS[path](given, speaker, desk)
    if path not in COUNTING:
        for prompt in made.prompts:
            check_fit(prompt, speaker)
    if made.grammar is not None:
        try:
            made.size = desk.accept(made.grammar)
        except BadRequest as error:
            raise BadField(f"{made.grammar_field}: {error}", made.grammar_field) from error
    for name in _BULK:
        made.given.pop(name, None)
    made.given.get("manyhands", {}).pop("received", None)
    made.size += bytes_of(made)
    return made


def _speaker(sent: Mapping[str, Any], desk: PreparationDesk) -> Speaker | None:
    """The model that is meant; None where the request does not say which. Raises ModelNotFound, Forbidden."""
    name = sent.get("model") or desk.unnamed
    if not isinstance(name, str) or not name:
        return None
    meant = desk.names.find(name, desk.speakers)
    if desk.models is not None and meant not in desk.models:
        allowed = ", ".join(sorted(desk.models))
        raise Forbidden(f"key {desk.key!r} may not use model {name[:100]!r}, only {allowed}")
    if meant not in desk.speakers:
        raise ModelNotFound(f"model {name[:100]!r} is not served here", name)
    return desk.speakers[meant]


# -- sizes ------------------------------------------------------------------------------------------------------------


def _check_values(body: bytes, desk: PreparationDesk) -> None:
    """Raise BadRequest for JSON of more values than any prompt needs, before it is parsed: there is a comma between any two.

    A text has commas as well, but hardly a token with several.
    """
    limit = MIN_VALUES + 8 * max((speaker.context for speaker in desk.speakers.values()), default=0)
    if (count := body.count(b",")) > limit:
        raise BadRequest(f"the body has {count} commas; at most {limit} are read for these models: send less at once")


def _check_counts(sent: Mapping[str, Any], speaker: Speaker) -> None:
    """Raise ContextOverflow for a list of ids that cannot fit, before its items are looked at."""
    prompt = sent.get("tokens") or sent.get("prompt")
    lists = prompt if isinstance(prompt, list) and prompt and isinstance(prompt[0], list) else [prompt]
    for ids in lists[:MAX_CHOICES]:
        if isinstance(ids, list) and ids and not isinstance(ids[0], str) and len(ids) > speaker.context:
            raise ContextOverflow.of(f"prompt is too long: {len(ids)} token ids", speaker.context)


def _check_schemas(given: Mapping[str, Any]) -> None:
    named = [name for name in ("tools", *FORMATS) if name in given]
    size = sum(len(json.dumps(given[name], ensure_ascii=False)) for name in named)
    if size > MAX_SCHEMA_BYTES:
        raise BadField(f"{' and '.join(named)} have {size} characters of JSON; at most {MAX_SCHEMA_BYTES}", named[0])


def check_fit(ids: Sequence[int], speaker: Speaker) -> None:
    """Raise BadRequest unless `ids` are tokens of the model, and its context has room for one more."""
    if not ids or min(ids) < 0 or max(ids) >= speaker.vocab_size:
        last, odd = speaker.vocab_size - 1, next((id for id in ids if not 0 <= id < speaker.vocab_size), "none")
        raise BadField(
            f"a prompt is one or more token ids from 0 to {last}, the last of this model; it has {odd}", "prompt"
        )
    if len(ids) >= speaker.context:
        raise ContextOverflow.of(f"prompt is too long: {len(ids)} tokens", speaker.context)
