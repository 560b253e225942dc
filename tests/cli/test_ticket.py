"""manyhands ticket: as a person who founds a swarm, and later locks a member out."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from manyhands.cli import app
from manyhands.core import NodeAddr
from manyhands.errors import BadRequest, TicketError
from manyhands.member.home import TICKET, load_ticket, save_ticket, update_ticket
from manyhands.swarm.ticket import Ticket


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MANYHANDS_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["ticket", *arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout.strip()


def test_made_extended_and_shown() -> None:
    text = run("add", run("new", "--name", "lab", "--address", "192.0.2.7:7700"), "192.0.2.8:7700")
    shown = run("show", text)
    assert "swarm lab" in shown and "192.0.2.8:7700\n  192.0.2.7:7700" in shown
    assert Ticket.parse(text).secret.hex() not in shown


def test_rotation_of_a_ticket_that_is_named_changes_its_secret_only(home: Path) -> None:
    old = Ticket.new("lab").with_address(NodeAddr("192.0.2.7", 7700))
    new = Ticket.parse(run("rotate", old.encode()))
    assert new.secret != old.secret and (new.name, new.addresses) == (old.name, old.addresses)
    assert not (home / TICKET).exists()


def test_rotation_of_this_machines_swarm_replaces_the_file(home: Path) -> None:
    old = Ticket.new("lab")
    save_ticket(home, old)
    new = Ticket.parse(run("rotate"))
    assert new == load_ticket(home) != old
    assert (home / TICKET).stat().st_mode & 0o777 == 0o600
    assert run("show").startswith(f"swarm lab  {new.fingerprint}")


def test_a_rotation_names_the_file_that_has_the_old_ticket(home: Path) -> None:
    """A node that was started again took that one from manyhands.toml, and put it into the ticket's file again."""
    old = Ticket.new("lab")
    save_ticket(home, old)
    assert "goes first" not in CliRunner().invoke(app, ["ticket", "rotate"]).stderr
    (home / "manyhands.toml").write_text(f'[swarm]\nticket = "{old.encode()}"\n')
    said = CliRunner().invoke(app, ["ticket", "rotate"]).stderr
    assert f"{home / 'manyhands.toml'} has another one, which goes first where a node starts" in said


def test_a_member_that_leaves_does_not_undo_a_rotation(home: Path) -> None:
    old = Ticket.new("lab")
    update_ticket(home, old)
    moved = old.with_address(NodeAddr("192.0.2.7", 7700))
    update_ticket(home, moved)
    assert load_ticket(home) == moved
    new = Ticket.parse(run("rotate"))
    update_ticket(home, old)
    assert load_ticket(home) == new


def test_without_a_swarm_there_is_nothing_to_rotate() -> None:
    with pytest.raises(BadRequest, match="belongs to no swarm"):
        run("rotate")
    with pytest.raises(TicketError, match="not a ticket"):
        run("rotate", "xyz")
