"""manyhands doctor: each fault is found and its remedy named; a sound machine is told so."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from manyhands.checkpoint.folder import SINGLE
from manyhands.cli import app, checks
from manyhands.cli.checks import Check
from manyhands.config_file import NAME, read_settings
from manyhands.core import NodeAddr, NodeId
from manyhands.errors import Unauthorized
from manyhands.member.home import TICKET, Running, announced, save_ticket
from manyhands.swarm.identity import NodeKey
from manyhands.swarm.ticket import Ticket
from manyhands.testing.tiny import make_tiny
from tests.few_digests import few_digests

ME = NodeId("a" * 64)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    home = tmp_path / "home"
    home.mkdir(mode=0o700)
    monkeypatch.setenv("MANYHANDS_HOME", str(home))
    monkeypatch.chdir(tmp_path)
    return home


def settings(folder: Path, **env: str) -> Any:
    return read_settings({"MANYHANDS_HOME": str(folder / "home"), **env}, folder)


def only(found: Any) -> Check:
    (check,) = list(found)
    assert isinstance(check, Check)
    return check


def test_keys_that_others_can_read(home: Path, tmp_path: Path) -> None:
    assert only(checks.check_keys(home, settings(tmp_path))).level == "ok"
    assert not (home / "node.key").exists()  # a check makes nothing
    key = NodeKey.load_or_create(home / "node.key")
    check = only(checks.check_keys(home, settings(tmp_path)))
    assert check.level == "ok" and key.node_id[:16] in check.said
    (home / "node.key").chmod(0o644)
    save_ticket(home, Ticket.new("x"))
    (home / TICKET).chmod(0o640)
    found = list(checks.check_keys(home, settings(tmp_path)))
    assert [check.level for check in found] == ["fail", "fail"]
    assert "chmod 600" in found[0].said and found[1].remedy == f"chmod 600 {home / TICKET}"


def test_a_damaged_file_of_keys_is_found(home: Path, tmp_path: Path) -> None:
    """A gateway lets in its owner alone then; doctor found nothing wrong."""
    (home / "keys.json").write_text('{"x')
    (home / "keys.json").chmod(0o600)
    _, found = checks.check_keys(home, settings(tmp_path))
    assert found.level == "fail" and f"{home / 'keys.json'} is not a file of keys" in found.said


def test_a_configuration_with_secrets(tmp_path: Path) -> None:
    assert only(checks.check_config(settings(tmp_path))).level == "ok"
    (tmp_path / NAME).write_text('[swarm]\nticket = ""\n')  # as `manyhands config` prints one that is not set
    (tmp_path / NAME).chmod(0o644)
    assert only(checks.check_config(settings(tmp_path))).level == "ok"
    (tmp_path / NAME).write_text('[swarm]\nticket = "mh1x"\n')
    check = only(checks.check_config(settings(tmp_path)))
    assert check.level == "fail" and "swarm.ticket" in check.said and "mh1x" not in check.said
    (tmp_path / NAME).chmod(0o600)
    assert only(checks.check_config(settings(tmp_path))).level == "ok"


def test_ports_in_use(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        addr = f"127.0.0.1:{taken.getsockname()[1]}"
        found = settings(tmp_path, MANYHANDS_API_LISTEN="off", MANYHANDS_NODE_LISTEN=addr)
        check = only(checks.check_ports(found, []))
        assert check.level == "warn" and "--listen" in check.remedy
        assert check.said == f"{addr} cannot be listened at for the peers: Address already in use"
        ours = Running("desk", os.getpid(), ME, "home", addr)
        assert only(checks.check_ports(found, [ours])).level == "ok"
    assert only(checks.check_ports(found, [])).level == "ok"


def test_a_ticket_and_who_answers_at_its_addresses(home: Path, tmp_path: Path) -> None:
    assert "belongs to none" in only(checks.check_swarm(home, settings(tmp_path))).said
    bad = only(checks.check_swarm(home, settings(tmp_path, MANYHANDS_TICKET="mh1nonsense")))
    assert bad.level == "fail" and "ticket" in bad.said
    ticket = Ticket.new("lab")
    with subprocess.Popen(
        [sys.executable, "-c", DOOR, ticket.encode()], stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout
        here = NodeAddr.parse(process.stdout.readline())
        save_ticket(home, ticket.with_address(here).with_address(NodeAddr("127.0.0.1", 9)))
        swarm, silent, member = checks.check_swarm(home, settings(tmp_path))
        assert swarm.said.startswith(f"lab {ticket.fingerprint}, directory by gossip")
        other = list(checks.check_swarm(home, settings(tmp_path, MANYHANDS_SWARM_DIRECTORY="dht")))[1]
        assert other.level == "fail" and "by gossip, this machine is set to dht" in other.said
        assert silent.level == "warn" and silent.said == "127.0.0.1:9 cannot be reached: Connection refused"
        assert member.level == "ok" and "door" in member.said
        save_ticket(home, ticket.with_address(here).rotate())
        _, refused = checks.check_swarm(home, settings(tmp_path))
        assert refused.level == "warn" and "newest ticket" in refused.remedy
        process.communicate("")


def test_this_machines_own_address_is_called_only_while_its_node_runs(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few_digests(monkeypatch)
    mine = NodeAddr("127.0.0.1", 9, NodeKey.load_or_create(home / "node.key").node_id)
    save_ticket(home, Ticket.new("lab").with_address(mine).with_address(NodeAddr("127.0.0.1", 7, ME)))

    def called() -> list[str]:
        told = json.loads(CliRunner().invoke(app, ["doctor", "--json"]).stdout)
        return [check["said"].partition(" ")[0] for check in told["checks"] if check["name"] == "reach"]

    assert called() == ["127.0.0.1:7"]
    assert mine.node is not None
    with announced(home, Running("desk", os.getpid(), mine.node, "lab", "127.0.0.1:9")):
        assert called() == ["127.0.0.1:7", "127.0.0.1:9"]


def test_a_home_that_is_no_folder(home: Path) -> None:
    (home / "file").touch()
    for inside in (home / "file", home / "file" / "deeper"):
        check = only(checks.check_disk(inside))
        assert check.level == "fail" and check.said == f"{home / 'file'} is a file and no folder"


DOOR = """
import asyncio, sys
from manyhands.cli.connect import tls_node
from manyhands.core import NodeAddr
from manyhands.swarm.ticket import Ticket
async def main():
    async with tls_node(Ticket.parse(sys.argv[1]), None, name="door") as node:
        print(await node.listen(NodeAddr("127.0.0.1", 0)), flush=True)
        await asyncio.to_thread(sys.stdin.read)
