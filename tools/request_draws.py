"""What a life of requests (request_lives.py) consists of: nodes, their devices, and requests, drawn before it begins."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any, TypeVar

from manyhands.config import WorkerConfig
from manyhands.core import NodeAddr, NodeId, SamplingParams, Span
from manyhands.origin import Answer
from manyhands.origin.node import FullNode
from manyhands.testing.swarm import node_id
from manyhands.worker.slot import CopySlot
from tools.request_faults import LAYERS, covers

T = TypeVar("T")
Ids = tuple[int, ...]


class TurnDevice:
    """A Device that computes on the event loop, one function after another, each after a part of `step_s` and after `extra_s`
    of its clock. The next function raises `failing`, if that is set."""

    computes_here = False
    num_threads = most_threads = 1

    def __init__(self, draw: Random, step_s: float) -> None:
        self.copying, self.step_s, self.extra_s = CopySlot(), step_s, 0.0
        self.failing: Exception | None = None
        self._draw, self._turn = draw, asyncio.Lock()

    def run(self, function: Callable[[], T]) -> "asyncio.Future[T]":
        return asyncio.ensure_future(self._run(function))

    async def _run(self, function: Callable[[], T]) -> T:
        async with self._turn:
            await asyncio.sleep(self.step_s * self._draw.random() + self.extra_s)
            error, self.failing = self.failing, None
            if error is not None:
                raise error
            return function()


@dataclass
class Asked:
    """A request: it begins `begins_s` after the life, or after the end of the request `after`, with whose session it goes on if
    it `adopts`. Its client leaves after `cancel_at` tokens or `cancel_s` seconds and pauses between tokens. `wanted` is what a
    lone node answers, `got` what came."""

    number: int
    origin: int
    begins_s: float
    prompt: Ids
    params: SamplingParams
    options: dict[str, Any]
    drafts: str
    handle: bytes | None = None
    after: "Asked | None" = None
    adopts: bool = False
    cancel_at: int | None = None
    cancel_s: float | None = None
    pauses: Sequence[float] = ()
    wanted: Answer | None = None
    got: Answer | None = None
    outcome: str = ""
    error: BaseException | None = None
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    def __str__(self) -> str:
        got, want = ([] if answer is None else answer.token_ids for answer in (self.got, self.wanted))
        after = "" if self.after is None else f", {'adopting' if self.adopts else 'after'} {self.after.number}"
        asked = f"{len(self.prompt)} ids at {self.params.temperature:g}{after}, {self.drafts}, {self.options}"
        return (
            f"request {self.number} of origin {self.origin} ({asked}): {self.outcome}, {len(got)} of {len(want)} tokens"
        )


@dataclass
class Place:
    """A node: what it serves, and the process that does now. `is_up` as long as that lives."""

    name: str
    spans: list[Span]
    worker: WorkerConfig
    step_s: float
    is_spare: bool
    can_load: int  # layers that no other holds
    addr: NodeAddr = field(default_factory=lambda: NodeAddr("mem", 0))
    node: FullNode | None = None
    device: TurnDevice | None = None
    task: "asyncio.Task[None] | None" = None
    stop: asyncio.Event = field(default_factory=asyncio.Event)
    is_up: bool = True
    is_leaving: bool = False

    @property
    def id(self) -> NodeId:
        return node_id(self.name)


def drawn_span(draw: Random) -> Span:
    size = draw.choice([1, 2, 2, 2, 3, 3, 4, 4, 6])
    start = draw.randrange(LAYERS - size + 1)
    return Span(start, start + size)


def drawn_spans(draw: Random) -> list[list[Span]]:
    """Of four to seven nodes, which hold every layer together. One of them may serve two spans."""

    while True:
        spans = [[drawn_span(draw)] for _ in range(draw.randint(4, 7))]
        if draw.random() < 0.3 and (more := drawn_span(draw)) not in spans[0]:
            spans[0].append(more)
        if covers(spans):
            return spans


def drawn_places(draw: Random, *, is_small: bool) -> list[Place]:
    """Nodes; small ones have room for a few sessions at once."""
    common: dict[str, Any] = {
        "log_bytes": draw.choice([256 << 20, 256 << 20, 256 << 20, 0, 16 << 10]),
        "prefill_rows": draw.choice([256, 256, 32, 8]),
        "evict_after_s": draw.choice([0.0, 0.0, 0.0, 2.0]),
        "drain_s": draw.choice([300.0, 4.0]),
    }
    places: list[Place] = []
    for number, spans in enumerate(drawn_spans(draw)):
        room = (draw.choice([400, 700, 1500]), draw.choice([2, 3, 8])) if is_small else (65536, 32)
        worker = WorkerConfig(cache_tokens=room[0], max_sessions=room[1], **common)
        step_s, is_spare = draw.choice([0.004, 0.02, 0.06]), draw.random() < 0.15
        places.append(Place(f"n{number}", spans, worker, step_s, is_spare, draw.choice([0, 0, 0, 2, LAYERS])))
    return places


def drawn_requests(draw: Random, origins: int, *, is_small: bool) -> list[Asked]:
    """Requests that share beginnings; some follow others, or go on where those were cut. Where there is little room no reader
    is slow, so that none waits for it as long as patience lasts."""
    asked: list[Asked] = []
    beginnings = [tuple(draw.randrange(256) for _ in range(draw.choice([20, 70, 200]))) for _ in range(2)]
    for number in range(draw.randint(2, 7)):
        prompt = draw.choice(beginnings)[: draw.choice([16, 33, 64, 200])]
        prompt += tuple(draw.randrange(256) for _ in range(draw.choice([1, 3, 9, 40, 90])))
        options = {"path": draw.choice(["ring", "ring", "star"]), "tenant": draw.choice([None, "a", "a", "b"])}
        begins_s = draw.choice([0.0, 0.0, draw.uniform(0, 1), draw.uniform(0, 4)])
        drafts = draw.choice(["off", "suffix", "restless", "restless", "restless"])
        one = Asked(number, draw.randrange(origins), begins_s, prompt, drawn_params(draw), options, drafts)
        one.after = draw.choice(asked) if asked and draw.random() < 0.45 else None
        one.handle = draw.randbytes(16) if draw.random() < 0.25 else None
        if one.after is not None and one.after.handle is not None and draw.random() < 0.7:
            one.adopts, one.handle = True, one.after.handle
            one.after.cancel_at = draw.randint(1, max(1, one.after.params.max_tokens - 1))
        elif draw.random() < 0.12:
            one.cancel_at = draw.randint(1, one.params.max_tokens)
        elif draw.random() < 0.12:
            one.cancel_s = draw.choice([draw.uniform(0, 0.1), draw.uniform(0, 1), draw.uniform(0, 4)])
        if draw.random() < 0.12 and not is_small:
            one.pauses = [draw.choice([0.0, 0.05, 0.4, 2.0]) for _ in range(5)]
        asked.append(one)
    return asked


def drawn_params(draw: Random) -> SamplingParams:
    is_hot = draw.random() < 0.5
    return SamplingParams(
        max_tokens=draw.choice([1, 5, 20, 40, 80, 160]),
        ignore_eos=draw.random() < 0.8,
        temperature=draw.choice([0.7, 1.0]) if is_hot else 0.0,
        seed=draw.randrange(1 << 20),
        top_k=draw.choice([0, 0, 40]) if is_hot else 0,
        presence_penalty=draw.choice([0.0, 0.0, 0.6]),
        logprobs=draw.choice([None, None, None, 0, 3]),
    )
