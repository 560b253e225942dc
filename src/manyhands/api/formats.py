"""The models of a gateway as texts: each one's tokenizer, chat template and grammars, and who prepares requests with them.

bytes ─ ModelFormats.prepare ─► Prepared: at once if it is small and plain, else in a process (preparation/pool.py)
"""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from manyhands.api.gateway import Gateway
from manyhands.api.http.body import BadField
from manyhands.api.limits import default_tokens
from manyhands.api.preparation.desk import KEEP, NeedsProcess, PreparationDesk, Prepared, Speaker
from manyhands.api.preparation.pool import INLINE_BYTES, FairTurns, Preparing, TurnQueue
from manyhands.api.preparation.prepare import prepare
from manyhands.api.preparation.process import PreparationJob, SpeakerSpec
from manyhands.api.run import Caller
from manyhands.errors import BadRequest, ModelNotFound
from manyhands.origin import Origin
from manyhands.plain import one_line
from manyhands.text.dialects import PYTHON_TAG, find_dialect
from manyhands.text.grammar import Grammar, Grammars
from manyhands.text.kept_grammars import KeptGrammars
from manyhands.text.prompt import learn_templates
from manyhands.text.reasoning import find_level, find_thinking
from manyhands.text.tokenizer_parts import check_vocabulary, is_plain


@dataclass(frozen=True, slots=True)
class ModelFormat:
    """The text format of a served model, of its tokenizer and chat template, read once. `spec`: the same for a process."""

    origin: Origin
    speaker: Speaker
    spec: SpeakerSpec
    grammars: Grammars

    @classmethod
    def of(cls, name: str, origin: Origin, kept: KeptGrammars | None = None) -> "ModelFormat":
        """Blocking: 0.2 s for 150,000 tokens, and half a second for a large chat template."""
        model = origin.model
        tokenizer = model.tokenizer
        learn_templates(tokenizer)
        dialect, thinking = find_dialect(tokenizer), find_thinking(tokenizer)
        markers = {PYTHON_TAG, *(dialect.marks if dialect else ())}
        markers |= thinking.marks if thinking else set()
        ids = tokenizer.special_ids
        shared: dict[str, Any] = {
            "name": name,
            "context": model.context_length,
            "vocab_size": model.vocab_size,
            "longest": check_vocabulary(tokenizer.get_vocab()),
            "precision": model.precision,
            "dialect": dialect,
            "thinking": thinking,
            "special": {text: ids[text] for text in markers if text in ids and ids[text] not in model.eos_ids},
            "level": find_level(tokenizer),
            "recommended": model.recommended,
            "is_plain": is_plain(tokenizer.backend_tokenizer),
        }
        spec = SpeakerSpec(
            tokenizer=tokenizer.backend_tokenizer.to_str().encode(),
            chat_template=tokenizer.chat_template,
            special_tokens_map=tokenizer.special_tokens_map,
            eos_ids=model.eos_ids,
            **shared,
        )
        grammars = Grammars(tokenizer, model.vocab_size, model.eos_ids, kept)
        return cls(origin, Speaker(tokenizer=tokenizer, **shared), spec, grammars)


