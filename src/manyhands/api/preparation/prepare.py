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
from manyhands.api.preparation.desk import NeedsProcess, Object, PreparationDesk, Prepared, Speaker
from manyhands.core import SamplingParams
from manyhands.errors import BadRequest, ContextOverflow, Forbidden, NotFound
from manyhands.text.grammar import calls_grammar, json_grammar, strict_grammar
from manyhands.text.prompt import encode_prompt, find_template, render_text
from manyhands.text.template import RenderBudget, TooCostly

# Tools and a format together, as JSON: what compiles into a grammar and is echoed by /v1/responses. OpenAI's own limit on the
# names and values of a schema is 120,000 characters.
MAX_SCHEMA_BYTES = 128 << 10
MAX_CHOICES = 128  # of all prompts together
MIN_VALUES = 1 << 16  # of a body's JSON; 8 more for each position of the largest context
_LOGPROBS = "message.output_text.logprobs"
# The fields that hold the prompt: they go no further than this file.
_BULK = {"/v1/completions": ("prompt",), "/v1/responses": ("input",), "/api/infer": ("messages",)}


def prepare(path: str, body: bytes, desk: PreparationDesk) -> Prepared:
    """Raises BadRequest, ContextOverflow, NotFound, Forbidden; NeedsProcess where `desk.is_inline`."""
    _check_values(body, desk)
    sent = read_json(body)
    if (speaker := _speaker(path, sent, desk)) is not None:
        _check_counts(sent, speaker)
    given = parse(path, sent)
    if speaker is None:
        raise BadRequest(f"model is missing; served here: {', '.join(desk.speakers) or 'none'}")
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


def _speaker(path: str, sent: Mapping[str, Any], desk: PreparationDesk) -> Speaker | None:
    """The model that is meant; None where the request does not say which. Raises NotFound, Forbidden."""
    name = sent.get("model")
    if name is None and path == "/api/infer" and len(desk.speakers) == 1:
        name = next(iter(desk.speakers))
    if not isinstance(name, str):
        return None
    if desk.models is not None and name not in desk.models:
        allowed = ", ".join(sorted(desk.models))
        raise Forbidden(f"key {desk.key!r} may not use model {name[:100]!r}, only {allowed}")
    if name not in desk.speakers:
        raise NotFound(f"model {name[:100]!r} is not served here; there is {', '.join(desk.speakers) or 'none'}")
    return desk.speakers[name]


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


def _check_text(text: str, speaker: Speaker) -> None:
    """Raise ContextOverflow for a text that cannot fit, before it is tokenised: no token has more bytes than the longest."""
    if len(text) > speaker.context * speaker.longest:
        least = len(text) // speaker.longest
        raise ContextOverflow(
            f"the prompt has {len(text)} characters, at least {least} tokens; the context has {speaker.context}: shorten it"
        )


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
    return replace(_talk(conversation_of(given), given, speaker, desk, wanted, logprobs), count=count)


def _completions(given: Object, speaker: Speaker, desk: PreparationDesk) -> Prepared:
    count, prompt = _count(given, desk), given["prompt"]
    several = list(prompt) if isinstance(prompt, list) and not isinstance(prompt[0], int) else [prompt]
    if len(several) * count > MAX_CHOICES:
        raise BadField(
            f"prompt: {len(several)} prompts with n = {count} make more than {MAX_CHOICES} choices", "prompt"
        )
    params = sampling(given, speaker, given.get("max_tokens", 16), given.get("logprobs"))
    return Prepared(speaker.name, given, [_encode(p, speaker) for p in several], params, count)


def _responses(given: Object, speaker: Speaker, desk: PreparationDesk) -> Prepared:
    is_on = _LOGPROBS in given.get("include", ())
    if "top_logprobs" in given and not is_on:
        raise BadField(f'top_logprobs is for include: ["{_LOGPROBS}"]', "top_logprobs")
    logprobs = given.get("top_logprobs", 0) if is_on else None
    return _talk(input_conversation(given), given, speaker, desk, given.get("max_output_tokens"), logprobs)


def _infer(given: Object, speaker: Speaker, desk: PreparationDesk) -> Prepared:
    if ("prompt" in given) == ("messages" in given):
        raise BadRequest("give either prompt (a text) or messages (a conversation)")
    values = {
        **_INFER,
        **{k: v for k, v in given.items() if k not in ("prompt", "messages", "model", "path", "stream")},
    }
    values |= {
        "seed": given.get("seed", secrets.randbits(53)),
        "stop": tuple(given.get("stop", ())),
    }  # 53: any JSON reader
    params = SamplingParams(**values)
    ids = (
        _encode(given["prompt"], speaker)
        if "prompt" in given
        else _render(Conversation(given["messages"]), speaker, desk)
    )
    return Prepared(speaker.name, given, [ids], params)


_INFER: Object = {"max_tokens": 50, "temperature": 0.9, "top_p": 0.92}
_PATHS: Mapping[str, Callable[[Object, Speaker, PreparationDesk], Prepared]] = {
    "/v1/chat/completions": _chat,
    "/v1/completions": _completions,
    "/v1/responses": _responses,
    "/api/infer": _infer,
}


def _talk(
    talk: Conversation, given: Object, speaker: Speaker, desk: PreparationDesk, wanted: int | None, logprobs: int | None
) -> Prepared:
    """A conversation by the chat template, with its grammar."""
    if talk.functions and speaker.dialect is None:
        raise BadField("tools: this model's chat template takes none that we can read", "tools")
    grammar = _grammar(speaker, talk)
    if grammar is not None and given.get("manyhands", {}).get("ignore_eos", False):
        message = "manyhands.ignore_eos goes with neither response_format nor tools that are enforced"
        raise BadField(message, "manyhands")
    prompt = _render(talk, speaker, desk)
    params = sampling(given, speaker, _room(speaker, prompt, wanted, desk.default_max_tokens), logprobs)
    functions = {f.name: f.parameters for f in talk.functions} if talk.tool_choice != "none" else {}
    is_open = _ends_in_thought(speaker, prompt)
    return Prepared(speaker.name, given, [prompt], params, 1, grammar, is_open, functions, talk.is_parallel, True)


