"""What a ring and each way of drafting win over a wide area network that is emulated on this machine (testing/wan.py).

tales is cut over six nodes of this process; a message takes 22 to 75 ms from one to the next, with jitter. Compute,
protocol and engine are real. Arms take turns, so that what slows the machine slows all alike.
"""

import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from itertools import count

from manyhands import tales
from manyhands.core import PathKind, SamplingParams
from manyhands.net.transport import Transport
from manyhands.origin import Origin
from manyhands.origin.depth import Acceptance
from manyhands.origin.draft import AutoDrafter
from manyhands.origin.draft_model import DraftModel
from manyhands.testing.swarm import memory_swarm
from manyhands.testing.wan import WanProfile, WanTransport
from manyhands.worker.execute import Device

CUT = "0-1,2-3,4-5,6-7,8-9,10-11"
LEGS_MS = (30, 41, 75, 52, 60, 35, 22)  # from each of the six nodes, and from the origin
JITTER = 0.05
PROMPT = "Once upon a time there was a king who had three sons, and"
LENGTHS = {"star": 40, "plain": 40, "suffix": 60, "auto": 140, "known": 500, "wrong": 40}
TOLD = {
    "star": "no drafts, each hop's rows by way of the origin",
    "plain": "no drafts, from hop to hop",
    "suffix": "drafts from repeated text",
    "auto": "and from tales' drafter",
    "known": "as if the text were a quotation (an oracle drafts)",
    "wrong": "as if nothing could be guessed (every draft is wrong)",
}


class KnownText:
    """A ModelSource for which the answer is known, or (`is_right` false) always guessed wrong."""

    trouble = ""
    draft_s = 0.0

    def __init__(self, ids: Sequence[int], *, is_right: bool) -> None:
        self._ids, self._is_right = ids, is_right

    def begin(self, wake: Callable[[], None]) -> None:
        return

    def restart(self, ids: Sequence[int]) -> None:
        return

    def take(self, start: int, most: int, wanted: int) -> Sequence[int]:
        ids = self._ids[start : start + most]
        return ids if self._is_right else [(i + 1) % 256 for i in ids]

    def close(self) -> None:
        return


@dataclass(slots=True)
class Rung:
    """The samples of one arm: tokens per second after the first, and tokens per traversal of the route."""

    rates: list[float] = field(default_factory=list)
    each: list[float] = field(default_factory=list)
    verdict: str = ""


@asynccontextmanager
async def far_origin() -> AsyncIterator[Origin]:
    """An origin of tales and its drafter, LEGS_MS away from six nodes."""
    numbers = count()

    def far(transport: Transport) -> Transport:
        leg_s = LEGS_MS[next(numbers)] / 1e3
        return WanTransport(transport, WanProfile(leg_s * (1 - JITTER), 2 * JITTER * leg_s, seed=7))

    async with AsyncExitStack() as stack:
        swarm = await stack.enter_async_context(memory_swarm(tales.model_path(), CUT, wrap=far))
        device, old = Device.start(1), swarm.origin
        stack.callback(device.close)
        drafter = DraftModel(tales.drafter_path(), "the drafter of tales", tales.model_path())
        yield Origin(old.node, old.model, device, swarm.addrs, None, drafter)


async def climb(temperature: float, reps: int, note: Callable[[str], None]) -> dict[str, Rung]:
    """The samples of every arm. `note` is called with each."""
    rungs = {name: Rung() for name in LENGTHS}
    async with far_origin() as origin:
        prompt = origin.model.encode(PROMPT)
        for seed in range(1, reps + 1):
            known = await _known(origin, prompt, temperature, seed)
            for name, rung in rungs.items():
                await _measure(origin, name, rung, known, temperature, seed)
                note(f"{name}: {rung.rates[-1]:.2f} tokens/s, {TOLD[name]} ({rung.verdict})")
    return rungs


async def _known(origin: Origin, prompt: Sequence[int], temperature: float, seed: int) -> list[int]:
    """Prompt and answer, computed here alone, as any route computes them."""
    async with memory_swarm(tales.model_path(), "0-11") as near:
        params = SamplingParams(max_tokens=max(LENGTHS.values()), temperature=temperature, seed=seed, ignore_eos=True)
        answer = await near.origin.complete(near.origin.request_ids(prompt, params))
        return [*prompt, *answer.token_ids]


async def _measure(origin: Origin, name: str, rung: Rung, known: Sequence[int], temperature: float, seed: int) -> None:
    num_tokens = LENGTHS[name]
    params = SamplingParams(max_tokens=num_tokens, temperature=temperature, seed=seed, ignore_eos=True)
    prompt = known[: len(known) - max(LENGTHS.values())]
    answer = origin.answer(origin.request_ids(prompt, params))
    drafter = None
    if name in ("known", "wrong"):
        model = KnownText(known, is_right=name == "known")
        drafter = AutoDrafter(Acceptance(), model=model, copies=False)
    draft = name if name in ("suffix", "auto") else "off"
    path: PathKind = "star" if name == "star" else "ring"
    at = [time.monotonic() async for _ in origin.stream(answer, draft=draft, drafter=drafter, path=path)]
    assert answer.token_ids == known[len(prompt) :][:num_tokens], f"{name}: drafting has changed the text"
    rung.rates.append((num_tokens - 1) / (at[-1] - at[0]))
    rung.each.append(answer.drafting.tokens_per_traversal or 0.0)
    rung.verdict = answer.drafting.verdict


def _note(line: str) -> None:
    sys.stderr.write(line + "\n")


def main() -> None:
    """Print the rates of one turn, and how often they are plain decoding's; with --json as one object."""
    rungs = asyncio.run(climb(0.7, 1, _note))
    plain = rungs["plain"].rates[-1]
    told = {
        name: {"tokens_per_s": round(r.rates[-1], 2), "x": round(r.rates[-1] / plain, 2)} for name, r in rungs.items()
    }
    if "--json" in sys.argv:
        sys.stdout.write(json.dumps(told) + "\n")
        return
    for name, figures in told.items():
        sys.stdout.write(f"{figures['tokens_per_s']:7.1f} tokens/s  {figures['x']:6.2f} x  {TOLD[name]}\n")


if __name__ == "__main__":
    main()
