"""The requests of one model on a node: checked against it, streamed, answered."""

import asyncio
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from manyhands.core import UNPROVEN, Exactness, NodeAddr, NodeId, PathKind, SamplingParams, Span
from manyhands.errors import BadRequest, ContextOverflow
from manyhands.origin.adoption import Adoption
from manyhands.origin.answer import Answer, Token
from manyhands.origin.auditing import Audits
from manyhands.origin.depth import Acceptance
from manyhands.origin.draft import AutoDrafter, Drafter, NoDrafter
from manyhands.origin.draft_model import DraftModel
from manyhands.origin.ends_batch import EndsBatcher
from manyhands.origin.first_rows import FirstRows
from manyhands.origin.growth import first_lease
from manyhands.origin.loop import Generation, Request
from manyhands.origin.loss_guard import LossGuard
from manyhands.origin.model import Messages, OriginModel
from manyhands.origin.node import FullNode
from manyhands.origin.opener import RouteOpener
from manyhands.origin.queue import RoomQueue
from manyhands.origin.received import ReceivedGuesses
from manyhands.origin.repair import RepairExecutor
from manyhands.origin.request_routes import RequestRoutes
from manyhands.origin.reuse import Resumed, Reuse
from manyhands.origin.route import Lease
from manyhands.origin.route_costs import CostsOfRoutes
from manyhands.origin.routes import FALLBACK, Routes
from manyhands.origin.sampler import Constraint, Sampler
from manyhands.origin.session import First, Session
from manyhands.place.budget import own_layers
from manyhands.route.search import Offer, Rules
from manyhands.swarm.directory import Directory
from manyhands.text.detokenize import Detokenizer
from manyhands.worker.execute import WIRE_DTYPES, Device


