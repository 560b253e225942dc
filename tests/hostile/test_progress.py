"""A hop that says it gets on and gives nothing: it is replaced where another can take its place, and the text is the same."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import cast

import pytest

from manyhands.config import RequestConfig
from manyhands.core import ORIGIN_HOP, NodeId, SamplingParams
from manyhands.net.transport import Link, try_send
from manyhands.origin import Answer, growth
from manyhands.origin.node import FullNode
from manyhands.origin.pace import MAX_WAIT_S
from manyhands.testing.faulty_device import SlowDevice
from manyhands.testing.swarm import MemorySwarm
from manyhands.testing.tiny import make_tiny
from manyhands.wire.message import Credit, Extend, Progress, Step
from manyhands.worker.execute import Device
from manyhands.worker.session import HopSession
from tests.origin.scenes import Oracle, expected, play, swarm_of
from tests.worker.pipeline import random_ids

PROMPT = tuple(random_ids(200, seed=7))
PARAMS = SamplingParams(max_tokens=4, ignore_eos=True)
REQUEST = RequestConfig(credits=2, prefill_chunk=16)
SOON_S = 2.5 * REQUEST.stall_timeout_s  # of virtual time, in which computing takes none


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("qwen3", tmp_path_factory.mktemp("progress") / "qwen3", seed=3)


class FalseHop:
    """In place of what a hop does with its steps: nothing is computed, and each is paid for if it `pays`. With `tell` it says
    every `pause_s` that so many positions are computed, given those that have come; to probes what `answer` says of them.
    """

    def __init__(
        self,
        node: FullNode,
        tell: Callable[[int], int | None] = lambda received: None,
        pause_s: float = 1.0,
        answer: Callable[[int], int] = lambda received: received,
        *,
        pays: bool = True,
        is_honest_for: int = 0,
    ) -> None:
        (host,) = node.hosts
        self._tell, self._pause_s, self._answer, self._pays = tell, pause_s, answer, pays
        self._honest, self._left, self._plain = host.step, is_honest_for, HopSession.report
        self._task: asyncio.Task[None] | None = None
        host.step = self.step  # type: ignore[method-assign]

    def step(self, session: HopSession, step: Step, link: Link) -> None:
        if self._left:
            self._left -= 1
            return self._honest(session, step, link)
        session.received = step.position + step.count
        session.report = lambda: self.report(session)  # type: ignore[method-assign]
        if self._pays:
            try_send(link, Credit(step.session, step.epoch, session.opened.hop, 1))
        if self._task is None:
            self._task = asyncio.ensure_future(self.talk(session, step))

    async def talk(self, session: HopSession, step: Step) -> None:
        while not session.is_closed:
            await asyncio.sleep(self._pause_s)
            if (end := self._tell(session.received)) is not None:
                news = step._replace(hop=ORIGIN_HOP, position=end, count=0, ids=None, payload=None, timings=b"")
                try_send(session.successor, news)

    def report(self, session: HopSession) -> None:
        opened, received = session.opened, session.received
        try_send(
            session.origin, Progress(opened.session, opened.epoch, opened.hop, received, self._answer(received), 0)
        )


@asynccontextmanager
async def swarm(folder: Path, request: RequestConfig = REQUEST) -> AsyncIterator[MemorySwarm]:
    async with swarm_of(folder, "0-1,2-3,4-5", spares=["0-5"], request=request) as swarm:
        yield swarm


async def answered(folder: Path, swarm: MemorySwarm, *lost: str) -> Answer:
    """The answer, which is what it would be anyway, soon, and after the hops `lost` were replaced."""
    clock = asyncio.get_running_loop().time
    began = clock()
    answer = await swarm.origin.complete(swarm.origin.request_ids(PROMPT, PARAMS), draft="off")
    assert answer.token_ids == expected(folder, PROMPT, PARAMS)
    assert [name for repair in answer.repairs for name in repair.lost] == list(lost)
    assert clock() - began < SOON_S
    return answer


def rising(start: int = 1) -> Callable[[int], int]:
    """One more each time."""
    said = iter(range(start, 1 << 30))
    return lambda received: min(received, next(said))


@pytest.mark.parametrize(
    "tell",
    [lambda _: 16, lambda received: received, lambda received: min(received, len(PROMPT) - 1)],
    ids=["the same again and again", "all, without the row that is due", "all but the row that is due"],
)
def test_a_hop_that_tells_no_news_is_replaced(folder: Path, tell: Callable[[int], int]) -> None:
    async def main() -> None:
        async with swarm(folder) as town:
            FalseHop(town.hops[2], tell)
            await answered(folder, town, "n2")

    play(main)


def test_a_hop_that_tells_of_one_position_after_the_other_is_replaced(folder: Path) -> None:
    """Just often enough not to be asked why."""

    async def main() -> None:
        async with swarm(folder) as town:
            FalseHop(town.hops[2], rising(), REQUEST.prefill_overdue_s - 1)
            await answered(folder, town, "n2")

    play(main)


@pytest.mark.parametrize("pays", [True, False])
@pytest.mark.parametrize("index", [0, 1, 2])
def test_a_hop_that_gets_on_only_when_it_is_asked_is_replaced(folder: Path, index: int, pays: bool) -> None:
    async def main() -> None:
        async with swarm(folder) as town:
            FalseHop(town.hops[index], answer=rising(), pays=pays)
            await answered(folder, town, f"n{index}")

    play(main)


@pytest.mark.parametrize("index", [0, 1])
def test_a_hop_that_says_it_has_sent_on_what_it_has_not_is_replaced_after_the_next(folder: Path, index: int) -> None:
    """Whose word is true cannot be known: the line between them may be cut."""

    async def main() -> None:
        async with swarm(folder, RequestConfig(prefill_chunk=16)) as town:
            FalseHop(town.hops[index])
            await answered(folder, town, f"n{index + 1}", f"n{index}")

    play(main)


def test_a_first_hop_that_has_computed_what_it_was_never_sent_is_replaced(folder: Path) -> None:
    """It pays for nothing, so that the rest of the prompt waits for it, and says that it waits for the rest."""

    async def main() -> None:
        async with swarm(folder) as town:
            sessions = town.origin.node.sessions
            FalseHop(town.hops[0], answer=lambda _: next(iter(sessions.values())).returns.sent_until, pays=False)
            await answered(folder, town, "n0")

    play(main)


def test_a_hop_whose_lease_grows_instead_is_replaced(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a position at a time, just before the row that is due is overdue. (That woke the session, whose wait began anew.)"""
    monkeypatch.setattr(growth, "LEASE_TOKENS", 64)
    params = SamplingParams(max_tokens=500, ignore_eos=True)

    async def main() -> None:
        async with swarm(folder) as town:
            FalseHop(town.hops[1], answer=lambda received: received - 1, is_honest_for=16)
            (host,), clock = town.hops[1].hosts, asyncio.get_running_loop()

            def extend(message: Extend, node: NodeId) -> None:
                for _, place in host._places.owned(message.session, node):
                    clock.call_later(REQUEST.step_floor_s - 0.1, place.extend, place.capacity + 1)

            host.extend = extend  # type: ignore[method-assign]
            answer = await town.origin.complete(town.origin.request_ids(PROMPT, params), draft="off")
            assert answer.token_ids == expected(folder, PROMPT, params)
            assert [repair.lost for repair in answer.repairs] == [("n1",)] and clock.time() < SOON_S

    play(main)


