"""What a machine refuses - files, memory, threads - is one line with the limit and the remedy, and a bug is none of it."""

import asyncio
import errno
import fcntl
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from manyhands.cli.runfile import run_file, run_path
from manyhands.config import home_from_env
from manyhands.core import Span
from manyhands.engine.mapped import MappedTensors
from manyhands.errors import BadRequest, DiskFull, ManyhandsError, ModelError
from manyhands.files import expanded, own_home, put_new, write_private
from manyhands.local import NodeOptions, loopback, node_processes
from manyhands.refusals import failure, limit_reached, refused
from manyhands.swarm.identity import NodeKey
from manyhands.swarm.ticket import Ticket
from manyhands.testing.tiny import make_tiny


def os_error(number: int, *names: str) -> OSError:
    return OSError(number, os.strerror(number), *names)


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (os_error(errno.ENOSPC, "/disk/file"), "/disk/file: No space left on device; make room, or name another place"),
        (os_error(errno.ENAMETOOLONG, "/long"), "/long: File name too long; name a shorter one"),
        (os_error(errno.ENOENT, "/gone"), "/gone: No such file or directory"),
        (ExceptionGroup("", [ValueError(), ExceptionGroup("", [os_error(errno.EIO, "/bad")])]), "/bad: "),
        (os_error(errno.EMFILE), "Too many open files: this process may have "),
        (RuntimeError("can't start new thread"), "ulimit -u"),
        (MemoryError("no 5 bytes"), "no memory (no 5 bytes): "),
        (MemoryError(), "no memory: "),
        (os_error(errno.ENOMEM), "ulimit -v"),
        (ImportError("x.so: failed to map segment from shared object"), "ulimit -v"),
        (ImportError("x.so: cannot open shared object file: Cannot allocate memory"), "ulimit -v"),
    ],
)
def test_what_a_machine_refuses_is_one_line(error: BaseException, line: str) -> None:
    said = refused(error)
    assert said is not None and line in said and "\n" not in said


@pytest.mark.parametrize(
    "error",
    [
        os_error(errno.EBADF),
        RuntimeError("this event loop is already running"),
        ImportError("no module"),
        KeyError("x"),
    ],
)
def test_a_bug_is_no_refusal(error: BaseException) -> None:
    assert refused(error) is None and refused(ExceptionGroup("", [error])) is None  # type: ignore[type-var]


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ModelError("no such layers"), "no such layers"),
        (os_error(errno.EROFS, "/x"), "/x: Read-only file system; name another place"),
        (ConnectionResetError("reset by the hub"), "reset by the hub"),
        (RuntimeError("can't start new thread"), "the system starts no further thread or process"),
        (ExceptionGroup("", [os_error(errno.EIO, "/x"), ModelError("wrong bytes")]), "wrong bytes"),
    ],
)
def test_what_ends_no_other_work_is_one_line(error: Exception, line: str) -> None:
    said = failure(error)
    assert said is not None and said.startswith(line)


def test_a_bug_is_no_failure_of_work_beside_others() -> None:
    assert failure(KeyError("x")) is None
    assert failure(ExceptionGroup("", [os_error(errno.EIO, "/x"), KeyError("x")])) is None


def test_a_limit_is_found_behind_what_came_of_it() -> None:
    """An event loop that cannot be closed for want of files ends with another error; some are each other's context."""
    cause, bug = os_error(errno.EMFILE), RuntimeError("this event loop is already running")
    bug.__context__ = cause
    group = ExceptionGroup("", [bug])
    cause.__context__ = group
    said = limit_reached(group)
    assert said is not None and "ulimit -n" in said
    bug.__context__ = os_error(errno.ENOENT, "/gone")
    bug.__context__.__context__ = group
    assert limit_reached(group) is None and refused(group) is None


