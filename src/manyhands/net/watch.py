"""Links under watch: each is read until it ends, and tried by a heartbeat. liveness.py says what silence means."""

import asyncio
import logging
import math
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from manyhands.core import NodeId
from manyhands.errors import LinkClosed, ProtocolError
from manyhands.net import liveness
from manyhands.net.liveness import PATIENCE_S, PROBE_S, SUSPECT_S, TICK_S, Pulse, Verdict, patience_s
from manyhands.net.own_address import is_own
from manyhands.net.transport import Link, try_send
from manyhands.net.uplink import Uplink
from manyhands.stalls import Stalls
from manyhands.wire.message import Message, Ping

logger = logging.getLogger(__name__)

NO_ANSWER = 0  # the nonce of a ping whose answer is not awaited: it shows that this loop runs


async def read(link: Link, take: Callable[[Message], None]) -> str:
    """Hand what arrives to `take` until the link ends; returns why it did. A ProtocolError of `take` ends it."""
    try:
        await link.deliver(take)
    except LinkClosed as error:
        return str(error)
    except ProtocolError as error:
        logger.warning("peer=%s sent nonsense: %s", link.peer[:8], error)
        link.abort(str(error))
        return str(error)


@dataclass(slots=True, eq=False)
class _Watched:
    link: Link
    pulse: Pulse
    every_s: float  # between its beats
    since: float  # awake
    beat_at: float = -math.inf
    ping: asyncio.Future[float] | None = None  # the last one that waits for its answer, or did
    num_acked: int = 0  # at the last look
    # When (awake) a newer link of the same pair and lane came, or this machine moved; None once a ping since then was answered.
    doubted_at: float | None = None

    @property
    def is_doubted(self) -> bool:
        return self.doubted_at is not None

    def end(self) -> None:
        """The link is watched no more."""
        if self.ping is not None:
            self.ping.cancel()


