"""One request's route as its origin sees it: open the hops, send steps, take results, close. Tokens are loop.py's.

sessions.py hands it what arrives for its id: `on_opened`, `on_step`, `on_credit`, `on_fault`, `on_lost`. Everything is
synchronous but `open`, `reshape`, `next_result` and `wait`, which wait. The route: route.py, standbys: standby.py.
"""

import asyncio
import os
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, NoReturn

from manyhands.config import RequestConfig
from manyhands.core import ORIGIN_HOP, NodeId, SessionId, public_id
from manyhands.errors import Apart, Detour, Draining, ManyhandsError, PipelineAborted, ShardUnavailable, Unanswered
from manyhands.net.liveness import stretched_s
from manyhands.net.transport import Link, betters, try_send
from manyhands.origin.fault import Doubt, Told, apart, doubt_of, judge
from manyhands.origin.repair_plan import Slot, rounds
from manyhands.origin.returns import Returns
from manyhands.origin.route import Hop, Lease, Resume, Route
from manyhands.origin.standby import Standbys
from manyhands.wire.attest_message import Attested
from manyhands.wire.message import Close, Credit, Fault, Ids, Opened, Payload, Progress, Retract, Step
from manyhands.wire.signed import DRAWN_BYTES, Signer, session_of

First = Callable[["Session"], Coroutine[Any, Any, range]]  # sends the first rows of a session; returns their positions


class HopLost(PipelineAborted):
    """A running session has lost hops (`Session.losses`); it can be repaired."""


