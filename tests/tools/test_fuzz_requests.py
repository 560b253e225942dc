"""tools/fuzz_requests.py: lives of requests hold, can be lived again, and show what is planted."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from manyhands.origin import repair_plan
from manyhands.testing.tiny import make_tiny
from manyhands.worker.owners import Owners
from tests.kill import Models, kept_models
from tools.fuzz_requests import lived
from tools.request_faults import LAYERS
from tools.request_lives import Life

SEEDS = range(2000, 2020)  # a planted defect shows in one of these lives, mostly in the first or second


@pytest.fixture(scope="module")
def models() -> Iterator[Models]:
    with kept_models() as models:
        yield models


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("qwen3", tmp_path_factory.mktemp("lives") / "qwen3", seed=4, layers=LAYERS)


def found(folder: Path, models: Models) -> list[str]:
    """The problems of the first life that has some."""
    return next((life.problems for life in (lived(seed, folder, models) for seed in SEEDS) if life.problems), [])


def test_a_life_holds_and_can_be_lived_again(folder: Path, models: Models) -> None:
    def outcomes(life: Life) -> list[Any]:
        assert not life.problems and life.tally["tokens"]
        return [life.told, list(map(str, life.asked)), life.tally]

    for seed in SEEDS[:2]:
        assert outcomes(lived(seed, folder, models)) == outcomes(lived(seed, folder, models))


def test_a_replay_that_leaves_a_position_out_is_found(
    folder: Path, models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = repair_plan._instruct

    def short(*args: Any, **more: Any) -> repair_plan.Slot:
        slot = plain(*args, **more)
        return replace(slot, replay_until=max(0, slot.replay_until - 1))

    monkeypatch.setattr(repair_plan, "_instruct", short)
    assert found(folder, models)


def test_what_is_not_given_back_is_found(folder: Path, models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Owners, "release", lambda owners, session: None)
    assert any("owners are left" in problem for problem in found(folder, models))