def _render(talk: Conversation, speaker: Speaker, desk: PreparationDesk) -> tuple[int, ...]:
    """The prompt of a conversation. Raises BadRequest, NeedsProcess."""
    for message in talk.messages:
        _check_text(message["content"], speaker)
    tools = talk.tools if talk.tool_choice != "none" else ()
    variables = _effort_variables(speaker, talk.effort)
    budget = RenderBudget()
    if desk.is_inline and speaker.tokenizer.chat_template:
        if not find_template(speaker.tokenizer, has_tools=bool(tools)).is_simple:
            raise NeedsProcess
        budget = RenderBudget(passes=4096, seconds=0.005, size=1 << 17)
    try:
        text = render_text(speaker.tokenizer, talk.messages, tools, budget, **variables)
    except TooCostly:
        if desk.is_inline:
            raise NeedsProcess from None
        raise
    return _encode(text, speaker, is_rendered=True)


def _encode(prompt: str | Sequence[int], speaker: Speaker, *, is_rendered: bool = False) -> tuple[int, ...]:
    """Ids of a text, or those that were sent. The template has placed the special tokens of what is rendered."""
    if not isinstance(prompt, str):
        return tuple(prompt)
    _check_text(prompt, speaker)
    if is_rendered:
        return tuple(speaker.tokenizer.encode(prompt, add_special_tokens=False))
    return tuple(encode_prompt(speaker.tokenizer, prompt))


def _ends_in_thought(speaker: Speaker, ids: Sequence[int]) -> bool:
    if speaker.thinking is None:
        return False
    tail: str = speaker.tokenizer.decode(list(ids[-8:]), skip_special_tokens=False)
    return tail.rstrip().endswith(speaker.thinking.opens)


def _effort_variables(speaker: Speaker, effort: str | None) -> Object:
    if effort is None:
        return {}
    if speaker.has_levels and effort != "none":
        return {"reasoning_effort": effort}
    if speaker.thinking is not None and speaker.thinking.switch is not None:
        return {speaker.thinking.switch: effort != "none"}
    raise BadField("reasoning_effort: this model's template has no such switch, leave it out", "reasoning_effort")


def _room(speaker: Speaker, prompt: Sequence[int], wanted: int | None, default: int) -> int:
    """max_tokens: what was asked for (checked later), else the default, or less where the context is full."""
    if wanted is not None:
        return wanted
    if len(prompt) >= speaker.context:
        raise ContextOverflow(f"the prompt has {len(prompt)} tokens; the context has {speaker.context}: shorten it")
    return min(default, speaker.context - len(prompt))


def _count(given: Mapping[str, Any], desk: PreparationDesk) -> int:
    """n, within the operator's limit. Raises BadField."""
    count = int(given.get("n", 1))
    if count > desk.max_choices:
        raise BadField(f"n is {count}; this gateway makes at most {desk.max_choices} choices", "n")
    return count


def sampling(given: Mapping[str, Any], speaker: Speaker, max_tokens: int, logprobs: int | None) -> SamplingParams:
    """Sampling parameters of checked fields; without a seed a random one. Raises BadField for what the model has not."""
    ours = given.get("manyhands", {})
    if ours.get("dtype", speaker.precision) != speaker.precision:
        raise BadField(
            f"manyhands.dtype is {ours['dtype']}; this model is served in {speaker.precision}", "manyhands.dtype"
        )
    stop, bias = given.get("stop", ()), given.get("logit_bias", {})
    for token in bias:
        if int(token) >= speaker.vocab_size:
            raise BadField(f"logit_bias names token {token}; there are 0 to {speaker.vocab_size - 1}", "logit_bias")
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=float(given.get("temperature", 1.0)),
        top_p=float(given.get("top_p", 1.0)),
        top_k=ours.get("top_k", 0),
        min_p=float(ours.get("min_p", 0.0)),
        seed=given["seed"] % (1 << 64) if "seed" in given else secrets.randbits(64),
        repetition_penalty=float(ours.get("repetition_penalty", 1.0)),
        presence_penalty=float(given.get("presence_penalty", 0.0)),
        frequency_penalty=float(given.get("frequency_penalty", 0.0)),
        logit_bias=tuple((int(token), float(value)) for token, value in bias.items()),
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        ignore_eos=ours.get("ignore_eos", False),
        logprobs=logprobs,
    )


def _grammar(speaker: Speaker, talk: Conversation) -> str | None:
    """What the answer must look like; None: anything."""
    functions, choice = talk.functions, talk.tool_choice
    if functions and choice != "none" and talk.format is not None:
        raise BadField("response_format goes with tools only where tool_choice is none", "response_format")
    if talk.format is not None:
        return json_grammar(talk.format or None)
    if not functions or choice == "none":
        return None
    assert speaker.dialect is not None
    try:
        if choice == "auto":
            is_strict = any(f.is_strict for f in functions)
            return strict_grammar(speaker.dialect, functions, speaker.special) if is_strict else None
        wanted = [f for f in functions if choice in ("required", f.name)]
        several = talk.is_parallel and choice == "required"
        return calls_grammar(speaker.dialect, wanted, speaker.special, parallel=several)
    except BadRequest as error:
        raise BadField(f"tools: {error}", "tools") from error
