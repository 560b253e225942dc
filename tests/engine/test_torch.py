"""Every family and variant against transformers: fp32 logits, greedy ids, chunks and cache against one pass."""

from pathlib import Path
from typing import Any

import pytest

from manyhands.testing.tiny import EVERY_FAMILY
from tests.engine.oracle import Pair

PROMPT = [(37 * i * i + 11 * i) % 256 for i in range(40)]
# Of the largest logit: fp32 sums in other orders, over 4 layers.
TOLERANCE = 2e-5


@pytest.mark.parametrize("family", EVERY_FAMILY)
def test_a_family_computes_what_transformers_computes(family: str, tmp_path: Path) -> None:
    check(tmp_path, family, {})


def check(folder: Path, family: str, overrides: dict[str, Any]) -> None:
    pair = Pair(folder, family, overrides)
    ids = pair.greedy(PROMPT, 64, chunk=7)
    theirs = pair.theirs(ids)
    ours = pair.ours(ids, pair.span.new_cache(len(ids)))
    difference = float((ours - theirs).abs().max() / theirs.abs().max())
    assert difference < TOLERANCE
    assert ids[len(PROMPT) :] == theirs.argmax(-1)[len(PROMPT) - 1 : -1].tolist()
