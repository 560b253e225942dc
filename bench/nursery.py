"""A process that has imported everything and forks `manyhands` commands on request: a node then starts in a fraction of a
second instead of the seconds that imports take, so that a soak kills as often as it means to.

Reads JSON lines {"arguments": [...], "environment": {...}, "output": path} on stdin, answers each with the child's pid.
The end of stdin kills all children, and this process ends after the last of them. It starts no thread, so forking is safe;
children load their own models.
"""

import contextlib
import json
import os
import signal
import sys

import manyhands.cli
from manyhands.cli.ahead import import_ahead


def child(request: dict[str, object]) -> None:
    arguments, environment = request["arguments"], request["environment"]
    assert isinstance(arguments, list) and isinstance(environment, dict)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
    os.environ.update(environment)
    quiet = os.open(os.devnull, os.O_RDONLY)
    output = os.open(str(request["output"]), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    os.dup2(quiet, 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.argv = ["manyhands", *map(str, arguments)]
    try:
        manyhands.cli.main()
    finally:
        os._exit(1)


def main() -> None:
    pids: set[int] = set()  # of children that are not reaped: no other process has such an id

    def reap(*_: object) -> None:
        with contextlib.suppress(ChildProcessError):  # none is left
            while ended := os.waitpid(-1, os.WNOHANG)[0]:
                pids.discard(ended)

    signal.signal(signal.SIGCHLD, reap)
    import_ahead(owns_requests=True, is_member=True, has_api=True)
    for line in sys.stdin:
        request = json.loads(line)
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
        if (pid := os.fork()) == 0:
            child(request)
        pids.add(pid)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
        print(pid, flush=True)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    for _ in pids:
        os.wait()  # none writes into its home any more


if __name__ == "__main__":
    main()
