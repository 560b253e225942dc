"""manyhands service: the text of the unit, and what is said to systemctl (a script of this test in its place)."""

import shutil
import subprocess
from pathlib import Path

import pytest
from typer.testing import CliRunner

from manyhands.cli import app
from manyhands.cli.unit import quoted, unit_text
from manyhands.errors import BadRequest, NotFound
from manyhands.swarm.ticket import Ticket


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MANYHANDS_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    return tmp_path / "home"


@pytest.fixture
def systemctl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A systemctl and a loginctl that agree to everything; what they were told stands in the file."""
    folder, told = tmp_path / "bin", tmp_path / "told"
    folder.mkdir()
    for name, answer in (("systemctl", "active"), ("loginctl", "no")):
        script = folder / name
        script.write_text(f'#!/bin/sh\necho "{name} $*" >> {told}\necho {answer}\n')
        script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    return told


@pytest.mark.parametrize(
    ("word", "text"),
    [
        ("tales", "tales"),
        ("--memory=6GB", "--memory=6GB"),
        ("", '""'),
        ("my model", '"my model"'),
        ('a"b', '"a\\"b"'),
        ("a\\b", '"a\\\\b"'),
        ("100%", '"100%%"'),
        ("'x'", "\"'x'\""),
        ("größe", '"größe"'),
    ],
)
def test_words_as_systemd_reads_them(word: str, text: str) -> None:
    assert quoted(word) == text


def test_a_variable_in_a_word_is_no_variable() -> None:
    text = unit_text(["/bin/python", "$HOME"], Path("/"), {"MANYHANDS_HOME": "/a $b"}, 300)
    assert 'ExecStart=/bin/python "$$HOME"\n' in text and 'Environment="MANYHANDS_HOME=/a $b"\n' in text


def test_a_program_in_a_folder_with_a_dollar_and_a_folder_that_ends_in_a_space() -> None:
    text = unit_text(["/a $b/python", "$HOME"], Path("/home/ann/my "), {}, 300)
    assert 'ExecStart=:"/a $b/python" "$HOME"\n' in text and "WorkingDirectory=/home/ann/my /\n" in text


def test_what_a_unit_cannot_hold_is_refused() -> None:
    with pytest.raises(BadRequest, match="control character"):
        unit_text(["up", "a\nExecStartPre=/bin/evil"], Path("/"), {}, 300)


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd here")
def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    path = tmp_path / "manyhands.service"
    environment = {"MANYHANDS_HOME": "/tmp/my home 100%"}
    program = tmp_path / "a $b" / "true"
    program.parent.mkdir()
    program.symlink_to("/bin/true")
    folder = tmp_path / "back\\"
    folder.mkdir()
    path.write_text(unit_text([str(program), "up", "tales", "a b$c"], folder, environment, 300))
    found = subprocess.run(["systemd-analyze", "verify", "--user", str(path)], capture_output=True, text=True)
    about_it = [line for line in found.stderr.splitlines() if path.name in line]
    assert about_it == []


def test_install_enables_and_starts_and_remove_undoes_it(systemctl: Path, tmp_path: Path, home: Path) -> None:
    said = CliRunner().invoke(app, ["service", "install", "up", "tales", "--memory", "4GB"], catch_exceptions=False)
    assert "now and at every login" in said.output and "loginctl enable-linger" in said.output
    unit = tmp_path / "config/systemd/user/manyhands.service"
    text = unit.read_text()
    assert " -P -m manyhands.cli up tales --memory 4GB\n" in text and f"MANYHANDS_HOME={home}" in text
    assert "TimeoutStopSec=320" in text
    for words in ("daemon-reload", "enable manyhands.service", "restart manyhands.service"):
        assert f"systemctl --user {words}\n" in systemctl.read_text()
    said = CliRunner().invoke(app, ["service", "status"])
    assert said.exit_code == 0 and "manyhands.service is active" in said.output and "up tales" in said.output
    assert CliRunner().invoke(app, ["service", "remove"]).exit_code == 0
    assert not unit.exists() and "systemctl --user disable --now manyhands.service\n" in systemctl.read_text()
    with pytest.raises(NotFound, match="nothing to remove"):
        CliRunner().invoke(app, ["service", "remove"], catch_exceptions=False)
    assert CliRunner().invoke(app, ["service", "status"]).exit_code == 1


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["serve", "tales"], "not 'serve'"),
        (["join", "mh1" + "A" * 40], "no place for a ticket"),
        (["up", "tales", "-d"], "leave -d out"),
        (["join"], "belongs to no swarm yet"),
        ([], "belongs to no swarm yet"),
    ],
)
def test_what_no_service_can_run_is_refused_and_nothing_written(words: list[str], why: str, tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match=why):
        CliRunner().invoke(app, ["service", "install", *words], catch_exceptions=False)
    assert not (tmp_path / "config").exists()


def test_a_wrong_option_is_found_now_and_not_at_the_next_start() -> None:
    said = CliRunner().invoke(app, ["service", "install", "up", "tales", "--memry", "4GB"])
    assert said.exit_code == 2 and "No such option: --memry" in said.output


def test_secrets_of_the_environment_stay_out(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ticket = Ticket.new("home").encode()
    monkeypatch.setenv("MANYHANDS_TICKET", ticket)
    monkeypatch.setenv("MANYHANDS_API_KEY", "mhk_" + "k" * 43)
    monkeypatch.setenv("MANYHANDS_NODE_NAME", "desk")
    said = CliRunner().invoke(app, ["service", "install", "--print", "up", "tales"])
    assert said.exit_code == 0 and "MANYHANDS_NODE_NAME=desk" in said.output and "--print" not in said.output
    assert CliRunner().invoke(app, ["service", "install", "up", "tales", "--print"]).output == said.output
    assert ticket not in said.output and "mhk_" not in said.output


def test_where_no_systemd_answers_the_other_way_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BadRequest, match=r"no systemd here: `manyhands up MODEL -d`.*--print"):
        CliRunner().invoke(app, ["service", "install", "up", "tales"], catch_exceptions=False)
    assert not (tmp_path / "config").exists()
    broken = tmp_path / "systemctl"
    broken.write_text("#!/bin/sh\necho 'Failed to connect to bus: No medium found' >&2; exit 1\n")
    broken.chmod(0o755)
    with pytest.raises(BadRequest, match="Failed to connect to bus"):
        CliRunner().invoke(app, ["service", "install", "up", "tales"], catch_exceptions=False)
