"""The table of commands: help without loading them, each loaded by its name."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from manyhands.cli import app
from manyhands.cli.commands import COMMANDS, LazyCommands
from manyhands.errors import ModelError


def test_help_lists_every_command_and_imports_none() -> None:
    """What keeps `manyhands --help` quick: the table says what each command does, and only the one called is loaded."""
    code = (
        "import sys; from manyhands.cli import app; from typer.testing import CliRunner\n"
        "text = CliRunner().invoke(app, ['--help']).output\n"
        "from manyhands.cli.commands import COMMANDS\n"
        "assert all(f'  {name} ' in text for name in COMMANDS), text\n"
        "print(*(name for name in COMMANDS if f'manyhands.cli.{name}' in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == ""


@pytest.mark.parametrize(
    "words",
    [
        ["nosuch"],
        ["up", "--nosuch"],
        ["up", "nomodel"],
        ["local", "tales", "--nodes", "x"],
        ["join", "nothing"],
        ["serve", "tales", "--layers", "x"],
        ["infer"],
        ["plan", "nomodel"],
        ["status"],
        ["jobs", "-n", "0"],
        ["model", "inspect", "nomodel"],
        ["key", "nosuch"],
    ],
    ids=" ".join,
)
def test_an_error_needs_no_heavy_library(words: list[str], tmp_path: Path) -> None:
    """What keeps errors at 0.2 s of CPU: none of these is loaded to say what is wrong with a command line."""
    heavy = ("pydantic", "numpy", "asyncio", "rich", "cryptography", "huggingface_hub", "torch", "fastapi")
    code = (
        "import atexit, sys; from manyhands.cli import main\n"
        f"atexit.register(lambda: print(*(name for name in {heavy!r} if name in sys.modules)))\n"
        f"sys.argv = ['manyhands', *{words!r}]; main()"
    )
    environment = {**os.environ, "MANYHANDS_HOME": str(tmp_path), "MANYHANDS_API": "http://127.0.0.1:1"}
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert found.returncode in (1, 2) and found.stderr
    assert found.stdout.split() == []


@pytest.mark.parametrize("name", COMMANDS)
def test_each_command_of_the_table_is_there(name: str) -> None:
    command = LazyCommands()[name]
    assert command.name == name and command.help


@pytest.mark.parametrize("command", ["up", "local", "serve", "plan"])
def test_a_name_that_can_be_no_model_is_refused_before_anything_is_begun(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MANYHANDS_HOME", str(tmp_path / "home"))
    found = CliRunner().invoke(app, [command, "/no/such/folder"])
    assert isinstance(found.exception, ModelError) and "'/no/such/folder' is no folder" in str(found.exception)
    assert not (tmp_path / "home").exists()
