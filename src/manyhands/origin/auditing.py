"""Which answers of an origin are audited (audit.py), and what follows from that."""

import logging
from collections.abc import Callable

from manyhands.config import RequestConfig
from manyhands.core import NodeId
from manyhands.origin.answer import Answer
from manyhands.origin.audit import DRAW, Audit, Auditor, Draw
from manyhands.origin.ends_batch import EndsBatcher
from manyhands.origin.loop import Generation
from manyhands.origin.repair import RepairExecutor
from manyhands.origin.repair_plan import Event
from manyhands.origin.session import Session

logger = logging.getLogger(__name__)


class Audits:
    """Audits a share of the answers ([request] audit), each drawn when it has ended. `distrust`: use a node no more."""

    def __init__(
        self,
        config: RequestConfig,
        ends: EndsBatcher | None,
        distrust: Callable[[NodeId], object],
        draw: Draw = DRAW,
    ) -> None:
        self._config, self._ends, self._distrust, self._draw = config, ends, distrust, draw

    @property
    def are_wanted(self) -> bool:
        """Whether hops have to keep hashes: of all answers, so that they do not know which is audited."""
        return self._config.audit > 0 and self._ends is not None

    async def after(self, answer: Answer, session: Session, generation: Generation, healer: RepairExecutor) -> None:
        """`answer` has ended: audit it if it is drawn, and note what that found.

        Takes as long as a request may look for nodes, and its whole answer took, at most.
        """
        if not session.route.lease.attests or self._ends is None or self._draw() >= self._config.audit:
            return
        ids = generation.ledger[: generation.committed]
        limit_s, around = self._config.patience_s + (answer.timings.total_s or 0.0), (healer.followers, healer.excluded)
        auditor = Auditor(session, self._ends, self._config, ids, generation.came, *around, limit_s, self._draw)
        answer.audit = await auditor.run()
        self._note(answer, answer.audit, session)

    def _note(self, answer: Answer, audit: Audit, session: Session) -> None:
        logger.info("session=%s audit %s: %s", session.name, audit.outcome, audit.detail)
        if audit.outcome in ("failed", "disputed"):
            names = tuple(offer.name for offer in audit.nodes)
            answer.events.append(Event("audit", names, len(answer.token_ids), f"{audit.outcome}: {audit.detail}"))
        if audit.outcome == "failed":
            for offer in audit.nodes:
                self._distrust(offer.node)
