"""A request from text to text: what an origin has of a model, and the stream of one answer.

text ─ ids ─ route ─ session ─ loop ─ ids ─ text        (text/ · route/ · node.py · generate/ · text/)
"""

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncGenerator, Collection, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from manyhands.config import home_from_env
from manyhands.core import EndsAt, Exactness, FinishReason, NodeAddr, NodeId, PathKind, Precision, SamplingParams, Span
from manyhands.errors import BadRequest, Busy, ContextOverflow, ShardUnavailable, WeightsMismatch
from manyhands.generate.heal import Healer
from manyhands.generate.hop import Hop, Lease
from manyhands.generate.loop import Generation, Request
from manyhands.generate.repair import Event, Repair
from manyhands.generate.sample import Constraint, Sampler
from manyhands.generate.session import Session
from manyhands.generate.speculate import Drafter, NoDrafter
from manyhands.generate.turn import EndsHost
from manyhands.model.admit import admit
from manyhands.model.ends import Ends
from manyhands.model.load import context_length, read_config
from manyhands.model.manifest import build_manifest
from manyhands.model.prove import UNPROVEN, proven_class
from manyhands.node import Node
from manyhands.route.learn import Learned
from manyhands.route.search import Offer, Terms, find_route
from manyhands.swarm.directory import Directory
from manyhands.swarm.members import is_local
from manyhands.swarm.record import Record
from manyhands.text.detokenize import Detokenizer
from manyhands.text.prompt import encode_prompt, load_eos_ids, load_tokenizer, render_chat
from manyhands.worker.execute import Device

# How long a repair that finds nobody waits for nodes to answer a dial: those that are back answer at once.
LOOK_AROUND_S = 2.0

Messages = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Token:
    """One committed token: the text it released (often of several tokens at once, sometimes none) and its odds."""

    id: int
    text: str
    logprob: float | None
    top: tuple[tuple[int, float], ...] | None


@dataclass(slots=True)
class Timings:
    """Seconds; None until known. `open_s`: finding a route and opening it. `ttft_s`: request to first token."""

    open_s: float | None = None
    ttft_s: float | None = None
    total_s: float | None = None
    first_at: float | None = None
    last_at: float | None = None

    def decode_tokens_per_s(self, num_tokens: int) -> float | None:
        """Tokens after the first, over the time since the first."""
        if self.first_at is None or self.last_at is None or num_tokens < 2 or self.last_at <= self.first_at:
            return None
        return (num_tokens - 1) / (self.last_at - self.first_at)


@dataclass(slots=True)
class Answer:
    """One request's answer, filled in as it grows.

    `route` is the first one; `session` (once open) knows the present one, also after the answer has ended.
    """

    prompt: tuple[int, ...]
    params: SamplingParams
    precision: Precision
    route: tuple[Offer, ...] = ()
    session: Session | None = field(default=None, repr=False)
    exactness: Exactness = "E0"
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    repairs: list[Repair] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    timings: Timings = field(default_factory=Timings)


def offer_of(record: Record) -> Offer | None:
    """What a record offers to routes; None if it is only announced (a node that is still loading takes no session)."""
    if record.info is None or record.info.max_sessions == 0 or not record.addresses:
        return None
    addr = record.addresses[0]
    at = NodeAddr(addr.host, addr.port, record.node)
    is_lan = any(is_local(addr.host) for addr in record.addresses)
    return Offer(at, record.node, record.name, record.info, record.load, is_lan=is_lan)


class OriginModel:
    """A model as its origin holds it: tokenizer and, unless the edges have them, the ends. Blocking to make.

    Raises ModelError.
    """

    def __init__(self, folder: Path, precision: Precision, ends: EndsAt = "origin") -> None:
        self.folder, self.precision, self.ends_at = folder, precision, ends
        self.config = read_config(folder)
        admit(self.config, home_from_env())
        self.num_layers = int(self.config.num_hidden_layers)
        self.context_length = context_length(self.config)
        self.arithmetic = proven_class(precision, home_from_env())
        self.id = build_manifest(folder).id
        self.tokenizer = load_tokenizer(folder)
        self.eos_ids = load_eos_ids(folder, self.tokenizer)
        self.ends = Ends(folder, precision) if ends == "origin" else None

    def encode(self, prompt: str | Messages) -> tuple[int, ...]:
        """Ids of a text, or of a conversation by the chat template. Raises BadRequest."""
        if isinstance(prompt, str):
            return tuple(encode_prompt(self.tokenizer, prompt))
        return tuple(render_chat(self.tokenizer, prompt))


