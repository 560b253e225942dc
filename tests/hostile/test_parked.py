"""Parked sessions: no owner holds more than its share, none costs a live session its room, none is another's to take."""

import asyncio
import random
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from manyhands.api.access import Access
from manyhands.api.auth import KeyRing
from manyhands.api.http.hosts import Headers, Hosts
from manyhands.config import WorkerConfig
from manyhands.core import NodeId, SamplingParams, SessionId, Span
from manyhands.origin.conversations import (
    MAX_AGE_S,
    MAX_CONVERSATIONS,
    MAX_IDS,
    MAX_PER_TENANT,
    Conversations,
    ParkedConversation,
)
from manyhands.testing.clock import run_virtual
from manyhands.testing.swarm import memory_node, memory_swarm
from manyhands.testing.tiny import make_tiny
from manyhands.wire.message import Close, Opened, Step
from manyhands.worker.bounds import RowBounds
from manyhands.worker.log import LogBudget
from manyhands.worker.parking import MAX_PARKED, MAX_PARKED_PER_OWNER, OWNER_SHARE, PARKED_S, Parked, Parking
from tests.worker.hop import AFTER, NODE, ORIGIN, Hop, hidden, hop, session_id

TOTAL = 2048
Scenario = Callable[[Hop], Awaitable[None]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("llama", tmp_path_factory.mktemp("parked") / "llama", seed=4)


def play(folder: Path, scenario: Scenario, **config: Any) -> None:
    async def main() -> None:
        async with hop(folder, WorkerConfig(**{"cache_tokens": TOTAL, **config})) as one:
            await scenario(one)

    run_virtual(main())


def name(number: int) -> SessionId:
    """What session `number` is parked as."""
    return session_id(1_000_000 + number)


async def park(one: Hop, number: int, capacity: int = 64, rows: int = 8, origin: NodeId = ORIGIN) -> None:
    """Open, compute some rows, and close with the wish to keep them."""
    one.origin.peer = origin
    await one.open(number, capacity, origin=origin)
    one.step(number, 0, hidden(rows, number), reply_from=rows)
    await one.until(lambda: bool(one.after.of(Step, session_id(number))))
    one.host.close(Close(session_id(number), name(number), rows), origin)
    one.origin.peer = ORIGIN


async def resume(one: Hop, number: int, parked: int, until: int, origin: NodeId = ORIGIN, **changes: Any) -> int:
    """What a new session that names a parked one begins with."""
    one.origin.peer = origin
    await one.open(number, origin=origin, resume=name(parked), resume_until=until, **changes)
    one.origin.peer = ORIGIN
    return one.origin.of(Opened, session_id(number))[-1].cached


@pytest.mark.parametrize("moves", [False, True])
def test_a_place_that_a_repair_left_behind_is_not_parked(folder: Path, moves: bool) -> None:
    """Its last rows may be of guesses that were wrong: the session has gone on in another place of this node."""

    async def scenario(one: Hop) -> None:
        await one.open(1, span=Span(2, 3))
        one.step(1, 0, hidden(9), reply_from=9)
        await one.until(lambda: bool(one.after.of(Step, session_id(1))))
        if moves:
            await one.open(1, span=Span(3, 4), epoch=2)
        one.host.close(Close(session_id(1), name(1), 8), ORIGIN)
        assert len(one.host.parking) == (not moves) and one.host.num_sessions == 0

    play(folder, scenario)


# -- bounds -----------------------------------------------------------------------------------------------------------


def test_an_owner_parks_no_more_than_its_share(folder: Path) -> None:
    """In sessions and in positions; the oldest go. What is gone is forgotten by the log budget too."""

    async def scenario(one: Hop) -> None:
        for number in range(1, 60):
            rows = 8 if number < 45 else 200
            await park(one, number, capacity=256, rows=rows)
            assert len(one.host.parking) <= MAX_PARKED_PER_OWNER
            assert one.host.parking.held_by(ORIGIN) <= OWNER_SHARE * TOTAL
            assert len(one.logs._parked) == len(one.host.parking)
        assert await resume(one, 900, 59, 8) == 8
        assert await resume(one, 901, 1, 8) == 0

    play(folder, scenario)


def test_parked_sessions_refuse_no_live_one(folder: Path) -> None:
    """Two owners have parked all there is; a lease of every position is granted at once, and nothing is left of them."""

    async def scenario(one: Hop) -> None:
        for number in range(1, 9):
            await park(one, number, capacity=256, rows=200, origin=ORIGIN if number % 2 else AFTER)
        assert one.host.parking.num_positions == TOTAL and one.host.info.free_tokens == TOTAL
        await one.open(100, capacity=TOTAL // 2)
        assert one.host.parking.num_positions == TOTAL // 2
        assert await resume(one, 101, 7, 8, capacity=256) == 8  # the oldest went first
        await one.open(102, capacity=one.host.info.free_tokens)
        assert one.host.info.free_tokens == len(one.host.parking) == 0 and not one.logs._parked

    play(folder, scenario)


@pytest.mark.parametrize("shares", [True, False])
def test_what_is_resumed_goes_too_where_there_is_no_room_for_both(folder: Path, shares: bool) -> None:
    """It goes on in the lease, where caches share blocks; else the request computes anew. Memory never holds more than the
    span's positions."""

    async def scenario(one: Hop) -> None:
        await park(one, 1, capacity=500, rows=400)
        model = one.host.engine.model
        assert model is not None
        cast(Any, model.runner).shares_blocks = shares
        assert await resume(one, 2, 1, 400, capacity=500) == 400 and len(one.host.parking) == 1
        one.host.close(Close(session_id(2)), ORIGIN)
        assert await resume(one, 3, 1, 400, capacity=600) == (400 if shares else 0)
        assert len(one.host.parking) == 0 and not one.logs._parked

    play(folder, scenario, cache_tokens=1000)


@pytest.mark.parametrize("capacity, cached", [(447, 0), (448, 400)])
def test_a_lease_that_is_too_small_for_what_is_parked_holds_none_of_it(
    folder: Path, capacity: int, cached: int
) -> None:
    """While it is being opened there would be more memory than leases and parked sessions count."""

    async def scenario(one: Hop) -> None:
        await one.open(9, capacity=200)
        await park(one, 1, capacity=500, rows=400)
        assert one.host.parking.num_positions == 448
        assert await resume(one, 2, 1, 400, capacity=capacity) == cached

    play(folder, scenario, cache_tokens=1000)


def test_they_end_by_age(folder: Path) -> None:
    """Without anything else happening on the span. Use makes young again."""

    async def scenario(one: Hop) -> None:
        await park(one, 1)
        await park(one, 2)
        await asyncio.sleep(PARKED_S - 10)
        assert await resume(one, 3, 1, 8) == 8
        await asyncio.sleep(20)
        assert len(one.host.parking) == 1
        await asyncio.sleep(PARKED_S)
        assert len(one.host.parking) == 0 and not one.logs._parked

    play(folder, scenario)


def test_a_node_that_leaves_parks_nothing(folder: Path) -> None:
    """Neither what was parked before it drains nor what ends while it does."""

    async def scenario(one: Hop) -> None:
        await park(one, 1)
        await one.open(2)
        one.step(2, 0, hidden(8))
        await one.until(lambda: bool(one.after.of(Step, session_id(2))))
        one.host.drain()
        assert len(one.host.parking) == 0
        one.host.close(Close(session_id(2), name(2), 8), ORIGIN)
        assert len(one.host.parking) == 0 and one.logs.num_bytes == 0

    play(folder, scenario)


def test_all_owners_together_are_bounded() -> None:
    parking = Parking(LogBudget(0))
    for number in range(MAX_PARKED + 50):
        owner = NodeId(f"{number:064x}")
        log = LogBudget(0).open(session_id(number))
        parked = Parked(owner, Span(0, 1), "origin", 1, 1, cast(Any, None), log, 1, RowBounds(), ())
        parking.park(name(number), parked, 10_000, 10_000, float(number))
        assert len(parking) <= MAX_PARKED


def test_logs_of_parked_sessions_go_before_those_of_live_ones(folder: Path) -> None:
    async def scenario(one: Hop) -> None:
        await one.open(1)
        one.step(1, 0, hidden(20))
        await one.until(lambda: bool(one.after.of(Step, session_id(1))))
        live = one.logs.num_bytes
        one.logs.limit_bytes = 2 * live
        for number in range(2, 9):
            await park(one, number, rows=15)
            await one.quiet()
            one.logs.enforce()
            assert one.logs.num_bytes <= 2 * live
        place = one.host.find(session_id(1), 1, 1)
        assert place is not None and place.log.covers(20)
        assert len(one.host.parking) == 7  # their caches stay

    play(folder, scenario)


@pytest.mark.parametrize("shares", [True, False])
def test_what_is_dropped_while_it_is_resumed(folder: Path, shares: bool) -> None:
    """Its cache is used only where that takes no memory beside the new session's."""

    async def scenario(one: Hop) -> None:
        await park(one, 1, rows=40)
        model = one.host.engine.model
        assert model is not None
        cast(Any, model.runner).shares_blocks = shares
        opened = asyncio.ensure_future(resume(one, 2, 1, 40))
        await asyncio.sleep(0)
        one.host.parking.clear()
        assert await opened == (40 if shares else 0)

    play(folder, scenario)


def test_the_origin_remembers_a_bounded_number() -> None:
    """Of one tenant, of all, and ids of all together; the oldest go and are given back to be closed."""
    known = Conversations()
    gone = 0
    for number in range(3000):
        ids = np.arange(number, number + 20_000, dtype=np.int32)
        made = ParkedConversation(f"tenant {number % 50}", name(number), ids, ())
        gone += len(known.add(made, float(number) / 100))
        assert len(known) <= MAX_CONVERSATIONS and known.num_ids <= MAX_IDS
    assert gone + len(known) == 3000
    alone = Conversations()
    for number in range(100):
        alone.add(ParkedConversation("me", name(number), np.array([number], np.int32), ()), 0.0)
        assert len(alone) <= MAX_PER_TENANT
    assert len(alone.add(ParkedConversation("you", name(7), np.array([1], np.int32), ()), MAX_AGE_S)) == MAX_PER_TENANT


def test_of_a_parked_session_only_what_it_holds_counts(folder: Path) -> None:
    """Blocks of 64 positions, not all of its lease: the rest is another's."""

    async def scenario(one: Hop) -> None:
        await park(one, 1, capacity=1000, rows=65)
        await park(one, 2, capacity=10, rows=8)
        assert one.host.parking.num_positions == 128 + 10

    play(folder, scenario)


# -- whose it is ------------------------------------------------------------------------------------------------------


def test_a_name_is_worth_nothing_to_another(folder: Path) -> None:
    """Who learns it can neither resume nor close; who guesses hears the same. Its owner still can, on the same layers alone."""

    async def scenario(one: Hop) -> None:
        await park(one, 1)
        draw = random.Random(1)
        assert await resume(one, 2, 1, 8, origin=AFTER) == 0
        for number in range(3, 30):
            guess = SessionId(draw.randbytes(16))
            await one.open(number, resume=guess, resume_until=8)
            assert one.origin.of(Opened, session_id(number))[-1].cached == 0
        one.host.close(Close(name(1)), AFTER)
        one.host.close(Close(session_id(2), name(1), 8), NODE)
        assert await resume(one, 40, 1, 8, span=Span(3, 4)) == 0
        assert await resume(one, 41, 1, 8, ends="edges") == 0
        assert await resume(one, 42, 1, 8) == 8
        one.host.close(Close(name(1)), ORIGIN)
        assert await resume(one, 43, 1, 8) == 0

    play(folder, scenario, max_sessions=100)


@pytest.mark.parametrize("claimed", [0, 9, 64, 1 << 31])
def test_positions_that_were_never_computed_are_not_given(folder: Path, claimed: int) -> None:
    """Neither parked nor resumed beyond what the cache holds: stale memory is no session's."""

    async def scenario(one: Hop) -> None:
        await park(one, 1, rows=8)
        assert await resume(one, 2, 1, claimed) == min(claimed, 8)
        await one.open(3)
        one.step(3, 0, hidden(8))
        await one.until(lambda: bool(one.after.of(Step, session_id(3))))
        one.host.close(Close(session_id(3), name(3), claimed), ORIGIN)
        assert await resume(one, 4, 3, max(1, claimed)) == 0

    play(folder, scenario)


def test_they_end_with_their_owners_link(folder: Path) -> None:
    async def main() -> None:
        params = SamplingParams(max_tokens=4, ignore_eos=True)
        async with memory_swarm(folder, "0-2,3-5") as swarm:
            await swarm.origin.complete(swarm.origin.request_ids(range(40), params), tenant="me")
            async with memory_node(swarm.network, "other") as other:
                assert swarm.hops[0].address is not None
                await other.pool.get(swarm.hops[0].address, "control")
            assert [len(node.hosts[0].parking) for node in swarm.hops] == [1, 1]
            await swarm.origin.node.pool.aclose()
            await asyncio.sleep(1)
            assert [len(node.hosts[0].parking) for node in swarm.hops] == [0, 0]

    run_virtual(main())


def test_another_tenants_request_takes_as_long_as_the_first(folder: Path) -> None:
    """To time is to learn nothing: the same steps run, row for row, whether or not another has asked the same."""

    async def main() -> None:
        params = SamplingParams(max_tokens=2, ignore_eos=True)
        async with memory_swarm(folder, "0-2,3-5") as swarm:
            counts = []
            await swarm.origin.complete(
                swarm.origin.request_ids(range(100, 200), params)
            )  # how chunks are cut is learnt
            for tenant in ("a", "b", "a"):
                before = [(h.engine.steps_run, h.engine.rows_run) for n in swarm.hops for h in n.hosts]
                await swarm.origin.complete(swarm.origin.request_ids(range(100), params), tenant=tenant)
                await asyncio.sleep(0.1)
                after = [(h.engine.steps_run, h.engine.rows_run) for n in swarm.hops for h in n.hosts]
                counts.append([(y[0] - x[0], y[1] - x[1]) for x, y in zip(before, after, strict=True)])
            assert counts[0] == counts[1] != counts[2]

    run_virtual(main())


def test_callers_are_one_tenant_only_where_they_are_one_user(tmp_path: Path) -> None:
    """Each key is one; only this machine's user on loopback needs none, not one behind a proxy."""

    def tenant(access: Access, headers: Headers) -> str | None:
        return asyncio.run(access.caller("POST", headers, "program", is_open=False)).tenant

    plain = Access(None, Hosts())
    assert tenant(plain, {}) == "local"
    wide = Access(None, Hosts())
    wide.listen("0.0.0.0", insecure=True)
    assert tenant(wide, {}) is None
    proxied = Access(None, Hosts(told=["llm.example.org"]))
    assert tenant(proxied, {}) is None
    keys = KeyRing(tmp_path / "keys.json")
    secrets = [keys.add(who, 0.0) for who in ("ann", "bob")]
    shown = [{"authorization": f"Bearer {secret}"} for secret in secrets]
    tenants = [tenant(Access(keys, Hosts()), each) for each in shown]
    assert None not in tenants and len({*tenants, "local"}) == 3
    assert not any(secret in str(tenants) for secret in secrets)
