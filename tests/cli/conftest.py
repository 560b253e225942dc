"""Tests of this folder have a home and tiny checkpoints (tests/checkpoints.py), and SIGHUP as on a terminal."""

import signal
from collections.abc import Iterator

import pytest

from tests.checkpoints import home, llama, sharded, tied

__all__ = ["home", "llama", "sharded", "tied"]


@pytest.fixture(autouse=True)
def sighup() -> Iterator[None]:
    """Not ignored, here and in what is started: as it is where the tests run under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)
