"""Rows of prompts over slow links: coded, logged and replayed as coded, and the text is the same. In virtual time."""

from pathlib import Path

import pytest

from manyhands.config import RequestConfig, WorkerConfig
from manyhands.core import SamplingParams
from manyhands.net.transport import Transport
from manyhands.testing.swarm import memory_swarm
from manyhands.testing.tiny import make_tiny
from manyhands.testing.wan import WanProfile, WanTransport
from manyhands.wire.codec import coded
from manyhands.wire.message import Codec, Payload
from manyhands.worker.execute import Result
from manyhands.worker.log import OutputLog, split_step
from tests.origin.scenes import play
from tests.wire.test_codec import rows, step
from tests.worker.pipeline import random_ids

NARROW = 1.25e6  # bytes a second: 10 Mbit/s
PROMPT = random_ids(256, seed=5)
PARAMS = SamplingParams(max_tokens=4, ignore_eos=True)


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("qwen3", tmp_path_factory.mktemp("wide") / "tiny", layers=3, hidden=256, context=512)


def answer(folder: Path, rate: float, worker: WorkerConfig | None = None) -> tuple[list[int], float, list[Codec], int]:
    """Text, virtual seconds to the first token, codecs in the logs of the hops, and bytes of these logs."""

    async def main() -> tuple[list[int], float, list[Codec], int]:
        def far(transport: Transport) -> Transport:
            return WanTransport(transport, WanProfile(0.02, rate_bytes_per_s=rate, seed=3))

        request = RequestConfig(prefill_chunk=64)
        async with memory_swarm(folder, "0-0,1-1,2-2", request=request, worker=worker, wrap=far) as swarm:
            answer = swarm.origin.answer(swarm.origin.request_ids(PROMPT, PARAMS))
            took: list[float] = []
            async for _ in swarm.origin.stream(answer):
                if not took:
                    took.append(answer.timings.ttft_s or 0.0)
                    logs = [log for node in swarm.hops for log in node.worker.logs._logs]
                    kept = [s for log in logs for s in log._steps]
                    codecs = [s.payload.codec for s in kept if s.payload is not None]
            return answer.token_ids, took[0], codecs, sum(log.num_bytes for log in logs)

    return play(main)


def test_over_a_slow_uplink_prompts_go_coded_and_the_text_is_the_same(wide: Path) -> None:
    fast, _, codecs, full = answer(wide, float("inf"))
    assert set(codecs) == {"plain"}
    slow, _, codecs, less = answer(wide, NARROW)
    assert slow == fast
    assert codecs.count("planes") >= 4 and less < 0.9 * full  # what is sent and logged
    cut, _, codecs, _ = answer(wide, NARROW, WorkerConfig(prefill_rows=17, mixed_rows=5))
    assert cut == fast  # hops that take a coded step in parts


def test_a_log_replays_the_coded_bytes_and_decodes_what_is_cut() -> None:
    log, whole, small = OutputLog(), rows(64, 256), rows(2, 256)
    less = coded(whole)
    log.append(step(less, 64))
    log.append(step(small, 2)._replace(position=64))
    log.append(step(less, 64)._replace(position=66))
    replayed = list(log.replay(130))
    assert [s.payload for s in replayed] == [less, small, less] and log.num_bytes == 2 * len(less.data) + len(
        small.data
    )
    assert [s.count for s in log.replay(130, 60)] == [6, 64]  # the part that is asked for, with what follows
    log.cut(10)
    assert log.num_bytes == len(whole.data) // 64 * 10
    head, rest = split_step(step(less, 64), 20)
    assert rest is not None and head.payload is not None and rest.payload is not None
    assert bytes(head.payload.data) + bytes(rest.payload.data) == whole.data


@pytest.mark.parametrize("prefill_rows", [256, 17])
def test_what_cannot_be_decoded_costs_the_sender_its_place(wide: Path, prefill_rows: int) -> None:
    """Also where only a part of it was to run: the hop before is replaced, and the text is the same."""
    fast, *_ = answer(wide, float("inf"))

    async def main() -> None:
        def far(transport: Transport) -> Transport:
            return WanTransport(transport, WanProfile(0.02, rate_bytes_per_s=NARROW, seed=3))

        request = RequestConfig(prefill_chunk=64, reopen_timeout_s=20.0)
        async with memory_swarm(wide, "0-0,1-1,2-2", request=request, wrap=far, spares=["0-0"]) as swarm:
            swarm.hops[1].hosts[0].engine._config = WorkerConfig(prefill_rows=prefill_rows)
            model = swarm.hops[0].hosts[0].engine.model
            assert model is not None
            plain_run = model.run
            spoiled: list[Payload] = []

            def run(works):  # type: ignore[no-untyped-def]
                results = plain_run(works)
                for at, result in enumerate(results):
                    if isinstance(result, Result) and result.payload is not None and result.payload.codec == "planes":
                        spoiled.append(result.payload._replace(data=bytes(len(result.payload.data))))
                        results[at] = result._replace(payload=spoiled[-1])
                return results

            model.run = run  # type: ignore[method-assign]
            answer = await swarm.origin.complete(swarm.origin.request_ids(PROMPT, PARAMS))
            assert spoiled and answer.repairs and answer.token_ids == fast
            assert any("coded rows" in event.detail for event in answer.events)

    play(main)
