"""Attack F11 and its siblings: texts of peers, clients, gateways and models in logs, terminals and JSON; broken streams."""

import asyncio
import contextlib
import io
import json
import logging
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from typer.testing import CliRunner

from manyhands.api.gateway import Gateway
from manyhands.api.http.app import create_app
from manyhands.api.http.error import MAX_MESSAGE_CHARS, error_object
from manyhands.api.http.server import serving
from manyhands.api.jobs import History
from manyhands.api.log import JsonLines
from manyhands.api.native.routes import native_router
from manyhands.cli import app as command
from manyhands.cli import jobs, workers
from manyhands.cli.chat_events import BrokenStream
from manyhands.cli.chat_loop import ChatHistory
from manyhands.cli.chat_screen import AnswerScreen
from manyhands.cli.chat_source import GatewaySource, Stats
from manyhands.cli.chat_wishes import ChatWishes
from manyhands.cli.client import GatewayError, call, print_json
from manyhands.cli.lines import rows_within
from manyhands.cli.log_file import log_line
from manyhands.cli.process import PlainLines, hide_secrets
from manyhands.cli.reporter import Reporter
from manyhands.cli.show import for_stdout
from manyhands.cli.status_screen import render
from manyhands.core import NodeAddr, SamplingParams
from manyhands.errors import BadRequest, ManyhandsError
from manyhands.origin.request_routes import Routing
from manyhands.plain import LIMIT, one_line, without_controls
from manyhands.wire.control import TEXT_LIMITS, decode, encode
from manyhands.wire.message import PROTOCOL_VERSION, Fault, Hello, Open, Opened, Reassigned
from manyhands.wire.weights_message import WeightsNotFound
from tests.api.served import raw
from tests.wire.messages import CONTROL, SESSION, TOKEN

# Clear a screen, a title, a CSI of one byte, line ends of every kind, an override, an isolate, backspaces, markup.
NASTY = "\x1b[2J\x1b]0;owned\x07\x9b31m\r\nERROR forged\x85\u2028x\u2029\u202egnp.exe\u2066\u2069\x08\x7f[red]"
HARMFUL = set(NASTY) - set("".join(c for c in NASTY if c.isprintable()))


def is_harmless(text: str) -> bool:
    return not HARMFUL & (set(text) - {"\n"})


# -- the cleaner ------------------------------------------------------------------------------------------------------


@given(st.text(st.characters(codec=None), max_size=400), st.integers(1, 300))
def test_one_line_is_printable_and_bounded(text: str, limit: int) -> None:
    line = one_line(text, limit)
    assert line.isprintable() and len(line) <= limit
    assert one_line(line, limit) == line
    if text.isprintable() and len(text) <= limit:
        assert line == text


def test_scripts_stay_readable() -> None:
    for text in ("naïve café", "日本語", "نمی\u200cخواهم", "👩\u200d💻", "a\tb\nc", "1\u00a0000"):
        assert without_controls(text) == text
    assert is_harmless(without_controls(NASTY)) and "ERROR forged" in without_controls(NASTY)


# -- where they enter -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "message",
    [
        Hello(PROTOCOL_VERSION, "control", NASTY * 1000, None, (), TOKEN),
        Fault(SESSION, 1, 2, NASTY * 10, NASTY * 4000),
        Reassigned(1, NASTY, NASTY * 4000),
        WeightsNotFound(1, NASTY * 100),
        Opened(SESSION, 1, 0, NASTY * 100, True),
    ],
)
def test_texts_of_peers_are_one_bounded_line(message: Any) -> None:
    got = decode(type(message), encode(message))
    texts = {name: getattr(got, name) for name in ("name", "code", "detail", "arithmetic") if hasattr(got, name)}
    assert texts
    for name, text in texts.items():
        assert text.isprintable() and len(text) <= TEXT_LIMITS.get(name, LIMIT), name


def test_stop_strings_are_exact() -> None:
    opened = next(m for m in CONTROL if isinstance(m, Open) and m.sampling is not None)
    assert opened.sampling is not None
    wanted = replace(opened, sampling=replace(opened.sampling, stop=("\n\n", "\x1b", "\u2028")))
    assert decode(type(wanted), encode(wanted)) == wanted


