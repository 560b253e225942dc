"""manyhands.origin.session on live swarms: how sessions open, fail and close, and that other sessions are not affected."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast
from unittest.mock import Mock

import pytest
import torch

from manyhands.config import RequestConfig
from manyhands.core import ORIGIN_HOP, EndsAt, ModelId, NodeAddr, PathKind, Span, SpanInfo
from manyhands.errors import (
    BadRequest,
    Busy,
    ContextOverflow,
    Detour,
    LinkClosed,
    ManyhandsError,
    PipelineStalled,
    ShardUnavailable,
    WeightsMismatch,
)
from manyhands.net.transport import Link
from manyhands.origin import Token
from manyhands.origin.route import Hop, Lease
from manyhands.origin.session import Session
from manyhands.origin.standby import Standby
from manyhands.route.search import Offer
from manyhands.testing.faulty_device import SlowDevice
from manyhands.testing.swarm import MemorySwarm, memory_node, node_id, node_key
from manyhands.wire.message import Close, Credit, Fault, Feed, Open, Payload, Step
from manyhands.wire.signed import Signer
from manyhands.worker.execute import Device, Result, Work
from tests.origin.scenes import GREEDY, HOT, NEW, PROMPT, all_free, expected, ids_of, play, swarm_of
from tests.worker.hop import MODEL, Notes, opening
from tests.worker.tensors import encode_tensor

CUT = "0-1,2-3,4-5"
ORIGIN = Signer(node_key("origin"))
LONG = replace(HOT, max_tokens=60)


@pytest.fixture(scope="module")
def greedy(folder: Path) -> list[int]:
    return expected(folder, PROMPT, GREEDY)


async def begun(swarm: MemorySwarm, path: PathKind = "ring") -> AsyncGenerator[Token, None]:
    """A long answer of which three tokens have come."""
    answer = swarm.origin.answer(swarm.origin.request_ids(PROMPT, LONG))
    stream = swarm.origin.stream(answer, path=path)
    for _ in range(3):
        await anext(stream)
    return stream


async def rest(stream: AsyncGenerator[Token, None]) -> list[int]:
    return [token.id async for token in stream]


def data_link(swarm: MemorySwarm, sender: int, receiver: int) -> Link:
    link = swarm.hops[sender].pool.find(swarm.hops[receiver].transport.node, "data")
    assert link is not None
    return link


def unknown_link() -> Link:
    """Some link: whose it is does not matter to those who only count leases."""
    return cast(Link, SimpleNamespace(peer=node_id("unknown"), is_closed=False))


def leased(swarm: MemorySwarm) -> list[int]:
    return [node.worker.config.cache_tokens - node.hosts[0].info.free_tokens for node in swarm.hops]


async def opened(swarm: MemorySwarm) -> None:
    """Wait until every hop holds a lease. Virtual time would only move once all is over."""
    for _ in range(100_000):
        if all(leased(swarm)):
            return
        await asyncio.sleep(0)
    raise AssertionError("no session was opened")


# -- closing ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["ring", "star"])
def test_leaving_mid_stream_frees_every_hop(folder: Path, greedy: list[int], path: PathKind) -> None:
    """A client that leaves costs nothing from then on; another answer is not disturbed."""

    async def main() -> None:
        async with swarm_of(folder, CUT) as swarm:
            stream = await begun(swarm, path)
            other = asyncio.ensure_future(ids_of(swarm, PROMPT, GREEDY))
            assert all(lease >= len(PROMPT) + LONG.max_tokens for lease in leased(swarm))
            await stream.aclose()
            assert await other == greedy
            await all_free(swarm)
            assert not swarm.origin.node.sessions

    play(main)


def test_cancelling_during_prefill_frees_every_hop(folder: Path) -> None:
    async def main() -> None:
        async with swarm_of(folder, CUT, request=RequestConfig(prefill_chunk=1)) as swarm:
            task = asyncio.ensure_future(ids_of(swarm, PROMPT * 5, GREEDY))
            await opened(swarm)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await all_free(swarm)

    play(main)


# -- failing while it runs --------------------------------------------------------------------------------------------


def test_a_cut_between_two_hops_is_healed_by_dialling_again(folder: Path) -> None:
    """No other node holds the layers, so the same node takes its place again; a star on other links does not notice."""
    want = expected(folder, PROMPT, LONG)[3:]

    async def main() -> None:
        async with swarm_of(folder, CUT) as swarm:
            ring, star = await begun(swarm), await begun(swarm, "star")
            data_link(swarm, 0, 1).abort("cut by the test")
            assert await rest(ring) == want
            assert await rest(star) == want
            assert await ids_of(swarm, PROMPT, GREEDY) == expected(folder, PROMPT, GREEDY), "it is dialled again"

    play(main)


@pytest.mark.parametrize(
    ("cut", "path", "index"), [("0-5", "ring", 0), (CUT, "ring", 2), (CUT, "star", 0), (CUT, "star", 1)]
)
def test_a_hop_that_loses_its_link_to_the_origin_takes_its_place_again(
    folder: Path, cut: str, path: PathKind, index: int
) -> None:
    """It alone, whose word of it comes first. (That of a route's only hop ended the request, as if that were faulty; in a star
    the next hop was replaced for it.)"""
    want = expected(folder, PROMPT, LONG)

    async def main() -> None:
        async with swarm_of(folder, cut) as swarm:
            answer = swarm.origin.answer(swarm.origin.request_ids(PROMPT, LONG))
            async for _ in swarm.origin.stream(answer, path=path):
                if len(answer.token_ids) == 3:
                    link = swarm.hops[index].pool.find(swarm.origin.node.transport.node, "data")
                    assert link is not None
                    link.abort("cut by the test")
            assert answer.token_ids == want
            assert [repair.lost for repair in answer.repairs] == [(f"n{index}",)]

    play(main)


@pytest.mark.parametrize("index", [0, 1, 2])
def test_a_hop_that_dies_without_a_spare_ends_the_session(folder: Path, index: int) -> None:
    """Its layers are named, after patience_s of looking; the survivors' leases are freed."""

    async def main() -> None:
        async with swarm_of(folder, CUT) as swarm:
            stream = await begun(swarm)
            await swarm.hops[index].pool.aclose()
            await swarm.hops[index].transport.aclose()
            with pytest.raises(ShardUnavailable, match=rf"no other node holds layers {2 * index}-{2 * index + 1}"):
                await rest(stream)
            await all_free(swarm)

    play(main)


