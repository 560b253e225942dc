"""Models with states: members that say they cannot go back, and links that break while hops are asked how far they can."""

import asyncio
import threading
from pathlib import Path
from typing import cast

import pytest

from manyhands.errors import StateGone
from manyhands.net.transport import Link, try_send
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


def test_a_hop_that_cannot_go_back_before_all_have_opened_costs_no_request(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It opens, and says so at once, while the other has not answered."""
    wanted = expected(folder, PROMPT, HOT)

    async def main() -> None:
        async with swarm_of(folder, "0-2,3-5", spares=["0-5"], request=PLAIN) as swarm:
            liar, (slow,) = swarm.hops[1].worker, swarm.hops[0].hosts
            plain, opens = liar.on_open, slow.open

            async def open_late(reserved: Opening, successor: Link) -> None:
                await asyncio.sleep(0.2)
                await opens(reserved, successor)

            def lie(message: Open, link: Link) -> None:
                told = Fault(message.session, message.epoch, message.hop, StateGone.code, "cannot go back", message.hop)
                plain(message, link)
                asyncio.get_running_loop().call_later(0.1, try_send, link, told)

            monkeypatch.setattr(liar, "on_open", lie)
            monkeypatch.setattr(slow, "open", open_late)
            answer = await swarm.origin.complete(swarm.origin.request_ids(PROMPT, HOT))
            assert answer.token_ids == wanted

    play(main)
