"""manyhands.cli.lines: a narrow terminal breaks no word, a pipe gets lines as they are, a ticket stays whole."""

import errno
import io
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from manyhands import cli
from manyhands.cli import app, lines, page, plan_swarm, workers
from manyhands.cli.client import refusal_of
from manyhands.cli.gateway import say_api
from manyhands.cli.lines import Flow, error_line, fitted
from manyhands.core import NodeAddr, NodeId
from manyhands.errors import BadRequest
from manyhands.member.home import save_ticket
from manyhands.plain import counted
from manyhands.swarm.ticket import Ticket


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_words_stay_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    text = (
        "nodes of swarm desk do not answer (192.168.77.11:35991 cannot be reached: Connection refused): is it up there?"
    )
    lines = error_line(BadRequest(text), Terminal()).split("\n")
    assert len(lines) > 2 and max(map(len, lines)) <= 40
    assert " ".join(line.strip() for line in lines) == f"manyhands: {text}"
    assert all(line.startswith("  ") for line in lines[1:])
    assert error_line(BadRequest(text), io.StringIO()) == f"manyhands: {text}"


WORKER = {
    "name": "desk",
    "worker_id": "5316ad0a2a1e5759",
    "status": "active",
    "sessions": 0,
    "rtt_ms": 0.73,
    "address": "127.0.0.1:37305",
    "spans": [{"model": "smollm2", "layers": "0-14", "is_spare": False, "free_positions": 65536}],
}
TOLD: dict[str, Any] = {
    "workers": [WORKER],
    "scheduler": {"routes": {}},
    "after": None,
    "advice": ["desk alone is fastest: expect 485 tokens/s; shared (laptop 0, desk 1-11) it would be 23.3"],
}


@pytest.mark.parametrize(
    "words", ["list", "show tales", "key list", "workers", "plan tales --swarm", "page", "ticket show", "ticket rotate"]
)
def test_commands_break_no_word_of_a_narrow_terminal(
    words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MANYHANDS_HOME", str(tmp_path))
    monkeypatch.setattr(lines, "width_of", lambda out: 40)
    for asking in (workers, plan_swarm):
        monkeypatch.setattr(asking, "ask", lambda *_: TOLD)
    monkeypatch.setattr(page, "page_link", lambda _: page.PageLink("http://127.0.0.1:8000/#/sign-in/x", 600.0))
    save_ticket(tmp_path, Ticket.new("home").with_address(NodeAddr("203.0.113.250", 40123, NodeId("5a" * 32))))
    shown = CliRunner().invoke(app, words.split(), catch_exceptions=False).output
    assert shown.strip()
    assert [line for line in shown.splitlines() if len(line) > 40 and len(line.split()) > 2] == []


def test_what_stands_below_a_line_is_indented(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    first, *below = fitted(f"ok   disk       {'free ' * 20}", Terminal(), 16).split("\n")
    assert first.startswith("ok   disk       free") and below
    assert all(line.startswith(" " * 16 + "free") and len(line) <= 40 for line in below)


def test_what_is_copied_stays_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    assert "\n" in fitted(f"{'word ' * 30} manyhands join mh1...", Terminal()), "that is no ticket"
    line = f"from elsewhere:  manyhands join mh1{'A' * 120}"
    assert fitted(f"{line}\n  short", Terminal()) == f"{line}\n  short"


def test_a_text_that_grows_is_broken_between_words() -> None:
    text = "Photosynthesis is a process\n\nby which plants convert carbon dioxide into glucose and so on."
    for size in (1, 2, 3, 7, 100):
        flow = Flow(24)
        shown = "".join(flow.feed(text[i : i + size]) for i in range(0, len(text), size)) + flow.end()
        assert shown.split() == text.split() and "process\n\nby" in shown
        assert max(map(len, shown.split("\n"))) <= 24
    assert flow.feed("a word ") + flow.feed("of the next line") + flow.end() == "a word of the next line"
    plain = Flow(None)
    assert plain.feed("x" * 100 + " y") + plain.end() == "x" * 100 + " y"


def test_what_to_do_with_an_api_fits_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    say_api("http://127.0.0.1:8000", "smollm2")
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "chat in a browser: http://127.0.0.1:8000/" and max(map(len, lines)) < 80


def test_no_color_is_heeded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MANYHANDS_HOME", str(tmp_path))
    monkeypatch.delenv("NO_COLOR", raising=False)
    save_ticket(tmp_path, Ticket.new("lab").with_address(NodeAddr("127.0.0.1", 7700)))
    assert "\x1b" in CliRunner().invoke(app, ["ticket", "rotate"], color=True).stderr
    monkeypatch.setenv("NO_COLOR", "1")
    plain = CliRunner().invoke(app, ["ticket", "rotate"], color=True)
    assert plain.exit_code == 0 and "\x1b" not in plain.output


def test_what_a_disk_refuses_is_one_line_and_a_bug_is_not(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    errors = [OSError(errno.ENOSPC, "No space left on device", "/x/y"), OSError(errno.EBADF, "Bad file descriptor")]

    def fail() -> None:
        raise errors.pop(0)

    monkeypatch.setattr(cli, "app", fail)
    with pytest.raises(SystemExit) as ended:
        cli.main()
    said = capsys.readouterr().err
    assert ended.value.code == 1 and said.startswith("manyhands: /x/y: No space left on device; make room")
    assert said.count("\n") == 1
    with pytest.raises(OSError, match="Bad file"):
        cli.main()


def test_a_command_says_where_a_key_goes() -> None:
    told = refusal_of({"message": "this gateway needs a key", "code": "invalid_api_key"}, 401)
    assert "--api-key mhk_" in str(told) and "MANYHANDS_API_KEY" in str(told) and told.code == "invalid_api_key"
    assert "--api-key" not in str(refusal_of({"message": "busy", "code": "busy"}, 503))


@pytest.mark.parametrize(("count", "said"), [(0, "0 tokens"), (1, "1 token"), (2, "2 tokens")])
def test_one_is_not_many(count: int, said: str) -> None:
    assert counted(count, "token") == said
