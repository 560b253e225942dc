"""What the OpenAI routes share: from a conversation to what is asked of the gateway, and from tokens to what is shown.

plan_chat / plan_text ─► Plan ─ (per choice) ─► gateway.run ─ Token ─► Choice.feed ─► deltas
"""

import asyncio
import hashlib
import secrets
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple, TypeVar

from manyhands.api.conversation import Conversation
from manyhands.api.gateway import Api, Ask, Caller, Gateway, Job, Run
from manyhands.api.schema import BadField
from manyhands.core import SamplingParams
from manyhands.errors import BadRequest, ContextOverflow
from manyhands.origin import Origin, Token
from manyhands.text.grammar import Grammar, Grammars, calls_grammar, json_grammar, strict_grammar
from manyhands.text.prompt import render_chat
from manyhands.text.reasoning import Thinking, ThoughtReader, find_thinking, template_of
from manyhands.text.tools import (
    PYTHON_TAG,
    CallArguments,
    CallStart,
    Content,
    Dialect,
    Piece,
    ToolReader,
    find_dialect,
)

T = TypeVar("T")
# Reading so much text takes well under a millisecond; a thread and back about half of one.
AT_ONCE_CHARACTERS = 4096


@dataclass(slots=True)
class Voice:
    """How a served model speaks: what its tokenizer and chat template tell, found out once."""

    origin: Origin
    dialect: Dialect | None
    thinking: Thinking | None
    special: Mapping[str, int]  # markers that are special tokens, which decoding would drop
    has_levels: bool  # the template knows reasoning_effort
    grammars: Grammars

    @classmethod
    def of(cls, origin: Origin) -> "Voice":
        model = origin.model
        tokenizer = model.tokenizer
        dialect, thinking = find_dialect(tokenizer), find_thinking(tokenizer)
        markers = {PYTHON_TAG, *(dialect.marks if dialect else ())}
        markers |= {thinking.opens, thinking.closes} if thinking else set()
        ids = dict(zip(tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=True))
        special = {text: ids[text] for text in markers if text in ids and ids[text] not in model.eos_ids}
        grammars = Grammars(tokenizer, int(model.config.vocab_size), model.eos_ids)
        return cls(origin, dialect, thinking, special, "reasoning_effort" in template_of(tokenizer), grammars)


class Voices:
    """The Voice of every model of a gateway, made when first wanted."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._known: dict[str, Voice] = {}

    def find(self, model: str) -> Voice:
        """Raises NotFound."""
        origin = self._gateway.origin(model)
        if model not in self._known or self._known[model].origin is not origin:
            self._known[model] = Voice.of(origin)
        return self._known[model]


@dataclass(slots=True)
class Plan:
    """Everything about a request but its route: what to ask, and how to read what comes."""

    voice: Voice
    prompt: tuple[int, ...]
    params: SamplingParams
    grammar: str | None = None
    reads_thoughts: bool = False
    is_open: bool = False  # the prompt ends within a thought
    functions: Mapping[str, Mapping[str, Any]] = field(
        default_factory=dict
    )  # that may be called, with their parameters
    is_parallel: bool = True
    ask: dict[str, Any] = field(default_factory=dict)

    async def choose(self, model: str, api: Api, caller: Caller, index: int) -> tuple[Ask, "Choice"]:
        """What to ask for choice `index`, and its reader. Raises BadRequest for a grammar that cannot be."""
        params = self.params if index == 0 else replace(self.params, seed=_seed_of(self.params.seed, index))
        thinking = self.voice.thinking if self.reads_thoughts else None
        constraint = None
        if self.grammar is not None:
            constraint = await asyncio.to_thread(self._compile, self.grammar, thinking)
        shown = self.functions or thinking is not None
        marks = {token: text for text, token in self.voice.special.items()} if shown else {}
        ask = Ask(model, api, self.prompt, params, caller, constraint=constraint, marks=marks, **self.ask)
        return ask, Choice(self, thinking)

    def _compile(self, grammar: str, thinking: Thinking | None) -> Grammar:
        try:
            return self.voice.grammars.compile(grammar, thinking, is_open=self.is_open)
        except BadRequest as error:
            where = "tools" if self.functions else "response_format"
            raise BadField(f"{where}: {error}", where) from error


def _seed_of(seed: int, index: int) -> int:
    """The seed of the index-th choice: another stream of noise, the same every time."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{index}".encode()).digest()[:8], "little")


