"""Containerfile and compose.yaml say what the command, the model and the tree have, and the nodes' addresses and scope fit.

Nothing is built here: tests/test_container_image.py (nightly) builds the image and runs the nodes.
"""

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer.main

from manyhands.cli import app
from manyhands.core import Span
from manyhands.swarm.members import is_local

ROOT = Path(__file__).parents[1]
yaml: Any = pytest.importorskip("yaml", reason="LOUD: PyYAML is not installed: compose.yaml is not read")


def services() -> dict[str, dict[str, Any]]:
    told: dict[str, dict[str, Any]] = yaml.safe_load((ROOT / "compose.yaml").read_text("utf8"))["services"]
    return told


def manyhands_command(service: dict[str, Any]) -> list[str]:
    """The words of the manyhands command that a service runs, whether by itself or by a shell."""
    command = service["command"]
    text = command if isinstance(command, str) else command[0].partition("exec manyhands ")[2].partition("<")[0]
    return shlex.split(text)


def test_every_service_runs_a_command_that_exists() -> None:
    commands: Any = typer.main.get_command(app)
    for name, service in services().items():
        words = manyhands_command(service)
        known = {option for param in commands.commands[words[0]].params for option in param.opts}
        given = {word for word in words if word.startswith("--")}
        assert given <= known, (name, given - known)
        assert words[words.index("--name") + 1] == name == service["hostname"]
        host = words[words.index("--advertise") + 1].partition(":")[0]
        assert is_local(host) or words[words.index("--scope") + 1] == "public", "its name would not be admitted"


def test_the_nodes_cover_tales() -> None:
    config = (ROOT / "src/manyhands/tales/data/main/config.json").read_text("utf8")
    num_layers = int(re.findall(r'"num_hidden_layers": (\d+)', config)[0])
    words = [manyhands_command(service) for service in services().values()]
    spans = [Span.parse(command[command.index("--layers") + 1]) for command in words]
    assert len(spans) == 3
    assert [layer for span in spans for layer in range(span.start, span.end)] == list(range(num_layers))


def test_the_api_is_published_on_loopback_alone() -> None:
    for service in services().values():
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", ()))


def test_what_the_image_copies_is_there() -> None:
    lines = (ROOT / "Containerfile").read_text("utf8").splitlines()
    copied = [line.split()[1:-1] for line in lines if line.startswith("COPY ") and "--from" not in line]
    sources = [source for words in copied for source in words]
    assert "src" in sources and all((ROOT / source).exists() for source in sources)
    assert [line.split()[0] for line in lines if line.startswith("USER")] == ["USER"]
