"""A conversation or a text as the ids of a prompt, with how tokens are drawn and what grammar holds them. Pure."""

import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from manyhands.api.http.body import BadField
from manyhands.api.openai.conversation import Conversation
from manyhands.api.preparation.desk import NeedsProcess, Object, PreparationDesk, Prepared, Speaker
from manyhands.core import MAX_TOKENS, MIN_TOP_P, SamplingParams
from manyhands.errors import BadRequest, ContextOverflow
from manyhands.text.grammar import answer_grammar, behind_thought, calls_grammar, json_grammar, strict_grammar
from manyhands.text.headed_grammar import headed_grammar
from manyhands.text.prompt import are_templates_read, encode_prompt, find_template, render_text
from manyhands.text.reasoning import Heads
from manyhands.text.received import ReceivedText, read_received
from manyhands.text.render_budget import RenderBudget, TooCostly

# What may be tokenised on the event loop: so many letters, or a fifth as many characters that may each be a token of their own
# (digits, which take 3 us each). Some milliseconds.
INLINE_COST: Final = 16 << 10
_ALONE: Final = re.compile("[^A-Za-z]")
# What the gateway itself passes to a chat template.
OWN_VARIABLES: Final = frozenset({"messages", "tools", "documents", "add_generation_prompt"})


def talk(
    said: Conversation,
    wishes: Object,
    speaker: Speaker,
    desk: PreparationDesk,
    wanted: int | None,
    logprobs: int | None = None,
) -> Prepared:
    """A conversation by the chat template, with its grammar. `wishes`: as `sampling`; `wanted`: max_tokens, None for the
    default. Raises BadRequest, ContextOverflow, NeedsProcess."""
    check_tools(said, speaker)
    prompt = _shortened(said, speaker, desk, wanted) if said.may_shorten else render(said, speaker, desk)
    is_open = _ends_in_thought(speaker, said, prompt)
    grammar = _grammar(speaker, said, is_open=is_open)
    if grammar is not None and wishes.get("manyhands", {}).get("ignore_eos", False):
        message = "manyhands.ignore_eos goes with neither response_format nor tools that are enforced"
        raise BadField(message, "manyhands")
    params = sampling(wishes, speaker, room(speaker, prompt, wanted, desk.default_max_tokens), logprobs)
    functions = {f.name: f.parameters for f in said.functions} if said.tool_choice != "none" else {}
    return Prepared(
        speaker.name,
        wishes,
        [prompt],
        params,
        grammar=grammar,
        is_open=is_open,
        functions=functions,
        is_parallel=said.is_parallel,
        is_call=bool(said.functions) and said.tool_choice not in ("none", "auto"),
        is_talk=True,
    )


def check_tools(said: Conversation, speaker: Speaker) -> None:
    """Raise BadField for tools of a model whose template takes none."""
    if said.functions and speaker.dialect is None:
        raise BadField(
            f"tools: model {speaker.name!r} does not support tools, as its chat template takes none that we can read: leave "
            "them out",
            "tools",
        )


# -- rendering --------------------------------------------------------------------------------------------------------


def render(said: Conversation, speaker: Speaker, desk: PreparationDesk) -> tuple[int, ...]:
    """The prompt of a conversation. Raises BadRequest, NeedsProcess."""
    for message in said.messages:
        _check_text(message["content"], speaker)
    tools = said.tools if said.tool_choice != "none" else ()
    variables = {**_effort_variables(speaker, said.effort), **_own_variables(speaker, said.variables)}
    budget = RenderBudget()
    if desk.is_inline and speaker.tokenizer.chat_template:
        if not are_templates_read(speaker.tokenizer):
            raise NeedsProcess
        if not find_template(speaker.tokenizer, has_tools=bool(tools)).is_simple:
            raise NeedsProcess
        budget = RenderBudget(passes=4096, seconds=0.005, size=1 << 17)
    begun = said.messages[-1]["content"] if said.is_continued else ""
    messages = said.messages if begun or not said.is_continued else said.messages[:-1]
    try:
        text = render_text(speaker.tokenizer, messages, tools, budget, begun=begun, **variables)
    except TooCostly:
        if desk.is_inline:
            raise NeedsProcess from None
        raise
    return encode(text, speaker, desk, is_rendered=True)