asyncio.run(main())
"""


def test_what_running_members_say() -> None:
    view = {"nodes": [1, 2], "complaints": ["clocks differ"], "missing": [], "warnings": ["layer 7 is held once"]}
    member = Running("desk", 1, ME, "home", "127.0.0.1:1", "http://127.0.0.1:2")
    found = list(checks.check_running([member], lambda _: view))
    assert [check.level for check in found] == ["ok", "fail", "warn"]

    def refuse(_: str) -> Any:
        raise Unauthorized("a key is needed")

    assert "MANYHANDS_API_KEY" in only(checks.check_running([member], refuse)).remedy


def test_clocks(home: Path) -> None:
    now = 1_800_000_000.0
    (home / "x").touch()
    os.utime(home / "x", (now, now))
    assert only(checks.check_clock(home, now + 1, False)).level == "ok"
    assert only(checks.check_clock(home, now - 3600, False)).level == "warn"
    assert only(checks.check_clock(home, 0.0, False)).level == "fail"


@pytest.mark.parametrize(
    "found, level",
    [
        (checks.check_memory(8 << 30, 16 << 30), "ok"),
        (checks.check_memory(1 << 30, 16 << 30), "warn"),
        (checks.check_memory(1 << 28, 16 << 30), "fail"),
        (checks.check_files((1024, 4096)), "ok"),
        (checks.check_files((-1, -1)), "ok"),
        (checks.check_files((256, 4096)), "warn"),
    ],
)
def test_limits(found: Any, level: str) -> None:
    check = only(found)
    assert check.level == level and bool(check.remedy) == (level != "ok")


def test_model_files_that_are_cut_off(home: Path) -> None:
    assert "none fetched" in only(checks.check_models(home)).said
    folder = make_tiny("llama", home / "models" / "org--name@1", layers=2)
    assert "all of it" in only(checks.check_models(home)).said
    weights = folder / SINGLE
    weights.write_bytes(weights.read_bytes()[:-10])
    check = only(checks.check_models(home))
    assert check.level == "fail" and str(folder) in check.remedy


def test_a_short_name_whose_fetch_broke_off_is_no_damage(home: Path) -> None:
    (home / "models" / "smollm2").mkdir(parents=True)
    check = only(checks.check_models(home))
    assert check.level == "warn" and check.remedy == "manyhands pull smollm2"


def test_the_command(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    few_digests(monkeypatch)
    result = CliRunner().invoke(app, ["doctor", "--json"])
    told = json.loads(result.stdout)
    names = {check["name"] for check in told["checks"]}
    assert {"config", "node key", "disk", "memory", "clock", "swarm", "model", "iroh", "device"} <= names
    assert (result.exit_code == 0) == told["ok"]
    (tmp_path / NAME).write_text("[worker]\nmax_session = 1\n")
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 1 and "did you mean max_sessions?" in result.stdout
    assert "1 failed" in result.stdout and "device" in result.stdout  # it goes on with the rest