@pytest.mark.parametrize("step_s", [0.5 * REQUEST.stall_timeout_s, REQUEST.prefill_overdue_s - 1])
def test_a_slow_hop_that_none_can_replace_is_waited_for(folder: Path, step_s: float) -> None:
    """Of a row every second or two, for many minutes."""

    async def main() -> None:
        async with swarm_of(folder, "0-1,2-3,4-5", request=REQUEST) as town:
            engine = town.hops[2].hosts[0].engine
            engine.device = cast(Device, SlowDevice(engine.device, step_s))
            answer = await town.origin.complete(town.origin.request_ids(PROMPT, PARAMS), draft="off")
            assert answer.token_ids == expected(folder, PROMPT, PARAMS) and not answer.repairs

    play(main)


def test_a_slow_hop_of_more_than_a_row_a_second_keeps_its_place_in_a_prompt(folder: Path) -> None:
    async def main() -> None:
        async with swarm(folder) as town:
            engine = town.hops[2].hosts[0].engine
            engine.device = cast(Device, SlowDevice(engine.device, REQUEST.prefill_overdue_s - 1))
            answer = town.origin.answer(town.origin.request_ids(PROMPT, PARAMS))
            async for _ in town.origin.stream(answer, draft="off"):
                break
            assert not answer.repairs

    play(main)


