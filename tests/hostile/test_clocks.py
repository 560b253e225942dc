"""F9: wall clocks that jump or are wrong, and a machine that was suspended. In one process, in virtual time."""

import asyncio
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

import pytest

from manyhands.core import NodeAddr, SamplingParams
from manyhands.member.member import Member
from manyhands.net import certificate
from manyhands.net.tls import TlsTransport
from manyhands.swarm.record import MAX_LIFETIME_S
from manyhands.swarm.record_store import FRESH_S, RecordStore
from manyhands.swarm.statement import sign
from manyhands.testing.tiny import make_tiny
from manyhands.wire.message import PROTOCOL_VERSION, Hello, Lane, Token
from tests.member.members import Play, Town, player
from tests.swarm.records import NOW, announcer_of, chain_of, hosted, key_of, node_of, record_of

PARAMS = SamplingParams(max_tokens=2, ignore_eos=True)
HOUR_S = 3600.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("llama", tmp_path_factory.mktemp("clocks") / "tiny", layers=2, seed=3)


@pytest.fixture
def play(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Play:
    monkeypatch.setenv("MANYHANDS_HOME", str(tmp_path))
    return player(folder, tmp_path, 600)


def seen(member: Member) -> set[str]:
    return {record.name for record in member.records()}


@pytest.mark.parametrize("off_s", [-HOUR_S, HOUR_S, 43_200.0, -40 * 86_400.0])
def test_a_clock_that_jumps_makes_neither_ghosts_nor_deaths(play: Play, off_s: float) -> None:
    """On the observer: the living stay; one that dies afterwards is gone as soon as ever, and its layers with it."""

    async def scene(place: Town) -> None:
        first, second, third = [await place.open(i) for i in range(3)]
        await asyncio.sleep(6)
        assert seen(first) == {"n0", "n1", "n2"}
        place.clock_off_s[0] = off_s
        for _ in range(90):
            await asyncio.sleep(0.5)
            assert seen(first) == seen(second) == seen(third) == {"n0", "n1", "n2"}
        place.faults.freeze(third.node)  # it speaks no more, its links stay open
        await asyncio.sleep(FRESH_S + 7)
        assert seen(first) == seen(second) == {"n0", "n1"}

    play(scene)


@pytest.mark.parametrize("off_s", [-86_400.0, 86_400.0])
def test_a_member_whose_clock_is_a_day_off_joins_serves_and_is_used(play: Play, off_s: float) -> None:
    async def scene(place: Town) -> None:
        place.clock_off_s[0] = off_s
        host = (await place.host(0)).member
        late = await place.open(1)
        assert seen(late) == seen(host) == {"n0", "n1"}
        origin = place.origin(late)
        assert len((await origin.complete(origin.request_ids((3, 4, 5), PARAMS))).token_ids) == 2
        assert "set" in late.complaints()[0] and "NTP" in late.complaints()[0]

    play(scene)


def test_a_machine_that_was_suspended_finds_the_living_and_not_the_dead(play: Play) -> None:
    """Minutes without a byte in or out, in which one of the others died."""

    async def scene(place: Town) -> None:
        first, second, third = [await place.open(i) for i in range(3)]
        await asyncio.sleep(6)
        place.faults.freeze(first.node)
        await asyncio.sleep(60)
        place.faults.die(third.node)
        await asyncio.sleep(300)
        place.faults.thaw(first.node)
        await asyncio.sleep(25)
        assert seen(first) == seen(second) == {"n0", "n1"}

    play(scene)


def test_what_was_known_before_a_suspension_is_neither_dead_nor_a_ghost_after_it() -> None:
    """CLOCK_MONOTONIC stands still while a machine sleeps: who speaks on stays, who does not goes FRESH_S later."""
    store = RecordStore(node_of(9))
    for index in range(2):
        store.put(sign(record_of(index), key_of(index)), 50.0)
    assert len(store.records(51.0)) == 2
    chain = chain_of(0, 7 + 700)
    awake = record_of(0, sequence=7 + 700, anchor=chain.value(0))  # signed anew an hour later, by its clock
    assert store.put(sign(awake, key_of(0)), 52.0) == "new"
    assert [record.name for record in store.records(50.1 + FRESH_S)] == ["node-0"]


@pytest.mark.parametrize("slept_s", [HOUR_S, 8 * HOUR_S])
def test_a_machine_that_slept_calls_no_clock_wrong(play: Play, slept_s: float) -> None:
    """Its wall clock goes on while it sleeps, its monotonic one does not: what others said before looks a moment old, and an
    hour by the time that stands in it. A clock that is wrong is told of as ever."""

    async def scene(place: Town) -> None:
        first, _, _ = [await place.open(i) for i in range(3)]
        await asyncio.sleep(6)
        for index in range(3):
            place.clock_off_s[index] = slept_s  # the others' went on as well
        for _ in range(30):
            assert first.complaints() == []
            await asyncio.sleep(1.0)
        place.clock_off_s[1] = 2 * slept_s
        await asyncio.sleep(30)
        assert len(first.complaints()) == 1 and "ahead" in first.complaints()[0]

    play(scene)


def test_freshness_counts_from_arrival_whatever_the_signer_says() -> None:
    for issued in (0.0, NOW - 86_400, NOW + 86_400):
        store = RecordStore(node_of(9))
        assert store.put(sign(record_of(issued_at=issued), key_of(0)), 50.0) == "new"
        assert store.records(50.0 + FRESH_S) and not store.records(50.1 + FRESH_S)
        assert store.expire(49.0 + MAX_LIFETIME_S) == [] and len(store.expire(50.0 + MAX_LIFETIME_S)) == 1


def test_numbers_of_records_do_not_jump_with_the_clock() -> None:
    """They are compared by 16 bits: a jump by 12 h would look like a step back."""
    announcer, store = announcer_of(0), RecordStore(node_of(9))
    last = 0
    for turn, off in enumerate((0.0, 43_200.0, -43_200.0, 0.0, 86_400.0)):
        for data in announcer.announce(hosted(0), NOW + off + 5 * turn):
            assert store.put(data, 5.0 * turn) == "new"
        (record,) = store.records(5.0 * turn)
        assert last == 0 or 0 < record.version - last < 1 << 15
        last = record.version


def test_a_certificate_is_good_whatever_the_date(monkeypatch: pytest.MonkeyPatch) -> None:
    """Membership is the secret. A machine without a battery for its clock starts in 1970."""

    async def main() -> str:
        def hello(name: str) -> Callable[[Lane], Hello]:
            return lambda lane: Hello(PROTOCOL_VERSION, lane, name, None, (), Token("00" * 16))

        old = TlsTransport(key_of(0).private_key, bytes(32), hello("old"))
        monkeypatch.setattr(certificate, "_NOT_BEFORE", datetime(2200, 1, 1))
        new = TlsTransport(key_of(1).private_key, bytes(32), hello("new"))
        at = await old.listen(NodeAddr("127.0.0.1", 0))
        link, met = await asyncio.gather(new.dial(at, "control"), old.accept())
        assert met.peer == node_of(1)
        name = link.hello.name
        await asyncio.gather(link.aclose(), met.aclose())
        await asyncio.gather(old.aclose(), new.aclose())
        return name

    assert asyncio.run(main()) == "old"