class Session:
    """An open route. Created by `Sessions.open`, which also closes it; not shared between requests.

    `losses` maps hops of the present route that are lost to the reason. While there are any, nothing is sent. `leaving`
    does so for hops that would like to leave, `stuck` for those that could not go back to a step's position: in a new epoch
    they say to which they can. `doubts`: what hops say of steps that cannot be, and what is said of the last one where its rows
    cannot; probe.py finds which is lost for it. `standbys` stand by for the hops of their spans (standby.py). `late_s` says
    how late the event loops of this node and of another have run lately: deadlines stretch with it (liveness.py).
    """

    def __init__(
        self,
        signer: Signer,
        hops: Sequence[Hop],
        lease: Lease,
        config: RequestConfig,
        late_s: Callable[[NodeId], float] = lambda node: 0.0,
    ) -> None:
        self.id = session_of(signer.node, os.urandom(DRAWN_BYTES))
        self.name = public_id(self.id)  # what logs, events and the API call the session
        self.route = Route(self.id, signer, lease, config.credits, list(hops))
        self.standbys = Standbys(self.route)
        self.losses, self.leaving, self.stuck = dict[int, str](), dict[int, str](), dict[int, str]()
        self.doubts = dict[int, Doubt]()
        self.has_detour = False  # a hop is reached through a relay, and there is a direct link to it by now
        self.apart: NodeId | None = None  # could not be reached by the hop before it, though this origin has a link
        self.told, self.returns = Told(), Returns()
        self.untrusted_nodes: set[NodeId] = set()
        self._unclosed: list[Hop] = []  # out of the route, but the route that leaves them out does not stand yet
        self.last_progress: float = 0.0
        self.begins_at = 0  # positions that its hops began with; until they have answered, those they were asked for
        self.first: asyncio.Task[range] | None = None  # sends the first rows, while the hops open
        self._is_woken = self._is_running = False
        self.progress: dict[int, Progress] = {}
        self.attested: dict[tuple[NodeId, int], Attested] = {}  # what a node last said of a hop
        self._config, self._late_s = config, late_s
        self._error: ManyhandsError | None = None
        self._arrived = asyncio.Event()

    @property
    def is_closed(self) -> bool:
        """Whether the session has ended, well or badly."""
        return self._error is not None

    # -- opening, changing and closing the route ----------------------------------------------------------------------

    async def open(self, resume: Resume | None = None) -> None:
        """Open all hops at once and wait for their leases. Deadline: config.open_timeout_s, more where event loops are late.

        With `resume`, hops that still have its positions begin with them. If none has, `begins_at` stays 0; else those that
        lack them are not whole. Raises Busy, WeightsMismatch, ContextOverflow, ... as the hops say; ShardUnavailable
        naming the node if one is lost meanwhile; Unanswered at the deadline.
        """
        hops, self.begins_at = self.route.hops, 0 if resume is None else resume.until
        self.route.renew(hops)
        slots = [Slot(hop.offer, None) for hop in hops] if resume is None else resume.slots(hops)
        try:
            await self._place(slots, range(len(hops)))
        except HopLost as error:
            refusal = Apart(str(error)) if self.apart else ShardUnavailable(str(error))
            refusal.node = lost = self.apart or hops[min(self.losses)].offer.node
            refusal.told_by = self.told.by.get(lost)
            raise refusal from error
        self._is_running = True
        self.route.settle()
        self.begins_at = 0 if resume is None else resume.begin(hops)

    async def reshape(self, slots: Sequence[Slot], hops: Sequence[Hop]) -> None:
        """Put the route into a new shape, in a new epoch: first the hops that recompute, then those that feed them.

        The order (repair_plan.py: rounds) matters: a hop drops what reaches it before it has the Open of the epoch. Hops that
        are no longer in the route are closed last: one that only wished to leave can be taken back if its replacement refuses.
        `hops` are those of `slots`, survivors among them. Deadline: config.reopen_timeout_s for each round, more where
        event loops are late. Raises HopLost if one is lost or does not answer; what ended the session otherwise.
        """
        staying = {hop.offer.node for hop in hops}
        gone = [hop for hop in (*self.route.hops, *self._unclosed) if hop.offer.node not in staying]
        self._unclosed = gone
        self.standbys.promote(hops)
        self.route.renew(hops)
        for told in (self.losses, self.leaving, self.stuck, self.doubts):
            told.clear()
        self.returns.renew()
        for index, hop in enumerate(hops):
            if any(link.is_closed for link in hop.links):
                self.lose(index, "is gone")
        for indices in rounds(slots):
            await self._place(slots, indices)
        for hop in gone:
            try_send(hop.control, Close(self.id))
        self._unclosed = []
        self.standbys.move()
        for hop in hops:  # frees other places of the session on the same node
            try_send(hop.control, Retract(self.id, self.route.epoch, 0, 0))

    async def _place(self, slots: Sequence[Slot], indices: Sequence[int]) -> None:
        """Tell the hops `indices` of their places and wait until they have them. Raises HopLost or Unanswered."""
        for index in indices:
            control = self.route.hops[index].control
            try_send(control, self.route.open_message(index, slots[index], control))
        loop = asyncio.get_running_loop()
        began = loop.time()
        while silent := [i for i in indices if self.route.hops[i].epoch < self.route.epoch]:
            try:
                async with asyncio.timeout_at(began + self._answer_s(slots, indices)):
                    await self.wait()
            except TimeoutError:
                limit_s = self._answer_s(slots, indices)  # machines may have become busy meanwhile, this one too
                if loop.time() >= began + limit_s:
                    self._give_up(silent, f"did not answer Open within {limit_s:g} s")

    def _answer_s(self, slots: Sequence[Slot], indices: Sequence[int]) -> float:
        """How long these hops have to answer Open."""
        limit_s = self._config.reopen_timeout_s if self._is_running else self._config.open_timeout_s
        if not all(slots[index].offer.info.is_loaded for index in indices):
            limit_s = self._config.load_timeout_s
        return stretched_s(limit_s, max(self._late_s(slots[index].offer.node) for index in indices))

    def _give_up(self, silent: Sequence[int], reason: str) -> NoReturn:
        if self._is_running:
            for index in silent:
                self.lose(index, reason)
            raise HopLost(f"hops {list(silent)} {reason}")
        raise Unanswered(f"hops {', '.join(f'{i} ({self.route.hops[i].offer.name})' for i in silent)} {reason}", silent)

    def close(self, parked_as: SessionId | None = None, positions: int = 0) -> None:
        """Tell every hop to free the session at once, or to keep its first `positions` under a name that only they are given;
        without a name, for adoption alone. Harmless when repeated or when links are gone."""
        self._error = self._error or PipelineAborted("the session is closed")
        if self.first is not None and not self.first.cancel() and not self.first.cancelled():
            self.first.exception()  # seen, so that asyncio does not log it
        for hop in (*self.route.hops, *self._unclosed):
            hop.outbox.clear()
            name = parked_as or (self.route.adoption(hop.control) if positions else None)
            try_send(hop.control, Close(self.id, name, positions if name else 0))
        self.standbys.close()

    # -- steps --------------------------------------------------------------------------------------------------------

    def send(
        self, position: int, count: int, reply_from: int, ids: Ids | None, payload: Payload | None, committed: int = 0
    ) -> None:
        """Send one step to hop 0, now or as soon as its credits allow. `committed`: see Step. Raises the session's error.

        While hops are lost nothing is sent: the repair of the route sends it again.
        """
        if self._error is not None:
            raise self._error
        if self.losses:
            return
        where = position, count, reply_from, self.returns.sent(position, count, is_timed=self._is_running)
        step = Step(self.id, self.route.epoch, 0, *where, "hidden", ids, payload, b"", committed)
        self.route.hops[0].outbox.append(step)
        self._flush(0)

    def retract(self, position: int) -> None:
        """What is on its way is guessed wrong: begin the next guess at `position`. What waits, here and on hops, is dropped."""
        self._settle(len(self.route.hops) - 1, self.returns.retract())
        self.route.retract(self.returns.guess, position)
        for index, hop in enumerate(self.route.hops):
            dropped = len(hop.outbox)
            hop.outbox.clear()
            if index:
                self._settle(index - 1, dropped)

    def wake(self) -> None:
        """End the present wait for a result, or the next one: there is something to send. On the event loop."""
        self._is_woken = True
        self._arrived.set()

    async def next_result(self, deadline_s: float) -> Step | None:
        """The next step that reached the origin; None once after `wake`. Raises TimeoutError if none does within `deadline_s`.

        Taking it gives the last hop its credit back, so no more results wait here than it has credits.
        Raises HopLost if the route is broken, or what ended the session.
        """
        results = self.returns.results
        async with asyncio.timeout(deadline_s):
            while not results and not self._is_woken:
                await self.wait()
        self._is_woken = False
        self._settle(len(self.route.hops) - 1, min(1, len(results)))
        return results.popleft() if results else None

    async def wait(self) -> None:
        """Until something comes, or is sent anew. Raises HopLost, or what ended the session."""
        if self._error is not None:
            raise self._error
        self._raise_losses()
        await self.stirred()
        if self._error is not None and not self.returns.results:
            raise self._error
        self._raise_losses()

    async def stirred(self) -> None:
        """Until something comes, of whatever kind."""
        self._arrived.clear()
        await self._arrived.wait()

    def _raise_losses(self) -> None:
        doubts = {index: doubt.reason for index, doubt in self.doubts.items()}
        if wrong := {**self.stuck, **doubts, **self.losses}:
            names = [hop.offer.name for hop in self.route.hops]
            raise HopLost("; ".join(f"hop {i} ({names[i]}) {why}" for i, why in sorted(wrong.items())))

    # -- what arrives -------------------------------------------------------------------------------------------------

    def on_opened(self, message: Opened) -> None:
        if self.route.hops[message.hop].epoch < message.epoch == self.route.epoch:
            self.route.hops[message.hop].opened(message)
            self._arrived.set()

    def on_step(self, step: Step, link: Link) -> None:
        """A step for the origin (the last hop's), or, in a star, for the next hop.

        Dropped unless it comes from the hop that should have sent it (another's Open may make an honest node send
        here), in this epoch and under the present guess. A hop that sends more than its credits has lost its place.
        """
        hops, is_star = self.route.hops, self.route.lease.path == "star"
        sender = len(hops) - 1 if step.hop == ORIGIN_HOP else step.hop - 1
        is_due = step.hop == ORIGIN_HOP or (is_star and 0 < step.hop < len(hops))
        if step.epoch != self.route.epoch or not is_due or not self.route.is_from(sender, link):
            return
        if self.standbys.pass_on(step):
            return
        if not hops[sender].incoming.take():
            self.lose(sender, f"sent more than its {hops[sender].credits} steps without credit", untrusted=True)
            return
        if step.guess != self.returns.guess:
            return self._settle(sender)
        self.last_progress = asyncio.get_running_loop().time()
        if step.hop == ORIGIN_HOP:
            self.returns.came(step, len(hops))
            self._arrived.set()
        else:
            hops[step.hop].outbox.append(step)
            self._flush(step.hop)

    def _flush(self, index: int) -> None:
        """Send hop `index` what its credits allow. In a star, who sent it here has its credits back by that."""
        num_sent = self.route.hops[index].flush()
        if index and num_sent:
            self._settle(index - 1, num_sent)

    def _settle(self, sender: int, steps: int = 1) -> None:
        """Steps that hop `sender` sent here have left: pay for them."""
        hop, is_last = self.route.hops[sender], sender == len(self.route.hops) - 1
        if (paid := hop.incoming.settle(steps)) and hop.data is not None:
            try_send(hop.data, Credit(self.id, self.route.epoch, ORIGIN_HOP if is_last else sender + 1, paid))

    def on_credit(self, message: Credit) -> None:
        """Hop `message.hop` has computed steps that this origin sent it."""
        if message.epoch == self.route.epoch:
            self.route.hops[message.hop].outgoing.give(message.steps)
            self._flush(message.hop)
            if self.route.hops[message.hop].has_room_again():
                self.wake()

    def on_progress(self, message: Progress) -> None:
        if message.epoch == self.route.epoch:
            self.progress[message.hop] = message
            self._arrived.set()

    def stir(self) -> None:
        """Have who is in `wait` look again: something came that does not concern the route."""
        self._arrived.set()

    def on_fault(self, message: Fault) -> None:
        """A hop that is not lost cannot go on, would like to leave or be reached otherwise, or blames another (fault.py)."""
        if message.epoch != self.route.epoch or message.hop in self.losses:
            return
        has_place = self.route.hops[message.hop].epoch == message.epoch  # else this answers our Open
        if message.code == Draining.code and self._is_running and has_place:
            self.leaving[message.hop] = message.detail
        elif message.code == Detour.code:
            self.has_detour = True
        elif has_place and self._is_running and (doubt := doubt_of(message)) is not None:
            self.doubts[message.hop] = doubt
            self._arrived.set()
        elif has_place and self._is_running and self.told.may_stay(message, self.route.hops):
            self.stuck[message.hop] = message.detail
            self._arrived.set()
        else:
            self.apart = apart(message, self.route.hops) or self.apart
            verdict = judge(message, self.route.hops, self.told, is_running=self._is_running)
            if verdict.refusal is None:
                return self.lose(verdict.at_fault, message.detail, untrusted=verdict.untrusted)
            self._error = self._error or verdict.refusal
            self._arrived.set()

    def on_linked(self, link: Link) -> None:
        """There is a new link of this origin."""
        self.has_detour |= any(betters(link, old) for hop in self.route.hops for old in hop.links)

    def on_lost(self, link: Link, reason: str) -> None:
        """One of our links is gone: the hops behind it are lost."""
        for index, hop in enumerate(self.route.hops):
            if link in hop.links:
                self.lose(index, f"is gone: {reason}")
        self.standbys.on_lost(link)

    def doubt_rows(self, reason: str) -> None:
        """What the last hop sent cannot be."""
        self.doubts[len(self.route.hops) - 1] = Doubt(reason, is_misled=False)

    def lose(self, index: int, reason: str, *, untrusted: bool = False) -> None:
        """Hop `index` cannot be relied on any more, nor can others on its node; who waits for results gets HopLost.

        `untrusted`: it sent what cannot be, so its node is not to come back into this session, and what hops behind it made of
        its rows is computed anew.
        """
        node = self.route.hops[index].offer.node
        lost = [other for other, hop in enumerate(self.route.hops) if hop.offer.node == node]
        self.losses.update((other, reason) for other in lost if other not in self.losses)
        if untrusted:
            self.untrusted_nodes.add(node)
            self.standbys.let_go(self.route.begin_anew(lost[0] + 1))
        self._arrived.set()