def sampling(given: Mapping[str, Any], max_tokens: int, logprobs: int | None) -> SamplingParams:
    """Sampling parameters of parsed fields; without a seed a random one."""
    ours = given.get("manyhands", {})
    stop = given.get("stop", ())
    bias = given.get("logit_bias", {})
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


def options(voice: Voice, given: Mapping[str, Any]) -> dict[str, Any]:
    """What of the extension goes to the gateway. Raises BadField where dtype is not what is served."""
    ours = given.get("manyhands", {})
    served = voice.origin.model.precision
    if ours.get("dtype", served) != served:
        raise BadField(f"manyhands.dtype is {ours['dtype']}; this model is served in {served}", "manyhands.dtype")
    vocab_size = int(voice.origin.model.config.vocab_size)
    for token in given.get("logit_bias", {}):
        if int(token) >= vocab_size:
            raise BadField(f"logit_bias names token {token}; there are 0 to {vocab_size - 1}", "logit_bias")
    return {"path": ours.get("path", "ring")}


def room(voice: Voice, prompt: Sequence[int], wanted: int | None, default: int) -> int:
    """max_tokens: what was asked for (checked later), else the default, or less where the context is full."""
    if wanted is not None:
        return wanted
    context = voice.origin.model.context_length
    if len(prompt) >= context:
        raise ContextOverflow(f"the prompt has {len(prompt)} tokens; the context has {context}: shorten it")
    return min(default, context - len(prompt))


async def render(voice: Voice, talk: Conversation) -> tuple[tuple[int, ...], bool]:
    """The prompt of a conversation, and whether it ends within a thought. Raises BadRequest."""
    variables = _effort_variables(voice, talk.effort)
    tools = talk.tools if talk.tool_choice != "none" else ()
    tokenizer = voice.origin.model.tokenizer
    size = sum(len(message["content"]) for message in talk.messages) + 1000 * len(tools)
    ids = tuple(await off_loop(size, partial(render_chat, tokenizer, talk.messages, tools, **variables)))
    if voice.thinking is None:
        return ids, False
    tail = tokenizer.decode(list(ids[-8:]), skip_special_tokens=False).rstrip()
    return ids, tail.endswith(voice.thinking.opens)


async def off_loop(size: int, work: Callable[[], T]) -> T:
    """Do work whose cost grows with `size` characters: at once where a thread would cost more, else in a thread."""
    return work() if size <= AT_ONCE_CHARACTERS else await asyncio.to_thread(work)


def _effort_variables(voice: Voice, effort: str | None) -> dict[str, Any]:
    if effort is None:
        return {}
    if voice.has_levels and effort != "none":
        return {"reasoning_effort": effort}
    if voice.thinking is not None and voice.thinking.switch is not None:
        return {voice.thinking.switch: effort != "none"}
    raise BadField("reasoning_effort: this model's template has no such switch, leave it out", "reasoning_effort")


async def plan_chat(
    voice: Voice,
    talk: Conversation,
    given: Mapping[str, Any],
    *,
    wanted: int | None,
    default: int,
    logprobs: int | None,
) -> Plan:
    """Raises BadRequest, ContextOverflow."""
    if talk.functions and voice.dialect is None:
        raise BadField("tools: this model's chat template takes none that we can read", "tools")
    prompt, is_open = await render(voice, talk)
    params = sampling(given, room(voice, prompt, wanted, default), logprobs)
    grammar = _grammar(voice, talk)
    if grammar is not None and params.ignore_eos:
        raise BadField(
            "manyhands.ignore_eos goes with neither response_format nor tools that are enforced", "manyhands"
        )
    callable_ = {f.name: f.parameters for f in talk.functions} if talk.tool_choice != "none" else {}
    thinks = voice.thinking is not None
    return Plan(voice, prompt, params, grammar, thinks, is_open, callable_, talk.is_parallel, options(voice, given))


def _grammar(voice: Voice, talk: Conversation) -> str | None:
    """What the answer must look like; None: anything."""
    functions, choice = talk.functions, talk.tool_choice
    is_forced = choice not in ("none", "auto")
    if functions and choice != "none" and talk.format is not None:
        raise BadField("response_format goes with tools only where tool_choice is none", "response_format")
    if talk.format is not None:
        return json_grammar(talk.format or None)
    if not functions or choice == "none":
        return None
    assert voice.dialect is not None
    try:
        if not is_forced:
            is_strict = any(f.is_strict for f in functions)
            return strict_grammar(voice.dialect, functions, voice.special) if is_strict else None
        wanted = [f for f in functions if choice in ("required", f.name)]
        several = talk.is_parallel and choice == "required"
        return calls_grammar(voice.dialect, wanted, voice.special, parallel=several)
    except BadRequest as error:
        raise BadField(f"tools: {error}", "tools") from error


