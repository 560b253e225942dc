"""Fixtures: tiny checkpoints of six layers, made once a session. Tests that change one copy it first."""

from pathlib import Path

import pytest

from manyhands.checkpoint.folder import read_entries
from manyhands.checkpoint.manifest import build_manifest
from manyhands.checkpoint.partition import needed_tensors
from manyhands.core import Span
from manyhands.testing.tiny import make_tiny

SPAN = Span(2, 4)  # the layers that most tests fetch


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


def check_holds(folder: Path, source: Path, span: Span | None = SPAN, with_ends: bool = False) -> set[str]:
    """`folder` holds the tensors of the span byte for byte; returns the names of all that it holds."""
    entries = {entry.name: entry for entry in read_entries(folder)}
    originals = {entry.name: entry for entry in read_entries(source)}
    for name in needed_tensors(originals, 6, span, with_ends):
        one, two = entries[name], originals[name]
        assert (folder / one.file).read_bytes()[one.start : one.end] == (
            (source / two.file).read_bytes()[two.start : two.end]
        )
    assert build_manifest(folder).id == build_manifest(source).id
    return set(entries)
