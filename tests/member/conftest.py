"""A Town that several test files play in."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from manyhands.testing.clock import run_virtual
from manyhands.testing.tiny import make_tiny
from tests.member.members import Play, Town, town


@pytest.fixture(scope="session")
def four_layers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("llama", tmp_path_factory.mktemp("town") / "tiny", layers=4, seed=3)


@pytest.fixture
def play(four_layers: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Play:
    """Runs a scene with an empty Town of a model of four layers."""
    monkeypatch.setenv("MANYHANDS_HOME", str(tmp_path))

    def start(scene: Callable[[Town], Any]) -> Any:
        async def main() -> Any:
            async with town(four_layers, tmp_path) as place:
                return await scene(place)

        return run_virtual(main())

    return start