# -- reading ----------------------------------------------------------------------------------------------------------


class Delta(NamedTuple):
    """What one token adds: any of these may be empty."""

    reasoning: str = ""
    pieces: Sequence[Piece] = ()
    token: Token | None = None

    @property
    def text(self) -> str | None:
        """What it adds to the content, if it adds nothing else."""
        if self.reasoning or len(self.pieces) > 1:
            return None
        if not self.pieces:
            return ""
        piece = self.pieces[0]
        return piece.text if isinstance(piece, Content) else None


class Choice:
    """Reads the text of one choice into thoughts, content and calls, and keeps them."""

    def __init__(self, plan: Plan, thinking: Thinking | None) -> None:
        self._plan = plan
        self._thoughts = ThoughtReader(thinking, is_open=plan.is_open)
        dialect = plan.voice.dialect
        self._tools = ToolReader(dialect, plan.functions) if plan.functions and dialect else None
        self.reasoning = ""
        self.content = ""
        self.calls: list[dict[str, str]] = []  # name, arguments, id
        self.tokens: list[Token] = []
        self.reasoning_tokens = 0
        self.job: Job | None = None
        self._run: Run | None = None
        self.is_cut = False  # ended after its first call, as asked

    async def read(self, gateway: Gateway, ask: Ask) -> AsyncGenerator[Delta, None]:
        """Run it: deltas as they come, the last one when all is said. Raises what ends it."""
        async with gateway.run(ask) as run:
            self.job, self._run = run.job, run
            async with aclosing(run.tokens()) as tokens:
                async for token in tokens:
                    delta = self._feed(token)
                    yield delta
                    if not self._plan.is_parallel and self._tools is not None and self._tools.num_calls:
                        self.is_cut = True
                        run.finish("stop")
                        break
            yield self._finish()

    @property
    def has_route(self) -> bool:
        """Whether its session is open: what could be refused has been."""
        return self._run is not None and self._run.answer.session is not None

    @property
    def finish_reason(self) -> str:
        """stop, length or tool_calls: what happened."""
        if self.is_cut or (self._tools is not None and self._tools.num_calls and self._reason == "stop"):
            return "tool_calls"
        return self._reason

    @property
    def _reason(self) -> str:
        return (self.job.finish_reason if self.job else None) or "stop"

    def _feed(self, token: Token) -> Delta:
        self.tokens.append(token)
        self.reasoning_tokens += self._thoughts.is_thinking
        thought, text = self._thoughts.feed(token.text)
        return self._keep(Delta(thought, self._split(text), token))

    def _split(self, text: str) -> list[Piece]:
        if self._tools is not None:
            return self._tools.feed(text)
        return [Content(text)] if text else []

    def _finish(self) -> Delta:
        thought, text = self._thoughts.finish()
        pieces = self._split(text)
        if self._tools is not None:
            pieces += [] if self.is_cut else self._tools.finish()
        return self._keep(Delta(thought, pieces))

    def _keep(self, delta: Delta) -> Delta:
        if (text := delta.text) is not None:
            self.content += text
            return delta
        self.reasoning += delta.reasoning
        for piece in delta.pieces:
            match piece:
                case Content(text):
                    self.content += text
                case CallStart(_, name):
                    self.calls.append({"id": f"call_{secrets.token_hex(12)}", "name": name, "arguments": ""})
                case CallArguments(index, text):
                    self.calls[index]["arguments"] += text
        return delta


def check_choices(given: Mapping[str, Any], limit: int) -> int:
    """n, within the operator's limit. Raises BadField."""
    count = int(given.get("n", 1))
    if count > limit:
        raise BadField(f"n is {count}; this gateway makes at most {limit} choices", "n")
    return count


def encode_text(voice: Voice, prompt: str | Sequence[int]) -> tuple[int, ...]:
    """Ids of a plain prompt. Raises BadRequest."""
    if isinstance(prompt, str):
        return voice.origin.model.encode(prompt)
    size = int(voice.origin.model.config.vocab_size)
    if any(token >= size for token in prompt):
        raise BadField(f"prompt names tokens beyond {size - 1}, the last of this model", "prompt")
    return tuple(prompt)
