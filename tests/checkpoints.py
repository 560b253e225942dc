"""Fixtures: tiny checkpoints, made once a session. Tests that change one copy it first."""

from pathlib import Path

import pytest

from manyhands.testing.tiny import make_tiny


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A manyhands home of its own for every test."""
    monkeypatch.setenv("MANYHANDS_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("llama", tmp_path_factory.mktemp("models") / "llama")


@pytest.fixture(scope="session")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same weights as `llama`, in several files."""
    return make_tiny("llama", tmp_path_factory.mktemp("models") / "sharded", max_shard_bytes=150_000)


@pytest.fixture(scope="session")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("qwen2", tmp_path_factory.mktemp("models") / "tied")
