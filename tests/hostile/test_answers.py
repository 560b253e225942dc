"""What answers at `--api` and is no gateway of manyhands, or a false one: every command ends with one line."""

import http.server
import json
import threading
from collections.abc import Iterator

import pytest
from typer.testing import CliRunner

from manyhands.cli import app, client
from manyhands.errors import ManyhandsError

DEEP = b"[" * 200_000
BODIES = {
    "nothing": b"",
    "no JSON": b"\xff\xfe\x00",
    "empty": b"{}",
    "list": b"[]",
    "null": b"null",
    "number": b"1" * 5000,
    "deep": DEEP,
    "other names": json.dumps({"data": [{"id": "x"}], "error": None}).encode(),
}
COMMANDS = (
    "status",
    "status --json",
    "jobs",
    "workers",
    "workers evict x",
    "plan tales --swarm",
    "code",
    "switch off",
    "infer -p x",
)


class Answering(http.server.BaseHTTPRequestHandler):
    """Answers everything with `body` and `status`; `missing`: bytes that its length claims beside."""

    body, status, missing = b"", 200, 0

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        self.rfile.read(int(self.headers.get("content-length") or 0))
        self.send_response(self.status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(self.body) + self.missing))
        self.end_headers()
        self.wfile.write(self.body)

    do_POST = do_DELETE = do_GET


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> Iterator[str]:
    monkeypatch.setenv("MANYHANDS_HOME", str(tmp_path))
    monkeypatch.setattr(Answering, "body", b"")
    monkeypatch.setattr(Answering, "status", 200)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answering)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.mark.parametrize("status", [200, 404, 500])
@pytest.mark.parametrize("kind", BODIES)
def test_no_answer_of_another_program_is_a_traceback(api: str, kind: str, status: int) -> None:
    """A number in place of a view was a TypeError, a missing name a KeyError, brackets a RecursionError."""
    Answering.body, Answering.status = BODIES[kind], status
    for command in COMMANDS:
        done = CliRunner().invoke(app, [*command.split(), "--api", api])
        if done.exit_code:
            assert isinstance(done.exception, ManyhandsError | SystemExit), (command, done.exception)
            assert str(done.exception).isprintable() and len(str(done.exception)) < 2500, command
        else:  # it has printed what there was
            assert status == 200 and BODIES[kind].startswith(b"{"), (command, done.output)


def test_an_answer_without_end_is_not_read(api: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "MAX_ANSWER_BYTES", 1000)
    Answering.body = b'{"a":"' + b"x" * 992 + b'"}'
    assert client.call(api, "", "GET", "/")["a"] == "x" * 992
    Answering.body += b" "
    with pytest.raises(client.GatewayError, match="more than 1000 bytes"):
        client.call(api, "", "GET", "/")


def test_what_an_answer_lacks_is_named(api: str) -> None:
    Answering.body = b'{"nodes":[{"spans":{}}]}'
    told = client.call(api, "", "GET", "/api/swarm")
    assert told.get("models") is None
    with pytest.raises(client.GatewayError, match=r"/api/swarm answered, and not as a gateway .* \(without 'name'\)"):
        told["nodes"][0]["name"]


def test_an_answer_that_broke_off_is_said_to_have(api: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Answering, "missing", 5)
    Answering.body = b"{}"
    with pytest.raises(client.GatewayError, match="broke off its answer"):
        client.call(api, "", "GET", "/")
