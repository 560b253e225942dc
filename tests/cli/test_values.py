"""Values of options without pydantic: what is read, what is refused, and that every option of every command is one of these."""

import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import pytest
import typer
from typer.testing import CliRunner

from manyhands.cli import app
from manyhands.cli.commands import COMMANDS, LazyCommands, with_subcommands
from manyhands.cli.values import PlainReader


def parameters(command: Any) -> Iterator[Any]:
    for each in with_subcommands(command):
        yield from each.get_params(typer.Context(each))


@pytest.mark.parametrize("name", COMMANDS)
def test_every_parameter_of_every_command_is_read_without_pydantic(name: str) -> None:
    for parameter in parameters(LazyCommands()[name]):
        assert isinstance(parameter._runtime_param, PlainReader), (parameter.name, parameter.type_descriptor)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_parameter_says_what_it_is_without_types_of_pythons(name: str) -> None:
    for parameter in parameters(LazyCommands()[name]):
        assert parameter.help or parameter.hidden, (name, parameter.name)
    said = CliRunner().invoke(app, [name, "--help"]).stdout.partition("Options:")[2]
    assert said and not re.search(r"<(str|int|float|path|list)", said)


@pytest.mark.parametrize("words", [[], *([name] for name in COMMANDS), ["model", "inspect"], ["serve", "tales"]])
def test_help_has_a_short_form_everywhere(words: list[str]) -> None:
    long, short = (CliRunner().invoke(app, [*words, option]) for option in ("--help", "-h"))
    assert long.exit_code == short.exit_code == 0
    assert long.stdout == short.stdout and "Usage:" in short.stdout and "-h" in short.stdout


def test_a_required_argument_stands_in_the_usage_line_as_in_our_pages() -> None:
    assert re.search(r"up \[OPTIONS\] MODEL\n", CliRunner().invoke(app, ["up", "--help"]).stdout)
    assert re.search(r"chat \[OPTIONS\] \[MODEL\]\n", CliRunner().invoke(app, ["chat", "--help"]).stdout)


@pytest.mark.parametrize(
    ("kind", "text", "value"),
    [
        (str, "", ""),
        (int, "7", 7),
        (int, "-7", -7),
        (int, 7.0, 7),
        (float, "1e3", 1000.0),
        (Path, "a/b", Path("a/b")),
        (bool, "on", True),
        (bool, "No", False),
        (bool, "", False),
        (str, None, None),
    ],
)
def test_what_is_read(kind: type, text: Any, value: Any) -> None:
    assert PlainReader(kind, False).coerce(text, None, None) == value


@pytest.mark.parametrize(
    ("reader", "text", "why"),
    [
        (PlainReader(int, False), "x", "'x' is not a whole number"),
        (PlainReader(int, False), "1.5", "'1.5' is not a whole number"),
        (PlainReader(int, False), 1.5, "1.5 is not a whole number"),
        (PlainReader(int, False), math.inf, "inf is not a whole number"),
        (PlainReader(int, False), "9" * 5000, "is not a whole number"),
        (PlainReader(float, False), "fast", "'fast' is not a number"),
        (PlainReader(int, False, 1, 9), "0", "0 is less than 1"),
        (PlainReader(int, False, 1, 9), "10", "10 is more than 9"),
        (PlainReader(float, False, 0), "nan", "nan is less than 0"),
        (PlainReader(bool, False), "maybe", "'maybe' is neither true nor false"),
        (PlainReader(int, True), ["1", "x"], "'x' is not a whole number"),
    ],
)
def test_what_is_refused_is_named(reader: PlainReader, text: Any, why: str) -> None:
    with pytest.raises(typer.BadParameter, match=why):
        reader.coerce(text, None, None)


def test_lists_come_from_the_command_line_the_environment_and_the_configuration() -> None:
    reader = PlainReader(str, True)
    assert reader.coerce(("a", "b"), None, None) == ["a", "b"]
    assert reader.coerce("alone", None, None) == ["alone"]
    assert reader.coerce(None, None, None) == [] == reader.coerce((), None, None)


def test_a_wrong_value_names_the_option() -> None:
    found = CliRunner().invoke(app, ["local", "tales", "--nodes", "many"])
    assert found.exit_code == 2 and "Invalid value for '--nodes': 'many' is not a whole number" in found.output


def test_a_type_that_is_not_ours_keeps_typers_reader() -> None:
    """Its own parsers, for example: a command that needs one gets it, and what pydantic costs."""
    from manyhands.cli.values import read_plainly

    one = typer.Typer(add_completion=False)

    @one.command()
    def run(pair: Annotated[tuple[int, int], typer.Option()] = (1, 2)) -> None:
        typer.echo(repr(pair))

    command = typer.main.get_command(one)
    read_plainly(command)
    assert CliRunner().invoke(one, ["--pair", "3", "4"]).output == "(3, 4)\n"
    assert {p.name: p._runtime_param is None for p in command.params} == {"pair": True}  # type: ignore[attr-defined]
