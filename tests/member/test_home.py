"""What a machine remembers of its swarm, and says of what runs on it."""

import contextlib
import fcntl
import json
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from manyhands.core import NodeAddr, NodeId
from manyhands.errors import BadRequest, TicketError
from manyhands.files import write_private
from manyhands.member.home import (
    Running,
    announced,
    check_name,
    list_running,
    load_ticket,
    save_ticket,
    starting_ticket,
)
from manyhands.swarm.ticket import MAX_ADDRESSES, Ticket

NODE = NodeId("ab" * 32)


def running() -> Running:
    return Running("desk", os.getpid(), NODE, "home", "127.0.0.1:1")


def test_the_ticket_is_kept_and_only_its_owner_reads_it(tmp_path: Path) -> None:
    home = tmp_path / "home"
    assert load_ticket(home) is None
    ticket = Ticket.new("home").with_address(NodeAddr("10.0.0.1", 4040, NODE))
    save_ticket(home, ticket)
    assert load_ticket(home) == ticket
    assert (home / "swarm.ticket").stat().st_mode & 0o777 == 0o600
    assert home.stat().st_mode & 0o777 == 0o700


def test_a_broken_ticket_is_said(tmp_path: Path) -> None:
    (tmp_path / "swarm.ticket").write_text("mh1AAAA")
    with pytest.raises(TicketError, match=r"swarm.ticket: ticket is truncated.*remove the file"):
        load_ticket(tmp_path)


def test_a_ticket_that_is_given_gets_the_addresses_saved_of_its_swarm(tmp_path: Path) -> None:
    """Its own first; those of another swarm, or of one whose secret has changed, do not count."""
    old, new, moved = (NodeAddr(f"10.0.0.{i}", 4040, NODE) for i in (1, 2, 3))
    given = Ticket.new("home").with_address(old)
    assert starting_ticket(tmp_path, None) is None and starting_ticket(tmp_path, given) == given
    save_ticket(tmp_path, given.with_address(new).with_address(moved))
    found = starting_ticket(tmp_path, given)
    assert found and found.addresses == (old, moved, new)
    assert starting_ticket(tmp_path, None) == load_ticket(tmp_path)
    save_ticket(tmp_path, given.with_address(new).rotate())
    assert starting_ticket(tmp_path, given) == given
    many = [NodeAddr(f"10.0.1.{i}", 4040) for i in range(MAX_ADDRESSES)]
    save_ticket(tmp_path, replace(given, addresses=tuple(many)))
    found = starting_ticket(tmp_path, given)
    assert found and found.addresses == (old, *many[:-1])


def test_a_saved_ticket_that_is_damaged_keeps_no_other_from_being_given(tmp_path: Path) -> None:
    (tmp_path / "swarm.ticket").write_text("mh1AAAA")
    given = Ticket.new("home")
    assert starting_ticket(tmp_path, given) == given
    with pytest.raises(TicketError, match="remove the file"):
        starting_ticket(tmp_path, None)


def test_a_folder_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BadRequest, match="set MANYHANDS_HOME"):
        save_ticket(tmp_path / "file", Ticket.new("home"))


def test_what_runs_is_listed_with_its_gateway(tmp_path: Path) -> None:
    with announced(tmp_path, running()) as announce:
        announce("http://127.0.0.1:8000")
        (found,) = list_running(tmp_path)
        assert (found.name, found.pid, found.api) == ("desk", os.getpid(), "http://127.0.0.1:8000")
        assert (tmp_path / "run" / "desk.json").stat().st_mode & 0o777 == 0o600
    assert list_running(tmp_path) == []


