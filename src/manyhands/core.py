"""The nouns of manyhands, shared by every package. No I/O, no torch.

node      a process with an Ed25519 key; its NodeId is the public key in hex.
swarm     the nodes that share a swarm secret. ticket: the text that lets a machine join one.
model     a checkpoint; its ModelId is the SHA-256 of its manifest.
span      layers [start, end) of a model on one node. Half-open here; people read and write "0-7" (inclusive).
ends      embedding, final norm and head.
origin    the node that owns a request: tokens, ends, sampler, drafter.
route     spans that cover all layers, in order. hop: one span of a route serving one session.
session   one request's cache on the hops of its route. position: absolute token index.
epoch     version of a session's route. step: run layers on new positions. window: a step that carries drafts.
"""

import hashlib
import itertools
import operator
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, NewType

from manyhands.errors import BadRequest, CutError

NodeId = NewType("NodeId", str)  # 64 hex digits: an Ed25519 public key
ModelId = NewType("ModelId", str)  # 64 hex digits: SHA-256 of a manifest
# 16 bytes, by which its origin is known (wire/signed.py), and which only that and the session's hops may know.
SessionId = NewType("SessionId", bytes)

# How weights are held; "+c8": beside caches that hold keys and values as codes of 8 bit.
Precision = Literal["bf16", "fp32", "fp16", "w8", "w4", "bf16+c8", "w8+c8", "w4+c8"]
PathKind = Literal["ring", "star"]
EndsAt = Literal["origin", "edges"]
# E0 same bits, E1 same tokens, E2 same distribution up to rounding (docs/exactness.md).
Exactness = Literal["E0", "E1", "E2"]
FinishReason = Literal["stop", "length"]

PRECISIONS: tuple[Precision, ...] = ("bf16", "fp32", "fp16", "w8", "w4", "bf16+c8", "w8+c8", "w4+c8")
# Weights of 8 and 4 bit in groups (docs/arithmetic.md), rows in bf16.
SMALL_WEIGHTS: Final[frozenset[Precision]] = frozenset({"w8", "w4"})
_WITH_CODES: Final[Mapping[Precision, Precision]] = {"bf16": "bf16+c8", "w8": "w8+c8", "w4": "w4+c8"}
_WEIGHTS: Final[Mapping[Precision, Precision]] = {coded: plain for plain, coded in _WITH_CODES.items()}
# Steps that may be under way to one hop without having been computed: the most that a request may ask for.
MAX_CREDITS: Final = 64
MAX_STEP_IDS: Final = 16_384  # rows of one step that come with token ids: so many are decoded in a millisecond
MAX_BIASES, MAX_STOP_IDS, MAX_STOPS = 1024, 64, 16  # of one request
MAX_TOKENS = 1 << 20  # of one answer
ORIGIN_HOP = 255  # the hop index that means "the origin"; a route has at most 255 hops


def weight_precision(precision: Precision) -> Precision:
    """How weights are held at a precision, whatever its caches hold."""
    return _WEIGHTS.get(precision, precision)


def caches_codes(precision: Precision) -> bool:
    """Whether caches hold keys and values as codes of 8 bit."""
    return precision in _WEIGHTS


def with_codes(precision: Precision) -> Precision:
    """The same weights beside caches of codes. Raises BadRequest where there are none."""
    if caches_codes(precision):
        return precision
    if precision not in _WITH_CODES:
        raise BadRequest(f"caches of 8 bit go with weights in {', '.join(_WITH_CODES)}, not in {precision}")
    return _WITH_CODES[precision]


def public_id(session: SessionId) -> str:
    """What logs, events, traces and the API call a session: 16 hex digits, the same on all its nodes. Its id stays secret."""
    return hashlib.sha256(b"manyhands session name\0" + session).hexdigest()[:16]


