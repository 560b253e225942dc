"""The process in which costly requests are prepared: jobs come by stdin, answers leave by stdout, until stdin ends.

Its parent (pool.py) kills it when a job takes too long or its client leaves, and starts another; so nothing is kept here
but models' tokenizers. It ends by itself after twice the deadline's CPU time should the parent be gone, is nice to the
processes that serve once it has started, and may hold text/apart.py's MEMORY_BYTES. It loads neither torch nor transformers.
"""

import asyncio
import json
import os
import pickle
import signal
import struct
import sys
from array import array
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from io import BytesIO
from typing import Any, BinaryIO, NamedTuple

from tokenizers import Tokenizer as Backend

from manyhands import errors
from manyhands.api.http.body import BadField
from manyhands.api.names import NO_NAMES, ModelNames
from manyhands.api.preparation.desk import KEEP, PreparationDesk, Prepared, Speaker
from manyhands.api.preparation.prepare import prepare
from manyhands.core import SamplingParams
from manyhands.errors import BadRequest, ManyhandsError, ModelNotFound
from manyhands.text.apart import limit_memory
from manyhands.text.dialects import Dialect
from manyhands.text.grammar import check_grammar
from manyhands.text.reasoning import Thinking
from manyhands.text.received import ReceivedText
from manyhands.text.tokenizer import TextTokenizer

# A third of the CPU time of a process that serves, where there is not enough: with 10, a tenth of it, honest requests waited
# for more than 10 s at load 12 on 2 cores.
NICENESS = 5
_LENGTH = struct.Struct("<4I")  # of the JSON, of the numbers, of the texts, of what is shown as it is
IDS_A_TURN = 1 << 14  # that become Python's numbers in one turn of the event loop: a millisecond


@dataclass(frozen=True, slots=True)
class SpeakerSpec:
    """A Speaker as it travels. `tokenizer`: tokenizers' JSON."""

    name: str
    tokenizer: bytes
    chat_template: str | dict[str, str] | None
    special_tokens_map: Mapping[str, str]
    eos_ids: frozenset[int]
    context: int
    vocab_size: int
    longest: int
    precision: str
    dialect: Dialect | None
    thinking: Thinking | None
    special: Mapping[str, int]
    level: str | None
    recommended: dict[str, float] = field(default_factory=dict)
    is_plain: bool = True

    def load(self) -> Speaker:
        """The Speaker. Its tokenizer is loaded when it is first used: no request suffers from another model's file."""
        shared = {name: getattr(self, name) for name in Speaker.__slots__ if name != "tokenizer"}
        return Speaker(tokenizer=_Later(self), **shared)


class _Later:
    """The tokenizer of a spec."""

    def __init__(self, spec: SpeakerSpec) -> None:
        self._spec = spec
        self._loaded: TextTokenizer | None = None

    def load(self) -> TextTokenizer:
        """Raises BadRequest for what is none."""
        if self._loaded is None:
            try:
                backend = Backend.from_buffer(self._spec.tokenizer)
            except Exception as error:  # the tokenizers library raises bare Exception
                raise BadRequest(f"the tokenizer of {self._spec.name[:100]!r} cannot be loaded") from error
            self._loaded = TextTokenizer(backend, self._spec.special_tokens_map, chat_template=self._spec.chat_template)
        return self._loaded

    def __getattr__(self, name: str) -> Any:
        return getattr(self.load(), name)


@dataclass(frozen=True, slots=True)
class PreparationJob:
    """What a process is asked. `models`, `key`, `unnamed`: as PreparationDesk."""

    path: str
    body: bytes
    models: frozenset[str] | None
    key: str | None
    max_choices: int
    default_max_tokens: int | None
    names: ModelNames = NO_NAMES
    unnamed: str = ""


# -- the parent's side of the pipe ------------------------------------------------------------------------------------


def to_frame(value: Any) -> bytes:
    """A PreparationJob, or at first the specs, for the child: from parent to child only, which trusts it."""
    data = pickle.dumps(value)
    return len(data).to_bytes(4, "little") + data


class AnswerParts(NamedTuple):
    """An answer: JSON of its small fields; ids of prompts, and of received texts with where they begin (u32); the received
    texts (UTF-8); JSON that is sent on as it is."""

    said: bytes
    numbers: bytes = b""
    texts: bytes = b""
    shown: bytes = b""


def lengths_of(head: bytes) -> tuple[int, ...]:
    """How many bytes of each of AnswerParts follow an answer's head."""
    return _LENGTH.unpack(head)


HEAD_BYTES = _LENGTH.size
READY = b"!"  # what the child says when it has loaded the models


