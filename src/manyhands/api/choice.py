"""What the routes that generate share: from a request to what is asked of the gateway, and from tokens to what is shown.

bytes ─ ModelFormats.prepare ─► Prepared ─ GenerationPlan (per choice) ─► gateway.run ─ Token ─► Choice.feed ─► deltas
"""

import asyncio
import hashlib
import secrets
from collections.abc import AsyncGenerator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from manyhands.api.delta import Delta
from manyhands.api.gateway import Gateway
from manyhands.api.http.body import BadField
from manyhands.api.openai.schema import ROUTE_WISHES
from manyhands.api.preparation.desk import NeedsProcess, PreparationDesk, Prepared, Speaker
from manyhands.api.preparation.pool import INLINE_BYTES, Preparing
from manyhands.api.preparation.prepare import prepare
from manyhands.api.preparation.process import PreparationJob, SpeakerSpec
from manyhands.api.run import Admitted, Api, Ask, Caller, Job, Run
from manyhands.api.streams import ChoiceProgress, Stream
from manyhands.errors import BadRequest, ModelError, ModelNotFound
from manyhands.origin import Origin, Token
from manyhands.plain import one_line
from manyhands.route.offer import Rules
from manyhands.text.grammar import Grammar, Grammars
from manyhands.text.reasoning import Thinking, ThoughtReader, find_thinking, template_of
from manyhands.text.tokenizer_parts import MAX_TOKEN_BYTES, is_plain
from manyhands.text.tools import (
    PYTHON_TAG,
    CallArguments,
    CallStart,
    Content,
    Piece,
    ToolReader,
    find_dialect,
)


@dataclass(frozen=True, slots=True)
class ModelFormat:
    """The text format of a served model, of its tokenizer and chat template, read once. `spec`: the same for a process."""

    origin: Origin
    speaker: Speaker
    spec: SpeakerSpec
    grammars: Grammars

    @classmethod
    def of(cls, name: str, origin: Origin) -> "ModelFormat":
        """Blocking: 0.2 s for 150,000 tokens."""
        model = origin.model
        tokenizer = model.tokenizer
        dialect, thinking = find_dialect(tokenizer), find_thinking(tokenizer)
        markers = {PYTHON_TAG, *(dialect.marks if dialect else ())}
        markers |= {thinking.opens, thinking.closes} if thinking else set()
        ids = dict(zip(tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=True))
        shared: dict[str, Any] = {
            "name": name,
            "context": model.context_length,
            "vocab_size": model.vocab_size,
            "longest": max(len(token.encode()) for token in tokenizer.get_vocab()),
            "precision": model.precision,
            "dialect": dialect,
            "thinking": thinking,
            "special": {text: ids[text] for text in markers if text in ids and ids[text] not in model.eos_ids},
            "has_levels": "reasoning_effort" in template_of(tokenizer),
            "is_plain": is_plain(tokenizer.backend_tokenizer),
        }
        if shared["longest"] > MAX_TOKEN_BYTES:
            raise ModelError(f"a token of {shared['longest']} bytes; at most {MAX_TOKEN_BYTES} are read")
        spec = SpeakerSpec(
            tokenizer=tokenizer.backend_tokenizer.to_str().encode(),
            chat_template=tokenizer.chat_template,
            special_tokens_map=tokenizer.special_tokens_map,
            eos_ids=model.eos_ids,
            **shared,
        )
        grammars = Grammars(tokenizer, model.vocab_size, model.eos_ids)
        return cls(origin, Speaker(tokenizer=tokenizer, **shared), spec, grammars)