@dataclass(frozen=True, slots=True, order=True)
class Span:
    """Layers [start, end) of a model; never empty. Raises CutError if it would be."""

    start: int
    end: int

    def __post_init__(self) -> None:
        if not 0 <= self.start < self.end:
            raise CutError(f"span [{self.start}, {self.end}) is empty or negative")

    @classmethod
    def parse(cls, text: str) -> "Span":
        """Read "0-7" (inclusive, as people write it) or "5". Raises CutError."""
        match = re.fullmatch(r"\s*(\d{1,6})\s*(?:-\s*(\d{1,6})\s*)?", text)
        if match is None:
            raise CutError(f"layers {text!r} are not of the form 0-7 (first and last layer, counted from 0)")
        first = int(match[1])
        last = int(match[2]) if match[2] is not None else first
        if last < first:
            raise CutError(f"layers {text!r}: the last layer comes before the first")
        return cls(first, last + 1)

    def __str__(self) -> str:
        return f"{self.start}-{self.end - 1}" if len(self) > 1 else str(self.start)

    def __len__(self) -> int:
        return self.end - self.start

    def overlaps(self, other: "Span") -> bool:
        """Whether a layer is in both."""
        return self.start < other.end and other.start < self.end

    def covers(self, other: "Span") -> bool:
        return self.start <= other.start and other.end <= self.end


def check_cover(spans: Sequence[Span], num_layers: int) -> None:
    """Raise CutError unless `spans`, in order, cover layers [0, num_layers) once each."""
    if not spans:
        raise CutError("a cut needs at least one span")
    reached = 0
    for span in spans:
        if span.end > num_layers:
            raise CutError(f"layers {span} are out of range: the model has layers 0-{num_layers - 1}")
        if span.start > reached:
            raise CutError(f"no node holds layers {Span(reached, span.start)}: the cut has a hole before {span}")
        if span.start < reached:
            raise CutError(f"layers {span} overlap the span before them, which ends with layer {reached - 1}")
        reached = span.end
    if reached < num_layers:
        raise CutError(f"no node holds layers {Span(reached, num_layers)}: the cut ends too early")


def parse_cut(text: str, num_layers: int) -> list[Span]:
    """Read "0-7,8-15,16-23" and check that it covers the model. Raises CutError."""
    spans = [Span.parse(part) for part in text.split(",")]
    check_cover(spans, num_layers)
    return spans


def even_cut(num_layers: int, num_nodes: int) -> list[Span]:
    """Cut `num_layers` into `num_nodes` spans of nearly equal length, longer ones first. Raises CutError."""
    if not 1 <= num_nodes <= num_layers:
        raise CutError(f"{num_layers} layers cannot be cut for {num_nodes} nodes: use 1 to {num_layers}")
    base, extra = divmod(num_layers, num_nodes)
    edges = [0]
    for index in range(num_nodes):
        edges.append(edges[-1] + base + (index < extra))
    return [Span(a, b) for a, b in itertools.pairwise(edges)]


@dataclass(frozen=True, slots=True)
class NodeAddr:
    """Where a node can be dialled, and which node to expect there (None: any member of the swarm)."""

    host: str
    port: int
    node: NodeId | None = None

    @classmethod
    def parse(cls, text: str, node: NodeId | None = None) -> "NodeAddr":
        """Read "host:port" or "[v6]:port". Raises BadRequest."""
        match = re.fullmatch(r"\[([0-9a-fA-F:.%\w]+)\]:(\d{1,5})|([^\s:\[\]]+):(\d{1,5})", text.strip())
        if match is None or int(match[2] or match[4]) > 65535:
            raise BadRequest(f"address {text!r:.80} is not of the form host:port, with a port from 0 to 65535")
        return cls(match[1] or match[3], int(match[2] or match[4]), node)

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


# Ends the arithmetic class of a machine whose rows depend on each other: answers through it are never called exact.
UNPROVEN: Final = "/rows-mix"


@dataclass(frozen=True, slots=True)
class SpanInfo:
    """What a node says of a span it hosts. Two spans fit into one route iff `model` and `precision` are equal."""

    model: ModelId
    model_name: str
    span: Span
    num_layers: int
    precision: Precision
    arithmetic: str  # arithmetic class: equal strings compute equal bits (docs/exactness.md)
    hidden_size: int
    context_length: int  # positions the model was built for
    has_ends: bool  # this node also loaded embedding, norm and head (ends = "edges")
    free_tokens: int  # cache that can still be leased, in positions
    max_sessions: int
    is_spare: bool = False  # serves only where no other node does: in a repair, or a gap
    is_loaded: bool = True  # else the node loads the part it is asked for when a session is opened on it


