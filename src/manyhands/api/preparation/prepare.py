"""From the bytes of a request to what is asked of a model: parse, check, render, tokenise. Pure.

    bytes ─ read_json ─ sizes against the model's context ─ pydantic ─ conversation ─ template ─ ids ─► Prepared

What a client may make it cost is bounded by its caller (pool.py): inline only small bodies come here, under a small
RenderBudget, and what would cost more raises NeedsProcess; all others come to a process that is killed at its deadline.
"""

import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from manyhands.api.fields import parse
from manyhands.api.http.body import BadField, read_json
from manyhands.api.openai.conversation import Conversation, conversation_of, input_conversation
from manyhands.api.openai.schema import ROUTE_WISHES
from manyhands.api.preparation.desk import Object, PreparationDesk, Prepared, Speaker
from manyhands.api.preparation.talk import encode, render, sampling, talk
from manyhands.core import SamplingParams
from manyhands.errors import BadRequest, ContextOverflow, Forbidden, ModelNotFound

# Tools and a format together, as JSON: what compiles into a grammar and is echoed by /v1/responses. OpenAI's own limit on the
# names and values of a schema is 120,000 characters.
MAX_SCHEMA_BYTES = 128 << 10
MAX_CHOICES = 128  # of all prompts together
MIN_VALUES = 1 << 16  # of a body's JSON; 8 more for each position of the largest context
_LOGPROBS = "message.output_text.logprobs"
# The fields that hold the prompt: they go no further than this file.
_BULK = {"/v1/completions": ("prompt",), "/v1/responses": ("input",), "/api/infer": ("messages",)}


def prepare(path: str, body: bytes, desk: PreparationDesk) -> Prepared:
    """Raises BadRequest, ContextOverflow, ModelNotFound, Forbidden; NeedsProcess where `desk.is_inline`."""
    _check_values(body, desk)
    sent = read_json(body)
    if (speaker := _speaker(sent, desk)) is not None:
        _check_counts(sent, speaker)
    given = parse(path, sent)
    if speaker is None:
        message = f"model is missing: name one of {', '.join(desk.speakers) or 'none, as none is served'}"
        raise BadField(message, "model", "missing_required_parameter")
    if "stream_options" in given and not given.get("stream", False):
        raise BadField("stream_options is for stream: true", "stream_options")
    _check_schemas(given)
    made = _PATHS[path](given, speaker, desk)
    for prompt in made.prompts:
        check_fit(prompt, made.params, speaker)
    if made.grammar is not None:
        try:
            desk.accept(made.grammar)
        except BadRequest as error:
            where = "tools" if made.functions else "response_format"
            raise BadField(f"{where}: {error}", where) from error
    for name in _BULK.get(path, ("messages",)):
        made.given.pop(name, None)
    return made


def _speaker(sent: Mapping[str, Any], desk: PreparationDesk) -> Speaker | None:
    """The model that is meant; None where the request does not say which. Raises ModelNotFound, Forbidden."""
    name = sent.get("model")
    if name is None and len(desk.speakers) == 1:
        name = next(iter(desk.speakers))
    if not isinstance(name, str):
        return None
    meant = desk.names.find(name, desk.speakers)
    if desk.models is not None and meant not in desk.models:
        allowed = ", ".join(sorted(desk.models))
        raise Forbidden(f"key {desk.key!r} may not use model {name[:100]!r}, only {allowed}")
    if meant not in desk.speakers:
        raise ModelNotFound(f"model {name[:100]!r} is not served here; there is {', '.join(desk.speakers) or 'none'}")
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
    prompt = sent.get("prompt")
    lists = prompt if isinstance(prompt, list) and prompt and isinstance(prompt[0], list) else [prompt]
    for ids in lists[:MAX_CHOICES]:
        if isinstance(ids, list) and ids and not isinstance(ids[0], str) and len(ids) > speaker.context:
            raise ContextOverflow(f"prompt has {len(ids)} token ids; the context has {speaker.context}: shorten it")


def _check_schemas(given: Mapping[str, Any]) -> None:
    named = [name for name in ("tools", "response_format", "text") if name in given]
    size = sum(len(json.dumps(given[name], ensure_ascii=False)) for name in named)
    if size > MAX_SCHEMA_BYTES:
        raise BadField(f"{' and '.join(named)} have {size} characters of JSON; at most {MAX_SCHEMA_BYTES}", named[0])


