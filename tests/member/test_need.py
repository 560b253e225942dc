"""Members that serve only in need: spares, and layers that are loaded when no other node holds them."""

from pathlib import Path

import pytest

from manyhands.core import SamplingParams, Span
from manyhands.errors import BadRequest
from manyhands.member.view import holdings_of
from manyhands.origin import Origin
from manyhands.testing.clock import run_virtual
from manyhands.testing.tiny import make_tiny
from tests.member.members import town

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
            assert kept == keeping.budget.kept_bytes

    run_virtual(scene())
