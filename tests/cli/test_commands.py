"""The table of commands: help without loading them, each loaded by its name."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from manyhands.cli import app
from manyhands.cli.commands import COMMANDS, LazyCommands
from manyhands.cli.sections import SECTIONS
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


@pytest.mark.parametrize("name", ["up", "join", "serve", "local", "chat", "infer", "plan", "benchmark"])
def test_help_shows_each_option_once_in_a_section(name: str) -> None:
    command = LazyCommands()[name]
    lines = CliRunner().invoke(app, [name, "--help"], terminal_width=200).output.splitlines()
    headings = [line.removesuffix(":") for line in lines if line.endswith(":") and not line.startswith(" ")]
    assert headings == [section for section in ("Arguments", "Options", *SECTIONS) if section in headings]
    shown = [line.split()[0].rstrip(",") for line in lines if line.startswith("  -")]
    assert sorted(shown) == sorted([*(each.opts[0] for each in command.params if _is_shown(each)), "-h"])


@pytest.mark.parametrize("name", ["model", "ticket", "service", "workers", "key"])
def test_help_of_a_group_is_whole_and_in_our_words(name: str) -> None:
    """No line of its list is cut off, and no argument has a type of Python's."""
    text = CliRunner().invoke(app, [name, "--help"], terminal_width=80).output
    assert "..." not in text.partition("\nCommands:\n")[2]
    for each in LazyCommands()[name].commands:
        told = CliRunner().invoke(app, [name, each, "--help"], terminal_width=80).output
        assert "Options:" in told and not re.search(r"<\w", told)


def _is_shown(parameter: Any) -> bool:
    return parameter.param_type_name == "option" and not parameter.hidden


def test_sections_name_options_that_there_are() -> None:
    """And each in one section."""
    named = [f"--{option}" for options in SECTIONS.values() for option in options]
    commands = [LazyCommands()[name] for name in ("up", "serve", "local")]
    assert set(named) <= {name for command in commands for each in command.params for name in each.opts}
    assert len(set(named)) == len(named)


@pytest.mark.parametrize("width", [60, 80])
def test_help_has_sections_for_what_few_need(width: int) -> None:
    text = CliRunner().invoke(app, ["up", "--help"], terminal_width=width).output
    options, layers, network = (text.index(f"\n{name}:\n") for name in ("Options", "Layers", "Network"))
    assert options < text.index("  --api ") < layers < text.index("  --memory ") < network < text.index("  --listen ")


@pytest.mark.parametrize("command", ["up", "local", "serve", "plan"])
def test_a_name_that_can_be_no_model_is_refused_before_anything_is_begun(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MANYHANDS_HOME", str(tmp_path / "home"))
    found = CliRunner().invoke(app, [command, "/no/such/folder"])
    assert isinstance(found.exception, ModelError) and "there is no '/no/such/folder': name" in str(found.exception)
    assert not (tmp_path / "home").exists()