def check_fit(ids: Sequence[int], params: SamplingParams, speaker: Speaker) -> None:
    """Raise BadRequest unless `ids` are tokens of the model and fit its context with what may follow."""
    if not ids or min(ids) < 0 or max(ids) >= speaker.vocab_size:
        raise BadField(
            f"a prompt is one or more token ids from 0 to {speaker.vocab_size - 1}, the last of this model", "prompt"
        )
    if len(ids) + params.max_tokens > speaker.context:
        raise ContextOverflow(
            f"prompt of {len(ids)} tokens + max_tokens {params.max_tokens} exceed the context of {speaker.context}: "
            "shorten the prompt or lower max_tokens"
        )


# -- paths ------------------------------------------------------------------------------------------------------------


def _chat(given: Object, speaker: Speaker, desk: PreparationDesk) -> Prepared:
    if "top_logprobs" in given and not given.get("logprobs"):
        raise BadField("top_logprobs is for logprobs: true", "top_logprobs")
    if "max_tokens" in given and "max_completion_tokens" in given:
        raise BadField("max_tokens is the older name of max_completion_tokens: send one of them", "max_tokens")
    logprobs = given.get("top_logprobs", 0) if given.get("logprobs") else None
    wanted = given.get("max_completion_tokens", given.get("max_tokens"))
    count = _count(given, desk)
    return replace(talk(conversation_of(given), given, speaker, desk, wanted, logprobs), count=count)


def _completions(given: Object, speaker: Speaker, desk: PreparationDesk) -> Prepared:
    count, prompt = _count(given, desk), given["prompt"]
    several = list(prompt) if isinstance(prompt, list) and not isinstance(prompt[0], int) else [prompt]
    if len(several) * count > MAX_CHOICES:
        raise BadField(
            f"prompt: {len(several)} prompts with n = {count} make more than {MAX_CHOICES} choices", "prompt"
        )
    params = sampling(given, speaker, given.get("max_tokens", 16), given.get("logprobs"))
    return Prepared(speaker.name, given, [encode(p, speaker) for p in several], params, count)


def _responses(given: Object, speaker: Speaker, desk: PreparationDesk) -> Prepared:
    is_on = _LOGPROBS in given.get("include", ())
    if "top_logprobs" in given and not is_on:
        raise BadField(f'top_logprobs is for include: ["{_LOGPROBS}"]', "top_logprobs")
    logprobs = given.get("top_logprobs", 0) if is_on else None
    return talk(input_conversation(given), given, speaker, desk, given.get("max_output_tokens"), logprobs)


def _infer(given: Object, speaker: Speaker, desk: PreparationDesk) -> Prepared:
    if ("prompt" in given) == ("messages" in given):
        raise BadRequest("give either prompt (a text) or messages (a conversation)")
    values = {
        **_INFER,
        **{k: v for k, v in given.items() if k not in ("prompt", "messages", "model", "path", "stream", *ROUTE_WISHES)},
    }
    values |= {
        "seed": given.get("seed", secrets.randbits(53)),
        "stop": tuple(given.get("stop", ())),
    }  # 53: any JSON reader
    params = SamplingParams(**values)
    ids = (
        encode(given["prompt"], speaker)
        if "prompt" in given
        else render(Conversation(given["messages"]), speaker, desk)
    )
    return Prepared(speaker.name, given, [ids], params)


_INFER: Object = {"max_tokens": 50, "temperature": 0.9, "top_p": 0.92}
_PATHS: Mapping[str, Callable[[Object, Speaker, PreparationDesk], Prepared]] = {
    "/v1/chat/completions": _chat,
    "/v1/completions": _completions,
    "/v1/responses": _responses,
    "/api/infer": _infer,
}


def _count(given: Mapping[str, Any], desk: PreparationDesk) -> int:
    """n, within the operator's limit. Raises BadField."""
    count = int(given.get("n", 1))
    if count > desk.max_choices:
        raise BadField(f"n is {count}; this gateway makes at most {desk.max_choices} choices", "n")
    return count
