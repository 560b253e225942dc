"""What each path asks of a model: its checked fields to a Prepared request. Pure."""

import json
import secrets
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final

from manyhands.api.anthropic.conversation import messages_conversation
from manyhands.api.http.body import BadField
from manyhands.api.http.error import NotOffered
from manyhands.api.native.capabilities import CHAT, ELSEWHERE
from manyhands.api.ollama.conversation import (
    chat_conversation,
    effort_of,
    max_tokens_of,
    prompt_conversation,
    wishes_of,
)
from manyhands.api.openai.conversation import Conversation, conversation_of, input_conversation, message_of
from manyhands.api.openai.schema import ROUTE_WISHES
from manyhands.api.preparation.desk import NeedsProcess, Object, PreparationDesk, Prepared, Speaker
from manyhands.api.preparation.talk import check_tools, encode, encode_received, render, room, sampling, talk
from manyhands.core import SamplingParams
from manyhands.errors import BadRequest
from manyhands.text.received import ReceivedText

MAX_CHOICES: Final = 128  # of all prompts together
# What counts tokens and generates none: the context need not hold them.
COUNTING: Final = frozenset({"/tokenize", "/detokenize", "/v1/messages/count_tokens", "/v1/responses/input_tokens"})
# Tokens whose texts are found one by one on the event loop: a millisecond. More are the work of a process.
INLINE_PIECES: Final = 256
# Text of ids that may be made and encoded there, by the length of the longest token: under a millisecond.
INLINE_TEXT_BYTES: Final = 1 << 17
# Of the long part of an answer, as JSON: the tokens of a megabyte of text with their texts.
MAX_SHOWN_BYTES: Final = 16 << 20
_LOGPROBS = "message.output_text.logprobs"


# -- OpenAI's ---------------------------------------------------------------------------------------------------------


def _chat(given: Object, speaker: Speaker, desk: PreparationDesk) -> Prepared:
    if given.get("top_logprobs") and not given.get("logprobs"):
        raise BadField("top_logprobs is for logprobs: true", "top_logprobs")
    if "max_tokens" in given and "max_completion_tokens" in given:
        raise BadField("max_tokens is the older name of max_completion_tokens: send one of them", "max_tokens")
    logprobs = given.get("top_logprobs", 0) if given.get("logprobs") else None
    wanted = given.get("max_completion_tokens", given.get("max_tokens"))
    count = _count(given, desk)
    made = talk(conversation_of(given), given, speaker, desk, wanted, logprobs)
    return replace(made, count=count, received=_received(given, count, speaker, desk))


def _completions(given: Object, speaker: Speaker, desk: PreparationDesk) -> Prepared:
    count, prompt = _count(given, desk), given["prompt"]
    several = list(prompt) if isinstance(prompt, list) and not isinstance(prompt[0], int) else [prompt]
    if len(several) * count > MAX_CHOICES:
        raise BadField(
            f"prompt: {len(several)} prompts with n = {count} make more than {MAX_CHOICES} choices", "prompt"
        )
    if given.get("best_of", 1) not in (1, count):
        raise BadField(f"best_of is {given['best_of']}; it is 1, or n ({count}): ask for n choices", "best_of")
    params = sampling(given, speaker, given.get("max_tokens", 16), given.get("logprobs"))
    received = _received(given, len(several) * count, speaker, desk)
    return Prepared(speaker.name, given, [encode(p, speaker, desk) for p in several], params, count, received=received)


def _received(given: Object, num_choices: int, speaker: Speaker, desk: PreparationDesk) -> list[ReceivedText]:
    texts = given.get("manyhands", {}).get("received", ())
    return encode_received(texts, num_choices, "manyhands.received", speaker, desk)


def _responses(given: Object, speaker: Speaker, desk: PreparationDesk) -> Prepared:
    if "received" in given.get("manyhands", {}):
        raise BadField("manyhands.received: streams of this path do not go on after a cut: leave it out", "manyhands")
    is_on = _LOGPROBS in given.get("include", ())
    if given.get("top_logprobs") and not is_on:
        raise BadField(f'top_logprobs is for include: ["{_LOGPROBS}"]', "top_logprobs")
    logprobs = given.get("top_logprobs", 0) if is_on else None
    return talk(input_conversation(given), given, speaker, desk, given.get("max_output_tokens"), logprobs)


