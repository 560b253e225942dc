"""The examples run as they are printed in their own docstrings: by themselves, with a tiny model or tales."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"


def run(name: str, home: Path) -> str:
    """stdout of an example; warnings are errors there too."""
    done = subprocess.run(
        [sys.executable, "-W", "error", str(EXAMPLES / name)],
        env={**os.environ, "MANYHANDS_HOME": str(home)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr.decode(errors="replace")[-2000:]
    return done.stdout.decode(errors="replace")


@pytest.mark.slow
def test_library(tmp_path: Path) -> None:
    said = run("library.py", tmp_path)
    assert [line.split(" (")[0] for line in said.splitlines() if line.startswith("layers")] == [
        "layers 0-1 on n0",
        "layers 2-3 on n1",
        "layers 4-5 on n2",
    ]
    assert "exactness E0" in said


@pytest.mark.nightly  # what it shows, the two others and docs/testing.md start every day
@pytest.mark.slow
def test_two_nodes(tmp_path: Path) -> None:
    said = run("two_nodes.py", tmp_path)
    assert "layers 0-2 on node-0" in said
    assert "layers 3-5 on node-1" in said
    assert "(data)" in said


@pytest.mark.slow
def test_python(tmp_path: Path) -> None:
    said = run("python.py", tmp_path)
    assert "layers 0-5 on node-0" in said and "layers 6-11 on node-1" in said
    assert ", and a great many people" in said
    assert "3 answers, 24 tokens" in said and "finish: cancelled" in said


def test_every_example_is_tested_and_short() -> None:
    scripts = sorted(EXAMPLES.glob("*.py"))
    assert [script.name for script in scripts] == ["library.py", "python.py", "two_nodes.py"]
    assert all(len(script.read_text("utf8").splitlines()) < 60 for script in scripts)
