"""A member with a place in every route that answers as it likes: not at all, with a fault of the request, with blame for
others. In one process, in virtual time."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from manyhands.config import RequestConfig
from manyhands.core import SessionId
from manyhands.errors import (
    Apart,
    BadRequest,
    LinkClosed,
    ModelError,
    WeightsMismatch,
)
from manyhands.net.transport import Link, try_send
from manyhands.origin import Answer
from manyhands.origin.opener import QUICK_S
from manyhands.origin.route import Lease
from manyhands.testing.faults import Faults
from manyhands.testing.swarm import MemorySwarm, memory_node, memory_swarm
from manyhands.testing.tiny import make_tiny
from manyhands.wire.message import Fault, Open, Step
from manyhands.worker.early import LINK_SESSIONS
from tests.origin.scenes import HOT, PROMPT, play

LONGER = replace(HOT, max_tokens=40)
PLAIN = RequestConfig(draft="off", patience_s=3.0)
Answering = Callable[[Open, Link], None]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("qwen3", tmp_path_factory.mktemp("openings") / "qwen3", seed=3)


@asynccontextmanager
async def swarm_with(folder: Path, *others: str) -> AsyncIterator[MemorySwarm]:
    """n0 has layers 0-2 and n1 layers 3-5; after them, with less room each and so tried later, nodes with `others`."""
    async with memory_swarm(folder, "0-2,3-5", request=PLAIN, spares=list(others)) as swarm:
        for number, node in enumerate(swarm.hops[2:], 2):
            (spare,) = node.hosts
            node.worker.drop(spare)
            host = await node.worker.host(folder, spare.info.span, "bf16", spare.engine.device, model_name="test")
            host.engine.cache_tokens //= number
        yield swarm


async def ask(swarm: MemorySwarm) -> tuple[Answer, float]:
    """An answer, and after how many seconds it was there."""
    began = asyncio.get_running_loop().time()
    answer = await swarm.origin.complete(swarm.origin.request_ids(PROMPT, LONGER))
    return answer, asyncio.get_running_loop().time() - began


def names(answer: Answer) -> list[str]:
    return [offer.name for offer in answer.route]


def says(code: str, blame: int | None = None, after_s: float = 0.0) -> Answering:
    def answer(message: Open, link: Link) -> None:
        fault = Fault(message.session, message.epoch, message.hop, code, "so it is", blame)
        asyncio.get_running_loop().call_later(after_s, try_send, link, fault)

    return answer


def silent(message: Open, link: Link) -> None:
    """It has come, and that is all."""


def test_a_member_that_never_answers_open_costs_one_wait_and_no_request(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It answers pings. Each request ended with 504 after 30 s, and the next one as well."""

    async def main() -> None:
        async with swarm_with(folder, "3-5") as swarm:
            calm, _ = await ask(swarm)
            monkeypatch.setattr(swarm.hops[1].worker, "on_open", silent)
            told, took_s = await ask(swarm)
            assert names(calm) == ["n0", "n1"] and names(told) == ["n0", "n2"]
            assert told.token_ids == calm.token_ids and took_s < QUICK_S + 1

    play(main)


