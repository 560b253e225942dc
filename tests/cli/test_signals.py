"""SIGINT, SIGTERM and SIGHUP of `serve`, `local --api`, `up` and `join`: one handler."""

import asyncio
import json
import os
import pty
import signal
import subprocess
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path

import pytest
import typer

from manyhands.cli.runfile import is_leaving, run_file, run_path
from manyhands.cli.signals import NUMBERS, StopSignals
from tests.waiting import GUARD_S


def seen(numbers: list[int], *, is_serving: bool = True) -> list[str]:
    """What work goes through that serves, is sent `numbers` one after the other, and takes for ever to hand over."""
    said: list[str] = []

    async def work(signals: StopSignals) -> None:
        try:
            if is_serving:
                said.append("serving")
                await signals.leaving()
                said.append("leaving")
            await asyncio.Event().wait()
        finally:
            said.append("ended")

    async def main() -> None:
        async with asyncio.timeout(GUARD_S):
            with StopSignals() as signals:
                running = asyncio.ensure_future(signals.run(work(signals)))
                for at, number in enumerate(numbers):
                    while is_serving and len(said) <= at:  # noqa: ASYNC110 - another's state
                        await asyncio.sleep(0.001)
                    await asyncio.sleep(0.01)
                    os.kill(os.getpid(), number)
                await running

    asyncio.run(main())
    return said


@pytest.mark.parametrize(
    "numbers",
    [[signal.SIGINT, signal.SIGTERM], [signal.SIGTERM, signal.SIGTERM], [signal.SIGHUP, signal.SIGTERM]],
)
def test_the_first_asks_to_leave_and_the_second_ends_it(numbers: list[int]) -> None:
    assert seen(numbers) == ["serving", "leaving", "ended"]


def test_the_run_file_says_that_the_node_was_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MANYHANDS_HOME", str(tmp_path))
    (tmp_path / "node.key").touch()

    async def main() -> None:
        async with asyncio.timeout(GUARD_S):
            with StopSignals(node="desk") as signals:
                asyncio.get_running_loop().call_soon(os.kill, os.getpid(), signal.SIGTERM)
                signals.begin_serving()
                assert not is_leaving(run_path("desk"))
                await signals.leaving()
                assert is_leaving(run_path("desk"))

    with run_file("desk", tmp_path / "node.key"):
        asyncio.run(main())


def test_before_it_serves_the_first_ends_it() -> None:
    assert seen([signal.SIGTERM], is_serving=False) == ["ended"]


@pytest.mark.parametrize(
    ("number", "is_serving", "code"),
    [(signal.SIGINT, False, 130), (signal.SIGTERM, False, None), (signal.SIGINT, True, None)],
)
def test_only_ctrl_c_before_it_serves_is_an_interruption(number: int, is_serving: bool, code: int | None) -> None:
    """What a manager ends by SIGTERM, or what has served, ends well."""

    async def work(signals: StopSignals) -> None:
        if is_serving:
            signals.begin_serving()
        os.kill(os.getpid(), number)
        await signals.leave.wait()

    async def main() -> None:
        async with asyncio.timeout(GUARD_S):
            with StopSignals() as signals:
                await signals.run(work(signals))
            signals.check_interrupted()

    said = None
    try:
        asyncio.run(main())
    except typer.Exit as ended:
        said = ended.exit_code
    assert said == code


def test_work_that_ends_or_fails_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    async def done() -> None: ...

    async def failing() -> None:
        raise ValueError("broken")

    async def main(work: Callable[[], Coroutine[None, None, None]]) -> None:
        with StopSignals() as signals:
            await signals.run(work())

    asyncio.run(main(done))
    with pytest.raises(ValueError, match="broken"):
        asyncio.run(main(failing))


def test_afterwards_the_signals_act_as_before() -> None:
    async def main() -> None:
        with StopSignals():
            pass

    before = [signal.getsignal(number) for number in NUMBERS]
    asyncio.run(main())
    assert [signal.getsignal(number) for number in NUMBERS] == before


def test_the_end_of_stdin_ends_a_child(monkeypatch: pytest.MonkeyPatch) -> None:
    read, write = os.pipe()
    said: list[str] = []

    async def work(signals: StopSignals) -> None:
        try:
            await signals.leaving()
        finally:
            said.append("ended")

    async def main() -> None:
        async with asyncio.timeout(GUARD_S):
            with StopSignals(while_stdin=True) as signals:
                running = asyncio.ensure_future(signals.run(work(signals)))
                os.write(write, b"anything")
                await asyncio.sleep(0.02)
                assert not running.done()
                os.close(write)
                await running

    with os.fdopen(read) as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        asyncio.run(main())
    assert said == ["ended"]


def test_sighup_stays_ignored_where_it_is() -> None:
    """As nohup has it: the command outlives its terminal."""

    async def main() -> None:
        with StopSignals() as signals:
            os.kill(os.getpid(), signal.SIGHUP)
            await asyncio.sleep(0.02)
            assert not signals.stop.is_set()

    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        asyncio.run(main())
    finally:
        signal.signal(signal.SIGHUP, before)


def test_sigint_is_taken_where_it_was_ignored() -> None:
    """As a script's shell has it for what it starts with `&`: `kill -INT` is meant then."""

    async def main() -> None:
        with StopSignals() as signals:
            os.kill(os.getpid(), signal.SIGINT)
            async with asyncio.timeout(GUARD_S):
                await signals.stop.wait()

    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        asyncio.run(main())
    finally:
        signal.signal(signal.SIGINT, before)


# Ctrl-C comes as soon as it has said that it serves.
AT_ONCE = """
import os, signal, sys
write = sys.stdout.write
def said(text):
    done = write(text)
    if '"serving"' in text:
        os.kill(os.getpid(), signal.SIGINT)
    return done
sys.stdout.write = said
from manyhands.__main__ import main
main()
"""


def test_what_has_said_that_it_serves_hands_over(tmp_path: Path) -> None:
    """`serve --api` ended at once, with 130, until its API was open as well."""
    words = ["serve", "tales", "--layers", "0-11", "--json", "--name", "one", "--api", "127.0.0.1:0"]
    done = subprocess.run(
        [sys.executable, "-c", AT_ONCE, *words],
        env=os.environ | {"MANYHANDS_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=2 * GUARD_S,
    )
    assert done.returncode == 0, done.stderr
    assert [json.loads(line)["event"] for line in done.stdout.splitlines()][-2:] == ["draining", "stopped"]


AS_LEADER = "import fcntl, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); from manyhands.__main__ import main; main()"


def test_a_node_whose_terminal_is_closed_leaves_in_order(tmp_path: Path) -> None:
    """And fails at nothing that it says to a terminal that is gone."""
    ours, terminal = pty.openpty()
    with subprocess.Popen(
        [sys.executable, "-c", AS_LEADER, "serve", "tales", "--layers", "0-1", "--json", "--name", "one"],
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        start_new_session=True,
        env=os.environ | {"MANYHANDS_HOME": str(tmp_path)},
    ) as process:
        os.close(terminal)
        said = b""
        try:
            while b'"serving"' not in said:
                said += os.read(ours, 65536)
            assert (tmp_path / "run/one.pid").is_file()
            os.close(ours)
            assert process.wait(GUARD_S) == 0
        finally:
            process.kill()
    assert not (tmp_path / "run/one.pid").exists(), "what it leaves behind, others would take for a crash"