def _shortened(said: Conversation, speaker: Speaker, desk: PreparationDesk, wanted: int | None) -> tuple[int, ...]:
    """The prompt, of the newest messages that fit with what may follow, for which at most half of the context is kept: a system
    message before them stays.

    Rendered a few times (log2 of the messages), in a process unless all of it fits.
    """
    usual = min(desk.default_max_tokens or speaker.context, speaker.context // 4)
    reserved = min(wanted or usual, speaker.context // 2)
    head = [m for m in said.messages[:1] if m["role"] == "system"]
    rest = said.messages[len(head) :]
    # What is left begins with a turn of its own, not with the answer of a tool that was called before.
    starts = [index for index, m in enumerate(rest) if m["role"] != "tool"] or [0]
    best: tuple[int, ...] | None = None
    low, high = 0, len(starts)  # the first of `starts` that fits, by halving
    middle = 0
    while low < high:
        prompt = _fitting(replace(said, messages=[*head, *rest[starts[middle] :]]), speaker, desk, reserved)
        if prompt is None:
            if desk.is_inline:
                raise NeedsProcess
            low = middle + 1
        else:
            best, high = prompt, middle
        middle = (low + high) // 2
    if best is None:
        what = f"prompt is too long: the newest message and {reserved} tokens to answer exceed the context"
        raise ContextOverflow.of(what, speaker.context)
    return best


def _fitting(said: Conversation, speaker: Speaker, desk: PreparationDesk, reserved: int) -> tuple[int, ...] | None:
    try:
        prompt = render(said, speaker, desk)
    except ContextOverflow:
        return None
    return prompt if len(prompt) + reserved <= speaker.context else None


def encode(
    prompt: str | Sequence[int], speaker: Speaker, desk: PreparationDesk, *, is_rendered: bool = False
) -> tuple[int, ...]:
    """Ids of a text, or those that were sent. The template has placed the special tokens of what is rendered.

    Raises ContextOverflow, NeedsProcess.
    """
    if not isinstance(prompt, str):
        return tuple(prompt)
    _check_text(prompt, speaker)
    if desk.is_inline:
        _spend(prompt, desk)
    if is_rendered:
        return tuple(speaker.tokenizer.encode(prompt, add_special_tokens=False))
    return tuple(encode_prompt(speaker.tokenizer, prompt))


def encode_received(
    texts: Sequence[str], num_choices: int, where: str, speaker: Speaker, desk: PreparationDesk
) -> list[ReceivedText]:
    """What a client says it has of each choice, in tokens; none if it says nothing. `where`: the field, for the error.

    Raises BadField, ContextOverflow, NeedsProcess.
    """
    if texts and len(texts) != num_choices:
        raise BadField(
            f"{where} has {len(texts)} texts; this request has {num_choices} choices: send one of each", where
        )
    for text in texts:
        _check_text(text, speaker, where)
        if desk.is_inline:
            _spend(text, desk)
    return [read_received(speaker.tokenizer, text) for text in texts]


def _spend(prompt: str, desk: PreparationDesk) -> None:
    """Count what tokenising a text on the event loop costs. Raises NeedsProcess beyond INLINE_COST."""
    desk.spent.append(len(prompt) + 4 * len(_ALONE.findall(prompt)))
    if sum(desk.spent) > INLINE_COST:
        raise NeedsProcess


def _check_text(text: str, speaker: Speaker, where: str = "prompt") -> None:
    """Raise ContextOverflow for a text that cannot fit, before it is tokenised: no token has more bytes than the longest.

    `where`: the field, for the error.
    """
    if len(text) > speaker.context * speaker.longest:
        least = len(text) // speaker.longest
        what = f"{where} is too long: {len(text)} characters, at least {least} tokens"
        raise ContextOverflow.of(what, speaker.context)


def _ends_in_thought(speaker: Speaker, said: Conversation, ids: Sequence[int]) -> bool:
    """Whether the template, or the text that the answer goes on from, has begun a thought and not ended it."""
    if speaker.thinking is None:
        return False
    opens, closes = speaker.thinking.opens, speaker.thinking.closes
    begun: str = said.messages[-1]["content"] if said.is_continued else ""
    tail: str = speaker.tokenizer.decode(list(ids[-8:]), skip_special_tokens=False)
    return begun.rfind(opens) > begun.rfind(closes) or tail.rstrip().endswith(opens)


def _own_variables(speaker: Speaker, given: Mapping[str, Any]) -> Object:
    """Variables that a client gives. Raises BadField for one that the gateway sets."""
    taken = sorted((OWN_VARIABLES | speaker.tokenizer.special_tokens_map.keys()) & given.keys())
    if taken:
        raise BadField(
            f"chat_template_kwargs: {', '.join(taken)} is set by the gateway: leave it out", "chat_template_kwargs"
        )
    return dict(given)


def _effort_variables(speaker: Speaker, effort: str | None) -> Object:
    if effort is None or (effort == "none" and speaker.thinking is None and speaker.level is None):
        return {}
    if speaker.level is not None and (effort != "none" or speaker.has_level_none):
        return {speaker.level: effort}
    if speaker.thinking is not None and speaker.thinking.switch is not None:
        return {speaker.thinking.switch: effort != "none"}
    raise BadField("reasoning_effort: this model's template has no such switch, leave it out", "reasoning_effort")


# -- drawing ----------------------------------------------------------------------------------------------------------


def room(speaker: Speaker, prompt: Sequence[int], wanted: int | None, default: int | None) -> int:
    """max_tokens: what was asked for, else the default, or less where the context is full. Without a default half of what the
    context leaves, so that a conversation can go on."""
    if len(prompt) >= speaker.context:
        raise ContextOverflow.of(f"prompt is too long: {len(prompt)} tokens", speaker.context)
    most = default if wanted is None else wanted
    left = min(speaker.context - len(prompt), MAX_TOKENS)
    return max(1, left // 2) if most is None else min(most, left)


def sampling(wishes: Mapping[str, Any], speaker: Speaker, max_tokens: int, logprobs: int | None) -> SamplingParams:
    """Sampling parameters of checked fields, by OpenAI's names; of those left out, what the model's publisher recommends, or
    OpenAI's default. Without a seed a random one.

    Raises BadField for what the model has not.
    """
    ours = _ours(wishes)
    drawn: Object = {**_USUAL, **speaker.recommended, **wishes, **ours}
    if ours.get("dtype", speaker.precision) != speaker.precision:
        raise BadField(
            f"manyhands.dtype is {ours['dtype']}; this model is served in {speaker.precision}", "manyhands.dtype"
        )
    stop, bias, stop_ids = wishes.get("stop", ()), wishes.get("logit_bias", {}), wishes.get("stop_token_ids", ())
    for name, tokens in (("logit_bias", bias), ("stop_token_ids", stop_ids)):
        for token in tokens:
            if int(token) >= speaker.vocab_size:
                raise BadField(f"{name} names token {token}; there are 0 to {speaker.vocab_size - 1}", name)
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=float(drawn["temperature"]),
        top_p=max(MIN_TOP_P, float(drawn["top_p"])),
        top_k=drawn["top_k"],
        min_p=float(drawn["min_p"]),
        seed=wishes["seed"] % (1 << 64) if "seed" in wishes else secrets.randbits(64),
        repetition_penalty=float(drawn["repetition_penalty"]),
        presence_penalty=float(wishes.get("presence_penalty", 0.0)),
        frequency_penalty=float(wishes.get("frequency_penalty", 0.0)),
        logit_bias=tuple((int(token), float(value)) for token, value in bias.items()),
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        stop_ids=tuple(stop_ids),
        ignore_eos=ours.get("ignore_eos", False),
        logprobs=logprobs,
    )


_USUAL: Object = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}


def _ours(wishes: Mapping[str, Any]) -> Object:
    """What stands in `manyhands`, or beside OpenAI's fields. Raises BadField for what stands in both."""
    inner = wishes.get("manyhands", {})
    outer = {name: wishes[name] for name in ("top_k", "min_p", "repetition_penalty") if name in wishes}
    twice = sorted(inner.keys() & outer.keys())
    if twice:
        raise BadField(f"{twice[0]} stands in manyhands too: send it once", twice[0])
    return {**inner, **outer}


def _grammar(speaker: Speaker, said: Conversation, *, is_open: bool) -> str | None:
    """What the answer must look like, behind a thought that the prompt has begun and no one token ends; None: anything."""
    grammar, thinking = _answer_grammar(speaker, said, is_open=is_open), speaker.thinking
    if grammar is None or thinking is None or not is_open or thinking.close_id is not None:
        return grammar
    return grammar if _heads(speaker, said) is not None else behind_thought(grammar, thinking.closes)


def _heads(speaker: Speaker, said: Conversation) -> Heads | None:
    """What heads of messages say, where the answer begins with one: an answer that goes on is within a message."""
    heads = speaker.thinking.heads if speaker.thinking is not None else None
    return None if said.is_continued and heads != "sections" else heads


def _answer_grammar(speaker: Speaker, said: Conversation, *, is_open: bool) -> str | None:
    functions, choice = said.functions if said.tool_choice != "none" else (), said.tool_choice
    heads = _heads(speaker, said)
    if not functions and heads is None:
        return None if said.format is None else json_grammar(said.format or None)
    wanted = [f for f in functions if choice in ("auto", "required", f.name)]
    is_strict, forced = any(f.is_strict for f in functions), choice not in ("none", "auto")
    if not forced and not is_strict and said.format is None:
        return None
    if functions and heads is None and speaker.thinking is not None and speaker.thinking.heads is not None:
        goes_on = "where an answer goes on from the last message calls of this model cannot be enforced"
        raise BadField(f"tools: {goes_on}: send tool_choice none, or auto without strict and response_format", "tools")
    try:
        schema, several = said.format or None, said.is_parallel and choice in ("required", "auto")
        if heads is not None:
            return headed_grammar(
                heads,
                wanted,
                speaker.special,
                schema,
                is_free=said.format is None,
                forced=forced,
                parallel=several,
                is_open=is_open,
            )
        assert speaker.dialect is not None
        if forced:
            return calls_grammar(speaker.dialect, wanted, speaker.special, parallel=several)
        if said.format is None:
            return strict_grammar(speaker.dialect, functions, speaker.special)
        return answer_grammar(speaker.dialect, functions, speaker.special, schema, parallel=several)
    except BadRequest as error:
        raise BadField(f"tools: {error}", "tools") from error