@dataclass(frozen=True, slots=True)
class SpanLoad:
    """How busy a span is and how fast, as its node measured it before the work it describes began (IN-W02).

    Seconds are those of one layer: of a decode step, and of one prefill row. 0: not measured yet. `p95_s`: within which 95 %
    of the last decode steps were through the whole span, the wait for the device included. `memory_bytes`: what its weights
    and its cache are given.
    """

    sessions: int = 0
    queue: int = 0  # steps that wait for the device
    layer_s: float = 0.0
    row_s: float = 0.0
    p95_s: float = 0.0
    memory_bytes: int = 0


MIN_TOP_P: Final = 1e-9  # the likeliest token alone
# Fields of SamplingParams that a model's publisher may recommend (text/generation_config.py).
RECOMMENDED: Final = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one request draws its tokens. Raises BadRequest naming the parameter, its value and its limits.

    temperature 0 is greedy. `seed` keys the noise of every position. `deterministic` switches every processor off
    (plain argmax of the logits). `logprobs` is the number of alternatives reported per token, None for no logprobs.
    """

    max_tokens: int = 128
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0  # 0: all
    min_p: float = 0.0
    seed: int = 0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    stop: tuple[str, ...] = ()
    stop_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    deterministic: bool = False

    def __post_init__(self) -> None:
        for name in ("max_tokens", "top_k", "seed", "logprobs"):
            object.__setattr__(self, name, _whole(getattr(self, name)))
        object.__setattr__(self, "logit_bias", tuple([(_whole(token), bias) for token, bias in self.logit_bias]))
        object.__setattr__(self, "stop_ids", tuple(map(_whole, self.stop_ids)))
        _within("max_tokens", self.max_tokens, 1, MAX_TOKENS)
        _within("temperature", self.temperature, 0.0, 100.0)
        _within("top_p", self.top_p, MIN_TOP_P, 1.0)
        _within("top_k", self.top_k, 0, 1 << 24)
        _within("min_p", self.min_p, 0.0, 1.0)
        _within("seed", self.seed, 0, (1 << 64) - 1)
        _within("repetition_penalty", self.repetition_penalty, 1e-3, 1e3)
        _within("presence_penalty", self.presence_penalty, -100.0, 100.0)
        _within("frequency_penalty", self.frequency_penalty, -100.0, 100.0)
        if self.logprobs is not None:
            _within("logprobs", self.logprobs, 0, 20)
        if len(self.logit_bias) > MAX_BIASES or len(self.stop_ids) > MAX_STOP_IDS:
            counts = f"{len(self.logit_bias)} and {len(self.stop_ids)}"
            raise BadRequest(f"logit_bias and stop_ids have {counts} tokens; at most {MAX_BIASES} and {MAX_STOP_IDS}")
        for token, bias in self.logit_bias:
            _within("logit_bias token", token, 0, 1 << 24)
            _within("logit_bias", bias, -1e4, 1e4)
        if not isinstance(self.stop, (tuple, list)) or any(not isinstance(text, str) for text in self.stop):
            raise BadRequest(f"stop is {self.stop!r:.80}; it must be a tuple of texts, as in ('END',)")
        if len(self.stop) > MAX_STOPS or any(not 1 <= len(s) <= 256 for s in self.stop):
            raise BadRequest(f"stop takes at most {MAX_STOPS} strings of 1 to 256 characters each")


def _whole(value: Any) -> Any:
    """A whole number of another library (numpy's, say) as an int; all else as it is."""
    return operator.index(value) if hasattr(value, "__index__") and not isinstance(value, bool) else value


def _within(name: str, value: float, low: float, high: float) -> None:
    """Raise BadRequest unless `value` is in these limits and, where `low` is a whole number, one too: frames hold no other."""
    if isinstance(value, bool) or not isinstance(value, int if isinstance(low, int) else (int, float)):
        raise BadRequest(f"{name} is {value!r:.60}; it must be a {'whole ' * isinstance(low, int)}number")
    if not low <= value <= high:  # also refuses NaN
        raise BadRequest(f"{name} is {value!r:.60}; it must be between {low} and {high}")


@dataclass(slots=True)
class EdgeHealth:
    """What is known of one link, for people and for routing. Times in seconds."""

    rtt_s: float | None = None
    bytes_sent: int = 0
    bytes_received: int = 0
    frames_sent: int = 0
    frames_received: int = 0
    path_kind: str = "direct"
    last_error: str | None = None
    rtt_samples: list[float] = field(default_factory=list)  # the last 32