def test_a_hop_that_falls_silent_stalls_the_session_and_is_not_waited_for(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After stall_timeout_s without any step, in virtual time."""

    async def main() -> None:
        async with swarm_of(folder, CUT, request=RequestConfig(stall_timeout_s=7)) as swarm:
            stream = await begun(swarm)
            began = asyncio.get_running_loop().time()
            monkeypatch.setattr(swarm.hops[1].hosts[0], "step", lambda *_: None)
            with pytest.raises(PipelineStalled, match="7 s"):
                await rest(stream)
            assert 7 <= asyncio.get_running_loop().time() - began < 10

    play(main)


Forge = Callable[[Result], Result]


def payload(rows: torch.Tensor) -> Payload:
    return encode_tensor(rows)


FORGERIES: dict[str, tuple[EndsAt, Forge]] = {
    "position": ("origin", lambda r: r._replace(position=r.position + 1)),
    "too many rows": (
        "origin",
        lambda r: r._replace(count=2, payload=payload(torch.zeros(2, 64).bfloat16())),
    ),
    "nan": ("origin", lambda r: r._replace(payload=payload(torch.full((1, 64), float("nan")).bfloat16()))),
    "huge": ("origin", lambda r: r._replace(payload=payload(torch.full((1, 64), 1e30).bfloat16()))),
    "dtype": ("origin", lambda r: r._replace(payload=payload(torch.zeros(1, 64)))),
    "width": ("origin", lambda r: r._replace(payload=payload(torch.zeros(1, 65).bfloat16()))),
    "ids": ("origin", lambda r: r._replace(content="ids", payload=payload(torch.ones(1, 1).int()))),
    "logits": ("origin", lambda r: r._replace(content="logits")),
    "no such id": ("edges", lambda r: r._replace(payload=payload(torch.full((1, 1), 1 << 30).int()))),
    "negative id": ("edges", lambda r: r._replace(payload=payload(torch.full((1, 1), -1).int()))),
    "hidden for ids": ("edges", lambda r: r._replace(content="hidden")),
    "wide ids": ("edges", lambda r: r._replace(payload=payload(torch.ones(1, 9).int()))),
}


@pytest.mark.parametrize("name", FORGERIES)
def test_a_hostile_last_hop_ruins_its_session_alone(
    folder: Path, greedy: list[int], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forged rows cost the hop its place, for good; without a spare that ends the session, after patience_s.

    Others in the same batches, and later ones, get their text.

    Found here: rows of another shape broke the batch of all requests, and with it the origin.
    """
    ends, forge = FORGERIES[name]

    async def main() -> None:
        async with swarm_of(folder, CUT, ends=ends) as swarm:
            host = swarm.hops[-1].hosts[0]
            model = await host.engine.ensure_loaded()
            honest = model.run

            def run(works: Sequence[Work]) -> list[Result | Exception]:
                results = honest(works)
                for index, (work, result) in enumerate(zip(works, results, strict=True)):
                    is_late = work.position > len(PROMPT) + 5
                    if isinstance(result, Result) and result.count and work.cache is victim and is_late:
                        results[index] = forge(result)
                return results

            stream = await begun(swarm)
            victim = next(iter(host._places.values())).cache
            monkeypatch.setattr(model, "run", run)
            other = asyncio.ensure_future(ids_of(swarm, PROMPT, GREEDY))
            with pytest.raises(ShardUnavailable, match="no other node holds layers 4-5"):
                await rest(stream)
            assert await other == greedy
            await all_free(swarm)
            assert await ids_of(swarm, PROMPT, GREEDY) == greedy

    play(main)


# -- failing to open --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["ring", "star"])
def test_a_busy_hop_refuses_and_nothing_stays_leased(folder: Path, greedy: list[int], path: PathKind) -> None:
    """Said before it accepts; the hops that had accepted are freed, and the next try succeeds."""

    async def main() -> None:
        async with swarm_of(folder, CUT) as swarm:
            host = swarm.hops[1].hosts[0]
            others = [opening(number, model=host.info.model) for number in range(host.info.max_sessions)]
            a_link = unknown_link()
            for other in others:
                host.reserve(other, a_link)
            with pytest.raises(ShardUnavailable, match=r"hop 1 \(n1\): layers 2-3 already serve 32 sessions"):
                await ids_of(swarm, PROMPT, GREEDY, path=path)
            await asyncio.sleep(1)  # virtual: what is on its way arrives
            assert leased(swarm)[0] == leased(swarm)[2] == 0
            for other in others:
                host.close(Close(other.session), a_link.peer)
            await all_free(swarm)
            assert await ids_of(swarm, PROMPT, GREEDY, path=path) == greedy

    play(main)


def test_a_hop_with_other_weights_refuses_and_nothing_stays_leased(folder: Path) -> None:
    """Where the directory was out of date: the hop itself checks, and says what it holds."""

    async def main() -> None:
        async with swarm_of(folder, CUT) as swarm:
            route = await swarm.origin.routes.find()
            host = swarm.hops[2].hosts[0]
            host._info = replace(host._info, model=ModelId("f" * 64))
            with pytest.raises(WeightsMismatch, match=r"hop 2 \(n2\).*ffffffffffff"):
                await ids_of(swarm, PROMPT, GREEDY, route=route)

    play(main)


def test_a_hop_that_cannot_be_reached_is_named_and_nothing_is_leased(folder: Path) -> None:
    async def main() -> None:
        async with swarm_of(folder, CUT) as swarm:
            route = list(await swarm.origin.routes.find())
            gone = node_id("gone")
            route[1] = replace(route[1], addr=NodeAddr("mem", 999, gone), node=gone)
            for path in ("ring", "star"):
                with pytest.raises(ShardUnavailable, match=r"mem:999"):
                    await ids_of(swarm, PROMPT, GREEDY, route=route, path=path)
                await all_free(swarm)

    play(main)


def test_a_hop_that_does_not_answer_in_time_is_told_with_the_time(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ended with "cannot be reached: ", and nothing behind it."""

    async def silent(*_: object) -> None:
        raise TimeoutError

    async def main() -> None:
        async with swarm_of(folder, CUT) as swarm:
            route = await swarm.origin.routes.find()
            monkeypatch.setattr(swarm.origin.node.pool, "get", silent)
            with pytest.raises(ShardUnavailable, match=r"hop \d \(n\d at .*\) cannot be reached: no link within \d+ s"):
                await ids_of(swarm, PROMPT, GREEDY, route=route)

    play(main)


def test_an_address_from_before_a_restart_is_no_second_node(folder: Path, greedy: list[int]) -> None:
    """A node that was started anew with its old ticket is named there twice: what it listens at is used, the other is not."""

    async def main() -> None:
        async with swarm_of(folder, CUT) as swarm:
            requests, before = swarm.origin.node.requests, NodeAddr("mem", 9999, node_id("n0"))
            addrs = swarm.origin.routes.addrs = [before, *swarm.addrs]
            wanted = [(offer.name, offer.addr.port) for offer in await requests.survey(swarm.addrs)]
            for _ in range(2):
                assert [(offer.name, offer.addr.port) for offer in await requests.survey(addrs)] == wanted
                assert await ids_of(swarm, PROMPT, GREEDY) == greedy
            assert [offer.addr.port for offer in requests.known_offers(addrs, ())] == [port for _, port in wanted]

    play(main)


def test_two_nodes_with_one_key_are_refused(folder: Path) -> None:
    """By every request, also once there is a link to each of them."""

    async def main() -> None:
        async with swarm_of(folder, CUT) as swarm:
            async with memory_node(swarm.network, "n0") as twin:
                device = Device.start(1)
                await twin.worker.host(folder, Span(0, 2), "bf16", device, model_name="test")
                swarm.origin.routes.addrs = [*swarm.addrs, await twin.listen(NodeAddr("mem", 0))]
                for _ in range(2):
                    with pytest.raises(
                        BadRequest, match="have the same node key: start one of them with another --key"
                    ):
                        await ids_of(swarm, PROMPT, GREEDY)
                device.close()

    play(main)


def test_a_hop_that_does_not_answer_open_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After open_timeout_s, in virtual time."""

    async def main() -> None:
        async with swarm_of(folder, CUT, request=RequestConfig(open_timeout_s=4)) as swarm:
            monkeypatch.setattr(swarm.hops[1].worker, "on_open", lambda *_: None)
            with pytest.raises(PipelineStalled, match=r"hops 1 \(n1\) did not answer Open within 4 s"):
                await ids_of(swarm, PROMPT, GREEDY)

    play(main)


def test_what_goes_wrong_with_an_open_is_that_sessions_trouble(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever it is, as when a folder is gone that was offered to load: the origin is told, and the node serves on."""

    async def main() -> None:
        async with swarm_of(folder, CUT) as swarm:
            with monkeypatch.context() as patch:
                patch.setattr(swarm.hops[1].worker, "_find_host", Mock(side_effect=OSError("the folder is gone")))
                with pytest.raises(ManyhandsError, match="the folder is gone"):
                    await ids_of(swarm, PROMPT, GREEDY)
            assert len(await ids_of(swarm, PROMPT, GREEDY)) == NEW

    play(main)


def test_an_open_whose_layers_are_not_loaded_in_time_is_answered(folder: Path) -> None:
    async def main() -> None:
        async with swarm_of(folder, CUT, request=RequestConfig(open_timeout_s=150)) as swarm:
            (host,) = swarm.hops[1].hosts
            host.engine.evict()
            host.engine.device = cast(Device, SlowDevice(host.engine.device, 120.0))
            session = swarm.origin.node.requests.open(await swarm.origin.routes.find(), lease_of(swarm))
            with pytest.raises(Busy, match=r"layers 2-3 were not loaded within 100 s: loading goes on"):
                await session
            await asyncio.sleep(30)
            assert host.is_loaded and not host._opening

    play(main)


def lease_of(swarm: MemorySwarm) -> Lease:
    return Lease(swarm.hops[0].hosts[0].info.model, "bf16", 64, 1, "ring", "origin", None)


@pytest.mark.parametrize(("said_by", "blame"), [(0, 1), (1, ORIGIN_HOP)])
def test_a_hop_that_dies_while_the_route_opens_is_one_to_go_around(said_by: int, blame: int) -> None:
    """Its neighbour may say so first, and one that lost the origin is lost itself.

    The origin asks for another route after ShardUnavailable, and after nothing else.
    """

    async def main() -> None:
        links = [Notes(node_id(name)) for name in ("first", "second")]
        hops = [star_hop(link, span) for link, span in zip(links, (Span(0, 2), Span(2, 4)), strict=True)]
        session = Session(
            Signer(node_key("origin")), hops, Lease(MODEL, "bf16", 64, 1, "ring", "origin", None), RequestConfig()
        )
        opening = asyncio.ensure_future(session.open())
        await asyncio.sleep(0)
        session.on_fault(
            Fault(session.id, session.route.epoch, said_by, LinkClosed.code, "lost its link to the next", blame)
        )
        with pytest.raises(ShardUnavailable, match="lost its link") as refusal:
            await opening
        assert refusal.value.node == hops[1].offer.node

    play(main)


def test_a_better_link_that_appears_while_the_route_opens_does_no_harm() -> None:
    """A hop that is open already may tell of it; the session moves once it runs."""

    async def main() -> None:
        links = [Notes(node_id(name)) for name in ("first", "second")]
        hops = [star_hop(link, span) for link, span in zip(links, (Span(0, 2), Span(2, 4)), strict=True)]
        session = Session(
            Signer(node_key("origin")), hops, Lease(MODEL, "bf16", 64, 1, "ring", "origin", None), RequestConfig()
        )
        session.on_fault(Fault(session.id, session.route.epoch, 0, Detour.code, "has a direct link to the next", 0))
        assert session.has_detour and not session.losses and not session.is_closed

    play(main)


def test_a_standby_that_is_found_while_the_route_changes_is_asked_once() -> None:
    """It has its place in the new epoch when the route stands. (It was told of it twice, which a hop refuses, and never asked
    again in this session.)"""

    async def main() -> None:
        links = [Notes(node_id(name)) for name in ("first", "second", "standby")]
        hops = [star_hop(link, span) for link, span in zip(links, (Span(0, 2), Span(2, 4), Span(2, 4)), strict=True)]
        session = Session(ORIGIN, hops[:2], Lease(MODEL, "bf16", 64, 1, "ring", "origin", None), RequestConfig())
        for epoch in (1, 2):
            session.route.renew(hops[:2])
            if epoch == 1:
                session.standbys.open(hops[2])
            session.standbys.move()
        assert [asked.epoch for asked in links[2].of(Open)] == [1, 2]

    play(main)


@pytest.mark.parametrize("path", ["ring", "star"])
def test_only_what_was_asked_for_goes_to_a_standby(path: PathKind) -> None:
    """In a star the hop before it sends here what is for the standby and what is for the hop; in a ring, nothing (hostile)."""

    async def main() -> None:
        links = [Notes(node_id(name)) for name in ("first", "second", "standby")]
        hops = [star_hop(link, span) for link, span in zip(links, (Span(0, 2), Span(2, 4), Span(2, 4)), strict=True)]
        lease = Lease(MODEL, "bf16", 64, 1, path, "origin", None)
        session = Session(ORIGIN, hops[:2], lease, RequestConfig())
        standby = session.standbys.by_span[Span(2, 4)] = Standby(hops[2], fed=8, computed=8, passed=8)

        def arrive(position: int, count: int) -> list[int]:
            """How many steps the second hop and the standby got of one that came from the first."""
            before = [len(link.of(Step)) for link in links]
            step = Step(session.id, session.route.epoch, 1, position, count, 0, 0, "hidden", None, None)
            session.on_step(step, cast(Link, links[0]))
            return [len(link.of(Step)) - n for link, n in zip(links, before, strict=True)][1:]

        to_hop = [int(path == "star"), 0]
        assert arrive(8, 4) == arrive(0, 8) == to_hop, "nothing was asked for"
        session.standbys.feed(Span(2, 4), 24)
        assert [(feed.start, feed.until) for feed in links[0].of(Feed)] == [(8, 24)]
        assert arrive(8, 17) == arrive(24, 1) == to_hop, "beyond what was asked for"
        to_standby = [0, int(path == "star")]
        assert arrive(8, 10) == to_standby
        for position, count in ((8, 10), (0, 8), (20, 4)):
            assert arrive(position, count) == [0, 0], "not the next: the hop must not go back for it"
        assert arrive(18, 6) == to_standby
        assert arrive(24, 1) == arrive(18, 6) == to_hop and standby.fed == 24
        paid = hops[0].incoming._owed + sum(credit.steps for credit in links[0].of(Credit))
        assert paid == (6 if path == "star" else 0), "what the standby gets costs no credit"

    play(main)


def star_hop(link: Notes, span: Span) -> Hop:
    info = SpanInfo(MODEL, "test", span, 4, "bf16", "test", 64, 1024, False, 64, 4)
    return Hop(Offer(NodeAddr("mem", 1), link.peer, "n", info), cast(Link, link), cast(Link, link), 16)


def test_a_prompt_that_fills_the_context_is_refused_and_a_limit_beyond_it_is_lowered(folder: Path) -> None:
    """Before anything is opened."""

    async def main() -> None:
        async with swarm_of(folder, CUT) as swarm:
            with pytest.raises(ContextOverflow, match=r"too long: 1024 tokens; .* 1024"):
                swarm.origin.request_ids([1] * 1024, replace(GREEDY, max_tokens=1))
            for asked, given in ((23, 23), (24, 24), (25, 24), (1 << 20, 24)):
                request = swarm.origin.request_ids([1] * 1000, replace(GREEDY, max_tokens=asked))
                assert request.params.max_tokens == given

    play(main)
