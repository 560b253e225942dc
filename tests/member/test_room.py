"""--memory bounds weights, ends and what sessions may lease on all spans of a member, also while spans and ends come."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from manyhands.api.gateway import Gateway
from manyhands.core import Span
from manyhands.errors import ShardUnavailable
from manyhands.member.hosting import Hosting
from manyhands.member.room import hold_ends
from manyhands.place.shape import look_up
from manyhands.testing.clock import run_virtual
from manyhands.testing.tiny import make_tiny
from tests.member.members import Play, Town, town
from tests.member.test_models import joined, models_of
from tests.worker.hop import session_id

FIRST, MORE = Span(0, 2), Span(2, 4)
TOKENS = 64  # so that their cache is little beside the layers


def used_bytes(hosting: Hosting) -> int:
    """What a member may come to hold: all of it, if every lease is given and filled."""
    budget, worker, shape = hosting.budget, hosting.member.node.worker, hosting.weights.shape
    weights = sum(shape.span_bytes(span, 0) for span in hosting.in_memory)
    kept = budget.kept_bytes - budget.kept_cache_bytes
    caches = max(worker.caches.limit_bytes, worker.caches.leased_bytes)
    return shape.process_bytes + budget.ends_bytes + kept + weights + caches + worker.logs.limit_bytes


def lease_all(hosting: Hosting) -> Callable[[], None]:
    """A session takes all that there is on the first span. Gives what ends it."""
    host, place = hosting.hosts[0], (session_id(1), hosting.hosts[0].info.span)
    host.leases.take(place, host.leases.free(1 << 40), 1 << 40, None)
    assert host.info.free_tokens == 0
    return lambda: host.leases.give_back(place)


async def scarce(place: Town, **changes: Any) -> Hosting:
    """A member with layers 0-1 and memory for all four, not a byte more."""
    shape = look_up(str(place.folder), "bf16", place.home).shape
    memory = shape.process_bytes + shape.span_bytes(Span(0, 4), TOKENS)
    return await place.host(0, span=FIRST, memory_bytes=memory, tokens=TOKENS, **changes)


def test_layers_are_added_only_beside_what_sessions_lease(play: Play) -> None:
    async def scene(place: Town) -> None:
        hosting = await scarce(place)
        memory, caches = hosting.member.config.memory_bytes, hosting.member.node.worker.caches
        alone = caches.limit_bytes
        end = lease_all(hosting)
        assert used_bytes(hosting) <= memory and caches.leased_bytes > alone // 2
        with pytest.raises(
            ShardUnavailable, match=r"leaves .* for caches, and sessions have leased .*: try again when"
        ):
            await hosting._load(MORE)
        assert (hosting.held, caches.limit_bytes) == ([FIRST], alone), "a load that is refused changes nothing"
        assert await hosting.fill(MORE) is not None and hosting.held == [FIRST, Span(2, 3)], "what fits beside them"
        assert used_bytes(hosting) <= memory
        end()
        await hosting._drop(hosting.hosts[1:])
        assert await hosting.fill(MORE) is not None and hosting.held == [FIRST, MORE]
        assert used_bytes(hosting) <= memory and caches.limit_bytes < alone
        lease_all(hosting)
        assert [host.info.free_tokens for host in hosting.hosts] == [0, 0] and used_bytes(hosting) <= memory
        await hosting._drop(hosting.hosts[1:])
        assert (hosting.held, caches.limit_bytes) == ([FIRST], alone), "what a span had the others may have"

    play(scene)


@pytest.mark.parametrize("fails", [False, True])
def test_sessions_that_come_during_a_load_get_what_is_left_beside_it(
    play: Play, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    async def scene(place: Town) -> None:
        hosting = await scarce(place)
        memory, caches, fetch = hosting.member.config.memory_bytes, hosting.member.node.worker.caches, hosting.fetch
        alone = caches.limit_bytes

        async def slow(span: Span) -> Path:
            lease_all(hosting)
            if fails:
                raise ShardUnavailable("no node has it")
            return await fetch(span)

        monkeypatch.setattr(hosting, "fetch", slow)
        if fails:
            with pytest.raises(ShardUnavailable, match="no node has it"):
                await hosting.fill(MORE)
            assert caches.leased_bytes < alone == caches.limit_bytes
        else:
            await hosting.fill(MORE)
            assert hosting.held == [FIRST, MORE] and caches.leased_bytes > 0
        assert used_bytes(hosting) <= memory

    play(scene)


def test_layers_that_may_be_loaded_later_share_the_bound(play: Play) -> None:
    async def scene(place: Town) -> None:
        hosting = await scarce(place, can_load=2)
        lease_all(hosting)
        assert used_bytes(hosting) <= hosting.member.config.memory_bytes
        assert hosting.member.node.worker.caches.leased_bytes >= hosting.budget.kept_cache_bytes > 0

    play(scene)


def test_ends_of_another_model_are_loaded_only_beside_what_sessions_lease(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client asks for a model whose ends would fit, were the caches of the hosted one not in use."""
    monkeypatch.setenv("MANYHANDS_HOME", str(tmp_path))
    folders = [make_tiny("llama", tmp_path / "one", layers=4, seed=3), make_tiny("qwen3", tmp_path / "two", layers=4)]

    async def scene() -> None:
        async with town(folders[0], tmp_path) as place:
            await place.host(0)
            place.folder = folders[1]
            await place.host(1)
            hosting, device = await joined(place, 2, "one", tmp_path / "joined", span=FIRST)
            caches, models = hosting.member.node.worker.caches, models_of(hosting, device, tmp_path / "joined")
            await Gateway({}, others=models).bring("one")
            assert hosting.with_ends
            end = lease_all(hosting)
            for is_full in (True, False):
                gateway = Gateway({}, others=models)
                await gateway.bring("two")
                assert ("two" in gateway.origins) is not is_full and used_bytes(hosting) <= hosting.budget.memory_bytes
                if is_full:
                    assert "of caches in use: ask another member" in gateway.refused["two"]
                    end()
            assert caches.leased_bytes == 0 and hosting.budget.kept_bytes > 0

    run_virtual(scene())