class ModelFormats:
    """The format of every model of a gateway, and where requests are prepared for them."""

    def __init__(self, gateway: Gateway) -> None:
        self.gateway = gateway
        self._known: dict[str, ModelFormat] = {}
        self._speakers: dict[str, Speaker] = {}
        self._specs: list[SpeakerSpec] = []
        self.preparing = Preparing(lambda: self._specs)
        self._compiler = ThreadPoolExecutor(1, "grammar")  # llguidance lets the loop run meanwhile
        self._compiling = TurnQueue(FairTurns(1))
        self._kept = KeptGrammars()
        self._next_expiry: asyncio.TimerHandle | None = None
        gateway.parts.append(self)

    async def open(self) -> None:
        """Read the models' text formats, where that is not done."""
        origins = self.gateway.origins
        if all(name in self._known and self._known[name].origin is origin for name, origin in origins.items()):
            return
        known = {
            name: model_format for name, model_format in self._known.items() if origins.get(name) is model_format.origin
        }
        for name, origin in [(name, origin) for name, origin in origins.items() if name not in known]:
            try:
                known[name] = await asyncio.to_thread(ModelFormat.of, name, origin, self._kept)
            except Exception as error:  # of files from outside: jinja2 and the tokenizers' library raise what they like
                self.gateway.refuse(name, f"its tokenizer or chat template cannot be used ({one_line(error, 200)})")
        self._known = known
        self._speakers = {name: model_format.speaker for name, model_format in known.items()}
        self._specs = [model_format.spec for model_format in known.values()]

    async def close(self) -> None:
        """End the processes and the thread."""
        await self.preparing.close()
        if self._next_expiry is not None:
            self._next_expiry.cancel()
        self._compiler.shutdown(wait=False, cancel_futures=True)

    def known(self, model: str) -> ModelFormat:
        """The format of a served model. Raises ModelNotFound if it cannot be used."""
        if model not in self._known:
            raise self.gateway.absent(model)
        return self._known[model]

    async def prepare(self, path: str, body: bytes, caller: Caller, client: str) -> tuple[ModelFormat, Prepared]:
        """What a request asks for; at once if it is small and plain, else in a process. `client`: whose turn, without a key.

        A model that is offered is loaded first. Raises as `prepare`, Preparing.run and Gateway.unnamed do. Cancelling ends the
        work.
        """
        await self.open()
        try:
            return await self._prepare(path, body, caller, client)
        except ModelNotFound as error:
            meant = error.model or self.gateway.unnamed(caller)
            await self.gateway.bring(meant)
            await self.open()
            if self.gateway.names.find(meant, self.gateway.models) not in self._known:
                raise self.gateway.absent(meant) from error
        return await self._prepare(path, body, caller, client, meant)

    async def _prepare(
        self, path: str, body: bytes, caller: Caller, client: str, unnamed: str = ""
    ) -> tuple[ModelFormat, Prepared]:
        """`unnamed`: the model of a request that names none, where that has been found out."""
        limits, names, own = self.gateway.limits, self.gateway.names, self.gateway.own
        if names.aliases:  # they stand behind the names of what is offered and would be loaded
            names = replace(names, offered=frozenset(self.gateway.models))
        who = (caller.models, caller.name)
        unnamed = unnamed or (own if own in self._speakers and (caller.models is None or own in caller.models) else "")
        made, numbers = None, (limits.max_choices, default_tokens(limits, caller.quota))
        if len(body) <= INLINE_BYTES:
            desk = PreparationDesk(
                self._speakers, *numbers, self._accept, *who, is_inline=True, names=names, unnamed=unnamed
            )
            try:
                made = prepare(path, body, desk)
                KEEP.get()(made.size)
            except NeedsProcess:
                pass
            if 2 * len(body) > INLINE_BYTES:  # of a conversation, which grows
                self.preparing.expect()
        if made is None:
            job = PreparationJob(path, body, *who, *numbers, names, unnamed)
            made = await self.preparing.run(caller.name or client, job)
        return self._known[made.model], made

    def _accept(self, grammar: str) -> int:
        kept = [model_format.grammars.size(grammar) for model_format in self._known.values()]
        if not (sizes := [size for size in kept if size is not None]):
            raise NeedsProcess
        return max(sizes)

    async def compile(self, model_format: ModelFormat, made: Prepared, who: str) -> Grammar | None:
        """The grammar of a request, which a process has checked; in the turn of `who` where it has to be compiled.

        Raises BadField, RateLimited.
        """
        if made.grammar is None:
            return None
        thinking = model_format.speaker.thinking
        if (copy := model_format.grammars.copy(made.grammar, thinking, is_open=made.is_open)) is not None:
            return copy
        compiling = partial(model_format.grammars.compile, made.grammar, thinking, is_open=made.is_open)
        try:
            async with self._compiling.of(who):
                compiled = await asyncio.get_running_loop().run_in_executor(self._compiler, compiling)
        except BadRequest as error:
            raise BadField(f"{made.grammar_field}: {error}", made.grammar_field) from error
        if self._next_expiry is None:
            self._expire()
        return compiled

    def _expire(self) -> None:
        """Drop the grammars that were not asked for again, now and whenever the next is due."""
        self._next_expiry = None
        if (left_s := self._kept.expire()) is not None:
            self._next_expiry = asyncio.get_running_loop().call_later(left_s, self._expire)
