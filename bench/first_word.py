"""How long from Enter to the first character on the terminal, of every command? And how much CPU did that take?

Each command runs alone on a terminal (a pty), in a new home, until it says something; then it is ended. `wall_s` is what a
person sees on this machine, as busy as it is; `cpu_s` (user and system of the process, in steps of 10 ms) is near what a
machine with nothing else to do shows. Run: python -m bench.first_word [--reps 3]
"""

import argparse
import contextlib
import os
import pty
import select
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final, NamedTuple

from bench.report import finish, measuring, spread
from manyhands.swarm.ticket import Ticket

SAYS_S, REFUSES_S = 0.5, 0.2  # seconds of CPU until the first word; of help and of a refusal
WAIT_S = 60.0
TICKET: Final = "TICKET"  # stands for one whose nodes do not answer

# What each command is given here: the name of the command, then the rest. OUT is a folder that is not there yet.
COMMANDS: Final = (
    "up tales --listen 127.0.0.1:0 --api 127.0.0.1:0",
    "join TICKET --listen 127.0.0.1:0",
    "status",
    "local tales -p Once -n 4",
    "serve tales --layers 0-3",
    "infer tales -p Once --ticket TICKET",
    "chat tales --ticket TICKET",
    "pull tales",
    "list",
    "show tales",
    "rm nothing",
    "plan tales",
    "jobs",
    "benchmark --wan",
    "switch on",
    "page",
    "code",
    "stop",
    "logs",
    "service status",
    "demo --model tales",
    "config",
    "doctor",
    "model inspect tales",
    "model quality tales tales --windows 1",
    "model split tales OUT --nodes 2",
    "model tiny OUT",
    "ticket new",
    "workers",
    "key list",
)
# What answers without loading or asking anything: help, and refusals.
REFUSALS: Final = (
    "--help",
    "--version",
    "up --help",
    "chat --help",
    "local --help",
    "nosuch",
    "up --nosuch",
    "up nomodel",
    "join nothing",
    "local tales --nodes x",
    "serve tales --layers x",
    "infer",
    "plan nomodel",
    "status",
    "chat",
    "stop nothing",
    "model inspect nomodel",
    "key nosuch",
)


class Word(NamedTuple):
    """What came first, after how long, and the CPU seconds of the process until then."""

    wall_s: float
    cpu_s: float
    text: str


def first_word(command: str, home: Path) -> Word:
    """Run `manyhands COMMAND` until it says something. Raises TimeoutError after WAIT_S, RuntimeError if it says nothing."""
    ticket = Ticket.new("bench").encode()  # names no address
    words = [{TICKET: ticket, "OUT": str(home / "out")}.get(word, word) for word in command.split()]
    began = time.monotonic()
    pid, terminal = pty.fork()
    if pid == 0:
        os.environ.update(MANYHANDS_HOME=str(home), MANYHANDS_CONFIG="", MANYHANDS_API="http://127.0.0.1:9")
        os.execv(sys.executable, [sys.executable, "-m", "manyhands.cli", *words])
    try:
        if not select.select([terminal], [], [], WAIT_S)[0]:
            raise TimeoutError(f"manyhands {command} says nothing for {WAIT_S:.0f} s")
        wall_s, cpu_s = time.monotonic() - began, _cpu_s(pid)
        with contextlib.suppress(OSError):  # it has ended
            return Word(wall_s, cpu_s, os.read(terminal, 4096).decode("utf8", "replace"))
        raise RuntimeError(f"manyhands {command} ends without a word")
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        os.close(terminal)
        os.waitpid(pid, 0)


def _cpu_s(pid: int) -> float:
    """User and system time of a process, of itself alone; it may have ended and must not have been waited for."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure(commands: tuple[str, ...], reps: int) -> dict[str, dict[str, dict[str, float]]]:
    """Wall and CPU seconds of each command."""
    figures: dict[str, dict[str, dict[str, float]]] = {}
    for command in commands:
        with measuring(command):
            found = []
            for _ in range(reps):
                with tempfile.TemporaryDirectory(prefix="manyhands-word-") as home:
                    found.append(first_word(command, Path(home)))
        figures[command] = {
            "wall_s": spread([word.wall_s for word in found], 3),
            "cpu_s": spread([word.cpu_s for word in found], 3),
        }
    return figures


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--reps", type=int, default=3)
    reps = parser.parse_args().reps
    said, refused = measure(COMMANDS, reps), measure(REFUSALS, reps)
    slowest: dict[str, Any] = {}
    for name, figures in (("says", said), ("refuses", refused)):
        cpu_s, command = max((found["cpu_s"]["min"], each) for each, found in figures.items())
        slowest[name] = {"command": command, "cpu_s": {"min": cpu_s}, "wall_s": figures[command]["wall_s"]}
    holds = {
        "says_cpu_s": slowest["says"]["cpu_s"]["min"] <= SAYS_S,
        "refuses_cpu_s": slowest["refuses"]["cpu_s"]["min"] <= REFUSES_S,
    }
    told = {"slowest": slowest, "commands": said, "refusals": refused}
    return finish("first_word", told, {"says_cpu_s": SAYS_S, "refuses_cpu_s": REFUSES_S}, holds)


if __name__ == "__main__":
    sys.exit(main())
