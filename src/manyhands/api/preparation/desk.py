"""What requests are prepared by, and what comes of it: the models as `prepare` sees them, its limits, its result."""

import sys
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Final

from manyhands.api.names import NO_NAMES, ModelNames
from manyhands.core import SamplingParams
from manyhands.text.dialects import Dialect
from manyhands.text.prompt import Tokenizer
from manyhands.text.reasoning import Thinking
from manyhands.text.received import ReceivedText

Object = dict[str, Any]
FORMATS: Final = ("response_format", "text", "output_config", "format")  # where a path says what the answer looks like
ID_BYTES: Final = 40  # of memory for a token's id: Python's number, and its place in a tuple
# Counts the bytes of what is prepared for the request at hand (http/app.py). Raises TooLarge, RateLimited.
KEEP: ContextVar[Callable[[int], None]] = ContextVar("keep", default=lambda size: None)


class NeedsProcess(Exception):
    """It would cost more than may be spent inline."""


@dataclass(frozen=True, slots=True)
class Speaker:
    """A served model as requests are prepared for it."""

    name: str
    tokenizer: Tokenizer
    context: int
    vocab_size: int
    longest: int  # bytes of the longest token
    precision: str
    dialect: Dialect | None
    thinking: Thinking | None
    special: Mapping[str, int]  # markers that are special tokens, which decoding would drop
    level: str | None  # the template's variable that takes reasoning_effort
    recommended: dict[str, float] = field(default_factory=dict)  # text/generation_config.py
    is_plain: bool = True  # texts may be tokenised on the event loop (text/tokenizer_parts.py)

    @property
    def has_level_none(self) -> bool:
        """Whether no thoughts are a level too, as of Inkling."""
        return self.level is not None and self.thinking is not None and self.thinking.heads == "blocks"

    @property
    def can_be_thoughtless(self) -> bool:
        """Whether the template can be told that the model shall not think."""
        return self.has_level_none or (self.thinking is not None and self.thinking.switch is not None)


@dataclass(frozen=True, slots=True)
class PreparationDesk:
    """What requests are prepared by. `models`: those the caller may use (None: all).

    `accept` is given every grammar, and says how many bytes it takes once it is compiled: it raises BadRequest for one that
    cannot be, or NeedsProcess.
    """

    speakers: Mapping[str, Speaker]
    max_choices: int
    default_max_tokens: int | None  # None: half of what the context leaves
    accept: Callable[[str], int]
    models: frozenset[str] | None = None
    key: str | None = None  # its name, for the error
    is_inline: bool = False
    names: ModelNames = NO_NAMES
    unnamed: str = ""  # the model of a request that names none
    spent: list[int] = field(default_factory=list)  # what was tokenised inline for this request (talk.py)


@dataclass(slots=True)
class Prepared:
    """What to ask. `given`: the fields but those that hold the prompt; `count`: choices of each prompt; `size`: bytes of
    memory that it takes, its compiled grammar among them."""

    model: str
    given: Object
    prompts: list[tuple[int, ...]]
    params: SamplingParams
    count: int = 1
    grammar: str | None = None
    is_open: bool = False  # the prompt ends within a thought
    functions: Mapping[str, Mapping[str, Any]] = field(
        default_factory=dict
    )  # that may be called, with their parameters
    is_parallel: bool = True
    is_call: bool = False  # a grammar allows nothing but calls
    is_talk: bool = False  # the answer may begin with thoughts
    num_tokens: int = 0  # of what was only to be counted
    received: list[ReceivedText] = field(default_factory=list)  # what the client has of each choice, or none
    shown: bytes = b""  # of the answer what is long, as JSON: made here, the event loop only sends it
    size: int = 0

    @property
    def grammar_field(self) -> str:
        """The field that the grammar is made from."""
        named = [name for name in FORMATS if name in self.given]
        return "tools" if self.functions or not named else named[0]


def bytes_of(made: Prepared) -> int:
    """What it takes in memory, but for its grammar once that is compiled."""
    num_ids = sum(map(len, made.prompts)) + sum(len(one.ids) + len(one.starts) for one in made.received)
    params, texts = made.params, [one.text for one in made.received]
    rest = [made.given, made.functions, made.grammar, params.logit_bias, params.stop, params.stop_ids, texts]
    return ID_BYTES * num_ids + len(made.shown) + _bytes_within(rest)


def _bytes_within(values: list[Any]) -> int:
    """Of values as JSON has them, with all that is in them. A name that several objects have counts once, as it is kept."""
    total, names = 0, set[str]()
    while values:
        total += sum(map(sys.getsizeof, values))
        dicts = [value for value in values if isinstance(value, dict)]
        names.update(*dicts)
        lists = [*map(dict.values, dicts), *(value for value in values if isinstance(value, list | tuple))]
        values = [value for each in lists for value in each]
    return total + sum(map(sys.getsizeof, names))