def test_a_hop_that_sends_a_step_twice_does_not_cost_the_next_one_its_place(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next one computes it twice, as after a rollback, and tells the same news twice."""
    send_on, was_sent_twice = HopSession._send_on, set[int]()

    def twice(session: HopSession, step: Step) -> None:
        send_on(session, step)
        if session.opened.span.start == 2 and session.opened.epoch not in was_sent_twice:
            was_sent_twice.add(session.opened.epoch)
            send_on(session, step)

    async def main() -> None:
        async with swarm_of(folder, "0-1,2-3,4-5", spares=["4-5"], request=REQUEST) as town:
            monkeypatch.setattr(HopSession, "_send_on", twice)
            answer = town.origin.answer(town.origin.request_ids(PROMPT, PARAMS))
            async for _ in town.origin.stream(answer, draft="off"):
                pass
            assert tuple(answer.token_ids) == tuple(expected(folder, PROMPT, PARAMS)) and answer.repairs == []
            assert was_sent_twice

    play(main)


@pytest.mark.parametrize(("row_s", "num_repairs"), [(0.05, 1), (0.4, 1), (0.8, 1), (1.6, 3)])
def test_a_replay_longer_than_any_patience_goes_on(folder: Path, row_s: float, num_repairs: int) -> None:
    """A hop falls silent; what takes its place needs minutes for the positions so far, and others could, as slowly."""

    async def main() -> None:
        async with swarm_of(folder, "0-1,2-3,4-5", spares=["4-5"] * 5, request=REQUEST) as town:
            for node in town.hops[3:]:
                engine = node.hosts[0].engine
                engine.device = cast(Device, SlowDevice(engine.device, 0.1, row_s))
            FalseHop(town.hops[2], is_honest_for=14)
            answer = town.origin.answer(town.origin.request_ids(PROMPT, PARAMS))
            async for _ in town.origin.stream(answer, draft="off"):
                pass
            assert (
                tuple(answer.token_ids) == tuple(expected(folder, PROMPT, PARAMS))
                and len(answer.repairs) == num_repairs
            )

    play(main)


@pytest.mark.parametrize("index", [0, 2])
def test_a_hop_that_tells_in_decode_of_a_prompt_long_past_buys_nothing(folder: Path, index: int) -> None:
    """It was honest as long as the prompt was computed, and tells of its positions again, one at each probe."""

    async def main() -> None:
        async with swarm_of(folder, "0-1,2-3,4-5", spares=["0-5"], request=REQUEST) as town:
            for node in town.hops:
                engine = node.hosts[0].engine
                engine.device = cast(Device, SlowDevice(engine.device, 0.2))
            FalseHop(town.hops[index], is_honest_for=14, answer=rising(0))
            answer = town.origin.answer(town.origin.request_ids(PROMPT, PARAMS))
            async with asyncio.timeout(SOON_S):
                async for _ in town.origin.stream(answer, draft="off"):
                    pass
            assert answer.token_ids == expected(folder, PROMPT, PARAMS) and answer.repairs

    play(main)


@pytest.mark.parametrize("ahead", [0, 31])
@pytest.mark.parametrize("index", [0, 1, 2])
def test_guesses_that_a_hop_says_it_has_computed_buy_no_time(folder: Path, index: int, ahead: int) -> None:
    """Of what is long computed, and of the drafts on their way, it tells of one more at each probe, and gives no row."""
    params = SamplingParams(max_tokens=80, ignore_eos=True)

    async def main() -> None:
        async with swarm_of(folder, "0-1,2-3,4-5", spares=["0-5"]) as town:
            for node in town.hops:
                engine = node.hosts[0].engine
                engine.device = cast(Device, SlowDevice(engine.device, 0.2))
            answer = town.origin.answer(town.origin.request_ids(PROMPT, params))
            drafter = Oracle((*PROMPT, *expected(folder, PROMPT, params)), 15, ahead=True)
            clock = asyncio.get_running_loop().time
            async with contextlib.aclosing(town.origin.stream(answer, drafter=drafter)) as tokens:
                async for _ in tokens:
                    if len(answer.token_ids) == 5:
                        FalseHop(town.hops[index], answer=rising(len(PROMPT) + ahead))
                    if answer.repairs:
                        break
                    began = clock()
            assert [repair.lost for repair in answer.repairs] == [(f"n{index}",)]
            assert clock() - began < MAX_WAIT_S

    play(main)


def test_a_node_that_is_back_in_its_place_keeps_no_other_from_being_replaced(folder: Path) -> None:
    """A link flapped: the only holder of its layers was lost and is back. The last hop then computes nothing more."""

    async def main() -> None:
        async with swarm_of(folder, "0-1,2-3,4-5", spares=["4-5"], request=REQUEST) as town:
            answer = town.origin.answer(town.origin.request_ids(PROMPT, PARAMS))
            async for _ in town.origin.stream(answer, draft="off"):
                if len(answer.token_ids) == 1:
                    (session,) = town.origin.node.sessions.values()
                    session.lose(1, "a link flapped")
                if len(answer.token_ids) == 2:
                    FalseHop(town.hops[2])
            assert tuple(answer.token_ids) == tuple(expected(folder, PROMPT, PARAMS))
            assert [name for repair in answer.repairs for name in repair.lost] == ["n1", "n2"]

    play(main)