def test_what_a_client_sends_comes_back_printable() -> None:
    """Paths and the names of fields are quoted in errors."""

    async def main() -> None:
        gateway = Gateway({})
        app = create_app(gateway, routers=[native_router(gateway, History())])
        async with serving(app, "127.0.0.1", 0) as addr:
            asks = [f"GET /x%0aERROR%20forged%1b[2J%c2%9b%e2%80%ae{'y' * 3000} HTTP/1.1\r\nhost: localhost\r\n"]
            body = json.dumps({NASTY: 1, "prompt": "x"}).encode()
            kind = f"content-type: application/json\r\ncontent-length: {len(body)}\r\n"
            asks.append(f"POST /api/infer HTTP/1.1\r\nhost: localhost\r\n{kind}")
            asks.append(f"GET /api/jobs?limit={NASTY.encode().hex()} HTTP/1.1\r\nhost: localhost\r\n")
            for ask, sent in zip(asks, (b"", body, b""), strict=True):
                status, said = await raw(addr, ask.encode() + b"connection: close\r\n\r\n" + sent)
                message = json.loads(said.split(b"\r\n\r\n", 1)[1])["error"]["message"]
                assert status in (400, 404) and message.isprintable() and len(message) <= MAX_MESSAGE_CHARS

    asyncio.run(main())
    assert len(error_object(BadRequest(NASTY * 9000))["message"]) == MAX_MESSAGE_CHARS


# -- where they leave -------------------------------------------------------------------------------------------------


def logged(formatter: logging.Formatter, with_trace: bool = False) -> str:
    out = io.StringIO()
    logger, handler = logging.Logger("manyhands.test"), logging.StreamHandler(out)
    handler.setFormatter(formatter)
    logger.addHandler(handler)
    try:
        raise ManyhandsError(NASTY)
    except ManyhandsError:
        logger.warning("peer=%s said: %s", "ab" * 4, NASTY * 1000, exc_info=with_trace)
    return out.getvalue()


def test_a_line_of_json_stays_one_in_the_log_of_a_node_in_the_background() -> None:
    record = logging.LogRecord(
        "manyhands", logging.WARNING, "", 0, "\x1b[2J mh1" + 90 * "s" + " é\n" * 3000, None, None
    )
    line = log_line(JsonLines().format(record), 0.0)
    found = json.loads(line)
    assert line.count("\n") == 1 and found["level"] == "warning" and "mh1..." in found["message"]
    assert log_line('{"event": "leaving"}', 0.0).startswith("19"), "which has no time of its own"


def test_a_log_line_is_one_line() -> None:
    line = logged(PlainLines())
    assert line.count("\n") == 1 and len(line.splitlines()) == 1 and is_harmless(line) and len(line) < 5000
    traced = logged(PlainLines(), with_trace=True)
    assert is_harmless(traced) and "Traceback" in traced and not any(x.startswith("ERROR") for x in traced.splitlines())
    for with_trace in (False, True):
        line = logged(JsonLines(), with_trace)
        assert len(line.splitlines()) == 1 and is_harmless(line) and line.isascii()
        assert json.loads(line)["level"] == "warning" and json.loads(line)["peer"] == "abababab"


def test_events_and_errors_of_commands(capsys: pytest.CaptureFixture[str]) -> None:
    Reporter(as_json=False)("came", f"{NASTY} has come")
    Reporter(as_json=True)("came", f"{NASTY} has come", node=NASTY)
    print_json({"name": NASTY})
    first, *rest = capsys.readouterr().out.split("\n")
    assert "�" not in first
    told = "\n".join([first, *rest])
    assert is_harmless(told.replace("\x7f", "")) and len([x for x in told.splitlines() if x.startswith("{")]) == 2


def test_tables_show_names_and_never_markup(capsys: pytest.CaptureFixture[str]) -> None:
    """What a gateway that belongs to others says, in every column."""
    timings = {"ttft_ms": None, "decode_tokens_per_s": None}
    job = {"id": NASTY, "created_unix_s": 0, "model": NASTY, "api": NASTY, "status": "failed", "error": NASTY}
    job |= {"prompt_tokens": 1, "completion_tokens": 1, "timings": timings, "hops": [{"name": NASTY}], "repairs": []}
    routing = {**Routing().as_object(), "policy": NASTY, "scope": NASTY, "own_first": NASTY, "codec": {"used": NASTY}}
    span = {"model": NASTY, "layers": NASTY, "is_spare": False, "free_positions": 1}
    worker = {"name": NASTY, "worker_id": NASTY, "status": NASTY, "sessions": NASTY, "rtt_ms": 1.0, "spans": [span]}
    out = io.StringIO()
    console = Console(file=out, width=400, force_terminal=False)
    for width in (None, 20):
        told = jobs.job_lines([job | {"routing": routing}], 0.0, width)
        told += rows_within(width, workers.HEADINGS, [workers._cells(worker | {"address": NASTY})], workers.NUM_FIRST)
        assert len("\n".join(told).splitlines()) == (4 if width is None else 6)
        out.write("\n".join(told))
    workers._say({}, False, f"{NASTY} is out")
    view = {"nodes": [], "models": [], "missing": [NASTY], "complaints": [NASTY], "warnings": [NASTY], "api": NASTY}
    node = {"name": NASTY, "memory_bytes": 1, "is_me": False, "path": NASTY, "spans": []}
    console.print(render(view | {"nodes": [node], "swarm": NASTY, "directory": NASTY, "sessions": 0}, 200))
    said = out.getvalue() + capsys.readouterr().out
    assert is_harmless(said) and "[red]" in said


