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
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # children are reaped by the kernel
    import_ahead(owns_requests=True, is_member=True, has_api=True)
    pids: list[int] = []
    for line in sys.stdin:
        request = json.loads(line)
        pid = os.fork()
        if pid == 0:
            child(request)
        pids.append(pid)
        print(pid, flush=True)
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    with contextlib.suppress(ChildProcessError):  # no child is left: none writes into its home any more
        os.wait()


if __name__ == "__main__":
    main()
