"""manyhands.origin.repair: how long is too long, how often is too often, who is asked, what is said of it."""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from manyhands.config import RequestConfig
from manyhands.core import NodeId, SessionId, Span
from manyhands.errors import PipelineAborted, ShardUnavailable
from manyhands.net.transport import Link
from manyhands.origin.alone import ASK_AGAIN_S
from manyhands.origin.fault import Told
from manyhands.origin.pace import HeldStep
from manyhands.origin.repair import RepairExecutor
from manyhands.origin.repair_plan import Slot
from manyhands.origin.returns import Returns
from manyhands.origin.route import Hop, Lease, Route
from manyhands.origin.session import HopLost, Session
from manyhands.origin.standby import Standbys
from manyhands.route.offer import Pair, Terms, pair
from manyhands.route.search import Offer
from manyhands.testing.clock import run_virtual
from manyhands.testing.swarm import node_key
from manyhands.wire.message import Progress, Step
from manyhands.wire.signed import Signer
from tests.route.test_search import ONE, offer

CONFIG = RequestConfig(patience_s=10.0, max_repairs=2)


def hop(one: Offer) -> Hop:
    return Hop(one, cast(Link, SimpleNamespace(is_closed=True)), None, 16)


@dataclass
class FakeSession:
    """Stands for a Session: its route, losses, and what comes of each change of the route."""

    route: Route
    outcomes: list[Callable[["FakeSession"], None]] = field(default_factory=list)
    culprit: int = 0
    is_silent: bool = False
    computed: int = 0
    losses: dict[int, str] = field(default_factory=dict)
    leaving: dict[int, str] = field(default_factory=dict)
    stuck: dict[int, str] = field(default_factory=dict)
    doubts: dict[int, str] = field(default_factory=dict)
    progress: dict[int, Progress] = field(default_factory=dict)
    begins_at: int = 0
    shapes: list[list[Slot]] = field(default_factory=list)
    last_progress: float = 0.0
    returns: Returns = field(default_factory=Returns)
    untrusted_nodes: set[NodeId] = field(default_factory=set)
    told: Told = field(default_factory=Told)
    has_detour: bool = False
    id: SessionId = field(default_factory=lambda: SessionId(bytes(16)))
    is_closed: bool = False
    name: str = "0123"

    def __post_init__(self) -> None:
        self.standbys = Standbys(self.route)

    def lose(self, index: int, reason: str) -> None:
        self.losses[index] = reason

    async def probe(self, limit_s: float) -> HeldStep:
        return HeldStep(self.culprit, self.is_silent, {self.culprit: self.computed})

    async def reshape(self, slots: Sequence[Slot], hops: Sequence[Hop]) -> None:
        self.route.hops = list(hops)
        self.losses.clear()
        self.stuck.clear()
        self.shapes.append(list(slots))
        for hop, slot in zip(hops, slots, strict=True):
            hop.cached = slot.resume_until
        if self.outcomes:
            self.outcomes.pop(0)(self)

    @property
    def names(self) -> list[str]:
        return [h.offer.name for h in self.route.hops]


@dataclass
class World:
    """What can be reached, and when."""

    offers_now: list[Offer]
    unreachable: set[str] = field(default_factory=set)
    asked: int = 0
    silent: bool = False
    may_come: bool = True
    rtts: dict[Pair, float] = field(default_factory=dict)
    learnt_of: list[list[str]] = field(default_factory=list)
    tasks: list[asyncio.Task[None]] = field(default_factory=list)

    async def offers(self, excluded: Collection[NodeId]) -> list[Offer]:
        self.asked += 1
        if self.silent:
            raise ShardUnavailable("no node of the ticket can be reached")
        return [o for o in self.offers_now if o.node not in excluded]

    def terms(self) -> Terms:
        return Terms(origin=NodeId("origin"), rtts=self.rtts)

    def learn(self, session: Session) -> None:
        self.learnt_of.append([hop.offer.name for hop in session.route.hops])

    def note_star(self) -> None:
        """No hop of these is apart from another."""

    def note_fallback(self) -> None:
        """That is seen by the plan."""

    async def look_around(self) -> bool:
        """No node comes back."""
        return self.may_come

    async def connect(self, index: int, offer: Offer, num_hops: int, lease: Lease) -> Hop:
        if offer.name in self.unreachable:
            raise ShardUnavailable(f"{offer.name} cannot be reached")
        return hop(offer)

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        self.tasks.append(asyncio.ensure_future(work))


