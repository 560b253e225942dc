"""Audits: whether the hops of an answer computed what their layers make of what they were given.

    Attest ─► every hop: is what it says it made what the next one says it was given, and the last row what came here?
    each hop's rows again, out of the log of the hop before ─► another node of these layers ─ Attest ─► the same roots?
    if not, a third node decides

Nodes of one arithmetic class compute the same bits, so roots (worker/leaves.py) are compared for equality. Hops learn that they
are audited once they have said what they made. What two nodes contradict each other in is signed by both.
"""

import asyncio
import contextlib
import logging
import random
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, Literal, NamedTuple

from manyhands.config import RequestConfig
from manyhands.core import UNPROVEN, NodeId, Span
from manyhands.errors import PipelineAborted
from manyhands.net.transport import try_send
from manyhands.origin.ends_batch import EndsBatcher
from manyhands.origin.first_rows import embedded, feed_first, prefill_parts
from manyhands.origin.route import Hop
from manyhands.origin.session import HopLost, Session
from manyhands.origin.standby import Standby
from manyhands.origin.standby_search import Followers
from manyhands.route.offer import Offer
from manyhands.wire.attest_message import Attest, Attested
from manyhands.wire.codec import plain
from manyhands.wire.control import encode
from manyhands.wire.signed import is_attested
from manyhands.worker.feeding import MAX_FEED_ROWS
from manyhands.worker.leaves import Leaves

logger = logging.getLogger(__name__)

# passed: others computed the same · failed: `nodes` did not compute what they should have · disputed: `nodes` contradict
# each other, and no third node could decide · impossible: not all could be compared, and the rest was right
Outcome = Literal["passed", "failed", "disputed", "impossible"]
WORST_FIRST: Final[tuple[Outcome, ...]] = ("failed", "disputed", "impossible", "passed")
Draw = Callable[[], float]  # at random from [0, 1)

DRAW: Final[Draw] = random.SystemRandom().random
ANSWER_S: Final = 10.0  # for an Attested


class Signed(NamedTuple):
    """What `node` said, and has signed (wire/signed.py:is_attested)."""

    node: NodeId
    said: Attested

    @property
    def is_whole(self) -> bool:
        """Whether it has hashes of all positions that it was asked for."""
        return bool(self.said.given and self.said.made)


@dataclass(frozen=True, slots=True)
class Audit:
    """What an audit found. `spans`: the layers that others computed again, or of which something is wrong. `nodes` are named in
    failed and disputed. `evidence`: what they and others have signed. `detail`: a line for people."""

    outcome: Outcome
    detail: str
    spans: tuple[Span, ...] = ()
    nodes: tuple[Offer, ...] = ()
    evidence: tuple[Signed, ...] = field(default=(), repr=False)

    def as_object(self) -> dict[str, Any]:
        """The JSON form (docs/cli.md)."""
        layers = [str(span) for span in self.spans]
        nodes = [{"node": each.node, "name": each.name} for each in self.nodes]
        evidence = [{"node": each.node, "attested": encode(each.said).decode()} for each in self.evidence]
        return {
            "outcome": self.outcome,
            "layers": layers,
            "nodes": nodes,
            "detail": self.detail,
            "evidence": evidence,
        }