def run(words: list[str], environment: dict[str, str], before: str = "") -> subprocess.CompletedProcess[str]:
    """The command, in a process that runs the code `before` first. (A preexec_fn would need memory for a copy of this one.)"""
    begin = "os.execv(sys.executable, [sys.executable, '-m', 'manyhands', *sys.argv[1:]])"
    command = [sys.executable, "-c", f"import os, resource, sys\n{before}\n{begin}", *words]
    return subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True)


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    return {**os.environ, "MANYHANDS_HOME": str(tmp_path / "home")}


@pytest.mark.parametrize("most", [11, 24])
def test_too_few_open_files_are_one_line(most: int, environment: dict[str, str]) -> None:
    """With 11 the event loop cannot begin, with 24 the fourth node cannot be started."""
    words = ["local", "tales", "--nodes", "4", "--threads", "1", "-p", "Once", "-n", "1"]
    ended = run(words, environment, f"resource.setrlimit(resource.RLIMIT_NOFILE, ({most}, {most}))")
    (line,) = ended.stderr.splitlines()
    assert ended.returncode == 1 and f"this process may have {most} at once; raise it (ulimit -n)" in line


@pytest.mark.parametrize("words", [["doctor"], ["list"], ["service", "install", "--print", "up", "tales"]])
def test_a_folder_that_is_gone_is_named(words: list[str], environment: dict[str, str], tmp_path: Path) -> None:
    gone = str(tmp_path / "gone")
    ended = run(words, environment, f"os.mkdir({gone!r}); os.chdir({gone!r}); os.rmdir({gone!r})")
    (line,) = ended.stderr.splitlines()
    assert ended.returncode == 2 and "the folder that this runs in is gone" in line and "cd to another" in line


@pytest.mark.parametrize(
    ("name", "value"),
    [("https_proxy", "::::"), ("all_proxy", "bogus://127.0.0.1:9"), ("SSL_CERT_FILE", "/nonexistent")],
)
def test_what_admits_no_client_of_the_hub_is_named(name: str, value: str, environment: dict[str, str]) -> None:
    ended = run(["pull", "owner/model"], {**environment, name: value, "HF_HUB_OFFLINE": ""})
    (line,) = ended.stderr.splitlines()
    assert ended.returncode == 2 and "the hub cannot be asked with" in line and name in line and "unset" in line


def test_nodes_are_understood_whatever_the_shell_writes_in(environment: dict[str, str]) -> None:
    words = ["local", "tales", "--nodes", "2", "--threads", "1", "-p", "Once", "-n", "4", "--json"]
    command = [sys.executable, "-m", "manyhands", *words]
    ended = subprocess.run(command, env={**environment, "PYTHONIOENCODING": "utf-16"}, capture_output=True, text=False)
    assert ended.returncode == 0, ended.stderr.decode("utf-16")
    assert '"finish_reason": "length"' in ended.stdout.decode("utf-16")


def test_a_process_that_cannot_be_started_is_told_with_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    async def none(*words: str, **options: object) -> None:
        raise os_error(errno.EAGAIN)

    async def start() -> None:
        async with node_processes([Span(0, 6), Span(6, 12)], NodeOptions("tales"), Ticket.new("x")):
            pass

    monkeypatch.setattr(asyncio, "create_subprocess_exec", none)
    with pytest.raises(ManyhandsError, match=r"node-0 \(layers 0-5\) cannot be started: .*ulimit -u"):
        asyncio.run(start())


def test_processes_meet_by_ipv6_where_there_is_no_ipv4(monkeypatch: pytest.MonkeyPatch) -> None:
    assert loopback() == "127.0.0.1"

    class NoIpv4(socket.socket):
        def bind(self, address: object) -> None:
            raise os_error(errno.EADDRNOTAVAIL)

    monkeypatch.setattr("socket.socket", NoIpv4)
    assert loopback() == "[::1]"


