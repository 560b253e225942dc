"""The engine's library, built in place where it is missing or older than its sources; one torch thread for the oracle."""

import fcntl
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from manyhands.engine import library
from manyhands.engine.library import Team
from tests.engine.cuda_host import HostDevice

ROOT = Path(__file__).parents[2]
NATIVE = ROOT / "src/manyhands/engine/native"


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """These models are too small for more, and others wait for the other core."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session", autouse=True)
def built() -> None:
    path = NATIVE.parent / "_native.so"
    newest = max(source.stat().st_mtime for source in NATIVE.iterdir())
    with (ROOT / "setup.py").open() as setup:
        fcntl.flock(setup, fcntl.LOCK_EX)  # pytest may run in several processes
        if not path.exists() or path.stat().st_mtime < newest:
            command = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
            assert done.returncode == 0, done.stderr[-2000:]
    library.load()


@pytest.fixture
def team() -> Team:
    return Team(4)


@pytest.fixture
def device() -> Iterator[HostDevice]:
    """A GPU made of this CPU. After the test: no kernel wrote outside the memory that it was given, or after it was dropped."""
    made = HostDevice()
    yield made
    assert all(memory.is_whole() for memory in made.memories)
