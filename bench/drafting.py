"""What does drafting win where there is no wide area network? Off against auto on one machine, and what a look-up costs.

tales on one node of this process, with its drafter beside the origin; arms take turns. `repeats`: a text that goes on repeating
itself, known to the suffix drafter; `prose`: tales at T = 0.7; `four`: four streams of prose at once, in sum. `lookup_us`: the
worst suffix look-up at 32,768 ids of random and of repeating text. Run: python -m bench.drafting [--reps N]
"""

import argparse
import asyncio
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from statistics import median

from bench.report import finish, note, paired, spread
from manyhands import tales
from manyhands.cli.options import run as run_loop
from manyhands.core import SamplingParams
from manyhands.origin import Origin
from manyhands.origin.draft import SuffixIndex
from manyhands.origin.draft_model import DraftModel
from manyhands.testing.swarm import memory_swarm
from manyhands.worker.execute import Device

TARGET = {"repeats_x": 1.15, "prose_x": 0.98, "four_x": 0.98, "lookup_us": 50.0}
PROSE = "Once upon a time there was a king who had three sons, and"
LIST = "one two three four five six seven eight nine ten " * 8
SCENES = {"repeats": (LIST, 0.0, 1), "prose": (PROSE, 0.7, 1), "four": (PROSE, 0.7, 4)}
TOKENS = 200
IDS = 32768


async def rate(origin: Origin, scene: str, draft: str, seed: int) -> tuple[float, list[list[int]]]:
    """Tokens per second after the first of each stream, in sum, and the answers."""
    text, temperature, streams = SCENES[scene]
    params = SamplingParams(max_tokens=TOKENS, temperature=temperature, ignore_eos=True)

    async def one(number: int) -> tuple[float, list[int]]:
        own = replace(params, seed=10 * seed + number)
        answer = origin.answer(origin.request(text, own))
        at = [time.monotonic() async for _ in origin.stream(answer, draft=draft)]
        return (TOKENS - 1) / (at[-1] - at[0]), answer.token_ids

    told = await asyncio.gather(*map(one, range(streams)))
    return sum(each for each, _ in told), [ids for _, ids in told]


async def measure(reps: int) -> dict[tuple[str, str], list[float]]:
    samples: dict[tuple[str, str], list[float]] = {}
    async with memory_swarm(tales.model_path(), "0-11") as swarm:
        device, old = Device.start(1), swarm.origin
        drafter = DraftModel(tales.drafter_path(), "the drafter of tales", old.model.tokenizer)
        origin = Origin(old.node, old.model, device, swarm.addrs, None, drafter)
        for rep in range(reps + 1):
            for scene in SCENES:
                texts = {}
                for draft in ("off", "auto") if rep % 2 else ("auto", "off"):
                    got, texts[draft] = await rate(origin, scene, draft, rep)
                    if rep:  # the first turn warms up
                        samples.setdefault((scene, draft), []).append(got)
                assert texts["off"] == texts["auto"], f"{scene}: drafting has changed the text"
                note(
                    f"{scene}: {', '.join(f'{d} {s[-1]:.0f}' for (n, d), s in samples.items() if n == scene)} tokens/s"
                )
        device.close()
    return samples


def lookup_us(ids: Sequence[int]) -> float:
    """Median microseconds of CPU of one look-up behind IDS ids, each with one id more than the last."""
    index, took = SuffixIndex(), []
    index.find(ids[: IDS - 256])
    for end in range(IDS - 256, IDS):
        known = ids[:end]
        began = time.thread_time_ns()
        index.find(known)
        took.append(time.thread_time_ns() - began)
    return median(took) / 1e3


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--reps", type=int, default=5)
    rng = random.Random(1)
    texts = {"random": [rng.randrange(1 << 15) for _ in range(IDS)], "repeating": [i % 40 for i in range(IDS)]}
    found = {name: round(lookup_us(ids), 1) for name, ids in texts.items()}
    samples = run_loop(measure(parser.parse_args().reps))
    ratios = {f"{scene}_x": paired(samples[scene, "auto"], samples[scene, "off"]) for scene in SCENES}
    rates = {f"{scene} {draft}": spread(each) for (scene, draft), each in samples.items()}
    holds = {name: ratios[name]["median"] >= TARGET[name] for name in ratios}
    holds["lookup_us"] = max(found.values()) <= TARGET["lookup_us"]
    return finish("drafting", {"tokens_per_s": rates, **ratios, "lookup_us": found}, TARGET, holds)


if __name__ == "__main__":
    sys.exit(main())
