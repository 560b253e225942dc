"""Families over whole routes: rings and stars, ends at the origin and at the edges, say what one node alone says.

Layers of each family are compared bit by bit elsewhere (tests/model/test_exactness.py, tests/engine/test_golden.py).
"""

import asyncio
from pathlib import Path

import pytest

from manyhands.core import EndsAt, PathKind, SamplingParams
from manyhands.testing.tiny import FAMILIES, make_tiny
from tests.origin.scenes import PROMPT, ids_of, play, swarm_of

# The plain one; norms before and after, a window; experts; latent attention; sinks.
ALWAYS = ("llama", "gemma2", "qwen3_moe", "deepseek_v3", "gpt_oss")
NIGHTLY = tuple(family for family in FAMILIES if family not in ALWAYS)
GREEDY = SamplingParams(max_tokens=6, ignore_eos=True)
HOT = SamplingParams(max_tokens=6, ignore_eos=True, temperature=0.9, seed=3, top_p=0.95, presence_penalty=0.3)


@pytest.mark.parametrize("family", [*ALWAYS, *(pytest.param(family, marks=pytest.mark.nightly) for family in NIGHTLY)])
def test_a_family_says_the_same_on_every_path_with_the_ends_anywhere(family: str, tmp_path: Path) -> None:
    folder = make_tiny(family, tmp_path / "tiny", layers=4, seed=9)

    async def said(cut: str, ends: EndsAt, paths: tuple[PathKind, ...]) -> list[list[int]]:
        async with swarm_of(folder, cut, ends=ends) as swarm:
            asked = [(path, params) for path in paths for params in (GREEDY, HOT)]
            return list(await asyncio.gather(*(ids_of(swarm, PROMPT, params, path=path) for path, params in asked)))

    alone = play(lambda: said("0-3", "origin", ("ring",)))
    assert alone[0] != alone[1] and all(len(ids) == 6 for ids in alone)
    for ends in ("origin", "edges"):
        assert play(lambda: said("0-0,1-2,3-3", ends, ("ring", "star"))) == alone * 2, ends  # noqa: B023


def test_the_default_tier_has_five_families() -> None:
    assert len(ALWAYS) >= 5 and set(ALWAYS) <= set(FAMILIES)