def test_an_error_of_a_gateway_is_one_line() -> None:
    told = json.dumps({"error": {"message": NASTY * 1000, "code": NASTY}}).encode()
    with gateway(502, told) as api:
        with pytest.raises(GatewayError) as caught:
            call(api, "k", "GET", "/api/jobs")
        assert str(caught.value).isprintable() and caught.value.code.isprintable() and len(str(caught.value)) <= 2000
        done = run_command("jobs", "--api", api, "--api-key", "k")
    assert done.returncode == 1 and done.stderr.count("\n") == 1 and is_harmless(done.stderr)


def test_what_a_model_says_does_not_reach_the_terminal_raw(monkeypatch: pytest.MonkeyPatch) -> None:
    assert for_stdout(NASTY) == NASTY  # a pipe gets what was said
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    assert is_harmless(for_stdout(NASTY)) and "[red]" in for_stdout(NASTY)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_what_a_model_says_in_a_chat_at_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setenv("TERM", "xterm")
    with contextlib.closing(AnswerScreen()) as screen:
        for piece in (NASTY, "\n\n[https://here.example](https://there.example)\n\n", NASTY):
            screen.show(piece)
    text = terminal.getvalue()  # rich's own sequences are among it
    for foreign in ("\x1b]0;", "\x1b[2J", "\x9b", "\u202e", "\x1b]8;", "\x85", "\u2028"):
        assert foreign not in text, foreign
    assert "ERROR forged" in text and "https://there.example" in text


# -- streams that break off -------------------------------------------------------------------------------------------