def _infer(given: Object, speaker: Speaker, desk: PreparationDesk) -> Prepared:
    if ("prompt" in given) == ("messages" in given):
        raise BadRequest("give either prompt (a text) or messages (a conversation)")
    values = {
        **_INFER,
        **speaker.recommended,
        **{k: v for k, v in given.items() if k not in _NO_PARAMS},
    }
    values |= {
        "seed": given.get("seed", secrets.randbits(53)),
        "stop": tuple(given.get("stop", ())),
    }  # 53: any JSON reader
    if "prompt" in given:
        ids = encode(given["prompt"], speaker, desk)
    else:
        ids = render(Conversation(given["messages"]), speaker, desk)
        values["max_tokens"] = room(speaker, ids, given.get("max_tokens"), desk.default_max_tokens)
    params = SamplingParams(**values)
    received = encode_received([given["received"]] if "received" in given else [], 1, "received", speaker, desk)
    echoed = _shown(given["prompt"]) if "prompt" in given else b""
    return Prepared(speaker.name, given, [ids], params, received=received, shown=echoed)


_NO_PARAMS = frozenset({"prompt", "messages", "model", "path", "draft", "stream", "received", *ROUTE_WISHES})
_INFER: Object = {"max_tokens": 50, "temperature": 0.9, "top_p": 0.92}


def refuse_elsewhere(path: str, sent: Object) -> None:
    """Raise NotOffered for a capability of the bus that is not called here, whatever its body has beside its name."""
    if path != "/bus/v1/call" or not isinstance(named := sent.get("capability", CHAT), str):
        return
    name, at, version = named.partition("@")
    if name != CHAT or (at and version != "1.0"):
        raise NotOffered(
            f"{name[:80]}@{version[:10] or '1.0'} is not called here: {ELSEWHERE.get(name, f'call {CHAT}@1.0')}"
        )


def _bus(given: Object, speaker: Speaker, desk: PreparationDesk) -> Prepared:
    params, said = given.get("params", {}), given["input"]
    if params.get("ctx", 1) > speaker.context:
        raise BadField(f"params.ctx is {params['ctx']}; this model has {speaker.context} positions", "params.ctx")
    ids = render(Conversation(said["messages"]), speaker, desk)
    asked_for = {name: said[name] for name in ("temperature", "top_p", "seed", "stop") if name in said}
    wishes = _BUS | speaker.recommended | asked_for
    size = room(speaker, ids, said.get("max_tokens"), desk.default_max_tokens)
    asked: Object = {"stream": given.get("stream", said.get("stream", True))}
    asked |= {name: params[name] for name in ("fallback_to_local",) if name in params}
    return Prepared(speaker.name, asked, [ids], sampling(wishes, speaker, size, None))


_BUS: Object = {"temperature": 0.7, "top_p": 0.95}


def _count(given: Mapping[str, Any], desk: PreparationDesk) -> int:
    """n, within the operator's limit. Raises BadField."""
    count = int(given.get("n", 1))
    if count > desk.max_choices:
        raise BadField(f"n is {count}; this gateway makes at most {desk.max_choices} choices", "n")
    return count


# -- Anthropic's ------------------------------------------------------------------------------------------------------


def _messages(given: Object, speaker: Speaker, desk: PreparationDesk) -> Prepared:
    wishes: Object = {name: given[name] for name in ("temperature", "top_p", "top_k") if name in given}
    wishes["stop"] = given.get("stop_sequences", ())
    said = messages_conversation(given, speaker)
    return replace(talk(said, wishes, speaker, desk, given["max_tokens"]), given=given)


def _count_tokens(given: Object, speaker: Speaker, desk: PreparationDesk) -> Prepared:
    return _counted(messages_conversation(given, speaker), given, speaker, desk)


# -- Ollama's ---------------------------------------------------------------------------------------------------------


def _ollama_chat(given: Object, speaker: Speaker, desk: PreparationDesk) -> Prepared:
    if not given.get("messages"):
        return Prepared(speaker.name, given, [], SamplingParams())
    options = given.get("options", {})
    wanted = max_tokens_of(options, speaker)
    said = chat_conversation(given, speaker)
    return replace(talk(said, wishes_of(options, speaker), speaker, desk, wanted), given=given)


