"""What does drafting win where there is no wide area network? Off against auto on one machine, and what a look-up costs.

tales on one node of this process, with its drafter beside the origin. `repeats`: a text that goes on repeating itself, known to
the suffix drafter; `prose`: tales at T = 0.7; `four`: four streams of prose at once, in sum. `lookup_us`: the worst suffix
look-up at 32,768 ids of random and of repeating text.

Each repetition measures off, auto and off again, in random order. `_x` are ratios of tokens per second within a repetition,
auto against the mean of both off, `_cpu` of CPU seconds of the process, with the interval (`low` to `high`) in which their
median lies, 95 % sure; `_noise` and `_cpu_noise` are off again against off: a difference that is not larger is noise.

Run: python -m bench.drafting [--reps N] [--scene NAME]
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
# The text, the temperature, how many streams, and tokens of each: the list takes some 100 before it repeats itself.
SCENES = {"repeats": (LIST, 0.0, 1, 200), "prose": (PROSE, 0.7, 1, 200), "four": (PROSE, 0.7, 4, 100)}
IDS = 32768
ARMS = {"off": "off", "auto": "auto", "again": "off"}
Samples = dict[tuple[str, str], list[float]]


async def rate(origin: Origin, scene: str, draft: str, seed: int) -> tuple[float, list[list[int]]]:
    """Tokens per second after the first of each stream, in sum, and the answers."""
    text, temperature, streams, tokens = SCENES[scene]
    params = SamplingParams(max_tokens=tokens, temperature=temperature, ignore_eos=True)

    async def one(number: int) -> tuple[float, list[int]]:
        own = replace(params, seed=10 * seed + number)
        answer = origin.answer(origin.request(text, own))
        at = [time.monotonic() async for _ in origin.stream(answer, draft=draft)]
        return (tokens - 1) / (at[-1] - at[0]), answer.token_ids

    told = await asyncio.gather(*map(one, range(streams)))
    return sum(each for each, _ in told), [ids for _, ids in told]


async def measure(reps: int, scenes: Sequence[str]) -> tuple[Samples, Samples]:
    """By scene and arm: tokens per second, and CPU seconds of the process."""
    rates, cpu_s, rng = Samples(), Samples(), random.Random(2)
    async with memory_swarm(tales.model_path(), "0-11") as swarm:
        device, old = Device.start(1), swarm.origin
        drafter = DraftModel(tales.drafter_path(), "the drafter of tales", tales.model_path())
        origin = Origin(old.node, old.model, device, swarm.addrs, None, drafter)
        for rep in range(reps + 1):
            for scene in scenes:
                texts = []
                for arm in rng.sample(list(ARMS), len(ARMS)):
                    began = time.process_time()
                    got, answers = await rate(origin, scene, ARMS[arm], rep)
                    texts.append(answers)
                    if rep:  # the first turn warms up
                        rates.setdefault((scene, arm), []).append(got)
                        cpu_s.setdefault((scene, arm), []).append(time.process_time() - began)
                assert texts[0] == texts[1] == texts[2], f"{scene}: drafting has changed the text"
                told = [f"{arm} {each[-1]:.0f}" for (of, arm), each in rates.items() if of == scene]
                note(f"{scene}: {', '.join(told)} tokens/s")
        device.close()
    return rates, cpu_s


def against(samples: Samples, scene: str, arm: str) -> dict[str, float]:
    """Auto against the mean of both off; off again against off."""
    off = samples[scene, "off"]
    if arm == "auto":
        off = [(one + two) / 2 for one, two in zip(off, samples[scene, "again"], strict=True)]
    return paired(samples[scene, arm], off)


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
    parser.add_argument("--reps", type=int, default=40)
    parser.add_argument("--scene", choices=SCENES, help="this one alone")
    options = parser.parse_args()
    scenes = [options.scene] if options.scene else list(SCENES)
    rng = random.Random(1)
    texts = {"random": [rng.randrange(1 << 15) for _ in range(IDS)], "repeating": [i % 40 for i in range(IDS)]}
    found = {name: round(lookup_us(ids), 1) for name, ids in texts.items()}
    rates, cpu_s = run_loop(measure(options.reps, scenes))
    figures: dict[str, dict[str, float]] = {}
    for scene in scenes:
        figures[f"{scene}_x"] = against(rates, scene, "auto")
        figures[f"{scene}_noise"] = against(rates, scene, "again")
        figures[f"{scene}_cpu"] = against(cpu_s, scene, "auto")
        figures[f"{scene}_cpu_noise"] = against(cpu_s, scene, "again")
    told = {f"{scene} {arm}": spread(each) for (scene, arm), each in rates.items()}
    holds = {f"{scene}_x": figures[f"{scene}_x"]["median"] >= TARGET[f"{scene}_x"] for scene in scenes}
    holds["lookup_us"] = max(found.values()) <= TARGET["lookup_us"]
    return finish("drafting", {"tokens_per_s": told, **figures, "lookup_us": found}, TARGET, holds)


if __name__ == "__main__":
    sys.exit(main())
