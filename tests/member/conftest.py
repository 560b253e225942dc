"""A Town that several test files play in."""

from pathlib import Path

import pytest

from manyhands.testing.tiny import make_tiny
from tests.member.members import Play, player


@pytest.fixture(scope="session")
def four_layers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("llama", tmp_path_factory.mktemp("town") / "tiny", layers=4, seed=3)


@pytest.fixture
def play(four_layers: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Play:
    """A player with a model of four layers."""
    monkeypatch.setenv("MANYHANDS_HOME", str(tmp_path))
    return player(four_layers, tmp_path)
