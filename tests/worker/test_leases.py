"""A node's bound on cache bytes (cache_bytes, --memory) holds for all its spans together."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manyhands.config import WorkerConfig
from manyhands.core import NodeAddr, NodeId, Span
from manyhands.engine.library import BLOCK
from manyhands.net.transport import Link
from manyhands.place.shape import look_up
from manyhands.testing.clock import run_virtual
from manyhands.testing.swarm import memory_node, memory_swarm
from manyhands.testing.tiny import make_tiny
from manyhands.wire.message import Close, Fault, Opened, Payload, Step
from manyhands.worker.bounds import RowBounds
from manyhands.worker.leases import CacheBudget, SpanLeases
from manyhands.worker.log import LogBudget, OutputLog
from manyhands.worker.parking import OWNER_SHARE, Parked, Parking
from manyhands.worker.runner import describe
from manyhands.worker.worker import Worker
from tests.hostile.test_floods import Flooder
from tests.kill import Scene
from tests.worker.hop import AFTER, BEFORE, ORIGIN, session_id

FIRST, MORE = Span(3, 6), Span(0, 3)  # held from the start; loaded on demand
LEASE, FIT = 512, 4  # positions of a session, and how many of them the node has memory for
HIDDEN = 64


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("qwen3", tmp_path_factory.mktemp("leases") / "qwen3", seed=3)


def lease_bytes(folder: Path) -> int:
    return 3 * LEASE * look_up(str(folder), "bf16", folder).shape.cache_bytes[0]


class Crowd(Flooder):
    """A member that opens sessions on a node with two spans and fills them."""

    control: Link
    data: Link

    @property
    def worker(self) -> Worker:
        return self.victim.worker

    @property
    def held_bytes(self) -> int:
        """Of all caches that the node holds, live and parked."""
        caches = [s.cache for host in self.worker.hosts for s in host._places.values()]
        caches += [p.cache for host in self.worker.hosts for p, _ in host.parking._parked.values() if p.cache]
        return sum(cast(Any, cache).num_bytes for cache in caches)

    async def ask(self, number: int, span: Span, capacity: int = LEASE) -> Fault | None:
        """Open a session and fill its lease; the Fault if that is refused."""
        session = self.session(number)
        self.control.send(self.open(self.control, number, span=span, capacity=capacity))

        def heard(kind: type[Any]) -> list[Any]:
            return [one for one in self.of(kind) if one.session == session]

        while not (heard(Opened) or heard(Fault)):  # noqa: ASYNC110 - in virtual time
            await asyncio.sleep(0.001)
        if heard(Fault):
            return cast(Fault, heard(Fault)[0])
        rows = Payload("bf16", HIDDEN, b"\x80\x3f" * (HIDDEN * capacity))
        self.data.send(Step(session, 1, 1, 0, capacity, capacity, 0, "hidden", None, rows))
        (place,) = [s for host in self.worker.hosts for s in host._places.values() if s.opened.session == session]
        while place.cache.length < capacity:
            assert not heard(Fault), heard(Fault)
            await asyncio.sleep(0.001)
        return None

    async def parked(self, number: int, span: Span, rows: int = LEASE) -> None:
        """Open a session, fill it, and park it as number + 1000."""
        assert await self.ask(number, span, rows) is None
        await self.close(number, number + 1000, rows)

    @property
    def names(self) -> list[int]:
        """Under which sessions are parked."""
        return sorted(int.from_bytes(key[0]) for host in self.worker.hosts for key in host.parking._parked)

    async def close(self, number: int, parked_as: int | None = None, rows: int = 0) -> None:
        """Close a session, or park what it has computed."""
        name = None if parked_as is None else session_id(parked_as)
        self.control.send(Close(self.session(number), name, rows))
        await asyncio.sleep(0.1)


@asynccontextmanager
async def crowd(folder: Path, cache_bytes: int) -> AsyncIterator[Crowd]:
    config = WorkerConfig(cache_bytes=cache_bytes)
    async with memory_swarm(folder, "0-2,3-5", worker=config) as swarm:
        victim = swarm.hops[1]
        (host,) = victim.hosts
        assert host.info.span == FIRST
        await victim.worker.offer_to_load(
            folder, Span(0, 6), "bf16", host.engine.device, model_name="test", max_layers=6
        )
        async with memory_node(swarm.network, "crowd") as node:
            await node.listen(NodeAddr("mem", 0))
            here = Crowd(node, cast(Scene, swarm))
            here.control, here.data = await here.link(), await here.link("data")
            yield here


def test_sessions_on_two_spans_hold_no_more_than_one_bound(folder: Path) -> None:
    """One span from the start, one that they make the node load: refused is what exceeds both together."""

    async def main() -> None:
        one = lease_bytes(folder)
        async with crowd(folder, FIT * one) as here:
            held = []
            for number in range(1, 2 * FIT + 3):
                refused = await here.ask(number, (FIRST, MORE)[number % 2])
                assert here.held_bytes <= FIT * one, number
                if refused is None:
                    held.append(number)
                else:
                    assert refused.code == "busy" and "cache for 0 more positions, 512 are asked" in refused.detail
            assert held == list(range(1, FIT + 1)) and here.held_bytes == FIT * one
            assert [host.info.free_tokens for host in here.worker.hosts] == [0, 0]
            for number, later in ((2, 101), (4, 103), (1, 105)):  # what either gives back the other may have
                await here.close(number)
                assert await here.ask(later, MORE if number % 2 == 0 else FIRST) is None
                assert here.held_bytes == FIT * one

    run_virtual(main())


def test_layers_that_would_be_loaded_are_offered_with_what_caches_have_free(folder: Path) -> None:
    """As many positions as a session on all that may still be loaded gets, and not one block more."""

    async def main() -> None:
        async with crowd(folder, FIT * lease_bytes(folder)) as here:

            def offered() -> int:
                (info,) = [info for info in here.worker.spans if not info.is_loaded]
                return info.free_tokens

            assert offered() == FIT * LEASE // 2, "six layers"
            for number in range(1, FIT):
                assert await here.ask(number, FIRST) is None
            assert offered() == LEASE // 2
            refused = await here.ask(11, Span(0, 6), LEASE // 2 + BLOCK)
            assert refused is not None and refused.code == "busy"
            assert await here.ask(FIT, MORE) is None
            assert offered() == 0, "nothing is left"
            for number in range(1, FIT - 1):
                await here.close(number)
            assert offered() == (FIT - 2) * LEASE, "three layers are loaded, three may be"
            assert await here.ask(21, Span(1, 4)) is None
            assert offered() == 0, "no layer more is loaded"

    run_virtual(main())


def test_sessions_that_wait_for_a_load_count(folder: Path) -> None:
    """All of them come while the layers are loaded for the first: of so many as fit none is refused, and no more are taken."""

    async def main() -> None:
        one = lease_bytes(folder)
        async with crowd(folder, FIT * one) as here:
            refused = await asyncio.gather(*(here.ask(number, MORE) for number in range(1, 31)))
            assert [fault is None for fault in refused] == [True] * FIT + [False] * (30 - FIT)
            assert here.held_bytes == FIT * one

    run_virtual(main())


def test_a_lease_counts_the_whole_blocks_that_it_takes(folder: Path) -> None:
    async def main() -> None:
        block = lease_bytes(folder) * BLOCK // LEASE
        async with crowd(folder, 5 * block) as here:
            taken = [await here.ask(number, (FIRST, MORE)[number % 2], 1) is None for number in range(1, 9)]
            assert taken == [True] * 5 + [False] * 3 and here.held_bytes == 5 * block

    run_virtual(main())


def test_what_could_never_fit_is_refused_by_name_and_loads_nothing(folder: Path) -> None:
    async def main() -> None:
        async with crowd(folder, lease_bytes(folder)) as here:
            assert await here.ask(1, FIRST, LEASE - 1) is None
            for number, span in ((2, FIRST), (3, MORE)):
                fault = await here.ask(number, span, LEASE + 1)
                assert fault is not None and fault.code == "shard_unavailable"
                assert f"layers {span} have cache for {LEASE} positions in all, {LEASE + 1} are asked" in fault.detail
                assert "raise --cache-tokens or --memory there" in fault.detail
            assert len(here.worker.hosts) == 1

    run_virtual(main())


def test_parked_sessions_of_any_span_give_way_to_a_lease_the_oldest_first(folder: Path) -> None:
    async def main() -> None:
        one = lease_bytes(folder)
        async with crowd(folder, 2 * FIT * one) as here:
            for number in range(1, FIT + 1):  # its owner's share
                await here.parked(number, (FIRST, MORE)[number % 2])
            assert here.names == [1001, 1002, 1003, 1004] and here.held_bytes == FIT * one
            for number in range(11, 11 + FIT):  # fit beside them
                assert await here.ask(number, FIRST) is None
            assert here.names == [1001, 1002, 1003, 1004] and here.held_bytes == 2 * FIT * one
            for number, left in ((21, [1002, 1003, 1004]), (22, [1003, 1004])):
                assert await here.ask(number, FIRST) is None
                assert here.names == left and here.held_bytes == 2 * FIT * one, "also where they are of the other span"

    run_virtual(main())


def test_an_owner_has_one_share_of_all_spans(folder: Path) -> None:
    """Half of the node's bytes, not half of each span's."""

    async def main() -> None:
        one = lease_bytes(folder)
        async with crowd(folder, FIT * one) as here:
            for number in range(1, 7):
                await here.parked(number, (FIRST, MORE)[number % 2])
                assert here.held_bytes <= OWNER_SHARE * FIT * one
            assert here.names == [1005, 1006]

    run_virtual(main())


def test_a_span_that_is_let_go_gives_its_bytes_back(folder: Path) -> None:
    """While sessions use it, and with what is parked there."""

    async def main() -> None:
        one = lease_bytes(folder)
        async with crowd(folder, FIT * one) as here:
            for number in (1, 2):
                assert await here.ask(number, MORE) is None
            await here.parked(3, MORE)
            first, more = here.worker.hosts
            assert first.info.free_tokens == 2 * LEASE
            here.worker.drop(more)
            assert first.info.free_tokens == FIT * LEASE and here.worker.caches.leased_bytes == 0
            for number in range(11, 11 + FIT):
                assert await here.ask(number, FIRST) is None
            assert here.held_bytes == FIT * one

    run_virtual(main())


@pytest.mark.parametrize("kind", ["qwen3_next", "lfm2"])
def test_short_sessions_with_states_hold_no_more_than_the_bound(tmp_path: Path, kind: str) -> None:
    """Each takes its states, however short; what is free is true for one more; parked ones give way."""
    folder = make_tiny(kind, tmp_path / kind, seed=3)
    facts = describe(folder, "bf16")
    state, position = sum(facts.state_bytes[3:]), sum(facts.position_bytes[3:])
    one, some = state + BLOCK * position, 5
    assert state > BLOCK * position

    async def main() -> None:
        async with crowd(folder, some * one + BLOCK * position) as here:
            (host,) = here.worker.hosts
            for number in range(1, some + 1):
                free = host.info.free_tokens
                assert free >= BLOCK and await here.ask(number, FIRST, BLOCK) is None
                assert here.held_bytes <= host.leases.leased_bytes == number * one
            assert host.info.free_tokens == 0
            refused = await here.ask(10, FIRST, 1)
            assert refused is not None and refused.code == "busy" and "cache for 0 more positions" in refused.detail
            (offered,) = [info for info in here.worker.spans if not info.is_loaded]
            assert offered.free_tokens == 0
            await here.close(1, 1001, BLOCK)
            await here.close(2, 1002, BLOCK)
            assert here.names == [1001, 1002] and host.leases.parked_bytes() == 2 * one
            assert await here.ask(11, FIRST, BLOCK) is None
            assert here.names == [1002] and host.info.free_tokens == 2 * BLOCK
            assert await here.ask(12, FIRST, 2 * BLOCK + 1) is not None
            assert await here.ask(13, FIRST, 2 * BLOCK) is None, "what is free is true for one more session"
            assert here.names == [] and here.held_bytes <= host.leases.leased_bytes == some * one + BLOCK * position

    run_virtual(main())


def leases_of(budget: CacheBudget, position_bytes: int, state_bytes: int = 0) -> SpanLeases:
    """Of the layers FIRST: the first caches positions, the last has a state."""
    return SpanLeases(budget, Parking(LogBudget(0)), FIRST, (position_bytes, 0, 0), (0, 0, state_bytes))


def test_a_lease_may_grow_over_the_whole_of_its_last_block() -> None:
    """Its bytes are whole blocks; where no other block was free, an answer ended up to 63 positions early."""
    budget = CacheBudget(17 * BLOCK * 3)
    span, place = leases_of(budget, 3), (session_id(1), FIRST)
    span.take(place, 16 * BLOCK + 6, 1 << 20, None)
    assert span.free(1 << 20) == 0 and span.extend(place, 4096, 1 << 20, 0.0) == 17 * BLOCK
    assert budget.leased_bytes == budget.limit_bytes and span.extend(place, 4096, 1 << 20, 1.0) == 17 * BLOCK
    budget.limit(18 * BLOCK * 3 - 1)
    assert span.extend(place, 4096, 1 << 20, 2.0) == 17 * BLOCK
    budget.limit(18 * BLOCK * 3)
    assert span.extend(place, 17 * BLOCK + 1, 1 << 20, 3.0) == 17 * BLOCK + 1
    assert span.extend(place, 4096, 17 * BLOCK + 5, 4.0) == 17 * BLOCK + 5, "no more than the span may have"


def test_places_on_other_layers_share_what_there_is_for_each_layer() -> None:
    """A session of 249 positions had one layer of a span of 400, and was refused another layer of it."""
    position_bytes, state_bytes = (3, 0, 5), (0, 700, 0)
    budget = CacheBudget(10 * BLOCK * 8 + 700)
    span = SpanLeases(budget, Parking(LogBudget(0)), FIRST, position_bytes, state_bytes)
    first, middle, last, both = (Span(3, 4), Span(4, 5), Span(5, 6), Span(4, 6))
    span.take((session_id(1), first), 249, 400, None)
    assert [span.free(400, part) for part in (first, middle, last, both, None)] == [151, 400, 400, 400, 151]
    span.take((session_id(1), both), 249, 400, None)
    assert span.leased_bytes == span.bytes_of(249, first) + span.bytes_of(249, both) == span.bytes_of(249)
    assert span.extend((session_id(1), first), 500, 400, 0.0) == 400 and span.free(400, last) == 151
    span.give_back((session_id(1), both))
    assert span.free(1000, last) > span.free(1000, both) > 400, "bytes are those of the layers, with their states"
    assert budget.leased_bytes + span.bytes_of(span.free(1000, both), both) <= budget.limit_bytes
    span.give_back((session_id(1), first))
    assert budget.leased_bytes == 0 and span.free(1000) == span.most(1000) == 10 * BLOCK


def test_states_count_in_what_a_device_has_for_caches() -> None:
    """A GPU's room was counted in positions alone: 32 short sessions of a model with states filled it, and each failed."""
    span = leases_of(CacheBudget(1 << 40), 3, 900)
    span.tell_room(4 * (900 + 3 * BLOCK))
    assert span.most(1 << 20) > 4 * BLOCK and span.free(1 << 20) == span.most(1 << 20)
    for number in range(4):
        assert span.free(1 << 20) >= 1
        span.take((session_id(number), FIRST), 1, 1 << 20, None)
    assert span.free(1 << 20) == 0 and span.extend((session_id(0), FIRST), 2 * BLOCK, 1 << 20, 0.0) == BLOCK
    span.give_back((session_id(0), FIRST))
    span.park(session_id(0), parked(ORIGIN, 1, FIRST), 1 << 20, 1.0)
    assert span.parked_bytes() == span.bytes_of(1)
    span.take((session_id(9), FIRST), 1, 1 << 20, None)
    assert span.parked_bytes() == 0, "what is parked gives way on the device, too"
    span.tell_room(None)
    assert span.free(1 << 20) > 1 << 19