@pytest.mark.parametrize("kind", [BadRequest, ModelError, WeightsMismatch])
def test_a_member_that_calls_every_request_faulty_is_passed_over(
    folder: Path, kind: type[BadRequest], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each request ended with its word, as a fault of the client."""

    async def main() -> None:
        async with swarm_with(folder, "3-5") as swarm:
            monkeypatch.setattr(swarm.hops[1].worker, "on_open", says(kind.code))
            told, took_s = await ask(swarm)
            assert names(told) == ["n0", "n2"] and took_s < 1
            monkeypatch.setattr(swarm.hops[2].worker, "on_open", says(kind.code))
            with pytest.raises(kind, match="so it is"):
                await ask(swarm)

    play(main)


def test_a_member_that_blames_every_next_hop_is_left_out(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It excluded all honest holders one by one, and the request found no route."""

    async def main() -> None:
        async with swarm_with(folder, "3-5", "3-5", "0-2") as swarm:
            monkeypatch.setattr(swarm.hops[0].worker, "on_open", says(LinkClosed.code, 1))
            told, took_s = await ask(swarm)
            assert names(told) == ["n4", "n1"] and took_s < 1
            node = swarm.origin.node
            now = asyncio.get_running_loop().time()
            assert not any(node.setbacks.failing_s(hop.transport.node, now) for hop in swarm.hops[1:])

    play(main)


@pytest.mark.parametrize("serves_stars", [True, False])
def test_a_member_that_cannot_reach_any_next_hop_costs_two_waits(
    folder: Path, serves_stars: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It says so as late as it can. In a ring the rows then go by way of the origin, over the same nodes; in a star no hop
    dials another, so that nothing it says of them counts."""

    async def main() -> None:
        async with swarm_with(folder, *["3-5"] * 6, *([] if serves_stars else ["0-2"])) as swarm:
            worker = swarm.hops[0].worker
            plain = worker.on_open

            def answer(message: Open, link: Link) -> None:
                if message.successor is None and serves_stars:
                    plain(message, link)
                else:
                    says(Apart.code, 1, QUICK_S - 2)(message, link)

            monkeypatch.setattr(worker, "on_open", answer)
            told, took_s = await ask(swarm)
            assert len(told.token_ids) == LONGER.max_tokens
            assert took_s < 4 * QUICK_S
            if serves_stars:
                assert told.routing.is_star and names(told)[0] == "n0" and took_s < 2 * QUICK_S
            else:
                assert names(told)[0] == "n8"

    play(main)


@pytest.mark.parametrize("route", [(1,), (0,), (1, 0)], ids=["first", "last", "both"])
def test_a_session_that_wants_ends_where_they_are_not_is_refused(folder: Path, route: tuple[int, ...]) -> None:
    """The head of the node with the first layers, the embedding of that with the last. (Its steps failed, and with them those
    of others that shared a device step with them.)"""

    async def main() -> None:
        async with memory_swarm(folder, "0-2,3-5", ends="edges", request=PLAIN) as swarm:
            faults, is_over = Faults(), asyncio.Event()
            calm, _ = await ask(swarm)
            for node in swarm.hops:
                faults.slow(node, 0.01)
            async with memory_node(swarm.network, "member") as member:
                offers = [o for n in swarm.addrs for o in await member.requests.survey([n])]
                lease = Lease(swarm.origin.model.id, "bf16", 8, 1, "ring", "edges", HOT)

                async def attack() -> None:
                    while not is_over.is_set():
                        with pytest.raises(BadRequest, match="ends"):
                            session = await member.requests.open([offers[i] for i in route], lease)
                            session.send(0, 1, 0, (1,), None, 1)
                            await asyncio.sleep(0.02)
                            member.requests.close(session)
                        await asyncio.sleep(0.01)

                attacking = asyncio.create_task(attack())
                told, _ = await ask(swarm)
                is_over.set()
                await attacking
            assert told.token_ids == calm.token_ids and not told.repairs

    play(main)


@pytest.mark.parametrize("prompt", [PROMPT[:1], PROMPT])
def test_rows_of_other_sessions_on_a_shared_link_cost_a_request_one_more_opening(
    folder: Path, prompt: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A member opens sessions on n0 alone, whose rows fill what n1 holds of the link until the Opens come. The rows of a
    request whose Open is late were dropped: it ended with `pipeline_stalled` (where others have n1's layers, it took 15 s).
    """

    async def main() -> None:
        async with swarm_with(folder) as swarm:
            calm = await swarm.origin.complete(swarm.origin.request_ids(prompt, LONGER))
            victim, dropped = swarm.hops[1].worker, list[Step]()
            hold, on_open = victim.unopened.hold, victim.on_open

            def flooded(step: Step, link: Link) -> bool:
                if not dropped:
                    dropped.append(step)
                    hold(step, link)
                    for number in range(LINK_SESSIONS):
                        hold(step._replace(session=SessionId(number.to_bytes(16, "big"))), link)
                    return True
                return hold(step, link)

            def late(message: Open, link: Link) -> None:
                asyncio.get_running_loop().call_later(0.0 if dropped else 0.1, on_open, message, link)

            monkeypatch.setattr(victim.unopened, "hold", flooded)
            monkeypatch.setattr(victim, "on_open", late)
            began = asyncio.get_running_loop().time()
            told = await swarm.origin.complete(swarm.origin.request_ids(prompt, LONGER))
            assert dropped and told.token_ids == calm.token_ids and not told.repairs
            assert asyncio.get_running_loop().time() - began < 1  # of virtual time

    play(main)