class ModelFormats:
    """The format of every model of a gateway, and where requests are prepared for them."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._known: dict[str, ModelFormat] = {}
        self._speakers: dict[str, Speaker] = {}
        self._specs: list[SpeakerSpec] = []
        self.preparing = Preparing(lambda: self._specs)
        self._compiler = ThreadPoolExecutor(1, "grammar")  # llguidance lets the loop run meanwhile
        gateway.parts.append(self)

    async def open(self) -> None:
        """Read the models' text formats, where that is not done."""
        origins = self._gateway.origins
        if all(name in self._known and self._known[name].origin is origin for name, origin in origins.items()):
            return
        known = {name: voice for name, voice in self._known.items() if origins.get(name) is voice.origin}
        for name, origin in [(name, origin) for name, origin in origins.items() if name not in known]:
            try:
                known[name] = await asyncio.to_thread(ModelFormat.of, name, origin)
            except Exception as error:  # of files from outside: jinja2 and the tokenizers' library raise what they like
                self._gateway.refuse(name, f"its tokenizer or chat template cannot be used ({one_line(error, 200)})")
        self._known = known
        self._speakers = {name: voice.speaker for name, voice in known.items()}
        self._specs = [voice.spec for voice in known.values()]

    async def close(self) -> None:
        """End the processes and the thread."""
        await self.preparing.close()
        self._compiler.shutdown(wait=False, cancel_futures=True)

    def known(self, model: str) -> ModelFormat:
        """The format of a served model. Raises ModelNotFound if it cannot be used."""
        if model not in self._known:
            raise ModelNotFound("; ".join([f"model {model[:100]!r} is not served here", *self._gateway.reasons]))
        return self._known[model]

    async def prepare(self, path: str, body: bytes, caller: Caller, client: str) -> tuple[ModelFormat, Prepared]:
        """What a request asks for; at once if it is small and plain, else in a process. `client`: whose turn, without a key.

        A model that is offered is loaded first. Raises as `prepare` and Preparing.run do. Cancelling ends the work.
        """
        await self.open()
        try:
            return await self._prepare(path, body, caller, client)
        except ModelNotFound as error:
            await self._gateway.bring(error.model)
            await self.open()
            if self._gateway.names.find(error.model, self._known) not in self._known:
                raise ModelNotFound("; ".join([str(error), *self._gateway.reasons])) from error
        return await self._prepare(path, body, caller, client)

    async def _prepare(self, path: str, body: bytes, caller: Caller, client: str) -> tuple[ModelFormat, Prepared]:
        limits, names, who = self._gateway.limits, self._gateway.names, (caller.models, caller.name)
        made, numbers = None, (limits.max_choices, limits.default_max_tokens)
        if len(body) <= INLINE_BYTES:
            desk = PreparationDesk(self._speakers, *numbers, self._accept, *who, is_inline=True, names=names)
            try:
                made = prepare(path, body, desk)
            except NeedsProcess:
                pass
        if made is None:
            made = await self.preparing.run(caller.name or client, PreparationJob(path, body, *who, *numbers, names))
        return self._known[made.model], made

    async def ask_one(
        self, path: str, api: Api, body: bytes, caller: Caller, client: str
    ) -> tuple[Prepared, Ask, "Choice"]:
        """Charge and prepare a request for one choice: what to ask, and its reader. Raises as `prepare`, and RateLimited."""
        entry = self._gateway.enter(caller, api)
        voice, made = await self.prepare(path, body, caller, client)
        (plan,) = plans_of(self, voice, made)
        ask, choice = await plan.choose(api, caller, entry)
        return made, ask, choice

    def _accept(self, grammar: str) -> None:
        if not any(voice.grammars.has(grammar) for voice in self._known.values()):
            raise NeedsProcess

    async def compile(self, voice: ModelFormat, made: Prepared) -> Grammar | None:
        """The grammar of one choice, which a process has checked. Raises BadField."""
        if made.grammar is None:
            return None
        thinking = voice.speaker.thinking
        compiling = partial(voice.grammars.compile, made.grammar, thinking, is_open=made.is_open)
        try:
            if voice.grammars.has(made.grammar):
                return compiling()
            return await asyncio.get_running_loop().run_in_executor(self._compiler, compiling)
        except BadRequest as error:
            where = "tools" if made.functions else "response_format"
            raise BadField(f"{where}: {error}", where) from error


@dataclass(slots=True)
class GenerationPlan:
    """One choice: what to ask, and how to read what comes. `index` is that of the choice among those of its prompt."""

    voices: ModelFormats
    voice: ModelFormat
    made: Prepared
    prompt: Sequence[int]
    index: int = 0

    @property
    def thinking(self) -> Thinking | None:
        """The model's, where the prompt is a conversation."""
        return self.voice.speaker.thinking if self.made.is_talk else None

    async def choose(self, api: Api, caller: Caller, entry: Admitted) -> tuple[Ask, "Choice"]:
        """What to ask, and its reader. Raises BadRequest for a grammar that cannot be."""
        made, params = self.made, self.made.params
        if self.index:
            params = replace(params, seed=_seed_of(params.seed, self.index))
        constraint = await self.voices.compile(self.voice, made)
        shown = made.functions or self.thinking is not None
        marks = {token: text for text, token in self.voice.speaker.special.items()} if shown else {}
        ours = made.given.get("manyhands", {})
        path, draft = made.given.get("path") or ours.get("path", "ring"), ours.get("draft", "")
        rules = _rules_of(self.voice.origin, made.given | ours)
        ask = Ask(
            made.model, api, self.prompt, params, caller, path, constraint, entry, marks, draft, rules, is_fit=True
        )
        return ask, Choice(self)


