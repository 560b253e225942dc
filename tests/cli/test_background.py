"""-d: a process without a terminal, its log, and what the one that waits for it says."""

import asyncio
import io
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from manyhands.cli import app, log_file
from manyhands.cli.background import Tee
from manyhands.cli.log_file import LateLines, LogFile, follow, last_lines, log_path, older
from manyhands.cli.progress import Screen
from manyhands.cli.runfile import check_not_running, run_file
from manyhands.errors import BadRequest, NotFound


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MANYHANDS_HOME", str(tmp_path))
    return tmp_path


def texts(path: Path) -> list[str]:
    return [line[21:] for line in path.read_text().splitlines()]


# -- the log ----------------------------------------------------------------------------------------------------------


def test_a_line_has_its_time_and_neither_secrets_nor_control_characters(tmp_path: Path) -> None:
    log = LogFile(tmp_path / "logs" / "desk.log", clock=lambda: 0.0)
    log.write("swarm desk, ")
    log.write("alone\n\x1b[32mgreen\x1b[0m\n\nmanyhands join mh1" + "A" * 40 + "\nevil\x1b]0;title\x07\n")
    lines = log.path.read_text().splitlines()
    assert [line[21:] for line in lines] == [
        "swarm desk, alone",
        "green",
        "manyhands join mh1...",
        "evil?]0;title?",
    ]
    assert all(line.startswith(time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(0))) for line in lines)
    assert log.path.stat().st_mode & 0o077 == 0


def test_a_log_is_bounded_however_much_is_said(tmp_path: Path) -> None:
    log = LogFile(tmp_path / "desk.log", most_bytes=20_000)
    given: list[int] = []
    log.on_new_file = given.append
    for number in range(3000):
        log.write(f"line {number}\n")
    log.write("x" * 100_000)  # a line without an end
    assert log.path.stat().st_size <= 20_000 and older(log.path).stat().st_size <= 20_000
    assert sorted(path.name for path in tmp_path.iterdir()) == ["desk.log", "desk.log.1"]
    assert len(given) >= 3 and texts(log.path)[-2] == "line 2999"
    assert [line[21:] for line in last_lines(log.path, 600)][-3:-1] == ["line 2998", "line 2999"]
    assert len(last_lines(log.path, 600)) == 600, "from the file before too"


def test_a_full_disk_does_not_end_a_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = LogFile(tmp_path / "desk.log")

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    log.write("lost\n")
    monkeypatch.undo()
    log.write("kept\n")
    assert texts(log.path) == ["kept"]


def test_following_goes_over_to_the_next_file_and_ends_with_the_node(tmp_path: Path) -> None:
    log = LogFile(tmp_path / "desk.log", most_bytes=300)
    log.write("before\n")
    asked: list[int] = []

    def goes_on() -> bool:
        asked.append(len(asked))
        if len(asked) in (2, 3):
            for number in range(20):
                log.write(f"said {len(asked)}.{number}\n")
        return len(asked) < 4

    found = [line[21:] for line in follow(log.path, goes_on, sleep=lambda _: None)]
    assert "before" not in found and found[-1] == "said 3.19" and "said 2.0" in found