@contextlib.contextmanager
def gateway(status: int, body: bytes, kind: str = "application/json", length: int | None = None) -> Iterator[str]:
    """A server that answers every POST and GET so, and then closes; /v1/models names one model."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            is_list = self.path == "/v1/models"
            self._answer(200 if is_list else status, b'{"data": [{"id": "m"}]}' if is_list else body, is_list)

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            self._answer(status, body, False)

        def _answer(self, status: int, body: bytes, is_list: bool) -> None:
            self.send_response(status)
            self.send_header("content-type", "application/json" if is_list else kind)
            if length is not None and not is_list:
                self.send_header("content-length", str(length))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


def chunk(text: str, reason: str | None = None) -> bytes:
    event = {"choices": [{"delta": {"content": text}, "finish_reason": reason}]}
    return b"data: " + json.dumps(event).encode() + b"\n\n"


WHOLE = chunk("half") + chunk(" whole", "stop") + b"data: [DONE]\n\n"
BROKEN = {
    "before anything": (b"", None),
    "in the middle": (chunk("half"), None),
    "after the finish reason": (chunk("half", "stop"), None),
    "in an event": (chunk("half") + b'data: {"choi', None),
    "in the end mark": (chunk("half") + b"data: [DO", None),
    "short of its length": (chunk("half"), 100_000),
    "an error at the end": (chunk("half") + b'data: {"error": {"message": "gone", "code": "link_closed"}}\n\n', None),
    "nonsense": (chunk("half") + b"data: 3\n\n", None),
}


def run_command(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "manyhands.cli", *words], input="", capture_output=True, text=True)


@pytest.mark.parametrize("how", BROKEN)
def test_a_broken_answer_is_said_to_be_broken(how: str, capsys: pytest.CaptureFixture[str]) -> None:
    body, length = BROKEN[how]
    lines = ["one", "two"]

    async def ask() -> str:
        if not lines:
            raise EOFError
        return lines.pop(0)

    async def main(api: str) -> ChatHistory:
        talk = ChatHistory(GatewaySource([api], "k", "m", ChatWishes(SamplingParams()), "ring"), ask)
        await talk.run()
        return talk

    with gateway(200, body, "text/event-stream", length) as api:
        talk = asyncio.run(main(api))
    said = capsys.readouterr()
    assert talk.num_failed == 2 and talk.messages == []
    assert said.err.count("manyhands: ") == 2
    if body:
        assert said.out.count("half") == 2 and "not kept" in said.err


def test_the_exit_code_tells_of_a_broken_answer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MANYHANDS_HOME", str(tmp_path))
    for body, code in ((WHOLE, 0), (chunk("half"), 1)):
        with gateway(200, body, "text/event-stream") as api:
            done = CliRunner().invoke(command, ["chat", "--api", api], input="hi\n")
        assert done.exit_code == code and "half" in done.output, done.output


def test_a_broken_stream_is_an_error_of_its_own() -> None:
    async def main(api: str) -> None:
        source = GatewaySource([api], "k", "m", ChatWishes(SamplingParams()), "ring")
        with pytest.raises(BrokenStream, match="not whole"):
            async for _ in source.answer([{"role": "user", "content": "x"}], Stats()):
                pass

    with gateway(200, chunk("x"), "text/event-stream") as api:
        asyncio.run(main(api))


def test_what_is_no_gateway_is_said_to_be_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MANYHANDS_HOME", str(tmp_path))
    with gateway(404, b"<html>File not found</html>", "text/html") as api:
        done = CliRunner().invoke(command, ["status", "--api", api])
    assert f"{api}/api/swarm answered 404" in str(done.exception)
    assert str(done.exception).endswith("and not as a gateway of manyhands does: name one with --api")


def test_a_benchmark_counts_a_truncated_answer_as_failed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MANYHANDS_HOME", str(tmp_path))
    with gateway(200, b'{"tokens_generated": 3', length=5000) as api:
        done = CliRunner().invoke(command, ["benchmark", "-n", "2", "--api", api, "--json"])
    assert done.exit_code == 1 and json.loads(done.output.splitlines()[-1])["succeeded"] == 0


# -- secrets among the arguments --------------------------------------------------------------------------------------


def test_a_ticket_among_the_arguments_is_overwritten() -> None:
    ticket, key = "mh1" + "Ab3-_" * 20, "mhk_" + "x" * 43
    code = "import sys, manyhands.cli.process as p\nprint(p.hide_secrets(), open('/proc/self/cmdline').read(), len(sys.argv))"
    words = ["join", ticket, f"--api-key={key}", "--name", "mh1"]
    said = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=True).stdout
    assert said.startswith("True") and ticket not in said and key not in said
    assert "--api-key=xxxx" in said and "join" in said and said.strip().endswith("6")
    broken = f"{ticket[:20]}\n{ticket[20:40]}\n{ticket[40:]}"
    said = subprocess.run(
        [sys.executable, "-c", code, "join", broken], capture_output=True, text=True, check=True
    ).stdout
    assert said.startswith("True") and not any(part in said for part in broken.split()), "read as one, hidden as one"
    for words in (["join", "--code", "K7W-4QX"], ["join", "--code=K7W-4QX"]):
        said = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=True).stdout
        assert said.startswith("True") and "K7W" not in said and "--code" in said and "xxxxxxx" in said


def test_nothing_is_written_where_the_arguments_are_not(tmp_path: Path) -> None:
    assert not hide_secrets()
    (tmp_path / "cmdline").write_bytes(b"join\0mh1" + b"a" * 40 + b"\0")
    assert not hide_secrets(tmp_path)
    (tmp_path / "stat").write_text("1 (x) S " + "0 " * 60)
    (tmp_path / "mem").write_bytes(bytes(100))
    assert not hide_secrets(tmp_path) and (tmp_path / "mem").read_bytes() == bytes(100)


def test_a_ticket_may_come_by_stdin(monkeypatch: pytest.MonkeyPatch) -> None:
    from manyhands.cli.join import _ticket
    from manyhands.swarm.ticket import Ticket

    made = Ticket.new("home").with_address(NodeAddr("127.0.0.1", 7700))
    monkeypatch.setattr("sys.stdin", io.StringIO(made.encode() + "\n"))
    assert _ticket("-", "", "") == made
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    with pytest.raises(BadRequest, match="stdin"):
        _ticket("-", "", "")
