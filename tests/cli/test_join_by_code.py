"""`up`, `manyhands code` and `manyhands join --code` as people run them, on two machines (tests/cable.py)."""

import json
from pathlib import Path

import pytest

from tests.cable import Machine, cable, has

pytestmark = pytest.mark.nightly
WRONG = "ABC-DEF"

__all__ = ["cable"]


def test_a_machine_joins_by_the_code_that_another_shows(cable: None, tmp_path: Path) -> None:
    desk, nas = Machine(tmp_path / "desk"), Machine(tmp_path / "nas")
    try:
        desk.start("up", "tales", "--api", "127.0.0.1:0")
        desk.until(has("invitation"))
        none = nas.run("join", "--code", WRONG)
        assert none.returncode == 2 and "no machine of swarm desk shows a code: run `manyhands code`" in none.stderr
        shown = json.loads(desk.run("code", "--json").stdout)
        assert shown["swarm"] == "desk" and shown["code"]["tries_left"] == 3
        wrong = nas.run("join", "--code", WRONG)
        assert wrong.returncode == 2 and "2 tries are left" in wrong.stderr
        nas.start("join", "--code", shown["code"]["code"].lower(), "--swarm", "desk")
        serving = [event for event in nas.until(has("serving")) if event["event"] == "serving"]
        assert serving[0]["model"] == "tales"
        desk.until(lambda events: any(event["event"] == "came" and "nas" in event["text"] for event in events))
        told = [event["text"] for event in desk.events() if event["event"] == "note"]
        assert any("a wrong code was typed" in line for line in told)
        assert any("typed the code and has the ticket" in line for line in told)
        secret = shown["code"]["code"]
        for said in (desk.home / "said", nas.home / "said"):
            assert secret not in said.read_text() and secret.replace("-", "") not in said.read_text()
    finally:
        nas.end()
        desk.end()
