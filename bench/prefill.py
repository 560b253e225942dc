"""How much sooner does a prompt end with its chunks in flight over the route together, and coded over slow uplinks?

A tiny model (real steps, real protocol) over emulated legs of 30 ms, in virtual time: by a timer a device step takes a
millisecond a row on every hop, so that hops overlap as on machines of their own, which two cores cannot show. Arms: `one`
sends the prompt as one chunk, which passes from hop to hop; `usual` in chunks of 256; `chosen` as route/chunks.py has it.

Then tales, three nodes behind uplinks of 10 and 20 Mbit/s: rows as they are (`plain`), as wire/codec.py has them (`coded`), and
with loss as wire/int8.py has them (`int8`; `sampled` is the request before, which waited for the guard's sample). Each arm's
figure is of its third request, links are measured by then, and the median of RUNS: chunks are as long as hops really took for
a row. Computing takes no time here: codecs are for links that bind.

Holds if `chosen` is 2.64 times (3 less 12 %) as fast as `one` with 4,096 tokens over 3 hops, and twice as fast with 256 over 6;
`coded` 1.3 and 1.2 times as fast as `plain` at 10 and 20 Mbit/s, `int8` 1.15 times as fast as `coded`, and the guard lets it.
Run: python -m bench.prefill
"""

import asyncio
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Final, Literal, cast
from unittest import mock

from bench.report import finish, note
from manyhands import tales
from manyhands.config import RequestConfig, WorkerConfig
from manyhands.core import SamplingParams
from manyhands.net.transport import Transport
from manyhands.origin import Answer
from manyhands.route.offer import Rules
from manyhands.testing.clock import run_virtual
from manyhands.testing.faulty_device import SlowDevice
from manyhands.testing.swarm import memory_swarm
from manyhands.testing.tiny import make_tiny
from manyhands.testing.wan import WanProfile, WanTransport
from manyhands.worker.execute import Device

ROW_S: Final = 0.001
LEG_S: Final = 0.030
USUAL: Final = RequestConfig().prefill_chunk
CASES: Final = {"3 hops, 4096 tokens": ("0-1,2-3,4-5", 4096), "6 hops, 256 tokens": ("0-0,1-1,2-2,3-3,4-4,5-5", 256)}
TARGET: Final = {
    "3 hops, 4096 tokens": 0.88 * 3,
    "6 hops, 256 tokens": 2.0,
    "uplinks of 10 Mbit/s": 1.3,
    "uplinks of 20 Mbit/s": 1.2,
}
INT8_TARGET: Final = 1.15
NEAR_S: Final = 0.005  # legs of the second part, whose rows are narrow: of wide ones bytes take longer than this
UPLINKS_MBIT: Final = (10, 20)
RUNS: Final = 5
TEXT: Final = "Once upon a time there was a miller who had three sons, a mill, a donkey and a cat. "


def behind(rate: float, leg_s: float = LEG_S) -> Callable[[Transport], Transport]:
    """A node whose uplink carries `rate` bytes a second."""
    return lambda transport: WanTransport(transport, WanProfile(leg_s, rate_bytes_per_s=rate, seed=7))


async def first_token_s(folder: Path, cut: str, num_rows: int, fixed: int | None) -> float:
    """Virtual seconds until the first token; with `fixed`, in chunks of so many rows."""
    most = fixed or USUAL
    config, worker = RequestConfig(prefill_chunk=most, prefill_overdue_s=600.0), WorkerConfig(prefill_rows=most)
    prompt, loop = [3 + i % 200 for i in range(num_rows)], asyncio.get_running_loop()
    async with memory_swarm(folder, cut, request=config, worker=worker, wrap=behind(float("inf"))) as swarm:
        for node in swarm.hops:
            engine = node.hosts[0].engine
            engine.device = cast(Device, SlowDevice(engine.device, 0.0, ROW_S))
        began = loop.time()
        await swarm.origin.complete(swarm.origin.request_ids(prompt, SamplingParams(max_tokens=1)))
        return loop.time() - began


