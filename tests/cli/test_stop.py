"""manyhands stop and the run file: a signal goes to the node that wrote the file, and to no other process."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from manyhands.cli import app, signals
from manyhands.cli.runfile import is_leaving, note_leaving, run_file, run_path, running_pid
from manyhands.errors import BadRequest, NotFound
from manyhands.member.process import start_ticks
from tests.waiting import GUARD_S, until

SLEEPER = """
import signal
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])  # one that comes before it waits for it is not lost
print(flush=True)
signal.sigwait([signal.SIGTERM])
"""


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MANYHANDS_HOME", str(tmp_path))
    (tmp_path / "run").mkdir()
    return tmp_path


@pytest.fixture
def key(tmp_path: Path) -> Path:
    """A file of this test alone: it is locked while its node runs."""
    path = tmp_path / "node.key"
    path.touch()
    return path


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", SLEEPER], stdout=subprocess.PIPE) as child:
        assert child.stdout and child.stdout.readline()  # it takes the signal from now on
        yield child
        child.kill()


@pytest.fixture(params=[True, False], ids=["descriptor", "id"])
def system(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """One with descriptors of processes, as Linux, and one without, as macOS."""
    if not request.param:
        monkeypatch.delattr(os, "pidfd_open")


def stat(pid: int) -> list[str]:
    """Fields of /proc/PID/stat, from the state on."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def ticks(pid: int) -> int:
    return int(stat(pid)[19])


@pytest.mark.usefixtures("system")
def test_a_node_is_told_to_leave(process: subprocess.Popen[bytes]) -> None:
    run_path("desk").write_text(f"{process.pid} {ticks(process.pid)}")
    said = CliRunner().invoke(app, ["stop", "desk", "--wait", f"{GUARD_S}"])
    assert said.exit_code == 0 and said.stdout == "desk has left\n"
    assert process.wait() == 0


SLOW_END = """
import os, signal, sys, time
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
print(flush=True)
signal.sigwait([signal.SIGTERM])
os.unlink(sys.argv[1])
time.sleep(0.5)
"""


@pytest.mark.usefixtures("system")
def test_one_that_has_left_is_gone() -> None:
    """It was said as soon as the file was gone: the next node of that key, started at once, could find it locked yet."""
    path = run_path("desk")
    with subprocess.Popen([sys.executable, "-c", SLOW_END, path], stdout=subprocess.PIPE) as child:
        assert child.stdout and child.stdout.readline()
        path.write_text(f"{child.pid} {ticks(child.pid)}")
        assert CliRunner().invoke(app, ["stop", "desk"]).stdout == "desk has left\n"
        assert start_ticks(child.pid) is None


WITHOUT_MAIN_THREAD = """
import ctypes, platform, threading, time
threading.Thread(target=time.sleep, args=[60]).start()
print(flush=True)
ctypes.CDLL(None).syscall({"x86_64": 60, "aarch64": 93}[platform.machine()], 0)  # exit, of the calling thread alone
"""


def test_one_of_which_threads_are_left_is_not_gone() -> None:
    """As of a killed node on a busy machine: its main thread was a zombie, and others of its threads still held the key."""
    with subprocess.Popen([sys.executable, "-c", WITHOUT_MAIN_THREAD], stdout=subprocess.PIPE) as child:
        assert child.stdout and child.stdout.readline()
        asyncio.run(until(lambda: stat(child.pid)[0] == "Z"))
        assert start_ticks(child.pid) == ticks(child.pid)
        child.kill()
        asyncio.run(until(lambda: len(os.listdir(f"/proc/{child.pid}/task")) == 1))  # nothing has reaped it
        assert start_ticks(child.pid) is None


@pytest.mark.usefixtures("system")
def test_one_that_stays_is_reported(process: subprocess.Popen[bytes]) -> None:
    run_path("desk").write_text(f"{process.pid} {ticks(process.pid)}")
    process.send_signal(signal.SIGSTOP)
    said = CliRunner().invoke(app, ["stop", "desk", "--wait", "0"])
    assert said.exit_code == 1 and "has not left after" in said.stdout


def test_the_only_node_needs_no_name(process: subprocess.Popen[bytes], key: Path) -> None:
    with pytest.raises(NotFound, match="no node runs here"):
        CliRunner().invoke(app, ["stop"], catch_exceptions=False)
    run_path("desk").write_text(f"{process.pid} {ticks(process.pid)}")
    with run_file("nas", key), pytest.raises(NotFound, match=r"which node\? there are desk, nas"):
        CliRunner().invoke(app, ["stop"], catch_exceptions=False)
    assert CliRunner().invoke(app, ["stop"]).stdout == "desk has left\n"