class Watch:
    """Pings every link of a node, whatever its lane, and aborts those whose peer is cut off or frozen, and those that go from
    an address that this machine has not had at two looks: no answer can find its way back.

    When one link of a pair of nodes is given up, the others are after PROBE_S of silence: they may go another way (a relay).
    `in_use` gives the peers that something waits for. Another may be a member that loads a model on a busy machine: its loop
    has PATIENCE_S from the start.
    """

    def __init__(self, in_use: Callable[[], Collection[NodeId]]) -> None:
        self._in_use = in_use
        self.stalls = Stalls(0.0, period_s=TICK_S)
        self.uplink = Uplink()
        self._watched: list[_Watched] = []
        # Peers that a link to was given up: when (awake), and that links since when are not suspect.
        self._suspects: dict[NodeId, tuple[float, float]] = {}
        self._missed: set[str] = set()  # addresses that this machine did not have at the last look
        self._is_running = False

    def __repr__(self) -> str:
        return f"<Watch links={len(self._watched)} {self.stalls}>"

    def add(self, link: Link) -> bool:
        """Ping `link` now and watch it until it closes. Returns whether `run` is to be started (again)."""
        now = asyncio.get_running_loop().time()
        if not self._watched:
            self.stalls.resume(now)
        awake_s = self._awake_s()
        self._doubt(other for other in self._watched if (other.link.peer, other.link.lane) == (link.peer, link.lane))
        each = _Watched(link, Pulse(awake_s), liveness.HEARTBEAT_S, awake_s)
        self._watched.append(each)
        self._beat(each, now, awake_s)
        was_running, self._is_running = self._is_running, True
        return not was_running

    async def run(self) -> None:
        """Watch while there are links. Owns the pings."""
        loop = asyncio.get_running_loop()
        try:
            while self._watched:
                self.stalls.tick(loop.time())
                self._look()
                await asyncio.sleep(TICK_S)
        finally:
            self._is_running = False
            for each in self._watched:
                each.end()

    def late_s(self, peer: NodeId) -> float:
        """How late event loops have run lately, this node's own and that of `peer`."""
        return self._late_s({peer})[peer]

    def uplink_Bps(self) -> float:
        """Bytes per second that this node was seen to send to others; 0: not seen."""
        return self.uplink.rate_Bps(self._awake_s())

    def moved(self) -> None:
        """This machine has another network: see at once whether links still carry anything."""
        self._doubt(self._watched)

    def _doubt(self, doubtful: Iterable[_Watched]) -> None:
        """Ask now."""
        awake_s = self._awake_s()
        for each in doubtful:
            if not each.is_doubted:
                each.doubted_at, each.beat_at = awake_s, -math.inf

    # -- one look -----------------------------------------------------------------------------------------------------

    def _look(self) -> None:
        """Forget closed links, abort those that are given up, ping those that are due."""
        self._forget_closed()
        now, awake_s = asyncio.get_running_loop().time(), self._awake_s()
        asked: list[_Watched] = []
        missed, self._missed = self._missed, set()
        is_here: dict[str, bool] = {}  # by the address that links go from
        for each in self._watched:
            line = each.link.line()
            if (host := line.local_host) is not None:
                is_here[host] = is_here[host] if host in is_here else is_own(host)
                if not is_here[host]:
                    self._missed.add(host)
                if not is_here[host] and host in missed:
                    each.link.abort(f"this machine has the address {host} no more")
            each.pulse.observe(line, awake_s)
            self.uplink.observe(line, each.num_acked, awake_s)
            each.num_acked = line.num_acked or 0
            if each.pulse.asked_at is not None:
                asked.append(each)
        if asked:
            self._judge(asked, awake_s)
        for each in self._watched:
            if now - each.beat_at >= each.pulse.beat_s(each.every_s):
                self._beat(each, now, awake_s)

    def _judge(self, asked: Sequence[_Watched], awake_s: float) -> None:
        """Abort links that owe an answer and are given up, and what is silent beside them."""
        late = self._late_s({each.link.peer for each in asked})
        in_use = self._in_use()
        borne = {peer: patience_s(late_s) for peer, late_s in late.items() if peer in in_use}
        self._suspects = {peer: (at, end) for peer, (at, end) in self._suspects.items() if awake_s - at < SUSPECT_S}
        for each in asked:
            borne_s = borne.get(each.link.peer, PATIENCE_S)
            verdict = each.pulse.judge(awake_s, borne_s, is_doubted=each.is_doubted)
            if verdict != "alive":
                _, end = self._suspects.get(each.link.peer, (0.0, -math.inf))
                end = max(end, math.inf if each.doubted_at is None else each.doubted_at)
                self._suspects[each.link.peer] = awake_s, end
                self._give_up(each, verdict, PROBE_S if each.is_doubted and verdict == "cut" else SUSPECT_S)
        for each in asked:
            if each.since < self._suspects.get(each.link.peer, (0.0, -math.inf))[1] and not each.link.is_closed:
                verdict = each.pulse.judge_suspect(awake_s)
                if verdict != "alive":
                    self._give_up(each, verdict, PROBE_S)
        self._forget_closed()

    def _late_s(self, peers: set[NodeId]) -> dict[NodeId, float]:
        """`late_s` of each of them. Takes one look at each link: there may be a thousand."""
        late = dict.fromkeys(peers, self.stalls.worst_s(asyncio.get_running_loop().time()))
        for each in self._watched:
            if each.link.peer in late:
                late[each.link.peer] = max(late[each.link.peer], each.pulse.late_s)
        return late

    def _forget_closed(self) -> None:
        closed = [each for each in self._watched if each.link.is_closed]
        if closed:
            self._watched = [each for each in self._watched if not each.link.is_closed]
            for each in closed:
                each.end()

    def _give_up(self, each: _Watched, verdict: Verdict, silent_s: float) -> None:
        why = "its machine acknowledges nothing" if verdict == "cut" else "no heartbeat"
        logger.info("peer=%s lane=%s given up: %s", each.link.peer[:8], each.link.lane, why)
        each.link.abort(f"{why} for {silent_s:g} s or more")

    def _beat(self, each: _Watched, now: float, awake_s: float) -> None:
        """Ping a link. While an answer is owed, a ping without one still shows that this node runs."""
        each.beat_at = now
        if each.pulse.asked_at is not None:
            try_send(each.link, Ping(NO_ANSWER))
            return
        with suppress(LinkClosed):
            each.ping = each.link.ping()
            each.pulse.asked(awake_s)
            each.ping.add_done_callback(partial(self._answered, each))

    def _answered(self, each: _Watched, ping: "asyncio.Future[float]") -> None:
        if not ping.cancelled() and ping.exception() is None:
            asked_at = each.pulse.asked_at
            each.pulse.answered(self._awake_s())
            if each.doubted_at is not None and asked_at is not None and asked_at >= each.doubted_at:
                each.doubted_at = None

    def _awake_s(self) -> float:
        return self.stalls.awake_s(asyncio.get_running_loop().time())