def test_following_loses_no_line_of_a_file_that_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One said after the last look, before the next file was begun, stood in neither."""
    log = LogFile(tmp_path / "desk.log", most_bytes=300)
    said = iter(["first", "last of its file", "x" * 260])
    is_other = log_file._is_other

    def full(path: Path, fd: int) -> bool:
        for text in said:
            log.write(f"{text}\n")
        return is_other(path, fd)

    monkeypatch.setattr(log_file, "_is_other", full)
    answers = iter([True, True, True, False])
    found = [line[21:] for line in follow(log.path, lambda: next(answers), sleep=lambda _: None)]
    assert found == ["first", "last of its file", "x" * 260]


def test_logs_shows_the_last_lines_and_names_what_there_is(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="no log here; nodes started with -d have one"):
        CliRunner().invoke(app, ["logs"], catch_exceptions=False)
    log = LogFile(log_path("desk"), clock=lambda: 0.0)
    log.write("one\ntwo\nthree\n")
    said = CliRunner().invoke(app, ["logs", "-n", "2"])
    assert [line[21:] for line in said.stdout.splitlines()] == ["two", "three"]
    assert CliRunner().invoke(app, ["logs", "desk", "-f", "-n", "0"]).stdout == "", (
        "it does not run: nothing to wait for"
    )
    with pytest.raises(NotFound, match=r"nas has no log here.*there are those of desk"):
        CliRunner().invoke(app, ["logs", "nas"], catch_exceptions=False)
    LogFile(log_path("nas"))
    with pytest.raises(NotFound, match=r"which node\? there are those of desk, nas"):
        CliRunner().invoke(app, ["logs"], catch_exceptions=False)
    with run_file("desk", log_path("desk")):
        assert CliRunner().invoke(app, ["logs", "-n", "1"]).stdout.endswith("three\n"), "the one that runs"


def test_a_log_that_cannot_be_written_is_said_before_anything_is_begun(tmp_path: Path) -> None:
    (tmp_path / "logs").write_text("no folder")
    with pytest.raises(BadRequest, match="set MANYHANDS_HOME"):
        LogFile(log_path("desk"))


# -- the terminal -----------------------------------------------------------------------------------------------------


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_lines_go_to_both_and_progress_to_the_terminal_alone(tmp_path: Path) -> None:
    terminal, log = Terminal(), LogFile(tmp_path / "desk.log")
    tee = Tee(terminal, log, LateLines(log.write))
    assert tee.isatty()
    screen = Screen(tee, is_shown=True)  # type: ignore[arg-type]
    screen.say("fetching tales")
    screen.clear()
    print("serving", file=tee, flush=True)
    tee.let_go()
    print("after", file=tee, flush=True)
    screen.say("unseen")
    assert "fetching tales" in terminal.getvalue() and terminal.getvalue().endswith("serving\n")
    assert texts(log.path) == ["serving", "after"] and not tee.isatty()


def test_a_terminal_that_is_closed_meanwhile_ends_nothing(tmp_path: Path) -> None:
    terminal, log = Terminal(), LogFile(tmp_path / "desk.log")
    tee = Tee(terminal, log, LateLines(log.write))
    terminal.close()
    print("serving", file=tee, flush=True)
    assert texts(log.path) == ["serving"]


def test_an_event_loop_does_not_wait_for_a_disk_that_takes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is said meanwhile is written later, in order, as far as MOST_WAITING goes; then how many lines are left out."""
    log, takes, is_writing = LogFile(tmp_path / "desk.log"), threading.Event(), threading.Event()

    def write(text: str) -> None:
        is_writing.set()
        assert threading.current_thread() is not threading.main_thread() and takes.wait(60)
        log.write(text)

    lines = LateLines(write)
    tee = Tee(Terminal(), log, lines)
    monkeypatch.setattr("manyhands.cli.log_file.MOST_WAITING", 1000)

    async def main() -> None:
        print("line 0", file=tee, flush=True)
        assert await asyncio.to_thread(is_writing.wait, 60)  # what it takes at once depends on when it begins
        for number in range(1, 500):
            print(f"line {number}", file=tee, flush=True)

    asyncio.run(main())
    assert texts(log.path) == []
    takes.set()
    tee.flush()  # waits, where no loop runs
    said = texts(log.path)
    kept = [line for line in said if line.startswith("line ")]
    left_out = re.fullmatch(r"(\d+) lines are left out: the disk was too slow for them", said[-1])
    assert kept == [f"line {number}" for number in range(len(kept))] and 100 < len(kept) < 250
    assert left_out is not None and len(kept) + int(left_out[1]) == 500
    print("on it goes", file=tee, flush=True)
    assert texts(log.path)[-1] == "on it goes"


# -- the process ------------------------------------------------------------------------------------------------------

BEGIN = """
import os, signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
from manyhands.cli import log_file
from manyhands.cli.background import go_on_in_background
from manyhands.cli.runfile import run_file
import typer
try:
    here = go_on_in_background("desk", as_json={as_json})
except typer.Exit as end:
    sys.exit(end.exit_code)
"""
SERVE = """
told, telling = os.pipe()  # a signal that comes before it is waited for is not lost
os.set_blocking(telling, False)
signal.set_wakeup_fd(telling)
signal.signal(signal.SIGTERM, lambda *_: None)
with run_file("desk", log_file.log_path("desk")):  # a file of this test alone: it is locked
    print("serving layers 0-11", flush=True)
    here.serves()
    print("a node has come", flush=True)
    os.write(2, b"from a library\\n")
    os.read(told, 1)
sys.exit("left")
"""


def run(code: str, as_json: bool = False) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", BEGIN.format(as_json=as_json) + code]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


@pytest.fixture
def ended() -> Iterator[list[int]]:
    """Processes in the background that are ended with the test."""
    pids: list[int] = []
    yield pids
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


def test_it_returns_when_the_node_serves_and_the_node_goes_on(ended: list[int]) -> None:
    """The pipes of the one that waited are not held open: `subprocess.run` returns."""
    done = run(SERVE, as_json=True)
    assert done.returncode == 0 and done.stderr == ""
    first, last = done.stdout.splitlines()
    facts = json.loads(last)
    assert first == "serving layers 0-11" and facts["event"] == "background" and facts["name"] == "desk"
    ended.append(facts["pid"])
    assert os.getsid(facts["pid"]) == facts["pid"], "of no terminal's session"
    with pytest.raises(BadRequest, match=f"desk runs here already .process {facts['pid']}.*manyhands stop desk"):
        check_not_running("desk")
    again = run(SERVE)
    assert again.returncode == 1 and "runs here already" in again.stderr
    assert CliRunner().invoke(app, ["stop"]).stdout == "desk has left\n"
    ended.clear()
    log = log_path("desk").read_text()
    for said in ("serving layers 0-11", "a node has come", "from a library"):
        assert said in log


