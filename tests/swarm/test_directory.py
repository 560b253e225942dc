"""The announcer's decisions, and the runner that carries them: three nodes in virtual time over a fake network."""

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import manyhands
from manyhands.core import ModelId, NodeId, SpanInfo, SpanLoad
from manyhands.errors import LinkClosed
from manyhands.swarm.announce import Announcer
from manyhands.swarm.dht.backend import Dht
from manyhands.swarm.directory import MAX_MENTIONED, Backend, DirectoryRunner, Peer
from manyhands.swarm.gossip import Gossip
from manyhands.swarm.members import Members
from manyhands.swarm.record import BEAT_S, MAX_LIFETIME_S, REFRESH_S
from manyhands.swarm.record_store import SILENT_S, RecordStore
from manyhands.swarm.statement import sign
from manyhands.swarm.static import Static
from manyhands.testing.clock import run_virtual
from tests.swarm.records import (
    NOW,
    address_of,
    announcer_of,
    hosted,
    info_of,
    key_of,
    node_of,
    open_record,
    profile_of,
    record_of,
)

# What a node says


def test_beats_between_signatures() -> None:
    announcer = announcer_of(0)
    versions, sequences = [], set()
    for beat in range(26):
        (data,) = announcer.announce(hosted(0), NOW + beat * BEAT_S)
        record = open_record(data)
        versions.append(record.version)
        sequences.add(record.sequence)
    assert versions == sorted(set(versions)), "every word is newer than the one before"
    assert len(sequences) == 1 + int(25 * BEAT_S // REFRESH_S)


def test_a_change_is_signed_at_once_and_a_trembling_speed_is_none() -> None:
    announcer = announcer_of(0)
    first, second, third = (
        open_record(announcer.announce([(info_of(), load)], NOW + at)[0])
        for at, load in (
            (0, SpanLoad(layer_s=0.0101)),
            (5, SpanLoad(layer_s=0.0102)),
            (10, SpanLoad(1, layer_s=0.0101)),
        )
    )
    assert (second.sequence, second.beats) == (first.sequence, 1)
    assert third.sequence > second.version and third.load.sessions == 1


def test_a_span_that_is_given_up_is_withdrawn() -> None:
    announcer = announcer_of(0)
    announcer.announce(hosted(0, 8), NOW)
    said = [open_record(data) for data in announcer.announce(hosted(8), NOW + 5)]
    assert [(r.info.span.start, r.is_withdrawn) for r in said if r.info] == [(8, False), (0, True)], (
        "first what is new: no view is without the node in between"
    )
    again = [open_record(data) for data in announcer.announce(hosted(0, 8), NOW + 6)]
    assert again[0].sequence > said[1].version, "taking it again outdoes the withdrawal"


def test_a_node_that_hosts_nothing_is_a_member_and_leaving_withdraws_all() -> None:
    announcer = announcer_of(0)
    assert open_record(announcer.announce([], NOW)[0]).info is None
    said = [open_record(data) for data in announcer.announce(hosted(0), NOW + 5)]
    assert [record.is_withdrawn for record in said] == [False], "a withdrawal that overtakes it would hide the node"
    hosting, idle = [open_record(data) for data in announcer.announce(hosted(0), NOW + 10)]
    assert not hosting.is_withdrawn and idle.is_withdrawn and idle.info is None
    assert [open_record(data).is_withdrawn for data in announcer.withdraw(NOW + 11)] == [True]
    assert announcer.withdraw(NOW + 7) == []


def test_a_clock_that_goes_back_does_not_lower_the_sequence() -> None:
    announcer = announcer_of(0)
    first = open_record(announcer.announce(hosted(0), NOW)[0])
    second = open_record(announcer.announce(hosted(0), NOW - 600)[0])
    assert second.sequence == first.sequence + 1 and second.issued_at == NOW - 600


def test_own_ghosts_are_withdrawn_and_higher_numbers_exceeded() -> None:
    announcer = announcer_of(0, NOW)
    announcer.announce(hosted(0), NOW)
    ghost = record_of(sequence=10**12, issued_at=NOW - 30, info=info_of(8, 16))
    (answer,) = announcer.answer([ghost, record_of(1)], NOW + 1, 1.0, SILENT_S)
    withdrawal = open_record(answer)
    assert withdrawal.is_withdrawn and withdrawal.key == ghost.key and withdrawal.sequence > ghost.sequence
    assert announcer.twin is None
    newer = record_of(sequence=10**13, issued_at=NOW - 30)
    assert announcer.answer([newer], NOW + 1, 1.0, SILENT_S) == []
    assert open_record(announcer.announce(hosted(0), NOW + 2)[0]).sequence > newer.sequence


def test_a_withdrawal_of_an_earlier_run_is_exceeded_and_not_withdrawn_again() -> None:
    announcer = announcer_of(0, NOW)
    announcer.announce(hosted(0), NOW)
    ahead = record_of(sequence=10**12, issued_at=NOW + 3600, is_withdrawn=True)
    before = record_of(sequence=10**11, issued_at=NOW - 30, info=None, is_withdrawn=True)
    assert announcer.answer([ahead, before], NOW + 1, 1.0, SILENT_S) == []
    assert announcer.twin is None
    assert open_record(announcer.announce(hosted(0), NOW + 2)[0]).sequence > 10**12


def test_a_twin_is_named_and_not_fought() -> None:
    announcer = announcer_of(0, NOW)
    announcer.announce(hosted(0), NOW)
    twin = record_of(sequence=10**12, issued_at=NOW + 10, info=info_of(8, 16), addresses=(address_of(0, "10.9.9.9"),))
    assert announcer.answer([twin], NOW + 11, 11.0, SILENT_S) == []
    assert announcer.twin == twin
    for beats, at in enumerate((16.0, 21.0, 26.0, 26.0 + SILENT_S, 300.0)):
        beaten = replace(twin, beats=min(beats + 1, 3))
        assert announcer.answer([beaten], NOW + at, at, SILENT_S) == [] and announcer.twin == beaten


def test_a_twin_that_is_gone_is_named_no_more() -> None:
    announcer = announcer_of(0, NOW)
    announcer.announce(hosted(0), NOW)
    twin = record_of(sequence=10**12, issued_at=NOW + 10, info=info_of(8, 16), addresses=(address_of(0, "10.9.9.9"),))
    for beats in range(20):
        announcer.answer([replace(twin, beats=beats)], NOW + 11 + 5 * beats, 11.0 + 5 * beats, SILENT_S)
    assert announcer.answer([], NOW + 200, 200.0, SILENT_S) == [] and announcer.twin is not None
    assert announcer.answer([], NOW + 250, 11.0 + 95 + MAX_LIFETIME_S, SILENT_S) == [] and announcer.twin is None
    back = replace(twin, sequence=10**13)
    assert announcer.answer([back], NOW + 900, 900.0, SILENT_S) == [] and announcer.twin == back


def test_a_record_of_an_earlier_run_with_a_later_stamp_is_withdrawn_once_it_is_silent() -> None:
    """The clock is behind. A jump of it meanwhile, by NTP, decides nothing; and what speaks again then is a twin's."""
    announcer = announcer_of(0, NOW)
    announcer.announce(hosted(0), NOW)
    former = record_of(sequence=10**12, issued_at=NOW + 3600, info=info_of(8, 16))
    assert announcer.answer([former], NOW + 1, 1.0, SILENT_S) == [] and announcer.twin == former
    beaten = replace(former, beats=1)  # this was on its way
    assert announcer.answer([beaten], NOW + 3, 3.0, SILENT_S) == []
    assert announcer.answer([beaten], NOW + 7200, 2.0 + SILENT_S, SILENT_S) == [] and announcer.twin == beaten
    (answer,) = announcer.answer([beaten], NOW + 7201, 3.0 + SILENT_S, SILENT_S)
    withdrawal = open_record(answer)
    assert withdrawal.is_withdrawn and withdrawal.key == former.key and withdrawal.sequence > former.sequence
    assert announcer.twin is None
    for at, sequence in ((30.0, 1), (300.0, 2)):
        again = replace(former, sequence=withdrawal.sequence + sequence)
        assert announcer.answer([again], NOW + at, at, SILENT_S) == [] and announcer.twin == again


@pytest.mark.parametrize("lasted_s", [1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 8.0])
def test_a_node_that_is_started_again_soon_is_not_taken_for_two(lasted_s: float) -> None:
    """At its start a node says several things a second, each with a number of its own."""
    for quarters in range(2, 60):
        store = RecordStore(node_of(9))
        for start in (0.3, 0.3 + lasted_s + quarters / 4):
            announcer = announcer_of(0, NOW + start)
            for after, said in ((0.0, []), (0.2, hosted(0)), (0.5, hosted(8)), (0.9, hosted(8)), (lasted_s, [])):
                for data in announcer.announce(said, NOW + start + after):
                    store.put(data, start + after)
            for data in announcer.withdraw(NOW + start + lasted_s):
                store.put(data, start + lasted_s)
        assert not store.forks, quarters / 4


# Who carries it


class Wires:
    """A network: bodies arrive after 10 ms, unless one end is down."""

    def __init__(self) -> None:
        self.runners: dict[NodeId, DirectoryRunner] = {}

    async def send(self, sender: int, to: Peer, body: bytes) -> None:
        await asyncio.sleep(0.01)
        if to.node not in self.runners or node_of(sender) not in self.runners:
            raise LinkClosed("no listener")
        self.runners[to.node].receive(Peer(node_of(sender), (address_of(sender),)), body)


@dataclass
class Host:
    spans: list[tuple[SpanInfo, SpanLoad]] | None  # None: it only looks


@contextlib.asynccontextmanager
async def running(
    wires: Wires,
    index: int,
    backend: Backend,
    members: Members | None = None,
    host: Host | None = None,
    behind_s: float = 0.0,
) -> AsyncIterator[DirectoryRunner]:
    """`behind_s`: how far the node's clock of the world is behind."""
    spans = host or Host(list(hosted(8 * (index % 3))))
    runner = DirectoryRunner(
        backend,
        Announcer(key_of(index), profile_of(index), Random(index).randbytes, now() - behind_s),
        lambda: spans.spans,
        lambda peer, body: wires.send(index, peer, body),
        node_of(index),
        members or Members(),
        now,
        lambda: now() - behind_s,
    )
    async with runner:
        wires.runners[runner.me] = runner
        try:
            yield runner
        finally:
            await asyncio.sleep(0)
    wires.runners.pop(runner.me, None)


def now() -> float:
    return NOW + asyncio.get_running_loop().time()


def gossip(index: int) -> Backend:
    return Gossip(node_of(index), Random(index))


def static(index: int) -> Backend:
    return Static(node_of(index))


def dht(index: int) -> Backend:
    return Dht(node_of(index), Random(index))


@pytest.mark.parametrize("make", [gossip, dht, static])
def test_nodes_meet_stay_and_leave(make: Callable[[int], Backend]) -> None:
    async def live() -> None:
        wires = Wires()
        async with running(wires, 0, make(0)) as first, running(wires, 1, make(1)) as second:
            second.joined(Peer(node_of(0), (address_of(0),)))
            async with running(wires, 2, make(2)) as third:
                for other in (0, 1):
                    third.joined(Peer(node_of(other), (address_of(other),)))
                await wait_for(first, 3)
                assert {peer.node for peer in first.peers()} == {node_of(1), node_of(2)}
                assert len(list(first.in_turn(info_of().model))) == 3
                await asyncio.sleep(150)
                assert [len(runner.records()) for runner in (first, second, third)] == [3, 3, 3]
            await asyncio.sleep(1)
            assert [len(runner.records()) for runner in (first, second)] == [2, 2], "leaving withdraws at once"

    run_virtual(live())


async def wait_for(runner: DirectoryRunner, num_records: int) -> None:
    async with asyncio.timeout(20), runner.changed:
        await runner.changed.wait_for(lambda: len(runner.records()) == num_records)


def test_a_lost_link_hides_a_node_at_once_and_its_return_shows_it() -> None:
    async def live() -> None:
        wires = Wires()
        async with running(wires, 0, gossip(0)) as first, running(wires, 1, gossip(1)):
            first.joined(Peer(node_of(1), (address_of(1),)))
            await wait_for(first, 2)
            hidden = wires.runners.pop(node_of(1))
            first.lost(node_of(1))
            assert [record.node for record in first.records()] == [node_of(0)]
            await asyncio.sleep(30)
            wires.runners[node_of(1)] = hidden
            await wait_for(first, 2)

    run_virtual(live())


@pytest.mark.parametrize("make", [gossip, dht])
def test_a_node_that_comes_back_with_its_clock_behind_is_seen(make: Callable[[int], Backend]) -> None:
    async def live() -> None:
        wires = Wires()
        async with running(wires, 0, make(0)) as first, running(wires, 2, make(2)) as third:
            third.joined(Peer(node_of(0), (address_of(0),)))
            async with running(wires, 1, make(1)) as second:
                second.joined(Peer(node_of(0), (address_of(0),)))
                await wait_for(first, 3)
            await asyncio.sleep(20)
            assert len(first.records()) == 2
            async with running(wires, 1, make(1), behind_s=3600.0) as second:
                second.joined(Peer(node_of(0), (address_of(0),)))
                await asyncio.sleep(40)
                assert {len(runner.records()) for runner in (first, second, third)} == {3}
                assert second.announcer.twin is None

    run_virtual(live())


@pytest.mark.parametrize("make", [gossip, dht])
def test_what_a_node_hosted_before_it_crashed_is_gone_though_its_clock_is_behind_now(
    make: Callable[[int], Backend],
) -> None:
    """Well before its lifetime is over, for which its record would count as heard: the node is linked again."""

    async def live() -> None:
        wires = Wires()
        async with running(wires, 0, make(0)) as first:
            async with running(wires, 1, make(1), host=Host(list(hosted(16)))) as second:
                second.joined(Peer(node_of(0), (address_of(0),)))
                await wait_for(first, 2)
                wires.runners.pop(node_of(1))  # it says no more
            first.lost(node_of(1))
            async with running(wires, 1, make(1), behind_s=3600.0) as second:
                for one, other in ((first, 1), (second, 0)):
                    one.joined(Peer(node_of(other), (address_of(other),)))
                await asyncio.sleep(second.backend.silent_s + (10 if make is gossip else 36))  # a turn of a DHT
                starts = [{r.info.span.start for r in one.records() if r.info} for one in (first, second)]
                assert starts == [{0, 8}, {0, 8}] and second.announcer.twin is None

    run_virtual(live())


def test_a_new_span_is_told_without_waiting() -> None:
    async def live() -> None:
        wires, host = Wires(), Host([])
        async with running(wires, 0, gossip(0)) as first, running(wires, 1, gossip(1), host=host) as second:
            first.joined(Peer(node_of(1), (address_of(1),)))
            await wait_for(first, 2)
            await asyncio.sleep(1)
            host.spans = list(hosted(16))
            second.announce()
            await asyncio.sleep(0.1)
            assert [r.info.span.start for r in first.records() if r.node == node_of(1) and r.info] == [16]

    run_virtual(live())


def test_denied_nodes_are_neither_heard_nor_offered() -> None:
    async def live() -> None:
        wires = Wires()
        denying = Members(deny=frozenset({node_of(1)}))
        async with running(wires, 0, gossip(0), denying) as first, running(wires, 1, gossip(1)) as second:
            second.joined(Peer(node_of(0), (address_of(0),)))
            first.joined(Peer(node_of(1), (address_of(1),)))
            await asyncio.sleep(20)
            assert [record.node for record in first.records()] == [node_of(0)]
            await first.publish(sign(replace(record_of(1), issued_at=now()), key_of(1)))
            assert first.peers() == []

    run_virtual(live())


def test_an_unreachable_peer_is_a_clear_error() -> None:
    async def live() -> None:
        async with running(Wires(), 0, gossip(0)) as runner:
            with pytest.raises(LinkClosed, match="no listener"):
                await runner.send(Peer(node_of(5)), b"hello")

    run_virtual(live())


# Which models are kept at hand, and of which kind others are


class Noted(Gossip):
    """Gossip that notes what it is told to watch."""

    def __init__(self, index: int) -> None:
        super().__init__(node_of(index), Random(index))
        self.watched: set[ModelId] = set()

    def watch(self, model: ModelId) -> None:
        assert model not in self.watched
        self.watched.add(model)

    def unwatch(self, model: ModelId) -> None:
        self.watched.remove(model)


def test_models_are_watched_while_they_are_hosted_or_asked_for() -> None:
    """Without either, those that peers speak of are, a few of them: else who joins could learn of no model at all."""

    async def live() -> None:
        backend, host = Noted(0), Host([])
        mine, asked, heard = info_of().model, model_of(1), [model_of(index) for index in range(2, 40)]
        async with running(Wires(), 0, backend, host=host) as runner:
            runner.joined(Peer(node_of(1), (address_of(1),)), heard)
            assert len(backend.watched) == MAX_MENTIONED and backend.watched <= set(heard)
            host.spans = list(hosted(0))
            await asyncio.sleep(1)
            assert backend.watched == {mine}
            assert runner.records_of((), asked) == []
            assert backend.watched == {mine, asked}, "at once"
            host.spans = []
            await asyncio.sleep(1)
            assert backend.watched == {asked}

    run_virtual(live())


def model_of(index: int) -> ModelId:
    return ModelId(f"{index:064x}")


def test_who_only_looks_sees_all_and_is_seen_by_none() -> None:
    async def live() -> None:
        wires = Wires()
        async with running(wires, 0, gossip(0)) as first, running(wires, 1, gossip(1), host=Host(None)) as second:
            second.joined(Peer(node_of(0), (address_of(0),)))
            await wait_for(second, 1)
            await asyncio.sleep(60)
            for runner in (first, second):
                assert [record.node for record in runner.records()] == [node_of(0)]

    run_virtual(live())


@given(st.binary(min_size=1, max_size=60))
@settings(max_examples=50)
def test_messages_of_another_kind_change_nothing_and_are_complained_of(body: bytes) -> None:
    async def live() -> None:
        async with running(Wires(), 0, gossip(0)) as runner:
            before = runner.records()
            runner.receive(Peer(node_of(1)), body)
            assert runner.records() == before
            lines = runner.complaints()
            if body[:1] == b"g":
                assert lines == []
            else:
                kind = {b"d": "dht", b"s": "static"}.get(body[:1], "means that this node does not know")
                assert [f"keeps the directory by {kind}, this one by gossip" in line for line in lines] == [True]
            runner.lost(node_of(1))
            assert runner.complaints() == []

    run_virtual(live())


def test_only_this_package_knows_the_back_ends() -> None:
    """What is above sees the five calls; that the back-ends can be exchanged rests on it."""
    root = Path(manyhands.__file__).parent
    others = [path for path in root.rglob("*.py") if not path.is_relative_to(root / "swarm")]
    names = re.compile(r"manyhands\.swarm\.(backends|gossip|dht\w*|static|lookup|news|store)\b")
    found = {path.relative_to(root).as_posix(): set(names.findall(path.read_text())) for path in others}
    assert {path: used for path, used in found.items() if used} == {"member/member.py": {"backends"}}
