"""The loop: prompt ids in, tokens out. The one place where a request advances.

    prefill   chunks of the prompt go down the route, all at once as credits allow; only the last row comes back
    repeat    rows ─ logits ─ draw (speculate.verify) ─ commit to the ledger ─ next window = [last token, drafts]

Several windows may be on their way, each on the guess that those before it are right (speculate.py: GuessChain). The token that
proves a guess wrong begins a window at its own position, under the next guess number: the step rolls the hops' caches back,
and what is on its way under older numbers is dropped wherever it is. Where `ends` are at the edges, ids go down and ids (or
logits) come back.
"""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from manyhands.config import RequestConfig
from manyhands.core import FinishReason, SamplingParams
from manyhands.engine.span import Rows
from manyhands.errors import Corruption, ProtocolError
from manyhands.origin.draft import Drafter, Drafting, Returned
from manyhands.origin.ends_batch import EndsBatcher
from manyhands.origin.first_rows import Prefill, behind, feed_first, sent_first
from manyhands.origin.growth import Growth
from manyhands.origin.intake import Intake, due_rows
from manyhands.origin.pace import Pace
from manyhands.origin.received import ReceivedGuesses
from manyhands.origin.redraw import REDRAWN_ROWS, redraw
from manyhands.origin.repair import RepairExecutor
from manyhands.origin.sampler import Drawn, Sampler
from manyhands.origin.session import HopLost, Session
from manyhands.origin.speculate import GuessChain, verify
from manyhands.origin.step_costs import DeviceStep, Timing
from manyhands.wire.message import Payload, Step
from manyhands.wire.rows import numbers, read_ids, read_rows
from manyhands.wire.timings import read_timings
from manyhands.worker.batch import WINDOW_ROWS
from manyhands.worker.bounds import RowBounds
from manyhands.worker.log import pieces


@dataclass(frozen=True, slots=True)
class Request:
    """What to generate. `capacity` positions hold prompt and max_tokens: as many are leased in the end (growth.py)."""

    prompt: tuple[int, ...]
    params: SamplingParams

    @property
    def capacity(self) -> int:
        return len(self.prompt) + self.params.max_tokens


class RoundHead(NamedTuple):
    """The window that the present guess begins with: what it took is what a round over the route takes."""

    position: int
    rows: int
    sent_at: float


