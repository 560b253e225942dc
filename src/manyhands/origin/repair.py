"""Carry out repairs of one session: ask for offers, plan (repair_plan.py), connect, reshape, until the route stands again."""

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Literal

from manyhands.config import RequestConfig
from manyhands.core import NodeId
from manyhands.errors import ManyhandsError, PipelineAborted, ShardUnavailable
from manyhands.origin.alone import ASK_AGAIN_S, Alone, pause_s
from manyhands.origin.give_back import GiveBack
from manyhands.origin.pace import Thrift, replay_s
from manyhands.origin.probe import hold_up, lose_beside, lose_doubtful, lose_misleading, trace
from manyhands.origin.relief import Relief
from manyhands.origin.repair_plan import Event, Repair, RepairPlan, Slot, Warm, plan_repair
from manyhands.origin.route import MAX_SETBACKS, Hop
from manyhands.origin.session import HopLost, Session
from manyhands.origin.standby_search import Followers, RouteServices
from manyhands.route.offer import Offer
from manyhands.route.permit import with_ends_at_edges

logger = logging.getLogger(__name__)

# Between two changes of a session's links: a hop that calls for them without need costs no more than a round trip a second.
REWIRE_PAUSE_S = 1.0


class RepairExecutor:
    """Repairs one session. `excluded` grows: a node that was lost once comes back into this session only if no other
    covers its layers (a link may have been cut, a node restarted), and never if untrusted. `late_s`: how late the event loops
    of this node and of another have run lately."""

    def __init__(
        self,
        session: Session,
        around: RouteServices,
        config: RequestConfig,
        last_resort: Offer | None = None,
        late_s: Callable[[NodeId], float] = lambda node: 0.0,
    ) -> None:
        self._session, self._around, self._config, self._last_resort = session, around, config, last_resort
        self.followers = Followers(session, around)
        self._back = GiveBack(session, around, self.followers)
        self.relief = Relief(session, self.followers, config.reopen_timeout_s, keeps=config.standby)
        self.excluded: set[NodeId] = set()
        self.repairs: list[Repair] = []
        self.events: list[Event] = []
        self._fruitless = self._attempts = self._doubted = 0  # the last: in a row, that doubts alone ended
        self._alone = Alone(config.load_timeout_s)
        self._may_rewire_at, self._committed = 0.0, -1
        self._are_apart = False  # hops of this session could not reach each other
        self._starved: int | None = None  # where a step was held up last: the first layer
        self._late_s, self._thrift = late_s, Thrift(config.stall_timeout_s)
        self._replaying: tuple[float, float] | None = None  # when the repair that recomputes now was planned, and began

    async def repair(self, committed: int, at_token: int) -> int:
        """Make the route stand again with the caches of positions [0, committed) intact.

        Returns the position from which on the origin must send to hop 0 (at most `committed`). Deadlines:
        config.patience_s to find nodes, config.reopen_timeout_s for each exchange, then config.load_timeout_s for the last
        resort, if there is one, to open. Raises ShardUnavailable if nothing covers the lost layers by then, PipelineAborted
        after config.max_repairs without progress (with a last resort, which then takes over: after as many again).
        """
        now = asyncio.get_running_loop().time
        began, session, self._replaying = now(), self._session, None
        silent_s = began - session.last_progress if session.last_progress else 0.0
        await trace(session, Thrift.probe_s(self._config.probe_timeout_s, self.route_late_s()))
        reason = "; ".join([*session.losses.values(), *session.stuck.values()])
        lost: list[str] = []
        before = [hop.offer for hop in session.route.hops]
        self._back.note_lost([session.route.hops[i].offer.node for i in session.losses])
        try:
            self._count(committed, reason)
            self._attempts, self._alone = 0, Alone(self._config.load_timeout_s)
            while session.losses or session.stuck or not all(hop.is_whole for hop in session.route.hops):
                lose_beside(session)
                lost += (names := tuple(session.route.hops[i].offer.name for i in session.losses))
                if lost:
                    self.events.append(Event("shard_status", names, at_token, f"degraded: {reason}"))
                plan = await self._find_plan(committed, began)
                planned, self._attempts = now(), self._attempts + 1
                reason = await self._alone.bound(self._try(plan, reason), reason)
        except ManyhandsError as error:
            self.events.append(Event("pipeline_aborted", tuple(lost), at_token, str(error)))
            raise
        self.excluded -= self._back.excused()
        if any(slot.offer == self._last_resort for slot in plan.slots):
            self._around.note_fallback()
        if not lost:
            logger.info("session=%s goes on at token %d: %s", session.name, at_token, reason)
            return plan.replay_from
        names = tuple(slot.offer.name for slot in plan.slots if slot.offer not in before)
        is_alike = len(plan.slots) == len(before) and all(slot.offer.info.is_loaded for slot in plan.slots)
        kind: Literal["shard_failover", "reshard"] = "shard_failover" if is_alike else "reshard"
        self.events.append(Event(kind, names, at_token, f"{', '.join(dict.fromkeys(lost))} -> {', '.join(names)}"))
        self.repairs.append(Repair(reason, tuple(lost), names, at_token, silent_s, now() - planned, now() - began))
        self._replaying = planned, began
        logger.info("session=%s repaired at token %d: %s -> %s", session.name, at_token, lost, names)
        return plan.replay_from

    def returned(self) -> None:
        """A position that is new has come back: what the last repair had recomputed, has been."""
        for hop in self._session.route.hops:
            hop.is_rebuilding, hop.setbacks = False, 0
        self._session.told.forgive(self._session.untrusted_nodes)
        if self._replaying is not None:
            (planned, began), now = self._replaying, asyncio.get_running_loop().time()
            self.repairs[-1] = replace(self.repairs[-1], replay_s=now - planned, total_s=now - began)
            self._replaying = None

    async def restore(self, begins_at: int) -> int:
        """As a session begins: rebuild hops that lack positions [0, `begins_at`) from the logs of those before them.

        Returns the position from which on the origin must send. What is lost meanwhile is for `repair`.
        """
        route, start = self._session.route, begins_at
        while not self._session.losses and not all(hop.is_whole for hop in route.hops):
            plan = plan_repair([hop.offer for hop in route.hops], (), route.short, route.logless, (), (), begins_at)
            await self._try(plan, "")
            start = plan.replay_from
        return start

    async def _try(self, plan: RepairPlan, reason: str) -> str:
        """Carry `plan` out; the hops are whole if it went through. Returns the reason, longer if it did not."""
        self._session.apart = None
        try:
            await self._reshape(plan)
        except HopLost as error:
            self._are_apart |= self._session.apart is not None
            self._doubted += not self._session.losses
            if self._doubted > MAX_SETBACKS:  # what the first plans did not know of logs and caches is known by now
                lose_doubtful(self._session)
            return f"{reason}; then {error}"
        self._doubted = 0
        self._session.route.answered(plan.slots)
        return reason

    async def hand_over(self, committed: int) -> None:
        """Make before break: a hop that would like to leave gets a standby, and counts as lost when that has caught up.

        Where no single node can be its standby, it counts as lost if others together can take its place; else it serves on.
        """
        session = self._session
        for index, reason in list(session.leaving.items()):
            span = session.route.hops[index].offer.info.span
            match self.followers.recruit(span, committed, self._back.barred(self.excluded)):
                case "ready":
                    self.excluded.discard(session.standbys.by_span[span].hop.offer.node)
                    del session.leaving[index]
                    session.lose(index, reason)
                case "none":
                    del session.leaving[index]
                    if await self._is_covered(index, committed):
                        session.lose(index, reason)
                case "following":
                    pass

    def relieve(self, full: Collection[int], committed: int) -> None:
        """Make before break: hops that are `full` count as lost once others have room for all of them, unless
        one repair more would end the request."""
        session, now = self._session, asyncio.get_running_loop().time()
        hops, standbys = session.route.hops, session.standbys
        nodes = {hops[i].offer.node for i in full}  # a node keeps all of its places, or none
        spans = [hop.offer.info.span for hop in hops if hop.offer.node in nodes]
        if session.losses or self._is_last(committed):
            return
        if self.relief.is_ready(spans, self._back.barred(self.excluded), now):
            self.excluded -= {standbys.by_span[span].hop.offer.node for span in spans}
            standbys.full.update(nodes)
            for index in full:
                session.lose(index, "has cache for no more positions")

    def give_back(self, committed: int) -> None:
        """Where a spare is a hop: see to its layers going back to a node that serves them. Waits for nothing."""
        self._back.go_on(committed, self.excluded)

    async def rewire(self, committed: int) -> int | None:
        """Give every hop its place again, in a new epoch, over the best links there are by now; caches stay.

        Returns the position from which on the origin must send again; None if it must not: too soon after the last time, or
        something else is wrong that goes first. Raises HopLost if a hop does not answer.
        """
        session, now = self._session, asyncio.get_running_loop().time()
        if now < self._may_rewire_at or any(hop.is_rebuilding or not hop.is_whole for hop in session.route.hops):
            return None
        session.has_detour, self._may_rewire_at = False, now + REWIRE_PAUSE_S
        plan = plan_repair([hop.offer for hop in session.route.hops], (), {}, (), (), (), committed)
        with contextlib.suppress(ShardUnavailable):
            hops = await asyncio.gather(*(self._relinked(i, hop) for i, hop in enumerate(session.route.hops)))
            if not session.losses:
                await session.reshape(plan.slots, hops)
                session.route.answered(plan.slots)
                for index in session.route.short:
                    if not session.told.may_go_back(session.route.hops[index].offer.node):
                        session.lose(index, "goes on from fewer positions than it has, time and again")
                logger.info("session=%s moved to better links at position %d", session.name, committed)
                return await self.restore(plan.replay_from)
        return None

    async def _relinked(self, index: int, hop: Hop) -> Hop:
        best = await self._around.connect(index, hop.offer, len(self._session.route.hops), self._session.route.lease)
        return replace(hop, control=best.control, data=best.data, outbox=deque())  # what waits may have to stay

    async def suspect(self, waited_s: float, committed: int, known: int, usual_s: float) -> int:
        """A step is overdue. The hop that holds it up counts as lost if another node can take its place and, unless it is
        silent, if that is worth a replay (pace.py): the session's next wait raises HopLost. `usual_s` is the usual step.
        Returns how many more of the first `known` positions, beyond which are guesses, a hop says it has computed.
        """
        session, now = self._session, asyncio.get_running_loop().time
        began = now()
        holdup = await hold_up(session, Thrift.probe_s(self._config.probe_timeout_s, self.route_late_s()))
        late_s = self.route_late_s()  # anew: if this process stood still meanwhile, answers wait to be read
        if session.losses or session.returns.has_news(committed) or lose_misleading(session):
            return 0
        rebuilding = session.route.rebuilding
        told = holdup.with_news(committed, known, rebuilding)
        gained = self._thrift.gained(told, session.route.epoch, committed, rebuilding)
        waits = session.returns.more_follows and holdup.computed.get(0) == session.returns.sent_until
        if waits and not holdup.is_silent:
            return gained  # hop 0 waits for this origin, and those behind it for hop 0
        waited_s += now() - began
        cost_s = max([replay_s(committed, usual_s), *(repair.replay_s for repair in self.repairs)])
        if self._thrift.is_worth(told, committed, now(), waited_s=waited_s, replay_s=cost_s, late_s=late_s):
            hop, starts = holdup.hop, [hop.offer.info.span.start for hop in session.route.hops]
            is_starved = holdup.is_idle and not holdup.is_done and self._starved == starts[hop]
            if hop and is_starved and await self._is_covered(hop - 1, committed):
                hop -= 1  # says that it has sent on what neither of two received
            is_covered = await self._is_covered(hop, committed)
            may = is_covered and not self._is_last(committed)
            if may and not session.losses and not session.returns.has_news(committed):
                self._starved = starts[hop]
                session.lose(hop, f"has held a step up for {waited_s:.1f} s")
                if not holdup.is_silent:
                    self._thrift.replaced(committed, now(), waited_s + cost_s)
        return gained

    def route_late_s(self) -> float:
        """How late event loops have run lately, here and on the route."""
        return max(self._late_s(hop.offer.node) for hop in self._session.route.hops)

    async def _is_covered(self, index: int, committed: int) -> bool:
        """Whether other nodes can take the place of a hop."""
        session = self._session
        node = session.route.hops[index].offer.node  # another one that was lost may be back in its place: it stays
        excluded = self.excluded | {node}
        lost = {i for i, hop in enumerate(session.route.hops) if hop.offer.node == node}
        with contextlib.suppress(ShardUnavailable):
            offers = await self._around.offers(excluded)
            route, terms = [hop.offer for hop in session.route.hops], self._around.terms()
            plan_repair(route, lost, {}, (), offers, excluded, committed, (), terms, session.route.boundaries)
            return True
        return False

    def _count(self, committed: int, reason: str) -> None:
        """Raise PipelineAborted if too many failures have brought no new position; a last resort gets as many of its own."""
        if self._back.is_all:
            return
        self._fruitless = 0 if committed > self._committed else self._fruitless + 1
        self._committed = max(committed, self._committed)
        if self._fruitless > (limit := self._most_fruitless):
            raise PipelineAborted(f"given up after {limit} repairs without progress: {reason}")

    @property
    def _most_fruitless(self) -> int:
        limit = self._config.max_repairs
        return limit if self._last_resort is None else 2 * limit + 1

    def _is_last(self, committed: int) -> bool:
        """Whether a further repair at this position would give the session up: what is only slow may still bring it on."""
        return committed <= self._committed and self._fruitless >= self._most_fruitless

    async def _find_plan(self, committed: int, began: float) -> RepairPlan:
        session = self._session
        self.excluded |= {session.route.hops[i].offer.node for i in session.losses}
        route = [hop.offer for hop in session.route.hops]
        while self._last_resort is None or self._fruitless <= self._config.max_repairs:
            try:
                return await self._plan_without(self.excluded, committed)
            except ShardUnavailable:
                words = [w for hop, w in session.told.faulty.items() if hop in {route[i].node for i in session.losses}]
                if words:  # the request is at fault, as far as can be known: waiting helps nothing
                    raise words[-1] from None
            waited = asyncio.get_running_loop().time() - began
            error = ShardUnavailable(f"no node could take over: {'; '.join(session.losses.values())}")
            if self._attempts:  # what failed just now needs some time, and patience ends that way too
                await asyncio.sleep(pause_s(self._attempts, self._config.patience_s - waited))
            if self._are_apart and session.route.lease.path == "ring":  # the origin reaches both: rows go by way of it
                session.route.lease = replace(session.route.lease, path="star")
                self._around.note_star()
            is_over, after = waited > self._config.patience_s, f"after {waited:.0f} s of looking"
            if not self._attempts or not is_over:
                if not await self._around.look_around():
                    is_over, after = True, "and none can come back"
                try:
                    return await self._plan_without(session.untrusted_nodes, committed)
                except ShardUnavailable as none_left:
                    error = none_left
            if is_over:
                if self._last_resort is None:
                    raise ShardUnavailable(f"{error}, {after}") from error
                break
            await asyncio.sleep(ASK_AGAIN_S)
        assert self._last_resort is not None
        await self._alone.take_turn("; ".join(session.losses.values()))
        cuts = session.route.boundaries
        return plan_repair(route, range(len(route)), {}, (), [self._last_resort], (), committed, cuts=cuts)

    async def _plan_without(self, excluded: Collection[NodeId], committed: int) -> RepairPlan:
        session = self._session
        offers = await self._around.offers(excluded)
        self.excluded |= {session.route.hops[i].offer.node for i in session.losses}
        short, logless = session.route.short, session.route.logless
        route = [hop.offer for hop in session.route.hops]
        if session.route.needs_ends:
            offers = with_ends_at_edges(offers, route[0].info.num_layers)
        warm = [Warm(s.hop.offer, s.computed) for s in session.standbys.by_span.values() if s.is_open]
        terms, cuts = self._around.terms(), session.route.boundaries
        return plan_repair(route, session.losses, short, logless, offers, excluded, committed, warm, terms, cuts)

    async def _reshape(self, plan: RepairPlan) -> None:
        """Connect the new hops and reshape; a node that cannot be reached is excluded and counts as lost."""
        session, num_hops = self._session, len(plan.slots)
        places = (self._hop(i, slot, num_hops) for i, slot in enumerate(plan.slots))
        answers = await asyncio.gather(*places, return_exceptions=True)
        for slot, answer in zip(plan.slots, answers, strict=True):
            if isinstance(answer, ShardUnavailable):
                self.excluded.add(slot.offer.node)
                if slot.kept is not None:  # to be replaced: the next plan keeps it otherwise
                    session.lose(slot.kept, str(answer))
                raise HopLost(str(answer)) from answer
            if isinstance(answer, BaseException):
                raise answer
        if any(slot.kept in session.losses for slot in plan.slots):
            raise HopLost("; ".join(session.losses.values()))
        hops = [answer for answer in answers if isinstance(answer, Hop)]
        for hop, slot in zip(hops, plan.slots, strict=True):
            hop.is_whole = hop.is_whole and not slot.recomputes
        self._around.learn(session)
        await session.reshape(plan.slots, hops)

    async def _hop(self, index: int, slot: Slot, num_hops: int) -> Hop:
        if slot.kept is not None:
            hop = self._session.route.hops[slot.kept]
            has_links = hop.data is not None or self._session.route.lease.path == "ring"
            return hop if has_links else await self._relinked(index, hop)
        return await self._around.connect(index, slot.offer, num_hops, self._session.route.lease)