OWNERS = [ORIGIN, BEFORE, AFTER]


@given(
    st.lists(st.tuples(st.integers(0, 4), st.integers(0, 1), st.integers(1, 700), st.integers(0, 2)), max_size=60),
    st.sampled_from([(0, 0), (0, 900), (1500, 200)]),
    st.sampled_from([None, 3000]),
)
def test_leases_and_what_is_parked_never_exceed_the_limit(
    acts: list[tuple[int, int, int, int]], states: tuple[int, int], room: int | None
) -> None:
    """Also while the limit changes: leases may be beyond a lower one, and then nothing is parked. With and without what each
    session takes whatever its length, on all layers of a span or on some; and where a span has `room` of its own."""
    budget = CacheBudget(2000 * 3)
    spans = [leases_of(budget, *each) for each in zip((1 - (states[0] > 0), 3), states, strict=True)]
    places: list[tuple[SpanLeases, Any, int]] = []
    spans[1].tell_room(room)
    for now, (act, index, size, owner) in enumerate(acts):
        part = (FIRST, Span(3, 4), Span(4, 6))[owner]
        span, place = spans[index], (session_id(now), part)
        if act <= 1 and size <= span.free(1500, part):
            span.take(place, size, 1500, None)
            places.append((span, place, size))
        elif act == 2 and places:
            span, place, size = places.pop(size % len(places))
            span.give_back(place)
            span.park(place[0], parked(OWNERS[owner], size, place[1]), 1500, float(now))
            assert sum(span.parked_bytes(OWNERS[owner]) for span in spans) <= OWNER_SHARE * budget.limit_bytes
        elif act == 3:
            budget.limit(size * 10)
        elif act == 4 and places:
            span, place, _ = places[size % len(places)]
            held = span.extend(place, 10 * size, 1500, float(now))
            assert held >= 10 * size or held % BLOCK == 0 or span._most_leased(place[1]) >= 1500
        assert room is None or spans[1].leased_bytes + spans[1].parked_bytes() <= room
        kept = sum(span.parked_bytes() for span in spans)
        assert budget.leased_bytes + kept <= budget.limit_bytes or kept == 0
        for span in spans:
            if free := span.free(1500, part):
                assert budget.leased_bytes + span.bytes_of(free, part) <= budget.limit_bytes
            else:
                is_full = budget.leased_bytes + span.bytes_of(1, part) > budget.limit_bytes
                is_full = is_full or span.leased_bytes + span.bytes_of(1, part) > (span.room_bytes or 1 << 40)
                assert is_full or span._most_leased(part) >= 1500


def parked(owner: NodeId, positions: int, span: Span) -> Parked:
    cache = cast(Any, object())
    return Parked(owner, span, "origin", positions, positions, cache, OutputLog(), 0, RowBounds(), ())