class Generation:
    """One request on one open session. `tokens()` is consumed once; `finish_reason` is set when it ends.

    `redraw`: so many tokens were drawn before, and the last hop sends their rows again (reuse.py); `num_redrawn` says how
    many were, once the first token is out. `received`: what its client has of the answer, guessed before anything is drafted.

    The consumer stops on text (text/detokenize.py): it stops reading tokens.
    """

    def __init__(
        self,
        session: Session,
        ends: EndsBatcher | None,
        sampler: Sampler,
        request: Request,
        drafter: Drafter,
        healer: RepairExecutor,
        config: RequestConfig,
        redraw: int = 0,
        received: ReceivedGuesses | None = None,
    ) -> None:
        self._session, self._ends, self._sampler, self._received = session, ends, sampler, received
        self._request, self._drafter, self._healer, self._config = request, drafter, healer, config
        self._chain = GuessChain(request.prompt)
        self.ledger = self._chain.ledger
        self.finish_reason: FinishReason | None = None
        self.drafting = Drafting(drafters=drafter.tallies)
        self.num_cached = 0  # positions of the prompt that did not have to be sent
        self.num_redrawn = redraw
        self._pace = Pace(config, lambda: session.route.stated_s)
        due = due_rows(session.route.lease, ends.ends.hidden_size if ends is not None else None, sampler.vocab_size)
        self._prefill = Prefill(session, ends, config)
        self._intake = Intake(session, healer, self._pace, config, self.ledger, due, self._prefill)
        self.came = self._intake.leaves
        self._drawn: list[Drawn] = []  # committed, and not told yet
        self._bounds = RowBounds()  # of what the last hop sends
        self._growth = Growth(session, request.capacity, healer)
        self._head: RoundHead | None = None
        self._is_full = False  # the lease has not grown
        self._is_disturbed = self._is_dead = False  # steps in flight are of no use; the session is not told yet

    async def tokens(self) -> AsyncGenerator[Drawn, None]:
        """The tokens as they are committed. Raises what ends the session, ContextOverflow never (the lease fits)."""
        try:
            for token in await self._begin():
                yield token
            self.drafting.windows += 1
            while self.finish_reason is None:
                drawn, position, ids, payload = await self._next_window()
                self.finish_reason = self._finished()
                if self.finish_reason is None:
                    # Before the consumer runs: it must not slow the route.
                    self._send_window(position, ids, payload)
                    while len(ids) == WINDOW_ROWS:  # a full window: there may be drafts for another one
                        position, ids, payload = await self._turn(None, self._draft)
                        self._send_window(position, ids, payload)
                    if not self._is_disturbed:  # else no result of this epoch has come yet (Standbys.feed)
                        await self._feed_standbys()
                for token in drawn:
                    yield token
        finally:
            self.drafting.verdict = self._drafter.verdict
            self._drafter.close()

    async def _begin(self) -> list[Drawn]:
        """Send what is known by now: the prompt, and the tokens that an earlier attempt had drawn, which are returned."""
        session, again = self._session, list[Drawn]()
        first = await sent_first(session)
        if self.num_redrawn:
            again = await redraw(self.num_redrawn, session, self._intake, self._ends, self._sampler, self.ledger)
            self.finish_reason, self.num_redrawn = self._finished(), len(again)
        self._intake.reached = start = session.begins_at
        if self.finish_reason is None:
            start = await self._healer.restore(start)
            self._chain.guessed.extend(self._guess_received(self._intake.most_guesses) or ())
            await self._send_known(behind(first, session, start))
            self._drafter.begin(self.ledger, session.wake)  # while the hops compute
        self.num_cached = min(start, len(self._request.prompt))
        return again

    def _finished(self) -> FinishReason | None:
        if self._sampler.is_stop_id(self.ledger[-1]) and len(self.ledger) > len(self._request.prompt):
            return "stop"
        return "length" if self._is_full or len(self.ledger) >= self._request.capacity else None

    @property
    def _is_at_end(self) -> bool:
        """Whether the lease has no room for the last token."""
        return len(self.ledger) > self._growth.leased

    def is_last(self, num_tokens: int) -> bool:
        """Whether the answer ends with its `num_tokens`-th token (stop strings aside)."""
        return self.finish_reason is not None and len(self._request.prompt) + num_tokens == len(self.ledger)

    async def _send_known(self, start: int) -> None:
        """Send everything from position `start` on: the ledger and the guesses, in prefill-sized steps; `_intake` sees to
        those that there is no room for yet."""
        leased = self._growth.leased
        self._chain.resend(leased)
        self._disturb()
        self._prefill.begin(start, self._chain.from_position(start)[: leased - start], len(self.ledger) - 1)
        await self._prefill.send(len(self.ledger))

    def _disturb(self) -> None:
        """What takes time now says nothing of the route."""
        self._head, self._is_disturbed = None, True

    def _send_window(self, position: int, ids: Sequence[int], payload: Payload | None) -> None:
        if not ids:
            return  # the windows on their way are enough
        carried = None if payload is not None else tuple(ids)
        self._session.send(position, len(ids), position, carried, payload, len(self.ledger))
        self.drafting.windows += 1
        if position == len(self.ledger) - 1:
            self._head = RoundHead(position, len(ids), asyncio.get_running_loop().time())

    async def _next_window(self) -> tuple[list[Drawn], int, Sequence[int], Payload | None]:
        """As _advance; lost hops are replaced meanwhile, and what was on its way is sent again."""
        while True:
            try:
                self._healer.give_back(self.committed)
                if self._session.leaving:
                    self._disturb()
                    await self._healer.hand_over(self.committed)
                if self._session.has_detour and (start := await self._healer.rewire(self.committed)) is not None:
                    await self._send_known(start)
                self._growth.look_ahead(len(self._chain))
                return await self._advance()
            except HopLost:
                pass
            except (Corruption, ProtocolError) as error:
                self._session.doubt_rows(f"sent what cannot be: {error}")
            await self._repair()

    @property
    def committed(self) -> int:
        """Positions that every hop has computed and that nothing will take back."""
        return self._intake.committed

    async def _feed_standbys(self) -> None:
        followers, committed = self._healer.followers, self.committed
        if self._config.standby:
            followers.follow_all(committed, self._healer.excluded)
        due = followers.due(committed)
        for span, _, until in due:
            if span.start > 0:
                self._session.standbys.feed(span, until)
        for _, standby, until in [d for d in due if d[0].start == 0]:
            await feed_first(self._session, self._ends, self._config, standby, self.ledger, until)

    async def _repair(self) -> None:
        start = await self._healer.repair(self.committed, len(self.ledger) - len(self._request.prompt))
        self._bounds = self._bounds.renewed()
        self._intake.repaired()
        await self._send_known(start)

    async def _advance(self) -> tuple[list[Drawn], int, Sequence[int], Payload | None]:
        """As _take_rows, and the tokens drawn. At the end of the lease the last waits for room: without it the answer ends."""
        todo: tuple[int, Sequence[int], Payload | None] = 0, (), None
        if not self._is_at_end or not self._prefill.is_sent:  # the last token follows what is sent again
            todo = await self._take_rows()
        is_waiting = self._is_at_end and self._finished() is None
        if is_waiting and len(self._drawn) < 2:
            self._is_full = not await self._growth.more(self._config, self._pace, self.committed)
            todo = await self._turn(None, self._draft)
        num_shown = max(1, len(self._drawn) - is_waiting)
        drawn, self._drawn = self._drawn[:num_shown], self._drawn[num_shown:]
        return drawn, *todo

    async def _take_rows(self) -> tuple[int, Sequence[int], Payload | None]:
        """Wait for rows (or drafts), commit what they say, and prepare what is to be sent next: position, ids, rows."""
        steps = await self._intake.rows()
        now = asyncio.get_running_loop().time()
        timing = self._timing(steps, now)
        parts = deque(part for step in steps for part in pieces(step, REDRAWN_ROWS))

        def decide(logits_TV: NDArray[np.float32]) -> tuple[int, Sequence[int]]:
            if parts:
                self._commit(self._decide(parts.popleft(), logits_TV), timing, now)
                if parts and not self._is_dead and self._finished() is None:
                    return 0, ()
            parts.clear()
            return self._draft(logits_TV)

        todo = await self._turn(_rows(parts[0]) if parts else None, decide)
        while parts:
            todo = await self._turn(_rows(parts[0]), decide)
        if self._is_dead:
            self._is_dead = False
            self._session.retract(len(self.ledger) - 1)
        return todo

    async def _turn(
        self, rows: Rows | None, decide: Callable[[NDArray[np.float32]], tuple[int, Sequence[int]]]
    ) -> tuple[int, Sequence[int], Payload | None]:
        """`decide`, where the ends are and given the logits of `rows`, what is to be sent: position, ids, their rows."""
        if self._ends is None:
            return *decide(np.empty((0, 0), np.float32)), None
        todo: list[tuple[int, Sequence[int]]] = []

        def decide_ids(logits_TV: NDArray[np.float32]) -> Sequence[int]:
            todo.append(decide(logits_TV))
            return todo[0][1]

        payload = await self._ends.turn(rows, decide_ids, self._bounds)
        return *todo[0], payload

    def _draft(self, _: NDArray[np.float32]) -> tuple[int, Sequence[int]]:
        return (self._chain.sent, ()) if self._is_at_end else self._chain.extend(self._propose())

    def _timing(self, rows: list[Step], now: float) -> Timing | None:
        """What a window teaches of the route."""
        if not rows or self._is_disturbed:
            return None
        timings, took_s = read_timings(rows[0].timings), None
        head = self._head
        if head is not None and rows[0].position == head.position:
            self._head, took_s = None, now - head.sent_at
            self._pace.note(took_s)
        return Timing(
            rows[0].count,
            took_s,
            tuple([1e-6 * timing.compute_us for timing in timings]),
            tuple([1e-6 * timing.queue_us for timing in timings]),
            tuple([DeviceStep(timing.rows, timing.windows, timing.streams) for timing in timings]),
        )

    def _decide(self, step: Step, logits_TV: NDArray[np.float32]) -> list[Drawn]:
        guessed = self._chain.guessed
        assert step.payload is not None, "Intake gives rows"
        if step.content == "ids":
            ids = read_ids(step.payload, step.count)
            if not all(0 <= i < self._sampler.vocab_size for i in ids):
                raise Corruption(f"the last hop drew tokens {ids}; there are 0 to {self._sampler.vocab_size - 1}")
            right = next((i for i, (a, b) in enumerate(zip(ids, guessed, strict=False)) if a != b), len(ids) - 1)
            return [Drawn(i, None, None) for i in ids[: right + 1]]
        if step.content == "logits":
            logits_TV = numbers(_rows(step), step.payload.dtype)
        return verify(self._sampler, logits_TV, self.ledger, guessed, len(self._request.prompt))

    def _commit(self, drawn: list[Drawn], timing: Timing | None, now: float) -> None:
        room = self._request.capacity - len(self.ledger)
        del drawn[room:]
        stop = next((i for i, d in enumerate(drawn) if self._sampler.is_stop_id(d.token)), len(drawn) - 1)
        del drawn[stop + 1 :]
        right, self._is_dead = self._chain.commit([d.token for d in drawn])
        if self._is_dead:
            self._prefill.drop()
        self._drawn += drawn
        self.drafting.tokens += len(drawn)
        if self._received is None:
            self.drafting.accepted += right
            self._drafter.note(Returned(len(drawn), right, self._is_dead, timing, self._is_disturbed, now))
        self._is_disturbed = False

    def _propose(self) -> Sequence[int]:
        """Drafts to send now: tokens that exist, no more than a window, the lease and the credits of the route hold."""
        chain, credits = self._chain, max(1, self._config.credits // 2)
        most = min(self._growth.sendable - len(chain), WINDOW_ROWS - (len(chain) - chain.sent))
        if most < 1 or chain.windows >= credits or not self._prefill.is_sent or self._finished() is not None:
            return ()
        if (guesses := self._guess_received(most)) is not None:
            return guesses
        proposed = self._drafter.propose(chain.ledger, chain.guessed, most)[:most]
        drafts = list(takewhile(lambda i: 0 <= i < self._sampler.vocab_size, proposed))
        self.drafting.drafted += len(drafts)
        self.drafting.depth = max(self.drafting.depth, len(chain.guessed) + len(drafts))
        return drafts

    def _guess_received(self, most: int) -> Sequence[int] | None:
        """At most `most` guesses by what the client has, as far as the lease goes; None once there will be none any more."""
        if self._received is None:
            return None
        chain = self._chain
        most = min(most, self._growth.sendable - len(chain))
        guesses = self._received.propose(chain.ledger[len(self._request.prompt) :], len(chain.guessed), most)
        if guesses is None:
            self._received = None
        return guesses


def _rows(step: Step) -> Rows:
    assert step.payload is not None, "Intake gives rows"
    return read_rows(step.payload, step.count)