def test_ends_that_come_during_a_load_leave_room_for_what_is_loaded(
    play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scene(place: Town) -> None:
        hosting = await scarce(place)
        fetch, given = hosting.fetch, list[Callable[[], None]]()

        async def slow(span: Span) -> Path:
            hold_ends(hosting, "two", 1)
            given.append(lease_all(hosting))
            return await fetch(span)

        monkeypatch.setattr(hosting, "fetch", slow)
        assert await hosting.fill(MORE) is not None
        assert used_bytes(hosting) <= hosting.member.config.memory_bytes

    play(scene)


def test_a_private_span_keeps_its_room_beside_what_others_lease(play: Play) -> None:
    async def scene(place: Town) -> None:
        hosting = await scarce(place)
        worker, folder = hosting.member.node.worker, hosting.folder
        assert folder is not None
        own = await worker.host(folder, FIRST, "bf16", hosting._device, model_name="own", is_private=True)
        free = own.info.free_tokens
        lease_all(hosting)
        assert own.info.free_tokens == free > 0

    play(scene)


def test_own_layers_count(play: Play) -> None:
    """A member that serves layers 0-1 keeps 2-3 for its own requests: caches have what those leave."""

    async def scene(place: Town) -> None:
        shape = look_up(str(place.folder), "bf16", place.home).shape
        memory = shape.process_bytes + shape.ends_bytes + shape.span_bytes(Span(0, 4), TOKENS)
        member = await place.open(0, span=FIRST, memory_bytes=memory, tokens=TOKENS)
        member.node.request = replace(member.node.request, own_first=1, own_last=2)
        hosting = await place.hosting(member, with_ends=True)
        origin = place.origin(member)
        assert origin.own_spans == [Span(0, 1), MORE] and hosting.folder is not None
        lease_all(hosting)
        for span in origin.own_spans:
            await origin.host_own(hosting.folder, span, hosting._device)
        private = [host.info.span for host in member.node.hosts if host.is_private]
        assert private == [MORE], "layer 0 is served anyway"
        assert used_bytes(hosting) + shape.span_bytes(MORE, 0) <= memory
        assert not hosting._has_room(Span(2, 3)), "what is kept for others is not there for it"

    play(scene)


def test_own_layers_of_another_model_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MANYHANDS_HOME", str(tmp_path))
    folders = [make_tiny("llama", tmp_path / "one", layers=4, seed=3), make_tiny("qwen3", tmp_path / "two", layers=4)]

    async def scene() -> None:
        async with town(folders[0], tmp_path) as place:
            await place.host(0)
            place.folder = folders[1]
            await place.host(1)
            hosting, device = await joined(place, 2, "one", tmp_path / "joined", span=FIRST)
            node, budget = hosting.member.node, hosting.budget
            other = look_up(str(folders[1]), "bf16", tmp_path).shape
            left = budget.left_bytes(hosting.in_memory) - other.ends_bytes - other.span_bytes(Span(0, 1), 0)
            object.__setattr__(
                hosting.member.config, "memory_bytes", budget.memory_bytes - left
            )  # for ends and one layer
            gateway = Gateway({}, others=models_of(hosting, device, tmp_path / "joined"))
            node.request = replace(node.request, own_first=2)
            await gateway.bring("two")
            assert "its embedding and head and own layers take" in gateway.refused["two"]
            gateway, node.request = Gateway({}, others=gateway.others), replace(node.request, own_first=1)
            await gateway.bring("two")
            assert "two" in gateway.origins and hosting.budget.left_bytes(hosting.in_memory) == 0

    run_virtual(scene())


def test_layers_that_are_to_be_loaded_again_keep_their_room(play: Play) -> None:
    """A move has failed, and so has what it would have gone back to."""

    async def scene(place: Town) -> None:
        hosting = await scarce(place)
        caches = hosting.member.node.worker.caches
        alone = caches.limit_bytes
        hosting.dropped = [FIRST]
        await hosting._drop(hosting.hosts)
        assert hosting.held == [] and caches.limit_bytes == alone
        await hosting.restore()
        assert hosting.held == [FIRST] and caches.limit_bytes == alone

    play(scene)
