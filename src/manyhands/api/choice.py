"""What the routes that generate share: from a request to what is asked of the gateway, and from tokens to what is shown.

bytes ─ ModelFormats.prepare ─► Prepared ─ GenerationPlan (per choice) ─► gateway.run ─ Token ─► Choice.feed ─► deltas
"""

import hashlib
import secrets
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

from manyhands.api.delta import Delta
from manyhands.api.formats import ModelFormat, ModelFormats
from manyhands.api.gateway import Gateway
from manyhands.api.openai.schema import ROUTE_WISHES
from manyhands.api.preparation.desk import Prepared
from manyhands.api.run import Admitted, Api, Ask, Caller, Job, Run
from manyhands.api.streams import ChoiceProgress, Stream
from manyhands.origin import Origin, Token
from manyhands.route.offer import Rules
from manyhands.text.grammar import Grammar
from manyhands.text.readers import answer_reader
from manyhands.text.reasoning import Thinking
from manyhands.text.received import ReceivedText
from manyhands.text.tools import CallArguments, CallStart, Content, Piece, ToolReader


@dataclass(slots=True)
class GenerationPlan:
    """One choice: what to ask, and how to read what comes. `index` is that of the choice among those of its prompt, `grammar`
    its own copy of what the answer must look like."""

    model_format: ModelFormat
    made: Prepared
    prompt: Sequence[int]
    index: int = 0
    received: ReceivedText | None = None
    grammar: Grammar | None = None

    @property
    def thinking(self) -> Thinking | None:
        """The model's, where the prompt is a conversation."""
        return self.model_format.speaker.thinking if self.made.is_talk else None

    def choose(self, api: Api, caller: Caller, entry: Admitted) -> tuple[Ask, "Choice"]:
        """What to ask, and its reader."""
        made, params = self.made, self.made.params
        left = self.model_format.speaker.context - len(self.prompt)
        if self.index or left < params.max_tokens:
            seed = _seed_of(params.seed, self.index) if self.index else params.seed
            params = replace(params, seed=seed, max_tokens=min(params.max_tokens, left))
        shown = made.functions or self.thinking is not None
        marks = {token: text for text, token in self.model_format.speaker.special.items()} if shown else {}
        ours = made.given.get("manyhands", {})
        path, draft = ((made.given | ours).get(*each) for each in (("path", "ring"), ("draft", "")))
        rules = _rules_of(self.model_format.origin, made.given | ours)
        how = (path, self.grammar, entry, marks, draft, rules)
        ask = Ask(made.model, api, self.prompt, params, caller, *how, is_fit=True, received=self.received)
        return ask, Choice(self)


def _rules_of(origin: Origin, given: Mapping[str, Any]) -> Rules:
    """How the route is chosen: as the request says, else as the node's configuration does."""
    told = {rule: given[name] for name, rule in ROUTE_WISHES.items() if name in given}
    rules = Rules.of(origin.node.request)
    return replace(rules, **told) if told else rules


async def plans_of(formats: ModelFormats, model_format: ModelFormat, made: Prepared, who: str) -> list[GenerationPlan]:
    """One plan a choice: every prompt has `count` of them. Their grammar is compiled once, in the turn of `who`.

    Raises BadField for a grammar that cannot be, RateLimited.
    """
    choices = [(prompt, index) for prompt in made.prompts for index in range(made.count)]
    texts: Sequence[ReceivedText | None] = made.received or [None] * len(choices)
    grammar = await formats.compile(model_format, made, who)
    copies = [None if grammar is None else grammar.copy() for _ in choices]
    return [
        GenerationPlan(model_format, made, *choice, text, copy)
        for choice, text, copy in zip(choices, texts, copies, strict=True)
    ]


async def ask_one(
    formats: ModelFormats, path: str, api: Api, body: bytes, caller: Caller, client: str
) -> tuple[Prepared, Ask, "Choice"]:
    """Charge and prepare a request for one choice: what to ask, and its reader.

    Raises as ModelFormats.prepare, and RateLimited.
    """
    entry = formats.gateway.enter(caller, api)
    model_format, made = await formats.prepare(path, body, caller, client)
    (plan,) = await plans_of(formats, model_format, made, caller.name or client)
    ask, choice = plan.choose(api, caller, entry)
    return made, ask, choice


def _seed_of(seed: int, index: int) -> int:
    """The seed of the index-th choice: another stream of noise, the same every time."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{index}".encode()).digest()[:8], "little")


# -- reading ----------------------------------------------------------------------------------------------------------


class Choice:
    """Reads the text of one choice into thoughts, content and calls, and keeps them."""

    def __init__(self, plan: GenerationPlan) -> None:
        made, dialect = plan.made, plan.model_format.speaker.dialect
        self._thoughts = answer_reader(plan.thinking, made.functions, is_open=made.is_open)
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
            pieces += [] if self.is_cut else self._tools.finish()
        if self._is_call:  # the beginning of a call, where nothing but calls can be, is no text
            pieces = [piece for piece in pieces if not isinstance(piece, Content)]
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
