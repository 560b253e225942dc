"""One tiny checkpoint for all tests of the path of a token."""

from pathlib import Path

import pytest

from manyhands.testing.tiny import make_tiny


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("qwen3", tmp_path_factory.mktemp("generate") / "qwen3", seed=21)
