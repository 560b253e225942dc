"""A node hands its sessions over though what it says is not read any more, or its home is gone."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

UP = ("up", "tales", "--api", "off", "--scope", "off")
SERVE = ("serve", "tales", "--layers", "0-11")


def started(home: Path, words: tuple[str, ...]) -> "subprocess.Popen[bytes]":
    """A node that serves, with its events in a pipe."""
    command = [sys.executable, "-m", "manyhands", *words, "--json", "--threads", "1", "--name", "n"]
    node = subprocess.Popen(
        [*command, "--listen", "127.0.0.1:0"],
        env={**os.environ, "MANYHANDS_HOME": str(home)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert node.stdout is not None
    last = "invitation" if words[0] == "up" else "serving"
    for line in node.stdout:
        if json.loads(line)["event"] == last:
            return node
    raise AssertionError(node.communicate()[1].decode())


@pytest.mark.parametrize("words", [UP, SERVE])
def test_a_reader_that_is_gone_holds_up_no_hand_over(words: tuple[str, ...], tmp_path: Path) -> None:
    """Ctrl-C goes to all of `manyhands up MODEL | tee log`: tee is gone before the node says that it leaves."""
    node = started(tmp_path / "home", words)
    assert node.stdout is not None
    node.stdout.close()
    node.send_signal(signal.SIGINT)
    assert (node.wait(), node.communicate()[1]) == (0, b"")


@pytest.mark.parametrize("words", [UP, SERVE])
def test_a_home_that_is_gone_holds_up_no_hand_over(words: tuple[str, ...], tmp_path: Path) -> None:
    home, file, other = tmp_path / "home", tmp_path / "file", tmp_path / "other"
    (tmp_path / "folder").mkdir()
    home.symlink_to(tmp_path / "folder")
    node = started(home, words)
    file.write_text("")
    other.symlink_to(file)
    other.replace(home)  # at once: between two steps the node might make it again
    node.send_signal(signal.SIGINT)
    said, complained = node.communicate()
    events = [json.loads(line) for line in said.splitlines()]
    assert (node.returncode, complained) == (0, b"")
    assert [event["event"] for event in events][-2:] == (
        ["leaving", "left"] if words is UP else ["draining", "stopped"]
    )
    if words is UP:
        assert f"the addresses of members are not remembered: {home / 'swarm.ticket'}" in events[-3]["text"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_a_full_disk_takes_no_line_and_ends_no_node() -> None:
    code = "from manyhands.cli.lines import say\nsay('a')\nsay('b')\nimport os\nos._exit(5)"
    with open("/dev/full", "w") as full:
        ended = subprocess.run([sys.executable, "-c", code], stdout=full, stderr=subprocess.PIPE)
    assert (ended.returncode, ended.stderr) == (5, b"")
