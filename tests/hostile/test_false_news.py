"""A last hop that is ahead of the truth in the news of a prompt, and a hop that dies then: no honest hop loses its place."""

from pathlib import Path
from typing import cast

import pytest

from manyhands.config import RequestConfig
from manyhands.core import ORIGIN_HOP, SamplingParams
from manyhands.net.transport import try_send
from manyhands.testing.faults import Faults
from manyhands.testing.faulty_device import SlowDevice
from manyhands.testing.tiny import make_tiny
from manyhands.worker.execute import Device, Result
from manyhands.worker.session import HopSession, Taken
from tests.origin.scenes import expected, play, swarm_of
from tests.worker.pipeline import random_ids

PROMPT = tuple(random_ids(200, seed=7))
PARAMS = SamplingParams(max_tokens=4, ignore_eos=True)


@pytest.fixture(scope="module", params=["qwen3", "qwen3_next"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(request.param, tmp_path_factory.mktemp("news") / request.param, seed=3)


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("slow", [1, 2])
@pytest.mark.parametrize("ahead", [40, 1000])
def test_news_that_are_ahead_of_the_truth_cost_no_honest_hop_its_place(
    folder: Path, victim: int, slow: int, ahead: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The repair goes by what the last hop has told: hops that have less say so, and compute what they lack."""
    deliver, told, held = HopSession.deliver, list[int](), list[int]()

    async def main() -> None:
        faults = Faults()
        request = RequestConfig(prefill_chunk=16)
        async with swarm_of(folder, "0-1,2-3,4-5", spares=["0-5"] * 2, request=request, wrap=faults.wrap) as town:
            for index, node in enumerate(town.hops):
                engine = node.hosts[0].engine
                engine.device = cast(Device, SlowDevice(engine.device, 0.01, 0.05 if index == slow else 0.01))

            def boast(session: HopSession, taken: Taken, result: Result, timing: bytes) -> bool:
                done, (own,) = taken.step, town.origin.node.sessions.values()
                if (session.opened.hop, session.opened.epoch) == (2, 1):
                    end = min(done.position + done.count + ahead, own.returns.sent_until, len(PROMPT) - 1)
                    news = done._replace(hop=ORIGIN_HOP, position=end, count=0, ids=None, payload=None, timings=b"")
                    try_send(session.successor, news)
                    told.append(end)
                    held.append(done.position + done.count)
                    if len(told) == 2:
                        faults.die(town.hops[victim])
                return deliver(session, taken, result, timing)

            monkeypatch.setattr(HopSession, "deliver", boast)
            answer = await town.origin.complete(town.origin.request_ids(PROMPT, PARAMS), draft="off")
            assert answer.token_ids == expected(folder, PROMPT, PARAMS)
            assert told[1] > held[1], "the news were false"
            assert [repair.lost for repair in answer.repairs] == [(f"n{victim}",)]

    play(main)
