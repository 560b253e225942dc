"""langchain, litellm and pydantic-ai over a gateway of ours: their basic flows (flows.py), in a Python of their own.

Nightly: `pip` installs 80 packages (frameworks.lock). MANYHANDS_FRAMEWORKS names a Python that has them.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.api.served import MODEL
from tests.compat.conftest import Stage

HERE = Path(__file__).parent


def flows() -> list[str]:
    return re.findall(r"^@flow\ndef (\w+)", (HERE / "flows.py").read_text(), re.MULTILINE)


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A Python that has what the lock file names."""
    if told := os.environ.get("MANYHANDS_FRAMEWORKS"):
        return told
    folder = tmp_path_factory.mktemp("frameworks")
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    made = str(folder / "bin/python")
    install = [made, "-m", "pip", "install", "-q", "--no-deps", "-r", str(HERE / "frameworks.lock")]
    done = subprocess.run(install, capture_output=True, text=True, timeout=900)
    if done.returncode:
        pytest.skip(f"NOT RUN: the package index did not give what frameworks.lock names: {done.stderr[-300:]}")
    return made


@pytest.mark.nightly
def test_every_flow(stage: Stage, python: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [python, str(HERE / "flows.py"), stage.url, MODEL]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=900, env=environment)
    told = [json.loads(line) for line in ran.stdout.splitlines() if line.startswith("{")]
    assert [one["flow"] for one in told] == flows(), ran.stderr[-2000:]
    assert [one for one in told if one["wrong"]] == []