class Origin:
    """Owns the requests of one model on a node. `routes` finds who serves them, by `directory` and `addrs`.

    `draft_model` drafts for its requests; it is closed with the node.
    """

    def __init__(
        self,
        node: FullNode,
        model: OriginModel,
        device: Device,
        addrs: Sequence[NodeAddr],
        directory: Directory | None = None,
        draft_model: DraftModel | None = None,
    ) -> None:
        self.node, self.model, self._device = node, model, device
        self.routes = Routes(node, model, addrs, directory)
        self.waiting = RoomQueue()
        self._opener = RouteOpener(node, self.routes, self.waiting)
        self.reuse = Reuse(node.requests)
        self._acceptance = Acceptance()  # of drafts, over all requests
        self._costs = CostsOfRoutes()
        self._ends = None if model.ends is None else EndsBatcher(model.ends, WIRE_DTYPES[model.precision], device)
        self._draft_model = draft_model
        if draft_model is not None:
            node.start(_closing(draft_model))
        if self._ends is not None:
            node.start(self._ends.run())
        self._loss_guard = LossGuard(node.requests, self._ends)
        self._audits = Audits(node.request, self._ends, self._distrust)

    async def add_fallback(self, folder: Path, device: Device) -> None:
        """Keep the whole model of `folder` at hand on this machine, loaded only when no other node can go on.

        A request that finds no route, and one whose repair finds none, goes on there with the same text. The node must be
        listening: it opens a link to itself. Raises ModelError.
        """
        assert self.node.address is not None, "a fallback needs a listening node"
        span = Span(0, self.model.num_layers)
        ends = self.model.ends_at == "edges"
        host = await self.node.worker.host(
            folder,
            span,
            self.model.precision,
            device,
            model_name=FALLBACK,
            has_ends=ends,
            is_lazy=True,
            is_private=True,
        )
        info = replace(host.info, is_loaded=False)  # its Open has the deadline of a load
        self._opener.last_resort = Offer(self.node.address, self.node.transport.node, FALLBACK, info)

    @property
    def last_resort(self) -> Offer | None:
        """The fallback, if there is one."""
        return self._opener.last_resort

    @property
    def ends(self) -> EndsBatcher | None:
        """Embedding and head; None where the edges have them."""
        return self._ends

    @property
    def own_spans(self) -> list[Span]:
        """The layers that are computed on this node and nowhere else ([request] own_first, own_last)."""
        return own_layers(self.model.num_layers, self.node.request.own_first, self.node.request.own_last)

    async def host_own(self, folder: Path, span: Span, device: Device) -> None:
        """Serve `span` of `folder` to the requests of this node alone, unless it serves it anyway. Raises ModelError.

        The node must be listening: it opens a link to itself.
        """
        if any(host.info.span.covers(span) and host.info.model == self.model.id for host in self.node.hosts):
            return
        ends, precision = self.model.ends_at == "edges", self.model.precision
        await self.node.worker.host(folder, span, precision, device, model_name="own", has_ends=ends, is_private=True)

    def request(self, prompt: str | Messages, params: SamplingParams) -> Request:
        """Check a request against the model. Blocking as OriginModel.encode. Where the context leaves less than max_tokens,
        that is the limit. Raises BadRequest; ContextOverflow for a prompt that leaves nothing."""
        return self.request_ids(self.model.encode(prompt), params)

    def request_ids(self, ids: Sequence[int], params: SamplingParams) -> Request:
        """As `request`, for a prompt of token ids."""
        vocab_size, left = self.model.vocab_size, self.model.context_length - len(ids)
        if not ids or min(ids) < 0 or max(ids) >= vocab_size:
            raise BadRequest(f"a prompt is one or more token ids from 0 to {vocab_size - 1}")
        if left < 1:
            raise ContextOverflow.of(f"prompt is too long: {len(ids)} tokens", self.model.context_length)
        return Request(tuple(ids), replace(params, max_tokens=min(params.max_tokens, left)))

    def answer(self, request: Request) -> Answer:
        return Answer(request.prompt, request.params, self.model.precision)

    async def stream(
        self,
        answer: Answer,
        *,
        route: Sequence[Offer] | None = None,
        path: PathKind = "ring",
        draft: str = "",
        drafter: Drafter | None = None,
        constraint: Constraint | None = None,
        marks: Mapping[int, str] | None = None,
        tenant: str | None = None,
        rules: Rules | None = None,
        adoption: Adoption | None = None,
    ) -> AsyncGenerator[Token, None]:
        """Generate; yields tokens, fills `answer`, may audit it (auditing.py). Its end, or closing it, frees the session.

        With a `tenant` the session may begin with what an earlier request of the same tenant has cached, and is parked in
        the end for the next one (reuse.py); no other tenant shares it. With an `adoption` it goes on where another session
        of the same request was, perhaps another origin's, and can be adopted itself.

        `draft` says what guesses tokens (config.DRAFTS; "": as the node's configuration has it), unless a `drafter` is given.
        Raises BadRequest for "model" where there is none.
        `rules`: how the route is chosen; None: as the node's configuration says. `constraint` says which tokens may be drawn;
        `marks` are special tokens that shall appear in the text.
        """
        self.node.check_may_ask()
        request, config = Request(answer.prompt, answer.params), self.node.request
        around = RequestRoutes(self.routes, rules or Rules.of(config), tenant, path)
        sampler = Sampler(answer.params, self.model.vocab_size, self.model.eos_ids, constraint)
        drafter = drafter or self._drafter(draft, request, constraint)
        began, received = time.monotonic(), self._received(adoption)
        tenant, adoption = (tenant, adoption) if config.reuse else (None, None)
        lease = self._lease(request, path, adoption, is_free=constraint is None)
        answer.routing = around.routing
        begun = await self._begin(route, tenant, request, lease, around, adoption)
        answer.route, session, cached, redraw = begun
        around.opened(answer.route)
        if isinstance(drafter, AutoDrafter):
            drafter.share(self._costs.of(answer.route))
        answer.session, answer.timings.open_s = session, time.monotonic() - began
        answer.exactness = max(cached, self._exactness(session))
        healer = RepairExecutor(session, around, config, around.alone(self.last_resort), self.node.watch.late_s)
        healer.events += around.events
        generation = Generation(session, self._ends, sampler, request, drafter, healer, config, redraw, received)
        answer.repairs, answer.events, answer.drafting = healer.repairs, healer.events, generation.drafting
        try:
            async for token in self._tokens(session, generation, request, answer, marks or {}):
                now = time.monotonic()
                answer.timings.first_at = answer.timings.first_at or now
                answer.timings.ttft_s = answer.timings.first_at - began
                answer.timings.last_at, answer.timings.total_s = now, now - began
                answer.exactness = max(answer.exactness, self._exactness(session))  # a replacement may lower it
                yield token
            await self._audits.after(answer, session, generation, healer)
        finally:
            self.routes.learn(session)
            self.reuse.park(tenant, session, generation.ledger[: generation.committed], answer.exactness)
            self.waiting.released()

    async def _begin(
        self,
        route: Sequence[Offer] | None,
        tenant: str | None,
        request: Request,
        lease: Lease,
        around: RequestRoutes,
        adoption: Adoption | None,
    ) -> Resumed:
        """An open session, which sends rows with loss only if the request allows it and the guard does not object."""
        if around.rules.codec == "int8":
            lossy, around.routing.loss = self._loss_guard.lossy(len(request.prompt))
            lease, adoption = replace(lease, lossy=lossy, handle=None), None
        while True:
            is_plain = lease.lossy is None and (adoption is None or adoption.received is None)
            first = FirstRows(request.prompt, self._ends, self.node.request).send if is_plain else None
            resumed = await self._resume(tenant, request, lease, around, adoption, first) if route is None else None
            begun = resumed or Resumed(*await self._opener.open(route, lease, around, first), "E0")
            if lease.lossy is None:
                return begun
            is_fit, around.routing.loss = await self._loss_guard.judge(begun.route, begun.session, request.prompt)
            if is_fit:
                return begun
            self.node.requests.close(begun.session)
            lease = replace(lease, lossy=None)

    async def _resume(
        self,
        tenant: str | None,
        request: Request,
        lease: Lease,
        around: RequestRoutes,
        adoption: Adoption | None,
        first: First | None,
    ) -> Resumed | None:
        if adoption is not None:
            adopted = await self.reuse.adopt(adoption, request.prompt, lease, around)
            if adopted is not None:
                return adopted
        return await self.reuse.open(tenant, request.prompt, lease, around, first)

    def _distrust(self, node: NodeId) -> None:
        """`node` computed wrong numbers: use it no more, nor what others have cached of them."""
        self.routes.evict(node)
        self.reuse.distrust(node)

    def _received(self, adoption: Adoption | None) -> ReceivedGuesses | None:
        if adoption is None or adoption.received is None:
            return None
        decode, vocab_size = self.model.tokenizer.decode, self.model.vocab_size
        return ReceivedGuesses(
            adoption.received, adoption.tokens, vocab_size, lambda ids: str(decode(ids, skip_special_tokens=True))
        )

    def _drafter(self, mode: str, request: Request, constraint: Constraint | None) -> Drafter:
        mode = (mode or self.node.request.draft).partition(":")[0]
        if mode == "off":
            return NoDrafter()
        if mode == "model" and self._draft_model is None:
            raise BadRequest(
                "no model drafts for this one here: start the node with --draft model:MODEL, or ask for auto or suffix"
            )
        model = None
        if self._draft_model is not None and mode in ("auto", "model"):
            own = None if constraint is None else constraint.copy()
            eos_ids, prompt_length = self.model.eos_ids, len(request.prompt)
            try:
                model = self._draft_model.drafts(request.params, eos_ids, prompt_length, own)
            except BadRequest:  # a bias for a token that only the target has, say
                model = None
        sessions = self.node.requests.active
        return AutoDrafter(
            self._acceptance, model=model, copies=mode in ("auto", "suffix"), streams=lambda: max(1, len(sessions))
        )

    async def complete(self, request: Request, **options: Any) -> Answer:
        """The whole answer at once. Options as for `stream`."""
        answer = self.answer(request)
        async for _ in self.stream(answer, **options):
            pass
        return answer

    async def _tokens(
        self,
        session: Session,
        generation: Generation,
        request: Request,
        answer: Answer,
        marks: Mapping[int, str],
    ) -> AsyncGenerator[Token, None]:
        params, model = request.params, self.model
        eos = frozenset[int]() if params.ignore_eos else model.eos_ids
        detokenizer = Detokenizer(model.tokenizer, params.stop, params.stop_ids, eos, request.prompt, marks)
        tokens = generation.tokens()
        try:
            self.routes.leave_evicted(session)  # who was evicted while it opened
            async for drawn in tokens:
                self.routes.leave_evicted(session)
                answer.cached_tokens, answer.redrawn = generation.num_cached, generation.num_redrawn
                piece = detokenizer.feed(drawn.token)
                answer.token_ids.append(drawn.token)
                text = piece.text
                if piece.finished is None and generation.is_last(len(answer.token_ids)):
                    text += detokenizer.flush()
                answer.text += text
                if piece.finished is not None or detokenizer.stopped_by is not None:  # which the flush may have found
                    answer.finish_reason, answer.stopped_by = "stop", detokenizer.stopped_by
                elif generation.is_last(len(answer.token_ids)):
                    answer.finish_reason = generation.finish_reason
                yield Token(drawn.token, text, drawn.logprob, drawn.top)
                if piece.finished is not None:
                    return
        finally:
            await tokens.aclose()

    def _lease(self, request: Request, path: PathKind, adoption: Adoption | None, *, is_free: bool) -> Lease:
        """`is_free`: no constraint, which only the origin knows, so the last hop may draw the tokens."""
        edges = self.model.ends_at == "edges"
        known = len(request.prompt) + (0 if adoption is None else adoption.tokens)
        at_the_last_hop = edges and is_free and request.params.logprobs is None
        return Lease(
            model=self.model.id,
            precision=self.model.precision,
            capacity=first_lease(known, request.capacity),
            prompt_length=len(request.prompt),
            path=path,
            ends=self.model.ends_at,
            sampling=request.params if at_the_last_hop else None,
            handle=adoption.handle if adoption is not None else None,
            attests=self._audits.are_wanted,
        )

    def _exactness(self, session: Session) -> Exactness:
        """E0 if every hop (and this origin's ends) computes in one arithmetic class that keeps rows apart, and no rows are
        sent with loss; else E2."""
        classes = {hop.arithmetic for hop in session.route.hops}
        if self.model.ends_at == "origin":
            classes.add(self.model.arithmetic)
        is_proven = not any(name.endswith(UNPROVEN) for name in classes)
        return "E0" if len(classes) == 1 and is_proven and not session.route.boundaries else "E2"


async def _closing(model: DraftModel) -> None:
    """Close the drafter when the node stops."""
    try:
        await asyncio.Event().wait()
    finally:
        model.close()
