"""The systemd unit of a node: from its command to the text of the file. Pure."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from manyhands.errors import BadRequest

NAME: Final = "manyhands.service"
LEAVE_S: Final = 20  # beside what the node itself waits for its sessions (drain_s)

_TEXT: Final = """\
# Written by `manyhands service install`; `manyhands service remove` takes it away.
[Unit]
Description=manyhands: a node that serves layers of a language model
StartLimitIntervalSec=0

[Service]
Type=exec
ExecStart={command}
WorkingDirectory={folder}
{environment}
# Its sessions are handed to other nodes before it leaves.
KillMode=mixed
TimeoutStopSec={stop_s}
Restart=on-failure
RestartSec=5
# Wrong options are not mended by another start.
RestartPreventExitStatus=2
NoNewPrivileges=yes

[Install]
WantedBy=default.target
"""


def unit_text(command: Sequence[str], folder: Path, environment: Mapping[str, str], drain_s: float) -> str:
    """The unit that runs `command` in `folder`. Raises BadRequest for text that no unit can hold."""
    variables = "\n".join(f"Environment={quoted(f'{name}={value}')}" for name, value in sorted(environment.items()))
    return _TEXT.format(
        command=_line(command),
        folder=_escaped(f"{folder}/"),  # so that a space or a backslash is not the last of the line
        environment=variables,
        stop_s=round(drain_s) + LEAVE_S,
    ).replace("\n\n# Its", "\n# Its")


def _line(command: Sequence[str]) -> str:
    """Words that no variable is put into: by "$$", which systemd does not read in the program's path, or by ":" (244 on)."""
    if "$" in command[0]:
        return ":" + " ".join(map(quoted, command))
    return " ".join(quoted(word).replace("$", "$$") for word in command)


def quoted(word: str) -> str:
    """One word as systemd reads it (systemd.syntax(7)): in double quotes unless it is plain."""
    if word and all((c.isalnum() and c.isascii()) or c in "-_./:=@,+" for c in word):
        return word
    return '"' + _escaped(word).replace("\\", "\\\\").replace('"', '\\"') + '"'


def _escaped(text: str) -> str:
    if not text.isprintable():
        raise BadRequest(f"{text!r:.80} has a control character, which no unit file can hold")
    return text.replace("%", "%%")