async def read_answer(parts: AnswerParts) -> Prepared:
    """An answer as it was meant; other work is done between parts of its numbers. Raises what the child raised, and as KEEP
    before anything is made of them."""
    told = json.loads(parts.said)
    if "error" in told:
        raise _error(told)
    KEEP.get()(told["size"])
    numbers, texts = _Numbers(parts.numbers), BytesIO(parts.texts)
    prompts = [await numbers.take(length) for length in told.pop("lengths")]
    received: list[ReceivedText] = []
    for size, length in told.pop("received"):
        ids, starts = await numbers.take(length), await numbers.take(length)
        received.append(ReceivedText(texts.read(size).decode(), ids, starts))
    params = told.pop("params")
    for name in ("logit_bias", "stop", "stop_ids"):
        params[name] = tuple(tuple(v) if isinstance(v, list) else v for v in params[name])
    return Prepared(prompts=prompts, params=SamplingParams(**params), received=received, shown=parts.shown, **told)


class _Numbers:
    """The numbers of an answer, taken from the front; other work is done between IDS_A_TURN of them."""

    def __init__(self, data: bytes) -> None:
        self._numbers, self._at = array("I", data), 0

    async def take(self, count: int) -> tuple[int, ...]:
        found: list[int] = []
        end = self._at + count
        for start in range(self._at, end, IDS_A_TURN):
            found += self._numbers[start : min(start + IDS_A_TURN, end)]
            await asyncio.sleep(0)
        self._at = end
        return tuple(found)


def _error(told: Mapping[str, Any]) -> ManyhandsError:
    """What `to_answer` was given."""
    match told["error"]:
        case BadField.__name__:
            return BadField(told["message"], told["param"], told["api_code"])
        case ModelNotFound.__name__:
            return ModelNotFound(told["message"], told["model"])
        case name:
            error: ManyhandsError = getattr(errors, name, BadRequest)(told["message"])
            return error


# -- the child --------------------------------------------------------------------------------------------------------


def to_answer(made: Prepared | ManyhandsError) -> bytes:
    """What `read_answer` reads, behind its head."""
    numbers, texts, shown = array("I"), list[bytes](), b""
    if isinstance(made, Prepared):
        for prompt in made.prompts:
            numbers.extend(prompt)
        for one in made.received:
            numbers.extend(one.ids)
            numbers.extend(one.starts)
            texts.append(one.text.encode())
        shown = made.shown
        told = {name: getattr(made, name) for name in Prepared.__slots__ if name not in ("prompts", "params", "shown")}
        told |= {"lengths": [len(prompt) for prompt in made.prompts], "params": asdict(made.params)}
        told["received"] = [(len(text), len(one.ids)) for text, one in zip(texts, made.received, strict=True)]
    else:
        param, api_code = getattr(made, "param", None), made.api_code
        told = {"error": type(made).__name__, "message": str(made), "param": param, "api_code": api_code}
        told["model"] = getattr(made, "model", "")
    parts = AnswerParts(json.dumps(told, ensure_ascii=False).encode(), numbers.tobytes(), b"".join(texts), shown)
    return _LENGTH.pack(*map(len, parts)) + b"".join(parts)


def _do(job: PreparationJob, speakers: Mapping[str, Speaker]) -> bytes:
    numbers = (job.max_choices, job.default_max_tokens)
    desk = PreparationDesk(speakers, *numbers, check_grammar, job.models, job.key, names=job.names, unnamed=job.unnamed)
    try:
        return to_answer(prepare(job.path, job.body, desk))
    except ManyhandsError as error:
        return to_answer(error)
    except MemoryError:
        os._exit(1)  # which its parent takes for that; what is held would be lacking for the next request


def _read(stream: BinaryIO) -> Any:
    head = stream.read(4)
    if len(head) < 4:
        raise SystemExit(0)
    return pickle.loads(stream.read(int.from_bytes(head, "little")))


def main(deadline_s: int) -> None:
    """Answer jobs until stdin ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    limit_memory()
    read, write = partial(_read, sys.stdin.buffer), sys.stdout.buffer
    speakers = {spec.name: spec.load() for spec in read()}
    if len(speakers) == 1:  # beside the first request's deadline
        next(iter(speakers.values())).tokenizer.load()
    os.nice(NICENESS)
    write.write(READY)
    write.flush()
    while True:
        job = read()
        signal.setitimer(signal.ITIMER_PROF, 2 * deadline_s)
        answer = _do(job, speakers)
        signal.setitimer(signal.ITIMER_PROF, 0)
        write.write(answer)
        write.flush()


if __name__ == "__main__":
    main(int(sys.argv[1]))
