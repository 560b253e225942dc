"""Models with states: members that say they cannot go back, and links that break while hops are asked how far they can."""

import asyncio
import threading
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest

from manyhands.errors import Detour, StateGone
from manyhands.net.transport import Link, try_send
from manyhands.origin.fault import MAX_STUCK
from manyhands.origin.repair import REWIRE_PAUSE_S
from manyhands.origin.route import Hop
from manyhands.testing.clock import run_virtual
from manyhands.testing.tiny import make_tiny
from manyhands.wire.message import Fault, Open, Opened, Step
from manyhands.worker.opening import Opening
from tests.hostile.test_openings import PLAIN
from tests.origin.scenes import HOT, PROMPT, expected, play, swarm_of
from tests.worker.hop import ORIGIN, Notes, hidden, hop, opening, session_id


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("qwen3_next", tmp_path_factory.mktemp("states") / "qwen3_next", seed=3)


def test_a_place_that_ends_while_it_is_asked_how_far_it_can_go_back_has_nothing(folder: Path) -> None:
    """An origin that opens the next epoch over a new link, whose old one breaks while the device is busy."""

    async def main() -> None:
        async with hop(folder) as one:
            await one.open(1)
            one.step(1, 0, hidden(40))
            await one.until(lambda: one.origin.of(Opened) != [] and sum(s.count for s in one.after.of(Step)) == 40)
            busy, new = threading.Event(), Notes(ORIGIN)
            one.host.engine.device.run(busy.wait)
            one.step(1, 40, hidden(1))
            await asyncio.sleep(0)
            reserved = one.host.reserve(opening(1, epoch=2, resume_until=40), cast(Link, new))
            opened = asyncio.ensure_future(one.host.open(reserved, cast(Link, one.after)))
            for _ in range(5):  # the clock stands still while the device is busy
                await asyncio.sleep(0)
            one.host.drop_origin(cast(Link, one.origin))
            busy.set()
            await opened
            (answer,) = new.of(Opened)
            place = one.host.find(session_id(1), 1, 2)
            assert place is not None
            assert answer.cached == min(40, place.cache.length) == 0

    run_virtual(main())


def test_a_place_is_asked_how_far_it_can_go_back_while_the_device_computes_for_others(folder: Path) -> None:
    """A long prompt of another member, which takes as long as origins wait for an answer: this hop counted as lost."""

    async def main() -> None:
        async with hop(folder) as one:
            await one.open(1)
            await one.open(2)
            one.step(1, 0, hidden(40))
            await one.until(lambda: sum(s.count for s in one.after.of(Step)) == 40)
            busy = threading.Event()
            one.host.engine.device.run(busy.wait)
            one.step(2, 0, hidden(30))
            await asyncio.sleep(0)
            opened = asyncio.ensure_future(one.open(1, epoch=2, resume_until=40))
            for _ in range(5):
                await asyncio.sleep(0)
            answers = one.origin.of(Opened, session_id(1))
            busy.set()
            await opened
            assert [answer.cached for answer in answers] == [0, 40]

    run_virtual(main())


@pytest.mark.parametrize("family", ["llama", "qwen3_next"])
def test_a_place_whose_cache_is_about_to_be_rolled_back_does_not_go_on_with_it(family: str, tmp_path: Path) -> None:
    """A hop sends a row that was not due as it is replaced. (Where layers have no states, the hop said that it goes on from 40;
    it had one position then, and blamed the new hop before it for the others.)"""

    async def main() -> None:
        async with hop(make_tiny(family, tmp_path, seed=3)) as one:
            await one.open(1)
            one.step(1, 0, hidden(40))
            await one.until(lambda: sum(s.count for s in one.after.of(Step)) == 40)
            busy = threading.Event()
            one.host.engine.device.run(busy.wait)
            one.step(1, 0, hidden(1, 5), guess=9)
            await asyncio.sleep(0)
            opened = asyncio.ensure_future(one.open(1, epoch=2, resume_until=40))
            for _ in range(5):
                await asyncio.sleep(0)
            busy.set()
            await opened
            await one.quiet()
            place = one.host.find(session_id(1), 1, 2)
            assert place is not None and place.cache.length == 1
            assert one.origin.of(Opened, session_id(1))[-1].cached == 0

    run_virtual(main())


def test_a_hop_that_cannot_go_back_before_all_have_opened_costs_no_request(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It opens, and says so at once, while the other has not answered."""
    wanted = expected(folder, PROMPT, HOT)

    async def main() -> None:
        async with swarm_of(folder, "0-2,3-5", spares=["0-5"], request=PLAIN) as swarm:
            untrusted, (slow,) = swarm.hops[1].worker, swarm.hops[0].hosts
            plain, opens = untrusted.on_open, slow.open

            async def open_late(reserved: Opening, successor: Link) -> None:
                await asyncio.sleep(0.2)
                await opens(reserved, successor)

            def lie(message: Open, link: Link) -> None:
                told = Fault(message.session, message.epoch, message.hop, StateGone.code, "cannot go back", message.hop)
                plain(message, link)
                asyncio.get_running_loop().call_later(0.1, try_send, link, told)

            monkeypatch.setattr(untrusted, "on_open", lie)
            monkeypatch.setattr(slow, "open", open_late)
            answer = await swarm.origin.complete(swarm.origin.request_ids(PROMPT, HOT))
            assert answer.token_ids == wanted

    play(main)


def test_a_hop_that_calls_for_new_epochs_and_holds_less_in_each_is_lost(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once a second, as soon as a new position has come back: the hop before it sent its whole log each time."""
    params, answers = replace(HOT, max_tokens=30), list[int]()
    wanted, plain = expected(folder, PROMPT, params), Hop.opened

    def less(self: Hop, message: Opened) -> None:
        if message.hop == 1 and message.cached:
            answers.append(message.cached)
            message = replace(message, cached=0)
        plain(self, message)

    async def main() -> None:
        async with swarm_of(folder, "0-1,2-3,4-5", spares=["0-5"], request=PLAIN) as swarm:
            answer = swarm.origin.answer(swarm.origin.request_ids(PROMPT, params))
            monkeypatch.setattr(Hop, "opened", less)
            async for _ in swarm.origin.stream(answer):
                for place in [place for host in swarm.hops[1].hosts for place in host._places.values()]:
                    place.fault(Detour.code, "again", 1)
                await asyncio.sleep(REWIRE_PAUSE_S + 0.01)
            assert answer.token_ids == wanted
            assert len(answers) <= MAX_STUCK + 2
            assert [repair.lost for repair in answer.repairs] == [("n1",)]

    play(main)