@pytest.mark.parametrize(
    ("code", "status", "said"),
    [
        ("print('manyhands: no memory', file=sys.stderr); sys.exit(2)", 2, "manyhands: no memory"),
        ("raise SystemExit(0)", 1, ""),
        ("os.kill(os.getpid(), signal.SIGKILL)", 1, "ended by SIGKILL before it served"),
    ],
)
def test_one_that_ends_before_it_serves_says_why(code: str, status: int, said: str) -> None:
    done = run(code)
    assert (done.returncode, done.stdout) == (status, "") and said in done.stderr


def test_one_that_does_not_come_to_serve_goes_on(ended: list[int]) -> None:
    slow = "print(os.getpid(), flush=True); here._deadline.function(*here._deadline.args); time.sleep(600)"
    done = run(slow)
    ended.append(int(done.stdout))
    assert done.returncode == 1 and "does not serve after 600 s; it goes on in the background" in done.stderr


# The signal comes when the process has just been forked, before the one that waits for it does anything else.
AT_ONCE = """
import os, signal
fork = os.fork
def interrupted():
    pid = fork()
    if pid:
        os.kill(os.getpid(), signal.{number})
    return pid
os.fork = interrupted
"""


@pytest.mark.parametrize(
    "before, number",
    list(itertools.product(["", AT_ONCE], [signal.SIGINT, signal.SIGTERM])),
    ids=["SIGINT", "SIGTERM", "SIGINT at once", "SIGTERM at once"],
)
def test_a_signal_while_it_starts_ends_it(before: str, number: signal.Signals, tmp_path: Path) -> None:
    """At once: the new process may have ended before it said anything."""
    before = before.format(number=number.name)
    say = f"open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid())); print(flush=True); time.sleep(60)"
    command = [sys.executable, "-c", before + BEGIN.format(as_json=False) + say]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as waiting:
        assert waiting.stdout is not None
        if not before:
            waiting.stdout.readline()
            waiting.send_signal(number)
        assert waiting.wait(60) != 0
        if (tmp_path / "pid").exists() and (pid := (tmp_path / "pid").read_text()):  # it may have ended as it wrote
            with pytest.raises(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        began = time.monotonic()
        waiting.stdout.read()
        assert time.monotonic() - began < 30, "it has ended, and holds the pipe no more"


@pytest.mark.parametrize("ends", ["by itself", "by another Ctrl-C"])
def test_one_that_loads_when_it_is_interrupted_is_waited_for(ends: str) -> None:
    """An import of many seconds, say, which no signal interrupts."""
    soon = "import manyhands.cli.background as background; background.END_S = 0.0\n"
    load = """
signal.signal(signal.SIGTERM, signal.SIG_IGN)  # to block it here would leave it to the threads of the log
signal.signal(signal.SIGUSR1, lambda *_: os._exit(7))
print(os.getpid(), flush=True)
while True:
    signal.pause()
"""
    command = [sys.executable, "-c", soon + BEGIN.format(as_json=False) + load]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as waiting:
        assert waiting.stdout is not None and waiting.stderr is not None
        pid = int(waiting.stdout.readline())
        waiting.send_signal(signal.SIGINT)
        assert waiting.stderr.readline().startswith(f"desk (process {pid}) ends when it has loaded")
        assert waiting.poll() is None, "it waits"
        if ends == "by itself":
            os.kill(pid, signal.SIGUSR1)
        else:
            waiting.send_signal(signal.SIGINT)
        assert waiting.wait(60) != 0
        with pytest.raises(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def test_serve_goes_on_in_the_background_once_it_serves(ended: list[int]) -> None:
    words = ["serve", "tales", "--layers", "0-0", "--name", "nas", "--threads", "1", "-d", "--json"]
    command = [sys.executable, "-m", "manyhands.cli", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()[-2:]  # a slow start shows progress before them
    serving, background = [json.loads(line) for line in lines]
    ended.append(background["pid"])
    assert (serving["event"], background["event"], background["name"]) == ("serving", "background", "nas")
    for name, said in (("nas", "nas runs here already"), ("other", "node.key runs here already (there is nas)")):
        words[words.index("--name") + 1] = name
        again = subprocess.run([*command[:3], *words], capture_output=True, text=True, timeout=120)
        assert again.returncode == 2 and said in again.stderr
        assert [json.loads(line)["event"] for line in again.stdout.splitlines()] == ["error"]
    assert CliRunner().invoke(app, ["stop", "nas"]).stdout == "nas has left\n"
    ended.clear()
    log = log_path("nas").read_text()
    assert '"draining"' in log and serving["ticket"] not in log
