"""The loop: prompt ids in, tokens out. The one place where a request advances.

    prefill   chunks of the prompt go down the route; only the last row comes back
    repeat    rows ─ logits ─ draw (speculate.verify) ─ commit to the ledger ─ next window = [last token, drafts]

The next window's position is where the committed tokens end, so a wrong draft needs no message of its own: the step
rolls the hops' caches back. Where `ends` are at the edges, ids go down and ids (or logits) come back.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from itertools import takewhile

import numpy as np
from numpy.typing import NDArray

from manyhands.config import RequestConfig
from manyhands.core import FinishReason, SamplingParams
from manyhands.engine.span import Rows
from manyhands.errors import Corruption, PipelineStalled, ProtocolError
from manyhands.origin.draft import Drafter, Drafting
from manyhands.origin.ends_batch import EndsBatcher
from manyhands.origin.pace import Pace
from manyhands.origin.repair import RepairExecutor
from manyhands.origin.sampler import Drawn, Sampler
from manyhands.origin.session import HopLost, Session
from manyhands.origin.speculate import verify
from manyhands.wire.message import Content, Payload, Step
from manyhands.wire.rows import numbers, read_ids, read_rows
from manyhands.worker.batch import WINDOW_ROWS
from manyhands.worker.bounds import RowBounds
from manyhands.worker.execute import WIRE_DTYPES


@dataclass(frozen=True, slots=True)
class Request:
    """What to generate. `capacity` positions are leased on every hop; prompt and max_tokens fit into it."""

    prompt: tuple[int, ...]
    params: SamplingParams

    @property
    def capacity(self) -> int:
        return len(self.prompt) + self.params.max_tokens


class Generation:
    """One request on one open session. `tokens()` is consumed once; `finish_reason` is set when it ends.

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
    ) -> None:
        self._session, self._ends, self._sampler = session, ends, sampler
        self._request, self._drafter, self._healer, self._config = request, drafter, healer, config
        self.ledger: list[int] = list(request.prompt)
        self.finish_reason: FinishReason | None = None
        self.drafting = Drafting()
        self.num_cached = 0  # positions of the prompt that did not have to be sent
        self._pace = Pace(config)
        self._bounds = RowBounds()  # of what the last hop sends
        self._sent_at: float | None = None  # when the window was sent; None for a prefill, and after a disturbance
        self._reached = 0  # positions whose results, or the news of them, came back
        self._moved_at = self._asked_at = (
            0.0  # when the last of them came; when that was last waited for or looked into
        )

    async def tokens(self) -> AsyncGenerator[Drawn, None]:
        """The tokens as they are committed. Raises what ends the session, ContextOverflow never (the lease fits)."""
        drafts: Sequence[int] = ()
        self._reached = self._session.begins_at
        self.num_cached = await self._healer.restore(self._reached)
        await self._send_known(self.num_cached, drafts)
        while self.finish_reason is None:
            drawn, drafts, payload = await self._next_window(drafts)
            self.finish_reason = self._finished()
            if self.finish_reason is None:
                self._send_window(drafts, payload)  # before the consumer is heard: it must not slow the route down
                await self._feed_standbys()
            for token in drawn:
                yield token

    def _finished(self) -> FinishReason | None:
        if self._sampler.is_stop_id(self.ledger[-1]):
            return "stop"
        return "length" if len(self.ledger) >= self._request.capacity else None

    def is_last(self, num_tokens: int) -> bool:
        """Whether the answer ends with its `num_tokens`-th token (stop strings aside)."""
        return self.finish_reason is not None and len(self._request.prompt) + num_tokens == len(self.ledger)

    async def _send_known(self, start: int, drafts: Sequence[int]) -> None:
        """Send everything known from position `start` on: the ledger and the drafts, in prefill-sized steps."""
        reply_from = len(self.ledger) - 1
        async for position, ids, payload in self._embedded(start, (*self.ledger[start:], *drafts)):
            self._send(position, ids, reply_from, payload)

    async def _embedded(
        self, start: int, ids: Sequence[int]
    ) -> AsyncGenerator[tuple[int, Sequence[int], Payload | None], None]:
        """(position, ids, hidden rows) of prefill-sized steps for `ids` at `start`; no rows where hop 0 embeds them."""
        chunk = self._chunk()
        for at in range(0, len(ids), chunk):
            part = ids[at : at + chunk]
            payload = None
            if self._ends is not None:
                payload = await self._ends.turn(None, lambda _, part=part: part)  # type: ignore[misc]
            yield start + at, part, payload

    def _chunk(self) -> int:
        """Rows of one step: at most prefill_chunk, and no more bytes than frame_bytes."""
        row_bytes = self._session.route.hops[0].offer.info.hidden_size * (
            4 if self._session.route.lease.precision == "fp32" else 2
        )
        return max(1, min(self._config.prefill_chunk, self._config.frame_bytes // row_bytes))

    def _send(self, position: int, ids: Sequence[int], reply_from: int, payload: Payload | None) -> None:
        carried = None if payload is not None else tuple(ids)
        self._session.send(position, len(ids), reply_from, carried, payload)

    def _send_window(self, drafts: Sequence[int], payload: Payload | None) -> None:
        position = len(self.ledger) - 1
        self._send(position, [self.ledger[-1], *drafts], position, payload)
        self._sent_at = asyncio.get_running_loop().time()

    async def _next_window(self, drafts: Sequence[int]) -> tuple[list[Drawn], Sequence[int], Payload | None]:
        """As _advance; lost hops are replaced meanwhile, and the window is sent again."""
        while True:
            try:
                if self._session.leaving:
                    self._sent_at = None
                    await self._healer.hand_over(self.committed)
                if self._session.has_detour and (start := await self._healer.rewire(self.committed)) is not None:
                    await self._send_known(start, drafts)
                return await self._advance(drafts)
            except HopLost:
                pass
            except (Corruption, ProtocolError) as error:
                self._session.lose(len(self._session.route.hops) - 1, f"sent what cannot be: {error}", untrusted=True)
            await self._repair(drafts)

    @property
    def committed(self) -> int:
        """Positions that every hop has computed and that nothing will take back."""
        return min(self._reached, len(self.ledger) - 1)

    async def _feed_standbys(self) -> None:
        followers, committed = self._healer.followers, self.committed
        if self._config.standby:
            followers.follow_all(committed, self._healer.excluded)
        due = followers.due(committed)
        for span, _, until in due:
            if span.start > 0:
                self._session.standbys.feed(span, until)
        for _, standby, until in [d for d in due if d[0].start == 0]:
            start, standby.fed = standby.fed, until
            async for position, ids, payload in self._embedded(start, self.ledger[start:until]):
                self._session.standbys.feed_first(standby, position, ids, payload)

    async def _repair(self, drafts: Sequence[int]) -> None:
        self._sent_at = None
        committed = self.committed
        at_token = len(self.ledger) - len(self._request.prompt)
        await self._send_known(await self._healer.repair(committed, at_token), drafts)

    async def _advance(self, drafts: Sequence[int]) -> tuple[list[Drawn], Sequence[int], Payload | None]:
        """Wait for the rows of the window sent, commit what they say, and prepare the next one (not sent yet)."""
        rows = await self._rows(1 + len(drafts))
        self.drafting.windows += 1
        took_s = None if self._sent_at is None else asyncio.get_running_loop().time() - self._sent_at
        proposal: list[Sequence[int]] = [()]
        drawn: list[Drawn] = []

        def decide(logits_TV: NDArray[np.float32]) -> list[int]:
            drawn.extend(self._decide(rows, logits_TV, drafts))
            self._commit(drawn, drafts)
            self._drafter.note([each.token for each in drawn], took_s)
            self.drafting.verdict = self._drafter.verdict
            proposal[0] = self._propose()
            return [self.ledger[-1], *proposal[0]]

        payload = None
        if self._ends is not None:
            payload = await self._ends.turn(_rows(rows), decide, self._bounds)
        else:
            decide(np.empty((0, 0), np.float32))
        return drawn, proposal[0], payload

    def _decide(self, rows: list[Step], logits_TV: NDArray[np.float32], drafts: Sequence[int]) -> list[Drawn]:
        if rows[0].content == "ids":
            ids = [i for step in rows if step.payload is not None for i in read_ids(step.payload, step.count)]
            if not all(0 <= i < self._sampler.vocab_size for i in ids):
                raise Corruption(f"the last hop drew tokens {ids}; there are 0 to {self._sampler.vocab_size - 1}")
            right = next((i for i, (a, b) in enumerate(zip(ids, drafts, strict=False)) if a != b), len(ids) - 1)
            return [Drawn(i, None, None) for i in ids[: right + 1]]
        if rows[0].content == "logits":
            assert rows[0].payload is not None
            logits_TV = numbers(_rows(rows), rows[0].payload.dtype)
        return verify(self._sampler, logits_TV, self.ledger, drafts, len(self._request.prompt))

    def _commit(self, drawn: list[Drawn], drafts: Sequence[int]) -> None:
        room = self._request.capacity - len(self.ledger)
        del drawn[room:]
        stop = next((i for i, d in enumerate(drawn) if self._sampler.is_stop_id(d.token)), len(drawn) - 1)
        del drawn[stop + 1 :]
        self.ledger.extend(d.token for d in drawn)
        self.drafting.drafted += len(drafts)
        self.drafting.accepted += max(0, len(drawn) - 1)

    def _propose(self) -> Sequence[int]:
        """Drafts for the next window: tokens that exist, no more than a decode window and the lease hold."""
        most = max(0, min(self._request.capacity - len(self.ledger), WINDOW_ROWS) - 1)
        drafts = self._drafter.propose(self.ledger, most)[:most]
        return list(takewhile(lambda i: 0 <= i < self._sampler.vocab_size, drafts))

    def _check_shape(self, content: Content, payload: Payload) -> None:
        """Rows join those of other requests (ends_batch.py), so they must be what this session's last hop owes."""
        lease, dtype = self._session.route.lease, WIRE_DTYPES[self._session.route.lease.precision]
        if self._ends is not None:
            due = ("hidden", dtype, self._ends.ends.hidden_size)
        elif lease.sampling is not None:
            due = ("ids", "int32", 1)
        else:
            due = ("logits", "fp32", self._sampler.vocab_size)
        if (content, payload.dtype, payload.width) != due:
            raise ProtocolError(f"{content} of width {payload.width} in {payload.dtype} came back, not {due}")

    async def _rows(self, count: int) -> list[Step]:
        """The steps that carry the `count` wanted rows after the ledger, in order (hops may have split them)."""
        rows: list[Step] = []
        expected = len(self.ledger) - 1
        self._moved_at = self._asked_at = asyncio.get_running_loop().time()
        while count > 0:
            step = await self._next_step()
            end = step.position + step.count
            if end > self._session.sent_until:
                raise ProtocolError(f"news of position {end - 1} came back, which was never sent")
            if step.count == 0 and end <= self._reached:
                continue  # no news: time goes on
            self._note_progress(end)
            if step.count == 0:
                continue  # progress of a prefill
            if step.position != expected or step.count > count or step.payload is None:
                raise ProtocolError(f"rows from position {step.position} came back where {expected} was due")
            self._check_shape(step.content, step.payload)
            rows.append(step)
            expected += step.count
            count -= step.count
        return rows

    def _note_progress(self, end: int) -> None:
        """Positions up to `end` have come back: the pace is learnt from it, and the clocks start anew."""
        now = asyncio.get_running_loop().time()
        if not self._is_prefill:
            self._pace.note(now - self._moved_at)
        self._moved_at = self._asked_at = now
        self._reached = max(self._reached, end)

    @property
    def _is_prefill(self) -> bool:
        return self._session.sent_until - self._reached > WINDOW_ROWS

    async def _next_step(self) -> Step:
        """The next result. While progress is overdue, the hop that holds it up is looked for and, if it can be, replaced.

        Raises HopLost then; PipelineStalled after config.stall_timeout_s without progress, whatever else comes back.
        """
        loop = asyncio.get_running_loop()
        while True:
            left_s = self._asked_at + self._pace.deadline_s(is_prefill=self._is_prefill) - loop.time()
            if left_s > 0:
                with contextlib.suppress(TimeoutError):
                    return await self._session.next_result(left_s)
            waited_s = loop.time() - self._moved_at
            if waited_s > self._config.stall_timeout_s:
                raise PipelineStalled(f"no step came back within {self._config.stall_timeout_s:g} s")
            await self._healer.suspect(waited_s, self.committed, self._pace.usual_s)
            self._asked_at = loop.time()


def _rows(steps: list[Step]) -> Rows:
    parts = [read_rows(s.payload, s.count) for s in steps if s.payload is not None]
    return parts[0] if len(parts) == 1 else np.concatenate(parts)
