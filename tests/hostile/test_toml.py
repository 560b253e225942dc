"""TOML of others: ./manyhands.toml lies in whatever folder a command is run in, and lists of machines are handed around."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import typer
from typer.core import TyperCommand
from typer.testing import CliRunner

from manyhands import toml_file
from manyhands.cli import app
from manyhands.cli import plan as plan_command
from manyhands.config_file import NAME
from manyhands.errors import BadRequest, ManyhandsError
from manyhands.place.machines import MAX_MACHINES, read_machines_file
from manyhands.place.measure import read_measured
from manyhands.swarm.identity import NodeKey
from manyhands.toml_file import MAX_BYTES, MAX_DOTS, read_toml
from tests.hostile.odd_files import circle, device, holes


def pipe(path: Path) -> None:
    os.mkfifo(path)


def link_to_a_pipe(path: Path) -> None:
    """It is a link, so it is the configuration of the folder."""
    os.mkfifo(path.with_name("pipe"))
    path.symlink_to("pipe")


def deep(path: Path) -> None:
    path.write_bytes(b"x = " + b"[" * 200_000)


def dotted(path: Path) -> None:
    """tomllib takes 135 s for a key of 60,000 parts."""
    path.write_text("a." * 60_000 + "a = 1")


def digits(path: Path) -> None:
    """Python shows no number of more than 4,300 digits, also not in an error: a ValueError."""
    path.write_text(
        f"[worker]\nmax_sessions = 0x{'f' * 5000}\n[[machine]]\nname = 'a'\nmemory = 1\nlayer_ms = 0x{'f' * 5000}"
    )


KINDS = [pipe, link_to_a_pipe, device, circle, Path.mkdir, holes, deep, dotted, digits]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_whatever_the_file_is_it_is_one_line(
    kind: Callable[[Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A command in a folder with such a ./manyhands.toml hung, or ended with a traceback."""
    kind(tmp_path / NAME)
    with pytest.raises(BadRequest) as refused:
        read_machines_file(tmp_path / NAME)
    assert NAME in str(refused.value) and len(str(refused.value)) < 500 and str(refused.value).isprintable()
    if kind is not pipe:  # which is no file, so no configuration
        monkeypatch.setenv("MANYHANDS_HOME", str(tmp_path / "home"))
        monkeypatch.chdir(tmp_path)
        done = CliRunner().invoke(app, ["list"])
        assert isinstance(done.exception, BadRequest) and NAME in str(done.exception)


def test_the_bounds_are_where_they_are_said_to_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.toml"
    path.write_text("a." * MAX_DOTS + "a = 1\nb = 0x7fffffffffffffff")
    assert read_toml(path)["b"] == (1 << 63) - 1
    for text in ("a." * (MAX_DOTS + 1) + "a = 1", "a = 0x8000000000000000", "a = [{b = [-9223372036854775809]}]"):
        path.write_text(text)
        with pytest.raises(BadRequest, match=r"at most (512|64) are read"):
            read_toml(path)
    path.write_text("#" * MAX_BYTES)
    assert read_toml(path) == {}
    path.write_text("#" * (MAX_BYTES + 1))
    monkeypatch.setattr(toml_file, "_check_lines", lambda *_: pytest.fail("it was read"))
    with pytest.raises(BadRequest, match=f"at most {MAX_BYTES} are read"):
        read_toml(path)


def test_more_machines_than_are_planned_for_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.toml"
    table = "[[machine]]\nname = 'm'\nmemory = 1\nlayer_ms = 1\n"
    path.write_text(table * (MAX_MACHINES + 1))
    with pytest.raises(BadRequest, match=f"lists {MAX_MACHINES + 1} machines; at most {MAX_MACHINES} are planned for"):
        read_machines_file(path)
    path.write_text(table * MAX_MACHINES)
    assert len(read_machines_file(path)["machine"]) == MAX_MACHINES


def test_a_machine_is_called_by_its_name_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """[/x] ended the command by a MarkupError, [bold] was not shown."""
    monkeypatch.setenv("MANYHANDS_HOME", str(tmp_path / "home"))
    path = tmp_path / "m.toml"
    for name in ("[/x]", "[bold]"):
        path.write_text(f'[[machine]]\nname = "{name}"\nmemory = "8GB"\nlayer_ms = 1\n')
        plan_command.plan(typer.Context(TyperCommand("plan")), "tales", machines=path)
        assert capsys.readouterr().out.count(name) >= 4


@pytest.mark.parametrize("kind", [pipe, device, circle, Path.mkdir, holes], ids=lambda kind: kind.__name__)
def test_files_of_the_home_are_not_waited_for(
    kind: Callable[[Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MANYHANDS_HOME", str(tmp_path))
    for name in ("keys.json", "swarm.ticket", "node.key", "measured.json", "run/a.json", "run/a.pid"):
        (tmp_path / "run").mkdir(exist_ok=True)
        kind(tmp_path / name)
    for command in ("key list", "ticket show", "stop"):
        done = CliRunner().invoke(app, command.split())
        assert done.exit_code and isinstance(done.exception, ManyhandsError), (command, done.exception)
        assert str(done.exception).isprintable()
    with pytest.raises(ManyhandsError, match=r"node\.key"):
        NodeKey.load_or_create(tmp_path / "node.key")
    assert read_measured(tmp_path / "measured.json") == {}
