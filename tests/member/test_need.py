"""Members that serve only in need: spares, and layers that are loaded when no other node holds them."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from manyhands.checkpoint.manifest import Silent
from manyhands.core import SamplingParams, Span
from manyhands.errors import BadRequest
from manyhands.member.taken import HELD_S
from manyhands.member.view import holdings_of
from manyhands.member.weights import weights_of
from manyhands.origin import Answer, Origin
from manyhands.testing.clock import run_virtual
from manyhands.testing.tiny import make_tiny
from tests.member.members import room_for, town
from tests.member.requests import until

PARAMS = SamplingParams(max_tokens=6)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("llama", tmp_path_factory.mktemp("need") / "tiny", layers=6, seed=5)


async def text(origin: Origin) -> tuple[str, list[str]]:
    """What a request says, and the nodes it began with."""
    answer = origin.answer(origin.request("Once", PARAMS))
    async for _ in origin.stream(answer):
        pass
    return answer.text, [offer.name for offer in answer.route]


def test_a_spare_serves_once_the_others_are_gone(folder: Path, tmp_path: Path) -> None:
    async def scene() -> None:
        async with town(folder, tmp_path) as here:
            first = await here.host(0, span=Span(0, 6))
            spare = await here.host(1, is_spare=True)
            asker = await here.open(2)
            states = {node["name"]: [s["state"] for s in node["spans"]] for node in spare.view()["nodes"]}
            assert (states["n0"], states["n1"]) == (["serving"], ["spare"])
            assert {h.node for h in holdings_of(first.kind, asker.records())} == {first.member.id}
            said, route = await text(origin := here.origin(asker))
            assert route == ["n0"]
            await first.member.leave()
            await asker.wait_until(
                lambda: all(r.node != first.member.id or r.info is None for r in asker.records()), 20
            )
            assert await text(origin) == (said, ["n1"])

    run_virtual(scene())


def test_layers_that_no_other_node_holds_are_loaded_for_a_request(folder: Path, tmp_path: Path) -> None:
    async def scene() -> None:
        async with town(folder, tmp_path) as here:
            whole = await here.host(0, span=Span(0, 6))
            said, _ = await text(here.origin(whole.member))
            await whole.member.leave()
        async with town(folder, tmp_path) as here:
            half = await here.host(0, span=Span(0, 3), can_load=3)
            assert any("would load up to 3 more of layers 0-5" in line for line in here.said)
            asker = await here.open(1)
            assert await text(here.origin(asker)) == (said, ["n0", "n0"])
            assert [str(host.info.span) for host in half.hosts] == ["0-2", "3-5"]

    run_virtual(scene())


def test_layers_loaded_on_demand_take_the_memory_kept_for_them_and_no_more(folder: Path, tmp_path: Path) -> None:
    """With room for six layers, two of which are kept (--can-load) and loaded by now, it serves all the others."""

    async def scene() -> None:
        async with town(folder, tmp_path) as here:
            weights = await weights_of(str(folder), "bf16", (), tmp_path, Silent())
            whole = await here.host(0, span=Span(2, 6))
            half = await here.host(1, span=Span(0, 2), can_load=2, memory_bytes=room_for(weights, 6))
            rest = await here.host(2, span=Span(2, 4))
            asker = await here.open(3)
            await whole.member.leave()
            await asker.wait_until(
                lambda: all(r.node != whole.member.id or r.info is None for r in asker.records()), 20
            )
            _, route = await text(here.origin(asker))
            assert route == ["n1", "n2", "n1"]
            assert [str(host.info.span) for host in half.hosts] == ["0-1", "4-5"]
            await rest.member.leave()
            filled = await half.fill(Span(2, 4))
            assert filled is not None and filled.info.span == Span(2, 4)

    run_virtual(scene())


def test_a_node_that_serves_all_that_it_could_load_is_seen_to_serve_it(folder: Path, tmp_path: Path) -> None:
    """Its record said that it could load those layers, and no longer that it served them: "layers 0-5 are held by no node"."""

    async def scene() -> None:
        async with town(folder, tmp_path) as here:
            whole = await here.host(0, can_load=3)
            other = await here.host(1, span=Span(0, 3))
            for hosting in (whole, other):
                await until(lambda hosting=hosting: len(holdings_of(hosting.kind, hosting.records())) == 2)
                await until(
                    lambda hosting=hosting: all(h.is_ready for h in holdings_of(hosting.kind, hosting.records()))
                )
                assert hosting.view()["models"][0]["coverage"] == [2, 2, 2, 1, 1, 1] and not hosting.view()["missing"]
            assert [(str(info.span), info.is_loaded) for info in whole.member.node.worker.spans] == [("0-5", True)]

    run_virtual(scene())


def test_without_it_the_request_is_refused(folder: Path, tmp_path: Path) -> None:
    async def scene(**changes: int) -> None:
        async with town(folder, tmp_path) as here:
            await here.host(0, span=Span(0, 3), **changes)
            await text(here.origin(await here.open(1)))

    for changes in ({}, {"can_load": 2}):
        with pytest.raises(Exception, match="layers 3-5"):
            run_virtual(scene(**changes))


def test_what_may_be_loaded_counts_in_the_memory(folder: Path, tmp_path: Path) -> None:
    async def scene(**changes: int) -> None:
        async with town(folder, tmp_path) as here:
            await here.host(0, span=Span(0, 3), **changes)

    with pytest.raises(BadRequest, match="--can-load 7: tiny has 6 layers"):
        run_virtual(scene(can_load=7))


def test_room_is_kept_for_layers_that_may_come(folder: Path, tmp_path: Path) -> None:
    async def scene() -> None:
        async with town(folder, tmp_path) as here:
            plain, keeping = await here.host(0, span=Span(0, 3)), await here.host(1, span=Span(0, 3), can_load=3)
            shape, tokens = plain.weights.shape, plain.budget.tokens
            assert keeping.budget.kept_bytes == shape.span_bytes(Span(0, 3), tokens)
            spans = [Span(0, 3)]
            kept = plain.budget.cache_bytes(spans, 0) - keeping.budget.cache_bytes(spans, 0)
            assert kept == shape.span_bytes(Span(0, 3), 0), "its cache is of what all spans share"

    run_virtual(scene())


async def stream(origin: Origin, at: dict[int, Callable[[], Awaitable[object]]]) -> Answer:
    """A long answer, with something done when so many tokens have come."""
    answer = origin.answer(origin.request("Once", SamplingParams(max_tokens=64, ignore_eos=True)))
    async for _ in origin.stream(answer):
        if (act := at.get(len(answer.token_ids))) is not None:
            await act()
    return answer


def test_what_was_loaded_on_demand_is_given_back_and_leaves_memory(folder: Path, tmp_path: Path) -> None:
    """A stream runs over layers loaded on demand; a node comes that serves them: the stream moves, and they are dropped."""

    async def scene() -> None:
        async with town(folder, tmp_path) as here:
            half = await here.host(0, span=Span(0, 3), can_load=3)
            worker, origin = half.member.node.worker, here.origin(await here.open(1))

            async def come() -> None:
                await here.host(2, span=Span(3, 6))
                await asyncio.sleep(HELD_S + 1.0)

            told = await stream(origin, {20: come, 50: lambda: asyncio.sleep(2.0)})
            assert [offer.name for offer in told.route] == ["n0", "n0"]
            assert (told.repairs[-1].lost[-1], told.repairs[-1].replacement[-1]) == ("n0", "n2")
            await asyncio.sleep(2.0)
            assert [str(host.info.span) for host in worker.hosts] == ["0-2"] and not worker.loaded_on_demand()
            assert "giving layers 3-5 back: n2 serves them again" in here.said
            assert "layers 3-5 are given back and out of memory" in here.said
            calm = await stream(origin, {})
            assert calm.token_ids == told.token_ids and [offer.name for offer in calm.route] == ["n0", "n2"]

    run_virtual(scene())


def test_a_gap_that_was_filled_is_given_back_and_filled_again(folder: Path, tmp_path: Path) -> None:
    """A member serves what no other does beside its own layers, while that lasts."""

    async def scene() -> None:
        async with town(folder, tmp_path) as here:
            other = await here.host(1, span=Span(3, 6))
            filler = await here.host(0, max_pipes=1)
            assert [str(span) for span in filler.held] == ["0-2"]
            await other.member.leave()
            await filler.member.wait_until(lambda: len(filler.held) == 2, 30)
            await asyncio.sleep(10.0)
            assert [str(span) for span in filler.held] == ["0-2", "3-5"]
            again = await here.host(2, span=Span(3, 6))
            await asyncio.sleep(HELD_S / 2)
            assert [str(span) for span in filler.held] == ["0-2", "3-5"]
            await asyncio.sleep(HELD_S)
            assert [str(span) for span in filler.held] == ["0-2"]
            assert "giving layers 3-5 back: n2 serves them again" in here.said
            await again.member.leave()
            await asyncio.sleep(10.0)
            assert [str(span) for span in filler.held] == ["0-2", "3-5"]

    run_virtual(scene())


def test_layers_that_are_being_given_back_stay_if_the_other_goes(folder: Path, tmp_path: Path) -> None:
    """A stream that no other node can take holds them; meanwhile the node that came leaves: they serve new requests again."""

    async def scene() -> None:
        async with town(folder, tmp_path) as here:
            half = await here.host(0, span=Span(0, 3), can_load=3)
            worker, origin = half.member.node.worker, here.origin(await here.open(1))

            async def come_and_go() -> None:
                there = await here.host(2, span=Span(3, 6))
                for host in there.hosts:
                    host.engine.cache_tokens = 1  # it is full
                await asyncio.sleep(HELD_S + 2.0)
                assert [host.is_draining for host in worker.hosts] == [False, True]
                worker.switch(on=False)  # which is no way to take them up again
                worker.switch(on=True)
                await asyncio.sleep(1.0)
                assert [host.is_draining for host in worker.hosts] == [False, True]
                await there.member.leave()
                await asyncio.sleep(5.0)
                assert [host.is_draining for host in worker.hosts] == [False, False]

            told = await stream(origin, {20: come_and_go})
            assert len(told.token_ids) == 64
            assert "serving layers 3-5 again: no other node does" in here.said

    run_virtual(scene())


def test_what_was_loaded_on_demand_leaves_memory_when_it_is_not_used(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where no other node serves it: it counts against --can-load no longer, and is loaded again for the next request."""
    monkeypatch.setattr("manyhands.worker.worker.UNUSED_S", 60.0)

    async def scene() -> None:
        async with town(folder, tmp_path) as here:
            half = await here.host(0, span=Span(0, 3), can_load=3)
            worker, origin = half.member.node.worker, here.origin(await here.open(1))
            said, _ = await text(origin)
            await asyncio.sleep(45.0)
            assert await text(origin) == (said, ["n0", "n0"])
            await asyncio.sleep(45.0)
            assert [str(host.info.span) for host in worker.loaded_on_demand()] == ["3-5"]
            await asyncio.sleep(30.0)
            assert [str(host.info.span) for host in worker.hosts] == ["0-2"] and not worker.loaded_on_demand()
            assert await text(origin) == (said, ["n0", "n0"])

    run_virtual(scene())
