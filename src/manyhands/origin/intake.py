"""What comes back of one request: awaited, checked against what was sent, and looked into while it is overdue.

returns.py ─ next_result ─► Intake.rows ─► the rows that follow the ledger          overdue ─► RepairExecutor.suspect
"""

import asyncio
import contextlib
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from manyhands.config import RequestConfig
from manyhands.errors import PipelineStalled, ProtocolError
from manyhands.origin.depth import MAX_AHEAD
from manyhands.origin.first_rows import Prefill
from manyhands.origin.pace import Pace
from manyhands.origin.route import Lease
from manyhands.origin.session import Session
from manyhands.wire.message import Content, DType, Step
from manyhands.worker.batch import WINDOW_ROWS
from manyhands.worker.execute import WIRE_DTYPES
from manyhands.worker.leaves import Leaves


class DueRows(NamedTuple):
    """What the rows of a session's last hop must be: they join those of other requests (ends_batch.py)."""

    content: Content
    dtype: DType
    width: int


def due_rows(lease: Lease, hidden_size: int | None, vocab_size: int) -> DueRows:
    """What comes back over a route of `lease`: hidden states of that width if the origin has the ends, else ids or logits."""
    if hidden_size is not None:
        return DueRows("hidden", WIRE_DTYPES[lease.precision], hidden_size)
    return DueRows("ids", "int32", 1) if lease.sampling is not None else DueRows("logits", "fp32", vocab_size)


class Suspect(Protocol):
    """What is needed of origin/repair.py."""

    def returned(self) -> None:
        """Positions have come back that had not."""

    async def suspect(self, waited_s: float, committed: int, known: int, usual_s: float) -> int:
        """Look for the hop that holds the route up, which counts as lost if it can be replaced. Returns how many more positions
        a hop says it has computed of the `known` ones, which are no guesses."""


class Intake:
    """The results of one session, for who has its `ledger`. `reached`: positions whose results, or the news of them, came."""

    _awaited: tuple[int, int] | None = None  # what was sent and known as a wait ended without rows

    def __init__(
        self,
        session: Session,
        healer: Suspect,
        pace: Pace,
        config: RequestConfig,
        ledger: Sequence[int],
        due: DueRows,
        prefill: Prefill,
    ) -> None:
        self._session, self._healer, self._pace, self._config = session, healer, pace, config
        self._ledger, self._due, self._prefill = ledger, due, prefill
        self.reached = 0
        self.leaves = Leaves()  # of the rows that came
        # When results last came, or were waited for; the same, had each row taken all it may; when that was looked into.
        self._moved_at = self._due_from = self._asked_at = 0.0

    @property
    def most_guesses(self) -> int:
        """How many guesses may follow a prompt at once: where hidden states come back, as many as there are."""
        return {"hidden": 1 << 30, "ids": MAX_AHEAD, "logits": WINDOW_ROWS - 1}[self._due.content]

    @property
    def committed(self) -> int:
        """Positions that every hop has computed and that nothing will take back."""
        return min(self.reached, len(self._ledger) - 1)

    async def rows(self) -> list[Step]:
        """The next steps that carry rows after the ledger, in order; none if the drafter has something to send first, which
        waits for the prompt to have left.

        Raises ProtocolError for what was not due, and as `Session.next_result`.
        """
        if self._awaited != self._known:  # else it is the same wait: who wakes the session again and again buys no time
            self._moved_at = self._due_from = self._asked_at = asyncio.get_running_loop().time()
        self._awaited, is_woken = None, False
        while True:
            await self._prefill.send(len(self._ledger))
            if is_woken and self._prefill.is_sent:
                self._awaited = self._known
                return []
            if (step := await self._next_step()) is None:
                is_woken = True
                continue
            end, expected, payload = step.position + step.count, len(self._ledger) - 1, step.payload
            if step.count == 0:
                if step.position > expected:
                    raise ProtocolError(f"position {expected} is computed, and its row did not come back")
                if end <= self.reached:
                    continue  # time goes on; a hop that recomputes from a log may be ahead of what is sent again
            if end > self._session.returns.sent_until:
                raise ProtocolError(f"news of position {end - 1} came back, which was never sent")
            if step.count == 0:
                self._note_progress(end)  # of a prefill
                continue
            if step.position != expected or payload is None:
                raise ProtocolError(f"rows from position {step.position} came back where {expected} was due")
            if (step.content, payload.dtype, payload.width) != self._due:
                came = f"{step.content} of width {payload.width} in {payload.dtype}"
                raise ProtocolError(f"{came} came back, not {tuple(self._due)}")
            self._note_progress(end)
            if self._session.route.lease.attests:
                self.leaves.note(step.position, payload.data, step.count)
            return [step]

    def repaired(self) -> None:
        """What is awaited is sent again, and has all its time."""
        self._awaited = None

    @property
    def _known(self) -> tuple[int, int]:
        """The end of what was sent, and of what is committed."""
        return self._session.returns.sent_until, len(self._ledger)

    def _note_progress(self, end: int) -> None:
        """Positions up to `end` have come back. Few of them buy little time: the clock of replacements goes on by what they may
        take (Pace.row_s)."""
        self._moved_at = now = asyncio.get_running_loop().time()
        self._due_from = min(now, self._due_from + (end - self.reached) * self._pace.row_s)
        self._asked_at = max(self._asked_at, self._due_from)
        self.reached = max(self.reached, end)
        self._healer.returned()

    @property
    def _is_prefill(self) -> bool:
        return len(self._ledger) - self.reached > WINDOW_ROWS

    async def _next_step(self) -> Step | None:
        """The next result; None if the drafter woke the session before it came. While progress is overdue, the hop that holds
        it up is looked for and, if it can be, replaced.

        Raises HopLost then; PipelineStalled after config.stall_timeout_s in which nothing new came back or was told of.
        """
        loop = asyncio.get_running_loop()
        while True:
            left_s = self._asked_at + self._pace.deadline_s(is_prefill=self._is_prefill) - loop.time()
            if left_s > 0:
                with contextlib.suppress(TimeoutError):
                    return await self._session.next_result(left_s)
            await self._suspect(loop.time())
            self._asked_at = loop.time()

    async def _suspect(self, now: float) -> None:
        session, limit_s = self._session, self._config.stall_timeout_s
        if gained := await self._healer.suspect(
            now - self._due_from, self.committed, len(self._ledger), self._pace.usual_s
        ):
            self._moved_at = now  # of a replay nothing comes back
            self._due_from = min(now, self._due_from + gained * self._pace.row_s)
        if now - self._moved_at > limit_s and not session.losses and not session.returns.results:
            raise PipelineStalled(f"no step came back within {limit_s:g} s")
