"""--memory is what a process comes to hold, within a tenth, or it is refused with the numbers. Real processes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from manyhands.core import Span
from manyhands.place.shape import look_up
from manyhands.testing.tiny import make_tiny
from tests.nightly import daily
from tests.place import resident

MB = 1_000_000
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads resident memory from /proc"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights of 140 MB."""
    return make_tiny("llama", tmp_path_factory.mktemp("resident") / "model", layers=8, hidden=1024, vocab=4096)


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    return {**os.environ, "MANYHANDS_HOME": str(tmp_path / "home")}


def test_a_node_that_uses_all_of_its_memory_holds_what_it_was_given(folder: Path, env: dict[str, str]) -> None:
    given = 800 * MB
    command = [sys.executable, resident.__file__, str(folder), str(given)]
    told = json.loads(subprocess.run(command, env=env, capture_output=True, check=True, timeout=180).stdout)
    assert told["caches"] > 5 and told["logs"] > 10 * MB, "it was filled"
    assert 0.9 * given <= told["resident"] <= 1.1 * given, told


def test_a_member_at_rest_holds_what_is_counted(folder: Path, env: dict[str, str], tmp_path: Path) -> None:
    command = [sys.executable, "-m", "manyhands.cli", "up", str(folder), "--layers", "0-7", "--memory", "1GB", "--json"]
    with subprocess.Popen(
        [*command, "--listen", "127.0.0.1:0", "--api", "127.0.0.1:0"], env=env, stdout=subprocess.PIPE
    ) as process:
        try:
            assert process.stdout is not None
            assert any(b'"api"' in line for line in process.stdout), "it serves"
            status = Path(f"/proc/{process.pid}/status").read_text()
        finally:
            process.kill()
    held = int(status.split("VmRSS:")[1].split()[0]) * 1024
    shape = look_up(str(folder), "bf16", tmp_path).shape
    counted = shape.process_bytes + shape.ends_bytes + shape.span_bytes(Span(0, 8), 0)
    assert 0.9 * counted <= held <= 1.1 * counted, (held, counted)


@pytest.mark.parametrize("memory", daily(["270MB"], ["100MB", "200MB"]))
def test_what_cannot_be_kept_is_refused_with_the_numbers(folder: Path, env: dict[str, str], memory: str) -> None:
    free = ["--listen", "127.0.0.1:0", "--api", "127.0.0.1:0"]
    command = [sys.executable, "-m", "manyhands.cli", "up", str(folder), "--layers", "0-7", "--memory", memory, *free]
    ended = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert ended.returncode != 0
    said = " ".join(ended.stderr.split())
    assert f"--memory is {memory[:-2]} MB" in said and "take" in said and "Traceback" not in said, said