class Auditor:
    """Audits one session whose answer has ended and that is still open, for `limit_s` at most. `ids`: of the positions that all
    hops have computed; `came`: the leaves of the rows that came back; `excluded`: nodes not to be asked."""

    def __init__(
        self,
        session: Session,
        ends: EndsBatcher,
        config: RequestConfig,
        ids: Sequence[int],
        came: Leaves,
        followers: Followers,
        excluded: Collection[NodeId],
        limit_s: float,
        draw: Draw = DRAW,
    ) -> None:
        self._session, self._ends, self._config, self._ids, self._came = session, ends, config, ids, came
        self._followers, self._excluded, self._draw = followers, set(excluded), draw
        self._said: list[Signed] = []  # by the hops, in their order
        self._us = session.route.signer.node
        self._limit_s, self._ends_at = limit_s, asyncio.get_running_loop().time() + limit_s

    async def run(self) -> Audit:
        """Takes about as long as a prefill of `ids`. Nothing that goes wrong is raised: the answer stands."""
        if self._session.route.epoch > 1:
            return impossible("its route was changed: rows of nodes that left cannot be compared")
        if self._session.route.lease.lossy is not None:
            return impossible("it may have been sent rows with loss, of which hops keep no hashes")
        if not self._came.begin < len(self._ids) <= self._came.end:
            return impossible("the rows that its tokens were drawn from did not come in this attempt")
        return await self._within(self._by_their_words) or await self._all_again()

    async def _within(
        self, finding: Callable[[], Awaitable[Audit | None]], lacks: Callable[[], str] = str
    ) -> Audit | None:
        """What `finding` comes to, or why it does not. `lacks`: what it waited for in the end, if that can be told."""
        try:
            async with asyncio.timeout_at(self._ends_at):
                return await finding()
        except TimeoutError:
            return impossible(f"it was not done within {self._limit_s:.0f} s{lacks()}")
        except Exception as error:  # also what the ends' device raises: it ends the audit, not the answer
            logger.warning("session=%s its audit failed: %r", self._session.name, error)
            return impossible(str(error) or type(error).__name__)

    async def _by_their_words(self) -> Audit | None:
        """What is wrong by what the hops say alone."""
        return await self._hear() or await self._at_boundaries()

    async def _all_again(self) -> Audit:
        """Have others compute what each hop did, side by side: the worst that is found. This machine's own hops, and those of
        layers that no other node has, are left out."""
        hops = [hop.offer for hop in self._session.route.hops]
        others = [index for index, hop in enumerate(hops) if hop.node != self._us]
        again = [self._within(partial(self._again, index), partial(self._lacks, index)) for index in others]
        found = await asyncio.gather(*again)
        audits = [audit for audit in found if audit is not None]
        alone = [str(hops[index].info.span) for index, audit in zip(others, found, strict=True) if audit is None]
        worst = min(audits, key=lambda audit: WORST_FIRST.index(audit.outcome), default=None)
        return _all_passed(audits, alone) if worst is None or worst.outcome == "passed" else worst

    async def _hear(self) -> Audit | None:
        """What all hops attest (`_said`). None unless one says nothing, as no honest hop does."""
        hops = self._session.route.hops
        said = await asyncio.gather(*(self._ask(index, hop) for index, hop in enumerate(hops)))
        for hop, each in zip(hops, said, strict=True):
            if each is None or not each.is_whole:
                if each is not None and self._session.begins_at:
                    return impossible(f"{hop.offer.name} goes on with what it has no hashes of")
                what = f"{hop.offer.name} does not say what it computed"
                return Audit("disputed", what, (hop.offer.info.span,), (hop.offer,))
            self._said.append(each)
        return None

    async def _ask(self, index: int, hop: Hop) -> Signed | None:
        """What the node of `hop`, or a standby of it, attests; None if it does not within ANSWER_S, or says something else than
        it was asked for, or has not signed it."""
        session, until = self._session, len(self._ids)
        asked = session.id, session.route.epoch, index, self._start(index), until
        node, info = hop.offer.node, hop.offer.info
        session.attested.pop((node, index), None)
        try_send(hop.control, Attest(*asked))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(ANSWER_S):
                while (node, index) not in session.attested and not hop.control.is_closed:
                    await self._stirred()
        if (said := session.attested.get((node, index))) is None:
            return None
        right = Attested(*asked, info.model, info.precision, info.span, said.given, said.made, said.signature)
        return Signed(node, said) if said == right and is_attested(said, node) else None

    def _start(self, index: int) -> int:
        """From where on rows of hop `index` are compared: of the last one those that came here."""
        return self._came.begin if index == len(self._session.route.hops) - 1 else 0

    async def _at_boundaries(self) -> Audit | None:
        """Where a hop was given other rows than the one before says it made. This origin knows what it sent and what came."""
        hops, said = [hop.offer for hop in self._session.route.hops], self._said
        sent, last = await self._sent(), len(hops) - 1
        if said[0].said.given != sent.root(0, len(self._ids)):
            return self._failed(0, hops[0], "attests other rows than it was sent", said[0])
        if said[last].said.made != self._came.root(self._came.begin, len(self._ids)):
            return self._failed(last, hops[last], "attests other rows than those that came from it", said[last])
        for index in range(last):
            before, after = hops[index], hops[index + 1]
            if said[index].said.made != said[index + 1].said.given:
                what = f"{before.name} attests other rows than {after.name} says came from it"
                return Audit("disputed", what, (before.info.span,), (before, after), (said[index], said[index + 1]))
        return None

    async def _sent(self) -> Leaves:
        leaves = Leaves()
        for start, ids in prefill_parts(self._session, self._config, 0, self._ids):
            _, payload = await embedded(self._session, self._ends, start, ids)
            assert payload is not None, "the origin embeds"
            leaves.note(start, plain(payload, len(ids)).data, len(ids))
        return leaves

    async def _again(self, index: int) -> Audit | None:
        """Whether another node makes the same of what hop `index` was given; None if there is none that can."""
        hop, said, asked = self._session.route.hops[index].offer, self._said[index], set(self._excluded)
        if (other := await self._repeat(index, asked)) is None:
            return None
        by, repeated = other
        if repeated.said.given != said.said.given:
            return self._misfed(index, by, repeated)
        if repeated.said.made == said.said.made:
            return Audit("passed", f"{by.name} computed the same as {hop.name}", (hop.info.span,))
        if by.node == self._us:
            return self._failed(index, hop, "did not compute what this machine does", said, repeated)
        return await self._decided(index, by, repeated, asked)

    async def _decided(self, index: int, by: Offer, repeated: Signed, asked: set[NodeId]) -> Audit:
        """Hop `index` and `by` differ: a third node decides, if there is one."""
        hop, said = self._session.route.hops[index].offer, self._said[index]
        if (third := await self._repeat(index, asked)) is not None:
            judge, decisive = third
            if decisive.said.given != said.said.given:
                return self._misfed(index, judge, decisive)
            evidence = said, repeated, decisive
            if decisive.said.made == repeated.said.made:
                return self._failed(index, hop, f"did not compute what {by.name} and {judge.name} do", *evidence)
            if decisive.said.made == said.said.made:
                return self._failed(index, by, f"did not compute what {hop.name} and {judge.name} do", *evidence)
        what = f"{hop.name} and {by.name} compute different numbers, and no third node could decide"
        return Audit("disputed", what, (hop.info.span,), (hop, by), (said, repeated))

    def _failed(self, index: int, offer: Offer, what: str, *evidence: Signed) -> Audit:
        span = self._session.route.hops[index].offer.info.span
        return Audit("failed", f"{offer.name} {what}", (span,), (offer,), evidence)

    def _misfed(self, index: int, by: Offer, repeated: Signed) -> Audit:
        """`by` attests that it was given other rows than hop `index` was."""
        if index == 0:
            return self._failed(index, by, "attests other rows than it was sent", repeated)
        before = self._session.route.hops[index - 1].offer
        what = f"{before.name} attests other rows than {by.name} says came from it"
        return Audit("disputed", what, (before.info.span,), (before, by), (self._said[index - 1], repeated))

    async def _repeat(self, index: int, asked: set[NodeId]) -> tuple[Offer, Signed] | None:
        """Another node that holds the layers of hop `index` and was not `asked`, and what it makes of the same rows; None if
        there is none. A node that fails, or is of another arithmetic class, is passed over."""
        hop = self._session.route.hops[index]
        span = hop.offer.info.span
        if hop.arithmetic.endswith(UNPROVEN):
            return None  # its bits need not be another's
        while (standby := await self._recruit(span, asked)) is not None:
            if await self._follow(standby, index):
                repeated = await self._ask(index, standby.hop)
                if self._session.standbys.by_span.get(span) is standby:  # else it left meanwhile
                    self._session.standbys.dismiss(span)
                if repeated is not None and repeated.is_whole:
                    return standby.hop.offer, repeated
        return None

    async def _recruit(self, span: Span, asked: set[NodeId]) -> Standby | None:
        """The standby of the hop of `span`, or one on a node that was not `asked`; those that cannot be reached are passed
        over."""
        num_asked = -1
        while span not in self._session.standbys.by_span and len(asked) > num_asked:
            num_asked = len(asked)
            await self._followers.find(span, asked, pick=partial(self._pick, asked))
        if (standby := self._session.standbys.by_span.get(span)) is not None:
            asked.add(standby.hop.offer.node)
        return standby

    def _pick(self, asked: set[NodeId], offers: Sequence[Offer]) -> Offer:
        """This machine itself if it can, whom it need not doubt; else any. It counts as `asked`."""
        by_node = {offer.node: offer for offer in offers}  # a node that names many spans is no likelier
        node = self._us if self._us in by_node else list(by_node)[int(self._draw() * len(by_node))]
        asked.add(node)
        return by_node[node]

    async def _follow(self, standby: Standby, index: int) -> bool:
        """Whether `standby` computes all that hop `index` has, in the same arithmetic; False once it is let go. Raises HopLost
        once the hop before, which is to feed it, is gone. What hops say of the route now ends nothing."""
        session, hops, until = self._session, self._session.route.hops, len(self._ids)
        hop, before = hops[index], hops[index - 1] if index else None
        span = hop.offer.info.span
        while standby.computed < until:
            if session.standbys.by_span.get(span) is not standby:
                return False
            if standby.is_open and standby.hop.arithmetic != hop.arithmetic:
                session.standbys.dismiss(span)
                return False
            if standby.hop.epoch == session.route.epoch and standby.computed == standby.fed:
                await self._feed(standby, span, min(until, standby.fed + MAX_FEED_ROWS))
            elif before is not None and before.control.is_closed:
                raise HopLost(f"{before.offer.name} is gone, and with it the rows that came to {hop.offer.name}")
            else:
                await self._stirred()
        return True

    def _lacks(self, index: int) -> str:
        """What the standby of hop `index` had not got, or not computed. A hop does not tell that its log is gone."""
        hops = self._session.route.hops
        standby = self._session.standbys.by_span.get(hops[index].offer.info.span)
        if standby is None or standby.computed == standby.fed:
            return ""
        feeder = f"{hops[index - 1].offer.name} was to feed it from its output log" if index else "it was sent"
        return (
            f": {standby.hop.offer.name} had computed {standby.computed} of the {standby.fed} positions that {feeder}"
        )

    async def _stirred(self) -> None:
        """Until something comes. Raises PipelineAborted once the session has ended."""
        if self._session.is_closed:
            raise PipelineAborted("the session has ended")
        await self._session.stirred()

    async def _feed(self, standby: Standby, span: Span, until: int) -> None:
        if span.start > 0:
            return self._session.standbys.feed(span, until)
        await feed_first(self._session, self._ends, self._config, standby, self._ids, until)


def _all_passed(passed: Sequence[Audit], alone: Sequence[str]) -> Audit:
    """Nothing was wrong with what `passed`; no other node has the layers `alone`."""
    left_out = [f"no other node of their arithmetic class could compute layers {', '.join(alone)}"] if alone else []
    if not passed:
        return impossible(left_out[0] if alone else "all layers were computed on this machine")
    details = "; ".join([*(each.detail for each in passed), *left_out])
    return Audit("passed", details, tuple(span for each in passed for span in each.spans))


def impossible(why: str) -> Audit:
    """Nothing could be compared."""
    return Audit("impossible", why)
