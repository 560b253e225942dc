"""One tiny checkpoint for all tests of the API."""

from pathlib import Path

import pytest

from manyhands.testing.tiny import make_tiny


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six layers, random weights, a byte tokenizer."""
    return make_tiny("qwen3", tmp_path_factory.mktemp("api") / "qwen3", layers=6, seed=21)