class Origin:
    """Owns the requests of one model on a node. Spans are offered by the records of `directory`, if there is one, and by
    the nodes at `addrs`, which are asked."""

    def __init__(
        self,
        node: Node,
        model: OriginModel,
        device: Device,
        addrs: Sequence[NodeAddr],
        directory: Directory | None = None,
    ) -> None:
        self.node, self.model, self._device = node, model, device
        self.addrs = list(addrs)
        self.directory = directory
        self.learned = Learned()
        self.last_resort: Offer | None = None
        self.evicted: set[NodeId] = set()  # not used, whatever they offer, until readmitted
        self._ends = None if model.ends is None else EndsHost(model.ends, device)
        if self._ends is not None:
            node.start(self._ends.run())

    async def add_fallback(self, folder: Path, device: Device) -> None:
        """Keep the whole model of `folder` at hand on this machine, loaded only when nobody else can go on.

        The node must be listening: it opens a link to itself. Raises ModelError.
        """
        assert self.node.address is not None, "a fallback needs a listening node"
        span = Span(0, self.model.num_layers)
        ends = self.model.ends_at == "edges"
        host = await self.node.host(
            folder, span, self.model.precision, device, model_name="fallback", has_ends=ends, is_lazy=True
        )
        self.last_resort = Offer(self.node.address, self.node.transport.node, "fallback", host.info)

    async def offers(self, excluded: Collection[NodeId]) -> list[Offer]:
        """Spans that are offered now, by nodes that are not evicted."""
        return self.known_offers(self.evicted.union(excluded))

    def known_offers(self, excluded: Collection[NodeId] = ()) -> list[Offer]:
        """By fresh records of this model's weights, and by nodes of `addrs` that a link is open to. Asks nobody."""
        told = self.node.known_offers(self.addrs, excluded)
        if self.directory is None:
            return told
        recorded = [offer for record in self.directory.records(self.model.id) if (offer := offer_of(record))]
        named = {(offer.node, offer.info.span) for offer in recorded}
        return [offer for offer in recorded if offer.node not in excluded] + [
            offer for offer in told if (offer.node, offer.info.span) not in named
        ]

    async def look_around(self) -> None:
        """Dial the nodes that no link is open to, or wait for news from the directory. Deadline: LOOK_AROUND_S."""
        with contextlib.suppress(ShardUnavailable, TimeoutError):
            async with asyncio.timeout(LOOK_AROUND_S):
                if self.addrs:
                    await self.node.survey(self.addrs)
                elif self.directory is not None:
                    async with self.directory.changed:
                        await self.directory.changed.wait()

    async def connect(self, index: int, offer: Offer, num_hops: int, lease: Lease) -> Hop:
        """Links to a hop. Raises ShardUnavailable."""
        hop = await self.node.connect(index, offer, num_hops, lease)
        if offer.node in self.evicted:  # while we connected
            refusal = ShardUnavailable(f"hop {index} ({offer.name}) was evicted")
            refusal.node = offer.node
            raise refusal
        return hop

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        """Run `work` beside the requests, as a task of the node."""
        self.node.start(work)

    def evict(self, node: NodeId) -> int:
        """Use `node` no more until it is readmitted; sessions that run through it repair to others (L9-W01).

        Returns how many those are. They wait, as after a death, while nobody else covers its layers.
        """
        self.evicted.add(node)
        here = (self.model.id, self.model.precision)
        mine = [s for s in self.node.sessions.values() if (s.route.lease.model, s.route.lease.precision) == here]
        return sum([self._lose_evicted(session) for session in mine])

    def readmit(self, node: NodeId) -> None:
        """Let new sessions and repairs use `node` again."""
        self.evicted.discard(node)

    def _lose_evicted(self, session: Session) -> bool:
        """Count hops on evicted nodes as lost; whether there were any."""
        lost = [i for i, h in enumerate(session.route.hops) if h.offer.node in self.evicted and i not in session.losses]
        for index in lost:
            session.lose(index, "was evicted")
        return bool(lost)

    async def find_route(self, excluded: Collection[NodeId] = (), num_tokens: int = 0) -> tuple[Offer, ...]:
        """A route over spans of this model's weights and precision. Raises ShardUnavailable, WeightsMismatch.

        `num_tokens`: positions to lease. Records tell who has room for them, as of some seconds ago; if by them nobody
        has, the nodes are asked all the same.
        """
        if self.directory is None:
            # Who has just been excluded may be frozen: asking it again would take the deadline.
            offers = await (self.offers(excluded) if excluded else self.node.survey(self.addrs))
            return self.choose_route([o for o in offers if o.node not in self.evicted])
        try:
            return self._known_route(excluded, num_tokens)
        except ShardUnavailable:
            if not self.addrs:
                raise
            await self.look_around()
            return self._known_route(excluded, num_tokens)

    def _known_route(self, excluded: Collection[NodeId], num_tokens: int) -> tuple[Offer, ...]:
        offers = self.known_offers(self.evicted.union(excluded))
        try:
            return self.choose_route(offers, num_tokens)
        except Busy:
            return self.choose_route(offers)

    def is_covered(self) -> bool:
        """Whether some route is known now. Asks nobody."""
        with contextlib.suppress(ShardUnavailable, WeightsMismatch):
            return bool(self._known_route((), 0))
        return False

    def choose_route(self, offers: Sequence[Offer], num_tokens: int = 0) -> tuple[Offer, ...]:
        """The best route over `offers`. Raises ShardUnavailable, WeightsMismatch."""
        mine = [o for o in offers if (o.info.model, o.info.precision) == (self.model.id, self.model.precision)]
        try:
            route = find_route([*map(self._informed, mine)], self.model.num_layers, terms=self._terms(num_tokens))
        except Busy:
            raise
        except ShardUnavailable:  # say what there is, if there is something
            route = find_route(offers, self.model.num_layers, (self.model.id, self.model.precision))
        info = route[0].info
        if (info.model, info.precision) != (self.model.id, self.model.precision):
            raise WeightsMismatch(
                f"the swarm holds {info.model_name} {info.model[:12]} in {info.precision}, this origin has "
                f"{self.model.id[:12]} in {self.model.precision}: use the same weights and --dtype"
            )
        if self.model.ends_at == "edges" and not (route[0].info.has_ends and route[-1].info.has_ends):
            raise ShardUnavailable("the first and last hop do not hold the ends: serve them with --ends, or use origin")
        return route

    def _informed(self, offer: Offer) -> Offer:
        return self.learned.informed(offer, time.monotonic())

    def _terms(self, num_tokens: int) -> Terms:
        """What this node's own links show, and a key that spreads requests over near-equals."""
        if self.directory is None:
            return Terms()
        me, now = self.node.transport.node, time.monotonic()
        for (peer, lane), health in self.node.pool.health().items():
            if lane == "control" and health.rtt_s is not None:
                self.learned.observe_rtt(me, peer, health.rtt_s, now)
        self.learned.forget(now)
        return Terms(origin=me, rtts=self.learned.rtts(now), num_tokens=num_tokens, key=secrets.token_bytes(8))

    def request(self, prompt: str | Messages, params: SamplingParams) -> Request:
        """Check a request against the model. Raises BadRequest, ContextOverflow naming both numbers."""
        return self.request_ids(self.model.encode(prompt), params)

    def request_ids(self, ids: Sequence[int], params: SamplingParams) -> Request:
        """As `request`, for a prompt of token ids."""
        request = Request(tuple(ids), params)
        vocab_size = int(self.model.config.vocab_size)
        if not ids or min(ids) < 0 or max(ids) >= vocab_size:
            raise BadRequest(f"a prompt is one or more token ids from 0 to {vocab_size - 1}")
        if request.capacity > self.model.context_length:
            raise ContextOverflow(
                f"prompt of {len(ids)} tokens + max_tokens {params.max_tokens} exceed the context of "
                f"{self.model.context_length}: shorten the prompt or lower max_tokens"
            )
        return request

    def answer(self, request: Request) -> Answer:
        return Answer(request.prompt, request.params, self.model.precision)

    async def stream(
        self,
        answer: Answer,
        *,
        route: Sequence[Offer] | None = None,
        path: PathKind = "ring",
        drafter: Drafter | None = None,
        constraint: Constraint | None = None,
        marks: Mapping[int, str] | None = None,
    ) -> AsyncGenerator[Token, None]:
        """Generate; yields tokens, fills `answer`. Close the generator (or let it end) to free the session.

        `constraint` says which tokens may be drawn; `marks` are special tokens that shall appear in the text.
        """
        request = Request(answer.prompt, answer.params)
        sampler = Sampler(answer.params, int(self.model.config.vocab_size), self.model.eos_ids, constraint)
        began = time.monotonic()
        answer.route, session = await self._open(route, self._lease(request, path, is_free=constraint is None))
        answer.session = session
        answer.timings.open_s = time.monotonic() - began
        answer.exactness = self._exactness(session)
        try:
            async for token in self._tokens(session, sampler, request, answer, drafter or NoDrafter(), marks or {}):
                now = time.monotonic()
                answer.timings.first_at = answer.timings.first_at or now
                answer.timings.ttft_s = answer.timings.first_at - began
                answer.timings.last_at, answer.timings.total_s = now, now - began
                answer.exactness = max(answer.exactness, self._exactness(session))  # a replacement may lower it
                yield token
        finally:
            self._learn(session)
            self.node.close_session(session)

    def _learn(self, session: Session) -> None:
        """What the hops said of the last step, for the routes of others."""
        for hop, timing in zip(session.route.hops, session.timings, strict=False):
            span = hop.offer.info.span
            self.learned.observe(hop.offer.node, span, timing.compute_us / 1e6 / len(span), time.monotonic())

    async def _open(self, route: Sequence[Offer] | None, lease: Lease) -> tuple[tuple[Offer, ...], Session]:
        """Open a session on `route`, or on the best one whose nodes all have room: a full node is passed over (HN-32).

        Raises what the last node to refuse said, once no other route is left.
        """
        if route is not None:
            return tuple(route), await self.node.open_session(route, lease)
        full: set[NodeId] = set()
        found = await self.find_route(num_tokens=lease.capacity)
        while True:
            try:
                return found, await self.node.open_session(found, lease)
            except ShardUnavailable as refusal:
                if refusal.node is None:
                    raise
                full.add(NodeId(refusal.node))
                try:
                    found = await self.find_route(full, lease.capacity)
                except ShardUnavailable:
                    raise refusal from None

    async def complete(self, request: Request, **options: Any) -> Answer:
        """The whole answer at once. Options as for `stream`."""
        answer = self.answer(request)
        async for _ in self.stream(answer, **options):
            pass
        return answer

    async def _tokens(
        self,
        session: Session,
        sampler: Sampler,
        request: Request,
        answer: Answer,
        drafter: Drafter,
        marks: Mapping[int, str],
    ) -> AsyncGenerator[Token, None]:
        params, model = request.params, self.model
        healer = Healer(session, self, self.node.request, self.last_resort)
        answer.repairs, answer.events = healer.repairs, healer.events
        generation = Generation(session, self._ends, sampler, request, drafter, healer, self.node.request)
        eos = frozenset[int]() if params.ignore_eos else model.eos_ids
        detokenizer = Detokenizer(model.tokenizer, params.stop, params.stop_ids, eos, request.prompt, marks)
        tokens = generation.tokens()
        try:
            self._lose_evicted(session)  # who was evicted while it opened
            async for drawn in tokens:
                self._lose_evicted(session)
                piece = detokenizer.feed(drawn.token)
                answer.token_ids.append(drawn.token)
                text = piece.text
                if piece.finished is None and generation.is_last(len(answer.token_ids)):
                    text += detokenizer.flush()
                answer.text += text
                if piece.finished is not None:
                    answer.finish_reason = "stop"
                elif generation.is_last(len(answer.token_ids)):
                    answer.finish_reason = generation.finish_reason
                yield Token(drawn.token, text, drawn.logprob, drawn.top)
                if piece.finished is not None:
                    return
        finally:
            await tokens.aclose()

    def _lease(self, request: Request, path: PathKind, *, is_free: bool) -> Lease:
        """`is_free`: no constraint, which only the origin knows, so the last hop may draw the tokens."""
        edges = self.model.ends_at == "edges"
        at_the_last_hop = edges and is_free and request.params.logprobs is None
        return Lease(
            model=self.model.id,
            precision=self.model.precision,
            capacity=request.capacity,
            prompt_length=len(request.prompt),
            path=path,
            ends=self.model.ends_at,
            sampling=request.params if at_the_last_hop else None,
        )

    def _exactness(self, session: Session) -> Exactness:
        """E0 if every hop (and this origin's ends) computes in one arithmetic class that keeps rows apart, else E2."""
        classes = {hop.arithmetic for hop in session.route.hops}
        if self.model.ends_at == "origin":
            classes.add(self.model.arithmetic)
        is_proven = not any(name.endswith(UNPROVEN) for name in classes)
        return "E0" if len(classes) == 1 and is_proven else "E2"
