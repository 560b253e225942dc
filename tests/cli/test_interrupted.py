"""Ctrl-C while the hub does not answer: the command ends at once, and what has arrived is not asked for again."""

import json
import os
import signal
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread

import pytest
from huggingface_hub import constants

from manyhands.checkpoint.manifest import Silent, build_manifest
from manyhands.weights.fetch import resolve_model
from manyhands.weights.fetched import find_local
from manyhands.weights.names import parse_hub_id
from tests.waiting import GUARD_S
from tests.weights.hub_server import REPO, FakeHub, serving

END_S = 20.0  # the hub's own deadlines are 90 s together
HERE = "--listen 127.0.0.1:0"


def interrupted(command: str, hub: FakeHub, home: Path) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a command that gets SIGINT once `hub` has stalled. Raises TimeoutExpired if it stays."""
    env = os.environ | {"MANYHANDS_HOME": str(home), "HF_HOME": str(home / "hf"), "HF_ENDPOINT": hub.endpoint}
    with subprocess.Popen(
        [sys.executable, "-m", "manyhands", *command.split()],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert hub.stalled.wait(GUARD_S), "the hub is asked"
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=END_S)
        finally:
            process.kill()
    return process.returncode, out, err


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (f"up {REPO} {HERE} --api 127.0.0.1:0", ["left"]),
        (f"up tales {HERE} --api 127.0.0.1:0 --draft model:{REPO}", []),
        (f"serve {REPO} {HERE} --layers 0-1 --dtype bf16", []),
        (f"local {REPO} -p hello --dtype bf16", []),
        (f"local {REPO} --api 127.0.0.1:0 --dtype bf16", []),
    ],
)
def test_a_command_ends_while_the_hub_is_silent(command: str, said: list[str], llama: Path, tmp_path: Path) -> None:
    with serving(FakeHub(llama, is_silent=True)) as hub:
        code, out, err = interrupted(command, hub, tmp_path)
    assert (code, err) == (130, "")
    assert out.splitlines()[-1:] == said


@pytest.mark.parametrize("command", [f"up {REPO} {HERE} --api off", f"local {REPO} -p hello"])
def test_a_fetch_that_is_interrupted_goes_on_where_it_was(
    command: str, sharded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stalls within the second file: nothing counts as whole, no lock stays, the first file is not fetched again."""
    home = tmp_path / "home"
    first, second = sorted(sharded.glob("*.safetensors"))[:2]
    with serving(FakeHub(sharded, stalls={second.name: 40_000})) as hub:
        assert interrupted(command, hub, home)[::2] == (130, "")
        assert find_local(home, parse_hub_id(REPO), None, True) is None
        hub.goes_on.set()
        before = len(hub.ranges)
        monkeypatch.setattr(constants, "ENDPOINT", hub.endpoint)
        template = hub.endpoint + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        folder = resolve_model(REPO, None, True, home, Silent())
        again = sum(end - start for name, start, end in hub.ranges[before:] if name == first.name)
    assert again < first.stat().st_size / 2, "its header"
    assert build_manifest(folder, home=home).id == build_manifest(sharded, home=home).id


class Models(BaseHTTPRequestHandler):
    """A gateway with one model."""

    def do_GET(self) -> None:
        told = json.dumps({"data": [{"id": "tales"}]}).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(told)))
        self.end_headers()
        self.wfile.write(told)

    def log_message(self, *_: object) -> None:
        pass


def test_a_chat_ends_while_its_pipe_is_silent(tmp_path: Path) -> None:
    """It stayed until the pipe's other end closed, and then ended with the traceback of a thread."""
    server = HTTPServer(("127.0.0.1", 0), Models)
    Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}).start()
    command = [sys.executable, "-m", "manyhands", "chat", "--api", f"http://127.0.0.1:{server.server_port}"]
    pipe = subprocess.PIPE
    env = os.environ | {"MANYHANDS_HOME": str(tmp_path)}
    with subprocess.Popen(command, env=env, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as process:
        try:
            assert process.stderr is not None
            assert "talking with tales" in process.stderr.readline()
            process.send_signal(signal.SIGINT)
            code = process.wait(END_S)  # its stdin is open all the while
        finally:
            process.kill()
            server.shutdown()
            server.server_close()
        assert (code, process.stderr.read()) == (130, "")