def measure(folder: Path, cut: str, num_rows: int, fixed: int | None) -> float:
    if fixed is None:
        return run_virtual(first_token_s(folder, cut, num_rows, None))
    with (
        mock.patch("manyhands.origin.route.chunk_rows", lambda num_rows, stages, window, most: most),
        mock.patch("manyhands.origin.first_rows.first_rows", lambda *_: 0),  # they leave before the rest
    ):
        return run_virtual(first_token_s(folder, cut, num_rows, fixed))


async def told_s(rate: float, codec: Literal["lossless", "int8"]) -> tuple[list[float], Answer]:
    """Virtual seconds until the first token of tales after 900 tokens, of three requests in turn, and the last answer."""
    request, params = RequestConfig(prefill_overdue_s=600.0), SamplingParams(max_tokens=8)
    took: list[float] = []
    async with memory_swarm(tales.model_path(), "0-3,4-7,8-11", request=request, wrap=behind(rate, NEAR_S)) as swarm:
        loop, prompt = asyncio.get_running_loop(), swarm.origin.model.encode(TEXT * 40)[:900]
        for _ in range(3):
            began, answer = loop.time(), swarm.origin.answer(swarm.origin.request_ids(prompt, params))
            at = [loop.time() async for _ in swarm.origin.stream(answer, rules=Rules(codec=codec))]
            took.append(at[0] - began)
        return took, answer


def coding(mbit: int) -> dict[str, float]:
    """What the codecs win over uplinks of `mbit` Mbit/s: medians of RUNS."""
    runs = [coding_once(mbit) for _ in range(RUNS)]
    found = {name: round(statistics.median(run[name] for run in runs), 6) for name in runs[0]}
    plain_s, coded_s, int8_s = found["plain_s"], found["coded_s"], found["int8_s"]
    ratios = {"x": plain_s / coded_s, "int8_x": plain_s / int8_s, "int8_to_coded_x": coded_s / int8_s}
    return found | {name: round(x, 2) for name, x in ratios.items()}


def coding_once(mbit: int) -> dict[str, float]:
    """Seconds of each arm. Without loss the answers must be equal."""
    rate = mbit / 8 * 1e6
    with mock.patch("manyhands.wire.codec.pays", lambda *_: False):
        (*_, plain_s), wanted = run_virtual(told_s(rate, "lossless"))
    (*_, coded_s), got = run_virtual(told_s(rate, "lossless"))
    (_, sampled_s, int8_s), lossy = run_virtual(told_s(rate, "int8"))
    assert got.token_ids == wanted.token_ids, "coding has changed the text"
    assert lossy.routing.loss.layers == (0, 4, 8) and lossy.routing.loss.sample is not None, "the guard objects"
    seconds = {"plain_s": plain_s, "coded_s": coded_s, "int8_s": int8_s, "sampled_s": sampled_s}
    return {name: round(s, 3) for name, s in seconds.items()} | {"mean_kl": lossy.routing.loss.sample.mean_kl}


def main() -> int:
    figures: dict[str, object] = {"row_ms": 1e3 * ROW_S, "leg_ms": 1e3 * LEG_S}
    holds = {}
    with tempfile.TemporaryDirectory() as place:
        folder = make_tiny("qwen3", Path(place) / "tiny", layers=6, hidden=64, context=5000)
        for name, (cut, num_rows) in CASES.items():
            took = {
                arm: measure(folder, cut, num_rows, fixed)
                for arm, fixed in (("one", num_rows), ("usual", USUAL), ("chosen", None))
            }
            ratio = took["one"] / took["chosen"]
            note(f"{name}: {took}, {ratio:.2f} times as fast")
            figures[name] = {f"{arm}_s": round(s, 3) for arm, s in took.items()} | {"x": round(ratio, 2)}
            holds[name] = ratio >= TARGET[name]
    for mbit in UPLINKS_MBIT:
        name = f"uplinks of {mbit} Mbit/s"
        figures[name] = won = coding(mbit)
        note(f"{name}: {won}")
        holds[name] = won["x"] >= TARGET[name] and won["int8_to_coded_x"] >= INT8_TARGET
    return finish("prefill", figures, TARGET, holds)


if __name__ == "__main__":
    sys.exit(main())