def _rules_of(origin: Origin, given: Mapping[str, Any]) -> Rules:
    """How the route is chosen: as the request says, else as the node's configuration does."""
    told = {rule: given[name] for name, rule in ROUTE_WISHES.items() if name in given}
    return replace(Rules.of(origin.node.request), **told)


def plans_of(voices: ModelFormats, voice: ModelFormat, made: Prepared) -> list[GenerationPlan]:
    """One plan a choice: every prompt has `count` of them."""
    return [
        GenerationPlan(voices, voice, made, prompt, index) for prompt in made.prompts for index in range(made.count)
    ]


def _seed_of(seed: int, index: int) -> int:
    """The seed of the index-th choice: another stream of noise, the same every time."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{index}".encode()).digest()[:8], "little")


# -- reading ----------------------------------------------------------------------------------------------------------


class Choice:
    """Reads the text of one choice into thoughts, content and calls, and keeps them."""

    def __init__(self, plan: GenerationPlan) -> None:
        made = plan.made
        self._thoughts = ThoughtReader(plan.thinking, is_open=made.is_open)
        dialect = plan.voice.speaker.dialect
        self._tools = ToolReader(dialect, made.functions) if made.functions and dialect else None
        self._is_parallel, self._is_call = made.is_parallel, made.is_call
        self.reasoning = ""
        self.content = ""
        self.calls: list[dict[str, str]] = []  # name, arguments, id
        self.num_tokens = 0
        self.num_shown = 0  # characters of their text, of whatever kind
        self.reasoning_tokens = 0
        self.job: Job | None = None
        self._run: Run | None = None
        self.is_cut = False  # ended after its first call, as asked
        self.names = secrets.token_bytes(12)  # what the ids of its calls are made from

    async def read(self, gateway: Gateway, ask: Ask, *, with_progress: bool = False) -> AsyncGenerator[Delta, None]:
        """Run it: deltas as they come, the last one when all is said. Raises what ends it."""
        async with gateway.run(ask) as run:
            self.job, self._run = run.job, run
            async with aclosing(run.happenings() if with_progress else run.tokens()) as tokens:
                async for token in tokens:
                    if token is None:
                        if run.job.is_prefilling:
                            yield Delta(is_progress=True)
                        continue
                    delta = self._feed(token)
                    yield delta
                    if not self._is_parallel and self._tools is not None and self._tools.num_calls:
                        self.is_cut = True
                        run.finish("stop")
                        break
            yield self._finish()

    @property
    def has_route(self) -> bool:
        """Whether its session is open: what could be refused has been."""
        return self._run is not None and self._run.answer.session is not None

    def progress(self, *, is_done: bool) -> ChoiceProgress:
        """How far it is, for the id of its next event."""
        hops, exactness = (self.job.hops, self.job.exactness) if self.job is not None else ((), "E0")
        return ChoiceProgress(self.num_tokens, self.reasoning_tokens, hops, is_done, exactness)

    def join(self, stream: Stream, index: int) -> "Choice":
        """Be choice `index` of `stream`, which may have begun in an earlier attempt. Returns itself."""
        self.names, had = stream.names(index), stream.had(index)
        if had.is_done:  # it is not read again
            self.num_tokens, self.reasoning_tokens = had.tokens, had.thoughts
        return self

    @property
    def stopped_by(self) -> str | None:
        """The stop string that ended it."""
        return self._run.answer.stopped_by if self._run is not None else None

    @property
    def cached_tokens(self) -> int:
        """Tokens of the prompt that an earlier request had computed."""
        return self.job.cached_tokens if self.job is not None else 0

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
        self.num_tokens += 1
        self.num_shown += len(token.text)
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
            held = [] if self.is_cut else self._tools.finish()
            # The beginning of a call, where nothing but calls can be, is no text.
            pieces += [piece for piece in held if not (self._is_call and isinstance(piece, Content))]
        return self._keep(Delta(thought, pieces))

    def _call_id(self) -> str:
        """The id of the next call."""
        return f"call_{hashlib.sha256(self.names + len(self.calls).to_bytes(4, 'big')).hexdigest()[:24]}"

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
                    self.calls.append({"id": self._call_id(), "name": name, "arguments": ""})
                case CallArguments(index, text):
                    self.calls[index]["arguments"] += text
        return delta
