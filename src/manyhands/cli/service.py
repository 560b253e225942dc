"""`manyhands service`: a node that systemd starts with this user's session, and again after a crash."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Final

import typer

from manyhands.cli import options
from manyhands.cli.lines import fitted
from manyhands.cli.process import SECRETS
from manyhands.cli.unit import NAME, unit_text
from manyhands.config import home_from_env
from manyhands.errors import BadRequest, NotFound
from manyhands.files import this_folder

app = typer.Typer(no_args_is_help=True, help="Run a node as a service of systemd, for this user.")

SYSTEMCTL_S: Final = 60.0
COMMANDS: Final = ("up", "join")
PRINT: Final = "--print"
# Of the environment, what the node needs to be the one that was tried by hand; a secret stays out of the file.
KEPT: Final = re.compile(
    r"MANYHANDS_(?!TICKET$|API_KEY$|SWARM_TICKET$)\w+|HF_ENDPOINT|HF_HOME|HF_HUB_OFFLINE|XDG_CACHE_HOME"
)

Command = Annotated[
    list[str] | None,
    typer.Argument(metavar="up MODEL ... | join ...", help="What to run; default: join, this machine's swarm."),
]


@app.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
def install(
    command: Command = None,
    is_printed: Annotated[bool, typer.Option(PRINT, help="Print the unit; change nothing.")] = False,
) -> None:
    """Have systemd run `up MODEL` or `join`, now and at every login."""
    is_printed = is_printed or PRINT in (command or ())  # behind the command too, which has no such option
    words = _checked([word for word in command or () if word != PRINT] or ["join"])
    line = [sys.executable, "-P", "-m", "manyhands.cli", *words]
    text = unit_text(line, this_folder(), _environment(os.environ), options.settings().worker.drain_s)
    if is_printed:
        typer.echo(text, nl=False)
        return
    _check_manager()
    path = unit_path()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, "utf-8")
    except OSError as error:
        raise BadRequest(f"{path} cannot be written ({error.strerror}): fix its rights") from error
    _systemctl("daemon-reload")
    _systemctl("enable", NAME)
    _systemctl("restart", NAME)
    _say(f"{NAME} runs `manyhands {' '.join(words)}`, now and at every login ({path})")
    _say(f"what it says: journalctl --user -u {NAME.removesuffix('.service')} -f")
    if not _lingers():
        _say("it ends when you log out; to have it run from the start of the machine on: loginctl enable-linger")


@app.command()
def remove() -> None:
    """Stop the service and remove its unit. Its sessions are handed over first."""
    path = unit_path()
    if not path.exists():
        raise NotFound(f"there is no {path}: nothing to remove")
    _check_manager()
    _systemctl("disable", "--now", NAME)
    path.unlink()
    _systemctl("daemon-reload")
    typer.echo(f"{NAME} has stopped and is removed")


@app.command()
def status() -> None:
    """Whether the service is there and runs; exit code 1 if not."""
    path = unit_path()
    if not path.exists():
        _say("no service is installed: manyhands service install")
        raise typer.Exit(1)
    _check_manager()
    active = _ask("is-active", NAME) or "unknown"
    command = next((row for row in path.read_text("utf-8").splitlines() if row.startswith("ExecStart=")), "")
    _say(f"{NAME} is {active}, {_ask('is-enabled', NAME) or 'unknown'} ({path})")
    typer.echo(f"  {command.removeprefix('ExecStart=')}")
    if active != "active":
        _say(f"why: journalctl --user -u {NAME.removesuffix('.service')} -n 20")
        raise typer.Exit(1)


def _say(line: str) -> None:
    typer.echo(fitted(line, sys.stdout))


def unit_path() -> Path:
    """Where the unit of this user lies."""
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "systemd" / "user" / NAME


def _checked(words: Sequence[str]) -> list[str]:
    """`words` as given, if they are a command that can run without a terminal. Raises BadRequest, and as it does itself."""
    from manyhands.cli.commands import LazyCommands

    name, *rest = words
    if name not in COMMANDS:
        raise BadRequest(f"a service runs `up MODEL` or `join`, not {name!r:.40}: manyhands service install up MODEL")
    if any(re.search(SECRETS, word) for word in rest):
        raise BadRequest(
            "a unit file is no place for a ticket: run `manyhands join mh1...` once, then leave it out here"
        )
    given = LazyCommands()[name].make_context(f"manyhands {name}", list(rest)).params
    if given["detach"]:
        raise BadRequest("systemd runs it in the background: leave -d out")
    if name == "join" and not (home_from_env() / "swarm.ticket").exists() and not given["ticket"]:
        raise BadRequest(
            "this machine belongs to no swarm yet: manyhands service install up MODEL, or join one by hand"
        )
    return list(words)


def _environment(found: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in found.items() if KEPT.fullmatch(name) and not re.search(SECRETS, value)}


def _check_manager() -> None:
    """Raise BadRequest where no systemd listens to this user."""
    instead = "`manyhands up MODEL -d` needs no systemd, and `manyhands service install --print` prints the unit"
    if shutil.which("systemctl") is None:
        raise BadRequest(f"there is no systemd here: {instead}")
    found = _run("systemctl", "--user", "show-environment")
    if found.returncode != 0:
        why = found.stderr.strip().splitlines() or ["no answer"]
        raise BadRequest(f"no systemd of this user answers ({why[0]:.120}): {instead}")


def _systemctl(*words: str) -> None:
    """Raises BadRequest with what systemctl says."""
    found = _run("systemctl", "--user", *words)
    if found.returncode != 0:
        raise BadRequest(f"systemctl --user {' '.join(words)} failed: {found.stderr.strip()[:400]}")


def _ask(*words: str) -> str:
    return _run("systemctl", "--user", *words).stdout.strip()


def _lingers() -> bool:
    if shutil.which("loginctl") is None:
        return True  # nothing to advise
    return _run("loginctl", "show-user", "--property=Linger", "--value").stdout.strip() == "yes"


def _run(*words: str) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(words, capture_output=True, text=True, timeout=SYSTEMCTL_S)
    except subprocess.TimeoutExpired as error:
        raise BadRequest(f"{' '.join(words)} gave no answer within {SYSTEMCTL_S:g} s") from error
