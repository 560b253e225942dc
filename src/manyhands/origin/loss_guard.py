"""Samples what rounding does to a route's answers, and switches it off where that is too much (lossy.py says when).

    the first rows of a prompt ─┬─ a session without loss ─ rows ─ logits ─┐
                                └─ a session with it ───── rows ─ logits ─┴─ KL, flips

Both sessions lie on the hops of the request, which waits for them; they hold a lease of SAMPLE_ROWS positions and are closed.
"""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Final

import numpy as np
from numpy.typing import NDArray

from manyhands.errors import ManyhandsError, ProtocolError
from manyhands.origin.ends_batch import EndsBatcher
from manyhands.origin.intake import due_rows
from manyhands.origin.lossy import LEAST_ROWS, SAMPLE_ROWS, Loss, LossSample, LossSamples, Lossy
from manyhands.origin.route import Lease
from manyhands.origin.session import Session
from manyhands.origin.sessions import Sessions
from manyhands.route.offer import Offer
from manyhands.wire.rows import read_rows
from manyhands.worker.quality import log_softmax

logger = logging.getLogger(__name__)

# For the rows of a sample to come back. A request whose guard gets no answer is sent without loss.
SAMPLE_S: Final = 30.0


class LossGuard:
    """Guards one model at one origin. `ends` None: the edges have them, and there is nothing to compare with."""

    def __init__(self, sessions: Sessions, ends: EndsBatcher | None) -> None:
        self.samples = LossSamples()
        self._sessions, self._ends = sessions, ends

    def lossy(self, prompt_length: int) -> tuple[Lossy | None, Loss]:
        """What a request that allows loss may ask of its hops, and why if that is nothing."""
        if self._ends is None:
            return None, Loss(True, why="the last hop has the head: what loss does cannot be compared here")
        if self._ends.ends.holds_numbers:
            return None, Loss(True, why="rows of this model hold tokens' ids, or chosen positions: loss makes others")
        if prompt_length < LEAST_ROWS:
            return None, Loss(True, why=f"a prompt of less than {LEAST_ROWS} tokens gains nothing")
        return Lossy(((0, prompt_length),)), Loss(True)

    async def judge(self, route: Sequence[Offer], session: Session, prompt: Sequence[int]) -> tuple[bool, Loss]:
        """Whether the session may go on as it was opened, and what is known of its loss.

        It is closed if that cannot be said, and the error raised.
        """
        boundaries = session.route.boundaries
        if not boundaries:
            return True, Loss(True, why="no link of the route was measured to be slow")
        ways = tuple((offer.node, offer.info.span) for offer in route), boundaries
        now = asyncio.get_running_loop().time()
        if (found := self.samples.find(ways, now)) is None:
            try:
                found = await self._sample(route, session, prompt[:SAMPLE_ROWS])
            except (ManyhandsError, TimeoutError) as error:
                return False, Loss(True, why=f"the guard could not compare: {error or 'no answer'}")
            except BaseException:
                self._sessions.close(session)
                raise
            self.samples.note(ways, found, now)
            if found.is_too_large:
                logger.warning("rows are sent without loss over %s: %s", [offer.name for offer in route], found)
        if found.is_too_large:
            return False, Loss(True, why="the guard found that the next tokens differ too much", sample=found)
        return True, Loss(True, tuple(sorted(boundaries)), sample=found)

    async def _sample(self, route: Sequence[Offer], session: Session, ids: Sequence[int]) -> LossSample:
        """Raises what ends one of the two sessions, TimeoutError."""
        lease = replace(session.route.lease, capacity=len(ids), prompt_length=len(ids), handle=None, lossy=None)
        lossy = replace(lease, lossy=Lossy(((0, len(ids)),), session.route.boundaries))
        both = [self._logits(route, each, ids) for each in (lease, lossy)]
        exact, rounded = await asyncio.gather(*both, return_exceptions=True)
        for outcome in (exact, rounded):
            if isinstance(outcome, BaseException):
                raise outcome
        assert isinstance(exact, np.ndarray) and isinstance(rounded, np.ndarray) and self._ends is not None
        found: list[LossSample] = []

        def compare(_: NDArray[np.float32]) -> Sequence[int]:
            found.append(divergence(exact, rounded))
            return ()

        await self._ends.turn(None, compare)  # on the device's thread: the vocabulary may be large
        return found[0]

    async def _logits(self, route: Sequence[Offer], lease: Lease, ids: Sequence[int]) -> NDArray[np.float32]:
        """What follows each of `ids`, by a session of its own."""
        ends, parts, done = self._ends, list[NDArray[np.float32]](), 0
        assert ends is not None

        def keep(logits_TV: NDArray[np.float32]) -> Sequence[int]:
            parts.append(logits_TV.copy())
            return ()

        session = await self._sessions.open(route, lease)
        try:
            async with asyncio.timeout(SAMPLE_S):
                payload = await ends.turn(None, lambda _: ids, None, partial(session.route.as_sent, position=0))
                session.send(0, len(ids), 0, None, payload, len(ids))
                due = due_rows(lease, ends.ends.hidden_size, ends.ends.vocab_size)
                while done < len(ids):
                    step = await session.next_result(SAMPLE_S)
                    if step is None or step.payload is None or (step.content, *step.payload[:2]) != due:
                        raise ProtocolError("what came back of a sample are no rows of it")
                    if step.position != done or done + step.count > len(ids):
                        raise ProtocolError(f"row {step.position} of a sample came back where {done} was due")
                    await ends.turn(read_rows(step.payload, step.count), keep)
                    done += step.count
        finally:
            self._sessions.close(session)
        return np.concatenate(parts)


def divergence(exact_TV: NDArray[np.float32], rounded_TV: NDArray[np.float32]) -> LossSample:
    """How far two sets of logits are apart, row by row."""
    total, flips = 0.0, 0
    for exact_V, rounded_V in zip(exact_TV, rounded_TV, strict=True):
        log_p, log_q = log_softmax(exact_V), log_softmax(rounded_V)
        total += float(np.sum(np.exp(log_p) * (log_p - log_q)))
        flips += int(exact_V.argmax() != rounded_V.argmax())
    return LossSample(len(exact_TV), total / len(exact_TV), flips)
