"""The kill matrix: whatever dies, whenever: the text is what it would have been. Under the virtual clock.

hop x phase x path x requests in flight x temperature; then other ways of losing and replacing hops, by name.
"""

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from manyhands.core import PathKind
from manyhands.testing.faults import PHASES, Phase
from manyhands.testing.tiny import make_tiny
from tests.kill import Bench, Scene, kept_models

# A kill is noticed at once and spares are at hand: in virtual time, where computing takes none, nothing may take longer.
DEADLINE_S = 1.0
# How many messages of a phase reach a hop before it dies: some way into it.
SKIP: dict[Phase, int] = {"opening": 0, "prefill": 1, "decode": 7, "window": 2, "replay": 0}


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    with kept_models() as models:
        yield Bench(make_tiny("qwen3", tmp_path_factory.mktemp("kill") / "qwen3", seed=21), models)


async def ask(bench: Bench, scene: Scene, kind: str, count: int, path: PathKind, drafts: bool = False) -> None:
    """`count` requests at once, all as undisturbed, within the deadline."""

    def options(number: int) -> dict[str, Any]:
        return {"path": path, **({"drafter": bench.half_right(kind, number)} if drafts else {})}

    async with asyncio.timeout(DEADLINE_S):
        got = await asyncio.gather(*(scene.ask(kind, number, **options(number)) for number in range(count)))
    assert got == [bench.wanted[kind, number] for number in range(count)]


def arm(scene: Scene, phase: Phase, victim: int) -> None:
    """Kill hop `victim` in `phase`. In a replay: first it while decoding, then the hop after it while that is repaired."""
    node = scene.hops[victim]
    if phase == "replay":
        scene.faults.at("decode", node, lambda: scene.faults.die(node), SKIP["decode"])
        second = scene.hops[(victim + 1) % 3]
        scene.faults.at("replay", second, lambda: scene.faults.die(second))
    else:
        scene.faults.at(phase, node, lambda: scene.faults.die(node), SKIP[phase])


def test_the_undisturbed_answers_differ(bench: Bench) -> None:
    """Else equality would prove little."""
    assert len({tuple(ids) for ids in bench.wanted.values()}) == 6
    assert all(len(set(ids)) > 5 for ids in bench.wanted.values())


@pytest.mark.parametrize("path", ["ring", "star"])
@pytest.mark.parametrize("victim", [0, 1, 2])
@pytest.mark.parametrize("phase", PHASES)
def test_any_hop_may_die_in_any_phase(bench: Bench, phase: Phase, victim: int, path: PathKind) -> None:
    """With one and with three requests in flight, greedy and hot."""

    async def main() -> None:
        for count in (1, 3):
            for kind in ("greedy", "hot"):
                async with bench.scene() as scene:
                    arm(scene, phase, victim)
                    await ask(bench, scene, kind, count, path, drafts=phase == "window")
                    assert len(scene.faults.fired) == (2 if phase == "replay" else 1), "it did happen"

    bench.play(main)