def test_files_of_ended_processes_and_of_other_forms_do_not_count(tmp_path: Path) -> None:
    with announced(tmp_path, running()):
        path = tmp_path / "run" / "desk.json"
        facts = json.loads(path.read_text())
    (tmp_path / "run" / "dead.json").write_text(json.dumps({**facts, "pid": 2**22 - 1}))
    (tmp_path / "run" / "odd.json").write_text("[1]")
    (tmp_path / "run" / "more.json").write_text(json.dumps({**facts, "key": 1}))
    (tmp_path / "run" / "text.json").write_text(json.dumps({**facts, "pid": "1; rm -rf"}))
    assert list_running(tmp_path) == []
    assert not (tmp_path / "run" / "dead.json").exists()


def test_the_secret_of_a_killed_node_s_gateway_goes_with_its_file(tmp_path: Path) -> None:
    """One stayed for each time that a node without --api, whose port is another one each time, was killed."""
    run = tmp_path / "run"
    for port, is_newer in ((4001, False), (4002, True)):
        with announced(tmp_path, running()) as announce:
            (run / f"api-{port}.secret").write_text("secret")
            announce(f"http://127.0.0.1:{port}")
            facts = json.loads((run / "desk.json").read_text())
        (run / "desk.json").write_text(json.dumps({**facts, "pid": 2**22 - 1}))
        now = (run / "desk.json").stat().st_mtime + 1.0
        if is_newer:  # another node opened its gateway there meanwhile
            os.utime(run / f"api-{port}.secret", (now, now))
    with announced(tmp_path, running()):
        assert sorted(path.name for path in run.iterdir()) == ["api-4002.secret", "desk.json"]


def dead_file(home: Path) -> Path:
    """Of a node that was killed."""
    with announced(home, running()):
        path = home / "run" / "desk.json"
        facts = json.loads(path.read_text())
    path.write_text(json.dumps({**facts, "pid": 2**22 - 1}))
    return path


def test_the_file_of_a_node_that_starts_again_as_it_is_found_dead_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = dead_file(tmp_path)
    with contextlib.ExitStack() as stack:

        def found_dead(*_: Any) -> bool:
            stack.enter_context(announced(tmp_path, running()))
            return False

        with monkeypatch.context() as patch:
            patch.setattr("manyhands.member.home.is_running", found_dead)
            assert list_running(tmp_path) == []
        assert [found.pid for found in list_running(tmp_path)] == [os.getpid()]
    assert not path.exists()


def test_a_file_is_written_and_removed_by_one_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a node could write its file after the other was looked at for the last time, and before that is removed."""
    path, seen = dead_file(tmp_path), list[str]()

    def held(what: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def act(*args: Any, **options: Any) -> Any:
            folder = os.open(tmp_path / "run", os.O_RDONLY)
            with pytest.raises(BlockingIOError):
                fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.close(folder)
            seen.append(what)
            return real(*args, **options)

        return act

    monkeypatch.setattr(Path, "unlink", held("removed", Path.unlink))
    monkeypatch.setattr("manyhands.member.home.write_private", held("written", write_private))
    assert list_running(tmp_path) == [] and not path.exists()
    with announced(tmp_path, running()):
        monkeypatch.undo()
    assert seen == ["removed", "written"]


def test_another_process_that_got_the_id_of_a_dead_node_is_not_it(tmp_path: Path) -> None:
    """A pid alone tells nothing: it must also have begun when the node said it did, or before the file was written."""
    with announced(tmp_path, running()):
        path = tmp_path / "run" / "desk.json"
        facts = json.loads(path.read_text())
        path.write_text(json.dumps({**facts, "began": facts["began"] - 1}))
        assert list_running(tmp_path) == []
        path.write_text(json.dumps({name: fact for name, fact in facts.items() if name != "began"}))
        assert [found.name for found in list_running(tmp_path)] == ["desk"], "as other versions wrote it"
        os.utime(path, (time.time() - 10**8, time.time() - 10**8))
        assert list_running(tmp_path) == []


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "x" * 65, "a\nb"])
def test_what_cannot_name_a_file_names_no_node(name: str) -> None:
    with pytest.raises(BadRequest, match="cannot name a node"):
        check_name(name)
