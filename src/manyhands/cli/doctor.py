"""`manyhands doctor`: is this machine fit for a swarm, and if not, what to do. Looks, and changes nothing."""

import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path

import typer

from manyhands.cli import checks, options
from manyhands.cli.checks import Check
from manyhands.cli.client import call
from manyhands.cli.lines import fitted
from manyhands.config import home_from_env, physical_memory
from manyhands.config_file import Settings, read_settings
from manyhands.core import NodeId
from manyhands.errors import ManyhandsError
from manyhands.plain import one_line

SAID_AT = 16  # column at which the text of a check begins
_COLOURS = {"ok": "green", "warn": "yellow", "fail": "red"}


def doctor(as_json: options.Json = False) -> None:
    """Look at keys, ports, reachability, clock, disk, memory, device and model files. Exit code 1 if anything fails."""
    found = []
    for check in examine():
        found.append(check)
        if not as_json:
            _show(check)
    failed = sum(check.level == "fail" for check in found)
    if as_json:
        typer.echo(json.dumps({"ok": not failed, "checks": [asdict(check) for check in found]}))
    else:
        warned = sum(check.level == "warn" for check in found)
        typer.echo(f"\n{failed} failed, {warned} warned, {len(found) - failed - warned} fine")
    if failed:
        raise typer.Exit(1)


def examine() -> Iterator[Check]:
    """Every check, one after the other, quick ones first."""
    home = home_from_env()
    try:
        settings = options.settings()
    except ManyhandsError as error:
        yield checks.verdict("config", error)
        settings = read_settings({"MANYHANDS_HOME": os.devnull}, Path(os.devnull))  # go on with defaults
    else:
        yield from checks.check_config(settings)
    yield from checks.check_keys(home, settings)
    yield from checks.check_disk(home)
    yield from _machine()
    yield from _swarm(settings)
    yield from checks.check_models(home)
    yield from checks.check_iroh()
    yield from checks.check_engine()
    yield from checks.check_device(*_cores())


def _machine() -> Iterator[Check]:
    import resource

    from manyhands.resources import available_memory

    yield from checks.check_memory(available_memory(), physical_memory())
    yield from checks.check_files(resource.getrlimit(resource.RLIMIT_NOFILE))


def _swarm(settings: Settings) -> Iterator[Check]:
    from manyhands.member.home import list_running

    home = home_from_env()
    running = list_running(home)
    yield from checks.check_clock(home, time.time(), bool(running))
    yield from checks.check_ports(settings, running)
    yield from checks.check_running(running, partial(_view, settings.api.key))
    yield from checks.check_swarm(home, settings, _own_node(home, settings) - {one.node for one in running})


def _own_node(home: Path, settings: Settings) -> set[NodeId]:
    """The id of this machine's key, if it has one: its addresses are silent while it does not run."""
    from manyhands.swarm.identity import NodeKey

    path = Path(settings.node.key or home / "node.key")
    try:
        return {NodeKey.load_or_create(path).node_id} if path.exists() else set()
    except ManyhandsError:
        return set()  # check_keys says what is wrong with it


def _view(key: str, api: str) -> dict[str, object]:
    view: dict[str, object] = call(api, key, "GET", "/api/swarm")
    return view


def _cores() -> tuple[int, float]:
    from manyhands.resources import num_cores

    return num_cores(), os.getloadavg()[0]


def _show(check: Check) -> None:
    line = fitted(f"{check.level:<5}{check.name:<11}{one_line(check.said, 2000)}", sys.stdout, SAID_AT)
    typer.secho(line[:5], fg=_COLOURS[check.level], nl=False)
    typer.echo(line[5:])
    if check.remedy:
        typer.echo(fitted(f"{'':<{SAID_AT}}-> {one_line(check.remedy, 2000)}", sys.stdout, 3))