def _ollama_generate(given: Object, speaker: Speaker, desk: PreparationDesk) -> Prepared:
    if not given.get("prompt"):
        return Prepared(speaker.name, given, [], SamplingParams())
    options = given.get("options", {})
    wishes, wanted = wishes_of(options, speaker), max_tokens_of(options, speaker)
    if not given.get("raw", False):
        said = prompt_conversation(given, speaker)
        return replace(talk(said, wishes, speaker, desk, wanted), given=given)
    if given.get("format") or given.get("system") or effort_of(given.get("think"), speaker):
        raise BadField("raw: a text goes on as it is, without format, system and think", "raw")
    ids = encode(given["prompt"], speaker, desk)
    size = room(speaker, ids, wanted, desk.default_max_tokens)
    return Prepared(speaker.name, given, [ids], sampling(wishes, speaker, size, None))


# -- counting ---------------------------------------------------------------------------------------------------------


def _input_tokens(given: Object, speaker: Speaker, desk: PreparationDesk) -> Prepared:
    return _counted(input_conversation(given), given, speaker, desk)


def _counted(said: Conversation, given: Object, speaker: Speaker, desk: PreparationDesk) -> Prepared:
    """How many tokens a conversation has."""
    check_tools(said, speaker)
    return Prepared(speaker.name, given, [], SamplingParams(), num_tokens=len(render(said, speaker, desk)))


def _tokenize(given: Object, speaker: Speaker, desk: PreparationDesk) -> Prepared:
    sources = [name for name in ("content", "prompt", "messages") if name in given]
    if len(sources) != 1:
        raise BadRequest("give one of content (a text), prompt (a text) and messages (a conversation)")
    (source,) = sources
    if source == "messages":
        ids = render(Conversation([message_of(message) for message in given["messages"]]), speaker, desk)
    else:
        with_special = given.get("add_special", given.get("add_special_tokens", source == "prompt"))
        ids = encode(given[source], speaker, desk, is_rendered=not with_special) if given[source] else ()
    rows: list[Any] = list(ids)
    if given.get("with_pieces"):
        if desk.is_inline and len(ids) > INLINE_PIECES:
            raise NeedsProcess
        rows = [{"id": token, "piece": _text_of(speaker, token)} for token in ids]
    return Prepared(speaker.name, given, [], SamplingParams(), num_tokens=len(ids), shown=_shown(rows))


def _detokenize(given: Object, speaker: Speaker, desk: PreparationDesk) -> Prepared:
    ids = given["tokens"]
    if max(ids) >= speaker.vocab_size:
        raise BadField(f"tokens has {max(ids)}; there are 0 to {speaker.vocab_size - 1}", "tokens")
    if desk.is_inline and len(ids) * speaker.longest > INLINE_TEXT_BYTES:
        raise NeedsProcess
    text: str = speaker.tokenizer.decode(ids, skip_special_tokens=False)
    return Prepared(speaker.name, given, [], SamplingParams(), num_tokens=len(ids), shown=_shown(text))


def _shown(value: Any) -> bytes:
    """As JSON. Raises BadRequest if it is too long to be sent."""
    data = json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()
    if len(data) > MAX_SHOWN_BYTES:
        raise BadRequest(
            f"the answer would have {len(data)} bytes; at most {MAX_SHOWN_BYTES} are sent: send less at once"
        )
    return data


def _text_of(speaker: Speaker, token: int) -> str:
    text: str = speaker.tokenizer.decode([token], skip_special_tokens=False)
    return text


PATHS: Mapping[str, Callable[[Object, Speaker, PreparationDesk], Prepared]] = {
    "/v1/chat/completions": _chat,
    "/v1/completions": _completions,
    "/v1/responses": _responses,
    "/v1/responses/input_tokens": _input_tokens,
    "/api/infer": _infer,
    "/bus/v1/call": _bus,
    "/v1/messages": _messages,
    "/v1/messages/count_tokens": _count_tokens,
    "/api/chat": _ollama_chat,
    "/api/generate": _ollama_generate,
    "/tokenize": _tokenize,
    "/detokenize": _detokenize,
}