class Patient:
    """Three hops of four layers, a healer, and who else there is."""

    def __init__(self, *spares: Offer, last_resort: Offer | None = None, **changes: Any) -> None:
        hops = [hop(offer(n, a, a + 4)) for n, a in (("a", 0), ("b", 4), ("c", 8))]
        lease = Lease(ONE, "bf16", 64, 1, "ring", "origin", None)
        self.session = FakeSession(Route(SessionId(bytes(16)), Signer(node_key("origin")), lease, 16, hops))
        self.world = World(list(spares))
        self.healer = RepairExecutor(
            cast(Session, self.session), self.world, RequestConfig(**{"patience_s": 10.0, **changes}), last_resort
        )

    async def lose(self, index: int, committed: int = 5) -> int:
        self.session.lose(index, "is gone")
        return await self.healer.repair(committed, committed)

    @property
    def events(self) -> list[str]:
        return [event.kind for event in self.healer.events]


@pytest.fixture(autouse=True)
def probed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A probe says what FakeSession says."""
    monkeypatch.setattr("manyhands.origin.repair.hold_up", lambda session, limit_s: session.probe(limit_s))


def play(main: Callable[[], Awaitable[None]]) -> float:
    """Run under the virtual clock; returns how long it took."""

    async def timed() -> float:
        await main()
        return asyncio.get_running_loop().time()

    return run_virtual(timed())


# -- repairs ----------------------------------------------------------------------------------------------------------


def test_a_repair_says_what_it_did() -> None:
    """One for one is a failover, anything else a reshard; both after shard_status."""

    async def main() -> None:
        patient = Patient(offer("s", 0, 12))
        assert await patient.lose(1) == 5, "the origin sends what was not committed"
        assert patient.session.names == ["a", "s", "c"] and patient.events == ["shard_status", "shard_failover"]
        assert patient.world.learnt_of == [["a", "b", "c"]], "what hops took is learnt before it is forgotten"
        (repair,) = patient.healer.repairs
        assert (repair.lost, repair.replacement, repair.at_token) == (("b",), ("s",), 5) and "is gone" in repair.reason
        patient = Patient(offer("s", 0, 6), offer("t", 6, 12))
        await patient.lose(1)
        assert patient.session.names == ["a", "s", "t", "c"] and patient.events[-1] == "reshard"
        assert await Patient(offer("s", 0, 12)).lose(0) == 0, "the origin is told to replay"

    assert play(main) == 0


def test_a_lost_node_comes_back_only_if_no_other_covers_and_its_rows_were_right() -> None:
    """A link may have been cut, a node restarted; but who sent nonsense stays out."""

    async def main() -> None:
        patient = Patient(offer("b", 0, 12, free=2000), offer("s", 0, 12))
        await patient.lose(1)
        assert patient.session.names == ["a", "s", "c"]
        await patient.lose(1, committed=9)
        assert patient.session.names == ["a", "b", "c"]
        patient.session.untrusted_nodes |= {NodeId("b"), NodeId("s")}
        with pytest.raises(ShardUnavailable, match="no other node holds layers 4-7"):
            await patient.lose(1, committed=11)

    assert play(main) < 11


def test_a_replacement_is_near_the_neighbours_of_the_hole() -> None:
    """Not near the origin: by the round trips that nodes state of their links. Also first and last, where the origin is one."""

    async def replaced(index: int, **ms: int) -> str:
        patient = Patient(offer("s", 0, 12, free=9000), offer("t", 0, 12))
        patient.world.rtts = {pair(*map(NodeId, key.split("_"))): value / 1e3 for key, value in ms.items()}
        await patient.lose(index)
        return patient.session.names[index]

    async def main() -> None:
        assert await replaced(1) == "s", "where nothing is known, the one with more room"
        assert await replaced(1, origin_s=1, origin_t=80, a_s=90, c_s=90, a_t=2, c_t=2) == "t"
        assert await replaced(1, origin_s=80, origin_t=1, a_s=2, c_s=2, a_t=90, c_t=90) == "s"
        assert await replaced(0, origin_s=80, origin_t=1, b_s=2, b_t=2) == "t"
        assert await replaced(2, origin_s=80, origin_t=1, b_s=2, b_t=2) == "t"

    play(main)


@pytest.mark.parametrize("last_resort", [None, offer("home", 0, 12)])
def test_the_only_one_left_may_refuse_for_ever(last_resort: Offer | None) -> None:
    """It is full, say: it is asked again until the patience ends, after pauses that grow: each time every hop gets an Open."""

    async def main() -> None:
        patient = Patient(offer("s", 0, 12), last_resort=last_resort)

        def full(session: FakeSession) -> None:
            if session.names != ["home"]:
                session.lose(1, "is full")
                raise HopLost("hop 1 (s) is full")

        patient.session.outcomes = [full] * 1000
        if last_resort is None:
            with pytest.raises(ShardUnavailable, match="is full"):
                await patient.lose(1)
        else:
            await patient.lose(1)
            assert patient.session.names == ["home"]
        assert 6 < len(patient.session.shapes) < 14

    assert 10.0 <= play(main) <= 11.0


def test_a_node_that_cannot_be_reached_is_passed_over() -> None:
    """The repair goes on with the next one and names both losses."""

    async def main() -> None:
        patient = Patient(offer("s", 0, 12, free=9), offer("t", 0, 12))
        patient.world.unreachable = {"s", "t"}
        patient.world.offers_now.append(offer("u", 4, 8, free=0))
        await patient.lose(1)
        assert patient.session.names == ["a", "u", "c"]
        assert "cannot be reached" in patient.healer.repairs[0].reason

    assert play(main) == 0


@pytest.mark.parametrize("spare", [offer("t", 0, 12, free=0), None])
def test_a_survivor_that_cannot_be_dialled_is_replaced(spare: Offer | None) -> None:
    """In a star every hop has a data link to the origin; in the ring before it, one in the middle had none."""

    async def main() -> None:
        patient = Patient(offer("s", 8, 12))
        patient.session.route.lease = replace(patient.session.route.lease, path="star")
        patient.world.unreachable, patient.world.may_come = {"b"}, False
        patient.world.offers_now += [spare] if spare is not None else [offer("b", 4, 8)]
        plain, attempts = patient.world.connect, iter(range(1000))

        async def connect(index: int, one: Offer, num_hops: int, lease: Lease) -> Hop:
            assert next(attempts, None) is not None, "the same attempt for ever"
            return await plain(index, one, num_hops, lease)

        setattr(patient.world, "connect", connect)  # noqa: B010
        if spare is not None:
            await patient.lose(2)
            assert patient.session.names == ["a", "t"]
        else:
            with pytest.raises(ShardUnavailable, match="b cannot be reached"):
                await patient.lose(2)

    assert play(main) < 11.0


def test_a_second_loss_during_the_repair_is_repaired_with_it() -> None:
    """The new hop dies while it is opened: one repair, two losses, the last replacement named."""

    async def main() -> None:
        patient = Patient(offer("s", 0, 12, free=99), offer("t", 0, 12, free=0))

        def fails(session: FakeSession) -> None:
            session.lose(1, "is gone too")
            raise HopLost("hop 1 (s) is gone too")

        patient.session.outcomes.append(fails)
        await patient.lose(1)
        (repair,) = patient.healer.repairs
        assert (repair.lost, repair.replacement) == (("b", "s"), ("t",)) and "then hop 1 (s)" in repair.reason
        assert all(h.is_whole for h in patient.session.route.hops)

    play(main)


def test_a_hop_is_empty_until_what_was_sent_again_has_come_through() -> None:
    """Though the route stands: another loss meanwhile has it rebuilt from the beginning, and links do not change."""

    async def main() -> None:
        patient = Patient(offer("s", 0, 12), offer("t", 0, 12, free=0))
        await patient.lose(1)
        assert patient.session.names == ["a", "s", "c"]
        assert await patient.healer.rewire(5) is None
        await patient.lose(2)
        assert [(slot.recomputes, slot.emit_from) for slot in patient.session.shapes[-1]] == [
            (False, 0),
            (True, 0),
            (True, 5),
        ]
        assert patient.session.shapes[-1][0].replay_until == 5
        patient.healer.returned()
        assert await patient.healer.rewire(6) == 6
        patient.world.offers_now.append(offer("u", 0, 12))
        await patient.lose(2, committed=7)
        assert [slot.recomputes for slot in patient.session.shapes[-1]] == [False, False, True]

    play(main)


def test_a_survivor_lost_while_others_are_connected_is_not_forgotten() -> None:
    """It is replaced in the same repair, without waiting for an answer that cannot come."""

    async def main() -> None:
        patient = Patient(offer("s", 0, 12))
        plain = patient.world.connect

        async def connect(index: int, one: Offer, num_hops: int, lease: Lease) -> Hop:
            if not patient.session.losses.get(2):
                patient.session.lose(2, "is gone meanwhile")
            return await plain(index, one, num_hops, lease)

        setattr(patient.world, "connect", connect)  # noqa: B010
        await patient.lose(1)
        assert patient.session.names == ["a", "s"] and len(patient.session.shapes) == 1
        assert set(patient.healer.repairs[0].lost) == {"b", "c"}

    assert play(main) == 0


def test_a_log_that_turns_out_to_be_gone_costs_one_more_round() -> None:
    """The hop before recomputes as well then, fed from further upstream."""

    async def main() -> None:
        patient = Patient(offer("s", 0, 12))

        def logless(session: FakeSession) -> None:
            session.route.hops[1].has_log = False

        patient.session.outcomes.append(logless)
        assert await patient.lose(2) == 5
        first, second = patient.session.shapes
        assert [s.recomputes for s in first] == [False, False, True]
        assert [s.recomputes for s in second] == [False, True, True] and second[0].replay_until == 5

    play(main)


def test_after_max_repairs_without_progress_the_request_is_given_up() -> None:
    """Each new position starts the count again."""

    async def main() -> None:
        patient = Patient(*(offer(f"s{i}", 0, 12) for i in range(9)), max_repairs=2)
        for _ in range(3):
            await patient.lose(1, committed=5)
        await patient.lose(1, committed=6)
        for _ in range(2):
            await patient.lose(1, committed=6)
        with pytest.raises(PipelineAborted, match="2 repairs without progress"):
            await patient.lose(1, committed=6)
        assert patient.events[-1] == "pipeline_aborted" and len(patient.healer.repairs) == 6

    play(main)


@pytest.mark.parametrize("silent", [False, True])
def test_a_repair_is_patient(silent: bool) -> None:
    """No node is there, or none answers: it asks again until its patience ends, and takes who comes in time."""

    async def in_vain() -> None:
        patient = Patient()
        patient.world.silent = silent
        with pytest.raises(ShardUnavailable):
            await patient.lose(1)
        assert patient.events == ["shard_status", "pipeline_aborted"] and not patient.healer.repairs

    assert 10.0 <= play(in_vain) <= 10.0 + 2 * ASK_AGAIN_S

    async def in_time() -> None:
        patient = Patient()
        patient.world.silent = silent
        asyncio.get_running_loop().call_later(7.0, patient.world.offers_now.append, offer("s", 4, 8))
        asyncio.get_running_loop().call_later(7.0, setattr, patient.world, "silent", False)
        await patient.lose(1)
        assert patient.session.names == ["a", "s", "c"]

    assert 7.0 <= play(in_time) <= 7.0 + 2 * ASK_AGAIN_S


@pytest.mark.parametrize("silent", [False, True])
def test_the_last_resort_is_taken_last(silent: bool) -> None:
    """When the patience is at its end, or the repairs, or no node can come: the whole model on this machine, from the ids."""

    async def after_patience() -> None:
        patient = Patient(last_resort=offer("home", 0, 12))
        patient.world.silent = silent
        assert await patient.lose(1) == 0
        assert patient.session.names == ["home"] and patient.events[-1] == "reshard"

    assert 10.0 <= play(after_patience) <= 10.0 + 2 * ASK_AGAIN_S

    async def at_once() -> None:
        patient = Patient(last_resort=offer("home", 0, 12))
        patient.world.silent, patient.world.may_come = silent, False
        assert await patient.lose(1) == 0 and patient.session.names == ["home"]

    assert play(at_once) == 0

    async def after_repairs() -> None:
        patient = Patient(*(offer(f"s{i}", 0, 12) for i in range(9)), last_resort=offer("home", 0, 12), max_repairs=1)
        for _ in range(2):
            await patient.lose(1)
        assert "home" not in patient.session.names
        assert await patient.lose(1) == 0 and patient.session.names == ["home"]

    assert play(after_repairs) == 0


def test_what_waits_for_a_hop_stays_if_links_cannot_be_changed() -> None:
    """Another hop cannot be dialled: the session goes on as it was, in its epoch."""

    async def main() -> None:
        patient = Patient()
        before = list(patient.session.route.hops)
        step = Step(patient.session.id, 1, 0, 5, 1, 5, 0, "hidden", None, None)
        before[0].outbox.append(step)
        patient.world.unreachable = {"c"}
        assert await patient.healer.rewire(5) is None
        assert patient.session.route.hops == before and list(before[0].outbox) == [step]

    play(main)


# -- what is not lost yet ---------------------------------------------------------------------------------------------


def test_who_would_like_to_leave_is_let_go_only_if_others_can_take_over() -> None:
    """By one that is warmed up as a standby first, or by several at once; else it serves on."""

    async def hand_over(patient: Patient) -> None:
        for _ in range(2):  # to look for a standby, and to hear that there is none
            await patient.healer.hand_over(5)
            await asyncio.sleep(0)

    async def main() -> None:
        patient = Patient()
        patient.session.leaving[1] = "drains"
        await hand_over(patient)
        assert not patient.session.losses and not patient.session.leaving
        patient.world.silent = True
        patient.session.leaving[2] = "drains"
        await hand_over(patient)
        assert not patient.session.losses, "no node answers: it serves on"
        patient = Patient(offer("s", 4, 6), offer("t", 6, 8))
        patient.session.leaving.update({1: "drains", 2: "drains"})
        await hand_over(patient)
        assert patient.session.losses == {1: "drains"} and not patient.session.standbys.by_span
        patient = Patient(offer("s", 0, 12))
        patient.session.leaving[1] = "drains"
        await hand_over(patient)
        assert not patient.session.losses and patient.session.leaving, "make before break"
        patient.session.standbys.by_span[Span(4, 8)].hop.epoch = 1
        await hand_over(patient)
        assert patient.session.losses == {1: "drains"}

    play(main)


def test_a_suspect_is_replaced_only_if_others_can_take_over() -> None:
    """A slow hop is better than none."""

    async def main() -> None:
        patient = Patient(offer("s", 0, 4))
        patient.session.culprit = 2
        await patient.healer.suspect(1.5, 5, 6, 0.01)
        assert not patient.session.losses
        patient.world.offers_now.append(offer("t", 8, 12))
        await patient.healer.suspect(1.5, 5, 6, 0.01)
        assert list(patient.session.losses) == [2] and "1.5 s" in patient.session.losses[2]

    play(main)


@pytest.mark.parametrize("while_asking", ["hops", "for offers"])
@pytest.mark.parametrize(("count", "end"), [(1, 6), (0, 6), (0, 5)])
def test_no_hop_is_suspected_once_its_result_has_come(while_asking: str, count: int, end: int) -> None:
    """While the hops were asked, or other nodes. A result without news of a position changes nothing."""

    async def main() -> None:
        patient = Patient(offer("t", 8, 12))
        patient.session.culprit = 2
        probe, offers = patient.session.probe, patient.world.offers

        def come() -> None:
            step = Step(patient.session.id, 1, 0, end - count, count, end, 0, "hidden", None, None, b"", 0)
            patient.session.returns.results.append(step)

        async def probe_late(limit_s: float) -> HeldStep:
            come()
            return await probe(limit_s)

        async def offers_late(excluded: Collection[NodeId]) -> list[Offer]:
            come()
            return await offers(excluded)

        if while_asking == "hops":
            setattr(patient.session, "probe", probe_late)  # noqa: B010
        else:
            setattr(patient.world, "offers", offers_late)  # noqa: B010
        await patient.healer.suspect(1.5, 5, 6, 0.01)
        assert bool(patient.session.losses) == (end == 5)

    play(main)


def test_no_hop_is_silent_by_a_probe_in_which_this_process_stood_still() -> None:
    """Its answers wait to be read when the probe's deadline passes; who does not answer in 10 s is replaced after all."""

    async def main() -> None:
        patient, late = Patient(offer("t", 8, 12)), [0.0]
        patient.session.culprit, patient.session.is_silent = 2, True
        patient.healer._late_s = lambda node: late[0]
        probe = patient.session.probe

        async def stand_still(limit_s: float) -> HeldStep:
            late[0] = 2.0
            return await probe(limit_s)

        setattr(patient.session, "probe", stand_still)  # noqa: B010
        await patient.healer.suspect(1.5, 5, 6, 0.01)
        assert not patient.session.losses
        await patient.healer.suspect(10.0, 5, 6, 0.01)
        assert list(patient.session.losses) == [2]

    play(main)