def test_a_home_that_is_not_known_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """HOME unset and no entry among the system's users, as in a container that runs as any number; or no such user."""

    def unknown(path: Path) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setenv("MANYHANDS_HOME", "~no-such-user/x")
    with pytest.raises(BadRequest, match=r"~no-such-user/x: no home folder .* set MANYHANDS_HOME"):
        home_from_env()
    assert expanded("~no-such-user/x") == Path("~no-such-user/x")
    monkeypatch.setattr(Path, "expanduser", unknown)
    with pytest.raises(BadRequest, match=rf"~/.manyhands: .*uid {os.geteuid()}.* set MANYHANDS_HOME"):
        own_home({})


def test_a_full_disk_is_no_wrong_option(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Exit code 1: a service tries again when there is room, and does not after 2."""

    def full(descriptor: int) -> None:
        raise os_error(errno.ENOSPC)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(DiskFull, match=r"keys cannot be written \(No space left on device\): make room") as caught:
        write_private(tmp_path / "keys", "x")
    assert caught.value.http_status >= 500 and list(tmp_path.iterdir()) == []


def test_a_file_system_without_hard_links_and_locks_holds_a_home(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """FAT has no links, some file systems of networks no locks. What another process put there first stays."""

    def no_link(draft: Path, path: Path) -> None:
        raise os_error(errno.EPERM)

    def no_lock(file: object, how: int) -> None:
        raise os_error(errno.ENOLCK)

    monkeypatch.setattr(os, "link", no_link)
    monkeypatch.setattr(fcntl, "flock", no_lock)
    monkeypatch.setenv("MANYHANDS_HOME", str(tmp_path))
    key = NodeKey.load_or_create(tmp_path / "node.key")
    assert NodeKey.load_or_create(tmp_path / "node.key").node_id == key.node_id
    (tmp_path / "draft").write_text("later")
    with pytest.raises(FileExistsError):
        put_new(tmp_path / "draft", tmp_path / "node.key")
    with run_file("desk", tmp_path / "node.key"):
        assert run_path("desk").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["draft", "node.key", "run"]


def test_a_file_system_that_maps_no_file_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def none(*_: object, **__: object) -> None:
        raise os_error(errno.ENODEV)

    folder = make_tiny("llama", tmp_path / "tiny", layers=1, seed=1)
    monkeypatch.setattr("mmap.mmap", none)
    with (
        MappedTensors(folder, lambda *_: None) as tensors,
        pytest.raises(ModelError, match="copy the model to another"),
    ):
        tensors.read("model.norm.weight")


@pytest.mark.parametrize(
    ("words", "why"),
    [("os.kill(os.getpid(), 9)", "runs out of memory"), ("os.abort()", "signal 6"), ("sys.exit(5)", "exit code 5")],
)
def test_why_a_node_ended_without_a_word(words: str, why: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    async def start() -> None:
        async with node_processes([Span(0, 12)], NodeOptions("tales", module="mute"), Ticket.new("x")):
            pass

    (tmp_path / "mute.py").write_text(f"import os, sys\n{words}\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    with pytest.raises(ModelError, match=rf"node-0 \(layers 0-11\) ended before it served: .*{why}"):
        asyncio.run(start())


def test_nodes_that_were_starting_end_when_that_is_cancelled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pids = tmp_path / "pids"

    async def start() -> None:
        async with node_processes([Span(0, 6), Span(6, 12)], NodeOptions("tales", module="silent"), Ticket.new("x")):
            pass

    async def cancelled() -> None:
        starting = asyncio.ensure_future(start())
        async with asyncio.timeout(60):
            while not pids.exists() or len(pids.read_text().splitlines()) < 2:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting

    said = f"with open({str(pids)!r}, 'a') as file:\n    print(os.getpid(), file=file)"
    (tmp_path / "silent.py").write_text(f"import os, time\n{said}\ntime.sleep(600)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    asyncio.run(cancelled())
    for pid in map(int, pids.read_text().split()):
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