BUSY = """
import signal, sys
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT, signal.SIGTERM])
print(flush=True)
sys.stdin.readline()
sys.exit(len(signal.sigpending()))
"""


@pytest.mark.usefixtures("system")
@pytest.mark.parametrize("is_told_before", [True, False])
def test_now_is_the_second_signal(is_told_before: bool) -> None:
    """The first asks a node to hand its sessions over. This one takes neither before all were sent, as on a busy machine."""
    with subprocess.Popen([sys.executable, "-c", BUSY], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as busy:
        assert busy.stdout and busy.stdout.readline()
        run_path("desk").write_text(f"{busy.pid} {ticks(busy.pid)}")
        if is_told_before:
            said = CliRunner().invoke(app, ["stop", "desk", "--wait", "0"])
            assert said.exit_code == 1 and "manyhands stop desk --now ends it at once" in said.stdout
        assert CliRunner().invoke(app, ["stop", "desk", "--now", "--wait", "0"]).exit_code == 1
        busy.communicate(b"\n", GUARD_S)
        assert busy.returncode == 2, "signals that it took"


def test_to_ask_again_is_no_second_signal() -> None:
    """`manyhands stop` after one that had not waited long enough cut the sessions, as --now does."""
    with subprocess.Popen([sys.executable, "-c", BUSY], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as busy:
        assert busy.stdout and busy.stdout.readline()
        path = run_path("desk")
        path.write_text(f"{busy.pid} {ticks(busy.pid)}")
        note_leaving("desk")
        assert running_pid(path) == busy.pid and is_leaving(path)
        for more in ([], ["--now"]):
            assert CliRunner().invoke(app, ["stop", "desk", "--wait", "0", *more]).exit_code == 1
        busy.communicate(b"\n", GUARD_S)
        assert busy.returncode == 1, "signals that it took"


def test_a_node_without_a_run_file_gets_none() -> None:
    note_leaving("desk")
    assert not run_path("desk").exists() and not is_leaving(run_path("desk"))


def test_another_process_of_that_id_is_left_alone(process: subprocess.Popen[bytes]) -> None:
    path = run_path("desk")
    path.write_text(f"{process.pid} {ticks(process.pid) - 1}")  # a node that died; its id was given to another process
    with pytest.raises(NotFound, match="no node 'desk' runs here; none does"):
        CliRunner().invoke(app, ["stop", "desk"], catch_exceptions=False)
    path.write_text(str(process.pid))  # as other versions wrote it: only the time of the file tells
    os.utime(path, (time.time() - 3600, time.time() - 3600))
    with pytest.raises(NotFound):
        CliRunner().invoke(app, ["stop", "desk"], catch_exceptions=False)
    assert process.poll() is None
    os.utime(path)
    assert running_pid(path) == process.pid


@pytest.mark.parametrize("text", ["", "x", "0", "1", "-1", "999999999", "1 2 3", "\x00"])
def test_files_that_name_no_process(text: str) -> None:
    run_path("desk").write_text(text)
    assert running_pid(run_path("desk")) is None


def test_names_that_run_are_told(key: Path) -> None:
    with run_file("desk", key):
        assert running_pid(run_path("desk")) == os.getpid()
        with pytest.raises(NotFound, match="there is desk"):
            CliRunner().invoke(app, ["stop", "nas"], catch_exceptions=False)
    assert not run_path("desk").exists()


def test_two_nodes_of_one_name_are_refused(process: subprocess.Popen[bytes], key: Path) -> None:
    run_path("desk").write_text(f"{process.pid} {ticks(process.pid)}")
    with pytest.raises(BadRequest, match=f"process {process.pid}.*--name NAME"), run_file("desk", key):
        pass
    assert running_pid(run_path("desk")) == process.pid


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "a\0b"])
def test_names_that_are_no_file(name: str) -> None:
    with pytest.raises(BadRequest, match="cannot name a node"):
        run_path(name)


def test_without_proc_a_process_of_ours_must_do(tmp_path: Path, process: subprocess.Popen[bytes]) -> None:
    run_path("desk").write_text(str(process.pid))
    assert running_pid(run_path("desk"), tmp_path / "none") == process.pid
    process.kill()
    process.wait()
    assert running_pid(run_path("desk"), tmp_path / "none") is None


def test_a_disk_that_takes_nothing_holds_no_leave_up(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = threading.Event()
    monkeypatch.setattr(signals, "note_leaving", lambda name: taken.wait())
    monkeypatch.setattr(signals, "NOTE_S", 0.01)

    async def main() -> None:
        with signals.StopSignals(node="desk") as stop:
            stop.leave.set()
            await stop.leaving()
            assert not taken.is_set()

    try:
        asyncio.run(main())
    finally:
        taken.set()
